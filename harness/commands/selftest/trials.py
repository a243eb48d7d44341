"""The cells and scenarios that can show each mutant, and what must be found there. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from harness.errors import UsageError
from harness.history.records import COLD
from harness.judging.findings import DamageClass
from harness.mutants.catalogue import HISTORIC, MUTANTS
from harness.profiles.cells import Cell, EngineGroup
from harness.profiles.load import load_profile
from harness.profiles.methods import Method
from harness.profiles.model import ROUTES, Profile, Route, TopologyName
from harness.prompts.model import Prompt, PromptSet
from harness.workload.cells import CellWork, Choice, cell_work, cold_prompts

PromptChoice = Literal["few", "roomy", "short", "some"]


class View(NamedTuple):
    """A topology in a scenario of the profile ``cpu``, by its id, or ``cold``."""

    topology: TopologyName
    scenario: str
    route: Route = "client"


class Trial(NamedTuple):
    """One mutant, the smallest workload that can show it, and what must be found."""

    mutant: str
    caught: tuple[View, ...]
    """The views of which at least one must catch the mutant."""
    damage: DamageClass
    checks: tuple[str, ...]
    """At least one of these must fail where the mutant is caught."""
    clean: tuple[View, ...] = ()
    """Views that must pass although the mutant is enabled, as the right reason implies."""
    beside: tuple[View, ...] = ()
    """Views that are run, too, whatever they show."""
    method: str = "eagle3"
    prompts: PromptChoice = "few"
    forms: tuple[Literal["ids", "text"], ...] = ("ids",)
    spills_only: bool = False
    """Whether failures must be at the residues at which the lookahead spills into another block, and only there."""
    unknown: bool = False
    """Whether UNKNOWN, not REGRESSION, is the right verdict, because the mutant leaves nothing tested."""
    refusal: str | None = None
    """For mutants with which engines must refuse to start: a regular expression for their error."""

    @property
    def views(self) -> tuple[View, ...]:
        """The views to run."""
        return (*self.caught, *self.clean, *self.beside)

    @property
    def starts(self) -> bool:
        """Whether the engines are expected to start."""
        return self.refusal is None


_PD_COLD, _ONE_COLD = View("pd", COLD), View("single", COLD)
_AFTER, _ALONE = (_PD_COLD,), (_ONE_COLD,)
_TOKENS = ("tokens-baseline", "tokens-reference")
_STEPS = ("acceptance-baseline", "acceptance-single")
_LOGPROBS = ("logprobs-single", "logprobs-baseline")
_BOTH_FORMS: tuple[Literal["ids", "text"], ...] = ("ids", "text")


def _pd(scenario: str) -> tuple[View, ...]:
    return (View("pd", scenario),)


def _one(scenario: str) -> tuple[View, ...]:
    return (View("single", scenario),)


def _both(scenario: str) -> tuple[View, ...]:
    return (*_pd(scenario), *_one(scenario))


TRIALS: tuple[Trial, ...] = (
    Trial("M1", _AFTER, "target-kv", _TOKENS, prompts="short", spills_only=True),
    Trial("M1c", _pd("chunked-prefill"), "target-kv", _TOKENS, _AFTER),
    Trial("M1d", _pd("prefix-hit"), "target-kv", _TOKENS, _AFTER),
    Trial("M2", (_PD_COLD, _ONE_COLD), "input", ("echoed-prompt",), forms=_BOTH_FORMS),
    Trial("M3", _one("concurrent"), "drafter-kv", _STEPS, method="dflash"),
    Trial("M4", _AFTER, "drafter-kv", _STEPS, _ALONE),
    Trial("M4g", _AFTER, "drafter-kv", _STEPS, _ALONE),
    Trial("M5a", _both("pressure"), "target-kv", _TOKENS),
    Trial("M5b", _both("refill"), "target-kv", (*_TOKENS, "state-occurred")),
    Trial("M6", _pd("late-pull"), "target-kv", _TOKENS),
    Trial("M7", _both("shared-block"), "target-kv", (*_TOKENS, "state-occurred")),
    Trial("M8", _ALONE, "sampler", _STEPS, beside=_AFTER),
    Trial("M9", _AFTER, "nothing-tested", ("transfer",), unknown=True),
    Trial("M10", _AFTER, "infrastructure", ("complete",), unknown=True, refusal="NIXL compatibility hash mismatch"),
    Trial("M11", _ALONE, "sampler", _TOKENS, prompts="some"),
    Trial("N1", _pd("late-pull"), "target-kv", (*_TOKENS, "transfer")),
    Trial("N2", _AFTER, "target-kv", _TOKENS, _ALONE),
    Trial("N3", _AFTER, "target-kv", (*_TOKENS, "transfer")),
    Trial("N4", _one("prefix-hit"), "drafter-kv", _STEPS, _ALONE),
    Trial("N5", _both("prefix-hit"), "target-kv", _TOKENS, _ALONE),
    Trial("N6", (View("pd", COLD, "router"),), "routing", ("transfer",), _AFTER),
    Trial("N7", _AFTER, "target-kv", _LOGPROBS, _ALONE),
    Trial("N8", _one("continuation"), "target-kv", _TOKENS, _ALONE),
    Trial("N9", _one("continuation"), "drafter-kv", _STEPS, _ALONE),
    Trial("N10", _one("same-step"), "target-kv", _TOKENS, _ALONE),
    Trial("N11", _ALONE, "blocks-kept", ("pool-returned",), beside=_one("abandoned")),
    Trial("N12", _pd("recovery"), "target-kv", _TOKENS, _AFTER),
    # A plain engine of the same run shows that it is a regression; the self-test's have the drafter alone.
    Trial("N13", _one("prefix-hit"), "nothing-tested", ("state-occurred",), _ALONE, unknown=True),
    Trial("N14", _one("features"), "infrastructure", ("complete",), _ALONE, unknown=True),
    Trial("N15", _one("abandoned"), "target-kv", _TOKENS, beside=_ALONE),
    Trial("N16", _pd("pressure-on-p"), "target-kv", (*_TOKENS, "transfer"), beside=_AFTER),
    # Without a drafter, beside the plain engine of the same run, which re-scores the outputs, too.
    Trial("N19", _AFTER, "target-kv", ("tokens-reference", "rescored"), _ALONE, method="none"),
    # The pair is right, and compared with the single engine all the same.
    Trial("N18", _ALONE, "target-kv", _TOKENS, beside=_AFTER),
    Trial("N17", _pd("prefix-hit"), "target-kv", _TOKENS, _AFTER),
    # Of a target with windows: the plain engine of the same run is the reference.
    Trial("N20", _AFTER, "target-kv", ("tokens-reference", *_LOGPROBS), _ALONE, method="none", prompts="some"),
    # Of a target with recurrent state, likewise. A hit on D that gets a state from P does not continue from its own.
    Trial("N27", _AFTER, "target-kv", _TOKENS, _ALONE, method="none", prompts="some"),
    Trial("N28", _one("prefix-hit"), "target-kv", _TOKENS, _ALONE, method="none"),
    # Of the same target with its drafter: D computes the last token of a prompt from a state of P's, with placeholders
    # behind it where they fit into the block. A known defect shows where they do not.
    Trial("N30", _AFTER, "target-kv", _TOKENS, _ALONE, method="hybrid-mtp", prompts="roomy"),
    # Of a drafter of several modules. A known defect loses drafts in every answer of the pair, so that acceptance shows
    # nothing: which tokens P hands over does.
    Trial("N31", _AFTER, "drafter-kv", ("transfer",), _ALONE, method="mtp3"),
    Trial("N21", _AFTER, "sampler", ("finish-reason",), _ALONE, method="none"),
    Trial("N22", _ALONE, "input", ("text-form",), forms=_BOTH_FORMS),
    # That nothing was drafted is UNKNOWN; that the steps account for less than the answer is not.
    Trial("N23", _ALONE, "sampler", ("response-invariants", "drafts-happened")),
    Trial("N24", _ALONE, "target-kv", ("cold-stays-cold",), forms=_BOTH_FORMS),
    Trial("N25", _pd("restarted-p"), "target-kv", (*_TOKENS, "transfer"), _AFTER),
    # The second P is never told that its blocks were read, which is found with the cold prompts.
    Trial("N29", _pd("second-p"), "target-kv", _TOKENS, beside=_AFTER),
    Trial("N26", _pd("read-back"), "target-kv", (*_TOKENS, *_LOGPROBS), _AFTER),
)


class Setup(NamedTuple):
    """Engines shared by several trials, so that no configuration is started twice."""

    group: EngineGroup
    profile: Profile
    trials: tuple[Trial, ...]
    control: tuple[CellWork, ...]
    """Everything that any of the trials sends; sent first with all mutants disabled."""

    @property
    def controlled(self) -> bool:
        """Whether these engines can answer without the mutant."""
        return all(t.starts for t in self.trials)

    @property
    def id(self) -> str:
        first = self.trials[0].mutant
        shared = self.controlled and len(self.trials) != 1 and first not in OWN_ENGINES
        return self.group.id if shared else f"{self.group.id}-{first}"


def select_trials(
    mutants: Sequence[str], quick: bool, method: str | None = None, complete: bool = False
) -> list[Trial]:
    """Return the trials of the given mutants, of the historic defects (``quick``), or all but those that take long,
    which ``complete`` adds; with ``method``, those of them that it can show, on engines with that method.

    Raises UsageError on an unknown id, and where the method can show none.
    """
    known = {t.mutant: t for t in TRIALS}
    for mutant in mutants:
        if mutant not in MUTANTS:
            raise UsageError(f"--mutant {mutant!r}: expected one of {', '.join(MUTANTS)}, found no such fault")
    usual = tuple(m for m in MUTANTS if complete or m not in _LONG)
    chosen = mutants or (HISTORIC if quick else usual)
    # M9 comes last: it leaves blocks on P until their lease ends, so that the caches cannot be emptied.
    order = sorted((m for m in MUTANTS if m in chosen), key=lambda m: m == "M9")
    trials = [known[m] for m in order]
    if method is not None:
        trials = [moved for t in trials if (moved := _on(t, method)) is not None]
        if not trials:
            raise UsageError(
                f"--method {method}: expected faults that it can show, found none among {', '.join(order)}"
            )
    return trials


_LONG = ("N25", "N26", "N27", "N28", "N29", "N30", "N31")
"""Mutants that take half of the time of all others: of engines that are restarted, added, or built otherwise."""
_NOT_WITHOUT_DRAFTS = frozenset({"M1", "M1c", "N18"})
"""Mutants that cannot be shown as listed where nothing is drafted, beside those of drafter and sampler: without a
lookahead M1 and M1c damage nothing, and N18 damages the plain engine itself, which all else is compared with."""
_SHOWN_WITHOUT_DRAFTS = ("target-kv", "input", "routing", "blocks-kept")


def _on(trial: Trial, method: str) -> Trial | None:
    """Return a trial with another method, or None if that cannot show the mutant."""
    if trial.method == method:
        return trial
    if trial.method != "eagle3":
        # Of one method's own code, or of engines without a drafter.
        return None
    if method == "none":
        if trial.mutant in _NOT_WITHOUT_DRAFTS or trial.damage not in _SHOWN_WITHOUT_DRAFTS:
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
    grouped: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        if trial.method not in {m.kind for m in _of_mutant(profile, trial.mutant).methods}:
            raise UsageError(
                f"fault {trial.mutant} shows with {trial.method}, which profile {profile.name} does not have; name "
                "other faults or another profile"
            )
        # A pair serves single cells too, on its decode engine.
        pairs = {t.method for t in trials if any(v.topology == "pd" for v in t.views)}
        topology = "pd" if trial.method in pairs else "single"
        own = OWN_ENGINES.get(trial.mutant, "" if trial.starts else trial.mutant)
        grouped.setdefault((topology, trial.method, own), []).append(trial)
    return [_setup(key, members, profile, prompts) for key, members in grouped.items()]


OWN_ENGINES = {
    "M4g": "staging buffers on P",
    "N17": "a P that writes",
    "N20": "a target with windows",
    "N25": "a P that is restarted, and reads from D",
    "N26": "a P that is restarted, and reads from D",
    "N29": "a second P",
    "N27": "a target with recurrent state",
    "N28": "a target with recurrent state",
    "N30": "a target with recurrent state and its drafter",
    "N31": "a drafter of several modules",
}
"""What engines have that are built otherwise, even in their control run, by the mutants that need them."""


def _of_mutant(profile: Profile, mutant: str) -> Profile:
    """Return the profile with what a mutant needs of its engines."""
    match mutant:
        case "N17":
            return _with_engine(profile, kv_transfer="push")
        case "N20":
            return _with_target(profile, load_profile("cpu-layouts"))
        case "N27" | "N28":
            return _with_target(profile, load_profile("cpu-hybrid"), "dtype")
        case "N30":
            drafted = load_profile("cpu-hybrid-mtp")
            asked = profile.workload.model_copy(update={"max_tokens": drafted.workload.max_tokens})
            own = _with_target(profile, drafted, "dtype")
            return own.model_copy(update={"methods": drafted.methods, "workload": asked})
        case "N31":
            drafted = load_profile("cpu-mtp3")
            return _with_target(profile, drafted, "model_runner").model_copy(update={"methods": drafted.methods})
        case "N25" | "N26":
            back = load_profile("cpu-back")
            connected = _with_engine(profile, kv_connector_extra_config=back.engine.kv_connector_extra_config)
            # Each prompt is a restart.
            restarted = _with_scenario(connected, load_profile("cpu-full"), "restarted-p", prompts=("copy-117-22",))
            return _with_scenario(_with_pool(restarted, back), back, "read-back")
        case "N29":
            return _with_scenario(profile, load_profile("cpu-full"), "second-p")
    return profile


def _with_target(profile: Profile, other: Profile, *settings: str) -> Profile:
    """Return the profile with another one's target, what its answers are judged by, and the named settings of its
    engines; the number of blocks too, because its groups of KV share the pool."""
    rounding = {name: getattr(other.judging, name) for name in ("logprob_nats", "near_tie_nats")}
    judging = profile.judging.model_copy(update=rounding)
    parts = {"target": other.target, "baselines": other.baselines, "judging": judging}
    own = _with_engine(profile, **{name: getattr(other.engine, name) for name in ("hf_overrides", *settings)})
    return _with_pool(own, other).model_copy(update=parts)


def _with_engine(profile: Profile, **settings: object) -> Profile:
    return profile.model_copy(update={"engine": profile.engine.model_copy(update=settings)})


def _with_pool(profile: Profile, other: Profile) -> Profile:
    """Return the profile with another one's number of KV blocks, if it sets any."""
    return _with_engine(profile, kv_blocks=other.engine.kv_blocks) if profile.engine.kv_blocks else profile


