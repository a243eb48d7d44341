"""Cells behind a router: names, plan, and what the engines' counters prove."""

from __future__ import annotations

import pytest

from harness.errors import ProfileError, UsageError
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge, judge_cell
from harness.judging.exposure import exposure_of
from harness.profiles.cells import CellName, all_cells, excluded_cells, make_plan, select_cells
from harness.profiles.load import load_profile
from harness.workload.prepare import prepare
from tests.support.builders import changed_profile, history, lookups, observation, view, with_cells

LENGTHS = (32, 40, 96)


@pytest.mark.parametrize("name", ["pd-eagle3", "pd-eagle3-router", "single-none"])
def test_name_of_a_cell_is_read_back(name):
    assert CellName.of(name).id == name


def test_routed_cell_is_compared_with_the_single_engine_asked_directly():
    assert CellName.of("pd-mtp-router").single == "single-mtp"


def test_shipped_profile_asks_pairs_both_ways_on_the_same_engines():
    profile = load_profile("cpu")
    (group,) = make_plan(profile, select_cells(profile, ["*-dflash*"])).groups
    assert [c.id for c in group.cells] == ["pd-dflash", "pd-dflash-router", "single-dflash"]
    assert set(excluded_cells(profile)) == {f"single-{m.kind}-router" for m in profile.methods}


def test_router_is_sent_only_what_it_can_do():
    works = {w.cell.id: w for w in prepare("cpu", ["pd-eagle3*"]).works}
    assert set(works["pd-eagle3-router"].planned) == {"concurrent", "apis"}
    routed, direct = ({i.prompt.id for i in works[c].items} for c in ("pd-eagle3-router", "pd-eagle3"))
    assert routed < direct


def test_baselines_are_not_recorded_through_a_router(tmp_path):
    path = changed_profile(tmp_path, lambda raw: raw.update(exclude=[]))
    assert "single-mtp-router" in {c.id for c in all_cells(load_profile(path))}
    assert not any(w.cell.routed for w in prepare(path, ["single-*"], record=True).works)


def test_exclusion_that_matches_nothing_is_refused(tmp_path):
    path = changed_profile(tmp_path, lambda raw: raw["exclude"].append({"cells": "pd-medusa-*", "reason": "gone"}))
    with pytest.raises(UsageError, match="exclude 'pd-medusa-\\*': expected a pattern that matches a cell"):
        prepare(path, [])


def test_exclusion_of_everything_is_refused(tmp_path):
    path = changed_profile(tmp_path, lambda raw: raw.update(exclude=[{"cells": "*", "reason": "holidays"}]))
    with pytest.raises(UsageError, match="excludes all of its cells"):
        prepare(path, [])


@pytest.mark.parametrize("routes", [["router", "router"], ["proxy"], []])
def test_bad_routes_are_refused(tmp_path, routes):
    with pytest.raises(ProfileError, match="routes"):
        load_profile(changed_profile(tmp_path, lambda raw: raw.update(routes=routes)))


# --- judging ----------------------------------------------------------------------------------------------------------


def routed(tokens, asked=True, **changes):
    """One request to the router, as the engines count it."""
    o = observation("pd-eagle3", tokens)
    counted = dict.fromkeys(("prompt_tokens", "prefix_queries", "prompt_tokens_local_compute"), float(tokens))
    once = dict.fromkeys(("finished_requests", "generation_tokens", "engine_steps"), 1.0)
    prefill = {**counted, **once, "queue_seconds": 0.01, "inference_seconds": 0.1} if asked else {}
    return o.model_copy(
        update={
            "cell": "pd-eagle3-router",
            "sequence": tokens,
            "legs": (o.final.model_copy(update=changes),),
            "shared_counters": {"prefill": prefill},
        }
    )


def run_of(*observations):
    return with_cells(history(list(observations), cells=["pd-eagle3-router"]), route="router")


def checks(*observations):
    judged = judge_cell(view(run_of(*observations), "pd-eagle3-router", lookups(list(LENGTHS))))
    return {r.check: r for r in judged.results}, judged


