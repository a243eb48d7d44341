"""The order of the verdicts."""

from __future__ import annotations

from harness.history.verdict import Verdict, worst


def test_what_was_found_outweighs_missing_evidence_but_for_an_improvement():
    order = [Verdict.PASS, Verdict.KNOWN, Verdict.IMPROVED, Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.DRIFT]
    for better, worse in zip(order, [*order[1:], Verdict.REGRESSION], strict=True):
        assert worst([worse, better]) is worst([better, worse]) is worse
    assert worst([]) is Verdict.UNKNOWN
