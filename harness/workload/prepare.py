"""Loading and checking of everything that can be wrong before an engine is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from harness.errors import HarnessError, ModelUnavailableError, UsageError
from harness.profiles.availability import made_later, reason_for
from harness.profiles.cells import Cell, Plan, make_plan, select_cells
from harness.profiles.known_defects import load_known
from harness.profiles.kv_layout import modules_in
from harness.profiles.kv_pool import too_small_pool
from harness.profiles.load import check_paths, load_profile
from harness.profiles.model import Profile
from harness.profiles.model_reference import TARGET, TOKENIZER
from harness.profiles.obtain import obtain_all
from harness.prompts.model import PromptSet, load_prompts, planned_prompts
from harness.workload.cells import (
    RECORDING,
    CellWork,
    Choice,
    cell_work,
    choose_scenarios,
    cold_prompts,
    expected_s,
    starts_expected_s,
    thinned,
    to_record,
    total_requests,
)
from harness.workload.scripts import require_possible


class Prepared(NamedTuple):
    """A validated request: profile, prompts and plan. Nothing has been started."""

    profile: Profile
    source: str
    sets: Mapping[str, PromptSet]
    """Prompt sets by variant; a profile without axes has one, for the variant ``""``."""
    plan: Plan
    """Plan of the cells that can run."""
    works: tuple[CellWork, ...]
    lacking: Mapping[str, str] = {}
    """Cells that cannot run, and will be UNKNOWN, with the reason: a model or prompts are missing."""

    @property
    def prompts(self) -> PromptSet:
        """The prompts of the first variant, which is the only one of a plain profile."""
        return next(iter(self.sets.values()))

    @property
    def parts(self) -> tuple[Profile, ...]:
        """The parts of the profile that have cells in the plan."""
        return tuple(p for p in self.profile.parts if p.variant in self.sets)

    @property
    def has_plain(self) -> bool:
        """Whether the plain single engine runs cold prompts."""
        return any(w.cell.id == w.cell.name.reference and w.items for w in self.works)

    @property
    def rescores(self) -> bool:
        """Whether outputs are re-scored: the profile says so, and the plain single engine runs cold prompts."""
        return self.profile.workload.rescore and self.has_plain

    def witnessing(self, what: Literal["off", "kv"]) -> Prepared:
        """Return it with the engines' KV caches watched, or not, whatever the profile says."""
        return self._replace(profile=self.profile.model_copy(update={"witness": what}))

    @property
    def requests(self) -> int:
        return total_requests(self.works)

    @property
    def expected_s(self) -> float:
        return expected_s(self.plan, self.works)

    @property
    def starts_s(self) -> float:
        """How much of ``expected_s`` is starts of engines."""
        return starts_expected_s(self.plan)


def without_rescoring(profile: Profile) -> Profile:
    """Return the profile as if it did not ask for outputs to be re-scored."""
    return profile.model_copy(update={"workload": profile.workload.model_copy(update={"rescore": False})})


def prepare(
    source: str,
    patterns: Sequence[str],
    scenarios: Sequence[str] = (),
    record: bool = False,
    prompts_per_stratum: int | None = None,
    planned: bool = False,
    fetch: bool = True,
    running: bool = False,
) -> Prepared:
    """Load and check everything that can be wrong before an engine is started.

    ``record`` selects what a baseline needs: every prompt that a run may send, cold, as ids. ``prompts_per_stratum``
    limits the cold prompts. With ``planned``, models and prompts need not exist, and placeholders by the recipe stand
    for missing prompts; the result cannot be run. Otherwise models in packages are fetched and folders at rest
    expanded, which is said on stderr, unless ``fetch`` is false. Servers that are ``running`` have started with the
    KV pool that they have.

    Raises UsageError, DataError, ProfileError or EnvironmentFault.
    """
    profile = load_profile(source)
    cells = select_cells(profile, patterns, source)
    if fetch and not planned and _obtained(profile, cells):
        profile = load_profile(source)
    if record:
        # No baseline has scores, for which the plain engine would wait for all others, nor notes of the KV.
        profile = without_rescoring(profile).model_copy(update={"witness": "off"})
    if record:
        # A baseline describes engines without a router, and is recorded from engines alone.
        cells = [c for c in cells if not c.routed and not (patterns and c.topology == "pd")]
        if not cells:
            raise UsageError(
                f"--cell {' '.join(patterns)}: baselines are recorded from engines alone; name single cells"
            )
    choice = RECORDING if record else choose_scenarios(profile, scenarios, source)
    # A list that is damaged or missing must be found now, not after the run.
    load_known(profile.known_defects)
    sets: dict[str, PromptSet] = {}
    works: list[CellWork] = []
    lacking: dict[str, str] = {}
    for part in profile.parts:
        mine = [c for c in cells if c.variant == part.variant]
        if not mine:
            continue
        try:
            prompts = _planned_prompts(part) if planned else None
            prompts = prompts or _fitting_prompts(part, source, record, planned)
            sets[part.variant] = prompts = to_record(prompts, part) if record else prompts
        except HarnessError as error:
            # A variant that cannot run must not keep the others from running.
            if not profile.axes:
                raise
            lacking |= {c.id: str(error) for c in mine}
            works += [CellWork(c, (), ()) for c in mine]
            continue
        chosen = _thinned(choice, prompts, prompts_per_stratum)
        works += [w for c in mine if (w := cell_work(part, prompts, c, chosen)).requests]
        reasons = {c.id: _cannot_run(part, c, planned, running) for c in mine}
        lacking |= {cell: reason for cell, reason in reasons.items() if reason is not None}
    if works and all(w.cell.id in lacking for w in works):
        words = "\n".join(f"  {reason}" for reason in dict.fromkeys(lacking.values()))
        raise ModelUnavailableError(f"profile {source}: expected cells that can run, found none:\n{words}")
    if not works:
        raise UsageError(
            f"{', '.join(c.id for c in cells)} cannot run {', '.join(scenarios)}; scenarios that need a prefill "
            "engine run only in pd cells"
        )
    sets = {v: prompts for v, prompts in sets.items() if any(w.cell.variant == v for w in works)}
    plan = make_plan(profile, [w.cell for w in works if w.cell.id not in lacking])
    asked = {w.cell.id for w in works}
    return Prepared(profile, source, sets, plan, tuple(works), {c: r for c, r in lacking.items() if c in asked})


