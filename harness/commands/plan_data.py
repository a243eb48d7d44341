"""What a plan says of its prompts and its baselines, as data: ``harness plan`` prints it, and ``--json`` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from harness.history.rounding import Rounding
from harness.judging.power import lookups_now
from harness.profiles.methods import Method
from harness.profiles.model import Profile
from harness.prompts.lengths import Stratum
from harness.workload.cells import cold_prompts
from harness.workload.edges import missed
from harness.workload.hit_edges import missed_hits
from harness.workload.prepare import Prepared


class StrataCounts(NamedTuple):
    """How many cold prompts of a variant lie in each stratum, by method."""

    part: Profile
    methods: tuple[Method, ...]
    """Those of the cells that are planned: each has a lookahead of its own."""
    counts: Mapping[str, Mapping[Stratum, int]]


def strata_of(prepared: Prepared) -> list[StrataCounts]:
    """Return the strata of each variant that has cells."""
    return [_strata(prepared, part) for part in prepared.parts]


def _strata(prepared: Prepared, part: Profile) -> StrataCounts:
    size = part.engine.block_size
    prompts = cold_prompts(prepared.sets[part.variant].cold, part.workload)
    asked = {w.cell.method.kind for w in prepared.works if w.cell.variant == part.variant}
    methods = tuple(m for m in part.methods if m.kind in asked)
    counts = {
        m.kind: {s: sum(p.stratum_for(size, m.lookahead) is s for p in prompts) for s in Stratum} for m in methods
    }
    return StrataCounts(part, methods, counts)


def missed_lengths(prepared: Prepared) -> dict[str, list[str]]:
    """Return the cells to which lengths matter that no prompt has, by a sentence about these lengths: of what is handed
    over, then of prefix hits, where P and D are told apart."""
    return {**_missed_edges(prepared), **_missed_hits(prepared)}


def _missed_edges(prepared: Prepared) -> dict[str, list[str]]:
    by_words: dict[str, list[str]] = {}
    for work in prepared.works:
        part = prepared.profile.part(work.cell.variant)
        for edge in missed(part, work):
            residues = ", ".join(map(str, sorted(edge.residues)))
            at = f"N mod {part.engine.block_size} in {{{residues}}}, where {edge.words}"
            by_words.setdefault(f"no prompt of N tokens is handed over with {at}", []).append(work.cell.id)
    return by_words


def _missed_hits(prepared: Prepared) -> dict[str, list[str]]:
    by_words: dict[str, dict[str, list[str]]] = {}
    for work in prepared.works:
        for edge in missed_hits(prepared.profile.part(work.cell.variant), work):
            side = {"prefill": "P", "decode": "D", "single": ""}[edge.role]
            by_words.setdefault(edge.at, {}).setdefault(work.cell.id, []).append(side)
    return {
        at: [f"{cell} ({', '.join(sides)})" if all(sides) else cell for cell, sides in cells.items()]
        for at, cells in by_words.items()
    }


def measured_rounding(prepared: Prepared) -> dict[str, Rounding]:
    """Return what was measured of rounding with the baselines, by lineup."""
    known = lookups_now(prepared, None)
    found = {lineup: k.baseline.header.rounding for lineup, k in known.items() if k.baseline is not None}
    return {lineup: rounding for lineup, rounding in found.items() if rounding is not None}
