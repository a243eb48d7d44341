"""Two recorded runs side by side: verdicts, tokens, acceptance prompt by prompt, and findings that came or went."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from harness.acceptance import RequestCounts
from harness.checks.evidence import CellView, Evidence
from harness.checks.night import cell_counts
from harness.config import Judging
from harness.errors import UsageError
from harness.findings import Finding, Verdict
from harness.history import History, load_history
from harness.operations import assess
from harness.stats.paired import Difference, count_arms, differences
from harness.summary import RunSummary, grouped_findings


class CellPair(NamedTuple):
    """A cell in both runs."""

    cell: str
    verdicts: tuple[Verdict | None, Verdict | None]
    """None where the run did not have the cell."""
    common: int
    """Cold prompts that both answered."""
    equal: int
    """Of these, how many gave the same tokens."""
    positions: tuple[Difference, ...]
    """Acceptance at each draft position, second run minus first, paired by prompt."""


class Comparison(NamedTuple):
    runs: tuple[RunSummary, RunSummary]
    cells: tuple[CellPair, ...]
    gone: tuple[tuple[Finding, int], ...]
    """Findings of the first run alone: the first of each group, and how many."""
    new: tuple[tuple[Finding, int], ...]
    differing: tuple[tuple[str, str, str], ...]
    """What the runs had different: (name, first, second)."""

    @property
    def sentence(self) -> str:
        changed = [c for c in self.cells if c.verdicts[0] != c.verdicts[1]]
        tokens = sum(c.common - c.equal for c in self.cells)
        moved = [f"{c.cell}@{d.column.rpartition('@')[2]}" for c in self.cells for d in c.positions if d.excludes_zero]
        parts = [
            f"{len(changed)} of {len(self.cells)} cells with another verdict" if changed else "the same verdicts",
            f"{tokens} prompts with other tokens" if tokens else "the same tokens",
            f"acceptance beyond its interval at {', '.join(moved[:6])}" if moved else "no change of acceptance",
            f"{len(self.new)} groups of findings new, {len(self.gone)} gone",
        ]
        return "; ".join(parts)


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two recorded runs; each is judged by its own profile. Raises UsageError when they share no cell."""
    runs = (assess(load_history(first)), assess(load_history(second)))
    mine = [list(r.cells) for r in runs]
    names = list(dict.fromkeys([*mine[0], *mine[1]]))
    if not set(mine[0]) & set(mine[1]):
        raise UsageError(
            f"expected runs with a cell in common, found {', '.join(mine[0]) or 'none'} in {first} and "
            f"{', '.join(mine[1]) or 'none'} in {second}"
        )
    groups = [
        {(f.cell, f.scenario, f.check, f.verdict, f.damage): (f, n) for f, n, _ in grouped_findings(r.judgement)}
        for r in runs
    ]
    return Comparison(
        runs,
        tuple(_pair(name, runs) for name in names),
        tuple(v for k, v in groups[0].items() if k not in groups[1]),
        tuple(v for k, v in groups[1].items() if k not in groups[0]),
        tuple(_differing(runs[0].history, runs[1].history)),
    )


def _view(history: History, cell: str) -> CellView | None:
    record = history.cell(cell)
    return CellView(Evidence(history, {}, Judging()), record) if record is not None else None


def _pair(name: str, runs: tuple[RunSummary, RunSummary]) -> CellPair:
    views = [_view(r.history, name) for r in runs]
    verdicts = (runs[0].cells.get(name), runs[1].cells.get(name))
    if views[0] is None or views[1] is None:
        return CellPair(name, verdicts, 0, 0, ())
    answered = [v.answered() for v in views if v is not None]
    common = sorted(set(answered[0]) & set(answered[1]))
    outputs = [[o.final.output_ids if o.final else None for o in (side[key] for key in common)] for side in answered]
    equal = sum(a == b for a, b in zip(*outputs, strict=True))
    k = views[0].record.draft_tokens
    if not k or k != views[1].record.draft_tokens:
        return CellPair(name, verdicts, len(common), equal, ())
    counted = [cell_counts(v)[0] for v in views if v is not None]
    return CellPair(name, verdicts, len(common), equal, paired_by_prompt(counted[0], counted[1], k))


def paired_by_prompt(
    first: Mapping[str, RequestCounts], second: Mapping[str, RequestCounts], k: int
) -> tuple[Difference, ...]:
    """Acceptance at each of ``k`` positions, second minus first, over the requests that both have."""
    keys = sorted(set(first) & set(second))
    if not keys:
        return ()
    sides = [[(side[key].accepted_at, side[key].steps) for key in keys] for side in (first, second)]
    return differences(count_arms(sides, k))


def _differing(first: History, second: History) -> list[tuple[str, str, str]]:
    """Versions, hardware, prompts and settings that the two runs do not share."""
    out = []
    a, b = first.run, second.run
    for name in sorted({*a.versions, *b.versions}):
        out.append((name, a.versions.get(name), b.versions.get(name)))
    out.append(("prompts", a.prompts_sha256[:12], b.prompts_sha256[:12]))
    for name in ("processor", "cores", "gpus"):
        out.append((name, a.hardware.get(name), b.hardware.get(name)))
    for part in ("engine", "workload", "judging"):
        ours, theirs = (dict(r.profile.get(part) or {}) for r in (a, b))
        out += [(f"{part}.{key}", ours.get(key), theirs.get(key)) for key in sorted({*ours, *theirs})]
    out.append(("mutants", ", ".join(a.mutants) or None, ", ".join(b.mutants) or None))
    return [(name, str(x), str(y)) for name, x, y in out if x != y]
