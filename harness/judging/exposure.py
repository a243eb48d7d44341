"""The exposure of a run: how many answers had their tokens checked one by one, and which intermittent defect would have
shown in one of them.

An answer counts once, however many checks read its tokens. Answers of cells and scenarios in which a known defect
excuses wrong tokens do not count: another defect would be excused there, too. Registered tests judge a whole cell, so
that one wrong answer passes them; what they read does not count either.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from harness.history.verdict import Verdict
from harness.judging.checks.model import TestName
from harness.judging.figures import HypothesisFigures
from harness.judging.findings import CellVerdict, CheckResult, Judgement
from harness.profiles.cells import CellName
from harness.stats.quiet import excluded_above
from harness.util.text import counted

TOKEN_CHECKS = ("tokens-reference", "tokens-baseline", "rescored", "logprob-trace")
"""Checks that read the tokens of each answer and fail for a single wrong one."""
_COMPARES: TestName = "survival"
"""The registered test that compares tokens."""


class Exposure(NamedTuple):
    """Numbers of answers whose tokens were checked one by one."""

    by_cell: dict[str, int]
    handed_off: int
    """Those of P/D cells, but for requests of which the check of transfers says that nothing, or nothing that is
    proven, was handed over."""
    by_tests: bool = False
    """Whether registered tests compare the answers, all together: reports count equal ones, which checks nothing."""

    @property
    def answers(self) -> int:
        return sum(self.by_cell.values())

    @property
    def sentence(self) -> str:
        if not self.answers:
            counted_only = (
                " (equal answers are counted, but a single different one is no finding where rounding may part them)"
            )
            return (
                "no answer was checked token by token, so a bug that hits single requests is not excluded"
                f"{counted_only if self.by_tests else ''}"
            )
        checked = f"{counted(self.answers, 'answer')} checked token by token"
        shown = f"a bug that hits {_share(self.answers, 'request')}"
        if self.handed_off == self.answers:
            checked += ", all after a hand-off"
            shown = f"a bug that hits {_share(self.answers, 'P/D request')}"
        elif self.handed_off:
            checked += f", {self.handed_off:,} after a hand-off"
            shown += f", or {_share(self.handed_off, 'P/D request')},"
        elif any(n and CellName.of(cell).topology == "pd" for cell, n in self.by_cell.items()):
            checked += ", none after a hand-off"
        return f"{checked}; {shown} would have shown (95 % confidence)"

    def as_json(self) -> dict[str, Any]:
        """Return the exposure for machines; ``excludes_one_in`` is the rarest defect that would have shown with 95 %
        confidence, null if none would."""
        return {
            "answers": self.answers,
            "handed_off": self.handed_off,
            "excludes_one_in": one_in(self.answers) if self.answers else None,
            "sentence": self.sentence,
        }


def _share(answers: int, what: str) -> str:
    rarest = one_in(answers)
    return f"1 in {rarest:,} {what}s" if rarest > 1 else f"every {what}"


def one_in(answers: int) -> int:
    """Return N such that a defect in one of N answers shows at least once in this many, with 95 % confidence.

    Rounded down, so that what is said holds.
    """
    # The bound for one answer is 0.95, and the tolerance keeps exact values from falling below themselves.
    return int(1 / excluded_above(answers) + 1e-9)


def exposure_of(judgement: Judgement) -> Exposure:
    by_cell: dict[str, int] = {}
    handed_off = 0
    for cell in judgement.cells:
        answers = max((r.judged for r in token_results(cell)), default=0)
        by_cell[cell.cell] = by_cell.get(cell.cell, 0) + answers
        if CellName.of(cell.cell).topology == "pd":
            handed_off += max(0, answers - _not_handed_off(cell))
    by_tests = any(r.check == _COMPARES for cell in judgement.cells for r in cell.results)
    return Exposure(by_cell, handed_off, by_tests)


def _not_handed_off(cell: CellVerdict) -> int:
    found = [f for r in cell.results if r.check == "transfer" for f in r.findings if f.prompt_id and f.form != "text"]
    lost = {f.part or f.prompt_id for f in found if f.damage in ("routing", "nothing-tested")}
    return len(lost) + sum(f.others for f in found)


def token_results(cell: CellVerdict) -> list[CheckResult]:
    """Return the results of the checks that read each answer's tokens; none where a known defect excuses wrong ones."""
    results = [r for r in cell.results if r.check in TOKEN_CHECKS and not isinstance(r.figures, HypothesisFigures)]
    return [] if any(f.verdict is Verdict.KNOWN for r in results for f in r.findings) else results
