"""The engines and requests of a self-test: which trials share engines, and what they and their control run send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.errors import UsageError
from harness.history.records import COLD
from harness.judging.checks import drafts, kv
from harness.mutants.catalogue import HISTORIC, MUTANTS, TRIALS
from harness.mutants.model import Borrowed, OwnEngines, PromptChoice, Trial
from harness.profiles.cells import Cell, EngineGroup, start_expected_s
from harness.profiles.load import load_profile, shipped_profile_names
from harness.profiles.methods import Method
from harness.profiles.model import ROUTES, Profile, TopologyName
from harness.prompts.model import Prompt, PromptSet
from harness.util.choices import named
from harness.workload.cells import CellWork, Choice, cell_work, cold_prompts

_OF_THE_WITNESS = frozenset({kv.HANDED_OVER, kv.COMPUTED, kv.KEPT, drafts.NAME})
"""Checks that read what the engines' KV caches held."""


class Setup(NamedTuple):
    """Engines shared by several trials, so that no configuration is started twice."""

    group: EngineGroup
    profile: Profile
    trials: tuple[Trial, ...]
    control: tuple[CellWork, ...]
    """Everything that any of the trials sends; sent first with all mutants disabled."""
    plain: EngineGroup | None = None
    """The plain engine, for trials in scenarios whose answers it alone knows; it gets no mutant."""
    part: int = 0
    """Which part of the trials that need these engines, from 1; 0 if it is all of them."""

    def plain_works(self, works: Sequence[CellWork]) -> list[CellWork]:
        """Return what the plain engine is asked beside such requests."""
        if self.plain is None:
            return []
        by_plain = {s.id for s in self.profile.scenarios if s.by_plain_alone}
        played = {(s.scenario, s.instance): s for w in works for s in w.scripts if s.scenario in by_plain}
        return [CellWork(cell, (), tuple(played.values())) for cell in self.plain.cells] if played else []

    @property
    def controlled(self) -> bool:
        """Whether these engines can answer without the mutant."""
        return all(t.starts for t in self.trials)

    @property
    def id(self) -> str:
        first = self.trials[0]
        shared = self.part or (self.controlled and len(self.trials) != 1 and first.engines is None)
        number = f"-{self.part}" if self.part else ""
        return f"{self.group.id}{number}" if shared else f"{self.group.id}-{first.mutant}"


def select_trials(
    mutants: Sequence[str], quick: bool, method: str | None = None, complete: bool = False
) -> list[Trial]:
    """Return the trials of the given mutants, of the historic defects (``quick``), or all but those that take long,
    which ``complete`` adds; with ``method``, those of them that it can show, on engines with that method.

    Raises UsageError on an unknown id, and where the method can show none.
    """
    mutants = [named("--mutant", mutant, list(MUTANTS), "fault", "harness list faults") for mutant in mutants]
    usual = tuple(m for m, t in TRIALS.items() if complete or not t.long)
    chosen = mutants or (HISTORIC if quick else usual)
    # M9 comes last: it leaves blocks on P until their lease ends, so that the caches cannot be emptied.
    order = sorted((m for m in MUTANTS if m in chosen), key=lambda m: m == "M9")
    trials = [TRIALS[m] for m in order]
    if method is not None:
        trials = [moved for t in trials if (moved := _on(t, method)) is not None]
        if not trials:
            raise UsageError(
                f"--method {method} can show none of the faults {', '.join(order)}; name another method, or other "
                "faults"
            )
    return trials


def not_shown(trials: Sequence[Trial], profile: Profile) -> dict[str, str]:
    """Return the mutants that engines of a profile cannot show, each with the reason."""
    out = {}
    for trial in trials:
        if _OF_THE_WITNESS.issuperset(trial.checks) and _own_profile(profile, (trial,)).witness == "off":
            out[trial.mutant] = (
                f"{' and '.join(trial.checks)} alone shows it, by notes of the KV caches, which profile "
                f"{_profile_of_target(trial, profile)} has off; set witness: kv"
            )
    return out


