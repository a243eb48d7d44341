"""``harness plan``: print engines, prompts, and what the run will be able to detect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from harness.commands.plan_data import StrataCounts, measured_rounding, missed_lengths, strata_of
from harness.engines.inventory import Inventory, gpu_inventory, jobs_of, sharing_note, too_few_to_part
from harness.history.records import COLD
from harness.history.rounding import MULTIPLE
from harness.judging.detection import Detectable, Sample
from harness.judging.power import PowerRow, Sensitivity, sensitivity
from harness.judging.rounding import measurement
from harness.profiles.availability import references_of
from harness.profiles.cells import EngineGroup, excluded_cells
from harness.profiles.drafter_context import short_drafters
from harness.profiles.hub import GIB, Hub
from harness.profiles.load import read_profile
from harness.profiles.model import Profile
from harness.profiles.model_reference import PackagedModel
from harness.profiles.model_survey import Model, survey, survey_convertible
from harness.prompts.lengths import Stratum
from harness.scheduling.links import UNKNOWN, summary
from harness.scheduling.model import Device, Job, Placement
from harness.scheduling.planning import all_at_once, simulate
from harness.util.tables import folding_table
from harness.util.text import counted, lasting
from harness.workload.cells import cold_prompts, group_expected_s, scripts_expected_s
from harness.workload.prepare import Prepared


def print_plan(prepared: Prepared, effect_points: float, console: Console) -> None:
    profile = prepared.profile
    _print_titled(f"profile {profile.name}: {profile.description}", _engines(prepared), console)
    # Variants that differ in anything else have the same strata.
    strata = {(s.part.workload.prompts, s.part.engine.block_size, s.methods): s for s in reversed(strata_of(prepared))}
    for counts in reversed(strata.values()):
        _print_titled(_strata_title(counts.part), _strata(counts), console)
    files = {p.workload.prompts: p for p in prepared.parts}.values()
    cold = [(p.workload, cold_prompts(prepared.sets[p.variant].cold, p.workload)) for p in files]
    lengths = [q.tokens for _, prompts in cold for q in prompts]
    texts = sum(min(workload.text_prompts, len(prompts)) for workload, prompts in cold)
    console.print(
        f"{counted(len(lengths), 'cold prompt')} of {min(lengths)} to {max(lengths)} tokens, "
        f"{texts} of them also as text; {counted(len(prepared.plan.cells), 'cell')}, "
        f"{counted(prepared.plan.engines, 'engine start')}, about {lasting(prepared.expected_s)}"
        + (" on two cores" if profile.engine.device == "cpu" else ", one after the other"),
        highlight=False,
    )
    for line in _short_drafters(prepared):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for what, cells in missed_lengths(prepared).items():
        console.print(f"{what}: {_first_of(cells)}", markup=False, highlight=False, soft_wrap=True)
    # The bitwise tier has many, of few requests each.
    for line in _scenarios(prepared) if profile.judging.tier == "normal" else ():
        console.print(line, highlight=False, soft_wrap=True)
    if profile.engine.device == "gpu":
        console.print(_slots(prepared))
        for line in _placing(prepared):
            console.print(line, highlight=False, soft_wrap=True)
    for cell, reason in excluded_cells(profile).items():
        console.print(f"left out: {cell}: {reason}", highlight=False, soft_wrap=True)
    for cell, reason in prepared.lacking.items():
        console.print(f"cannot run: {cell}: {reason}", highlight=False, soft_wrap=True)
    found = sensitivity(prepared)
    console.print(_seen(found, effect_points))
    for line in _words(found, prepared):
        console.print(line, highlight=False, soft_wrap=True)


def _short_drafters(prepared: Prepared) -> list[str]:
    """Say which drafters end before the engines' context does, and how many prompts get there."""
    lines = []
    for part in prepared.parts:
        prompts = cold_prompts(prepared.sets[part.variant].cold, part.workload)
        for short in short_drafters(part):
            there = sum(p.tokens + part.workload.max_tokens > short.tokens for p in prompts)
            whole = sum(p.tokens > short.tokens for p in prompts)
            lines.append(
                f"{short.words}: nothing is accepted there, and vLLM does not say so; {there} of "
                f"{counted(len(prompts), 'cold prompt')} may get there with the answer, {whole} are longer themselves"
            )
    return list(dict.fromkeys(lines))


def _first_of(cells: Sequence[str]) -> str:
    return f"{', '.join(cells[:6])}{' …' if len(cells) > 6 else ''}"


