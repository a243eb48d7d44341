"""Verdicts, wrong answers and acceptance over many runs, and drifts that are too small to show in a single one.

Wrong answers are added up over all runs of a vLLM version on one kind of hardware: a defect of few requests shows in
many runs, although each of them can miss it. What a merged run has of its parts counts once.

For acceptance, each run is paired with the first one, prompt by prompt, and compared with the mean of all runs before
it (recursive residuals, which cancel the first run's own noise: Hawkins, "Self-starting CUSUM charts", The Statistician
36, 1987). The residuals go through a two-sided CUSUM (Page, "Continuous inspection schemes", Biometrika 41, 1954)
whose limit follows from Siegmund's approximation of the mean time between false notices, over all series together.
After a notice, and where a change is expected (another vLLM version, other models or prompts, a new baseline), the
sums start again with the next run as the first, so that one notice does not hide what follows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scipy.optimize import brentq

from harness.baselines.lookup import Lookup
from harness.errors import HarnessError, UsageError
from harness.history.acceptance import RequestCounts, pool_counts
from harness.history.folder import History, load_history
from harness.history.layout import CELLS, RUN, SHRUNK
from harness.history.records import RunRecord
from harness.history.run_kind import require_plain
from harness.history.verdict import Verdict
from harness.judging.checks.registry import GATES
from harness.judging.exposure import exposure_of, token_results
from harness.judging.figures import HypothesisFigures
from harness.judging.findings import Judgement
from harness.judging.references import PROFILE_OWN, References, lookups_for
from harness.observed.recorded_cell import recorded_cells
from harness.profiles.cells import CellName
from harness.reports.compare import paired_by_prompt
from harness.reports.judge_run import judged
from harness.reports.trend_model import (
    Answers,
    Drift,
    Engines,
    Intermittent,
    Point,
    Recording,
    Trend,
    TrendRun,
    WrongAlone,
    WrongAnswers,
)
from harness.scheduling.gpus import gpu_name
from harness.stats.sequential import e_value
from harness.util.files import sha256_json

_WRONG = (Verdict.REGRESSION, Verdict.SUSPECT)
ALLOWANCE = 0.5
"""Drift per run, in standard errors, that the CUSUM tolerates; 0.5 is optimal for shifts of one standard error."""


def _is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, also of one that lost its record; a shrunk case has answers, too."""
    return (folder / RUN).exists() or ((folder / CELLS).exists() and not (folder / SHRUNK).exists())


