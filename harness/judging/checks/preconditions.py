"""Checks that the state a scenario is about really occurred, proven by the engines' counters; otherwise UNKNOWN.

The same counters reveal impossible cache hits: tokens taken from the prefix cache although their blocks were evicted
or belong to another prompt. These are defects, not missing evidence.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.evidence import CellView
from harness.judging.figures import CacheHit
from harness.judging.findings import CheckResult, Finding, conclude
from harness.scenarios.base import Gap, Margin, Occurrence
from harness.scenarios.kinds import kind_of
from harness.scenarios.proving import hits_of, leg_of

NAME = "state-occurred"


def state_occurred(cell: CellView) -> CheckResult:
    """Check for each instance of a scenario that its state occurred."""
    observations = [o for o in cell.observations().values() if o.error is None]
    instances: dict[int, dict[str, Observation]] = {}
    for o in observations:
        instances.setdefault(o.instance, {})[o.part] = o
    gaps = [_gaps(cell, parts) for parts in instances.values()]
    proven = sum(not found for found in gaps)
    note = ""
    if _enough(cell, len(gaps)) <= proven < len(gaps):
        note = f"the state is proven for {proven} of {len(gaps)} rounds"
        gaps = [[g for g in found if g.impossible] for found in gaps]
    gaps += [[Gap(o, _LATE)] for o in observations if _released_late(o)]
    return conclude(NAME, cell.id, len(instances), [_finding(cell, g) for found in gaps for g in found], note)


def _gaps(cell: CellView, parts: dict[str, Observation]) -> list[Gap]:
    """Return what the proof of one instance lacks: all of it where one of its requests is missing."""
    config = cell.config
    if config is None:
        raise ValueError(f"scenario {cell.scenario} is not part of the recorded profile")
    kind = kind_of(config)
    if missing := sorted(kind.needed(config) - parts.keys()):
        message = f"expected answers of {', '.join(missing)}, which prove that the state occurred, found none"
        return [Gap(next(iter(parts.values())), message)]
    return list(kind.gaps(config, Occurrence(cell, parts, _margins(cell))))


_LATE = "the held engine answered before it was released: the record was put together by hand"
_BETWEEN_S = 10.0
"""Far above what a busy machine takes between the legs of a request, which no leg counts."""


def _released_late(o: Observation) -> bool:
    if o.held_until is None or o.asked_at is None or not o.legs:
        return False
    return o.held_until > o.asked_at + sum(leg.seconds for leg in o.legs) + _BETWEEN_S


def _margins(cell: CellView) -> Callable[[str], Margin | None]:
    def margin(prompt_id: str) -> Margin | None:
        row = cell.rows(cell.name.plain).get(prompt_id)
        return Margin(len(row.output_ids), row.min_top_gap) if row is not None and row.min_top_gap is not None else None

    return margin


def _enough(cell: CellView, instances: int) -> int:
    """Return how many instances of a scenario must prove its state."""
    return kind_of(cell.config).enough(instances) if cell.config is not None else instances


def _finding(cell: CellView, gap: Gap) -> Finding:
    if gap.missed_by and cell.speculative and _plain_finds_them(cell, gap):
        message = f"{gap.message}, while {_plain(cell)} of this run finds its own: speculation loses the prefix cache"
        return cell.finding(NAME, Verdict.REGRESSION, "reuse-lost", message, gap.observation)
    found = cell.wrong_kv if gap.impossible else cell.untested
    return found(NAME, gap.message, gap.observation, CacheHit(hit_blocks=gap.hit_blocks))


def _plain(cell: CellView) -> str:
    return cell.name.beside(cell.name.topology, "none").id


def _plain_finds_them(cell: CellView, gap: Gap) -> bool:
    """Return whether the same request found cached blocks on the same engine without speculation in this run."""
    plain = cell.answers_of(_plain(cell)).get(gap.observation.key)
    return plain is not None and plain.error is None and hits_of(leg_of(cell, plain, gap.missed_by)) > 0


def cold_stays_cold(cell: CellView) -> CheckResult:
    """Check that cold prompts, each with its own cache salt, take no token from any prefix cache."""
    name = "cold-stays-cold"
    findings = []
    judged = 0
    for o in cell.all_observations():
        counted: dict[str, dict[str, float]] = {leg.role: leg.counters for leg in o.legs if leg.counters}
        for role, counters in (o.shared_counters | counted).items():
            judged += 1
            hits = int(counters.get("prefix_hits", 0))
            if hits:
                message = (
                    f"expected the {role} engine to find nothing of a prompt with a salt of its own in its prefix "
                    f"cache, found a hit of {hits} tokens: these blocks are another prompt's"
                )
                findings.append(cell.wrong_kv(name, message, o, CacheHit(hit_blocks=hits // cell.record.block_size)))
    return conclude(name, cell.id, judged, findings)