def by_itself(tokens):
    """What D counts when it prefills the prompt itself."""
    return {"finished_requests": 1.0, "prompt_tokens_local_compute": float(tokens), "generation_tokens": 4.0}


def test_hand_off_by_the_router_is_proven_by_both_engines():
    found, judged = checks(*(routed(n) for n in LENGTHS))
    assert judged.verdict is Verdict.PASS
    assert found["transfer"].judged == len(LENGTHS) and found["transfer"].figures.bytes > 0


@pytest.mark.parametrize("asked", [True, False])
def test_router_that_hides_a_failed_hand_off_is_found(asked):
    found, judged = checks(routed(32), routed(40), routed(96, asked, counters=by_itself(96)))
    assert judged.verdict is Verdict.REGRESSION
    (finding,) = found["transfer"].findings
    assert (finding.prompt_id, finding.damage) == ("p96", "routing")
    assert ("P was never asked" in finding.message) is not asked
    assert found["tokens-baseline"].verdict is Verdict.PASS
    assert judged.diagnosis.text.startswith("the router does not hand off in 1 of 3 requests")
    assert judged.diagnosis.location is None


def test_what_is_not_handed_off_is_no_wrong_kv_and_no_exposure_of_hand_offs():
    quiet = routed(40)
    expired = {"prefill": {**quiet.shared_counters["prefill"], "nixl_expired": 1.0}}
    requests = [
        routed(32, False, counters=by_itself(32)),
        quiet.model_copy(update={"shared_counters": expired}),
        routed(96),
    ]
    found, judged = checks(*requests)
    assert {f.damage for f in found["transfer"].findings} == {"routing", "target-kv"}
    assert judged.diagnosis.text.startswith("the router does not hand off in 1 of 3 requests")
    exposure = exposure_of(judge(run_of(*requests), lookups(list(LENGTHS))))
    assert (exposure.answers, exposure.handed_off) == (3, 2)
    lost = exposure_of(judge(run_of(requests[0]), lookups(list(LENGTHS))))
    assert lost.handed_off == 0 and "1 answer checked token by token, none after a hand-off" in lost.sentence


@pytest.mark.parametrize(
    "counters",
    [
        {},
        {"finished_requests": 1.0, "prompt_tokens_local_compute": 0.0},
        {"finished_requests": 1.0, "nixl_bytes": 9.0, "nixl_descriptors": 1.0, "prompt_tokens_external_kv_transfer": 5},
    ],
)
def test_missing_proof_behind_a_router_is_unknown(counters):
    found, _ = checks(routed(96, counters=counters))
    assert found["transfer"].verdict is Verdict.UNKNOWN


def test_prefix_hit_of_a_cold_prompt_on_p_is_seen_behind_a_router():
    hit = routed(96)
    hit.shared_counters["prefill"]["prefix_hits"] = 32.0
    found, _ = checks(hit)
    assert found["cold-stays-cold"].verdict is Verdict.REGRESSION
    assert "prefill engine" in found["cold-stays-cold"].findings[0].message


def test_lease_that_ended_behind_a_router_counts_for_each_request():
    ended = [routed(n) for n in (32, 96)]
    for o in ended:
        o.shared_counters["prefill"]["nixl_expired"] = 1.0
    found, _ = checks(*ended)
    assert {f.prompt_id for f in found["transfer"].findings} == {"p32", "p96"}


def test_direct_and_routed_cells_are_judged_side_by_side():
    direct = [observation("pd-eagle3", n, sequence=i) for i, n in enumerate(LENGTHS)]
    single = [observation("single-eagle3", n, sequence=i) for i, n in enumerate(LENGTHS)]
    made = history([*direct, *single, *(routed(n) for n in LENGTHS)])
    made = with_cells(with_cells(made, route="client"), "pd-eagle3-router", route="router")
    judgement = judge(made, lookups(list(LENGTHS)))
    assert judgement.by_cell() == dict.fromkeys(("pd-eagle3", "single-eagle3", "pd-eagle3-router"), Verdict.PASS)
    compared = {c.cell for c in judgement.cells for r in c.results if r.check == "acceptance-single"}
    assert compared == {"pd-eagle3", "pd-eagle3-router"}
