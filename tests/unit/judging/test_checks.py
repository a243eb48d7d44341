"""Each check on hand-made histories: the flawless one passes, and every flaw has its own verdict and class."""

from __future__ import annotations

from functools import partial

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks import counters, drafting, registry, responses, tokens, transfer
from harness.judging.checks.registry import Check, judge, judge_cell
from tests.support.builders import (
    CELLS,
    LENGTHS,
    change_final,
    flawless,
    garbled,
    history,
    lookup,
    lookups,
    observation,
    prompt_ids,
    speculation,
    view,
    with_cells,
    with_prefill,
    with_run,
)


def replaced(cell: str, tokens_: int, change) -> list:
    return [change(o) if (o.cell, len(o.sent_ids)) == (cell, tokens_) else o for o in flawless()]


def verdicts(observations: list, baselines=None) -> dict[str, dict[str, Verdict]]:
    judgement = judge(history(observations, CELLS), lookups(LENGTHS) if baselines is None else baselines)
    return {c.cell: {r.check: r.verdict for r in c.results} for c in judgement.cells}


def test_flawless_run_passes_every_check():
    judgement = judge(history(flawless()), lookups(LENGTHS))
    assert judgement.findings == [] and judgement.verdict is Verdict.PASS
    pd = {r.check for c in judgement.cells if c.cell == "pd-eagle3" for r in c.results}
    assert pd == {c.name for c in registry.CHECKS} - {
        "text-form",
        "state-occurred",
        "rescored",
        "prompt-logprobs",
        "kv-handed-over",
        "kv-computed",
        "drafts-computed",
        "kv-kept",
        "kv-events",
        "streamed",
        "cached-tokens",
        "same-answer",
        "failed-requests",
        "mistaken-hand-offs",
    }


def test_no_cells_is_unknown():
    assert judge(history([], []), {}).verdict is Verdict.UNKNOWN


def test_interrupted_run_is_never_pass():
    assert judge(with_run(history(flawless()), interrupted=True), lookups(LENGTHS)).verdict is Verdict.UNKNOWN


def test_crashed_check_is_unknown_and_hides_nothing(monkeypatch):
    def crash(_):
        raise RuntimeError("boom")

    cell = view(history(flawless()), "single-none", lookups(LENGTHS))
    monkeypatch.setattr(registry, "CHECKS", (Check("broken", lambda _: True, crash), *registry.CHECKS))
    verdict = judge_cell(cell)
    assert verdict.verdict is Verdict.UNKNOWN and "boom" in verdict.results[0].note
    assert [r.verdict for r in verdict.results[1:]].count(Verdict.PASS) == len(verdict.results) - 1


# --- exchange -------------------------------------------------------------------------------------------------------


def test_double_bos_is_input_regression():
    def double(o):
        return change_final(o, echoed_ids=(0, *o.sent_ids), usage_prompt_tokens=len(o.sent_ids) + 1)

    result = responses.echoed_prompt(view(history(replaced("single-none", 40, double)), "single-none"))
    assert result.verdict is Verdict.REGRESSION
    (finding,) = result.findings
    assert finding.damage == "input" and finding.evidence.position == 1
    assert finding.stratum == "middle"


def test_missing_echo_is_unknown():
    o = change_final(observation("single-none"), echoed_ids=None)
    assert responses.echoed_prompt(view(history([o]), "single-none")).verdict is Verdict.UNKNOWN


def test_prefill_leg_echo_is_checked_too():
    bad = with_prefill(observation("pd-none"), echoed_ids=prompt_ids(41))
    result = responses.echoed_prompt(view(history([bad]), "pd-none"))
    assert result.verdict is Verdict.REGRESSION and result.findings[0].evidence.role == "prefill"


def test_missing_observation_and_failed_exchange_are_unknown():
    broken = observation("single-none", error="engine answered 500")
    assert responses.complete(view(history([broken]), "single-none")).verdict is Verdict.UNKNOWN
    short = history([observation("single-none")])
    result = responses.complete(view(with_cells(short, planned=2), "single-none"))
    assert result.verdict is Verdict.UNKNOWN
    assert "expected 2 observations" in result.findings[0].message