def _engines(prepared: Prepared) -> Table:
    profile = prepared.profile
    table = Table("engines started", "cells that share them", "requests", "lookahead", "expected")
    gpu = profile.engine.device == "gpu"
    for group in prepared.plan.groups:
        table.add_row(
            _needs(prepared, group) if gpu else _roles(group),
            ", ".join(c.id for c in group.cells),
            str(sum(w.requests for w in prepared.works if w.cell in group.cells)),
            str(group.method.lookahead),
            f"{group_expected_s(group, prepared.works):.0f} s",
        )
    return table


GPU_GIB = 80.0
"""GPU memory that is assumed on machines without GPUs."""


def _slots(prepared: Prepared) -> Table:
    """Tabulate how long the plan takes by number of GPUs, using the scheduler of a run."""
    used = sum(_gpu_seconds(job) for job in _jobs(prepared, assumed_gpus(1)))
    columns = ("GPUs", "done after", "cells that do not fit", "pairs with P and D apart")
    table = Table(
        *(Column(name, justify="right") for name in columns),
        title=f"on GPUs of {GPU_GIB:g} GiB: {lasting(used).replace(' ', ' GPU-')} by the profile's expected times",
        title_justify="left",
    )
    for count in (1, 2, 4, 8, 16):
        inventory = assumed_gpus(count)
        schedule = simulate(all_at_once(_jobs(prepared, inventory), inventory.devices), inventory.devices)
        left = sum(len(g.cells) for g in prepared.plan.groups if g.id in schedule.refused)
        pairs = [s.placement for s in schedule.slots if len(s.placement.engines) > 1]
        apart = sum(_apart(p) for p in pairs)
        table.add_row(
            str(count),
            lasting(schedule.makespan_s),
            str(left) if left else "–",
            f"{apart} of {len(pairs)}" if pairs else "–",
        )
    return table


def _apart(placement: Placement) -> bool:
    """Return whether no two engines of a group share a GPU."""
    return len(placement.devices) == sum(len(e.devices) for e in placement.engines)


def _placing(prepared: Prepared) -> list[str]:
    """Say where P and D of the pairs go, and what connects GPUs on this machine."""
    placings = {prepared.profile.part(g.variant).engine.placement for g in prepared.plan.groups if g.engines > 1}
    if not placings:
        return []
    here = gpu_inventory()
    shown = summary(here.links) if here.links else f"{UNKNOWN}: nvidia-smi shows no two GPUs here"
    lines = [f"P and D: {', '.join(_PLACINGS[p] for p in sorted(placings))}; link between GPUs: {shown}"]
    if here.devices and (shared := too_few_to_part(prepared.plan, prepared.profile, here)):
        lines.append(sharing_note(shared, len(here.devices)))
    return lines


_PLACINGS = {
    "any": "where they fit best (placement any)",
    "apart": "on different GPUs, where there are enough (placement apart)",
    "together": "on the same GPUs (placement together)",
}


def assumed_gpus(count: int) -> Inventory:
    """Return a machine with so many GPUs of ``GPU_GIB``."""
    devices = tuple(Device(f"gpu-{n}", "node", GPU_GIB, n) for n in range(count))
    return Inventory(devices, {d.id: str(d.index) for d in devices}, shared=True)


def _jobs(prepared: Prepared, inventory: Inventory) -> tuple[Job, ...]:
    return jobs_of(prepared.plan, prepared.works, prepared.profile, inventory, prepared.rescores)


def _gpu_seconds(job: Job) -> float:
    """Return the seconds of whole GPUs: an engine that takes half of one for an hour costs half a GPU-hour."""
    return job.seconds * sum(e.devices * e.gib / GPU_GIB for e in job.engines)


def models_of_hub(source: str) -> list[Model]:
    """Return the models that the profile names on the hub; without any, the hub is not asked."""
    profile = read_profile(source)
    return survey(profile, Hub()) if any(references_of(part) for part in profile.written_parts) else []


