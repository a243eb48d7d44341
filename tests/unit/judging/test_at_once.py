"""What is judged of cold prompts that were asked together, and of the answers that show whether they may be."""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks.counters import counters_agree
from harness.judging.checks.drafting import drafts_happened
from harness.judging.checks.registry import judge_cell
from harness.judging.checks.responses import complete
from harness.judging.checks.transfer import transfer
from harness.judging.evidence import Evidence, FoundOfCells, judging_of
from harness.judging.findings import CheckResult
from harness.judging.notices import notices_of
from harness.observed.at_once import crowd_proof
from harness.profiles.model import Judging
from harness.profiles.scenarios import AT_ONCE
from tests.support.builders import (
    change_final,
    counted,
    garbled,
    history,
    lookups,
    observation,
    speculation,
    view,
    with_answers,
    with_profile,
)

LENGTHS = (31, 33, 40, 64)
OTHERS = (50, 70)


def shared(members: list) -> list:
    """The requests with their counters known for all of them together."""
    grown: dict[str, dict[str, float]] = {}
    for o in map(counted, members):
        for leg in o.legs:
            of = grown.setdefault(leg.role, {})
            for name, value in leg.counters.items():
                of[name] = of.get(name, 0.0) + value
    bare = [
        o.model_copy(update={"legs": tuple(x.model_copy(update={"counters": {}}) for x in o.legs)}) for o in members
    ]
    return [o.model_copy(update={"shared_counters": grown, "concurrent": len(members)}) for o in bare]


def cell(name: str = "pd-eagle3", crowd=lambda members: members, proof=lambda members: members, way=shared) -> list:
    alone = [observation(name, n, sequence=i) for i, n in enumerate(LENGTHS)]
    beside = [
        o.model_copy(update={"scenario": AT_ONCE, "part": f"r{i}", "sequence": 4 + i}) for i, o in enumerate(alone)
    ]
    others = [observation(name, n, sequence=8 + i, stage=1) for i, n in enumerate(OTHERS)]
    if way is shared:
        others = shared(others)
    return [*alone, *proof(shared(beside)), *crowd(others)]


def made(observations: list, at_once: int = 4):
    return with_profile(history(observations), workload={"at_once": at_once, "max_tokens": 192})


def judge(check, observations: list, scenario: str = "cold"):
    return check(view(made(observations), "pd-eagle3", lookups([*LENGTHS, *OTHERS]), scenario))


CHECKS = [complete, counters_agree, transfer, drafts_happened]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("scenario", ["cold", AT_ONCE])
def test_healthy_engines_pass(check, scenario):
    found = judge(check, cell(), scenario)
    assert found.verdict is Verdict.PASS, found.findings


def test_prompts_that_were_asked_one_by_one_are_as_planned_all_the_same():
    whole = made(cell())
    one_by_one = with_answers(whole, [*whole.observations[:8], *map(counted, cell(way=list)[8:])])
    found = complete(view(one_by_one, "pd-eagle3", lookups([*LENGTHS, *OTHERS])))
    assert found.verdict is Verdict.PASS, found.findings


def test_crowds_on_engines_that_answer_otherwise_in_them_prove_nothing():
    worse = lambda members: [change_final(members[0], output_ids=(1, 2)), *members[1:]]  # noqa: E731
    found = judge(complete, cell(proof=worse))
    assert found.verdict is Verdict.UNKNOWN
    assert "expected cold prompts one by one, found 2 requests sent together" in found.findings[0].message


def grown(role: str, **changes: float):
    def change(members: list) -> list:
        told = {**members[0].shared_counters}
        told[role] = {**told[role], **{k: told[role].get(k, 0) + v for k, v in changes.items()}}
        return [o.model_copy(update={"shared_counters": told}) for o in members]

    return change


