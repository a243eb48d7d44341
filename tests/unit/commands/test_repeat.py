"""A/A counts on hand-made repetitions."""

from __future__ import annotations

import pytest

from harness.errors import UsageError
from harness.judging.checks.registry import judge
from harness.lab.aa import count, judge_again, render_markdown, write_repeat
from harness.reports.aa_result import AgainstItself
from tests.support.builders import change_final, garbled, history, lookups, observation, speculation, written_run
from tests.support.self_tests import against_itself

LENGTHS = [31, 40]


def repetition(change=lambda o: o):
    return history([change(observation("pd-eagle3", n)) for n in LENGTHS])


def result(histories) -> AgainstItself:
    counts = count(histories, [judge(h, lookups(LENGTHS)) for h in histories])
    return against_itself(*counts, repetitions=len(histories), versions={"vllm": "0"})


def test_equal_repetitions_have_no_alarm():
    found = result([repetition() for _ in range(20)])
    assert found.exit_code == 0
    (row,) = found.counts
    assert (row.requests, row.compared, row.tokens_differ, row.steps_differ, row.findings) == (40, 38, 0, 0, 0)
    assert found.verdicts == 20 and found.alarm_bound == pytest.approx(1 - 0.05 ** (1 / 20))
    assert "0 false alarms" in render_markdown(found)


def test_one_request_that_differs_is_counted_and_fails():
    found = result([repetition(), repetition(lambda o: garbled(o, at=0) if len(o.sent_ids) == 31 else o)])
    (row,) = found.counts
    assert (row.tokens_differ, row.steps_differ) == (1, 0)
    assert row.findings > 0
    assert found.exit_code == 1


def test_other_accepted_counts_are_seen():
    found = result(
        [repetition(), repetition(lambda o: change_final(o, speculation=speculation((0,) * len(o.final.output_ids))))]
    )
    assert found.counts[0].steps_differ == 2 and found.exit_code == 1


def test_broken_repetition_is_unknown():
    found = result([repetition(), repetition(lambda o: o.model_copy(update={"error": "500", "legs": ()}))])
    assert found.exit_code == 2


def test_what_an_interrupted_run_has_not_is_no_false_alarm():
    """Of twenty repetitions that a time limit ended there were 240 false alarms."""
    broken = repetition(lambda o: o.model_copy(update={"error": "the run was interrupted", "legs": ()}))
    ended = broken.model_copy(update={"run": broken.run.model_copy(update={"interrupted": True})})
    found = result([repetition(), ended]).model_copy(update={"interrupted": True})
    (row,) = found.counts
    assert (found.verdicts, found.alarms, row.findings, found.exit_code) == (1, 0, 0, 2)
    assert "interrupted" in found.sentence and "UNKNOWN" in render_markdown(found)


def test_nothing_repeated_is_unknown():
    empty = against_itself()
    assert empty.exit_code == 2 and empty.alarm_bound == 1.0


def test_recorded_repetitions_are_judged_again(tmp_path):
    with pytest.raises(UsageError, match=r"aa\.json"):
        judge_again(tmp_path)
    write_repeat(against_itself(), tmp_path)
    with pytest.raises(UsageError, match="expected 2 repetitions, found 0"):
        judge_again(tmp_path)
    for number in (1, 2):
        written_run(tmp_path / f"repetition-0{number}", history([observation("single-none", 40)]))
    again = judge_again(tmp_path)
    assert again.run_id == "r"
    assert [(c.cell, c.requests, c.compared) for c in again.counts] == [("single-none", 2, 1)]