def load_trend(folder: Path, between: int = 365, references: References = PROFILE_OWN) -> Trend:
    """Load and judge all runs below a folder, in order of time, each by its own references or all by the same. Raises
    UsageError when there are fewer than two."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder of recorded runs, found none")
    if (folder / RUN).is_file():
        raise UsageError(f"{folder} is a run; name the folder above, with two runs or more in it")
    runs: list[TrendRun] = []
    left_out: list[str] = []
    seen: dict[str, str] = {}
    for path in sorted(filter(_is_run, folder.iterdir())):
        if path.is_symlink():
            continue
        try:
            history = load_history(path)
            require_plain(history)
            first = seen.setdefault(history.sha256 or str(path), path.name)
            if first != path.name:
                left_out.append(f"{path.name}: the same record as {first}, which counts once")
                continue
            if history.run.mutants:
                left_out.append(f"{path.name}: faults were injected")
                continue
            runs.append(_run(history, judged(history, references), lookups_for(history, references)))
        except HarnessError as error:
            left_out.append(f"{path.name}: {error}")
    runs, again = _each_recording_once(runs)
    left_out = sorted([*left_out, *again])
    if len(runs) < 2:
        raise UsageError(
            f"{folder}: expected at least two recorded runs, found {len(runs)}"
            + (f" ({'; '.join(left_out)[:300]})" if left_out else "")
        )
    runs.sort(key=lambda n: n.started)
    return trend_of(runs, between, left_out)


def _each_recording_once(runs: Sequence[TrendRun]) -> tuple[list[TrendRun], list[str]]:
    """Return the runs without those that another one has a part in common with, and a sentence for each left out: of
    such runs the one with most parts counts."""
    counted: dict[Recording, TrendRun] = {}
    kept: list[TrendRun] = []
    left_out: list[str] = []
    for run in sorted(runs, key=lambda n: -len(n.parts)):
        mine = run.parts or (run.recording,)
        whole = next((counted[r] for r in mine if r in counted), None)
        if whole is not None and whole.parts:
            what = f"it has a part of {whole.folder.name}" if run.parts else f"a part of {whole.folder.name}"
            left_out.append(f"{run.folder.name}: {what}, which counts once")
            continue
        kept.append(run)
        counted |= dict.fromkeys(mine, run)
    return kept, left_out


def _run(history: History, judgement: Judgement, baselines: Mapping[str, Lookup]) -> TrendRun:
    views = [v for v in recorded_cells(history) if v.speculative]
    return TrendRun(
        history.run.run_id,
        history.run.started,
        history.folder,
        judgement.verdict,
        judgement.by_cell(),
        {v.id: v.counts.by_key for v in views},
        {v.id: v.record.draft_tokens for v in views},
        str(history.run.versions.get("vllm")),
        answers_of(judgement),
        {v.id: _level(history, v.lineup, baselines.get(v.lineup)) for v in views},
        tuple(f"{c.cell} {r.check}" for c in judgement.cells for r in c.results if r.verdict is Verdict.SUSPECT),
        _wrong_alone(history, judgement),
        _hardware(history.run),
        tuple(Recording(p.run_id, p.started) for p in history.run.merged.parts) if history.run.merged else (),
    )


def _hardware(run: RunRecord) -> str:
    return gpu_name(run.hardware.get("gpus") or ()) if run.asked_for.engine.on_gpu else "CPU"


def _wrong_alone(history: History, judgement: Judgement) -> WrongAlone | None:
    """Return what the gates of single answers found, if one of them judged."""
    judged = [r for c in judgement.cells for r in c.results if r.check in GATES and r.judged]
    wrong = any(f.verdict in _WRONG for r in judged for f in r.findings)
    return WrongAlone(wrong, len(GATES) * history.run.asked_for.judging.single_alpha) if judged else None


def _level(history: History, lineup: str, lookup: Lookup | None) -> str:
    """Return a text that changes wherever the acceptance of a lineup may: with vLLM, models, prompts or baseline."""
    recorded = lookup.source.header.provenance.recorded if lookup is not None and lookup.source is not None else ""
    # Earlier baselines are not kept, so that only the newest one divides the runs.
    since = recorded if history.run.started >= recorded else ""
    identity = sha256_json(history.run.identities.get(lineup, {}))
    return f"{history.run.versions.get('vllm')} {identity} {since}"


def answers_of(judgement: Judgement) -> dict[str, Answers]:
    """Return checked and wrong answers by cell; without checks of single answers, those that a registered test counted.

    A single answer that is wrong is a REGRESSION in the bitwise tier and SUSPECT in the normal one.
    """
    checked = exposure_of(judgement).by_cell
    found: dict[str, Answers] = {}
    for cell in judgement.cells:
        wrong = [[f for f in r.findings if f.verdict in _WRONG] for r in token_results(cell)]
        listed = len({f.part or f.prompt_id for findings in wrong for f in findings})
        unlisted = max((sum(f.others for f in findings) for findings in wrong), default=0)
        before = found.get(cell.cell, Answers(0, checked[cell.cell]))
        found[cell.cell] = before._replace(wrong=min(before.wrong + listed + unlisted, before.checked))
    return {cell: n if n.checked else _tested(judgement, cell) for cell, n in found.items()}


def _tested(judgement: Judgement, cell: str) -> Answers:
    """Return the answers that parted from the method's record by their last token, other than at a near tie."""
    results = [r for c in judgement.cells if c.cell == cell for r in c.results if r.check == "survival"]
    for figures in (r.figures for r in results):
        if isinstance(figures, HypothesisFigures) and figures.columns:
            column = figures.columns[-1]
            return Answers(round((column.found or 0.0) * column.prompts), column.prompts)
    return Answers(0, 0)


def trend_of(runs: Sequence[TrendRun], between: int, left_out: Sequence[str] = ()) -> Trend:
    """Compute points and drifts of runs that are in order of time."""
    series = [
        (cell, p)
        for cell in dict.fromkeys(c for n in runs for c in n.counts)
        for p in range(max(n.draft_tokens.get(cell, 0) for n in runs))
    ]
    limit = limit_for(between * max(1, len(series)))
    points: list[Point] = []
    drifts: list[Drift] = []
    for cell, position in series:
        mine, found = _series(runs, cell, position, limit)
        points += mine
        drifts += found
    suspects = Counter(s for n in runs for s in dict.fromkeys(n.suspects))
    return Trend(
        tuple(runs),
        tuple(points),
        tuple(drifts),
        limit,
        between,
        tuple(left_out),
        tuple(_wrong_answers(runs)),
        tuple((what, count) for what, count in suspects.most_common() if count > 1),
        tuple(_intermittent(runs)),
    )


def _intermittent(runs: Sequence[TrendRun]) -> Iterator[Intermittent]:
    """Yield the engines with runs that have an answer which is wrong by itself."""
    for engines, mine in _by_engines(runs):
        alone = [n.alone for n in mine if n.alone is not None]
        found = sum(a.found for a in alone)
        if found:
            chance = max(a.chance for a in alone)
            yield Intermittent(engines, found, len(alone), chance, e_value(found, len(alone), chance))


