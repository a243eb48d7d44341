"""Scenarios as data: scripts, what is impossible, and the proof that a state occurred."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from harness.errors import ProfileError, UsageError
from harness.history.records import Streamed
from harness.history.verdict import Verdict
from harness.judging.checks import preconditions, responses, transfer
from harness.judging.checks import tokens as tokens_checks
from harness.judging.checks.drafting import acceptance_single
from harness.judging.checks.registry import judge
from harness.observed import acceptance
from harness.profiles.cells import Cell
from harness.profiles.load import load_profile
from harness.profiles.scenarios import (
    Abandon,
    Crowd,
    GivenBack,
    HandOffMistakes,
    PrefixHit,
    Trace,
    TraceRequest,
    stop_at,
)
from harness.prompts import probe_task
from harness.prompts.lengths import held_blocks
from harness.prompts.model import load_prompts
from harness.scenarios.kinds import KINDS
from harness.scenarios.possible import shared_blocks
from harness.workload.cells import RECORDING, cell_work, choose_scenarios, cold_prompts
from harness.workload.features import feature_fields, for_prefill
from harness.workload.prepare import prepare
from harness.workload.rows import planned_rows
from harness.workload.scripts import drawn, require_possible, scripts
from tests.support.builders import (
    LAYERS,
    change_final,
    changed_profile,
    engine,
    extending,
    history,
    lookups,
    observation,
    speculation,
    view,
    with_answers,
    with_cells,
    with_prefill,
    with_run,
)

PROFILE = load_profile("cpu")
PROMPTS = load_prompts(PROFILE.workload.prompts)
KNOWN = {p.id: p for p in PROMPTS.prompts}


def scenario(kind: str, **where):
    return next(s for s in PROFILE.scenarios if s.kind == kind and all(getattr(s, k) == v for k, v in where.items()))


# --- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", PROFILE.scenarios, ids=lambda s: s.id)
def test_every_shipped_scenario_has_scripts_where_it_makes_sense(config):
    for topology in ("pd", "single"):
        found = scripts(config, KNOWN, topology)
        assert bool(found) == (topology in config.topologies)
        for script in found:
            keys = [(s.prompt.id, s.part) for s in script.sends]
            assert len(set(keys)) == len(keys)


def test_donor_and_subject_share_a_cache_and_nobody_else_does():
    (first, *_) = scripts(scenario("prefix-hit", where="decode"), KNOWN, "pd")
    donor, subject = first.sends
    assert donor.group == subject.group
    assert (donor.route, subject.route) == ("local", "cell")
    (run, *_) = scripts(scenario("concurrent"), KNOWN, "single")
    groups = [s.group for s in run.stages[0].sends]
    assert len(set(groups)) == len(groups)


def test_a_continuation_is_the_first_turn_and_the_beginning_of_its_answer():
    (config,) = (s for s in load_profile("cpu-full").scenarios if s.kind == "continuation")
    assert {KNOWN[p].tokens % 32 for p in config.continued} == set(range(32))
    for run in scripts(config, KNOWN, "pd"):
        donor, subject = run.sends
        sent_back = subject.prompt.ids[donor.prompt.tokens :]
        assert subject.prompt.ids == (*donor.prompt.ids, *donor.prompt.expected[: len(sent_back)])
        assert subject.prompt.expected == donor.prompt.expected[len(sent_back) :]
        assert donor.max_tokens == len(sent_back) + 1 and donor.group == subject.group


def test_a_next_turn_that_goes_on_otherwise_repeats_the_whole_answer():
    (config,) = (s for s in load_profile("cpu-back").scenarios if s.id == "read-back-past")
    for run in scripts(config.model_copy(update={"continued": ("next-172", "next-175")}), KNOWN, "pd"):
        donor, subject = run.sends
        turn = (*donor.prompt.ids, *donor.prompt.expected)
        repeated = donor.prompt.tokens + donor.max_tokens
        assert subject.prompt.ids[:repeated] == turn[:repeated]
        assert subject.prompt.ids[repeated] != turn[repeated]
        assert (donor.read_back, subject.read_back) == (False, True)
    assert scripts(config, KNOWN, "single") == []


def test_the_full_profile_has_every_scenario_of_the_plain_one():
    full = {s.id: s for s in load_profile("cpu-full").scenarios}
    plain = [s.id for s in PROFILE.scenarios]
    assert [i for i in full if i in plain] == plain and len(full) > len(plain)
    assert [s.id for s in PROFILE.scenarios if full[s.id] != s] == [
        "prefix-hit",
        "prefix-hit-on-p",
        "continuation",
        "recovery",
        "appended-token",
        "hand-off-mistakes",
        "features",
        "parameters",
        "apis",
    ]


def test_recovery_repeats_the_parameters_of_a_hand_off_to_d_alone():
    (run,) = scripts(scenario("recovery"), KNOWN, "pd")
    before, subject, again = run.sends
    assert [s.route for s in (before, subject, again)] == ["cell", "former-p", "cell"]
    assert before.group != subject.group == again.group
    work = cell_work(PROFILE, PROMPTS, Cell("pd", PROFILE.methods[0]), choose_scenarios(PROFILE, ["recovery"]))
    assert [row.legs for row in planned_rows(work, 192)] == [("prefill", "decode"), ("decode",), ("prefill", "decode")]


def test_a_restarted_p_hands_off_once_more_with_nothing_cached():
    (run, _) = scripts(next(s for s in load_profile("cpu-full").scenarios if s.id == "restarted-p"), KNOWN, "pd")
    sends = run.sends
    assert [(s.part, s.route, s.restart) for s in sends] == [
        ("before", "cell", False), ("subject", "former-p", True), ("again", "cell", False), ("after", "cell", False)
    ]  # fmt: skip
    assert sends[3].group not in {s.group for s in sends[:3]}


def test_two_p_hand_over_each_prompt_by_turns():
    (run,) = scripts(next(s for s in load_profile("cpu-full").scenarios if s.id == "second-p"), KNOWN, "pd")
    sends = run.sends
    assert [s.by_second_p for s in sends] == [False, True] * 3 == [s.part.startswith("second") for s in sends]
    assert {s.prompt.id for s in sends[0::2]} == {s.prompt.id for s in sends[1::2]}
    assert all(one.prompt != other.prompt for one, other in zip(sends[0::2], sends[1::2], strict=True))
    assert len({s.group for s in sends}) == len(sends), "D has nothing of them cached"


MISTAKES = [s for s in load_profile("cpu-full").scenarios if s.kind == "hand-off-mistakes"]


@pytest.mark.parametrize("config", [*MISTAKES, scenario("hand-off-mistakes")], ids=lambda s: s.id)
def test_a_mistaken_hand_off_is_given_up_in_time_and_an_ordinary_one_follows(config):
    assert config.topologies == ("pd",)
    for run in scripts(config, KNOWN, "pd"):
        *before, after = run.sends
        made = [s for s in before if s.mistake]
        assert made and {s.abandon.after_s for s in made} == {config.patience_s}
        assert (after.route, after.mistake, after.abandon) == ("cell", None, None)
        assert after.group not in {s.group for s in before}
        for send in made:
            earlier = before[: before.index(send)]
            assert send.route == "cell" or send.reference in {s.part for s in earlier if s.route == "cell"}
            assert send.group not in {s.group for s in earlier}, "D has nothing of it cached"
        work = cell_work(PROFILE, PROMPTS, Cell("pd", PROFILE.methods[0]), choose_scenarios(PROFILE, []))
        assert {row.legs for row in planned_rows(work, 192) if row.route == "reference"} == {("decode",)}


def test_each_parameter_is_lost_of_a_hand_off_of_its_own():
    (run,) = scripts(next(s for s in MISTAKES if s.id == "lost-source"), KNOWN, "pd")
    lost = [s for s in run.sends if s.lost]
    assert [s.mistake for s in lost] == [f"lost {s.lost}" for s in lost] and len({s.reference for s in lost}) == 5


def test_what_cannot_be_mistaken_is_refused():
    raw = {"id": "m", "kind": "hand-off-mistakes", "prompts": ["copy-096-19"]}
    for changes, words in (
        ({}, "expected mistakes, or parameters that get lost"),
        ({"mistakes": ["used-late"]}, "to fill P's pool"),
        ({"mistakes": ["shared"], "fill": ["long-210"]}, "to fill P's pool"),
    ):
        with pytest.raises(ValidationError, match=words):
            HandOffMistakes.model_validate({**raw, **changes})


def test_the_token_that_d_gets_in_addition_is_the_answer_to_the_others():
    (run,) = scripts(scenario("appended-token"), KNOWN, "pd")
    donor, subject = run.sends
    turn = subject.prompt
    assert (subject.appended, donor.route, donor.group) == (True, "local", subject.group)
    assert turn.ids[-1] == donor.prompt.expected[turn.tokens - donor.prompt.tokens - 1]


def test_each_feature_is_asked_for_by_itself_and_a_stop_ends_both_ways_at_the_same_token():
    (run,) = scripts(scenario("features"), KNOWN, "pd")
    sends = {s.feature: s for s in run.sends}
    assert len(run.stages) == len(sends) == 5
    known = sends["grammar"].prompt.expected
    fields = {f: feature_fields(f, known, lambda ids: f"{len(ids)} words") for f in sends}
    assert fields["grammar"] == {"structured_outputs": {"choice": [f"{len(known) - 1} words"]}}
    for feature, at in (("stop-token", len(known) // 2), ("stop-at-once", 0)):
        assert fields[feature] == {"stop_token_ids": [known[at]]}
        assert sends[feature].max_tokens == at + 1
    # D computes the whole prompt, whatever P has.
    assert [f for f, s in sends.items() if s.route == "local"] == ["prompt-logprobs"]


@pytest.mark.parametrize("answered", range(4, 12))
def test_a_stop_string_is_complete_with_its_token_and_not_before(answered):
    (run,) = scripts(scenario("features"), KNOWN, "pd")
    assert run.sends[0].prompt.expected is not None
    # Words that repeat, and run into each other.
    known = [n % 3 + 1 for n in range(answered - 1)] + [0]

    def text_of(ids):
        return "".join("_abc"[i] for i in ids)

    later, string = feature_fields("stop-string", known, text_of)["stop"]
    last = stop_at("stop-string", answered)
    for at, wanted in ((last, string), (last + 1, later)):
        upto = text_of(known[: at + 1])
        assert upto.index(wanted) + len(wanted) == len(upto)
    assert len(string) > 1


def test_p_is_not_asked_for_more_tokens_than_it_gives():
    (run,) = scripts(scenario("features", id="min-tokens"), KNOWN, "pd")
    (send,) = run.stages[0].sends
    fields = feature_fields(send.feature, send.prompt.expected, str)
    assert fields == {"min_tokens": len(send.prompt.expected) - 1} and for_prefill(fields) == {}


def test_late_pull_fills_p_between_the_legs():
    (run,) = scripts(scenario("late-pull"), KNOWN, "pd")
    (send,) = run.stages[0].sends
    assert {s.route for s in send.between} == {"prefill"}
    assert run.requests == 1 + len(send.between)


def test_recording_asks_every_prompt_and_a_run_only_the_cold_ones():
    cell = Cell("single", PROFILE.methods[0])
    assert len(cell_work(PROFILE, PROMPTS, cell, RECORDING).items) == len(PROMPTS.prompts)
    work = cell_work(PROFILE, PROMPTS, cell, choose_scenarios(PROFILE, ["cold"]))
    assert {i.prompt.use for i in work.items} == {"cold"}
    assert not work.scripts


def test_a_router_is_sent_fewer_prompts_of_every_stratum():
    method = PROFILE.methods[0]
    client, router = (cell_work(PROFILE, PROMPTS, Cell("pd", method, route)) for route in ("client", "router"))
    by_ids = {work.cell.route: {i.prompt.id for i in work.items if i.form == "ids"} for work in (client, router)}
    assert by_ids["client"] == {p.id for p in PROMPTS.cold} and len(by_ids["router"]) == 10
    assert set(Counter(p.stratum for p in PROMPTS.cold if p.id in by_ids["router"]).values()) == {2}
    assert sum(i.form == "text" for i in router.items) == PROFILE.workload.text_prompts


def test_the_quick_form_has_every_method_and_stratum():
    whole, quick = prepare("cpu", []), prepare("cpu-quick", [])
    assert {c.id for c in quick.plan.cells} == {c.id for c in whole.plan.cells if not c.routed}
    assert quick.prompts.sha256 == whole.prompts.sha256 and quick.requests < whole.requests / 2
    for work in quick.works:
        assert {i.prompt.stratum for i in work.items} == {p.stratum for p in PROMPTS.cold}
        assert set(work.planned) == {"prefix-hit", "concurrent"}


def test_the_smaller_of_two_limits_holds_behind_a_router():
    workload = PROFILE.workload.model_copy(update={"per_stratum": 1, "routed_per_stratum": 2})
    assert len(cold_prompts(PROMPTS.cold, workload)) == len(cold_prompts(PROMPTS.cold, workload, routed=True)) == 5


def test_unknown_scenario_and_one_without_a_place_are_refused():
    with pytest.raises(UsageError, match="there is no such scenario"):
        prepare("cpu", [], ["warm"])
    with pytest.raises(UsageError, match="need a prefill engine"):
        prepare("cpu", ["single-*"], ["late-pull"])


# --- what cannot occur -----------------------------------------------------------------------------------------------


def change_scenario(kind: str, /, **changes):
    def change(raw):
        next(s for s in raw["scenarios"] if s["kind"] == kind).update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r["engine"].update(kv_blocks=64), "scenario pressure cannot occur"),
        (lambda r: r["engine"].update(kv_blocks=16), "scenario concurrent cannot occur"),
        (lambda r: r["engine"].update(max_num_batched_tokens=256), "scenario chunked-prefill cannot occur"),
        (
            lambda r: r["engine"].update(max_num_seqs=3),
            "scenario concurrent cannot occur: expected engine.max_num_seqs",
        ),
        (
            change_scenario("pressure", local=["long-224", "copy-181-36"]),
            "pressure cannot occur: expected engine.max_num_seqs of at least 5",
        ),
        (change_scenario("pressure", local=[]), "fewer than the 22 blocks"),
        (change_scenario("pressure", load=["long-222", "long-223", "long-224"], local=[]), "load moved to `local`"),
        (
            lambda r: r.update(topologies=["pd"], exclude=[]),
            "parameters cannot occur: it needs the plain single engine",
        ),
        (change_scenario("refill", fill=["copy-117-22"]), "scenario refill cannot occur"),
        (change_scenario("late-pull", fill=["copy-117-22"]), "scenario late-pull cannot occur"),
        (
            change_scenario("prefix-hit", pairs=[{"donor": "long-222", "subject": "long-223"}]),
            "differ in their first block of 32 tokens",
        ),
        (change_scenario("shared-block", second="mix-first"), "share its first block with `bridge`"),
        (change_scenario("continuation", continued=["copy-181-36"]), "copy-117-22 and the beginning of its answer"),
        (change_scenario("continuation", donor="turn-161", continued=["turn-170"]), "to repeat at least 225 tokens"),
        (
            change_scenario("continuation", read_back=True),
            "engine.kv_connector_extra_config with bidirectional_kv_xfer",
        ),
        (
            change_scenario("same-step", pairs=[{"donor": "long-222", "subject": "long-223"}]),
            "scenario same-step cannot occur: donor",
        ),
        (
            lambda r: r["engine"].update(kv_load_failure_policy="fail"),
            "scenario recovery cannot occur: expected engine.kv_load_failure_policy: recompute",
        ),
        (
            lambda r: r.update(routes=["client"], exclude=[]) or r["engine"].update(kv_transfer="push"),
            "scenario recovery cannot occur: expected engine.kv_transfer: pull",
        ),
        (
            change_scenario("hand-off-mistakes", siblings=5),
            "hand-off-mistakes cannot occur: expected engine.max_num_seqs of at least 5",
        ),
        (
            change_scenario("hand-off-mistakes", mistakes=["used-late"], fill=["copy-117-22"]),
            "scenario hand-off-mistakes cannot occur: expected a KV pool",
        ),
        (change_scenario("appended-token", prompts=["copy-117-22"]), "the last token of copy-117-22 to be the answer"),
        (change_scenario("appended-token", donor="copy-030-03"), "to have 2 whole blocks in common with turn-170"),
        (change_scenario("apis", prompts=["long-210"]), "found 210 tokens of long-210; name a shorter one"),
        (change_scenario("apis", prompts=["turn-161"]), "renders to turn-161 on any day, found none"),
        (change_scenario("refill", prompts=["copy-999"]), "'copy-999', which is not in it"),
        (change_scenario("trace", stages=[[{"prompt": "copy-999"}]]), "'copy-999', which is not in it"),
        (change_scenario("trace", stages=[[{"prompt": "copy-030-03"}]]), "expected a request with abandon.after_steps"),
    ],
)
def test_impossible_scenarios_are_refused_before_anything_starts(tmp_path, change, sentence):
    with pytest.raises(UsageError, match=sentence):
        prepare(changed_profile(tmp_path, change), [])


@pytest.mark.parametrize(
    "change",
    [
        change_scenario("refill", id="cold"),
        change_scenario("refill", id="pressure"),
        change_scenario("refill", kind="refil"),
        change_scenario("refill", unknown=1),
        change_scenario("pressure", load=[]),
        change_scenario("trace", stages=[[{"prompt": "copy-030-03", "abandon": {}}]]),
        change_scenario("trace", stages=[[{"prompt": "copy-030-03", "abandon": {"after_s": 1, "after_steps": 1}}]]),
        change_scenario("trace", stages=[[{"prompt": "copy-030-03", "abandon": {"leg": "prefill", "after_s": 0}}]]),
    ],
)
def test_damaged_scenarios_are_refused(tmp_path, change):
    with pytest.raises(ProfileError):
        prepare(changed_profile(tmp_path, change), [])


def test_shared_blocks_of_the_shipped_prompts():
    assert shared_blocks(KNOWN["fork-138-3"], KNOWN["copy-138-28"], 32) == 3
    assert shared_blocks(KNOWN["mix-first"], KNOWN["mix-second"], 32) == 0
    assert KNOWN["mix-first"].ids[32:96] == KNOWN["mix-second"].ids[32:96]


# --- proof that a state occurred -------------------------------------------------------------------------------------


def in_scenario(cell: str, name: str, part: str, tokens: int = 96, counters=None, **changes):
    o = observation(cell, tokens, scenario=name, part=part, **changes)
    return change_final(o, counters={"finished_requests": 1.0, **(counters or {})})


def proof(observations: list, raw: dict, cell: str = "single-eagle3", engines=None, vllm: str = "0.32.0"):
    the_history = history(observations, scenarios=[raw], engines=engines or (engine(cell, cell.split("-")[0]),))
    the_history = with_run(the_history, versions={**the_history.run.versions, "vllm": vllm})
    return preconditions.state_occurred(view(the_history, cell, scenario=raw["id"]))


HIT = {"id": "hit", "kind": "prefix-hit", "where": "decode", "pairs": [{"donor": "p96", "subject": "p96"}]}


@pytest.mark.parametrize(
    ("cell", "hits", "vllm", "verdict"),
    [
        ("single-eagle3", 32, "0.32.0", Verdict.PASS),
        ("single-eagle3", 0, "0.32.0", Verdict.UNKNOWN),
        ("single-eagle3", 64, "0.32.0", Verdict.REGRESSION),
        ("single-none", 64, "0.32.0", Verdict.PASS),
        ("single-none", 32, "0.32.0", Verdict.UNKNOWN),
        # Later versions may reuse the block that drafters recompute.
        ("single-eagle3", 64, "0.32.1.dev7+g1a2b3c4", Verdict.PASS),
        ("single-eagle3", 32, "0.33.0", Verdict.PASS),
        ("single-eagle3", 96, "0.33.0", Verdict.REGRESSION),
    ],
)
def test_prefix_hit_must_be_as_large_as_the_common_prefix_allows(cell, hits, vllm, verdict):
    assert proof(hit_of(cell, hits), HIT, cell, vllm=vllm).verdict is verdict


def hit_of(cell: str, hits: int) -> list:
    donor = in_scenario(cell, "hit", "donor")
    return [donor, in_scenario(cell, "hit", "subject", counters={"prefix_hits": float(hits)})]


@pytest.mark.parametrize(
    ("plain_hits", "hits", "verdict"),
    [
        (64, 0, Verdict.REGRESSION),
        # The plain engine finds nothing either, so that the blocks may be gone, or caching may be off.
        (0, 0, Verdict.UNKNOWN),
        (None, 0, Verdict.UNKNOWN),
        (64, 32, Verdict.PASS),
    ],
)
def test_speculation_that_loses_the_prefix_cache_is_a_regression(plain_hits, hits, verdict):
    made = []
    for cell, found in (("single-none", plain_hits), ("single-eagle3", hits)):
        made += [] if found is None else hit_of(cell, found)
    found = proof(made, HIT, "single-eagle3")
    assert found.verdict is verdict
    if verdict is Verdict.REGRESSION:
        (finding,) = found.findings
        assert finding.damage == "reuse-lost" and "while single-none of this run" in finding.message


RECOVERY = {"id": "gone", "kind": "recovery", "prompts": ["p96"]}


@pytest.mark.parametrize(
    ("counted", "hits", "verdict"),
    [
        ({"prompt_tokens_local_compute": 96.0, "nixl_failed_transfers": 1.0}, 32, Verdict.PASS),
        ({"prompt_tokens_local_compute": 1.0, "nixl_failed_transfers": 1.0}, 32, Verdict.UNKNOWN),
        ({"prompt_tokens_local_compute": 96.0}, 32, Verdict.UNKNOWN),
        ({"prompt_tokens_local_compute": 96.0, "nixl_failed_transfers": 1.0}, 0, Verdict.UNKNOWN),
        ({"prompt_tokens_local_compute": 96.0, "nixl_failed_transfers": 1.0}, 96, Verdict.REGRESSION),
    ],
)
def test_recovery_means_that_d_computed_what_it_could_not_fetch(counted, hits, verdict):
    subject = in_scenario("pd-eagle3", "gone", "subject", counters=counted, route="former-p")
    subject = subject.model_copy(update={"legs": subject.legs[1:]})
    again = in_scenario("pd-eagle3", "gone", "again", counters={"prefix_hits": float(hits)}, sequence=1)
    assert proof([subject, again], RECOVERY, "pd-eagle3").verdict is verdict


@pytest.mark.parametrize(("second", "verdict"), [("q", Verdict.PASS), ("p", Verdict.UNKNOWN)])
def test_a_restarted_p_is_another_engine(second, verdict):
    counted = {"prompt_tokens_local_compute": 96.0, "nixl_failed_transfers": 1.0}
    subject = in_scenario("pd-eagle3", "gone", "subject", counters=counted, route="former-p", sequence=1)
    subject = subject.model_copy(update={"legs": subject.legs[1:]})
    before, again = in_scenario("pd-eagle3", "gone", "before"), in_scenario("pd-eagle3", "gone", "again", sequence=2)
    rows = [_of_engine(before, "p", 0.0), subject, _of_engine(again, second, 32.0)]
    assert proof(rows, RECOVERY | {"restart": True}, "pd-eagle3").verdict is verdict


@pytest.mark.parametrize(
    ("second", "read", "verdict"),
    [("q", 96.0, Verdict.PASS), ("p", 96.0, Verdict.UNKNOWN), ("q", 64.0, Verdict.UNKNOWN)],
)
def test_second_p_is_another_engine_that_d_reads_from(second, read, verdict):
    config = {"id": "two", "kind": "second-prefill", "prompts": ["p96", "p95"]}
    counters = {"prompt_tokens_external_kv_transfer": read}
    rows = [
        _of_engine(in_scenario("pd-none", "two", part, counters=counters, sequence=n), name, 0.0)
        for n, (part, name) in enumerate([("first0", "p"), ("second0", second), ("first1", "p"), ("second1", second)])
    ]
    assert proof(rows, config, "pd-none").verdict is verdict


def _of_engine(o, name: str, hits: float):
    params = {**o.legs[0].kv_transfer_params, "remote_engine_id": name}
    counters = {**o.legs[1].counters, "prefix_hits": hits}
    return change_final(with_prefill(o, kv_transfer_params=params), counters=counters)


APPENDED = {"id": "more", "kind": "appended-token", "prompts": ["p96"]}


def of_p(o, tokens: int, said: int):
    """The observation with an answer of P to so many tokens of the prompt."""
    prefill = o.legs[0]
    blocks = [list(range(1, -(-tokens // 32) + 1))]
    return with_prefill(
        o,
        echoed_ids=o.sent_ids[:tokens],
        usage_prompt_tokens=tokens,
        output_ids=(said,),
        kv_transfer_params={**prefill.kv_transfer_params, "remote_num_tokens": tokens, "remote_block_ids": blocks},
        counters=prefill.counters | {"prompt_tokens": tokens, "prefix_queries": tokens},
    )


@pytest.mark.parametrize(
    ("tokens", "said", "failing"),
    [
        (95, None, set()),
        # P was asked for the whole prompt, or gave another token than the one that D was sent.
        (96, None, {"echoed-prompt", "transfer"}),
        (95, 7, {"prefill-token"}),
    ],
)
def test_p_is_judged_by_the_prompt_without_its_own_answer(tokens, said, failing):
    o = observation("pd-none", 96, scenario="more", part="subject")
    o = of_p(o, tokens, o.sent_ids[-1] if said is None else said)
    the_view = view(history([o], scenarios=[APPENDED]), "pd-none", scenario="more")
    checks = (responses.echoed_prompt, responses.response_invariants, transfer.transfer, tokens_checks.prefill_token)
    assert {c.check for c in (check(the_view) for check in checks) if c.verdict is not Verdict.PASS} == failing


@pytest.mark.parametrize(
    ("pulled", "verdict", "words"),
    [
        (1, Verdict.PASS, None),
        (2, Verdict.REGRESSION, "expected D to pull the 1 of P's 3 blocks that it did not have cached, found 2"),
        (0.5, Verdict.UNKNOWN, "expected NIXL to move 1 blocks"),
    ],
)
def test_d_pulls_the_blocks_that_it_does_not_have_cached_and_no_others(pulled, verdict, words):
    size = LAYERS["none"] * 32768.0
    cold = observation("pd-none", 96)
    o = of_p(observation("pd-none", 97, scenario="more", part="subject", sequence=1), 96, 5)
    counters = {"nixl_bytes": pulled * size, "nixl_descriptors": 3.0, "prefix_hits": 64.0}
    o = change_final(o, counters=o.final.counters | counters | {"prompt_tokens_external_kv_transfer": 33.0})
    result = transfer.transfer(view(history([cold, o], scenarios=[APPENDED]), "pd-none", scenario="more"))
    assert result.verdict is verdict
    assert words is None or any(words in f.message for f in result.findings)


NEXT_TURN = {"id": "next", "kind": "continuation", "donor": "p40", "continued": ["p70"]}


@pytest.mark.parametrize(
    ("cell", "sent_back", "hits", "verdict"),
    [
        ("single-none", 30, 64, Verdict.PASS),
        ("single-none", 30, 32, Verdict.UNKNOWN),
        ("single-none", 30, 96, Verdict.REGRESSION),
        # With speculation the last matched block is computed again, and none of the answer is left.
        ("single-eagle3", 30, 32, Verdict.UNKNOWN),
        # The first turn ended before the block was full.
        ("single-none", 10, 32, Verdict.UNKNOWN),
    ],
)
def test_a_continuation_must_hit_a_block_of_the_answer(cell, sent_back, hits, verdict):
    donor = in_scenario(cell, "next", "donor", 40)
    ids = (*donor.sent_ids, *donor.final.output_ids[:sent_back])
    subject = in_scenario(cell, "next", "subject", 40, {"prefix_hits": float(hits)}, sequence=1)
    assert proof([donor, subject.model_copy(update={"sent_ids": ids})], NEXT_TURN, cell).verdict is verdict


@pytest.mark.parametrize(("read", "verdict"), [(8.0, Verdict.UNKNOWN), (9.0, Verdict.PASS)])
def test_p_must_read_tokens_of_the_answer_from_d(read, verdict):
    donor = in_scenario("pd-none", "next", "donor", 40)
    ids = (*donor.sent_ids, *donor.final.output_ids[:30])
    subject = in_scenario("pd-none", "next", "subject", 40, {"prefix_hits": 64.0}, sequence=1)
    subject = with_prefill(
        subject.model_copy(update={"sent_ids": ids}), counters={"prefix_hits": 32.0, "external_hits": read}
    )
    result = proof([donor, subject], {**NEXT_TURN, "read_back": True}, "pd-none")
    assert result.verdict is verdict, result.findings


@pytest.mark.parametrize(
    ("hits", "read", "verdict"),
    [
        (32.0, 37.0, Verdict.PASS),
        # The last token of the answer before has no KV on D: one that is missing is another one.
        (32.0, 36.0, Verdict.UNKNOWN),
        (32.0, 8.0, Verdict.UNKNOWN),
        (0.0, 37.0, Verdict.UNKNOWN),
    ],
)
def test_p_that_answers_by_itself_must_compute_the_rest_alone(hits, read, verdict):
    donor = in_scenario("pd-none", "next", "donor", 40)
    donor = change_final(donor, output_ids=donor.final.output_ids[:30])
    ids = (*donor.sent_ids, *donor.final.output_ids)
    asked = in_scenario("single-none", "next", "subject", 40, {"prefix_hits": hits, "external_hits": read}, sequence=1)
    leg = asked.final.model_copy(update={"role": "prefill"})
    subject = asked.model_copy(update={"cell": "pd-none", "sent_ids": ids, "route": "read-back", "legs": (leg,)})
    assert subject.final.role == "prefill"
    result = proof([donor, subject], {**NEXT_TURN, "read_back": True, "on_p": True}, "pd-none")
    assert result.verdict is verdict, result.findings


def test_p_alone_is_asked_for_the_next_turn_where_it_answers_by_itself():
    (config,) = (s for s in load_profile("cpu-back").scenarios if s.id == "read-back-on-p")
    for run in scripts(config, KNOWN, "pd"):
        donor, subject = run.sends
        assert (donor.route, donor.read_back, subject.route, subject.read_back) == ("cell", False, "read-back", True)
        assert subject.max_tokens is None and len(subject.prompt.expected) > 16


SAME_STEP = {"id": "same", "kind": "same-step", "pairs": [{"donor": "p96", "subject": "p96"}]}


@pytest.mark.parametrize(
    ("hits", "counted", "verdict"),
    [
        # One step of 128 tokens at least; its bound did not grow, so that it is not among the counters.
        (64.0, {"engine_steps": 1.0}, Verdict.PASS),
        (64.0, {"engine_steps": 5.0, "engine_steps_le_128": 4.0}, Verdict.PASS),
        (64.0, {"engine_steps": 4.0, "engine_steps_le_128": 4.0}, Verdict.UNKNOWN),
        (64.0, {}, Verdict.UNKNOWN),
        (0.0, {"engine_steps": 1.0}, Verdict.UNKNOWN),
        (96.0, {"engine_steps": 1.0}, Verdict.REGRESSION),
    ],
)
def test_a_hit_on_what_is_computed_in_the_same_step_must_be_counted(hits, counted, verdict):
    shared = {"single": {"prefix_hits": hits, **counted}}
    made = [
        in_scenario("single-none", "same", part, concurrent=2, shared_counters=shared) for part in ("donor", "subject")
    ]
    engines = (engine("single-none", "single", names=("engine_steps", "engine_steps_le_64", "engine_steps_le_128")),)
    assert proof(made, SAME_STEP, "single-none", engines).verdict is verdict


ADAPTED = {"id": "lora", "kind": "adapters", "prompts": ["p96"], "adapters": ["odd-words", "even-words"]}
TURNS = ("target", "first-adapter", "second-adapter")


def by_adapters(cell: str, hits: dict[str, float], answers: dict[str, tuple[int, ...]] | None = None):
    """Return what a cell says: each of the target and two adapters alone, and again."""
    made = []
    names = {"target": "", "first-adapter": "odd-words", "second-adapter": "even-words"}
    for number, part in enumerate([*TURNS, *(f"again-{turn}" for turn in TURNS)]):
        which = part.removeprefix("again-")
        o = in_scenario(cell, "lora", part, 96, {"prefix_hits": hits.get(part, 0.0)}, sequence=number)
        known = tuple(probe_task.expected_output(list(o.sent_ids), names[which]))
        o = change_final(o, output_ids=(answers or {}).get(part, known))
        made.append(
            o.model_copy(update={"feature": None if which == "target" else which, "known_answer": known, "part": part})
        )
    return made


FOUND = {"again-target": 64.0, "again-first-adapter": 64.0, "again-second-adapter": 64.0}


@pytest.mark.parametrize(
    ("hits", "answers", "verdict", "words"),
    [
        (FOUND, {}, Verdict.PASS, ""),
        # What the target computed.
        (FOUND | {"first-adapter": 64.0}, {}, Verdict.REGRESSION, "first-adapter has computed none of it yet"),
        ({**FOUND, "again-second-adapter": 0.0}, {}, Verdict.UNKNOWN, "second-adapter computed it before"),
        (FOUND, {"second-adapter": (9, 9, 9)}, Verdict.REGRESSION, "expected the known answer of second-adapter"),
    ],
)
def test_each_adapter_must_find_its_own_blocks_and_no_other_ones(hits, answers, verdict, words):
    result = proof(by_adapters("single-none", hits, answers), ADAPTED, "single-none")
    assert result.verdict is verdict, result.findings
    assert (not words and not result.findings) or any(words in f.message for f in result.findings)


def test_an_adapter_that_changes_nothing_proves_nothing():
    made = by_adapters("single-none", FOUND)
    made = [change_final(o, output_ids=made[0].final.output_ids) for o in made]
    result = proof([o.model_copy(update={"known_answer": None}) for o in made], ADAPTED, "single-none")
    assert result.verdict is Verdict.UNKNOWN
    assert any("first-adapter changed nothing" in f.message for f in result.findings)


@pytest.mark.parametrize(
    ("hits", "steps", "verdict"),
    [(0.0, 1.0, Verdict.PASS), (32.0, 1.0, Verdict.REGRESSION), (0.0, 999.0, Verdict.UNKNOWN)],
)
def test_a_crowd_of_adapters_shares_no_block(hits, steps, verdict):
    shared = {"single": {"prefix_hits": hits, "engine_steps": steps}}
    made = [
        o.model_copy(update={"concurrent": 3, "shared_counters": shared}) for o in by_adapters("single-none", {})[:3]
    ]
    assert proof(made, {**ADAPTED, "together": True}, "single-none").verdict is verdict


def test_adapters_are_loaded_under_a_name_that_is_taken_and_one_that_is_a_salt():
    config, together = load_profile("cpu-lora").scenarios
    ((crowd,),) = (script.stages for script in scripts(together, KNOWN, "pd"))
    assert [s.adapter for s in crowd.sends] == ["", "odd-words", "even-words"] and crowd.hold == "first"
    (script,) = scripts(config, KNOWN, "pd")
    sends = {send.part: send for send in script.sends}
    assert [(s.adapter, s.group) for s in map(sends.get, ("loaded", "loaded-over"))] == [
        ("odd-words", "b"),
        ("even-words", "b"),
    ]
    assert sends["salted"].group == sends["named-as-salt"].group and not sends["salted"].adapter
    assert sends["named-as-salt"].loads and sends["named-as-salt"].unsalted
    words = KNOWN["copy-117-22"].expected[:-1]
    assert sends["first-adapter"].prompt.expected[:-1] == words[::2]
    assert sends["second-adapter"].prompt.expected[:-1] == words[1::2]
    assert sends["target"].prompt == KNOWN["copy-117-22"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapters": ("odd-words", "no-such")}, "expected the adapter no-such among engine.adapters"),
        ({"prompts": ("copy-062-10",)}, "expected prompts of at least 65 tokens"),
    ],
)
def test_adapters_that_are_not_there_or_find_nothing_are_refused(changes, words):
    profile = load_profile("cpu-lora")
    config, _ = profile.scenarios
    changed = profile.model_copy(update={"scenarios": (config.model_copy(update=changes),)})
    with pytest.raises(UsageError, match=words):
        require_possible(changed, KNOWN)


TRACE = {"id": "trace", "kind": "trace", "stages": [[{"prompt": "p96"}]]}


def given_up(generated: float, answered: bool = False):
    shared = {"single": {"generation_tokens": generated}}
    o = in_scenario("single-none", "trace", "r0-0", shared_counters=shared, abandon=Abandon(after_steps=2))
    return o if answered else o.model_copy(update={"legs": ()})


@pytest.mark.parametrize(
    ("proves", "made", "verdict"),
    [
        ("abandoned", given_up(5.0), Verdict.PASS),
        ("abandoned", given_up(0.0), Verdict.UNKNOWN),
        ("abandoned", given_up(5.0, answered=True), Verdict.UNKNOWN),
        ("cached", in_scenario("single-none", "trace", "r0-0", counters={"prefix_hits": 32.0}), Verdict.PASS),
        ("cached", in_scenario("single-none", "trace", "r0-0"), Verdict.UNKNOWN),
        ("preempted", in_scenario("single-none", "trace", "r0-0", counters={"preemptions": 1.0}), Verdict.PASS),
        ("preempted", in_scenario("single-none", "trace", "r0-0"), Verdict.UNKNOWN),
    ],
)
def test_a_trace_proves_what_it_says(proves, made, verdict):
    assert proof([made], {**TRACE, "proves": [proves]}, "single-none").verdict is verdict
    assert proof([made], TRACE, "single-none").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("proves", "steps", "tokens", "asked_at", "verdict"),
    [
        ("batched", 5.0, 97, 1.0, Verdict.PASS),
        ("batched", 9e9, 97, 1.0, Verdict.UNKNOWN),
        ("chunked", 5.0, 97, 1.0, Verdict.PASS),
        # Two prompts that fill a step exactly, and one that came when the engine had been released.
        ("chunked", 5.0, 96, 1.0, Verdict.UNKNOWN),
        ("chunked", 5.0, 97, 3.0, Verdict.UNKNOWN),
    ],
)
def test_a_stage_of_a_trace_runs_together_and_in_chunks(proves, steps, tokens, asked_at, verdict):
    rest = {"concurrent": 2, "held_until": 2.0, "shared_counters": {"single": {"engine_steps": steps}}}
    raw = {**TRACE, "stages": [[{"prompt": "p96"}] * 2], "held": True, "proves": [proves]}
    made = [
        in_scenario("single-none", "trace", "r0-0", asked_at=0.5, **rest),
        in_scenario("single-none", "trace", "r0-1", tokens, asked_at=asked_at, **rest),
    ]
    assert proof(made, raw, "single-none", (engine("single-none", "single"),)).verdict is verdict


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"proves": ("batched",)}, "several requests"), ({"proves": ("chunked",), "stages": "two"}, "held: true")],
)
def test_a_trace_cannot_prove_what_its_stages_do_not_do(changes, words):
    stages = [[{"prompt": "copy-096-19"}] * (2 if "stages" in changes else 1)]
    trace = Trace.model_validate({**TRACE, **changes, "stages": stages})
    assert words in KINDS["trace"].impossible(trace, PROFILE, KNOWN)


def test_a_trace_may_hold_the_engine_that_answers():
    stage = [{"prompt": "long-210"}] * 3 + [{"prompt": "copy-181-36", "feature": "regex"}]
    raw = {"id": "t", "kind": "trace", "stages": [stage]}
    for held, hold in ((False, None), (True, "first"), ("answering", "answering")):
        trace = Trace.model_validate({**raw, "held": held})
        assert [s.hold for s in scripts(trace, KNOWN, "pd")[0].stages] == [hold]
        assert KINDS["trace"].impossible(trace, PROFILE, KNOWN) is None
    # P keeps for D what D, which is held, has not read: 28 blocks here.
    wider = Trace.model_validate({**raw, "held": "answering", "stages": [[{"prompt": "long-210"}] * 4]})
    assert "at least 29 blocks, which P keeps for D" in KINDS["trace"].impossible(wider, PROFILE, KNOWN)
    local = Trace.model_validate({**raw, "held": "answering", "stages": [[{"prompt": "long-210", "to": "local"}] * 4]})
    assert KINDS["trace"].impossible(local, PROFILE, KNOWN) is None


PD_TRACE = {
    "id": "trace",
    "kind": "trace",
    "stages": [
        [{"prompt": "copy-096-19"}],
        [{"prompt": "copy-096-19", "parameters_of": [0, 0]}],
        [{"prompt": "copy-042-07"}],
        [{"prompt": "copy-096-19", "parameters_of": [0, 0]}] * 2,
        [{"prompt": "copy-042-07", "parameters_of": [2, 0], "lost": "remote_host"}],
        [{"prompt": "copy-042-07", "p_tokens": 3}],
        [{"prompt": "copy-042-07", "parameters_of": [2, 0]}],
        [{"prompt": "copy-042-07"}],
        [{"prompt": "copy-042-07", "parameters_of": [7, 0]}] * 2,
    ],
}


def test_mistaken_hand_offs_of_a_trace_say_what_was_done():
    config = Trace.model_validate(PD_TRACE)
    known = {p.id: p for p in load_prompts(load_profile("cpu").workload.prompts).prompts}
    (script,) = scripts(config, known, "pd")
    assert not scripts(config, known, "single")
    assert [(s.part, s.mistake, s.route, s.reference, s.p_tokens) for s in script.sends] == [
        ("r0-0", None, "cell", "", 1),
        ("r1-0", "used-twice", "reference", "r0-0", 1),
        ("r2-0", None, "cell", "", 1),
        ("r3-0", "used-late", "reference", "r0-0", 1),
        ("r3-1", "used-late", "reference", "r0-0", 1),
        ("r4-0", "lost remote_host", "reference", "r2-0", 1),
        ("r5-0", "more-tokens", "cell", "", 3),
        ("r6-0", "used-late", "reference", "r2-0", 1),
        ("r7-0", None, "cell", "", 1),
        ("r8-0", "shared", "reference", "r7-0", 1),
        ("r8-1", "shared", "reference", "r7-0", 1),
    ]
    assert all((s.abandon is not None) == (s.mistake is not None) for s in script.sends)
    assert [s.lost for s in script.sends if s.lost] == ["remote_host"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"feature": "echo", "api": "completion-stream"}, "echo needs a whole completion by ids"),
        ({"feature": "logprobs-1", "api": "chat"}, "logprobs-1 needs a whole completion by ids"),
        ({"api": "chat", "abandon": {"after_steps": 2}}, "api excludes abandon"),
        ({"lost": "remote_host"}, "lost needs parameters_of"),
        ({"p_tokens": 3, "to": "local"}, "a mistaken hand-off"),
        ({"parameters_of": [0, 0], "feature": "cap-2"}, "a mistaken hand-off"),
    ],
)
def test_what_cannot_be_asked_together_is_refused(request_, words):
    with pytest.raises(ValidationError, match=words):
        TraceRequest.model_validate({"prompt": "p96", **request_})


@pytest.mark.parametrize("at", [[1, 0], [0, 1], [0, 3], [5, 0]])
def test_parameters_are_those_of_an_earlier_hand_off(tmp_path, at):
    stages = [
        [{"prompt": "copy-096-19"}, {"prompt": "copy-096-19", "to": "local"}],
        [{"prompt": "copy-096-19", "parameters_of": at}],
    ]
    source = extending(tmp_path, more_scenarios=[{"id": "again", "kind": "trace", "stages": stages}])
    with pytest.raises(UsageError, match=r"expected an ordinary hand-off of an earlier stage behind parameters_of"):
        prepare(source, [])


def test_what_concerns_the_cell_is_judged_once_without_cold_prompts():
    other = {**TRACE, "id": "other"}
    made = [in_scenario("single-none", name, "r0-0", sequence=i) for i, name in enumerate(("trace", "other"))]
    judged = judge(history(made, scenarios=[TRACE, other]), lookups([96]))
    assert [c.scenario for c in judged.cells if any(r.check == "pool-returned" for r in c.results)] == ["trace"]


@pytest.mark.parametrize(
    ("stages", "step", "slack"),
    [
        ([[{"prompt": "p96"}]], 192, 0.0),
        ([[{"prompt": "p96"}]], 64, 0.1),
        ([[{"prompt": "p96"}, {"prompt": "p96"}]], 192, 0.1),
    ],
)
def test_drafts_of_a_trace_are_compared_exactly_where_prompts_are_chunked_as_ever(stages, step, slack):
    engines = (engine("single-eagle3", "single").model_copy(update={"step_tokens": step}),)
    made = history(
        [in_scenario("single-eagle3", "trace", "r0-0")], scenarios=[{**TRACE, "stages": stages}], engines=engines
    )
    assert acceptance.acceptance_slack(view(made, "single-eagle3", scenario="trace")) == slack


@pytest.mark.parametrize(("preemptions", "verdict"), [(4, Verdict.PASS), (2, Verdict.REGRESSION)])
def test_a_preempted_request_takes_steps_without_drafts(preemptions, verdict):
    """Four steps fewer than alone, whose tokens prefills gave."""
    alone, resumed = (0, 0, 0, 0, 0, 3, 3), (0, 3, 3)
    output = tuple(range(100, 114))
    shared = {"shared_counters": {"decode": {"preemptions": float(preemptions)}}, "concurrent": 2}
    made = [
        change_final(
            in_scenario(cell, "crowd", "r0", **rest), output_ids=output, speculation=speculation(padding + accepted)
        )
        for cell, padding, accepted, rest in (
            ("single-eagle3", (), alone, {"concurrent": 2}),
            ("pd-eagle3", (0,), resumed, shared),
        )
    ]
    cell = view(history(made, scenarios=[CROWD.model_dump(mode="json")]), "pd-eagle3", scenario="crowd")
    assert acceptance_single(cell).verdict is verdict


def test_a_request_that_was_given_up_is_no_answer():
    made = history([given_up(5.0), in_scenario("single-none", "trace", "r1-0", stage=1, sequence=1)], scenarios=[TRACE])
    judged = judge(made, lookups([96]))
    assert judged.verdict is Verdict.PASS, [f.message for f in judged.findings]
    wrong = change_final(given_up(5.0, answered=True), output_ids=(9, 9), usage_completion_tokens=2)
    assert not view(history([wrong], scenarios=[TRACE]), "single-none", scenario="trace").answered()


def test_a_trace_sends_its_requests_as_written():
    raw = {
        **TRACE,
        "stages": [
            [{"prompt": "copy-096-19", "cache": "a", "abandon": {"after_s": 0}}],
            [{"prompt": "copy-096-19", "cache": "a"}, {"prompt": "copy-030-03", "delay_s": 0.1, "to": "local"}],
        ],
    }
    trace = Trace.model_validate(raw)
    assert trace.topologies == ("pd",)
    (script,) = scripts(trace, KNOWN, "pd")
    (first,), (second, third) = (stage.sends for stage in script.stages)
    assert first.group == second.group != third.group
    assert (first.abandon.unasked, second.abandon, third.after_s, third.route) == (True, None, 0.1, "local")
    assert [s.part for s in (first, second, third)] == ["r0-0", "r1-0", "r1-1"]


def test_a_request_of_a_trace_waits_for_an_earlier_one_of_its_stage():
    waiting = {"prompt": "copy-030-03", "after": 0}
    changed = {**waiting, "feature": "stop-token"}
    trace = Trace.model_validate({**TRACE, "stages": [[{"prompt": "copy-096-19"}, waiting, changed]]})
    ((stage,),) = (script.stages for script in scripts(trace, KNOWN, "pd"))
    assert [send.after for send in stage.sends] == [(), ("r0-0",), ("r0-0",)]
    for stages in ([[waiting]], [[{"prompt": "copy-096-19"}, {**waiting, "after": 1}]]):
        with pytest.raises(ValidationError, match="to be the number of an earlier request of its stage"):
            Trace.model_validate({**TRACE, "stages": stages})


REFILL = {"id": "refill", "kind": "refill", "prompts": ["p96"], "fill": ["p65"]}


@pytest.mark.parametrize(
    ("computed", "hits", "verdict"),
    [(992.0, 0.0, Verdict.PASS), (65.0, 0.0, Verdict.UNKNOWN), (992.0, 64.0, Verdict.REGRESSION)],
)
def test_refill_must_use_the_whole_pool_and_leave_no_hit(computed, hits, verdict):
    made = [
        in_scenario("single-none", "refill", "before"),
        in_scenario("single-none", "refill", "fill0", 65, {"prompt_tokens_local_compute": computed}),
        in_scenario("single-none", "refill", "subject", counters={"prefix_hits": hits}),
    ]
    assert proof(made, REFILL, "single-none").verdict is verdict


GIVEN_BACK = {"id": "back", "kind": "given-back", "holder": "p96", "beside": "p30", "fill": ["p64", "p65"]}


@pytest.mark.parametrize(
    ("fill_end", "fill_tokens", "hits", "pool", "verdict"),
    [
        # Two kinds of layers: 192 tokens are 12 whole blocks, and 3 + 2 of the 14 usable ones are the long request's.
        (0.5, 192, 0.0, 15, Verdict.PASS),
        (1.5, 192, 0.0, 15, Verdict.UNKNOWN),
        (0.5, 64, 0.0, 15, Verdict.UNKNOWN),
        # Whole blocks alone count: the last one of a prompt is taken again first.
        (0.5, 159, 0.0, 15, Verdict.UNKNOWN),
        (0.5, 192, 0.0, None, Verdict.UNKNOWN),
        # What a window left was still there.
        (0.5, 192, 64.0, 15, Verdict.UNKNOWN),
    ],
)
def test_blocks_that_a_window_leaves_must_be_taken_before_they_are_read_again(
    fill_end, fill_tokens, hits, pool, verdict
):
    def made(part, tokens, end, **counters):
        o = in_scenario("single-none", "back", part, tokens, counters, started_at=0.0)
        return change_final(o, seconds=end)

    parts = [
        made("holder", 96, 1.0),
        made("beside", 30, 0.2),
        made("fill0", fill_tokens, fill_end),
        made("again", 96, 1.0, prefix_hits=hits),
    ]
    engines = (engine("single-none", "single", kv_blocks=pool),)
    the_history = with_cells(history(parts, scenarios=[GIVEN_BACK], engines=engines), windows=(None, 48))
    assert preconditions.state_occurred(view(the_history, "single-none", scenario="back")).verdict is verdict


def test_blocks_are_given_back_by_windows_and_states_alone():
    config = GivenBack.model_validate(GIVEN_BACK | {"holder": "copy-157-30", "beside": "copy-030-03"})
    kind = KINDS["given-back"]
    assert "full attention" in kind.impossible(config.model_copy(update={"fill": ("long-224",)}), PROFILE, KNOWN)
    windowed = load_profile("cpu-layouts")
    assert "at most" in kind.impossible(config.model_copy(update={"fill": ("copy-064-12",)}), windowed, KNOWN)
    short = config.model_copy(update={"holder": "copy-064-12", "fill": ("long-224",)})
    assert "at least 80 tokens" in kind.impossible(short, windowed, KNOWN)
    (shipped,) = (s for s in windowed.scenarios if s.kind == "given-back")
    assert kind.impossible(shipped, windowed, KNOWN) is None
    first, *_ = scripts(shipped, KNOWN, "pd")
    holder, beside, *fill = first.stages[0].sends
    assert {s.after for s in fill} == {(beside.part,)} and {s.route for s in fill} == {"local"}
    assert len({s.group for s in first.stages[0].sends}) == 5 and first.stages[1].sends[0].group == holder.group


def test_pool_of_unknown_size_proves_nothing():
    made = [in_scenario("single-none", "refill", p) for p in ("before", "fill0", "subject")]
    engines = (engine("single-none", "single", kv_blocks=None),)
    assert proof(made, REFILL, "single-none", engines).verdict is Verdict.UNKNOWN


LATE = {"id": "late", "kind": "late-pull", "prompts": ["p96"], "fill": ["p65"]}


@pytest.mark.parametrize(("computed", "verdict"), [(992.0, Verdict.PASS), (65.0, Verdict.UNKNOWN)])
def test_a_pull_is_late_when_p_has_used_its_whole_pool(computed, verdict):
    counters = {"prompt_tokens_local_compute": computed}
    fill = with_prefill(in_scenario("pd-none", "late", "fill0", 65), counters=counters)
    engines = (engine("pd-none", "prefill"), engine("pd-none", "decode"))
    assert proof([in_scenario("pd-none", "late", "subject"), fill], LATE, "pd-none", engines).verdict is verdict


LOST = {"id": "lost", "kind": "hand-off-mistakes", "prompts": ["p96"], "lost": ["tp_size"]}


@pytest.mark.parametrize(("given", "verdict"), [({"tp_size": 1}, Verdict.PASS), ({"other": 1}, Verdict.UNKNOWN)])
def test_a_parameter_gets_lost_that_was_there(given, verdict):
    asked = with_prefill(in_scenario("pd-none", "lost", "asked-lost-tp-size"), kv_transfer_params=given)
    lost = in_scenario("pd-none", "lost", "lost-tp-size", mistake="lost tp_size", route="reference")
    assert proof([asked, lost], LOST, "pd-none").verdict is verdict


USED = {**LOST, "id": "used", "lost": [], "mistakes": ["used-late"], "fill": ["p65"]}


@pytest.mark.parametrize(("computed", "verdict"), [(992.0, Verdict.PASS), (65.0, Verdict.UNKNOWN)])
def test_a_reference_is_used_late_when_p_has_used_its_whole_pool(computed, verdict):
    counters = {"prompt_tokens_local_compute": computed}
    fill = with_prefill(in_scenario("pd-none", "used", "fill0", 65), counters=counters)
    engines = (engine("pd-none", "prefill"), engine("pd-none", "decode"))
    late = in_scenario("pd-none", "used", "used-late", mistake="used-late", route="reference")
    assert proof([fill, late], USED, "pd-none", engines).verdict is verdict


SHARED = {"id": "shared", "kind": "shared-block", "first": "p96", "bridge": "p65", "second": "p40"}


@pytest.mark.parametrize(
    ("again", "subject", "verdict"),
    [
        (64.0, 32.0, Verdict.PASS),
        (0.0, 32.0, Verdict.UNKNOWN),
        (64.0, 0.0, Verdict.UNKNOWN),
        # More than the bridge has in common with it: a block that hangs on what another prompt began with.
        (64.0, 64.0, Verdict.REGRESSION),
    ],
)
def test_a_shared_block_is_found_behind_its_own_beginning_alone(again, subject, verdict):
    found = {"donor": (96, 0.0), "again": (96, again), "bridge": (65, 0.0), "subject": (40, subject)}
    made = [
        in_scenario("single-none", "shared", part, tokens, {"prefix_hits": hits})
        for part, (tokens, hits) in found.items()
    ]
    assert proof(made, SHARED, "single-none").verdict is verdict


SAMPLED = {"id": "sampled", "kind": "sampled", "prompts": ["p96"], "temperature": 0.2}


@pytest.mark.parametrize(
    ("temperature", "baselines", "verdict"),
    [
        (0.2, lookups([96]), Verdict.PASS),
        (0.0, lookups([96]), Verdict.UNKNOWN),
        # The margin of 9 nats forces nothing here.
        (2.0, lookups([96]), Verdict.UNKNOWN),
        (0.2, {}, Verdict.UNKNOWN),
    ],
)
def test_sampling_is_on_and_margins_force_every_token(temperature, baselines, verdict):
    made = history(
        [in_scenario("single-none", "sampled", "subject", temperature=temperature)],
        scenarios=[SAMPLED],
        engines=(engine("single-none", "single"),),
    )
    found = preconditions.state_occurred(view(made, "single-none", baselines, scenario="sampled"))
    assert found.verdict is verdict, found.findings


FEATURES = {"id": "features", "kind": "features", "prompts": ["p96"]}


@pytest.mark.parametrize(
    ("feature", "answer", "verdict"),
    [
        ("stop-token", {"finish_reason": "stop"}, Verdict.PASS),
        ("stop-token", {"finish_reason": "length"}, Verdict.UNKNOWN),
        ("stop-string", {"finish_reason": "stop", "stop_reason": "w7"}, Verdict.PASS),
        ("stop-string", {"finish_reason": "stop", "stop_reason": 7}, Verdict.UNKNOWN),
        ("prompt-logprobs", {"prompt_logprobs": (None, -0.1)}, Verdict.PASS),
        ("prompt-logprobs", {}, Verdict.UNKNOWN),
    ],
)
def test_a_feature_shows_in_the_answer(feature, answer, verdict):
    made = change_final(in_scenario("single-none", "features", feature, feature=feature), **answer)
    assert proof([made], FEATURES, "single-none").verdict is verdict


PARAMETERS = {
    "id": "parameters",
    "kind": "parameters",
    "prompts": ["p96"],
    "parameters": ["allowed-half", "presence-penalty", "bad-words", "stop-at-cap"],
}


def with_parameter(cell: str, feature: str, output: tuple[int, ...], **answer):
    asked = {"feature": feature, "max_tokens": 5, "known_answer": (1, 2, 3, 4, 5)}
    o = in_scenario(cell, "parameters", feature, **asked)
    return change_final(o, **{"output_ids": output, "finish_reason": "length", **answer})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([("bad-words", (1, 2, 9, 4, 5))], ""),
        ([("bad-words", (1, 2, 3, 4, 5))], "changed nothing"),
        # On top of another parameter: what that one changes does not count.
        ([("allowed-half", (1, 3, 1, 3, 1)), ("presence-penalty", (1, 3, 5, 1, 3))], ""),
        ([("allowed-half", (1, 3, 1, 3, 1)), ("presence-penalty", (1, 3, 1, 3, 1))], "changed nothing"),
        ([("presence-penalty", (1, 3, 5, 1, 3))], "without presence-penalty"),
        ([("stop-at-cap", (1, 2, 3))], "to end at its stop-at-cap"),
    ],
)
def test_a_parameter_changes_what_the_plain_engine_answers(asked, words):
    made = [with_parameter("single-none", feature, output) for feature, output in asked]
    result = proof(made, PARAMETERS, "single-none")
    assert result.verdict is (Verdict.UNKNOWN if words else Verdict.PASS)
    assert all(words in f.message for f in result.findings)


def test_parameters_that_cannot_be_compared_are_refused():
    for changes, words in (
        ({"parameters": ("presence-penalty",)}, "allowed-half"),
        ({"parameters": ("seed-again",)}, "seed"),
        ({"prompts": ("copy-007-00",)}, "known answer"),
    ):
        config = scenario("parameters").model_copy(update=changes)
        with pytest.raises(UsageError, match=words):
            require_possible(PROFILE.model_copy(update={"scenarios": (config,)}), KNOWN)


def test_a_trace_asks_with_parameters_too():
    stage = [{"prompt": "copy-030-03", "cache": "a", "feature": "bad-words"}, {"prompt": "copy-062-10"}]
    trace = Trace.model_validate({"id": "t", "kind": "trace", "stages": [stage]})
    (run,) = scripts(trace, KNOWN, "pd")
    assert [(s.feature, s.max_tokens, s.group) for s in run.sends] == [
        ("bad-words", 32, "cache a"), (None, None, "r0-1")
    ]  # fmt: skip


APIS = {"id": "apis", "kind": "apis", "prompts": ["p96"]}


def in_pieces(o, *tokens: int):
    pieces = {"tokens": tokens, "characters": tokens, "counted": (None,) * len(tokens), "ended_at": (), "usages": 1}
    return change_final(o, streamed=Streamed(**pieces, closed=True))


@pytest.mark.parametrize(
    ("cell", "pieces", "hits", "verdict"),
    [
        ("single-eagle3", (1, 4, 1), 32, Verdict.PASS),
        # Drafts were accepted, and no piece has two tokens; and where nothing drafts.
        ("single-eagle3", (1, 1, 1), 32, Verdict.UNKNOWN),
        ("single-none", (1, 1, 1), 64, Verdict.PASS),
        ("single-none", (0, 3), 64, Verdict.UNKNOWN),
        ("single-none", None, 64, Verdict.UNKNOWN),
        ("single-none", (1, 2), 32, Verdict.UNKNOWN),
    ],
)
def test_a_stream_comes_in_pieces_and_finds_its_prompt_cached(cell, pieces, hits, verdict):
    whole = in_scenario(cell, "apis", "completion", sequence=0)
    o = in_scenario(cell, "apis", "completion-stream", sequence=1, api="completion-stream")
    o = change_final(o, counters={"prefix_hits": float(hits)})
    assert proof([whole, in_pieces(o, *pieces) if pieces else o], APIS, cell).verdict is verdict


@pytest.mark.parametrize(("windows", "verdict"), [((None,), Verdict.UNKNOWN), ((None, 64), Verdict.PASS)])
def test_d_reads_no_prefix_from_the_end_of_a_window(windows, verdict):
    whole, o = (
        observation("pd-none", 96, scenario="apis", part=api, api=api, sequence=n)
        for n, api in enumerate(("completion", "completion-stream"))
    )
    made = history([whole, in_pieces(o, 1, 2)], scenarios=[APIS])
    made = with_cells(made, windows=windows)
    assert preconditions.state_occurred(view(made, "pd-none", scenario="apis")).verdict is verdict


def test_each_api_is_asked_by_itself_and_an_endpoint_has_one_cache():
    (script,) = scripts(scenario("apis"), KNOWN, "pd")
    assert [(s.api, s.group) for s in script.sends] == [
        ("completion", "ids"),
        ("completion-stream", "ids"),
        ("chat", "chat"),
        ("chat-stream", "chat"),
    ]


PRESSURE = {"id": "pressure", "kind": "pressure", "load": ["p96", "p65"], "waiting": {"donor": "p96", "subject": "p96"}}


@pytest.mark.parametrize(
    ("preemptions", "load_asked", "waiting_asked", "pool", "verdict"),
    [
        # Two requests of three blocks each, and one of three that waits: eight usable blocks are too few, nine are not.
        (1, 1.0, 2.0, 9, Verdict.PASS),
        (0, 1.0, 2.0, 9, Verdict.UNKNOWN),
        (1, 1.0, 2.0, 10, Verdict.UNKNOWN),
        (1, 1.0, 2.0, None, Verdict.UNKNOWN),
        # Queued in the other order, after the release, or at an unknown time: it may have been admitted first.
        (1, 2.5, 2.0, 9, Verdict.UNKNOWN),
        (1, 1.0, 4.0, 9, Verdict.UNKNOWN),
        (1, None, 2.0, 9, Verdict.UNKNOWN),
    ],
)
def test_pressure_needs_a_preemption_and_a_queue_without_room(preemptions, load_asked, waiting_asked, pool, verdict):
    shared = {"single": {"preemptions": float(preemptions)}}
    common = {"concurrent": 3, "shared_counters": shared, "held_until": 3.0}
    made = [
        in_scenario("single-none", "pressure", "load0", asked_at=load_asked, **common),
        in_scenario("single-none", "pressure", "local0", asked_at=1.5, **common),
        in_scenario("single-none", "pressure", "waiting", asked_at=waiting_asked, **common),
    ]
    engines = (engine("single-none", "single", kv_blocks=pool),)
    assert proof(made, PRESSURE, "single-none", engines).verdict is verdict


def test_pressure_counts_the_blocks_of_every_kind_of_layer():
    """A prompt of 224 tokens holds 7 blocks, and 2 more in a window of 48; one of recurrent state, 8."""
    assert held_blocks(224, 32, (None,)) == 7
    assert held_blocks(224, 32, (None, 48)) == 9 and held_blocks(224, 32, (None,), recurrent=True) == 8
    windowed = load_profile("cpu-layouts")
    (config,) = (s for s in windowed.scenarios if s.kind == "pressure")
    kind = KINDS["pressure"]
    assert kind.impossible(config, windowed, KNOWN) is None
    roomy = windowed.model_copy(update={"engine": windowed.engine.model_copy(update={"kv_blocks": 64})})
    assert "fewer than" in kind.impossible(config, roomy, KNOWN)


ROUNDS = {
    "id": "together",
    "kind": "concurrent",
    "holder": "p96",
    "together": ["p30", "p31"],
    "late": ["p64"],
    "rounds": 2,
}


def concurrent_round(instance: int, late_at: float) -> list:
    """The long request runs from 0 to 1 s, a short one ends before it, and a late one begins at ``late_at``."""
    counters = {"engine_steps": 20.0, "engine_steps_le_128": 19.0}
    common = {"instance": instance, "concurrent": 3, "shared_counters": {"single": counters}}
    parts = {"holder": (96, 0.0, 1.0), "together0": (30, 0.0, 0.5), "late0": (64, late_at, 0.1)}
    made = []
    for part, (tokens, start, seconds) in parts.items():
        o = in_scenario("single-none", "together", part, tokens, started_at=start, **common)
        made.append(change_final(o, seconds=seconds, output_ids=tuple(range(40))))
    return made


@pytest.mark.parametrize(
    ("late_at", "verdict"), [((0.3, 0.3), Verdict.PASS), ((0.3, 1.5), Verdict.PASS), ((1.5, 1.5), Verdict.UNKNOWN)]
)
def test_one_proven_round_of_concurrency_is_enough(late_at, verdict):
    made = [o for i, at in enumerate(late_at) for o in concurrent_round(i, at)]
    result = proof(made, ROUNDS, "single-none", (engine("single-none", "single"),))
    assert result.verdict is verdict, result.findings
    assert ("1 of 2 rounds" in result.note) == (late_at == (0.3, 1.5))


CHUNKED = {"id": "chunked", "kind": "chunked-prefill", "prompts": ["p96"]}


@pytest.mark.parametrize(
    ("computed", "budget", "verdict"),
    [(96.0, 64, Verdict.PASS), (96.0, 96, Verdict.UNKNOWN), (96.0, None, Verdict.UNKNOWN), (0.0, 64, Verdict.UNKNOWN)],
)
def test_chunked_prefill_needs_more_tokens_than_a_step_has(computed, budget, verdict):
    made = [in_scenario("single-none", "chunked", "subject", counters={"prompt_tokens_local_compute": computed})]
    engines = (engine("single-none", "single", step_tokens=budget),)
    assert proof(made, CHUNKED, "single-none", engines).verdict is verdict


def test_a_server_that_does_not_say_its_tokens_per_step_could_be_started_so_that_it_does():
    made = [in_scenario("single-none", "chunked", "subject", counters={"prompt_tokens_local_compute": 96.0})]
    silent = engine("single-none", "single", step_tokens=None).model_copy(update={"argv": ("attached", "http://x")})
    (found,) = proof(made, CHUNKED, "single-none", (silent,)).findings
    assert found.message.endswith("found no answer; start the server with VLLM_SERVER_DEV_MODE=1")


def test_scenario_without_observations_is_unknown():
    the_history = history([observation("single-none")], scenarios=[REFILL])
    unanswered = with_answers(with_cells(the_history, scenarios={"refill": 3}), ())
    judgement = judge(unanswered, lookups([40]))
    assert judgement.verdict is Verdict.UNKNOWN
    assert {c.scenario for c in judgement.cells} == {"cold", "refill"}


def test_scenario_that_the_profile_lost_is_unknown_not_a_crash():
    judgement = judge(history([in_scenario("single-none", "ghost", "subject")]), lookups([96]))
    (ghost,) = (c for c in judgement.cells if c.scenario == "ghost")
    assert ghost.verdict is Verdict.UNKNOWN


# --- transfers in scenarios ------------------------------------------------------------------------------------------


def test_requests_sent_together_need_as_many_transfers():
    counters = {"nixl_bytes": 1.0, "nixl_transfers": 2.0, "prompt_tokens_external_kv_transfer": 200.0}
    made = [
        in_scenario("pd-none", "pressure", f"load{i}", concurrent=2, shared_counters={"decode": counters})
        for i in range(2)
    ]
    the_history = history(made, scenarios=[PRESSURE])
    assert transfer.transfer(view(the_history, "pd-none", scenario="pressure")).verdict is Verdict.PASS
    fewer = {"decode": {**counters, "nixl_transfers": 1.0}}
    made = [o.model_copy(update={"shared_counters": fewer}) for o in made]
    the_history = history(made, scenarios=[PRESSURE])
    assert transfer.transfer(view(the_history, "pd-none", scenario="pressure")).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(("hits", "verdict"), [(64.0, Verdict.PASS), (32.0, Verdict.UNKNOWN), (0.0, Verdict.UNKNOWN)])
def test_requests_sent_together_need_no_transfer_of_what_the_other_left_in_the_cache(hits, verdict):
    counters = {"nixl_bytes": 1.0, "nixl_transfers": 2.0, "prompt_tokens_external_kv_transfer": 126.0}
    counters["prefix_hits"] = hits
    made = [
        in_scenario("pd-none", "same", part, sequence=i, instance=0, concurrent=2, shared_counters={"decode": counters})
        for i, part in enumerate(("donor", "subject"))
    ]
    the_history = history(made, scenarios=[SAME_STEP])
    assert transfer.transfer(view(the_history, "pd-none", scenario="same")).verdict is verdict


def test_lease_of_a_hand_off_that_d_never_took_over_has_to_end():
    broken = in_scenario("pd-none", "late-pull", "subject", sequence=0, error="D was not asked")
    broken = broken.model_copy(update={"legs": broken.legs[:1]})
    after = observation("pd-none", scenario="late-pull", part="later", sequence=1)
    after = with_prefill(after, counters={"nixl_expired": 1.0})

    def ended(*made, kept=0):
        engines = (engine("pd-none", "prefill").model_copy(update={"kept_blocks": kept}), engine("pd-none", "decode"))
        result = transfer.transfer(view(history(list(made), engines=engines), "pd-none", scenario="late-pull"))
        return [f for f in result.findings if "leases that expired" in f.message]

    assert not ended(broken, after)
    assert not ended(after, kept=1) and ended(after)


def test_ended_lease_is_a_regression_whoever_was_served_then():
    fill = observation("pd-none", scenario="late-pull", part="fill0", route="prefill")
    leg = fill.legs[0].model_copy(update={"counters": {"nixl_expired": 1.0}, "kv_transfer_params": None})
    made = [fill.model_copy(update={"legs": (leg,)}), in_scenario("pd-none", "late-pull", "subject")]
    result = transfer.transfer(view(history(made), "pd-none", scenario="late-pull"))
    assert result.verdict is Verdict.REGRESSION
    assert any("leases that expired" in f.message for f in result.findings)


# --- scenarios that draw their prompts ------------------------------------------------------------------------------

CROWD = Crowd(id="crowd", kind="crowd", prompts=10, together=4, proves=("batched", "chunked", "preempted"))


def test_a_crowd_is_queued_together_and_sends_each_prompt_once():
    chosen = drawn(CROWD, PROFILE, PROMPTS.cold)
    found = scripts(CROWD, KNOWN, "pd", chosen)
    assert [len(run.stages[0].sends) for run in found] == [4, 3, 3]
    assert {run.stages[0].hold for run in found} == {"first"}
    sent = [s.prompt.id for run in found for s in run.stages[0].sends]
    assert sorted(sent) == sorted(p.id for p in chosen) and len(set(sent)) == 10
    assert all(s.group == f"c{n}" for run in found for n, s in enumerate(run.stages[0].sends))


def test_drawn_prompts_are_of_many_texts_and_can_be_found_in_a_cache():
    copies = [
        p.model_copy(update={"origin": f"bench, row {n // 3}, padded by 3 tokens"}) for n, p in enumerate(PROMPTS.cold)
    ]
    hit = PrefixHit(id="hit", kind="prefix-hit", where="decode", pairs=8)
    chosen = drawn(hit, PROFILE, copies)
    assert len({p.source for p in chosen}) == len(chosen) == 8
    # EAGLE3 computes the last matched block again.
    assert min(p.tokens for p in chosen) > 64 > min(p.tokens for p in drawn(CROWD, PROFILE, copies))
    (first, *_) = scripts(hit, KNOWN, "pd", chosen)
    donor, subject = first.sends
    assert donor.prompt == subject.prompt and (donor.route, donor.max_tokens, donor.group) == ("local", 2, "a")


def crowd_view(**counters: float):
    """A crowd of two prompts of 100 and 110 tokens, with a step of 192."""
    shared = {"single": {"engine_steps": 20.0, "preemptions": 1.0, **counters}}
    timing = {"asked_at": 1.0, "held_until": 2.0}
    rest = {"scenario": "crowd", "concurrent": 2, "shared_counters": shared}
    members = [observation("single-eagle3", n, part=f"r{n}", **timing, **rest) for n in (100, 110)]
    return lambda **changes: view(
        history(
            [m.model_copy(update=changes) for m in members],
            scenarios=[CROWD.model_dump(mode="json")],
            engines=(engine("single-eagle3", "single"),),
        ),
        "single-eagle3",
        scenario="crowd",
    )


@pytest.mark.parametrize(
    ("counters", "changes", "missing"),
    [
        ({}, {}, None),
        ({"preemptions": 0.0}, {}, "at least one preemption"),
        ({"engine_steps": 9e9}, {}, "they did not run together"),
        ({}, {"asked_at": 3.0}, "no prompt was computed in chunks"),
        ({}, {"sent_ids": tuple(range(96))}, "no prompt was computed in chunks"),
    ],
)
def test_the_state_of_a_crowd_is_proven_by_counters_and_times(counters, changes, missing):
    result = preconditions.state_occurred(crowd_view(**counters)(**changes))
    assert result.verdict is (Verdict.PASS if missing is None else Verdict.UNKNOWN)
    assert missing is None or any(missing in f.message for f in result.findings)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kind": "chunked-prefill", "prompts": ["held-064-00"]}, "prompts by number, answered in full"),
        ({"kind": "prefix-hit", "where": "decode", "pairs": 5, "max_tokens": 9}, "prompts by number"),
        ({"kind": "prefix-hit", "where": "decode", "pairs": 5000}, "expected 5000 suitable prompts"),
        ({"kind": "crowd", "prompts": 8, "together": 2, "proves": ["chunked"]}, "fits into one step"),
        ({"kind": "crowd", "prompts": 8, "together": 400, "proves": ["batched"]}, "max_num_seqs of at least 400"),
        ({"kind": "crowd", "prompts": 8, "together": 2, "proves": ["preempted"]}, "that a crowd and its answers need"),
    ],
)
def test_scenarios_that_registered_tests_cannot_judge_or_that_cannot_occur_are_refused(tmp_path, given, sentence):
    def change(raw):
        raw.update(judging={"tier": "normal", "stages": 1}, scenarios=[{"id": "state", **given}])
        raw["engine"]["max_num_batched_tokens"] = 500
        raw["engine"]["kv_blocks"] = 400

    with pytest.raises(UsageError, match=sentence):
        prepare(changed_profile(tmp_path, change), [])


def test_shipped_states_can_occur_with_prompts_by_the_recipe():
    prepared = prepare("nightly", ["*+*.tight"], planned=True)
    for part in prepared.parts:
        prompts = prepared.sets[part.variant]
        require_possible(part, {}, cold_prompts(prompts.cold, part.workload), prompts.held_out)


@pytest.mark.parametrize(
    ("cell", "aged_by", "verdict"),
    [
        ("pd-none", {"prefill": 500, "decode": 500}, Verdict.PASS),
        ("pd-none", {"prefill": 499, "decode": 500}, Verdict.UNKNOWN),
        ("pd-none", {}, Verdict.UNKNOWN),
        ("single-none", {"single": 500}, Verdict.PASS),
    ],
)
def test_engines_are_old_when_each_has_answered_the_short_requests(cell, aged_by, verdict):
    config = {"id": "old", "kind": "aged", "prompts": ["p96"], "requests": 500}
    young, old = (in_scenario(cell, "old", part, sequence=n) for n, part in enumerate(["young0", "old0"]))
    assert proof([young, old.model_copy(update={"aged_by": aged_by})], config, cell).verdict is verdict


def test_prompts_are_asked_young_and_old_with_nothing_cached():
    (config,) = (s for s in load_profile("cpu-full").scenarios if s.kind == "aged")
    for topology in ("pd", "single"):
        (run,) = scripts(config, KNOWN, topology)
        young, old = run.sends[: len(config.prompts) + 1], run.sends[len(config.prompts) + 1 :]
        assert [s.prompt for s in young] == [*(s.prompt for s in old), old[0].prompt]
        assert [s.ageing for s in run.sends] == [0] * len(young) + [2000] + [0] * (len(old) - 1)
        assert len({s.group for s in run.sends}) == len(run.sends) and run.ageing == 2000


def test_cold_prompts_have_the_same_seeded_order_in_all_cells():
    prepared = prepare("cpu", [])
    orders = {w.cell.id: [(i.prompt.id, i.form) for i in w.items] for w in prepared.works}
    longest = orders["single-none"]
    for order in orders.values():
        common = {*order} & {*longest}
        assert len(common) > 20 or len(order) < 40
        assert [i for i in order if i in common] == [i for i in longest if i in common]
    assert [i for i, _ in longest] != [p.id for p in prepared.prompts.cold]
    assert orders == {w.cell.id: [(i.prompt.id, i.form) for i in w.items] for w in prepare("cpu", []).works}
    other = PROFILE.workload.model_copy(update={"order_seed": 2})
    assert other.order_seed != PROFILE.workload.order_seed and _cold_ids(other) != _cold_ids(PROFILE.workload)
    listed = _cold_ids(PROFILE.workload.model_copy(update={"order_seed": None}))
    assert listed[: len(prepared.prompts.cold)] == [p.id for p in prepared.prompts.cold]


def _cold_ids(workload) -> list[str]:
    profile = PROFILE.model_copy(update={"workload": workload})
    cell = next(w.cell for w in prepare("cpu", ["single-none"]).works)
    return [i.prompt.id for i in cell_work(profile, load_prompts(workload.prompts), cell).items]
