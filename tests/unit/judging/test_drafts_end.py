"""A drafter whose context is shorter than the target's accepts nothing beyond it, and nobody says so."""

from __future__ import annotations

from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.checks import drafting
from harness.judging.diagnosis.diagnose import diagnose
from harness.judging.diagnosis.location import locate
from harness.observed.drafts_end import drafts_end
from tests.support.builders import changed_rows, history, lookup, observation, view

CONTEXT = 125


def ended_at(tokens: int, accepted_at: int = 2, context: int = CONTEXT) -> tuple[int, ...]:
    """Accepted drafts of each step of an answer that copies a prompt of so many tokens, until the context ends."""
    left = len(observation("single-none", tokens).final.output_ids) - 1
    steps: list[int] = []
    while sum(a + 1 for a in steps) < left:
        length = tokens + 1 + sum(a + 1 for a in steps)
        steps.append(accepted_at if length <= context else 0)
    return tuple(steps)


def answers(cell: str = "single-eagle3", lengths: tuple[int, ...] = (80, 90, 100), **how: int) -> list[Observation]:
    return [observation(cell, n, ended_at(n, **how)) for n in lengths]


def test_acceptance_that_ends_at_a_length_in_every_request_is_said_with_its_numbers():
    cell = view(history(answers()), "single-eagle3")
    end = drafts_end(cell)
    assert end is not None and CONTEXT - 2 <= end.tokens <= CONTEXT + 1
    assert end.requests == 3 and end.steps > 50 and end.accepted_before == end.before
    result = drafting.drafts_happened(cell)
    (finding,) = result.findings
    assert (result.verdict, finding.damage) == (Verdict.UNKNOWN, "nothing-tested")
    assert f"accepts nothing from token {end.tokens} on, in every request that gets there" in finding.message


def test_a_drafter_that_accepts_to_the_end_or_seldom_does_not_end():
    assert drafts_end(view(history(answers(context=999)), "single-eagle3")) is None
    seldom = [observation("single-eagle3", n, (0,) * 20 + (1,) + (0,) * (n - 24)) for n in (40, 65)]
    assert drafts_end(view(history(seldom), "single-eagle3")) is None, "chance explains it"
    assert drafts_end(view(history(answers(lengths=(100,))), "single-eagle3")) is None, "one request is no rule"
    nothing = [observation("single-eagle3", n, (0,) * (n - 4)) for n in (40, 65)]
    assert drafts_end(view(history(nothing), "single-eagle3")) is None


def test_the_diagnosis_of_lost_drafts_says_that_they_end():
    lengths = (80, 90, 100)
    right = changed_rows(
        lookup(list(lengths), "eagle3"), lambda row: {"accepted": ended_at(int(row.prompt_id[1:]), context=999)}
    )
    made = history([*(observation("single-none", n) for n in lengths), *answers(lengths=lengths)])
    cell = view(made, "single-eagle3", {"none": lookup(list(lengths)), "eagle3": right})
    found = locate(cell, [drafting.acceptance_baseline(cell)])
    diagnosis = diagnose(cell, found)
    assert found[0].verdict is Verdict.REGRESSION
    assert diagnosis is not None and "accepts nothing from token" in diagnosis.text