def _by_engines(runs: Iterable[TrendRun]) -> Iterable[tuple[Engines, list[TrendRun]]]:
    found: dict[Engines, list[TrendRun]] = {}
    for run in runs:
        found.setdefault(run.engines, []).append(run)
    return found.items()


def _wrong_answers(runs: Sequence[TrendRun]) -> Iterator[WrongAnswers]:
    """Yield the sums of each kind of engines: P/D cells, single cells, and every cell that had a wrong answer."""
    for engines, of in _by_engines(runs):
        mine = [n.answers for n in of]
        cells = list(dict.fromkeys(c for answers in mine for c in answers))
        topologies = {c: CellName.of(c).topology for c in cells}
        groups = {
            "P/D": [c for c in cells if topologies[c] == "pd"],
            "single engine": [c for c in cells if topologies[c] != "pd"],
            **{c: [c] for c in cells if any(c in answers and answers[c].wrong for answers in mine)},
        }
        for what, members in groups.items():
            nights = [[answers[c] for c in members if c in answers and answers[c].checked] for answers in mine]
            checked = sum(n.checked for night in nights for n in night)
            if checked:
                wrong = sum(n.wrong for night in nights for n in night)
                yield WrongAnswers(engines, what, sum(bool(night) for night in nights), wrong, checked)


@dataclass
class _Sums:
    """The CUSUM of one series since its last restart."""

    level: str
    first: int
    counts: Mapping[str, RequestCounts]
    before: list[float] = field(default_factory=lambda: [0.0])
    """Differences of all runs from the first one, which has none from itself."""
    upper: float = 0.0
    lower: float = 0.0
    since: dict[bool, int] = field(default_factory=dict)
    """Index of the run since which a sum has been growing: of falls (True) or of rises."""

    def add(self, run: int, effect: float, error: float) -> None:
        z = _residual(effect, error, self.before)
        self.before.append(effect)
        upper, lower = max(0.0, self.upper + z - ALLOWANCE), max(0.0, self.lower - z - ALLOWANCE)
        for falls, old, new in ((False, self.upper, upper), (True, self.lower, lower)):
            if old == 0 and new > 0:
                self.since[falls] = run
        self.upper, self.lower = upper, lower


def _series(runs: Sequence[TrendRun], cell: str, position: int, limit: float) -> tuple[list[Point], list[Drift]]:
    points: list[Point] = []
    drifts: list[Drift] = []
    sums: _Sums | None = None
    for index, run in enumerate(runs):
        counted = run.counts.get(cell)
        k = run.draft_tokens.get(cell, 0)
        if not counted or position >= k:
            continue
        level = run.levels.get(cell, "")
        effect: float | None = 0.0
        if sums is None or sums.level != level:
            sums = _Sums(level, index, counted)
        else:
            found = paired_by_prompt(sums.counts, counted, k)
            effect = found[position].effect if found and not math.isnan(found[position].effect) else None
            if effect is not None:
                sums.add(index, effect, found[position].error)
        rate = pool_counts(counted.values(), k).rates[position]
        points.append(Point(index, cell, position, rate, effect, sums.upper, sums.lower))
        if max(sums.upper, sums.lower) > limit:
            falls = sums.lower > sums.upper
            drifts.append(Drift(cell, position, index, sums.since[falls], falls, effect or 0.0, sums.first))
            sums = None
    return points, drifts


def _residual(effect: float, error: float, before: Sequence[float]) -> float:
    """Return the distance of a run from the mean of those before it, in standard errors of that distance.

    ``error`` is the standard error of a difference of two runs, sqrt(2) times that of one. It is zero for runs that
    are bitwise equal; any change is then a large one.
    """
    distance = effect - sum(before) / len(before)
    if abs(distance) < 1e-12:
        return 0.0
    if not error > 0:
        return math.copysign(10.0, distance)
    return distance / (error / math.sqrt(2) * math.sqrt(1 + 1 / len(before)))


def limit_for(runs: float) -> float:
    """Return the limit h at which a two-sided CUSUM of one series gives one false notice in ``runs`` runs.

    Siegmund's approximation of the one-sided mean run length is (exp(2 k b) - 2 k b - 1) / (2 k^2) with
    b = h + 1.166 (Sequential Analysis, 1985, p. 27); two sides halve it.
    """

    def excess(h: float) -> float:
        b = h + 1.166
        return (math.exp(2 * ALLOWANCE * b) - 2 * ALLOWANCE * b - 1) / (2 * ALLOWANCE**2) / 2 - runs

    return float(brentq(excess, 0.0, 60.0)) if excess(0.0) < 0 else 0.0
