"""What every kind of scenario has: what is sent, when it cannot occur, and the proof that its state occurred."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from harness.history.records import Form, Observation, SentTo
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.model import Profile
from harness.profiles.scenarios import Abandon, Api, Feature, OfAdapter, Parameter, Scenario
from harness.prompts.model import Prompt

SHORT = 2
"""Output tokens of requests that only fill caches."""
ORDER_S = 0.03
"""Seconds between requests that must be queued in order: longer than the API server takes for one (about 10 ms)."""


class Send(NamedTuple):
    """One request of a script."""

    prompt: Prompt
    part: str
    group: str
    """Requests of the same group may share cached blocks; each run of a script has its own groups."""
    route: SentTo = "cell"
    form: Form = "ids"
    max_tokens: int | None = None
    temperature: float = 0.0
    after_s: float = 0.0
    """Delay in seconds after the start of the stage, or after the last answer that it waits for."""
    after: tuple[str, ...] = ()
    """Parts of the stage that must have been answered before it is sent."""
    last: bool = False
    """Whether it is queued at the paused engine after all others."""
    between: tuple[Send, ...] = ()
    """Requests to send one by one after P has answered and before D is asked."""
    abandon: Abandon | None = None
    """When the client gives it up; None for a request that is answered."""
    appended: bool = False
    """Whether the last token is P's answer: P is asked for the others alone."""
    feature: Feature | Parameter | OfAdapter | None = None
    """A parameter that must not change the answer, or must give the plain engine's."""
    adapter: str = ""
    """Name in the profile of the LoRA adapter that answers; "" for the target itself."""
    loads: bool = False
    """Whether the adapter is first loaded under a name that is the salt of ``group``, and asked by that name."""
    unsalted: bool = False
    """Whether it is sent without a cache salt."""
    api: Api = "completion"
    """How its answer is asked for."""
    restart: bool = False
    """Whether P is restarted before it is sent."""
    by_second_p: bool = False
    """Whether the second P hands it off."""
    read_back: bool = False
    """Whether P may read the blocks of the request before it back from D."""
    ageing: int = 0
    """Number of one-token requests to send before it, whose answers are not recorded."""
    mistake: str | None = None
    """What is done to its hand-off that a router should not do."""
    reference: str = ""
    """Part of the hand-off whose parameters D is asked with (route ``reference``)."""
    lost: str = ""
    """Name of the parameter that is left out of them."""
    p_tokens: int = 1
    """Output tokens that P is asked for in a hand-off."""


class Stage(NamedTuple):
    """Requests that are under way at the same time; the next stage begins when all are answered."""

    sends: tuple[Send, ...]
    hold: Literal["first", "answering"] | None = None
    """Pause an engine until all requests are queued there, so that it begins them in one step: the one that is asked
    first (P in a pair), or the one that gives the output (D in a pair)."""
    p_in_turn: bool = False
    """Whether P is asked one after the other, so that it computes each prompt alone; D answers them together."""


class Script(NamedTuple):
    """One run through a scenario."""

    scenario: str
    instance: int
    stages: tuple[Stage, ...]
    first: int = 0
    """Number of the first stage: cold prompts that are asked together are stages of one script."""

    @property
    def sends(self) -> list[Send]:
        """The requests of all stages, without those that are sent between the legs of another."""
        return [send for stage in self.stages for send in stage.sends]

    @property
    def requests(self) -> int:
        return sum(1 + len(send.between) for send in self.sends)

    @property
    def ageing(self) -> int:
        """Number of one-token requests that are sent beside them, and not recorded."""
        return sum(send.ageing for send in self.sends)


def one(prompt: Prompt, part: str, group: str, max_tokens: int | None) -> Stage:
    """Return a stage of one request."""
    return Stage((Send(prompt, part, group, max_tokens=max_tokens),))


class Gap(NamedTuple):
    """Evidence that is missing from the proof of a state, or that is impossible."""

    observation: Observation
    message: str
    impossible: bool = False
    hit_blocks: int = 0
    missed_by: str = ""
    """Role of the engine that found none of the blocks which it has cached."""


class Margin(NamedTuple):
    """How decided a right answer is."""

    tokens: int
    """Its length."""
    nats: float
    """Smallest log-prob gap between its tokens and their runners-up."""


class Occurrence(NamedTuple):
    """One run through a scenario, as recorded."""

    cell: RecordedCell
    parts: dict[str, Observation]
    """Answered requests by their part of the script."""
    margin: Callable[[str], Margin | None]
    """Prompt id -> margin of the plain engine's recorded answer to it; None if none is recorded."""


C = TypeVar("C", bound=Scenario)


class Kind(ABC, Generic[C]):
    """A kind of scenario. ``C`` is its configuration in a profile."""

    needs: frozenset[str] = frozenset()
    """Parts of the script without which a proof has nothing to say."""

    def needed(self, config: C) -> frozenset[str]:
        """Return those of ``needs`` that this scenario sends."""
        return self.needs

    @abstractmethod
    def stages(self, config: C, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        """Return the stages of each run through the scenario. Raises KeyError for a prompt that ``prompts`` lacks.

        ``chosen`` are the prompts of a scenario that names none.
        """

    @abstractmethod
    def impossible(self, config: C, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        """Return why the state cannot occur with the profile's engines, or None."""

    @abstractmethod
    def gaps(self, config: C, seen: Occurrence) -> Iterator[Gap]:
        """Yield what a proof lacks that the state occurred, and what cannot be right."""

    def enough(self, rounds: int) -> int:
        """Return how many of the runs through the scenario must prove its state."""
        return rounds

    def draws(self, prompt: Prompt, least: int) -> bool:
        """Return whether the scenario may choose a prompt; ``least`` tokens hold no block that a prefix can hit."""
        return prompt.tokens > least

    def not_drawn(self, config: C, profile: Profile, chosen: Sequence[Prompt]) -> str | None:
        """Return why the prompts that were chosen cannot bring about the state, or None."""
        return None