_SHOWN_WITHOUT_DRAFTS = ("target-kv", "input", "routing", "blocks-kept")


def _on(trial: Trial, method: str) -> Trial | None:
    """Return a trial with another method, or None if that cannot show the mutant."""
    if trial.method == method:
        return trial
    if trial.method != "eagle3":
        # Of one method's own code, or of engines without a drafter.
        return None
    if method == "none":
        if trial.needs_drafts or trial.damage not in _SHOWN_WITHOUT_DRAFTS:
            return None
        return trial._replace(method=method, checks=(*trial.checks, "tokens-reference"))
    return trial._replace(method=method)


def trial_works(trial: Trial, profile: Profile, prompts: PromptSet, cells: Sequence[Cell]) -> list[CellWork]:
    """Return the requests of a trial per cell. Raises UsageError when the profile lacks a scenario or prompt that it
    needs."""
    out = []
    for cell in cells:
        wanted = {v.scenario for v in trial.views if (v.topology, v.route) == (cell.topology, cell.route)}
        if wanted:
            choice = _choice(trial, wanted, profile, prompts, cell)
            try:
                out.append(cell_work(profile, prompts, cell, choice))
            except KeyError as missing:
                raise UsageError(
                    f"fault {trial.mutant} is tried with the prompt {missing.args[0]!r}, which profile {profile.name} "
                    f"does not have; give it a scenario {', '.join(sorted(wanted - {COLD}))} with prompts of its own, "
                    "or leave the fault out"
                ) from None
    return out


def _choice(trial: Trial, wanted: set[str], profile: Profile, prompts: PromptSet, cell: Cell) -> Choice:
    missing = wanted - {COLD} - {s.id for s in profile.scenarios}
    if missing:
        raise UsageError(
            f"fault {trial.mutant} shows in the scenario {', '.join(sorted(missing))}, which profile {profile.name} "
            f"does not have; add it to the profile or leave the fault out"
        )
    chosen = choose_prompts(trial.prompts, prompts, profile, cell.method)
    return Choice(scenarios=frozenset(wanted), prompts=frozenset(p.id for p in chosen), forms=trial.forms)


def choose_prompts(choice: PromptChoice, prompts: PromptSet, profile: Profile, method: Method) -> list[Prompt]:
    """Return cold prompts for a trial: those whose right answer is known, and of the others those that baselines have.

    ``few`` takes one per stratum, ``some`` three, and ``short`` one of every length up to three blocks and a token.
    ``roomy`` is ``few`` of those whose last block has room for the last token's drafts.
    """
    size = profile.engine.block_size
    first: dict[int, Prompt] = {}
    recorded = {p.id for p in cold_prompts(prompts.cold, profile.workload)}
    judged = (p for p in prompts.cold if p.expected is not None or p.id in recorded)
    for prompt in sorted(judged, key=lambda p: p.tokens):
        first.setdefault(prompt.tokens, prompt)
    if choice == "short":
        return [p for n, p in first.items() if n <= 3 * size + 1]
    if choice == "roomy":
        first = {n: p for n, p in first.items() if (n - 1) % size + method.lookahead < size}
    count = 3 if choice == "some" else 1
    by_stratum: dict[str, list[Prompt]] = {}
    for prompt in first.values():
        if prompt.tokens > size // 2:
            by_stratum.setdefault(prompt.stratum_for(size, method.lookahead), []).append(prompt)
    # The second prompt of each stratum has at least two blocks, so that a block in the middle can be damaged.
    return [p for found in by_stratum.values() for p in found[1 : 1 + count] or found[:count]]


def make_setups(trials: Sequence[Trial], profile: Profile, prompts: PromptSet) -> list[Setup]:
    """Group trials by the engines that they need. Raises UsageError when the profile cannot show one."""
    grouped: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.method not in {m.kind for m in _own_profile(profile, [trial]).methods}:
            raise UsageError(
                f"fault {trial.mutant} shows with {trial.method}, which profile {profile.name} does not have; name "
                "other faults or another profile"
            )
        own = trial.engines.description if trial.engines else "" if trial.starts else trial.mutant
        grouped.setdefault((trial.method, own), []).append(trial)
    return [_setup(members, profile, prompts) for members in grouped.values()]


