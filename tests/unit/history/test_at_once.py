"""Whether asking cold prompts together changes an answer."""

from __future__ import annotations

import pytest

from harness.history.at_once import in_words, proof_of
from harness.profiles.scenarios import AT_ONCE
from tests.support.builders import change_final, observation, speculation, with_prefill

LENGTHS = (31, 33, 40, 64)
ALONE = {o.prompt_id: o for n in LENGTHS for o in [observation("pd-eagle3", n)]}


def beside(**changes: object) -> list:
    return [o.model_copy(update={"scenario": AT_ONCE, "concurrent": 4, **changes}) for o in ALONE.values()]


def test_equal_answers_prove_it():
    found = proof_of(ALONE, beside(), None, True)
    assert found.holds and found.asked == 4 and "4 had the same answers" in in_words(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: change_final(o, output_ids=(1, *o.final.output_ids[1:])), "other tokens from output 0 on"),
        (lambda o: change_final(o, finish_reason="length"), "ended by length instead of stop"),
        (lambda o: change_final(o, speculation=speculation((0, 1, 2))), "other accepted drafts"),
        (lambda o: change_final(o, chosen_logprobs=tuple(p - 2e-5 for p in o.final.chosen_logprobs)), "2.0e-05 nats"),
        (lambda o: change_final(o, top_gaps=tuple(g + 1 for g in o.final.top_gaps)), "1.0e+00 nats"),
        (lambda o: change_final(o, chosen_logprobs=None), "one of the two only"),
        (lambda o: with_prefill(o, output_ids=(1,)), "other tokens from output 0 on"),
        (lambda o: o.model_copy(update={"error": "broke"}), "no answer"),
        (lambda o: o.model_copy(update={"legs": o.legs[:1]}), "no answer"),
    ],
)
def test_whatever_differs_disproves_it(change, words):
    first, *others = beside()
    found = proof_of(ALONE, [change(first), *others], None, True)
    assert not found.holds
    assert found.differing == (f"{first.prompt_id}: {found.differing[0].partition(': ')[2]}",)
    assert words in found.differing[0] and "one by one" in in_words(found)


def test_log_probs_may_round_by_as_much_as_the_profile_says():
    moved = [change_final(o, chosen_logprobs=tuple(p - 0.1 for p in o.final.chosen_logprobs)) for o in beside()]
    assert not proof_of(ALONE, moved, None, True).holds
    assert proof_of(ALONE, moved, 0.25, True).holds


def test_only_answers_that_tell_their_drafts_can_be_told_apart_in_crowds():
    silent = {key: change_final(o, speculation=None) for key, o in ALONE.items()}
    together = [change_final(o, speculation=None) for o in beside()]
    assert proof_of(silent, together, None, False).holds
    found = proof_of(silent, together, None, True)
    assert not found.holds and "no accepted drafts in the answer" in found.differing[0]


def test_nothing_compared_is_no_proof():
    assert not proof_of({}, beside(), None, True).holds
    assert not proof_of(ALONE, beside()[:1], None, True).holds
    assert "none were asked both ways" in in_words(proof_of({}, beside(), None, True))
