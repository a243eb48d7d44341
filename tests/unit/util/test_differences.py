"""How two values of plain data differ, in words: the first key that does, with both values."""

import pytest

from harness.util.differences import differing

NONE, EAGLE, MTP = {"kind": "none"}, {"kind": "eagle3", "k": 3}, {"kind": "mtp", "k": 3}
LONG = "the same words, again and again, " * 9


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["p.a.c: expected 2, found 3"]),
        ({"a": []}, {}, []),
        ((1, 2), [1, 2], []),
        ([NONE, EAGLE], [NONE, {**EAGLE, "k": 4}], ["p.eagle3.k: expected 3, found 4"]),
        (
            [NONE, EAGLE, MTP],
            [NONE, {**EAGLE, "k": 4}],
            ["p.eagle3.k: expected 3, found 4", "p.mtp: expected one, found none"],
        ),
        ([NONE, EAGLE], [EAGLE, NONE], ["p: expected the order none, eagle3, found eagle3, none"]),
        (
            [{"id": "a", "kind": "x"}, {"id": "b", "kind": "x"}],
            [{"id": "a", "kind": "x"}],
            ["p.b: expected one, found none"],
        ),
        ([EAGLE, {**EAGLE, "k": 4}], [EAGLE, EAGLE], ["p.1.k: expected 4, found 3"]),
        (
            [{"id": "a", "n": 1}, {"id": "a", "n": 2}],
            [{"id": "a", "n": 3}, {"id": "a", "n": 2}],
            ["p.0.n: expected 1, found 3"],
        ),
        ([{"n": 1}], [{"n": 1}, {"n": 2}], ["p.1: expected none, found one"]),
        ([1, 2], [1, 3], ["p: expected [1, 2], found [1, 3]"]),
        (list(range(99)), [*range(98), 7], ["p.98: expected 98, found 7"]),
        ([*range(98), None], list(range(98)), ["p: expected 99 entries, found 98"]),
        (list(range(99)), list(range(98)), ["p: expected 99 entries, found 98"]),
    ],
)
def test_the_first_key_that_differs_is_named(expected, found, said):
    assert list(differing(expected, found, "p")) == said


def test_a_long_text_is_shown_where_it_differs():
    (said,) = differing(LONG + "ends so", LONG + "ends otherwise", "p")
    assert "ends so', found" in said and said.endswith("ends otherwise'")
    assert said.count("…") == 2 and len(said) < 200