def parted(setup: Setup, parts: int, prompts: PromptSet) -> list[Setup]:
    """Divide the trials of a setup among engines of the same kind, so that each part takes about as long; within a part
    they keep their order. Those that need the plain engine stay together, so that it is started once."""
    if not 1 < parts <= len(setup.trials):
        return [setup]
    beside = [t for t in setup.trials if setup.plain is not None and _by_plain([t], setup.profile)]
    bins: list[list[Trial]] = [beside, *([] for _ in range(parts - 1))]
    seconds = {t.mutant: _asked_s([t], setup, prompts) for t in setup.trials}
    for trial in sorted((t for t in setup.trials if t not in beside), key=lambda t: -seconds[t.mutant]):
        min(bins, key=lambda some: sum(seconds[t.mutant] for t in some)).append(trial)
    out = []
    for number, some in enumerate(filter(None, bins), start=1):
        trials = tuple(t for t in setup.trials if t in some)
        control = _control(setup.group.cells, trials, setup.profile, prompts)
        plain = setup.plain if some is beside else None
        out.append(setup._replace(trials=trials, control=control, plain=plain, part=number))
    return out


def setup_expected_s(setup: Setup, prompts: PromptSet) -> float:
    """Return the rough seconds that a setup takes, with the start of its engines."""
    control = _requests_s(setup.control, setup) if setup.controlled else 0.0
    return start_expected_s(setup.group) + _asked_s(setup.trials, setup, prompts) + control


def _asked_s(trials: Sequence[Trial], setup: Setup, prompts: PromptSet) -> float:
    works = [w for t in trials for w in trial_works(t, setup.profile, prompts, setup.group.cells)]
    return _requests_s(works, setup)


def _requests_s(works: Sequence[CellWork], setup: Setup) -> float:
    return sum(setup.group.expected.request_s(w.cell.topology) * w.requests for w in works)


def _own_profile(profile: Profile, trials: Sequence[Trial]) -> Profile:
    """Return the profile with what trials that share engines need of them, and the scenarios that they borrow."""
    own = trials[0].engines
    profile = _with_own_engines(profile, own) if own is not None else profile
    for borrowed in (b for t in trials for b in t.borrowed):
        profile = _with_scenario(profile, borrowed)
    return profile


def _with_own_engines(profile: Profile, own: OwnEngines) -> Profile:
    if own.like:
        other = load_profile(_for_device(own.like, profile.engine.device))
        profile = _with_engine(profile, **{name: getattr(other.engine, name) for name in own.settings})
        across = tuple(dict.fromkeys((*profile.judging.baseline_across, *other.judging.baseline_across)))
        judging = profile.judging.model_copy(update={"baseline_across": across})
        profile = profile.model_copy(update={"judging": judging})
        if own.target:
            profile = _with_target(profile, other)
        if own.target or own.pool:
            profile = _with_pool(profile, other)
        if own.methods:
            profile = profile.model_copy(update={"methods": other.methods})
        if own.max_tokens:
            asked = profile.workload.model_copy(update={"max_tokens": other.workload.max_tokens})
            profile = profile.model_copy(update={"workload": asked})
    for borrowed in own.scenarios:
        profile = _with_scenario(profile, borrowed)
    return profile


def _profile_of_target(trial: Trial, profile: Profile) -> str:
    """Return the name of the profile that says how the answers and the KV of a trial are judged."""
    own = trial.engines
    return _for_device(own.like, profile.engine.device) if own is not None and own.target else profile.name


def _for_device(like: str, device: str) -> str:
    """Return the shipped profile like ``like`` for engines of a device, if there is one: models need other settings
    there."""
    twin = like.replace("cpu-", f"{device}-", 1)
    return twin if twin in shipped_profile_names() else like


