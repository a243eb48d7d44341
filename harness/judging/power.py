"""Power analysis before a run: the registered tests, their significance levels and the effects they can detect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.baselines.index import BaselineIndex
from harness.baselines.lookup import Limits, Lookup, look_up
from harness.baselines.model import Baseline
from harness.baselines.summary import baseline_arms
from harness.history.identity import identity_of
from harness.history.records import COLD
from harness.judging.checks.hypothesis_tests import tests_of
from harness.judging.checks.model import TestName, required
from harness.judging.checks.pooled import COLUMNS
from harness.judging.detection import Detectable, Floor, Level, Sample, seen_in_answers, seen_in_rate, stage_power
from harness.profiles.availability import reason_for
from harness.profiles.cells import Cell, CellName
from harness.profiles.model import Judging, Profile
from harness.profiles.scenarios import AT_ONCE
from harness.prompts.lengths import Stratum
from harness.prompts.model import Prompt
from harness.scheduling.gpus import gpus
from harness.stats.paired import by_unit, correlation_within, differences
from harness.stats.power import units_needed
from harness.stats.trace import LEAST_TOKENS
from harness.util.machine import now
from harness.workload.cells import CellWork, cold_prompts
from harness.workload.prepare import Prepared
from harness.workload.scripts import drawn

ASSUMED_SD = 0.044
"""Standard deviation of one prompt's difference at position 0, used where no A/A was measured. From the default scene
of ``tests/support/simulate.py``: 107 steps, rate 0.73, every request diverging somewhere."""
ASSUMED_STEPS = 107
"""Verify steps of a request in that scene, used where there is no baseline."""
ASSUMED_RATE = 0.73
"""Acceptance at position 0 in that scene."""


class Noise(NamedTuple):
    """What is known of a cell's acceptance before the run."""

    sd: float
    """Standard deviation of one prompt's difference at position 0 between equal runs, as a fraction, such that texts
    with several copies vary as measured."""
    steps: float
    """Verify steps of a request."""
    rate: float
    """Acceptance at position 0."""
    measured: bool
    """Whether the baseline's A/A says so; otherwise it is assumed."""
    correlation: float | None = None
    """Correlation of the differences of padded copies of one text, in the A/A; None if unknown."""

    def of_text(self, copies: float) -> tuple[float, float]:
        """Return the standard deviation and the verify steps of a text that is sent ``copies`` times."""
        return self.sd / copies**0.5, self.steps * copies


ASSUMED = Noise(ASSUMED_SD, ASSUMED_STEPS, ASSUMED_RATE, False)


class PowerRow(NamedTuple):
    """The tests of one cell in one scenario, and their prompts."""

    cell: str
    scenario: str
    tests: tuple[TestName, ...]
    sample: Sample
    """The prompts, in two stages those of the smaller one."""
    steps: int
    """Number of verify steps in the baseline for these prompts; 0 if unknown."""
    noise: Noise | None = None
    """None if acceptance is not judged."""
    columns: int = 1
    """Columns of its tests of acceptance: positions, over all and in each stratum."""
    weakest: tuple[Stratum, Sample] | None = None
    """The stratum with the fewest texts in either stage; None if there is only one stratum."""
    slack: float = 0.0
    """By how much of itself acceptance may move without a defect."""


class Together(NamedTuple):
    """The cells that one test of many cells compares, cold or in a scenario."""

    cells: tuple[str, ...]
    sample: Sample


