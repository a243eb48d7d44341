"""Hand-offs that come to D when P's lease has ended: asked again, and never taken for what the engines do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.checks import transfer
from tests.support.builders import change_final, history, observation, view, with_prefill
from tests.support.engines import session_of


def hand_off(seconds: float, expired: float = 0.0, **fields: object) -> Observation:
    """One that D's engine had for 0.61 s of its seconds."""
    made = observation("pd-none", **fields)
    p, d = made.legs
    times = {"queue_seconds": 0.01, "inference_seconds": 0.6}
    made = with_prefill(made, counters=p.counters | ({"nixl_expired": expired} if expired else {}))
    return change_final(made, counters=d.counters | times, seconds=seconds)


LATE = hand_off(30.9, expired=1.0)
PROMPT = hand_off(0.7)


def judged(*made: Observation) -> list[Verdict]:
    return [f.verdict for f in transfer.transfer(view(history(list(made)), "pd-none")).findings]


@pytest.mark.parametrize("seconds, late", [(30.9, True), (26.0, True), (25.0, False), (3.0, False)])
def test_lease_of_a_hand_off_that_came_late_is_no_regression_but_no_pass_either(seconds, late):
    assert judged(hand_off(seconds, expired=1.0)) == [Verdict.UNKNOWN if late else Verdict.REGRESSION]


def test_lease_that_ends_while_d_has_the_request_is_a_regression():
    held = change_final(LATE, counters=LATE.final.counters | {"queue_seconds": 30.0})
    assert judged(held) == [Verdict.REGRESSION]


def test_without_the_times_of_d_an_ended_lease_is_a_regression():
    silent = change_final(LATE, counters=observation("pd-none").final.counters)
    assert judged(silent) == [Verdict.REGRESSION]


def test_lease_of_a_late_hand_off_may_be_counted_with_the_next_one():
    assert judged(hand_off(30.9), hand_off(0.7, expired=1.0, tokens=64, sequence=1)) == [Verdict.UNKNOWN]


def test_one_that_was_asked_again_explains_one_ended_lease_and_no_second():
    stands = PROMPT.after_late(LATE)
    assert judged(stands) == []
    another = hand_off(0.7, expired=1.0, tokens=64, sequence=1)
    assert judged(stands, another) == [Verdict.REGRESSION]
    assert judged(PROMPT.after_late(hand_off(30.9)), another) == []


@pytest.mark.parametrize(
    "answers, kept, asked",
    [
        ([PROMPT], 0, 1),
        ([LATE, PROMPT], 1, 2),
        ([LATE, LATE], 1, 2),
        # What a late one did otherwise must not be lost.
        ([LATE, change_final(PROMPT, output_ids=(1, 2, 3))], 0, 2),
        ([change_final(LATE, output_ids=(1, 2, 3)), PROMPT], 0, 2),
        ([LATE, PROMPT.model_copy(update={"error": "broke"})], 0, 2),
    ],
)
def test_late_hand_offs_are_asked_once_more(answers, kept, asked, tmp_path, monkeypatch):
    session = session_of("pd-none", tmp_path)
    left = list(answers)
    monkeypatch.setattr(session, "_observe_once", lambda *_: left.pop(0))
    found = session.observe(session.group.cells[0], SimpleNamespace(id="p40"), "ids", 0)
    assert len(answers) - len(left) == asked
    assert found.final == answers[kept].final and found.attempts == kept + 1
    assert bool(judged(found)) is (found.final.seconds > 25)
