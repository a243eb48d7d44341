"""Power analysis before a run: the registered tests, their significance levels and the effects they can detect."""

from __future__ import annotations

import math
from collections import Counter
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
from harness.judging.checks.model import TestName
from harness.profiles.cells import Cell, CellName
from harness.profiles.model import Judging, Profile, reason_for
from harness.prompts.lengths import Stratum
from harness.prompts.model import Prompt
from harness.scheduling.gpus import gpus
from harness.stats.paired import differences
from harness.stats.power import detectable, least_prompts, prompts_needed
from harness.util.machine import now
from harness.workload.cells import CellWork
from harness.workload.prepare import Prepared

ASSUMED_SD = 0.043
"""Standard deviation of one prompt's difference at position 0, used where no A/A was measured. From the default scene
of ``tests/simulate.py``: 107 steps, rate 0.73, every request diverging somewhere."""


class Row(NamedTuple):
    """The power of the tests of one cell in one scenario."""

    cell: str
    scenario: str
    tests: tuple[TestName, ...]
    prompts: int
    steps: int
    """Number of verify steps in the baseline for these prompts; 0 if unknown."""
    sd: float | None
    """Standard deviation of one prompt's difference at position 0, as a fraction; None if acceptance is not judged."""
    measured: bool
    """Whether ``sd`` was measured by the baseline's A/A rather than assumed."""
    weakest: tuple[Stratum, int] | None = None
    """The stratum with the fewest prompts in either stage, and their number; None if there is only one stratum."""


class Sensitivity(NamedTuple):
    """The power of a whole run."""

    tier: str
    rows: tuple[Row, ...]
    registered: int
    alpha: float
    """Level of each test at the first step of Holm; 0 in the bitwise tier, which is deterministic."""
    stages: int
    family_alpha: float
    power: float
    floor_points: float
    """Practical floor in percentage points: smaller changes never fail a run."""
    columns: int
    """Maximum number of columns (positions and strata) of one test."""

    def smallest(self, row: Row) -> float | None:
        """Return the smallest change of the rate at position 0 that the row can detect, in percentage points; None if
        it does not judge acceptance, or in the bitwise tier without a baseline."""
        if row.sd is None:
            return None
        if self.tier == "bitwise":
            return 100 / row.steps if row.steps else None
        return self._smallest(row.sd, row.prompts)

    def smallest_in_stratum(self, row: Row) -> float | None:
        """Return the same for the weakest stratum alone; None if there is only one, or in the bitwise tier."""
        if row.sd is None or row.weakest is None or self.tier == "bitwise":
            return None
        return self._smallest(row.sd, row.weakest[1])

    def _smallest(self, sd: float, prompts: int) -> float:
        if prompts < least_prompts(self.alpha):
            return math.inf
        return max(100 * detectable(sd, prompts, self.alpha / self.columns, self._power), self.floor_points)

    def blind(self, judging: Judging) -> list[str]:
        """Return the cells that will be UNKNOWN because they could not detect the required change."""
        limits = (judging.must_detect_points, judging.must_detect_stratum_points)
        return [
            row.cell
            for row in self.rows
            if any(
                seen is not None and limit is not None and seen > limit
                for seen, limit in zip((self.smallest(row), self.smallest_in_stratum(row)), limits, strict=True)
            )
        ]

    def needed(self, row: Row, effect_points: float) -> int | None:
        """Return how many prompts detect an effect of ``effect_points`` percentage points; None if acceptance is not
        judged."""
        if row.sd is None:
            return None
        if self.tier == "bitwise":
            return 1
        enough = prompts_needed(row.sd, effect_points / 100, self.alpha / self.columns, self._power)
        return max(enough, least_prompts(self.alpha))

    @property
    def _power(self) -> float:
        """Power of each stage, such that all stages together have the configured power."""
        return float(self.power ** (1 / self.stages))


def sensitivity(prepared: Prepared, vllm: str | None = None) -> Sensitivity:
    """Return the power of the prepared run, using the profile's baselines where they exist."""
    judging = prepared.profile.judging
    found = lookups_now(prepared, vllm)
    rows = tuple(row for work in prepared.works for row in _rows(prepared, work, found))
    count = sum(len(r.tests) for r in rows)
    normal = judging.tier == "normal"
    k = max((w.cell.method.draft_tokens for w in prepared.works), default=0)
    strata = max(len({p.stratum for p in prompts.cold}) for prompts in prepared.sets.values())
    return Sensitivity(
        tier=judging.tier,
        rows=rows,
        registered=count if normal else 0,
        alpha=judging.stage_alpha / max(1, count) if normal else 0.0,
        stages=judging.stages if normal else 1,
        family_alpha=judging.family_alpha if normal else 0.0,
        power=judging.power,
        floor_points=judging.floor_points,
        columns=max(1, k * (1 + (strata if strata > 1 else 0))),
    )