class Sensitivity(NamedTuple):
    judging: Judging
    rows: tuple[PowerRow, ...]
    pooled: Mapping[str, Together] = {}
    """By scenario: all P/D cells cold that have their single engine in the run, if there are any, and all cells that
    are sent a scenario."""
    pooled_columns: int = len(COLUMNS)
    drafting: tuple[str, ...] = ()
    """P/D cells whose drafts are tested together: those with their single engine in the run, without routed ones."""
    single_answers: bool = False
    """Whether each wrong answer shows by itself (``logprob-trace``), so that no test of many cells has to see some."""

    @property
    def normal(self) -> bool:
        return self.judging.tier == "normal"

    @property
    def registered(self) -> int:
        """Number of tests of single cells; 0 in the bitwise tier, which is deterministic."""
        return sum(len(r.tests) for r in self.rows) if self.normal else 0

    @property
    def alpha(self) -> float:
        """Level of each of them at the first step of Holm."""
        return self.judging.stage_alpha / max(1, self.registered) if self.normal else 0.0

    def smallest(self, row: PowerRow) -> float | None:
        """Return the smallest change of the rate at position 0 that the row can detect, in percentage points; None if
        it does not judge acceptance, or in the bitwise tier without a baseline."""
        if row.noise is None:
            return None
        if not self.normal:
            return 100 / row.steps if row.steps else None
        return 100 * self._in_rate(row, row.noise, row.sample).share

    def in_stratum(self, row: PowerRow) -> Detectable | None:
        """Return what the row sees of acceptance in its weakest stratum alone; None if there is only one, or in the
        bitwise tier."""
        if row.noise is None or row.weakest is None or not self.normal:
            return None
        return self._in_rate(row, row.noise, row.weakest[1])

    def in_answers(self, row: PowerRow) -> Detectable:
        """Return what the row sees of answers that are right or wrong, if equal runs agree."""
        shows = row.noise.rate if row.noise is not None and "first-step" in row.tests else 1.0
        return seen_in_answers(0.0, row.sample, self._level(1), shows)

    @property
    def pooled_alpha(self) -> float:
        """Level of each test of many cells together."""
        return self.judging.pooled_alpha / max(1, len(self.pooled))

    def in_all(self, scenario: str = COLD) -> Detectable | None:
        """Return what all cells together see of wrong answers in a scenario, if equal runs agree; None without such a
        test."""
        if scenario not in self.pooled or not self.normal:
            return None
        level = Level(self.pooled_alpha, self.pooled_columns, self.judging.power)
        return seen_in_answers(0.0, self.pooled[scenario].sample, level)

    def _in_rate(self, row: PowerRow, noise: Noise, sample: Sample) -> Detectable:
        sd, steps = noise.of_text(sample.copies)
        floor = Floor(self.judging.floor_points / 100, row.slack, self.judging.confidence)
        return seen_in_rate(sd, noise.rate, steps, sample, self._level(row.columns), floor)

    def _level(self, columns: int) -> Level:
        return Level(self.alpha, columns, stage_power(self.judging))

    def blind(self) -> dict[str, list[str]]:
        """Return the cells that will be UNKNOWN whatever they answer, by the reason: they could not show what must be
        detected."""
        out: dict[str, list[str]] = {}
        if not self.normal:
            return out
        everywhere, in_stratum = required("acceptance-baseline", self.judging)
        alone, _ = required("survival", self.judging)
        for row in self.rows:
            rate = self._in_rate(row, row.noise, row.sample) if row.noise is not None else None
            stratum = self.in_stratum(row)
            if rate is not None and not rate.enough(everywhere):
                out.setdefault(f"a change of acceptance by {everywhere:g} points", []).append(row.cell)
            if stratum is not None and not stratum.enough(in_stratum):
                out.setdefault(f"a change by {in_stratum:g} points in their weakest stratum", []).append(row.cell)
            if not self.in_answers(row).enough(alone):
                out.setdefault(f"damage to {alone:g} % of their answers", []).append(row.cell)
        for scenario, together in self.pooled.items():
            seen = self.in_all(scenario)
            if seen is not None and not self.single_answers and not seen.enough(self.judging.must_detect_points):
                whose = "P/D cells together" if scenario == COLD else f"cells together in {scenario}"
                reason = f"damage to {self.judging.must_detect_points:g} % of the answers of all {whose}"
                out[reason] = list(together.cells)
        return {reason: list(dict.fromkeys(cells)) for reason, cells in out.items()}

    def needed(self, row: PowerRow, effect_points: float) -> int | None:
        """Return how many texts, each sent as often as now, detect an effect of ``effect_points`` percentage points;
        None if acceptance is not judged."""
        if row.noise is None:
            return None
        if not self.normal:
            return 1
        level = self._level(row.columns)
        sd, steps = row.noise.of_text(row.sample.copies)
        return max(units_needed(sd, effect_points / 100, level.each, level.power, steps), level.least)


def sensitivity(prepared: Prepared) -> Sensitivity:
    """Return the power of the prepared run, using the profile's baselines where they exist."""
    found = lookups_now(prepared, None)
    # Of a variant that cannot run there are no prompts.
    works = [work for work in prepared.works if work.cell.variant in prepared.sets]
    rows = tuple(row for work in works for row in _rows(prepared, work, found))
    # Without re-scoring, answers can only part from the baseline.
    columns = len(COLUMNS) if prepared.rescores else 1
    together, alone = _together(prepared), _sees_single_answers(prepared)
    return Sensitivity(prepared.profile.judging, rows, together, columns, _drafting(prepared), alone)


