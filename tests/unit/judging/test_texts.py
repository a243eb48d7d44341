"""The text of an answer is that of its tokens."""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks import counters
from harness.judging.checks.registry import judge
from harness.judging.checks.texts import texts
from tests.support.builders import change_final, history, lookups, observation, text_of, view, with_cells


def result(*observations, cell="pd-none"):
    return texts(view(history(list(observations)), cell))


def test_the_text_of_right_answers_passes():
    found = result(observation("pd-none", 40), observation("single-none", 40))
    assert found.verdict is Verdict.PASS and found.judged == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": "w1"}, "the text is not that of its tokens"),
        ({"text": ""}, "the text is not that of its tokens"),
        ({"stop_reason": "wx"}, "though the request has no stop string"),
        ({"stop_reason": 7}, "expected the answer to end with its stop token 7"),
        ({"stop_reason": 7, "finish_reason": "length"}, "7 is in the answer, which ended by length"),
        ({"text": "x", "own_text": "x"}, "the same tokens have another text than on the plain engine"),
    ],
)
def test_a_text_that_is_not_the_tokens_is_a_regression(changes, words):
    wrong = change_final(observation("pd-none", 40), **changes)
    found = result(wrong, observation("single-none", 40))
    assert found.verdict is Verdict.REGRESSION
    assert any(words in f.message for f in found.findings) and {f.damage for f in found.findings} == {"text"}


@pytest.mark.parametrize("lost", ["text", "own_text"])
def test_a_text_that_was_not_recorded_is_unknown(lost):
    found = result(change_final(observation("pd-none", 40), **{lost: None}))
    assert found.verdict is Verdict.UNKNOWN and found.judged == 1


def test_runs_without_texts_say_so():
    answered = history([observation("single-none", 40)])
    without = judge(with_cells(answered, "single-none", texts=False), lookups([40]))
    assert without.verdict is Verdict.PASS and any("texts of answers are not judged" in n for n in without.notices)
    assert not any("texts" in n for n in judge(answered, lookups([40])).notices)


@pytest.mark.parametrize(
    ("own", "text", "right"),
    [
        ("word\ufffd", "word", True),
        # A stream that met bytes of no character may go on otherwise.
        ("wo\ufffdrd", "word", True),
        ("word\ufffd", "wor", False),
    ],
)
def test_bytes_that_are_no_character(own, text, right):
    found = result(change_final(observation("pd-none", 40), own_text=own, text=text))
    assert (found.verdict is Verdict.PASS) is right
    assert ("no character" in found.note) is ("\ufffdr" in own)


def stopped(cell="single-eagle3", **changes):
    """An answer that a string ended, without figures of acceptance, as vLLM gives none then."""
    o = observation(cell, 40, feature="stop-string", known_answer=observation(cell, 40).final.output_ids)
    own = text_of(o.final.output_ids)
    string = own.split()[-1]
    told = {"stop_reason": string, "own_text": own, "text": own[: own.index(string)], "speculation": None}
    return change_final(o, **(told | changes))


def test_a_text_ends_before_its_stop_string():
    assert result(stopped(), cell="single-eagle3").verdict is Verdict.PASS
    own = stopped().final.own_text
    assert result(stopped(text=own), cell="single-eagle3").verdict is Verdict.REGRESSION
    found = result(stopped(stop_reason="nowhere"), cell="single-eagle3")
    assert any("'nowhere' in the text of the tokens, found none" in f.message for f in found.findings)


@pytest.mark.parametrize(("more", "agree"), [(0, True), (1, True), (8, True), (9, False), (-1, False)])
def test_engines_count_some_tokens_behind_a_stop_string(more, agree):
    made = history([stopped()])
    o = made.observations[0]
    grown = {**o.final.counters, "generation_tokens": len(o.final.output_ids) + more}
    found = counters.counters_agree(view(history([change_final(stopped(), counters=grown)]), "single-eagle3"))
    assert any("generation_tokens" in f.message for f in found.findings) is not agree


@pytest.mark.parametrize("after_text", [True, False])
@pytest.mark.parametrize(
    ("steps", "accepted", "agree"), [(0, 0, True), (1, 3, True), (3, 4, True), (9, 0, False), (1, 4, False)]
)
def test_drafts_behind_a_stop_string_may_be_counted_with_the_next_request(after_text, steps, accepted, agree):
    first = stopped() if after_text else observation("single-eagle3", 40)
    second = observation("single-eagle3", 65)
    (told,) = history([second]).observations
    counted = told.final.counters
    more = {
        "drafts": steps,
        "draft_tokens": 3 * steps,
        "accepted_tokens": accepted,
        **{f"accepted_at_{at}": min(max(accepted - at * steps, 0), steps) for at in range(3)},
    }
    grown = {**counted, **{name: counted.get(name, 0) + n for name, n in more.items()}}
    later = change_final(second.model_copy(update={"sequence": 1}), counters=grown)
    found = counters.counters_agree(view(history([first, later]), "single-eagle3"))
    told = [f.message for f in found.findings if "draft" in f.message or "accepted" in f.message]
    assert (not told) is ((agree and after_text) or not steps)