@pytest.mark.parametrize(
    "changes",
    [
        {"usage_completion_tokens": 3},
        {"usage_prompt_tokens": 3},
        {"chosen_logprobs": (0.0,)},
        {"finish_reason": "abort"},
        {"output_ids": ()},
        {"output_ids": None},
        {"speculation": speculation((1, 1)).model_copy(update={"num_accepted": 7})},
        {"speculation": speculation((5,))},
        {"speculation": speculation((0,))},
    ],
)
def test_contradicting_response_is_regression(changes):
    o = change_final(observation("single-eagle3"), **changes)
    assert responses.response_invariants(view(history([o]), "single-eagle3")).verdict is Verdict.REGRESSION


def test_two_end_tokens_are_a_regression():
    output = (10, 1, 11, 1)
    o = change_final(
        observation("single-none"),
        output_ids=output,
        usage_completion_tokens=4,
        chosen_logprobs=(0.0,) * 4,
        top_gaps=(9.0,) * 4,
    )
    assert responses.response_invariants(view(history([o]), "single-none")).verdict is Verdict.REGRESSION


@pytest.mark.parametrize(("seen", "damage"), [("same", "target-kv"), ("other", "input"), ("none", "input")])
def test_text_form_blames_the_input_only_where_that_may_differ(seen, damage):
    ids = observation("single-none", 40)
    echo = {"same": ids.sent_ids, "other": (1, *ids.sent_ids), "none": None}[seen]
    text = change_final(garbled(observation("single-none", 40, form="text", sequence=1)), echoed_ids=echo)
    (finding,) = responses.text_form(view(history([ids, text]), "single-none")).findings
    assert (finding.verdict, finding.damage) == (Verdict.REGRESSION, damage)


def test_same_output_for_text_and_ids_passes():
    ids = observation("single-none")
    same = ids.model_copy(update={"form": "text"})
    assert responses.text_form(view(history([ids, same]), "single-none")).verdict is Verdict.PASS


# --- transfer -------------------------------------------------------------------------------------------------------


def with_params(o, **params):
    return with_prefill(o, kv_transfer_params={**o.legs[0].kv_transfer_params, **params})


@pytest.mark.parametrize("tokens_", [31, 32, 33, 64, 65, 96])
def test_right_block_count_passes(tokens_):
    assert transfer.transfer(view(history([observation("pd-eagle3", tokens_)]), "pd-eagle3")).verdict is Verdict.PASS


def test_lookahead_block_published_is_a_regression():
    o = with_params(observation("pd-eagle3", 32), remote_block_ids=[[1, 2]])
    result = transfer.transfer(view(history([o]), "pd-eagle3"))
    assert result.verdict is Verdict.REGRESSION and result.findings[0].evidence.published_blocks == 2
    assert result.findings[0].evidence.expected_blocks == 1
    assert result.findings[0].stratum == "aligned"


def test_other_token_count_is_a_regression():
    o = with_params(observation("pd-none", 40), remote_num_tokens=39)
    assert transfer.transfer(view(history([o]), "pd-none")).verdict is Verdict.REGRESSION


def of_windows(groups, moved=None):
    """The check of hand-offs of 181 tokens by a target with full attention and a window of 48; blocks have 32 KiB."""
    usual = [list(range(1, 7)), [16, 7, 8], [9, 10, 11]]
    rows = []
    for number, published in enumerate((usual, usual, groups)):
        o = with_params(observation("pd-none", 181), remote_block_ids=published)
        # Of the three blocks that a window publishes, D leaves out the first, which no query sees any more.
        count = moved if moved and number == 2 else 6 + 2 + 2
        counters = {**o.final.counters, "nixl_bytes": 32768.0 * count}
        rows.append(change_final(o, counters=counters).model_copy(update={"prompt_id": f"p{number}"}))
    return transfer.transfer(view(with_cells(history(rows), windows=(None, 48)), "pd-none"))


