"""Comparison of two recorded runs: verdicts, tokens, acceptance paired by prompt, and findings of only one of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UsageError
from harness.history.acceptance import RequestCounts
from harness.history.folder import History, load_history
from harness.history.plan import ROUTER
from harness.history.records import RunRecord
from harness.history.verdict import Verdict
from harness.judging.references import PROFILE_OWN, References
from harness.observed.recorded_cell import RecordedCell
from harness.reports.cause_words import headline_of
from harness.reports.causes import Cause, group_key
from harness.reports.judge_run import assess
from harness.reports.summary import RunSummary
from harness.stats.paired import Difference, count_arms, differences
from harness.util.text import counted


class CellPair(NamedTuple):
    """One cell in both runs."""

    cell: str
    verdicts: tuple[Verdict | None, Verdict | None]
    """None where the run did not have the cell."""
    common: int
    """Number of cold prompts that both runs answered."""
    equal: int
    """How many of the common prompts gave the same tokens."""
    positions: tuple[Difference, ...]
    """Acceptance at each draft position, second run minus first, paired by prompt."""

    @property
    def moved(self) -> list[str]:
        """Positions at which acceptance changed significantly."""
        return [d.column.rpartition("@")[2] for d in self.positions if d.excludes_zero]

    def could_hide(self, share: float) -> bool:
        """Return whether acceptance did not change significantly, though a change of ``share`` may be there: the
        prompts are too few to tell."""
        # Of one prompt there is no interval.
        return not self.moved and not all(-share < d.low <= d.high < share for d in self.positions)

    @property
    def same_tokens(self) -> str:
        """How many of the common prompts gave the same tokens."""
        return f"{self.equal} of {self.common}" if self.common else "not compared"


class Comparison(NamedTuple):
    runs: tuple[RunSummary, RunSummary]
    cells: tuple[CellPair, ...]
    gone: tuple[Cause, ...]
    """What the first run alone found, by cause: a cause that both have is there with the findings of one run only."""
    new: tuple[Cause, ...]
    """The same for the second run."""
    differing: tuple[tuple[str, str, str], ...]
    """Versions, hardware and settings that differ: (name, first, second)."""
    stated: tuple[tuple[str, str, str], ...] = ()
    """What engines ran in both, whether or not it differs: (name, first, second)."""
    names: tuple[str, str] = ("first", "second")
    """What the two runs are called."""

    @property
    def _tokens_alike(self) -> str:
        return "the same tokens" if any(c.common for c in self.cells) else "no tokens to compare"

    @property
    def must_detect_points(self) -> float:
        """The change of acceptance that the runs were to see, in percentage points; of both profiles the larger."""
        return max(r.history.run.asked_for.judging.must_detect_points for r in self.runs)

    @property
    def _no_change(self) -> str:
        compared = [c for c in self.cells if c.positions]
        if not compared:
            return "no acceptance to compare"
        if not any(d.effect for c in compared for d in c.positions):
            return "the same acceptance"
        coarse = [c for c in compared if c.could_hide(self.must_detect_points / 100)]
        if not coarse:
            return "no significant change of acceptance"
        few = ", ".join(f"{c.cell}: {max(d.units for d in c.positions)}" for c in coarse[:6])
        told = f"whether acceptance changed by {self.must_detect_points:g} points"
        rest = "" if len(coarse) == len(compared) else "; elsewhere no significant change"
        return f"too few common prompts to tell {told} ({few}){rest}"

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What the two runs are, and in what else they differ: (name, first, second)."""
        return [*self.stated, *(row for row in self.differing if row[0] not in _IN_STATED)]

    @property
    def sentence(self) -> str:
        changed = [c for c in self.cells if c.verdicts[0] != c.verdicts[1]]
        tokens = sum(c.common - c.equal for c in self.cells)
        moved = [f"{c.cell}@{position}" for c in self.cells for position in c.moved]
        if len({r.history.sha256 or id(r.history) for r in self.runs}) == 1:
            return "Both are the same record, so that nothing can differ"
        parts = [
            f"{len(changed)} of {counted(len(self.cells), 'cell')} with a different verdict"
            if changed
            else "the same verdicts",
            f"{counted(tokens, 'prompt')} with different tokens" if tokens else self._tokens_alike,
            f"acceptance changed significantly at {', '.join(moved[:6])}" if moved else self._no_change,
            f"{counted(len(self.new), 'new cause')}, {len(self.gone)} resolved"
            + (f"; new: {headline_of(self.new)}" if self.new else ""),
        ]
        words = "; ".join(parts)
        return words[0].upper() + words[1:]


