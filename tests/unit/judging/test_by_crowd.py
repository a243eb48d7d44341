"""Methods whose steps draft fewer tokens, or none, beside other requests; steps without drafts are not reported."""

from __future__ import annotations

from random import Random

import pytest

from harness.history.acceptance import Steps, place
from harness.history.records import Observation, Speculation
from harness.history.verdict import Verdict
from harness.judging.checks import drafting
from harness.judging.diagnosis.location import locate
from harness.profiles.methods import traits_of
from tests.support.builders import change_final, changed_rows, history, lookup, observation, view, with_profile

K = 3
SCHEDULE = {"method": "eagle3", "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 1], [3, 4, 0]]}


def decoded(accepts: list[int], drafts: list[int], tokens: int) -> Steps:
    """The steps that an engine reports when it accepts ``accepts`` at each output token and its n-th step has
    ``drafts[n]``."""
    produced, number = 1, 0
    steps: list[tuple[int, int]] = []
    while produced < tokens:
        k = drafts[number] if number < len(drafts) else K
        accepted = min(accepts[produced], k)
        if k:
            steps.append((accepted, k))
        produced, number = produced + accepted + 1, number + 1
    return Steps.recorded([a for a, _ in steps], [d for _, d in steps], tokens)


def crowded(draw: Random) -> list[int]:
    """Drafts of each step of a request that others join twice."""
    return [k for _ in range(2) for k in [3] * draw.randrange(4) + [1] * draw.randrange(4) + [0] * draw.randrange(9)]


@pytest.mark.parametrize("seed", range(60))
def test_steps_of_a_right_drafter_agree_whatever_the_crowd(seed):
    draw = Random(seed)
    tokens = draw.randrange(2, 90)
    accepts = [draw.choice((0, 1, 2, 3, 3, 3)) for _ in range(tokens)]
    alone = decoded(accepts, [], tokens)
    ours = decoded(accepts, crowded(draw), tokens)
    placed = place(ours, alone, tokens, most_gaps=3)
    assert alone.unaccounted == 0
    assert placed is not None and placed.aligned.differing == ()
    assert len(placed.at) == len(ours.accepted)


def test_a_drafter_that_accepts_less_after_a_crowd_differs_wherever_its_steps_lie():
    missed = 0
    for seed in range(60):
        draw = Random(seed)
        accepts = [draw.choice((0, 1, 2, 3, 3, 3)) for _ in range(93)]
        drafts = [0] * draw.randrange(8, 20)
        lost = [a if n < 10 else 0 for n, a in enumerate(accepts)]
        placed = place(decoded(lost, drafts, 93), decoded(accepts, [], 93), 93, most_gaps=5)
        missed += placed is None or not placed.aligned.differing
    assert missed == 0


def test_fewer_drafts_are_compared_with_the_first_ones_of_the_reference():
    alone = Steps.recorded((3, 1), (3, 3), 7)
    placed = place(Steps.recorded((1, 1, 1), (1, 1, 1), 7), alone, 7, most_gaps=0)
    assert placed is not None
    assert placed.at == (1, 3, 5) and placed.expected == (1, None, 1)
    apart = place(Steps.recorded((1, 1, 1), (1, 1, 1), 7), alone, 7, most_gaps=0, nested=False)
    assert apart is not None and apart.aligned.common == 0, "a method whose drafts depend on how many they are"


def test_steps_without_drafts_come_in_as_many_gaps_as_others_can_make():
    alone = Steps.recorded((3, 3, 3), (3, 3, 3), 13)
    ours = Steps.recorded((3,), (3,), 13)
    assert ours.unaccounted == 8
    assert place(ours, alone, 13, most_gaps=0) is None, "an engine alone that leaves out drafts"
    assert place(ours, alone, 13, most_gaps=1) is not None


def test_more_tokens_than_the_answer_has_cannot_be_placed():
    alone = Steps.recorded((3,), (3,), 5)
    assert place(Steps.recorded((0, 3, 3), (3, 3, 3), 5), alone, 5, most_gaps=4) is None


def test_what_a_shorter_reference_step_does_not_tell_is_not_compared():
    alone = Steps.recorded((1, 1), (1, 1), 5)
    placed = place(Steps.recorded((3,), (3,), 5), alone, 5, most_gaps=1)
    assert placed is not None and placed.expected == (None,)


def test_only_methods_whose_k_depends_on_the_batch_are_read_so():
    dynamic = traits_of("eagle3", SCHEDULE)
    assert (dynamic.by_crowd, dynamic.pads, dynamic.up_to) == (True, False, True)
    assert not traits_of("ngram", {}).by_crowd and traits_of("eagle3", {}).pads


def holder(accepted: tuple[int, ...], drafted: tuple[int, ...], concurrent: int = 4) -> Observation:
    o = observation("single-dynamic", 40, scenario="crowd", part="holder", concurrent=concurrent)
    told = Speculation(
        per_step_accepted=accepted,
        per_step_drafted=drafted,
        num_steps=len(accepted),
        num_drafted=sum(drafted),
        num_accepted=sum(accepted),
        up_to=True,
    )
    return change_final(o, speculation=told)


OUTPUT = len(observation("single-none", 40).final.output_ids)
ALONE = decoded([3] * OUTPUT, [], OUTPUT)


def judged(o: Observation):
    made = history(
        [o], scenarios=[{"id": "crowd", "kind": "concurrent", "holder": "p40", "together": ["a", "b"], "late": ["c"]}]
    )
    made = with_profile(made, methods=[{"kind": "dynamic", "drafter": "x", "speculative_config": SCHEDULE}])
    rows = changed_rows(lookup([40], "dynamic"), lambda _: {"accepted": ALONE.accepted, "drafted": ALONE.drafted or ()})
    cell = view(made, "single-dynamic", {"none": lookup([40]), "dynamic": rows}, scenario="crowd")
    return cell, drafting.acceptance_baseline(cell)


def test_a_request_that_drafted_nothing_in_a_crowd_passes():
    steps = decoded([3] * OUTPUT, [0] * 9, OUTPUT)
    _, result = judged(holder(steps.accepted, steps.drafted or ()))
    assert (result.verdict, result.judged) == (Verdict.PASS, 1)


def test_lost_drafts_behind_a_crowd_are_a_regression_that_says_what_was_compared():
    steps = decoded([3] * 9 + [0] * OUTPUT, [0] * 8, OUTPUT)
    cell, result = judged(holder(steps.accepted, steps.drafted or ()))
    (finding,) = result.findings
    assert result.verdict is Verdict.REGRESSION
    assert "where they begin with the reference's and cut to as many drafts" in finding.message
    (located,) = locate(cell, [result])
    assert "comparable steps" in located.findings[0].location.text


def test_alone_a_step_without_drafts_is_a_finding():
    steps = decoded([3] * OUTPUT, [0] * 9, OUTPUT)
    _, result = judged(holder(steps.accepted, steps.drafted or (), concurrent=1))
    assert len(result.findings) == 1
