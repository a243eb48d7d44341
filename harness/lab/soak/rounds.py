"""Judge each round with the checks of an ordinary run, and every later round against the first one, too."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.baselines.lookup import Lookup
from harness.history.folder import History
from harness.history.records import Observation, RunRecord
from harness.history.token_ids import common_prefix
from harness.history.verdict import Verdict, worst
from harness.judging.checks.registry import evidence_for, judge_cell
from harness.judging.decision import Facts, decide
from harness.judging.evidence import CellView
from harness.judging.figures import AcceptanceFigures, MeanDifference, RepeatDifference
from harness.judging.findings import CellVerdict, Finding, Judgement, how_many
from harness.judging.known_defects import apply_known
from harness.profiles.known_defects import KnownDefects

_POOLED = 0.02
"""Tolerated relative difference between a round's accepted drafts per step and the recorded ones of the same prompts.
Chunked prefill and preemption under load cause small differences."""
_POOLED_ALL = 0.005
"""The same over all rounds together. Losing one step in every hand-off of half of the prompts is 1 % at 192 output
tokens, which each single round would tolerate."""
_ROUNDS = 10
"""Fewest rounds that are judged together."""
_KEPT = 50
"""Most findings that are kept; further ones are only counted."""


class RoundJudge:
    """Judges rounds in turn. Keeps the outputs of the first, and findings up to a limit."""

    def __init__(self, folder: Path, baselines: Mapping[str, Lookup], known: KnownDefects | None) -> None:
        self._folder = folder
        self._baselines = baselines
        self._known = known
        self._first: dict[str, tuple[int, ...]] = {}
        self._lengths: list[tuple[float, float]] = []
        """Accepted drafts per step, of each round and of its reference."""
        self.findings: list[Finding] = []
        self.found = 0

    def judge(self, run: RunRecord, observations: Sequence[Observation]) -> Verdict:
        """Return the verdict of a round. ``run`` has one cell, which counts as complete because a round is.
        When the KV pools were empty is only known at the end of the soak."""
        record = run.cells[0].model_copy(update={"state": "complete", "emptied_s": {}})
        run = run.model_copy(update={"cells": (record,)})
        history = History(folder=self._folder, run=run, observations=tuple(observations), own=True)
        view = evidence_for(history, self._baselines).view(record)
        verdict = judge_cell(view)
        judged = Judgement(run_id=run.run_id, verdict=verdict.verdict, cells=(verdict,))
        cell = apply_known(judged, self._known, history).cells[0]
        changed = self._changed(view)
        if (lengths := _lengths(cell)) is not None:
            self._lengths.append(lengths)
            changed += _shifted(cell.cell, "soak-acceptance", [lengths], _POOLED)
        self._keep(cell, changed)
        return worst([cell.verdict, *(f.verdict for f in changed)])

    def together(self, cell: str) -> list[Finding]:
        """Return findings on the mean of all rounds, which no single round need show."""
        if len(self._lengths) < _ROUNDS:
            return []
        return _shifted(cell, "soak-acceptance-all", self._lengths, _POOLED_ALL)

    def _keep(self, cell: CellVerdict, changed: Sequence[Finding]) -> None:
        found = [f for r in cell.results for f in r.findings if f.known is None] + list(changed)
        # A check that could not judge anything has no finding.
        found += [
            Finding(check=r.check, cell=cell.cell, verdict=r.verdict, damage="nothing-tested", message=r.note)
            for r in cell.results
            if not r.findings and r.verdict is not Verdict.PASS
        ]
        self.found += how_many(found)
        self.findings += found[: max(0, _KEPT - len(self.findings))]

    def _changed(self, view: CellView) -> list[Finding]:
        """Return findings on requests whose tokens differ from those of their first answer in an earlier round."""
        out = []
        for o in view.answered().values():
            ours = o.output
            first = self._first.setdefault(o.prompt_id, ours)
            if ours == first:
                continue
            at = common_prefix(ours, first)
            message = (
                f"expected the tokens that this request got the first time, found others from output token {at} on in "
                f"round {o.instance}: only the load and the age of the engines changed"
            )
            figures = RepeatDifference(position=at, found=ours[at : at + 8], expected=first[at : at + 8])
            out.append(view.finding("soak-repeats", Verdict.REGRESSION, "target-kv", message, o, figures))
        return out


def _lengths(cell: CellVerdict) -> tuple[float, float] | None:
    """Return the accepted drafts per step of a round and of its reference; None when either is missing."""
    figures = next((r.figures for r in cell.results if r.check == "acceptance-baseline"), None)
    if not isinstance(figures, AcceptanceFigures):
        return None
    ours, reference = figures.ours.acceptance_length_pooled, figures.reference.acceptance_length_pooled
    return None if ours is None or reference is None else (ours - 1, reference - 1)


def _shifted(cell: str, check: str, lengths: Sequence[tuple[float, float]], share: float) -> list[Finding]:
    """Return a finding if the mean over rounds of accepted drafts per step differs from the recorded one.

    ``share`` is the tolerated relative difference. All rounds have the same prompts, so they weigh the same.
    """
    ours, reference = (statistics.fmean(side) for side in zip(*lengths, strict=True))
    if abs(ours - reference) <= share * reference:
        return []
    verdict, why = decide(Facts(change="rise" if ours > reference else "drop"))
    rounds = "a round" if len(lengths) == 1 else f"{len(lengths)} rounds"
    return [
        Finding(
            check=check,
            cell=cell,
            verdict=verdict,
            damage="engine-changed" if verdict is Verdict.IMPROVED else "drafter-kv",
            message=f"expected {reference:.3f} accepted drafts per step over all requests of {rounds}, as recorded, "
            f"within {100 * share:g} %, found {ours:.3f}: {why}",
            evidence=MeanDifference(found=ours, expected=reference, rounds=len(lengths)),
        )
    ]
