"""The search finds the first bad version, or a range that contains it, with as few tries as halving needs."""

from __future__ import annotations

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from harness.commands.bisect.search import bracket, next_index, search


@st.composite
def histories(draw):
    """(number of versions, index of the first bad one, indexes that say nothing); the ends always speak."""
    count = draw(st.integers(2, 80))
    first_bad = draw(st.integers(1, count - 1))
    silent = draw(st.sets(st.integers(1, count - 2))) if count > 2 else set()
    return count, first_bad, silent


def ask(history):
    count, first_bad, silent = history
    asked: list[int] = []

    def oracle(index):
        asked.append(index)
        return None if index in silent else index >= first_bad

    answers = search(count, oracle)
    assert list(answers) == asked, "a version was asked twice"
    return answers


@given(histories())
def test_range_contains_the_first_bad_one_and_is_as_small_as_skips_allow(history):
    count, first_bad, silent = history
    found = bracket(count, ask(history))
    assert found is not None and first_bad in found.first_bad
    older = max(i for i in range(first_bad) if i not in silent)
    assert found == (older, min(i for i in range(first_bad, count) if i not in silent))


@given(histories())
def test_without_skips_it_is_exact_and_halves(history):
    count, first_bad, _ = history
    answers = ask((count, first_bad, set()))
    found = bracket(count, answers)
    assert found is not None and list(found.first_bad) == [first_bad]
    assert len(answers) <= ceil(log2(count)) + 2


@given(histories())
def test_no_version_outside_the_bracket_is_tried(history):
    count, first_bad, silent = history
    answers: dict[int, bool | None] = {}
    while (index := next_index(count, answers)) is not None:
        known = bracket(count, answers)
        assert known is None or known.good < index < known.bad
        answers[index] = None if index in silent else index >= first_bad


@given(st.integers(2, 80), st.sampled_from([None, True, False]), st.sampled_from([None, True, False]))
def test_ends_that_do_not_hold_end_the_search_after_two_tries(count, oldest, newest):
    answers = search(count, lambda index: oldest if index == 0 else newest)
    if (oldest, newest) == (False, True):
        assert bracket(count, answers) is not None
    else:
        assert answers == {0: oldest, count - 1: newest}
        assert bracket(count, answers) is None


@given(st.integers(2, 80), st.data())
def test_whatever_the_answers_it_ends_beside_a_good_and_a_bad_one(count, data):
    """A finding that comes and goes has no first version: what is named is still a version that shows it after one that
    does not."""
    answers = search(
        count,
        lambda i: False if i == 0 else True if i == count - 1 else data.draw(st.sampled_from([True, False, None])),
    )
    found = bracket(count, answers)
    assert found is not None
    assert answers[found.good] is False and answers[found.bad] is True
    assert all(answers[i] is None for i in range(found.good + 1, found.bad))
