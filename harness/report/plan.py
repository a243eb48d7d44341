"""What ``harness plan`` prints: engines, prompts, and what the run will be able to see."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from harness.config import Profile
from harness.history import COLD
from harness.matrix import excluded_cells
from harness.operations import Prepared
from harness.prompts import PromptSet
from harness.sensitivity import Row, Sensitivity, sensitivity
from harness.strata import Stratum
from harness.workload import group_expected_s


def print_plan(prepared: Prepared, effect_points: float, console: Console) -> None:
    """Print the plan of a prepared run."""
    console.print(_engines(prepared))
    profile = prepared.profile
    for part in prepared.parts:
        console.print(_strata(part, prepared.sets[part.variant]))
    lengths = [p.tokens for prompts in prepared.sets.values() for p in prompts.cold]
    texts = sum(min(p.workload.text_prompts, len(prepared.sets[p.variant].cold)) for p in prepared.parts)
    console.print(
        f"{len(lengths)} cold prompts of {min(lengths)} to {max(lengths)} tokens, "
        f"{texts} of them also as text; {len(prepared.plan.cells)} cells, "
        f"{prepared.plan.engines} engine starts, about {prepared.expected_s / 60:.1f} minutes on two cores",
        highlight=False,
    )
    for cell, reason in excluded_cells(profile).items():
        console.print(f"left out: {cell}: {reason}", highlight=False, soft_wrap=True)
    found = sensitivity(prepared)
    console.print(_seen(found, effect_points))
    for line in _words(found, prepared):
        console.print(line, highlight=False, soft_wrap=True)


def _engines(prepared: Prepared) -> Table:
    profile = prepared.profile
    table = Table(title=f"profile {profile.name}: {profile.description}", title_justify="left")
    for column in ("engines started", "cells that share them", "requests", "lookahead", "expected"):
        table.add_column(column)
    for group in prepared.plan.groups:
        table.add_row(
            "prefill + decode" if group.topology == "pd" else "single",
            ", ".join(c.id for c in group.cells),
            str(sum(w.requests for w in prepared.works if w.cell in group.cells)),
            str(group.method.lookahead),
            f"{group_expected_s(group, prepared.works):.0f} s",
        )
    return table


def _strata(profile: Profile, prompts: PromptSet) -> Table:
    size = profile.engine.block_size
    variant = f"{profile.variant}: " if profile.variant else ""
    table = Table(title=f"{variant}prompts ({profile.workload.prompts.name}, block size {size})", title_justify="left")
    table.add_column("stratum")
    for method in profile.methods:
        table.add_column(method.kind, justify="right")
    for stratum in Stratum:
        counts = [sum(p.stratum_for(size, m.lookahead) is stratum for p in prompts.cold) for m in profile.methods]
        table.add_row(stratum.value, *map(str, counts))
    return table


def _seen(found: Sensitivity, effect_points: float) -> Table:
    table = Table(title="what this run can see", title_justify="left")
    table.add_column("cell")
    for column in ("tests", "prompts", "smallest change at position 0", f"prompts for {effect_points:g} points"):
        table.add_column(column, justify="right")
    for row in found.rows:
        if row.scenario != COLD and found.tier == "bitwise":
            continue
        smallest, needed = found.smallest(row), found.needed(row, effect_points)
        table.add_row(
            row.cell + ("" if row.scenario == COLD else f" in {row.scenario}"),
            "exact" if found.tier == "bitwise" else str(len(row.tests)),
            str(row.prompts),
            _size(row, smallest, found),
            "–" if needed is None else str(needed),
        )
    return table


def _size(row: Row, smallest: float | None, found: Sensitivity) -> str:
    if row.sd is None:
        return "one token" if found.tier == "bitwise" else "–"
    if smallest is None:
        return "no baseline"
    if found.tier == "bitwise":
        return f"one draft of {row.steps} steps ({smallest:.3f} points)"
    if not math.isfinite(smallest):
        return "too few prompts"
    return f"{smallest:.2f} points" + ("" if row.measured else " (assumed noise)")


def _words(found: Sensitivity, prepared: Prepared) -> list[str]:
    judging = prepared.profile.judging
    if found.tier == "bitwise":
        return [
            "tier bitwise: tokens and accepted drafts are compared one by one, 0 tests left to chance, alpha 0; one "
            "difference fails its cell."
        ]
    stages = "one stage" if found.stages == 1 else "two stages, the second on held-out prompts and fresh engines"
    return [
        f"tier normal: {found.registered} registered tests, {stages}; chance that a night of unchanged engines fails "
        f"at most {found.family_alpha:g}; each test at {found.alpha:.2g} in each stage (Holm), power {found.power:g}.",
        f"A change fails its cell only when it is beyond chance, its {100 * judging.confidence:g} % interval excludes "
        f"zero and it is at least {judging.floor_points:g} points; a cell that could not see "
        f"{judging.must_detect_points:g} points"
        + (f", or {judging.must_detect_stratum_points:g} in a stratum" if judging.must_detect_stratum_points else "")
        + ", is UNKNOWN.",
    ]
