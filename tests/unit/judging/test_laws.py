"""The law of failures: the right one is named, and "if and only if" only where the requests leave no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judging.checks.registry import judge_cell
from harness.judging.diagnosis.law import IFF
from harness.judging.diagnosis.laws import Circumstances, law_of
from harness.profiles.load import load_profile
from harness.prompts.lengths import spills
from harness.prompts.model import Prompt, load_prompts
from harness.workload.at_once import Item
from harness.workload.cells import in_seeded_order
from tests.support.builders import change_final, garbled, history, lookups, observation, speculation, view

PROFILE = load_profile("cpu")
PROMPTS = load_prompts(PROFILE.workload.prompts).cold
Fails = Callable[[Circumstances], bool]


def asked(prompts: list[Prompt], seed: int | None = 1) -> list[Circumstances]:
    """Return the requests of cold prompts, by length or in the order of a seed."""
    items = [Item(p, "ids") for p in sorted(prompts, key=lambda p: p.tokens)]
    sent = items if seed is None else in_seeded_order(items, seed)
    return [Circumstances(failed=False, tokens=i.prompt.tokens, number=n) for n, i in enumerate(sent, 1)]


def failing(requests: list[Circumstances], fails: Fails) -> list[Circumstances]:
    return [r._replace(failed=fails(r)) for r in requests]


COLD = asked(list(PROMPTS))
SCENARIO = [
    Circumstances(
        False, 40 + n % 7, n + 1, repeated=n % 3 == 1, together=n % 4 > 1, parameter=("", "stop-string")[n % 2]
    )
    for n in range(48)
]
LAWS: dict[str, Fails] = {
    "N mod 32 is one of {0, 30, 31}": lambda r: spills(r.tokens, 32, 3),
    "the prompt has more than 128 tokens": lambda r: r.tokens > 128,
    "the prompt has fewer than 62 tokens": lambda r: r.tokens < 62,
    "sent from the 30th hand-off of this cell on": lambda r: r.number >= 30,
    "sent from the 2nd hand-off of this cell on": lambda r: r.number >= 2,
}
STATES: dict[str, Fails] = {
    "the same prompt was sent before": lambda r: r.repeated,
    "sent while another request runs": lambda r: r.together,
    "sent with stop-string": lambda r: r.parameter == "stop-string",
    "sent from the 20th request of this cell on": lambda r: r.number >= 20,
}


@pytest.mark.parametrize("clause", LAWS)
def test_the_law_of_a_defect_is_named_and_the_others_are_excluded(clause):
    law = law_of(failing(COLD, LAWS[clause]), 32, "hand-off")
    if "2nd" in clause:
        # A single request before it: chance would do.
        assert law.text.startswith(f"as far as these prompts show, fails if {clause}; which may be chance")
        return
    assert law.text.startswith(f"{IFF}{clause}") and "ruled out: " in law.text and law.exact
    assert ("number of earlier requests (" in law.text) == ("sent from" not in clause)


@pytest.mark.parametrize("clause", STATES)
def test_in_a_scenario_the_circumstance_is_named(clause):
    law = law_of(failing(SCENARIO, STATES[clause]), 32, cold=False)
    assert law.text.startswith(f"{IFF}{clause}") and law.residues is None


def test_prompts_sent_in_the_order_of_their_length_do_not_tell_age_from_length():
    """So a defect of age was told as a law of lengths, "if and only if", when prompts were sent by length."""
    by_length = asked([p for p in PROMPTS if p.tokens not in (29, 32, 61, 93, 95, 96, 97, 117, 125, 128)], None)
    law = law_of(failing(by_length, lambda r: r.number >= 15), 32, "hand-off")
    assert law.text.startswith("as far as these prompts show, fails if ") and IFF not in law.text
    assert "the prompt has more than" in law.text and "sent from the 15th hand-off of this cell on" in law.text


def test_a_defect_of_age_that_spares_some_requests_is_told_as_far_as_it_goes():
    law = law_of(failing(COLD, lambda r: r.number >= 20 and r.tokens % 5 != 0), 32, "hand-off")
    assert law.text.startswith("fails only if sent from the ") and "none of 19 others" in law.text and not law.exact


def test_a_length_at_which_one_request_passes_is_no_law_of_lengths():
    requests = failing(COLD, lambda r: r.tokens % 32 == 0 and r.number != next_of(0))
    law = law_of(requests, 32, "hand-off")
    assert law.text.startswith("fails only if N mod 32 = 0: ") and "none of " in law.text and not law.exact


def next_of(residue: int) -> int:
    return next(r.number for r in COLD if r.tokens % 32 == residue)


def test_one_failure_is_no_law_and_a_scenario_without_a_shown_one_has_none():
    assert "no law can be told from one" in law_of(failing(COLD, lambda r: r.number == 48 - 6), 32).text
    few = failing(SCENARIO[:4], lambda r: r.number > 2)
    assert law_of(few, 32, cold=False) is None and law_of(failing(SCENARIO, lambda r: False), 32) is None


def test_a_prompt_that_fails_once_of_twice_is_no_law_of_its_length():
    twice = [Circumstances(True, 96, 1), Circumstances(False, 96, 2, form="text", repeated=True)]
    assert law_of(twice, 32).text == "only 1 of 2 requests fails: no law can be told from one"
    assert "no law explains it" in law_of([*twice, Circumstances(True, 96, 3), Circumstances(False, 96, 4)], 32).text


@given(
    st.lists(
        st.builds(
            Circumstances,
            st.booleans(),
            st.integers(1, 200),
            st.just(0),
            st.sampled_from(["ids", "text"]),
            st.booleans(),
            st.booleans(),
            st.sampled_from(["", "grammar", "stop-token"]),
        ),
        max_size=60,
    ),
    st.sampled_from([16, 32]),
)
def test_no_request_contradicts_an_if_and_only_if_and_no_other_law_explains_it(drawn, size):
    requests = [r._replace(number=n) for n, r in enumerate(drawn, 1)]
    law = law_of(requests, size)
    if law is None or not law.text.startswith(IFF):
        return
    fails = [r.failed for r in requests]
    first = fails.index(True)
    explained = {
        "sent from": [n >= first for n in range(len(requests))] == fails,
        "sent before": [r.repeated for r in requests] == fails,
        "sent while": [r.together for r in requests] == fails,
        "sent as text": [r.form == "text" for r in requests] == fails,
    }
    fitting = [clause for clause, fits in explained.items() if fits]
    named = [clause for clause in explained if law.text.startswith(f"{IFF}{clause}")]
    assert fitting == named
    if law.residues is not None:
        assert all(r.failed for r in requests if r.tokens % size in law.residues and "N is more" not in law.text)
        assert all(r.tokens % size in law.residues for r in requests if r.failed)


@given(st.permutations(range(len(COLD))), st.integers(2, len(COLD) - 1))
def test_a_defect_of_age_is_never_a_law_of_lengths_alone(order, first):
    requests = [COLD[at]._replace(number=n, failed=n >= first) for n, at in enumerate(order, 1)]
    law = law_of(requests, 32, "hand-off")
    assert not law.text.startswith(IFF) or law.text.startswith(f"{IFF}sent from the ")


@given(st.sampled_from(sorted(set(LAWS) - {c for c in LAWS if c.startswith("sent")})), st.integers(0, 10_000))
def test_a_defect_of_lengths_is_named_in_any_seeded_order(clause, seed):
    law = law_of(failing(asked(list(PROMPTS), seed), LAWS[clause]), 32, "hand-off")
    assert clause in law.text and not law.text.startswith(f"{IFF}sent")


def test_the_age_of_engines_counts_requests_that_are_not_recorded_and_compares_first_and_last_tenth():
    lengths = [40, 64, 65, 96, 100, 120]
    config = {"id": "old", "kind": "aged", "prompts": [f"p{n}" for n in lengths], "requests": 500}
    rows = []
    sent = [
        *((f"young{at}", n) for at, n in enumerate([*lengths, 40])),
        *((f"old{at}", n) for at, n in enumerate(lengths)),
    ]
    for at, (part, n) in enumerate(sent):
        o = observation("pd-eagle3", n, scenario="old", part=part, sequence=at)
        if part.startswith("old"):
            o = garbled(change_final(o, speculation=speculation((0,) * 7)))
        aged_by = {"prefill": 500, "decode": 500} if part == "old0" else {}
        rows.append(o.model_copy(update={"aged_by": aged_by}))
    verdict = judge_cell(view(history(rows, scenarios=[config]), "pd-eagle3", lookups(lengths), scenario="old"))
    assert verdict.diagnosis is not None and verdict.diagnosis.law is not None
    assert verdict.diagnosis.law.text.startswith(f"{IFF}sent from the 508th request of this cell on")
    assert "100 % in the first tenth of the requests, 0 % in the last" in verdict.diagnosis.text