def test_groups_with_windows_publish_the_last_blocks_only():
    assert of_windows([list(range(1, 7)), [16, 7, 8], [9, 10, 11]]).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([list(range(1, 7)), [16, 7], [9, 10, 11]], "the last 3 of 6 blocks in KV-cache group 1, found 2"),
        ([list(range(1, 7)), [16, 7, 8, 12, 13], [9, 10, 11]], "= 6 blocks in KV-cache group 1, found 5"),
        ([[3, 4, 5], [16, 7, 8], [9, 10, 11]], "= 6 blocks in KV-cache group 0, found 3"),
    ],
)
def test_other_numbers_of_blocks_with_windows_are_regressions(groups, words):
    result = of_windows(groups)
    assert result.verdict is Verdict.REGRESSION
    assert [f.prompt_id for f in result.findings] == ["p2"]
    assert words in result.findings[0].message


def test_window_whose_blocks_did_not_move_is_unknown():
    result = of_windows([list(range(1, 7)), [16, 7, 8], [9, 10, 11]], moved=9)
    assert result.verdict is Verdict.UNKNOWN
    assert "expected NIXL to move 10 blocks of 32768 bytes" in result.findings[0].message


def from_outside(o, tokens_):
    return change_final(o, counters={**o.final.counters, "prompt_tokens_external_kv_transfer": tokens_})


@pytest.mark.parametrize(
    "change",
    [
        *(partial(with_params, remote_block_ids=groups) for groups in (None, [], [[]], "x", [3])),
        partial(with_prefill, kv_transfer_params=None),
        partial(from_outside, tokens_=32.0),
    ],
    ids=["groups null", "no groups", "an empty group", "a word", "a flat list", "no parameters", "part from outside"],
)
def test_hand_off_of_unknown_blocks_or_of_part_of_the_prompt_is_unknown(change):
    made = history([change(observation("pd-none", 40))])
    assert transfer.transfer(view(made, "pd-none")).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("missing", ["nixl_bytes", "nixl_descriptors", "prompt_tokens_external_kv_transfer"])
def test_no_proof_of_movement_is_unknown(missing):
    o = observation("pd-none", 40)
    counters = {k: v for k, v in o.final.counters.items() if k != missing}
    result = transfer.transfer(view(history([change_final(o, counters=counters)]), "pd-none"))
    assert result.verdict is Verdict.UNKNOWN and result.findings[0].damage == "nothing-tested"


@pytest.mark.parametrize("counter", ["nixl_bytes", "prompt_tokens_external_kv_transfer"])
def test_control_that_is_no_control_is_unknown(counter):
    o = change_final(observation("single-none"), counters={"finished_requests": 1.0, counter: 32.0})
    assert transfer.transfer(view(history([o]), "single-none")).verdict is Verdict.UNKNOWN


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_wrong_tokens_on_pd_are_a_regression_against_both_references():
    found = verdicts(replaced("pd-eagle3", 32, garbled))
    assert found["pd-eagle3"]["tokens-reference"] is Verdict.REGRESSION
    assert found["pd-eagle3"]["tokens-baseline"] is Verdict.REGRESSION
    assert found["pd-none"]["tokens-reference"] is Verdict.PASS


def test_everyone_moved_is_drift():
    found = verdicts([garbled(o) if len(o.sent_ids) == 32 else o for o in flawless()])
    assert {v["tokens-baseline"] for v in found.values()} == {Verdict.DRIFT}
    assert {v.get("tokens-reference", Verdict.PASS) for v in found.values()} == {Verdict.PASS}


def test_near_tie_is_benign_only_with_proof():
    reference = change_final(observation("single-none", 40), top_gaps=(9.0, 9.0, 0.001, *(9.0,) * 34))
    result = tokens.tokens_reference(view(history([garbled(observation("pd-none", 40)), reference]), "pd-none"))
    assert result.verdict is Verdict.PASS and "1 near ties" in result.note
    hard = history([garbled(observation("pd-none", 40)), change_final(reference, top_gaps=None)])
    assert tokens.tokens_reference(view(hard, "pd-none")).verdict is Verdict.REGRESSION