def _sees_single_answers(prepared: Prepared) -> bool:
    """Return whether every variant's plain engine says enough tokens to show how it rounds, and reads all answers."""
    if not prepared.rescores:
        return False
    said = {
        w.cell.id: len(_asked(w)) * prepared.profile.part(w.cell.variant).workload.max_tokens
        for w in prepared.works
        if w.cell.id == w.cell.name.reference
    }
    return all(said.get(w.cell.name.reference, 0) >= LEAST_TOKENS for w in prepared.works)


def _drafting(prepared: Prepared) -> tuple[str, ...]:
    return tuple(w.cell.id for w in _pairs(prepared) if w.cell.method.kind != "none" and not w.cell.routed)


def _together(prepared: Prepared) -> dict[str, Together]:
    """Return the cells that are tested together, by scenario."""
    sent: dict[str, dict[str, list[Prompt]]] = {COLD: {w.cell.id: _asked(w) for w in _pairs(prepared)}}
    for work in prepared.works:
        for scenario in work.planned:
            sent.setdefault(scenario, {})[work.cell.id] = _sent_in(work, scenario)
    return {s: Together(tuple(by), _sample([p for ps in by.values() for p in ps])) for s, by in sent.items() if by}


def _sent_in(work: CellWork, scenario: str) -> list[Prompt]:
    """Return the prompts whose answers are judged in a scenario of a cell."""
    scripts = [s for s in work.scripts if s.scenario == scenario]
    sent = {s.prompt.id: s.prompt for script in scripts for s in script.sends}
    return list(sent.values())


def _pairs(prepared: Prepared) -> list[CellWork]:
    """Return the P/D cells that are tested together cold: one for each single engine."""
    asked = {w.cell.id for w in prepared.works if w.items}
    chosen: dict[str, CellWork] = {}
    for work in sorted(prepared.works, key=lambda w: (w.cell.routed, w.cell.id)):
        if work.cell.topology == "pd" and work.items and work.cell.name.single in asked:
            chosen.setdefault(work.cell.name.single, work)
    return list(chosen.values())


def _asked(work: CellWork) -> list[Prompt]:
    """Return the cold prompts of a cell that are tested."""
    return [i.prompt for i in work.items if i.form == "ids"]


def _sample(prompts: Sequence[Prompt]) -> Sample:
    return Sample(len(prompts), len({p.source or p.id for p in prompts}))


def _smaller(*samples: Sample) -> Sample:
    """Return the number of prompts and of texts that every one of the samples has."""
    return Sample(min(s.prompts for s in samples), min(s.units for s in samples))


def per_stratum(prepared: Prepared, effect_points: float) -> int:
    """Return the number of cold prompts per stratum needed to detect a change of ``effect_points`` percentage points
    over all strata, and within each stratum the change that must be detected there. Held-out prompts: as many again."""
    found = sensitivity(prepared)
    cold = [r for r in found.rows if r.scenario == COLD]
    strata = len({p.stratum for p in prepared.prompts.cold})
    everywhere = max(((found.needed(r, effect_points) or 0) * r.sample.copies for r in cold), default=0)
    points = prepared.profile.judging.must_detect_stratum_points
    each = max((found.needed(r, points) or 0 for r in cold), default=0) if points is not None else 0
    return max(1, math.ceil(everywhere / max(1, strata)), each)


def lookups_now(prepared: Prepared, vllm: str | None) -> dict[str, Lookup]:
    """Return the baselines, by lineup, that a run of the prepared cells would be judged against if it started now."""
    hardware = tuple(gpus())
    indexes: dict[Path, BaselineIndex] = {}
    out: dict[str, Lookup] = {}
    for part in prepared.parts:
        out |= lookups_of(part, prepared.source, prepared.sets[part.variant].sha256, vllm, hardware, indexes)
    return out


