"""What is recorded is judged: how requests end, P's own token, bytes, duplicates, padding and known answers."""

from __future__ import annotations

import re

import pytest

from harness.history.folder import load_history
from harness.history.records import Leg, Observation, Speculation, Streamed
from harness.history.verdict import Verdict
from harness.judging.checks import drafting, responses, tokens, transfer
from harness.judging.checks.registry import check_names, judge
from harness.judging.references import References
from harness.reports.judge_run import assess
from harness.util.paths import REPOSITORY
from tests.golden.oracle import RUNS
from tests.support.builders import (
    CELLS,
    LENGTHS,
    change_final,
    flawless,
    garbled,
    history,
    identity,
    lookups,
    observation,
    speculation,
    steps_for,
    view,
    with_cells,
    with_prefill,
    with_profile,
    written_run,
)
from tests.support.normal_tier import baselines, night


def everywhere(change):
    """The verdicts of a pair in which every answer is changed, by check."""
    made = [change(o) if o.cell == "pd-eagle3" else o for o in flawless()]
    judgement = judge(history(made, CELLS), lookups(LENGTHS))
    return {r.check: r.verdict for c in judgement.cells if c.cell == "pd-eagle3" for r in c.results}


# --- how requests end ------------------------------------------------------------------------------------------------


def test_request_that_ended_for_another_reason_with_the_same_tokens_is_a_regression():
    found = everywhere(lambda o: change_final(o, finish_reason="length"))
    assert found["finish-reason"] is Verdict.REGRESSION
    assert {v for k, v in found.items() if k != "finish-reason"} == {Verdict.PASS}


def test_length_is_no_reason_below_the_requested_length():
    o = change_final(observation("single-none", 40, max_tokens=192), finish_reason="length")
    result = responses.response_invariants(view(history([o]), "single-none"))
    assert result.verdict is Verdict.REGRESSION
    assert "though 192 were asked for" in result.findings[0].message
    asked = o.model_copy(update={"max_tokens": len(o.final.output_ids)})
    assert responses.response_invariants(view(history([asked]), "single-none")).verdict is Verdict.PASS


def test_full_context_ends_a_request_early():
    o = change_final(observation("single-none", 40, max_tokens=192), finish_reason="length")
    made = history([o])
    for context, verdict in ((40 + len(o.final.output_ids), Verdict.PASS), (512, Verdict.REGRESSION)):
        full = with_profile(made, engine={"max_model_len": context})
        assert responses.response_invariants(view(full, "single-none")).verdict is verdict


def test_other_tokens_may_end_otherwise():
    shorter = change_final(garbled(observation("pd-none", 40)), finish_reason="length")
    result = responses.finish_reason(view(history([shorter, observation("single-none", 40)]), "pd-none"))
    assert result.verdict is Verdict.PASS


def test_the_end_of_an_answer_needs_the_plain_engines_where_it_was_asked():
    silent = observation("single-none", 40).model_copy(update={"error": "x", "legs": ()})
    made = history([observation("pd-none", 40), silent])
    result = responses.finish_reason(view(made, "pd-none"))
    assert result.verdict is Verdict.UNKNOWN and "found none" in result.findings[0].message


def test_the_end_of_an_answer_is_not_judged_where_the_plain_engine_was_not_asked():
    late = observation("pd-none", 65, scenario="late-pull")
    for cold, applies in ((65, True), (40, False)):
        made = history([late, observation("single-none", cold)])
        assert responses.has_plain_answers(view(made, "pd-none", scenario="late-pull")) is applies


# --- the end of the context ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ((1, 0), Verdict.PASS),  # The last draft had no room, and a step without drafts follows, which is not counted.
        ((0, 1), Verdict.REGRESSION),  # The step before had room for all drafts.
    ],
)
@pytest.mark.parametrize("cell", ["single-eagle3", "pd-eagle3"])
def test_fewer_drafts_fit_at_the_end_of_the_context(cell, last, verdict):
    whole = observation(cell, 40)
    steps = steps_for(len(whole.final.output_ids))
    own = (*steps[: -len(last)], *last)
    found = speculation((0, *own) if cell.startswith("pd") else own).model_copy(update={"at_limit": True})
    made = history([change_final(whole, speculation=found)])
    context = 40 + len(whole.final.output_ids)
    made = with_profile(made, engine={"max_model_len": context})
    result = drafting.acceptance_baseline(view(made, cell, lookups([40])))
    assert result.verdict is verdict, [f.message for f in result.findings]
    assert responses.response_invariants(view(made, cell)).verdict is Verdict.PASS