def _with_target(profile: Profile, other: Profile) -> Profile:
    """Return the profile with another one's target, and what its answers and its KV are judged by."""
    rounding = {name: getattr(other.judging, name) for name in ("logprob_nats", "recorded_nats", "near_tie_nats")}
    judging = profile.judging.model_copy(update=rounding)
    own = _with_engine(
        profile,
        hf_overrides=other.engine.hf_overrides,
        env={**profile.engine.env, **other.engine.env},
        extra_args=(*profile.engine.extra_args, *other.engine.extra_args),
    )
    return own.model_copy(
        update={"target": other.target, "baselines": other.baselines, "judging": judging, "witness": other.witness}
    )


def _with_engine(profile: Profile, **settings: object) -> Profile:
    return profile.model_copy(update={"engine": profile.engine.model_copy(update=settings)})


def _with_pool(profile: Profile, other: Profile) -> Profile:
    """Return the profile with another one's number of KV blocks, if it sets any."""
    return _with_engine(profile, kv_blocks=other.engine.kv_blocks) if profile.engine.kv_blocks else profile


def _with_scenario(profile: Profile, borrowed: Borrowed) -> Profile:
    """Return the profile with a shipped profile's scenario, unless it has one of that name, with prompts of its own."""
    if any(s.id == borrowed.scenario for s in profile.scenarios):
        return profile
    changes = {"prompts": borrowed.prompts} if borrowed.prompts else {}
    shipped = load_profile(borrowed.profile).scenarios
    added = tuple(s.model_copy(update=changes) for s in shipped if s.id == borrowed.scenario)
    return profile.model_copy(update={"scenarios": (*profile.scenarios, *added)})


def _setup(trials: Sequence[Trial], profile: Profile, prompts: PromptSet) -> Setup:
    """Return the engines of trials with one method. A pair serves single cells too, on its decode engine."""
    own = _own_profile(profile, trials)
    kind = trials[0].method
    method = next(m for m in own.methods if m.kind == kind)
    wanted = {(v.topology, v.route) for t in trials for v in t.views}
    pair = any(topology == "pd" for topology, _ in wanted)
    names: list[TopologyName] = ["pd", "single"] if pair else ["single"]
    cells = tuple(Cell(name, method, route) for name in names for route in ROUTES if (name, route) in wanted)
    none = next((m for m in profile.methods if m.kind == "none"), None)
    prefill = none if trials[0].mutant == "M10" else None
    plain = None
    if kind != "none" and none is not None and _by_plain(trials, own):
        plain = EngineGroup("single", none, (Cell("single", none),), expected=own.expected)
    group = EngineGroup("pd" if pair else "single", method, cells, prefill, expected=own.expected)
    return Setup(group, own, tuple(trials), _control(cells, trials, own, prompts), plain)


def _by_plain(trials: Sequence[Trial], profile: Profile) -> bool:
    """Return whether any of the trials is in a scenario whose answers the plain engine alone knows."""
    by_plain = {s.id for s in profile.scenarios if s.by_plain_alone}
    return any(v.scenario in by_plain for t in trials for v in t.views)


def _control(
    cells: Sequence[Cell], trials: Sequence[Trial], profile: Profile, prompts: PromptSet
) -> tuple[CellWork, ...]:
    """Return everything that any of the trials sends."""
    works = [w for t in trials for w in trial_works(t, profile, prompts, cells)]
    return tuple(_union(cell, works) for cell in cells)


def _union(cell: Cell, works: Sequence[CellWork]) -> CellWork:
    """Return everything that any of the works sends to a cell, once."""
    mine = [w for w in works if w.cell == cell]
    # All cold prompts for every cell: pairs are compared with the single engine prompt by prompt.
    items = dict.fromkeys(i for w in works for i in w.items)
    played = {(s.scenario, s.instance): s for w in mine for s in w.scripts}
    return CellWork(cell, tuple(items), tuple(played.values()))