def test_divergence_carries_both_sides():
    pair = history([garbled(observation("pd-none", 40), at=5), observation("single-none", 40)])
    (finding,) = tokens.tokens_reference(view(pair, "pd-none")).findings
    assert finding.evidence.position == 5 and finding.evidence.differing_tokens == 1
    assert finding.evidence.found != finding.evidence.expected


def test_reference_without_answer_is_unknown():
    pair = history([observation("pd-none", 40), observation("single-none", 40, error="broke")])
    assert tokens.tokens_reference(view(pair, "pd-none")).verdict is Verdict.UNKNOWN


def test_pd_is_held_to_its_single_engine_unless_it_says_what_is_right():
    """Where an expected failure excuses both, they must fail alike."""

    def judged(pd, single):
        plain = observation("single-none", 40)
        return tokens.tokens_single(view(history([pd, single, plain]), "pd-eagle3")).verdict

    pd, single = observation("pd-eagle3", 40), observation("single-eagle3", 40)
    assert judged(pd, single) is Verdict.PASS
    assert judged(garbled(pd), garbled(single)) is Verdict.PASS
    assert judged(pd, garbled(single)) is Verdict.PASS
    assert judged(garbled(pd), single) is Verdict.REGRESSION
    assert judged(garbled(pd), garbled(single, at=5)) is Verdict.REGRESSION


def test_missing_baseline_is_unknown_with_its_reason():
    cell = view(
        history([observation("single-none")]),
        "single-none",
        {"none": lookup([])._replace(source=None, reason="none found; record it with `harness baseline record`")},
    )
    result = tokens.tokens_baseline(cell)
    assert result.verdict is Verdict.UNKNOWN
    assert "harness baseline record" in result.findings[0].message
    assert tokens.tokens_baseline(view(history([observation("single-none")]), "single-none")).verdict is Verdict.UNKNOWN


def test_prompt_without_baseline_row_is_unknown():
    cell = view(history([observation("single-none", 40)]), "single-none", {"none": lookup([32])})
    assert tokens.tokens_baseline(cell).verdict is Verdict.UNKNOWN


def test_drafts_of_a_cell_without_speculation_are_unknown():
    o = observation("single-none")
    assert counters.counters_agree(view(history([o]), "single-none")).verdict is Verdict.PASS
    drafting_one = change_final(o, counters={**o.final.counters, "drafts": 12.0})
    result = counters.counters_agree(view(history([drafting_one]), "single-none"))
    assert result.verdict is Verdict.UNKNOWN
    assert "no drafts in a cell without speculation, found 12" in result.findings[0].message


# --- drafting -------------------------------------------------------------------------------------------------------


def test_no_drafts_is_unknown():
    for empty in (None, speculation(())):
        o = change_final(observation("single-mtp"), speculation=empty)
        result = drafting.drafts_happened(view(history([o]), "single-mtp"))
        assert result.verdict is Verdict.UNKNOWN and result.findings[0].damage == "nothing-tested"


def worse(o):
    steps = (0,) * (len(o.final.output_ids) - 1)
    return change_final(o, speculation=speculation((0, *steps) if o.cell.startswith("pd") else steps))


def test_acceptance_lost_on_pd_is_a_drafter_regression():
    found = verdicts(replaced("pd-mtp", 40, worse))
    assert found["pd-mtp"]["acceptance-single"] is Verdict.REGRESSION
    assert found["pd-mtp"]["acceptance-baseline"] is Verdict.REGRESSION
    assert found["pd-mtp"]["tokens-reference"] is Verdict.PASS
    assert found["single-mtp"]["acceptance-baseline"] is Verdict.PASS


def test_acceptance_lost_on_both_is_drift():
    found = verdicts([worse(o) if o.cell.endswith("mtp") else o for o in flawless()])
    assert found["pd-mtp"]["acceptance-baseline"] is Verdict.DRIFT
    assert found["single-mtp"]["acceptance-baseline"] is Verdict.DRIFT
    assert found["pd-mtp"]["acceptance-single"] is Verdict.PASS