# --- P's own token ---------------------------------------------------------------------------------------------------


def test_wrong_token_of_p_is_a_regression():
    found = everywhere(lambda o: with_prefill(o, output_ids=(7,)))
    assert found["prefill-token"] is Verdict.REGRESSION
    assert {v for k, v in found.items() if k != "prefill-token"} == {Verdict.PASS}


def test_near_tie_of_p_is_benign_for_its_runner_up():
    o = observation("pd-none", 40)
    first = o.final.output_ids[0]
    for second, verdict in ((first, Verdict.PASS), (first + 1, Verdict.REGRESSION), (None, Verdict.PASS)):
        tied = with_prefill(o, output_ids=(7,), top_gaps=(0.001,), runner_ups=(second,))
        assert tokens.prefill_token(view(history([tied]), "pd-none")).verdict is verdict


def test_wrong_first_token_of_d_is_not_blamed_on_p():
    o = garbled(observation("pd-none", 40), at=0)
    assert tokens.prefill_token(view(history([o]), "pd-none", lookups([40]))).verdict is Verdict.PASS
    assert tokens.prefill_token(view(history([o]), "pd-none")).verdict is Verdict.REGRESSION


def test_token_of_p_in_the_normal_tier_is_suspect_beyond_rounding():
    def change(gap: float):
        return lambda o: with_prefill(o, output_ids=(7,), top_gaps=(gap,)) if o.cell.startswith("pd") else o

    for gap, verdict in ((2.0, Verdict.PASS), (9.0, Verdict.SUSPECT)):
        judgement = judge(night(change=change(gap), stages=1), baselines())
        (found,) = [r for c in judgement.cells for r in c.results if r.check == "prefill-token"]
        assert found.verdict is verdict


# --- bytes -----------------------------------------------------------------------------------------------------------


def with_bytes(o: Observation, change) -> Observation:
    return change_final(o, counters={**o.final.counters, "nixl_bytes": change(o.final.counters["nixl_bytes"])})


def transferred(made: list[Observation]):
    return transfer.transfer(view(history(made), "pd-eagle3"))


@pytest.mark.parametrize("change", [lambda b: 1.0, lambda b: b * 0.8, lambda b: b + 131072, lambda b: b / 2])
def test_one_hand_off_with_other_bytes_is_unknown(change):
    made = [observation("pd-eagle3", n) for n in LENGTHS]
    result = transferred([with_bytes(made[0], change), *made[1:]])
    assert result.verdict is Verdict.UNKNOWN
    (finding,) = result.findings
    assert finding.prompt_id == made[0].prompt_id and "131072 bytes" in finding.message


def test_one_byte_in_every_hand_off_is_unknown():
    made = [with_bytes(observation("pd-eagle3", n), lambda b: 1.0) for n in LENGTHS]
    assert transferred(made).verdict is Verdict.UNKNOWN
    short = [with_bytes(observation("pd-eagle3", n), lambda b: 1.0) for n in (20, 31, 32)]
    assert "multiple of 32 bytes" in transferred(short).findings[0].message


def test_blocks_without_the_drafters_layer_are_unknown():
    plain = [observation("pd-none", n) for n in LENGTHS]
    drafted = [observation("pd-eagle3", n) for n in LENGTHS]
    assert transferred([*plain, *drafted]).verdict is Verdict.PASS
    bare = [with_bytes(o, lambda b: b * 3 / 4) for o in drafted]
    result = transferred([*plain, *bare])
    assert result.verdict is Verdict.UNKNOWN
    assert "the drafter's KV was not handed over" in result.findings[0].message
    assert transferred(bare).verdict is Verdict.PASS


