"""What came of answers that were asked again: whether what was wrong with one by itself came again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from harness.history.records import COLD, Form, Observation
from harness.history.verdict import Verdict
from harness.judging.decision import Change, Facts, SecondStage, decide
from harness.judging.evidence import CellView
from harness.judging.findings import Finding
from harness.profiles.cells import CellName
from harness.util.text import counted


class AnswerId(NamedTuple):
    """An answer by its place, which is the same whenever it is asked."""

    cell: str
    scenario: str
    key: str
    form: Form

    @classmethod
    def of(cls, cell: CellView, o: Observation) -> AnswerId:
        return cls(cell.id, cell.scenario, o.key, o.form)


Judged = Mapping[AnswerId, Finding | None]
"""What a check found in each answer that it could judge."""


class Times(NamedTuple):
    """How often a check found something in an answer, of how many times that it was asked and could be judged."""

    found: int = 0
    asked: int = 0


class AskedAgain(NamedTuple):
    """The answers that were asked again, several times; empty where none was."""

    due: bool = False
    """Whether those that are wrong by themselves have to be asked again."""
    times: Mapping[str, Mapping[AnswerId, Times]] = {}
    """By check."""

    @classmethod
    def counted(cls, due: bool, rounds: Mapping[str, list[Judged]]) -> AskedAgain:
        """Count what each check found in each round."""
        times: dict[str, dict[AnswerId, Times]] = {}
        for check, judged in rounds.items():
            counts = times.setdefault(check, {})
            for found in judged:
                for answer, finding in found.items():
                    before = counts.get(answer, Times())
                    counts[answer] = Times(before.found + (finding is not None), before.asked + 1)
        return cls(due, times)

    def of(self, check: str, answer: AnswerId) -> Times:
        return self.times.get(check, {}).get(answer, Times())

    def verdict(self, check: str, cell: CellView, o: Observation, change: Change) -> tuple[Verdict, str]:
        """Return the verdict on an answer in which a check found something, and the reason, with what came of asking
        again."""
        answer = AnswerId.of(cell, o)
        facts = Facts(change=change, against="this run", few=True, second_stage=self._stage(check, answer))
        verdict, why = decide(facts)
        return verdict, why + self._words(check, answer, o.prompt_id)

    def _stage(self, check: str, answer: AnswerId) -> SecondStage:
        if not self.due:
            return "not needed"
        again = self.of(check, answer)
        if not again.asked:
            return "missing"
        return "confirmed" if again.found else "not confirmed"

    def _words(self, check: str, answer: AnswerId, prompt_id: str) -> str:
        """Return what came of asking again, to follow a sentence; empty where an answer was not asked again."""
        again = self.of(check, answer)
        if not again.asked:
            return ""
        said = [f"; asked again: found {again.found} of {counted(again.asked, 'time')}"]
        name = CellName.of(answer.cell)
        if name.topology == "pd":
            # Cold, since a single engine has no state of a pair.
            alone = self.of(check, AnswerId(name.single, COLD, prompt_id, "ids"))
            said += [f"in {name.single}, cold, {alone.found} of {counted(alone.asked, 'time')}"] if alone.asked else []
        return "; ".join(said)


NOT_ASKED = AskedAgain()
