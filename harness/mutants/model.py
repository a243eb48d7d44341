"""A mutant, the workload that shows it, and the engines that it needs: plain data, declared where its patches are.

Engines import this module, so that it uses the standard library alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from harness.profiles.model import Route, TopologyName

Place = Literal["prefill", "decode", "both", "client", "command"]
PromptChoice = Literal["few", "roomy", "short", "some"]


class Mutant(NamedTuple):
    """One defect that can be put back."""

    id: str
    title: str
    origin: str
    """The upstream issue or pull request, or the kind of defect."""
    place: Place
    """The engine of a pair that gets it; the harness itself carries out ``client`` and ``command``."""
    behaviour: str
    historic: bool = False
    """One of the five defects that define this harness, or its direct analogue."""


class View(NamedTuple):
    """A topology in a scenario of the profile ``cpu``, by its id, or ``cold``."""

    topology: TopologyName
    scenario: str
    route: Route = "client"


class Borrowed(NamedTuple):
    """A scenario of a shipped profile, for profiles that have none of its name."""

    profile: str
    scenario: str
    prompts: tuple[str, ...] = ()
    """Its prompts, if not those of the scenario itself."""


class OwnEngines(NamedTuple):
    """Engines that are built otherwise than the profile's, even in their control run."""

    description: str
    """What they have; mutants with the same words share engines."""
    like: str = ""
    """The shipped profile from which the following is taken."""
    target: bool = False
    """Whether the target is, and what its answers are judged by; its number of KV blocks, too."""
    settings: tuple[str, ...] = ()
    """Names of the settings of its engines that are."""
    methods: bool = False
    pool: bool = False
    """Whether the number of KV blocks is, with the profile's own target."""
    max_tokens: bool = False
    scenarios: tuple[Borrowed, ...] = ()


class Trial(NamedTuple):
    """The smallest workload that can show a mutant, and what must be found."""

    caught: tuple[View, ...]
    """The views of which at least one must catch the mutant."""
    damage: str
    """The class of the diagnosis: a ``harness.judging.findings.DamageClass``."""
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
    aged_only: bool = False
    """Whether failures must be told by age, and by nothing else."""
    unknown: bool = False
    """Whether UNKNOWN, not REGRESSION, is the right verdict, because the mutant leaves nothing tested."""
    refusal: str | None = None
    """For mutants with which engines must refuse to start: a regular expression for their error."""
    needs_drafts: bool = False
    """Whether an engine that drafts nothing cannot show it; those of drafter and sampler need not say so."""
    long: bool = False
    """Whether only the complete self-test tries it: those with engines that are restarted, added or built otherwise
    take half of the time of all others."""
    engines: OwnEngines | None = None
    borrowed: tuple[Borrowed, ...] = ()
    """Scenarios of shipped profiles that the profile's own engines are asked, where it has none of their names."""
    mutant: str = ""
    """Id of the mutant, which ``declare`` fills in."""

    @property
    def views(self) -> tuple[View, ...]:
        """The views to run."""
        return (*self.caught, *self.clean, *self.beside)

    @property
    def starts(self) -> bool:
        """Whether the engines are expected to start."""
        return self.refusal is None


DECLARED: dict[str, tuple[Mutant, Trial]] = {}
"""Every mutant that a family has declared so far; ``harness.mutants.catalogue`` imports them all."""


def declare(mutant: Mutant, trial: Trial) -> None:
    """Add a mutant and its trial. Raises ValueError for an id that is taken."""
    if mutant.id in DECLARED:
        raise ValueError(f"expected one mutant {mutant.id}, found two")
    DECLARED[mutant.id] = mutant, trial._replace(mutant=mutant.id)


COLD = "cold"
"""The id of the requests that are no scenario's, as in ``harness.history.records``."""
PAIR: tuple[View, ...] = (View("pd", COLD),)
SINGLE: tuple[View, ...] = (View("single", COLD),)
TOKENS = ("tokens-baseline", "tokens-reference")
STEPS = ("acceptance-baseline", "acceptance-single")
LOGPROBS = ("logprobs-single", "logprobs-baseline")
BOTH_FORMS: tuple[Literal["ids", "text"], ...] = ("ids", "text")


def in_pair(scenario: str) -> tuple[View, ...]:
    return (View("pd", scenario),)


def in_single(scenario: str) -> tuple[View, ...]:
    return (View("single", scenario),)


def in_both(scenario: str) -> tuple[View, ...]:
    return (*in_pair(scenario), *in_single(scenario))


WITH_ADAPTERS = OwnEngines(
    "LoRA adapters", like="cpu-lora", settings=("adapters",), scenarios=(Borrowed("cpu-lora", "adapters"),)
)
WINDOWED = OwnEngines(
    "a target with windows", like="cpu-layouts", target=True, scenarios=(Borrowed("cpu-layouts", "given-back"),)
)
RECURRENT = OwnEngines(
    "a target with recurrent state",
    like="cpu-hybrid",
    target=True,
    settings=("dtype",),
    scenarios=(Borrowed("cpu-hybrid", "residues"),),
)
CHUNK_EDGES = Borrowed("cpu-full", "chunk-edges")
