"""Localisation on hand-made damage: law of lengths, blocks, shift, step, class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.diagnosis.law import rule_of_lengths
from harness.judging.diagnosis.location import name_blocks
from harness.judging.diagnosis.sources import is_copy, sources
from harness.judging.findings import Law
from harness.prompts import probe_task
from harness.prompts.lengths import spills
from tests.support.builders import (
    BLOCK,
    change_final,
    changed_rows,
    garbled,
    history,
    lookups,
    observation,
    prompt_ids,
    speculation,
    with_prefill,
)

LENGTHS = [30, 31, 32, 33, 42, 62, 63, 64, 65, 96, 117]


def cold(cell: str, change=lambda o: o) -> list:
    return [change(observation(cell, n)) for n in LENGTHS]


def diagnosis(observations: list, cell: str):
    return next(c for c in judge(history(observations), lookups(LENGTHS)).cells if c.cell == cell).diagnosis


def law(failed: dict[int, bool], block: int) -> Law:
    found = rule_of_lengths(failed, block)
    assert found is not None
    return found.law


# --- law of lengths --------------------------------------------------------------------------------------------------


def test_lookahead_law_is_found_from_the_observations_alone():
    found = law({n: spills(n, 32, 3) for n in range(7, 130)}, 32)
    assert found.residues == (0, 30, 31) and found.exact
    assert "N mod 32 is one of {0, 30, 31}" in found.text and "lookahead of 3 slots" in found.text
    assert "32 of 32 residues" in found.text


@given(st.integers(1, 6), st.sets(st.integers(7, 200), min_size=12))
def test_any_lookahead_is_explained_exactly_on_any_lengths(lookahead, lengths):
    failed = {n: spills(n, 32, lookahead) for n in lengths}
    if sum(failed.values()) < 2 or all(failed.values()):
        return
    found = law(failed, 32)
    assert found.exact
    if found.residues is not None:
        assert all((n % 32 in found.residues) == f for n, f in failed.items())


def test_threshold_all_none_and_no_rule():
    assert rule_of_lengths({8: False, 9: False}, 32) is None
    assert "every tested length" in law({8: True, 40: True}, 32).text
    assert "more than 64 tokens" in law({33: False, 64: False, 65: True, 80: True}, 32).text
    assert "fewer than 40" in law({8: True, 9: True, 40: False, 41: False}, 32).text
    above = law({64: False, 96: True, 128: True, 70: False, 100: False, 132: False}, 32)
    assert "N is more than 64" in above.text
    overfit = law({97: False, 42: False, 129: True, 106: True, 150: False}, 32)
    assert not overfit.exact and "no rule on the length explains it: 2 of 5" in overfit.text
    all_but_one = law({n: n % 32 != 20 for n in range(32, 96)}, 32)
    assert all_but_one.text == "fails if and only if not N mod 32 = 20; 32 of 32 residues were tested"
    assert law({7: True}, 32).text == "every tested length fails (7 alone)"
    none = law({40: True, 72: False, 104: True, 50: False, 60: True, 92: False}, 32)
    assert not none.exact and "no rule" in none.text


def test_one_failing_length_is_no_law():
    found = law({8: False, 40: True, 72: False}, 32)
    assert not found.exact and "no law can be told from one" in found.text


# --- sources ---------------------------------------------------------------------------------------------------------


def test_copies_have_one_source_each():
    prompt = prompt_ids(40)
    origin = sources(prompt, probe_task.expected_output(list(prompt)))
    assert origin[:-1] == list(range(2, 38)) and is_copy(origin)


def test_repeated_words_follow_the_copy():
    prompt = (9, 5, 6, 7, 6, 8)
    assert sources(prompt, (5, 6, 7, 6, 8)) == [1, 2, 3, 4, 5]
    assert sources(prompt, (6, 8)) == [None, 5]


def test_free_text_is_no_copy():
    assert not is_copy(sources((1, 2, 3, 4), (9, 3, 8, 1, 7)))
    assert not is_copy([])


@pytest.mark.parametrize(
    ("indices", "count", "text"),
    [
        ([], 3, "no block"),
        ([1], 3, "block 1"),
        ([1, 2], 4, "blocks 1 to 2"),
        ([0, 2], 4, "blocks 0, 2"),
        ([0, 1], 2, "all 2 blocks"),
        ([0], 1, "its only block"),
    ],
)
def test_block_names(indices, count, text):
    assert name_blocks(indices, count) == text


# --- diagnoses -------------------------------------------------------------------------------------------------------


def said(o, output, **changes):
    """The observation with this output, and what an engine says of each of its tokens."""
    size = len(output)
    told = {"usage_completion_tokens": size, "chosen_logprobs": (0.0,) * size, "top_gaps": (9.0,) * size}
    return change_final(o, output_ids=output, **told, **changes)


def lookahead_defect(o):
    """What D gives when P publishes one block too many: the prompt's last words, and the surplus in the parameters."""
    n = len(o.sent_ids)
    if not spills(n, BLOCK, 3):
        return o
    params = {**o.legs[0].kv_transfer_params, "remote_block_ids": [list(range(1, -(-n // BLOCK) + 2))]}
    output = (*o.sent_ids[n - 6 : n - 2], probe_task.EOT)
    steps = (0, 1, 1)
    return said(with_prefill(o, kv_transfer_params=params), output, speculation=speculation(steps))


def test_shifted_hand_off():
    found = diagnosis([*cold("pd-eagle3", lookahead_defect), *cold("single-eagle3")], "pd-eagle3")
    assert found.damage == "target-kv" and found.law.residues == (0, 30, 31)
    assert found.location.shift == 1 and found.location.blocks == (0, 1, 2)
    assert "P published 4 blocks for a prompt of 3, D pulled 3" in found.location.text
    assert "shifted by 1 block, block 0 is missing" in found.location.text
    assert "prompt position 2 in block 0" in found.location.text


def test_each_finding_states_class_location_and_law():
    judgement = judge(history([*cold("pd-eagle3", lookahead_defect), *cold("single-eagle3")]), lookups(LENGTHS))
    wrong = [f for f in judgement.findings if f.check == "tokens-baseline"]
    assert len(wrong) == sum(spills(n, BLOCK, 3) for n in LENGTHS)
    for finding in wrong:
        assert finding.damage == "target-kv" and finding.location.shift == 1
        assert "N mod 32 is one of {0, 30, 31}" in finding.law


def no_acceptance(o):
    return change_final(o, speculation=speculation((0,) * len(o.final.output_ids)))


def test_drafter_kv_is_lost_in_the_hand_off_only():
    found = diagnosis([*cold("pd-eagle3", no_acceptance), *cold("single-eagle3")], "pd-eagle3")
    assert found.damage == "drafter-kv" and "every tested length fails" in found.law.text
    assert found.location.step == 0 and found.location.blocks == (0, 1, 2, 3)
    assert "after the hand-off" in found.location.text


def test_the_same_without_a_hand_off_is_drafting_or_verification():
    def slow(o):
        return change_final(o, speculation=speculation((0,) * (len(o.final.output_ids) - 1)))

    both = [*cold("pd-eagle3", no_acceptance), *cold("single-eagle3", slow)]
    assert diagnosis(both, "pd-eagle3").damage == "sampler"
    assert diagnosis(both, "single-eagle3").damage == "sampler"


def test_block_in_the_middle_is_named():
    """Right up to block 1, then on with block 2: block 1 was not there."""

    def skip(o):
        n = len(o.sent_ids)
        if n < 3 * BLOCK:
            return o
        return said(o, (*o.sent_ids[2:BLOCK], *o.sent_ids[2 * BLOCK + 4 : n - 2], probe_task.EOT))

    found = diagnosis(cold("pd-none", skip), "pd-none")
    assert found.damage == "target-kv" and found.location.blocks == (1,)
    assert found.location.position == BLOCK and "more than 65 tokens" in found.law.text


def test_hit_that_cannot_be_is_named():
    def hit(o):
        counters = {"finished_requests": 1.0, "prefix_hits": 64.0}
        return change_final(o, counters=counters, output_ids=(7, *o.final.output_ids[1:]))

    cell = judge(history(cold("single-eagle3", hit)), lookups(LENGTHS)).cells[0]
    assert next(r for r in cell.results if r.check == "cold-stays-cold").verdict is Verdict.REGRESSION
    assert "64 tokens from its prefix cache where at most 0 can be" in cell.diagnosis.location.text
    assert cell.diagnosis.location.blocks == (0, 1)


def test_double_bos_is_an_input_damage_whatever_else_differs():
    def double(o):
        echoed = (probe_task.BOS, *o.sent_ids)
        return change_final(o, echoed_ids=echoed, usage_prompt_tokens=len(echoed), output_ids=(7,))

    assert diagnosis(cold("single-none", double), "single-none").damage == "input"


def test_free_text_fills_what_the_evidence_gives_and_says_so():
    """The reference does not repeat its prompt: the surplus block is still named, the tokens tell nothing."""
    free = {"output_ids": tuple(range(400, 420))}
    baselines = {method: changed_rows(lookup, lambda _: free) for method, lookup in lookups(LENGTHS).items()}
    judgement = judge(history(cold("pd-eagle3", lookahead_defect)), baselines)
    text = " ".join(f.location.text for f in judgement.findings if f.location)
    assert "does not repeat the prompt" in text and "shifted by 1 block" in text


SAMPLED = {"id": "sampled", "kind": "sampled", "prompts": ["p96"], "temperature": 0.2}


@pytest.mark.parametrize(("cold_is_right", "damage"), [(True, "sampler"), (False, "target-kv")])
def test_wrong_only_at_a_temperature_is_the_sampler(cold_is_right, damage):
    made = cold("pd-none", lambda o: o if cold_is_right else garbled(o, at=0))
    made.append(garbled(observation("pd-none", 96, scenario="sampled", temperature=0.2), at=0))
    judgement = judge(history(made, scenarios=[SAMPLED]), lookups(LENGTHS))
    assert next(c for c in judgement.cells if c.scenario == "sampled").diagnosis.damage == damage


# --- intermittent ----------------------------------------------------------------------------------------------------


def test_what_comes_and_goes_is_called_so_once_the_same_prompt_passes():
    made = cold("pd-none", lambda o: garbled(o, at=1) if len(o.sent_ids) in (33, 62) else o)
    alone = diagnosis(made, "pd-none")
    assert "no rule on the length explains it: 2 of 11 tested lengths fail (33, 62)" in alone.text
    assert "intermittent if these prompts pass when they are sent again (2 of 11 requests, 2.3 to 52 %" in alone.text
    again = [*made, observation("pd-none", 33, form="text")]
    assert (
        "intermittent: p33 fails once and passes once with the same tokens; 2 of 12" in diagnosis(again, "pd-none").text
    )


def test_what_was_compared_with_nothing_neither_failed_nor_passed():
    """Without a baseline, and with a plain engine that answered a part of the prompts."""
    plain = [o for o in cold("single-none", lambda o: o) if len(o.sent_ids) not in (33, 96)]
    made = [*plain, *cold("pd-none", lambda o: garbled(o, at=1) if len(o.sent_ids) == 62 else o)]
    found = next(c for c in judge(history(made), {}).cells if c.cell == "pd-none").diagnosis
    assert (found.failed, found.judged) == (1, len(LENGTHS) - 2)
    assert found.damage == "target-kv" and "only the length 62 fails of 9 tested" in found.text
