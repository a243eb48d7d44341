"""What a run will be able to see, before anything runs: registered tests, their levels, detectable effects."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.baseline.build import identity_of
from harness.baseline.lookup import Limits, Lookup, look_up
from harness.baseline.model import Baseline
from harness.baseline.shelf import Shelf
from harness.baseline.summary import baseline_arms
from harness.checks.night import TestName, tests_of
from harness.config import Judging, Profile
from harness.engine.environment import EngineEnvironment
from harness.history import COLD
from harness.hub import reason_for
from harness.matrix import Cell, CellName
from harness.operations import Prepared
from harness.prompts import Prompt
from harness.provenance import gpus, now
from harness.stats.paired import differences
from harness.stats.power import detectable, least_prompts, prompts_needed
from harness.strata import Stratum
from harness.workload import CellWork

ASSUMED_SD = 0.043
"""Standard deviation of one prompt's difference at position 0 where no A/A was measured: 107 steps, rate 0.73, every
request diverging somewhere (``harness.stats.simulate``, default scene)."""


class Row(NamedTuple):
    """One cell in one scenario."""

    cell: str
    scenario: str
    tests: tuple[TestName, ...]
    prompts: int
    steps: int
    """Verify steps that the baseline has for these prompts; 0 when unknown."""
    sd: float | None
    """Of one prompt's difference at position 0, as a share; None where acceptance is not judged."""
    measured: bool
    """The standard deviation is that of the baseline's A/A, not assumed."""
    weakest: tuple[Stratum, int] | None = None
    """The stratum with the fewest prompts, of either stage, and their number; None where strata are not told apart."""


class Sensitivity(NamedTuple):
    """The whole run."""

    tier: str
    rows: tuple[Row, ...]
    registered: int
    alpha: float
    """Of each test at the first step of Holm; 0 in the bitwise tier, where nothing is left to chance."""
    stages: int
    family_alpha: float
    power: float
    floor_points: float
    """Smaller changes never fail a run."""
    columns: int
    """Positions and strata that one test looks at, at most."""

    def smallest(self, row: Row) -> float | None:
        """Smallest change of the rate at position 0, in points, that the row shows; None when it judges none."""
        if row.sd is None:
            return None
        if self.tier == "bitwise":
            return 100 / row.steps if row.steps else None
        return self._smallest(row.sd, row.prompts)

    def smallest_in_stratum(self, row: Row) -> float | None:
        """The same for the prompts of the weakest stratum alone; None where strata are not told apart, or none is left
        to chance."""
        if row.sd is None or row.weakest is None or self.tier == "bitwise":
            return None
        return self._smallest(row.sd, row.weakest[1])

    def _smallest(self, sd: float, prompts: int) -> float:
        if prompts < least_prompts(self.alpha):
            return math.inf
        return max(100 * detectable(sd, prompts, self.alpha / self.columns, self._power), self.floor_points)

    def blind(self, judging: Judging) -> list[str]:
        """Cells that will be UNKNOWN because they could not see what they must."""
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
        """Prompts from which on an effect of so many points is seen; None when acceptance is not judged."""
        if row.sd is None:
            return None
        if self.tier == "bitwise":
            return 1
        enough = prompts_needed(row.sd, effect_points / 100, self.alpha / self.columns, self._power)
        return max(enough, least_prompts(self.alpha))

    @property
    def _power(self) -> float:
        """Of each stage, so that all of them together have the wanted one."""
        return float(self.power ** (1 / self.stages))


def sensitivity(prepared: Prepared, environment: EngineEnvironment | None = None) -> Sensitivity:
    """What the prepared run registers and could see, by the profile's baselines as far as there are any."""
    judging = prepared.profile.judging
    found = lookups_now(prepared, environment)
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
    """Cold prompts of each stratum that a change of so many points needs: enough over all strata, and in each one
    enough for the change that a stratum must show. Held-out prompts are needed in the same number."""
    found = sensitivity(prepared)
    cold = [r for r in found.rows if r.scenario == COLD]
    strata = len({p.stratum for p in prepared.prompts.cold})
    everywhere = max((found.needed(r, effect_points) or 0 for r in cold), default=0)
    points = prepared.profile.judging.must_detect_stratum_points
    each = max((found.needed(r, points) or 0 for r in cold), default=0) if points is not None else 0
    return max(1, math.ceil(everywhere / max(1, strata)), each)


def lookups_now(prepared: Prepared, environment: EngineEnvironment | None) -> dict[str, Lookup]:
    """Baselines by lineup that a run of the prepared cells would be judged against, were it made now."""
    version = environment.vllm if environment else None
    hardware = tuple(gpus())
    shelves: dict[Path, Shelf] = {}
    out: dict[str, Lookup] = {}
    for part in prepared.parts:
        digest = prepared.sets[part.variant].sha256
        out |= lookups_of(part, prepared.source, digest, version, hardware, shelves)
    return out


def lookups_of(
    part: Profile,
    source: str,
    prompts_sha256: str,
    vllm: str | None,
    hardware: tuple[str, ...],
    shelves: dict[Path, Shelf] | None = None,
) -> dict[str, Lookup]:
    """The same for a plain profile; ``hardware`` is what ``harness.provenance.gpus`` found. ``shelves`` keeps what was
    read of each folder where several parts are looked up."""
    shelves = {} if shelves is None else shelves
    if part.baselines not in shelves:
        shelves[part.baselines] = Shelf(part.baselines)
    shelf = shelves[part.baselines]
    limits = Limits(part.judging.baseline_days, part.judging.baseline_minors)
    return {
        CellName("single", m.kind, variant=part.variant).lineup: Lookup(None, reason)
        if (reason := reason_for(part, m.kind)) is not None
        else look_up(part.baselines, identity_of(part, m, prompts_sha256, vllm, hardware), source, limits, now(), shelf)
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
        # The second stage has the prompts that were held out, and must see as much.
        stages = prepared.profile.judging.stages if prepared.profile.judging.tier == "normal" else 1
        count = min(len(prompts), len(prepared.sets[cell.variant].held_out)) if stages == 2 else len(prompts)
        weakest = _weakest(prepared, cell, stages) if scenario == COLD and cell.method.draft_tokens else None
        out.append(Row(cell.id, scenario, names, count, steps, sd, measured, weakest))
    return out


def _weakest(prepared: Prepared, cell: Cell, stages: int) -> tuple[Stratum, int] | None:
    """The stratum with the fewest prompts, cold or held out."""
    size = prepared.profile.part(cell.variant).engine.block_size
    sets = prepared.sets[cell.variant]

    def count(prompts: Sequence[Prompt]) -> Counter[Stratum]:
        return Counter(p.stratum_for(size, cell.method.lookahead) for p in prompts)

    cold = count(sets.cold)
    # Strata are told apart where there are several.
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