def _obtained(profile: Profile, cells: Sequence[Cell]) -> bool:
    """Make the models of these cells that are not here and can be made; return whether any was."""
    methods: dict[str, set[str]] = {}
    for cell in cells:
        methods.setdefault(cell.variant, set()).add(cell.method.kind)
    return obtain_all(profile, methods, lambda words: print(f"harness: {words}", file=sys.stderr, flush=True))


def _cannot_run(part: Profile, cell: Cell, planned: bool, running: bool) -> str | None:
    """Return why a cell cannot run, or None: what lacks, if it is not only ``planned``, and what vLLM would refuse when
    it starts."""
    reason = None if planned else reason_for(part, cell.method.kind) or _unlike_modules(part, cell)
    if reason is not None or running:
        return reason
    engines = {"decode": cell.method, "prefill": cell.method.on_prefill}
    engines = engines if cell.topology == "pd" else {"single": cell.method}
    return next(filter(None, (too_small_pool(part, method, role) for role, method in engines.items())), None)


def _unlike_modules(part: Profile, cell: Cell) -> str | None:
    """Return why P and D cannot draft unlike numbers of tokens with several modules, or None."""
    methods = (cell.method.on_prefill, cell.method)
    theirs, ours = (m.draft_tokens for m in methods)
    if cell.topology != "pd" or ours == theirs or max(modules_in(part, m) for m in methods) == 1:
        return None
    return (
        f"{cell.method.kind}: expected as many drafts on P as on D, since each derives from its own number how many "
        f"tokens of a prompt P leaves to D, found {theirs} and {ours}; leave out prefill_num_speculative_tokens"
    )


def _planned_prompts(part: Profile) -> PromptSet | None:
    """Return placeholders for prompts that have not been built, or None if they have or there is no recipe."""
    recipe = part.workload.recipe
    return planned_prompts(recipe) if recipe is not None and not part.workload.prompts.is_file() else None


def _thinned(choice: Choice, prompts: PromptSet, per_stratum: int | None) -> Choice:
    """Return the choice with about ``per_stratum`` cold prompts of each stratum."""
    if per_stratum is None:
        return choice
    return choice._replace(prompts=frozenset(p.id for p in thinned(prompts.cold, per_stratum)), texts=per_stratum)


def _fitting_prompts(part: Profile, source: str, record: bool, planned: bool) -> PromptSet:
    """Load the prompts of one part of a profile. Raises UsageError or DataError when they cannot be used with it."""
    where = f"profile {source}" + (f", variant {part.variant}" if part.variant else "")
    check_paths(part, Path(source))
    prompts = load_prompts(part.workload.prompts)
    if not planned or (TARGET if part.tokenizer is None else TOKENIZER) not in made_later(part):
        prompts.check_tokenizer(part.tokenizer_folder, part.workload.prompts)
    longest = max(p.tokens for p in prompts.prompts) + part.workload.max_tokens
    if longest > part.engine.max_model_len:
        raise UsageError(
            f"{where}: expected prompts and outputs to fit engine.max_model_len = "
            f"{part.engine.max_model_len}, found up to {longest} tokens; raise it or lower workload.max_tokens"
        )
    if part.judging.tier == "normal" and part.judging.stages == 2 and not prompts.held_out and not record:
        raise UsageError(
            f"{where}: expected prompts held out for the second stage (use: held-out) in "
            f"{part.workload.prompts.name}, found none; build a set with "
            "--held-out (harness prompts build), or set judging.stages to 1"
        )
    held_out = cold_prompts(prompts.held_out, part.workload)
    again = (held_out,) if part.judging.stages == 2 and part.judging.tier == "normal" and not record else ()
    require_possible(part, {p.id: p for p in prompts.prompts}, cold_prompts(prompts.cold, part.workload), *again)
    return prompts


def narrowed(prepared: Prepared, variant: str) -> Prepared:
    """Return what was prepared for a single variant, as a plain profile."""
    works = tuple(w for w in prepared.works if w.cell.variant == variant)
    part = prepared.profile.part(variant)
    plan = make_plan(part, [w.cell for w in works if w.cell.id not in prepared.lacking])
    lacking = {w.cell.id: prepared.lacking[w.cell.id] for w in works if w.cell.id in prepared.lacking}
    return Prepared(part, prepared.source, {variant: prepared.sets[variant]}, plan, works, lacking)