def test_blocks_that_d_has_cached_are_not_pulled():
    whole = [observation("pd-eagle3", n) for n in LENGTHS]
    o = observation("pd-eagle3", 96, scenario="prefix-hit")
    counters = {**o.final.counters, "prefix_hits": 32.0, "nixl_bytes": 131072.0 * 2}
    for moved, verdict in ((131072.0 * 2, Verdict.PASS), (131072.0 * 1.5, Verdict.UNKNOWN)):
        hit = change_final(o, counters={**counters, "nixl_bytes": moved})
        cell = view(history([*whole, hit]), "pd-eagle3", scenario="prefix-hit")
        assert transfer.transfer(cell).verdict is verdict


def test_bytes_of_a_request_that_broke_or_was_sent_twice_are_not_held_against_the_answer():
    first, broken, after, last = (observation("pd-eagle3", n, sequence=i) for i, n in enumerate((40, 65, 96, 120)))
    broken = broken.model_copy(update={"error": "connection closed"})
    after = with_bytes(after, lambda b: b + 131072 * 3)
    assert {f.prompt_id for f in transferred([first, broken, after, last]).findings} <= {broken.prompt_id}
    twice = transferred([first, with_bytes(last, lambda b: b * 2).model_copy(update={"attempts": 2})])
    assert not [f for f in twice.findings if "bytes" in f.message]
    (finding,) = transferred([first, after, last]).findings
    assert finding.prompt_id == after.prompt_id


@pytest.mark.parametrize("run", ["M1", "M4", "interrupted", "normal-tier"])
def test_recorded_bytes_are_whole_blocks(run):
    made = load_history(RUNS / run)
    cell = view(made, next(c.cell for c in made.run.cells if made.of(c.cell) and c.cell.startswith("pd")))
    assert not [f for f in transfer.transfer(cell).findings if "bytes" in f.message]


# --- duplicates ------------------------------------------------------------------------------------------------------


def test_wrong_answer_followed_by_a_right_one_is_unknown():
    right = observation("single-none", 40)
    made = history([garbled(right), right])
    result = responses.complete(view(made, "single-none"))
    assert "expected one answer to this request, found 2" in result.findings[0].message
    assert judge(with_cells(made, planned=1), lookups([40])).verdict is Verdict.UNKNOWN


# --- padding ---------------------------------------------------------------------------------------------------------


def with_steps(o: Observation, *first: int) -> Observation:
    return change_final(o, speculation=speculation((*first, *steps_for(len(o.final.output_ids)))))


def test_padding_after_some_hand_offs_only_is_unknown():
    unpadded = [with_steps(observation("pd-eagle3", n)) for n in (40, 96)]
    extra = [with_steps(observation("pd-eagle3", n), 0) for n in (31, 65)]
    assert drafting.drafts_happened(view(history(unpadded), "pd-eagle3")).verdict is Verdict.PASS
    assert drafting.drafts_happened(view(history(extra), "pd-eagle3")).verdict is Verdict.PASS
    result = drafting.drafts_happened(view(history([*unpadded, *extra]), "pd-eagle3"))
    assert result.verdict is Verdict.UNKNOWN
    assert "is padded after 2 hand-offs and not after 2" in result.findings[0].message


@pytest.mark.parametrize(("recurrent", "verdict"), [(True, Verdict.PASS), (False, Verdict.UNKNOWN)])
def test_padding_that_would_cross_a_block_of_recurrent_state_is_not_expected(recurrent, verdict):
    """With three drafts and blocks of 32, vLLM pads no prompt of N tokens with N mod 32 in {30, 31, 0}."""
    made = [with_steps(observation("pd-eagle3", n)) for n in (62, 95, 96)]
    made += [with_steps(observation("pd-eagle3", n), 0) for n in (40, 65)]
    h = with_cells(history(made), recurrent=recurrent, block_size=32)
    assert drafting.drafts_happened(view(h, "pd-eagle3")).verdict is verdict


def test_open_first_step_is_read_as_those_of_the_other_hand_offs():
    """The output ends within the last step, so the counts leave open whether the first one is padding."""
    single = observation("single-eagle3", 40)
    reference = (*steps_for(len(single.final.output_ids) - 2), 3)
    open_ended = change_final(observation("pd-eagle3", 40), speculation=speculation((0, *reference)))
    made = [change_final(single, speculation=speculation(reference)), open_ended]
    assert drafting.acceptance_single(view(history(made), "pd-eagle3")).verdict is Verdict.PASS
    others = [observation("single-eagle3", 65), with_steps(observation("pd-eagle3", 65))]
    assert others[1].final.speculation.per_step_accepted[0] > 0
    assert drafting.acceptance_single(view(history([*made, *others]), "pd-eagle3")).verdict is Verdict.REGRESSION