def lookups_of(
    part: Profile,
    source: str,
    prompts_sha256: str,
    vllm: str | None,
    hardware: tuple[str, ...],
    indexes: dict[Path, BaselineIndex] | None = None,
) -> dict[str, Lookup]:
    """Return the same for one part of a profile. ``hardware`` is the result of ``scheduling.gpus.gpus``; pass the same
    ``indexes`` for several parts to read each folder only once."""
    indexes = {} if indexes is None else indexes
    if part.baselines not in indexes:
        indexes[part.baselines] = BaselineIndex(part.baselines)
    index = indexes[part.baselines]
    limits = Limits(part.judging.baseline_days, part.judging.baseline_minors, part.judging.baseline_across)
    return {
        CellName("single", m.kind, variant=part.variant).lineup: Lookup(None, reason)
        if (reason := reason_for(part, m.kind)) is not None
        else look_up(part.baselines, identity_of(part, m, prompts_sha256, vllm, hardware), source, limits, now(), index)
        for m in part.methods
    }


def _rows(prepared: Prepared, work: CellWork, found: Mapping[str, Lookup]) -> list[PowerRow]:
    cell = work.cell
    singles = [w for w in prepared.works if w.cell.id == cell.name.single]
    has_plain = any(w.cell.id == cell.name.reference and w.items for w in prepared.works)
    lookup = found.get(cell.name.lineup)
    baseline = lookup.baseline if lookup is not None else None
    out = []
    asked = {COLD: {p.id: p for p in _asked(work)}} if work.items else {}
    # The first prompts together show whether the rest may be; no registered test is about them.
    asked |= {s: {p.id: p for p in _sent_in(work, s)} for s in work.planned if s != AT_ONCE}
    k = cell.method.draft_tokens
    part = prepared.profile.part(cell.variant)
    judging, held_out = prepared.profile.judging, cold_prompts(prepared.sets[cell.variant].held_out, part.workload)
    configured = {s.id: s for s in part.scenarios}
    for scenario, prompts in asked.items():
        has_single = any(scenario == COLD or scenario in w.planned for w in singles)
        names = tests_of(cell.name, has_single, prepared.rescores and has_plain, scenario == COLD)
        # The second stage uses the held-out prompts, and needs the same power.
        fresh = held_out if scenario == COLD else drawn(configured[scenario], part, held_out)
        again = [fresh] if judging.tier == "normal" and judging.stages == 2 else []
        steps = sum(len(r.accepted) for r in baseline.rows if r.prompt_id in prompts) if baseline else 0
        stages = [list(prompts.values()), *again]
        strata = _strata(prepared, cell, stages) if scenario == COLD and k else {}
        weakest = min(strata.items(), key=lambda item: item[1].units) if len(strata) > 1 else None
        columns = k * (1 + len(strata)) if len(strata) > 1 else k
        sample = _smaller(*map(_sample, stages))
        noise = _noise(baseline, prompts, k) if k else None
        slack = configured[scenario].mean_slack if scenario in configured else 0.0
        out.append(PowerRow(cell.id, scenario, names, sample, steps, noise, max(1, columns), weakest, slack))
    return out


def _strata(prepared: Prepared, cell: Cell, stages: Sequence[Sequence[Prompt]]) -> dict[Stratum, Sample]:
    """Return the prompts of each stratum of the first stage that every stage has."""
    size = prepared.profile.part(cell.variant).engine.block_size

    def within(prompts: Sequence[Prompt]) -> dict[Stratum, list[Prompt]]:
        out: dict[Stratum, list[Prompt]] = {}
        for p in prompts:
            out.setdefault(p.stratum_for(size, cell.method.lookahead), []).append(p)
        return out

    by_stage = [within(prompts) for prompts in stages]
    return {s: _smaller(*(_sample(stage.get(s, [])) for stage in by_stage)) for s in by_stage[0]}


def _noise(baseline: Baseline | None, prompts: Mapping[str, Prompt], k: int) -> Noise:
    rows = [r for r in baseline.rows if r.again is not None and r.prompt_id in prompts] if baseline is not None else []
    if not rows:
        return ASSUMED
    units = [prompts[r.prompt_id].source or r.prompt_id for r in rows]
    by_prompt = baseline_arms(rows, k)
    d = differences(by_unit(by_prompt, units))[0]
    if d.units < 2:
        return ASSUMED
    # The error of all prompts, as if each were a text of its own.
    sd = d.error * len(rows) ** 0.5
    return Noise(sd, d.trials * d.units / len(rows), d.rates[0], True, correlation_within(by_prompt, units))
