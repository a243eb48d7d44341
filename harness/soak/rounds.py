"""Judges one round by the checks of any run, and every later round by the first one, too."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.baseline.lookup import Lookup
from harness.checks.evidence import CellView, Evidence
from harness.checks.registry import judge_cell, judging_of
from harness.decision import Facts, decide
from harness.findings import CellVerdict, Finding, Judgement, Verdict, how_many, worst
from harness.history import History, Observation, RunRecord
from harness.known import KnownDefects, apply_known
from harness.sequences import common_prefix

_POOLED = 0.02
"""Share by which a round's accepted drafts per step may differ from the recorded ones of the same prompts. Seven rounds
at concurrency 4 differed by 0.5 % at most, for the chunks in which they were prefilled and for requests that were
preempted and resumed."""
_POOLED_ALL = 0.005
"""The same over all rounds together: the mean of 142 rounds was 0.21 % below, single ones −0.79 to +0.27 %. One step
that is lost in every hand-off of half of the prompts is 1 % at 192 output tokens, which each round would let pass."""
_ROUNDS = 10
"""Rounds from which on they are judged together."""
_KEPT = 50
"""Findings that are kept in full; the others are counted."""


class RoundJudge:
    """Judges rounds one after the other; keeps the outputs of the first, and findings up to a limit."""

    def __init__(self, folder: Path, baselines: Mapping[str, Lookup], known: KnownDefects | None) -> None:
        self._folder = folder
        self._baselines = baselines
        self._known = known
        self._first: dict[str, tuple[int, ...]] = {}
        self._lengths: list[tuple[float, float]] = []
        """Accepted drafts per step of each round and of its reference."""
        self.findings: list[Finding] = []
        self.found = 0

    def judge(self, run: RunRecord, observations: Sequence[Observation]) -> Verdict:
        """The verdict of a round. ``run`` has one cell, which is taken to be complete: a round is."""
        record = run.cells[0].model_copy(update={"state": "complete"})
        history = History(
            folder=self._folder,
            run=run.model_copy(update={"cells": (record,)}),
            observations=tuple(observations),
            own=True,
        )
        view = CellView(Evidence(history, self._baselines, judging_of(history)), record)
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
        """What all rounds show together and none of them alone."""
        if len(self._lengths) < _ROUNDS:
            return []
        return _shifted(cell, "soak-acceptance-all", self._lengths, _POOLED_ALL)

    def _keep(self, cell: CellVerdict, changed: Sequence[Finding]) -> None:
        found = [f for r in cell.results for f in r.findings if f.known is None] + list(changed)
        # A check that could not judge anything has no finding to show.
        found += [
            Finding(check=r.check, cell=cell.cell, verdict=r.verdict, damage="nothing-tested", message=r.note)
            for r in cell.results
            if not r.findings and r.verdict is not Verdict.PASS
        ]
        self.found += how_many(found)
        self.findings += found[: max(0, _KEPT - len(self.findings))]

    def _changed(self, view: CellView) -> list[Finding]:
        """Requests that got other tokens than the same request of the first round that answered it."""
        out = []
        for o in view.answered().values():
            ours = (o.final.output_ids if o.final else None) or ()
            first = self._first.setdefault(o.prompt_id, ours)
            if ours != first:
                at = common_prefix(ours, first)
                out.append(
                    view.finding(
                        "soak-repeats",
                        Verdict.REGRESSION,
                        "target-kv",
                        f"expected the tokens that this request got the first time, found others from output token "
                        f"{at} on in round {o.instance}: what changed is the load and the age of the engines alone",
                        o,
                        position=at,
                        found=list(ours[at : at + 8]),
                        expected=list(first[at : at + 8]),
                    )
                )
        return out


def _lengths(cell: CellVerdict) -> tuple[float, float] | None:
    """Accepted drafts per step over all requests of a round, and of the recorded ones; None when either is missing."""
    figures = next((r.figures for r in cell.results if r.check == "acceptance-baseline"), {})
    ours, reference = (figures.get(side, {}).get("acceptance_length_pooled") for side in ("ours", "reference"))
    return None if ours is None or reference is None else (ours - 1, reference - 1)


def _shifted(cell: str, check: str, lengths: Sequence[tuple[float, float]], share: float) -> list[Finding]:
    """A finding when the mean over rounds of accepted drafts per step is off by more than a share of the recorded one.
    Rounds have the same prompts, so each weighs the same."""
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
            evidence={"found": ours, "expected": reference, "rounds": len(lengths)},
        )
    ]