@pytest.mark.parametrize(("recurrent", "verdict"), [(True, Verdict.PASS), (False, Verdict.REGRESSION)])
def test_open_first_step_of_a_prompt_that_is_not_padded_is_read_as_it_is(recurrent, verdict):
    single = observation("single-eagle3", 62)
    reference = (0, *steps_for(len(single.final.output_ids) - 2), 3)
    alike = [change_final(o, speculation=speculation(reference)) for o in (single, observation("pd-eagle3", 62))]
    others = [observation("single-eagle3", 65), with_steps(observation("pd-eagle3", 65), 0)]
    h = with_cells(history([*alike, *others]), recurrent=recurrent, block_size=32)
    assert drafting.acceptance_single(view(h, "pd-eagle3")).verdict is verdict


# --- known answers ---------------------------------------------------------------------------------------------------


def knowing(o: Observation) -> Observation:
    return o.model_copy(update={"known_answer": observation("single-none", len(o.sent_ids)).final.output_ids})


def test_engines_that_are_all_equally_wrong_are_wrong_by_the_known_answer():
    made = [garbled(knowing(o)) if len(o.sent_ids) == 40 else knowing(o) for o in flawless()]
    judgement = judge(history(made), lookups(LENGTHS))
    assert judgement.verdict is Verdict.REGRESSION
    for cell in judgement.cells:
        assert cell.verdict is Verdict.REGRESSION and cell.diagnosis.damage == "known-answer"
        assert "wrong by the known answer" in cell.diagnosis.text
        assert "the engine changed" not in cell.diagnosis.text


def test_a_reference_that_is_as_wrong_makes_nothing_right(tmp_path):
    """Another run of the same engines has the same wrong tokens: those of ``--against`` are not looked at before."""
    made = [garbled(knowing(o)) if len(o.sent_ids) == 40 else knowing(o) for o in flawless()]
    identities = {m: identity(m).model_dump(mode="json") for m in ("none", "eagle3", "dflash", "mtp")}
    one, other = (written_run(tmp_path / n, history(made), run_id=n, identities=identities) for n in ("one", "other"))
    judgement = assess(load_history(one), References(against=other)).judgement
    assert {c.verdict for c in judgement.cells} == {Verdict.REGRESSION}
    found = [f for f in judgement.findings if f.check == "tokens-baseline"]
    assert {f.prompt_id for f in found} == {"p40"} and {f.damage for f in found} == {"known-answer"}
    assert all("the known answer has" in f.message and "the reference is wrong, too" in f.message for f in found)


def test_wrong_pd_alone_keeps_its_class():
    made = [garbled(knowing(o)) if o.cell == "pd-none" else knowing(o) for o in flawless()]
    judgement = judge(history(made), lookups(LENGTHS))
    assert {c.diagnosis.damage for c in judgement.cells if c.diagnosis} == {"target-kv"}


# --- the table -------------------------------------------------------------------------------------------------------


def documented() -> list[list[str]]:
    text = (REPOSITORY / "docs" / "checks.md").read_text(encoding="utf-8")
    table = text.split("## What is recorded, and who reads it", 1)[1].split("\n\n")
    (lines,) = [part for part in table if part.startswith("| field")]
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines.splitlines()[2:]]


def test_documentation_says_of_every_recorded_field_which_check_reads_it():
    fields = [
        f"{prefix}{name}"
        for prefix, model in (
            ("", Observation),
            ("legs.", Leg),
            ("legs.speculation.", Speculation),
            ("legs.streamed.", Streamed),
        )
        for name in model.model_fields
    ]
    assert [re.sub("`", "", row[0]) for row in documented()] == fields


def test_documentation_names_checks_that_there_are():
    known = {*check_names("bitwise"), *check_names("normal")}
    for field, checks, _ in documented():
        named = re.findall(r"`([a-z-]+)`", checks)
        assert set(named) <= known, field
        assert named or checks.startswith("not judged"), field