def _with_scenario(profile: Profile, other: Profile, scenario: str, **changes: object) -> Profile:
    """Return the profile with another one's scenario, unless it has one of that name, with prompts of its own."""
    if any(s.id == scenario for s in profile.scenarios):
        return profile
    added = tuple(s.model_copy(update=changes) for s in other.scenarios if s.id == scenario)
    return profile.model_copy(update={"scenarios": (*profile.scenarios, *added)})


def _setup(key: tuple[str, str, str], trials: Sequence[Trial], profile: Profile, prompts: PromptSet) -> Setup:
    topology, kind, _ = key
    own = _of_mutant(profile, trials[0].mutant)
    method = next(m for m in own.methods if m.kind == kind)
    names: list[TopologyName] = ["pd", "single"] if topology == "pd" else ["single"]
    wanted = {(v.topology, v.route) for t in trials for v in t.views}
    cells = tuple(Cell(name, method, route) for name in names for route in ROUTES if (name, route) in wanted)
    prefill = next((m for m in profile.methods if m.kind == "none"), None) if trials[0].mutant == "M10" else None
    group = EngineGroup("pd" if topology == "pd" else "single", method, cells, prefill)
    works = [w for t in trials for w in trial_works(t, own, prompts, cells)]
    return Setup(group, own, tuple(trials), tuple(_union(cell, works) for cell in cells))


def _union(cell: Cell, works: Sequence[CellWork]) -> CellWork:
    """Return everything that any of the works sends to a cell, once."""
    mine = [w for w in works if w.cell == cell]
    # All cold prompts for every cell: pairs are compared with the single engine prompt by prompt.
    items = dict.fromkeys(i for w in works for i in w.items)
    played = {(s.scenario, s.instance): s for w in mine for s in w.scripts}
    return CellWork(cell, tuple(items), tuple(played.values()))