def per_stratum(prepared: Prepared, effect_points: float) -> int:
    """Return the number of cold prompts per stratum needed to detect a change of ``effect_points`` percentage points
    over all strata, and within each stratum the change that must be detected there. Held-out prompts: as many again.
    """
    found = sensitivity(prepared)
    cold = [r for r in found.rows if r.scenario == COLD]
    strata = len({p.stratum for p in prepared.prompts.cold})
    everywhere = max((found.needed(r, effect_points) or 0 for r in cold), default=0)
    points = prepared.profile.judging.must_detect_stratum_points
    each = max((found.needed(r, points) or 0 for r in cold), default=0) if points is not None else 0
    return max(1, math.ceil(everywhere / max(1, strata)), each)


def lookups_now(prepared: Prepared, vllm: str | None) -> dict[str, Lookup]:
    """Return the baselines, by lineup, that a run of the prepared cells would be judged against if it started now."""
    hardware = tuple(gpus())
    indexes: dict[Path, BaselineIndex] = {}
    out: dict[str, Lookup] = {}
    for part in prepared.parts:
        digest = prepared.sets[part.variant].sha256
        out |= lookups_of(part, prepared.source, digest, vllm, hardware, indexes)
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
    limits = Limits(part.judging.baseline_days, part.judging.baseline_minors)
    return {
        CellName("single", m.kind, variant=part.variant).lineup: Lookup(None, reason)
        if (reason := reason_for(part, m.kind)) is not None
        else look_up(part.baselines, identity_of(part, m, prompts_sha256, vllm, hardware), source, limits, now(), index)
        for m in part.methods
    }


def _rows(prepared: Prepared, work: CellWork, found: Mapping[str, Lookup]) -> list[Row]:
    cell = work.cell
    has_single = any(w.cell.id == cell.name.single for w in prepared.works)
    has_plain = any(w.cell.id == cell.name.reference and w.items for w in prepared.works)
    names = tests_of(cell.name, has_single, prepared.rescores and has_plain)
    lookup = found.get(cell.name.lineup)
    baseline = lookup.baseline if lookup is not None else None
    out = []
    asked = {COLD: {i.prompt.id for i in work.items if i.form == "ids"}} if work.items else {}
    for script in work.scripts:
        sent = {s.prompt.id for stage in script.stages for s in stage.sends if s.judged}
        asked.setdefault(script.scenario, set()).update(sent)
    for scenario, prompts in asked.items():
        sd, measured = _spread(baseline, cell.method.draft_tokens)
        steps = sum(len(r.accepted) for r in baseline.rows if r.prompt_id in prompts) if baseline else 0
        # The second stage uses the held-out prompts, and needs the same power.
        stages = prepared.profile.judging.stages if prepared.profile.judging.tier == "normal" else 1
        count = min(len(prompts), len(prepared.sets[cell.variant].held_out)) if stages == 2 else len(prompts)
        weakest = _weakest(prepared, cell, stages) if scenario == COLD and cell.method.draft_tokens else None
        out.append(Row(cell.id, scenario, names, count, steps, sd, measured, weakest))
    return out


def _weakest(prepared: Prepared, cell: Cell, stages: int) -> tuple[Stratum, int] | None:
    """Return the stratum with the fewest prompts, cold or held out, and their number; None if there is only one."""
    size = prepared.profile.part(cell.variant).engine.block_size
    sets = prepared.sets[cell.variant]

    def count(prompts: Sequence[Prompt]) -> Counter[Stratum]:
        return Counter(p.stratum_for(size, cell.method.lookahead) for p in prompts)

    cold = count(sets.cold)
    if len(cold) < 2:
        return None
    both = cold if stages == 1 else {s: min(n, count(sets.held_out)[s]) for s, n in cold.items()}
    stratum = min(both, key=lambda s: both[s])
    return stratum, both[stratum]


def _spread(baseline: Baseline | None, k: int) -> tuple[float | None, bool]:
    if not k:
        return None, False
    if baseline is not None and any(r.again is not None for r in baseline.rows):
        d = differences(baseline_arms(baseline.rows, k))[0]
        if d.prompts > 1:
            return d.error * d.prompts**0.5, True
    return ASSUMED_SD, False