def print_models(source: str, console: Console) -> None:
    """Print the models that the profile names on the hub or in packages, with what would have to be downloaded."""
    for made in survey_convertible(read_profile(source)):
        if isinstance(made.model, PackagedModel) and made.folder is None:
            size = f", {made.source_size / 1e6:.0f} MB" if made.source_size else ""
            words = f"{made.role}: {made.model} is not in the cache; a run fetches it{size}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
    found = models_of_hub(source)
    if not found:
        return
    hub = Hub()
    table = folding_table("models", "repository", "commit", "size", "to fetch")
    for m in found:
        table.add_row(
            m.reference.repo,
            (m.commit or m.reference.pinned or m.reference.revision)[:12],
            "?" if m.size is None else f"{m.size / GIB:.1f} GiB",
            "?" if m.missing is None else f"{m.missing / GIB:.1f} GiB",
        )
    console.print(table)
    unknown = [m for m in found if m.missing is None]
    known = sum(m.missing or 0 for m in found) / GIB
    rest = f", and {len(unknown)} models of unknown size: {unknown[0].error}" if unknown else ""
    console.print(
        f"download: {known:.1f} GiB{rest}; free: {hub.free() / GIB:.0f} GiB at {hub.cache}; "
        "`harness models` shows details, and with --download downloads them",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _roles(group: EngineGroup) -> str:
    return "prefill + decode" if group.topology == "pd" else "single"


def _needs(prepared: Prepared, group: EngineGroup) -> str:
    """Return the engines of a group with the GPUs that each takes."""
    engine = prepared.profile.part(group.variant).engine
    share = f"{100 * engine.gpu_memory_utilization:.0f} %"
    roles = ("prefill", "decode") if group.topology == "pd" else ("single",)
    placing = f", {engine.placement}" if len(roles) > 1 and engine.placement != "any" else ""
    return " + ".join(f"{role} ({engine.devices_of(role)} × {share} GPU)" for role in roles) + placing


def _print_titled(title: str, table: Table, console: Console) -> None:
    """Print a table below its title, which a table of its own would wrap where it is narrower."""
    console.print(Text(title, style="table.title"), soft_wrap=True)
    console.print(table)


def _strata_title(part: Profile) -> str:
    variant = f"{part.variant}: " if part.variant else ""
    return f"{variant}prompts ({part.workload.prompts.name}, block size {part.engine.block_size})"


def _strata(found: StrataCounts) -> Table:
    table = Table("stratum", *(Column(method, justify="right") for method in found.counts))
    for stratum in Stratum:
        table.add_row(stratum.value, *(str(counts[stratum]) for counts in found.counts.values()))
    return table


def _seen(found: Sensitivity, effect_points: float) -> Table:
    headings = ["tests", "prompts", "smallest change at position 0", "in the weakest stratum"]
    headings += ["wrong answers alone", f"texts for {effect_points:g} point{'' if effect_points == 1 else 's'}"]
    right = (Column(heading, justify="right") for heading in headings)
    table = Table("cell", *right, title="what this run can detect", title_justify="left")
    for row in found.rows:
        if row.scenario != COLD and not found.normal:
            continue
        smallest, needed = found.smallest(row), found.needed(row, effect_points)
        table.add_row(
            row.cell + ("" if row.scenario == COLD else f" in {row.scenario}"),
            str(len(row.tests)) if found.normal else "exact",
            _prompts(row.sample),
            _size(row, smallest, found),
            _in_stratum(row, found),
            _answers(found.in_answers(row)) if found.normal else "one token",
            "–" if needed is None else str(needed),
        )
    return table


def _prompts(sample: Sample) -> str:
    return f"{sample.prompts} ({sample.units} texts)" if sample.units < sample.prompts else str(sample.prompts)


def _size(row: PowerRow, smallest: float | None, found: Sensitivity) -> str:
    if row.noise is None:
        return "–"
    if smallest is None:
        return "no baseline"
    if not found.normal:
        return f"one draft of {row.steps} steps ({smallest:.3f} points)"
    if not math.isfinite(smallest):
        return "too few texts"
    return f"{smallest:.2f} points" + ("" if row.noise.measured else " (assumed)")


def _in_stratum(row: PowerRow, found: Sensitivity) -> str:
    seen = found.in_stratum(row)
    if seen is None or row.weakest is None:
        return "–"
    stratum, sample = row.weakest
    shown = f"{100 * seen.share:.2f} points" if math.isfinite(seen.share) else "nothing"
    return f"{shown} ({stratum}, {sample.units})"


def _answers(seen: Detectable) -> str:
    return f"{_percent(seen.share)} %, at least {seen.prompts:.0f}" if math.isfinite(seen.share) else "none"


def _one_in(share: float) -> int:
    """Return the number of answers of which one may be wrong, rounded so that no smaller damage is promised."""
    return math.floor(1 / share + 1e-9)


def _percent(share: float) -> str:
    """Return a share in percent, rounded up, with a decimal where the whole number would promise more."""
    percent = 100 * share
    return f"{percent:.0f}" if round(percent) >= percent - 1e-9 else f"{math.ceil(10 * percent - 1e-9) / 10:g}"


def _words(found: Sensitivity, prepared: Prepared) -> list[str]:
    judging = prepared.profile.judging
    if not found.normal:
        chosen = (
            "tier bitwise" if judging.tier == "bitwise" else "tier auto, where the plain engine repeats its answers"
        )
        otherwise = "" if judging.tier == "bitwise" else " If it does not, registered tests decide (docs/verdicts.md)."
        return [
            f"{chosen}: tokens and accepted drafts are compared one by one, without statistical tests (alpha 0); "
            f"one difference fails its cell.{otherwise}",
            *_rounding(prepared),
        ]
    stages = "one stage" if judging.stages == 1 else "two stages, the second on held-out prompts and fresh engines"
    return [
        f"tier normal: {found.registered} registered tests, {stages}; chance that a run of unchanged engines fails "
        f"at most {judging.family_alpha:g}; each test at {found.alpha:.2g} in each stage (Holm), power "
        f"{judging.power:g}.",
        *_together(found),
        f"A change fails its cell only when it is beyond chance; acceptance must also have moved by "
        f"{judging.floor_points:g} points, with a {100 * judging.confidence:g} % interval that excludes zero.",
        *_correlation(found),
        *_blind(found),
    ]


def _rounding(prepared: Prepared) -> list[str]:
    """Say by how much log-probs may differ, and what of it was measured with the baselines."""
    given = prepared.profile.judging.logprob_nats
    if given is not None:
        return [f"Log-probs may differ by {given:g} nats (judging.logprob_nats)."]
    lines = [
        f"rounding of {method}, {words}: {figures}"
        for method, rounding in measured_rounding(prepared).items()
        for words, figures in measurement(rounding)
    ]
    if not lines:
        return [
            "Log-probs may differ by what the plain engine of the run shows of its rounding; baselines that are "
            "recorded now will have it."
        ]
    return [
        f"Log-probs may differ by {MULTIPLE} times the largest rounding that was measured with the baselines:",
        *lines,
    ]


def _together(found: Sensitivity) -> list[str]:
    lines = []
    for scenario, (cells, sample) in found.pooled.items():
        seen = found.in_all(scenario)
        whose, against = f"{len(cells)} P/D cells together", "their single engines"
        if scenario != COLD:
            whose, against = f"{scenario}: {counted(len(cells), 'cell')} together", "their cold answers"
        what = (
            f"one wrong answer in {_one_in(seen.share)}, or {seen.prompts:.0f} of different texts"
            if seen is not None and math.isfinite(seen.share)
            else "nothing, with so few texts"
        )
        lines.append(
            f"{whose}, {sample.prompts} requests of {sample.units} texts: one test against {against} at "
            f"{found.pooled_alpha:.2g}, which sees {what}."
        )
    if len(found.drafting) > 1:
        lines.append(
            f"{len(found.drafting)} P/D cells together: one test of their accepted drafts by position, against their "
            f"single engines at {found.judging.drafts_alpha:.2g}."
        )
    if COLD in found.pooled:
        return lines
    return ["No P/D cell has its single engine in this run, so nothing is tested over all P/D cells together.", *lines]


def _scenarios(prepared: Prepared) -> list[str]:
    """Say which cells are put into which states, with how many requests and how much of the time."""
    lines = []
    sent = Counter(scenario for work in prepared.works for scenario in work.planned)
    for scenario, cells in sent.items():
        works = [w for w in prepared.works if scenario in w.planned]
        took = sum(
            scripts_expected_s(
                [s for s in w.played if s.scenario == scenario],
                w.cell.topology,
                prepared.profile.part(w.cell.variant).expected,
            )
            for w in works
        )
        requests = sum(w.planned[scenario] for w in works)
        lines.append(f"scenario {scenario}: {counted(cells, 'cell')}, {requests} requests, about {lasting(took)}")
    return lines


def _correlation(found: Sensitivity) -> list[str]:
    """Say how much padded copies of a text have in common, by cell with A/A, if there are copies."""
    by_cell = {r.cell: r.noise.correlation for r in found.rows if r.noise is not None}
    measured = {cell: c for cell, c in by_cell.items() if c is not None}
    if not any(r.sample.units < r.sample.prompts for r in found.rows):
        return []
    if not measured:
        return [
            "Prompts are padded copies of texts, so the tests count texts; no A/A says yet how much copies correlate."
        ]
    worst = max(measured, key=lambda cell: measured[cell])
    return [
        "Prompts are padded copies of texts, so the tests count texts; between equal runs (A/A) the copies of a text "
        f"correlate by up to {measured[worst]:.2f} ({worst})."
    ]


def _blind(found: Sensitivity) -> list[str]:
    blind = found.blind()
    if not blind:
        return []
    lines = [
        f"{counted(len(cells), 'cell')} cannot show {what} with these prompts and will be UNKNOWN: {_first_of(cells)}"
        for what, cells in blind.items()
    ]
    assumed = any(r.noise is not None and not r.noise.measured for r in found.rows)
    return [
        *lines,
        "This plan can never PASS"
        + (", if the noise is as assumed" if assumed else "")
        + ". Send more prompts, cold and "
        "held out, of more texts (workload.recipe.per_stratum, or build a set with --per-stratum); select fewer cells, "
        "or for P/D cells together more of them.",
    ]