def in_state(o):
    """The same answer in a scenario."""
    return o.model_copy(update={"scenario": "hit", "part": "subject", "sequence": o.sequence + 1000})


def test_acceptance_lost_in_one_state_of_both_topologies_is_a_regression_and_not_drift():
    made = [o for o in flawless() if o.cell.endswith("mtp")]
    lost = [in_state(worse(o)) for o in made if o.prompt_id == made[0].prompt_id]
    for cold, expected in ((made, Verdict.REGRESSION), ([worse(o) for o in made], Verdict.DRIFT)):
        judgement = judge(history([*cold, *lost], scenarios=[HIT]), lookups(LENGTHS))
        found = {c.cell: c for c in judgement.cells if c.scenario == "hit"}
        assert set(found) == {"pd-mtp", "single-mtp"}
        for cell in found.values():
            (result,) = (r for r in cell.results if r.check == "acceptance-baseline")
            assert result.verdict is expected, result.findings


HIT = {"id": "hit", "kind": "prefix-hit", "where": "decode", "pairs": [{"donor": "p40", "subject": "p40"}]}


def test_higher_acceptance_demands_a_new_baseline():
    def better(o):
        output = len(o.final.output_ids)
        steps = (3,) * ((output - 1) // 4) + ((output - 1) % 4 - 1,) * bool((output - 1) % 4)
        return change_final(o, speculation=speculation((0, *steps) if o.cell.startswith("pd") else steps))

    found = verdicts([better(o) if o.cell.endswith("mtp") else o for o in flawless()])
    assert found["single-mtp"]["acceptance-baseline"] is Verdict.IMPROVED
    assert found["pd-mtp"]["acceptance-single"] is Verdict.PASS


def test_higher_acceptance_than_single_tonight_is_a_sampler_regression():
    def better(o):
        return change_final(o, speculation=speculation((0, 3, *([1] * 16))))

    result = drafting.acceptance_single(view(history(replaced("pd-mtp", 40, better)), "pd-mtp"))
    assert result.verdict is Verdict.REGRESSION and result.findings[0].damage == "sampler"


def test_worst_verdict_rules_the_exit_code():
    assert Verdict.PASS.exit_code == 0
    assert {v.exit_code for v in (Verdict.REGRESSION, Verdict.DRIFT)} == {1}
    assert (Verdict.UNKNOWN.exit_code, Verdict.IMPROVED.exit_code, Verdict.SUSPECT.exit_code) == (2, 3, 4)
    assert {v for v in Verdict if v.fails} == {Verdict.REGRESSION, Verdict.DRIFT, Verdict.IMPROVED}


# --- injected mutants -----------------------------------------------------------------------------------------------


def test_run_with_an_injected_mutant_never_passes_and_says_so():
    judgement = judge(history(flawless(), mutants=("M1",)), lookups(LENGTHS))
    assert judgement.verdict is Verdict.UNKNOWN and judgement.mutants == ("M1",)
    assert any("INJECTED FAULT M1" in n for n in judgement.notices)
    broken = judge(history(replaced("pd-eagle3", 32, garbled), mutants=("M1",)), lookups(LENGTHS))
    assert broken.verdict is Verdict.REGRESSION


def test_resumed_requests_take_a_token_from_a_prefill():
    """Steps that leave output tokens unexplained: right for a request that was preempted, wrong otherwise."""
    whole = observation("single-eagle3", 96)
    steps = whole.final.speculation.per_step_accepted[:-1]
    fewer = observation("single-eagle3", 96, accepted=steps)
    unexplained = len(whole.final.output_ids) - 1 - sum(a + 1 for a in steps)
    assert responses.response_invariants(view(history([fewer]), "single-eagle3")).verdict is Verdict.REGRESSION
    for preemptions, verdict in ((unexplained, Verdict.PASS), (unexplained - 1, Verdict.REGRESSION)):
        o = fewer.model_copy(update={"shared_counters": {"single": {"preemptions": float(preemptions)}}})
        assert responses.response_invariants(view(history([o]), "single-eagle3")).verdict is verdict