def test_what_engines_counted_for_a_crowd_is_what_they_answered():
    assert judge(counters_agree, cell(crowd=grown("decode", generation_tokens=1))).verdict is Verdict.UNKNOWN
    assert judge(counters_agree, cell(crowd=grown("decode", accepted_tokens=-1))).verdict is Verdict.UNKNOWN
    assert judge(counters_agree, cell(crowd=grown("prefill", finished_requests=1))).verdict is Verdict.UNKNOWN


def test_a_crowd_moves_as_many_bytes_as_its_prompts_alone():
    block = cell()[0].legs[-1].counters["nixl_bytes"]
    found = judge(transfer, cell(crowd=grown("decode", nixl_bytes=-block)))
    assert found.verdict is Verdict.UNKNOWN
    assert "cold prompts sent together, by those sent alone" in found.findings[0].message
    assert judge(transfer, cell(crowd=grown("decode", nixl_bytes=-1))).verdict is Verdict.UNKNOWN


def test_a_cold_prompt_has_all_its_drafts_in_a_crowd_too():
    fewer = lambda members: [change_final(members[0], speculation=few), *members[1:]]  # noqa: E731
    few = speculation((0, 3, 3, 3)).model_copy(update={"per_step_drafted": (3, 1, 3, 3), "num_drafted": 10})
    assert judge(drafts_happened, cell(crowd=fewer)).verdict is Verdict.UNKNOWN


def test_notices_say_which_way_it_went():
    def said(observations: list) -> list[str]:
        the_history = made(observations)
        return [
            n
            for n in notices_of(Evidence(the_history, {}, judging_of(the_history), FoundOfCells()))
            if "cold prompts" in n
        ]

    assert said(cell()) == [
        "cold prompts were asked together in pd-eagle3, where the first ones, up to 4, had the same answers alone and "
        "together"
    ]
    worse = lambda members: [change_final(members[0], finish_reason="length"), *members[1:]]  # noqa: E731
    (words,) = said(cell(proof=worse, way=list))
    assert words.startswith("pd-eagle3: cold prompts are asked one by one, since together 1 of 4 differ; p31: ended by")
    assert said([o for o in cell() if o.scenario == "cold" and o.concurrent == 1]) == []


def test_cells_without_a_proof_have_none():
    assert crowd_proof(view(made(cell()), "pd-eagle3", {})).holds
    assert crowd_proof(view(history([observation("pd-eagle3")]), "pd-eagle3", {})) is None


def test_in_the_normal_tier_the_proof_is_not_judged():
    the_history = made(cell())
    bitwise = judging_of(the_history)
    normal = bitwise.model_copy(update={"tier": "normal"})
    assert [v.scenario for v in Evidence(the_history, {}, bitwise, FoundOfCells()).views()] == ["cold", AT_ONCE]
    assert [v.scenario for v in Evidence(the_history, {}, normal, FoundOfCells()).views()] == ["cold"]


def test_each_cell_has_a_crowd_of_its_own_and_is_compared_with_cold_answers_of_others():
    pair, single, plain = (cell(name) for name in ("pd-eagle3", "single-eagle3", "single-none"))
    # The others asked other prompts together.
    others = [o for o in (*single, *plain) if o.scenario == "cold"]
    the_history = made([*pair, *others])
    found = judge_run(Evidence(the_history, lookups([*LENGTHS, *OTHERS]), Judging(), FoundOfCells()), "pd-eagle3")
    assert {"tokens-reference", "tokens-single", "logprobs-single", "finish-reason"} <= found.keys()
    assert {name: r.findings for name, r in found.items() if r.verdict is not Verdict.PASS} == {}
    wrong = [garbled(o) if o.scenario == AT_ONCE and o.sequence == 4 else o for o in pair]
    found = judge_run(Evidence(made([*wrong, *others]), {}, Judging(), FoundOfCells()), "pd-eagle3")
    assert found["tokens-reference"].verdict is Verdict.REGRESSION


def judge_run(evidence: Evidence, name: str) -> dict[str, CheckResult]:
    record = evidence.history.cell(name)
    assert record is not None
    return {r.check: r for r in judge_cell(evidence.view(record, AT_ONCE)).results}