def compare_runs(first: Path, second: Path, references: References = PROFILE_OWN) -> Comparison:
    """Compare two recorded runs, each judged by its own profile or both by the same references. Raises UsageError when
    they share no cell."""
    of_both = references._replace(of_both=True)
    runs = (assess(load_history(first), of_both), assess(load_history(second), of_both))
    mine = [list(r.cells) for r in runs]
    names = list(dict.fromkeys([*mine[0], *mine[1]]))
    if not set(mine[0]) & set(mine[1]):
        raise UsageError(
            f"expected runs with a cell in common, found {', '.join(mine[0]) or 'none'} in {first} and "
            f"{', '.join(mine[1]) or 'none'} in {second}"
        )
    groups = [{group_key(f) for f in r.judgement.findings} for r in runs]
    return Comparison(
        runs,
        tuple(_pair(name, runs) for name in names),
        tuple(filter(None, (c.among(groups[0] - groups[1], runs[0].history) for c in runs[0].causes))),
        tuple(filter(None, (c.among(groups[1] - groups[0], runs[1].history) for c in runs[1].causes))),
        tuple(_differing(runs[0].history, runs[1].history)),
        tuple((name, of(runs[0].history.run), of(runs[1].history.run)) for name, of in _STATED.items()),
    )


def _vllm(run: RunRecord) -> str:
    version, build = (run.versions.get(name) for name in ("vllm", "vllm_build"))
    return f"{version or 'unknown'}{f'+{build}' if build else ''}"


def _engines(run: RunRecord) -> str:
    """Return the interpreters of the engines, or the addresses of servers that ran already."""
    return (
        ", ".join(dict.fromkeys(e.argv[1 if e.attached else 0] for e in run.engines if e.argv and e.role != ROUTER))
        or "none"
    )


_STATED: dict[str, Callable[[RunRecord], str]] = {
    "vLLM": _vllm,
    "engines": _engines,
    "engine flags": lambda run: shlex.join(run.engine_flags) or "none",
    "harness": lambda run: run.harness_version + (f", commit {run.git_commit[:12]}" if run.git_commit else ""),
}
_IN_STATED = ("vllm", "vllm_build", "harness")
"""Versions that are a part of these."""


def _view(history: History, cell: str) -> RecordedCell | None:
    record = history.cell(cell)
    return RecordedCell(history, record) if record is not None else None


def _pair(name: str, runs: tuple[RunSummary, RunSummary]) -> CellPair:
    views = [_view(r.history, name) for r in runs]
    verdicts = (runs[0].cells.get(name), runs[1].cells.get(name))
    if views[0] is None or views[1] is None:
        return CellPair(name, verdicts, 0, 0, ())
    first, second = views[0].answers(), views[1].answers()
    common = sorted(first.keys() & second.keys())
    equal = sum(first[key].output == second[key].output for key in common)
    k = views[0].record.draft_tokens
    if not k or k != views[1].record.draft_tokens:
        return CellPair(name, verdicts, len(common), equal, ())
    counted = [v.counts.by_key for v in views if v is not None]
    return CellPair(name, verdicts, len(common), equal, paired_by_prompt(counted[0], counted[1], k))


def paired_by_prompt(
    first: Mapping[str, RequestCounts], second: Mapping[str, RequestCounts], k: int
) -> tuple[Difference, ...]:
    """Return the differences of acceptance at each of ``k`` positions, second minus first, over common requests."""
    keys = sorted(set(first) & set(second))
    if not keys:
        return ()
    sides = [[(side[key].accepted_at, side[key].trials) for key in keys] for side in (first, second)]
    return differences(count_arms(sides, k))


def _differing(first: History, second: History) -> list[tuple[str, str, str]]:
    """Return versions, hardware, prompts and settings that differ between the runs: (name, first, second)."""
    out = []
    a, b = first.run, second.run
    for name in sorted({*a.versions, *b.versions}):
        out.append((name, a.versions.get(name), b.versions.get(name)))
    out.append(("prompts", a.prompts_sha256[:12], b.prompts_sha256[:12]))
    for name in ("processor", "cores", "gpus"):
        out.append((name, a.hardware.get(name), b.hardware.get(name)))
    for part in ("engine", "workload", "judging"):
        ours, theirs = (r.asked_for.section(part) for r in (a, b))
        out += [(f"{part}.{key}", ours.get(key), theirs.get(key)) for key in sorted({*ours, *theirs})]
    out.append(("injected faults", ", ".join(a.mutants) or None, ", ".join(b.mutants) or None))
    shown = [(name, _shown(x), _shown(y)) for name, x, y in out]
    return [row for row in shown if row[1] != row[2]]


def _shown(value: Any) -> str:
    """Return a setting as people write it, without Python's brackets: ``none``, ``a, b``, ``NAME=1``."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_shown(of)}" for key, of in sorted(value.items())) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    return "none" if value is None else str(value)
