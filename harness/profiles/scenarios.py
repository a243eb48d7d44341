"""Scenarios of a profile, as validated data. Prompts are named by their ids in the profile's prompt set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from harness.util.strict import Strict

Topology = Literal["single", "pd"]
BOTH: tuple[Topology, ...] = ("pd", "single")
AT_ONCE = "at-once"
"""Reserved id: the first cold prompts asked once more, together (``harness.history.at_once``)."""
PRESSURE_SLACK = 0.1
CHUNKS_SLACK = 0.03
"""The most that other chunks moved the mean of a single request (EAGLE3 and MTP; docs/scenarios.md)."""


class Pair(Strict):
    """A prompt that fills the cache and a prompt that is answered from it."""

    donor: str
    subject: str


class _Scenario(Strict):
    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)
    max_tokens: int | None = Field(default=None, ge=2)
    """Output tokens of each request; None uses the workload's."""

    mean_slack: ClassVar[float] = 0.0
    """By how much of itself mean acceptance may be moved by the state alone."""
    steps_may_move: ClassVar[bool] = True
    """Whether an answer that is within the slack may have a step more or fewer than alone."""
    chunks_long_prompts: ClassVar[bool] = False
    """Whether a prompt longer than an engine step may be prefilled in other chunks than alone, because some of it
    may be cached."""
    samples: ClassVar[bool] = False
    """Whether its answers are drawn at a temperature above zero."""
    may_answer_nothing: ClassVar[bool] = False
    """Whether the client may give up all of its requests."""
    evicts: ClassVar[bool] = False
    """Whether the blocks of every earlier request are gone when a prompt is asked again."""
    appends_answer: ClassVar[bool] = False
    """Whether the last token of D's prompt is P's answer to the others."""

    @property
    def drawn(self) -> int:
        """How many of the prompts that are sent cold it sends, each once; 0 if it names its prompts."""
        return 0

    @property
    def most_asked(self) -> int:
        """The most output tokens that it asks for by itself; 0 if it leaves them to the workload."""
        return self.max_tokens or 0

    @property
    def topologies(self) -> tuple[Topology, ...]:
        return BOTH

    @property
    def routed(self) -> bool:
        """Whether it also runs through a router. Scenarios that address a single engine of a pair, or act between the
        legs of a hand-off, cannot; those that only change what one engine does need not."""
        return False

    @property
    def acceptance_slack(self) -> float:
        """Relative tolerance on a request's accepted drafts, for prompts that are prefilled in other chunks than alone:
        that changes what EAGLE3 and MTP drafters see."""
        return 0.0

    @property
    def asks_prompt_logprobs(self) -> bool:
        return False

    @property
    def restarts_p(self) -> bool:
        return False

    @property
    def by_plain_alone(self) -> bool:
        """Whether the plain engine of the run alone knows which of its answers are right."""
        return False

    def by_second_p(self, part: str) -> bool:
        """Return whether a second P hands off a part of the script."""
        return False


class PrefixHit(_Scenario):
    """A request finds the first blocks of its prompt in the prefix cache, full (donor = subject) or partial.

    ``pairs`` may be a number: that many of the prompts that are sent cold, each of which is its own donor. ``where`` is
    the engine that holds them: ``decode`` stands for the single engine too; ``prefill`` needs a pair.
    """

    kind: Literal["prefix-hit"]
    where: Literal["decode", "prefill"]
    pairs: Annotated[tuple[Pair, ...], Field(min_length=1)] | Annotated[int, Field(ge=1)]

    @property
    def drawn(self) -> int:
        return self.pairs if isinstance(self.pairs, int) else 0

    @property
    def topologies(self) -> tuple[Topology, ...]:
        return ("pd",) if self.where == "prefill" else BOTH


class ChunkedPrefill(_Scenario):
    """Prompts longer than the token budget of one engine step."""

    kind: Literal["chunked-prefill"]
    prompts: tuple[str, ...] = Field(min_length=1)


class Concurrent(_Scenario):
    """Batch rows change owners: a long request and several short ones are prefilled in one step, and late ones join.

    The long request is second in the queue, so that it moves to another row when the short ones end, and a late one
    takes the row that it left.
    """

    kind: Literal["concurrent"]
    holder: str
    together: tuple[str, ...] = Field(min_length=2)
    late: tuple[str, ...] = Field(min_length=1)
    rounds: int = Field(default=1, ge=1)

    routed: ClassVar[bool] = True


class Crowd(_Scenario):
    """Prompts that are sent cold, too, in crowds: queued while the engine that is asked first is paused, and released
    together. Statistical tests, which need many requests in a state, need not name them."""

    kind: Literal["crowd"]
    prompts: int = Field(ge=2)
    together: int = Field(ge=2)
    """Most requests of a crowd; crowds are as equal as they can be."""
    proves: tuple[Literal["batched", "chunked", "preempted"], ...] = Field(min_length=1)
    """What must show of every crowd: its requests took fewer engine steps than they would one by one; the first step
    could not hold the prompts of all, so that one was computed in chunks; the answering engine preempted a request."""

    acceptance_slack: ClassVar[float] = PRESSURE_SLACK
    mean_slack: ClassVar[float] = CHUNKS_SLACK
    """Prompts of a crowd are prefilled in other chunks than alone, and a preempted request is prefilled again."""

    @property
    def drawn(self) -> int:
        return self.prompts


class Pressure(_Scenario):
    """More requests than the KV pool can hold, so that some are preempted while a request with a cached prefix waits.

    All are queued while the answering engine is paused, the waiting one last: the prompts of the others leave no room
    for it, and their outputs outgrow the pool.
    """

    kind: Literal["pressure"]
    load: tuple[str, ...] = Field(min_length=1)
    local: tuple[str, ...] = ()
    """Load that the answering engine of a pair prefills itself. P keeps the blocks of all other requests until D, which
    is paused, has pulled them, so these must fit into P's pool together."""
    waiting: Pair

    acceptance_slack: ClassVar[float] = PRESSURE_SLACK
    steps_may_move: ClassVar[bool] = False


class Refill(_Scenario):
    """A prompt, then enough others to evict all of its blocks, then the prompt again."""

    kind: Literal["refill"]
    prompts: tuple[str, ...] = Field(min_length=1)
    fill: tuple[str, ...] = Field(min_length=1)

    evicts: ClassVar[bool] = True


class GivenBack(_Scenario):
    """Others take the blocks that a long request gives back while it goes on: those that a sliding window has left, or
    those of earlier recurrent states. Then the long request is repeated.

    A block that is given back too early keeps what it holds until another request takes it.
    """

    kind: Literal["given-back"]
    holder: str
    beside: str
    """A short prompt that is sent with the long one; when it is answered, the long one is under way."""
    fill: tuple[str, ...] = Field(min_length=1)
    """Prompts that the answering engine alone is asked then, to take every block that is free."""
    rounds: int = Field(default=1, ge=1)

    acceptance_slack: ClassVar[float] = PRESSURE_SLACK


class LatePull(_Scenario):
    """P answers, then computes enough other prompts to use its whole pool, and only then D pulls."""

    kind: Literal["late-pull"]
    prompts: tuple[str, ...] = Field(min_length=1)
    fill: tuple[str, ...] = Field(min_length=1)

    topologies: ClassVar[tuple[Topology, ...]] = ("pd",)


class Aged(_Scenario):
    """Prompts, then so many requests of one token that the engines are old, then the prompts again, nothing cached."""

    kind: Literal["aged"]
    prompts: tuple[str, ...] = Field(min_length=1)
    requests: int = Field(ge=1, le=1_000_000)
    """How many requests of one token, each a hand-off in a pair. They are counted, and their answers not recorded."""


class Recovery(_Scenario):
    """D is told of a P that is not there any more, as after a restart of P: it has to compute the prompt by itself, and
    answer as if nothing had happened.

    A hand-off gives the parameters, of which another engine's name is changed. Then the prompt is handed off again, and
    finds in D's cache what D computed. Needs ``engine.kv_load_failure_policy: recompute``.
    """

    kind: Literal["recovery"]
    prompts: tuple[str, ...] = Field(min_length=1)
    restart: bool = False
    """Whether P is restarted, so that the parameters are those of a P that is really gone, and its successor hands the
    prompt off once more, with nothing cached."""

    topologies: ClassVar[tuple[Topology, ...]] = ("pd",)

    @property
    def restarts_p(self) -> bool:
        return self.restart


SECOND = "second"
"""Begins the part of requests that a second P hands off."""


class SecondPrefill(_Scenario):
    """Two P for one D, which has to read each prompt from the one that computed it.

    The second P is started for this scenario, on the devices of the first one. By turns, both hand over each prompt,
    with nothing cached on D.
    """

    kind: Literal["second-prefill"]
    prompts: tuple[str, ...] = Field(min_length=2)

    topologies: ClassVar[tuple[Topology, ...]] = ("pd",)

    def by_second_p(self, part: str) -> bool:
        return part.startswith(SECOND)


class AppendedToken(_Scenario):
    """D's prompt is P's and the token that P answered with, as some routers send it.

    P is asked for all tokens of each prompt but the last one, which must be the right answer to them.
    """

    kind: Literal["appended-token"]
    prompts: tuple[str, ...] = Field(min_length=1)
    donor: str | None = None
    """A prompt that D is asked alone before each, so that D has the first blocks cached; None: D has nothing cached."""

    topologies: ClassVar[tuple[Topology, ...]] = ("pd",)
    appends_answer: ClassVar[bool] = True


Mistake = Literal["used-twice", "used-late", "shared", "retried", "more-tokens", "asked-twice"]
"""What a router or a proxy may do to a hand-off: D is asked with P's parameters again, again after P has computed
others that use up its pool, several times at once, or again after the client gave up the first answer; P is asked for
more than one token; or P is asked twice, and D with the parameters of the first answer."""


class HandOffMistakes(_Scenario):
    """What a router or a proxy may do to a hand-off and should not: D has to answer as ever, or to refuse.

    Each mistake is made with each prompt, and each parameter in ``lost`` is left out of a hand-off of its own. D is
    started again where it ended, or has not answered in ``patience_s`` seconds.
    """

    kind: Literal["hand-off-mistakes"]
    prompts: tuple[str, ...] = Field(min_length=1)
    mistakes: tuple[Mistake, ...] = ()
    lost: tuple[str, ...] = ()
    """Names of P's parameters."""
    fill: tuple[str, ...] = ()
    """Prompts that use up P's pool, for ``used-late``."""
    siblings: int = Field(default=3, ge=2)
    """Requests that are sent at once with the parameters of one hand-off, for ``shared``."""
    patience_s: float = Field(default=10.0, gt=0, le=60)

    topologies: ClassVar[tuple[Topology, ...]] = ("pd",)
    may_answer_nothing: ClassVar[bool] = True

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.mistakes and not self.lost:
            raise ValueError("expected mistakes, or parameters that get lost")
        if ("used-late" in self.mistakes) != bool(self.fill):
            raise ValueError("expected prompts to fill P's pool with (fill) for used-late, and for nothing else")
        return self


class SharedBlock(_Scenario):
    """Two prompts share blocks but not what precedes them; a third puts the second's first block into the cache."""

    kind: Literal["shared-block"]
    first: str
    bridge: str
    second: str


class Continuation(_Scenario):
    """The next turn of a conversation: a prompt that consists of an earlier prompt and the beginning of its answer.

    The prefix cache holds blocks that were written while the first answer was generated, by verify steps with
    speculation; no other scenario reads such blocks.
    """

    kind: Literal["continuation"]
    donor: str
    continued: tuple[str, ...] = Field(min_length=1)
    read_back: bool = False
    """Whether P is told of the blocks that D has of the first turn, and reads the answer's from there. Needs the
    connector's ``bidirectional_kv_xfer``."""
    on_p: bool = False
    """Whether P gives the answer of the next turn itself, from what it has read back, and D is not asked."""

    @property
    def topologies(self) -> tuple[Topology, ...]:
        return ("pd",) if self.read_back else BOTH


class SameStep(_Scenario):
    """Two requests with a common prefix are admitted in one engine step: the second finds blocks in the prefix cache
    that the first has not written yet."""

    kind: Literal["same-step"]
    pairs: tuple[Pair, ...] = Field(min_length=1)


class Sampled(_Scenario):
    """Sampling at a temperature so low that margins of several nats still force every token: P/D and speculation must
    give the greedy tokens, whatever the random numbers are."""

    kind: Literal["sampled"]
    prompts: tuple[str, ...] = Field(min_length=1)
    temperature: float = Field(gt=0, le=2)

    samples: ClassVar[bool] = True


Feature = Literal["grammar", "min-tokens", "stop-token", "stop-at-once", "stop-string", "prompt-logprobs"]
"""A parameter of a request that must not change its tokens: a grammar that admits the right answer alone, a smallest
length that is the answer's, a token in the middle of the answer or its first one at which it stops, a text across two
of its tokens at which it stops, or the log-probs of the prompt."""


def stop_at(feature: Feature | Parameter | OfAdapter | None, answered: int) -> int | None:
    """Return the index of the token that stops a known answer of this length because of a feature, or None."""
    return {"stop-token": answered // 2, "stop-string": answered // 2, "stop-at-once": 0}.get(feature or "")


class Features(_Scenario):
    """Each prompt is asked once with each of these parameters; its answer must stay as it is without them."""

    kind: Literal["features"]
    prompts: tuple[str, ...] = Field(min_length=1)
    features: tuple[Feature, ...] = Field(default=get_args(Feature), min_length=1)

    @property
    def asks_prompt_logprobs(self) -> bool:
        return "prompt-logprobs" in self.features


Parameter = Literal[
    "cap-1",
    "cap-2",
    "cap-3",
    "cap-4",
    "cap-5",
    "ignore-eos",
    "stop-at-cap",
    "stop-before-cap",
    "include-stop",
    "allowed-first",
    "allowed-half",
    "bad-words",
    "frequency-penalty",
    "presence-penalty",
    "repetition-penalty",
    "regex",
    "logprobs-0",
    "logprobs-1",
    "logprobs-20",
    "echo",
    "priority",
    "logit-bias",
    "min-p",
    "top-p",
    "top-k",
    "seed",
    "seed-again",
    "siblings",
    "json",
    "choice",
    "date",
    "tool",
]
"""A parameter of a request whose right answer is that of the run's plain engine with the same parameter
(``harness.workload.parameters``)."""
OfAdapter = Literal["first-adapter", "second-adapter"]
"""Which of two LoRA adapters answers a request; its right answer is that of the run's plain engine with the same."""
ADAPTED: frozenset[str] = frozenset(get_args(OfAdapter))
CHANGING: frozenset[str] = ADAPTED | frozenset(get_args(Parameter))
SAMPLED: frozenset[str] = frozenset({"min-p", "top-p", "top-k", "seed", "seed-again", "siblings"})
"""Parameters with a seed and a temperature above zero. vLLM promises the same answer again of the same engine, and the
plain engine's without speculation alone: a drafter takes random numbers of its own."""
OF_TEXT: frozenset[str] = frozenset({"json", "choice", "date", "tool"})
"""Grammars of their own, which need a vocabulary that has JSON, and no known answer: by a schema, a list, a regular
expression, and as the arguments of a tool, at the chat endpoint."""
GRAMMARS: frozenset[str] = OF_TEXT | {"grammar", "regex"}
"""Parameters that remove drafts which the grammar does not admit."""
REFUSED_BESIDE_DRAFTS: frozenset[str] = frozenset({"logit-bias", "min-p"})
"""Parameters that vLLM refuses where an engine speculates (``SamplingParams._validate_spec_decode`` of 0.32.0)."""
WITHOUT: Mapping[str, Parameter] = {
    "frequency-penalty": "allowed-first",
    "presence-penalty": "allowed-half",
    "min-p": "seed",
    "top-p": "seed",
    "top-k": "seed",
}
"""Parameters that come on top of another one, whose answer they have to change."""
_TEMPERATURE = 1.5
"""Of answers that are drawn: their tokens are among few, and no margin forces any."""
_SHORT = 32
"""Output tokens that show a parameter which changes an answer from its beginning."""
_OF_JSON = 64
"""Those of JSON, between whose parts models put blanks, and of the marks of a tool around it."""


def temperature_of(feature: Feature | Parameter | None) -> float:
    """Return the temperature that a parameter needs."""
    return _TEMPERATURE if feature in SAMPLED else 0.0


def tokens_asked(feature: Feature | Parameter | OfAdapter, answered: int) -> int | None:
    """Return how many tokens a request with a parameter asks for, with a known answer of so many; None: as any other.

    A request that a token should stop and does not has the tokens of one that it does, and another finish reason.
    Behind a string, tokens are drafted, which must not show.
    """
    if feature.startswith("cap-"):
        return int(feature.removeprefix("cap-"))
    if feature in ("stop-token", "stop-at-once"):
        return (stop_at(feature, answered) or 0) + 1
    cut = answered // 2 + 1
    asked = {"ignore-eos": answered + 8, "stop-at-cap": cut, "stop-before-cap": cut + 1, "include-stop": None}
    asked |= {"json": _OF_JSON, "tool": _OF_JSON}
    return asked.get(feature, _SHORT if feature in CHANGING - ADAPTED else None)


class Parameters(_Scenario):
    """Each prompt is asked once with each of these parameters, most of which change its answer: the plain engine of the
    run says which answer is right."""

    kind: Literal["parameters"]
    prompts: tuple[str, ...] = Field(min_length=1)
    parameters: tuple[Parameter, ...] = Field(
        default=tuple(p for p in get_args(Parameter) if p not in SAMPLED | OF_TEXT), min_length=1
    )
    by_router: bool = False
    """Whether they are sent through routers, too."""

    by_plain_alone: ClassVar[bool] = True

    @property
    def routed(self) -> bool:
        return self.by_router


class Adapters(_Scenario):
    """One prompt is answered by the target and by two LoRA adapters of it: no KV of one of them is another's. Then an
    adapter is loaded whose name is a cache salt, and another one under a name that is taken.

    Their names are those of ``engine.adapters``.
    """

    kind: Literal["adapters"]
    prompts: tuple[str, ...] = Field(min_length=1)
    adapters: tuple[str, str]
    together: bool = False
    """Whether the three are asked at once, so that each has rows of the same steps, and nothing else is."""

    by_plain_alone: ClassVar[bool] = True
    acceptance_slack: ClassVar[float] = PRESSURE_SLACK


Api = Literal["completion", "text", "completion-stream", "chat", "chat-stream"]
"""How an answer is asked for: at the endpoint that takes token ids, or the text that has them; or at the one that takes
messages, which the server renders; whole, or in pieces."""


def is_chat(api: Api) -> bool:
    return api in ("chat", "chat-stream")


def is_streamed(api: Api) -> bool:
    return api in ("completion-stream", "chat-stream")


class Apis(_Scenario):
    """Each prompt is asked as a whole completion, and then in other ways that must give the same answer: in pieces, and
    as messages that the server renders."""

    kind: Literal["apis"]
    prompts: tuple[str, ...] = Field(min_length=1)
    asked: tuple[Literal["completion-stream", "chat", "chat-stream"], ...] = Field(
        default=("completion-stream", "chat", "chat-stream"), min_length=1
    )
    """In which ways, beside as a whole completion. An endpoint's second one finds the first one's blocks cached."""

    routed: ClassVar[bool] = True


class Abandon(Strict):
    """The client gives up a request, so that the engine has to abort it."""

    leg: Literal["prefill", "decode"] = "decode"
    """The engine whose answer it does not wait for; a single engine is asked for both."""
    after_steps: int | None = Field(default=None, ge=1)
    """The answer is streamed, and the connection closed after the tokens of so many engine steps."""
    after_s: float | None = Field(default=None, ge=0, le=60)
    """The connection is closed after so many seconds. After 0 the engine is not asked at all: P answers, and D never
    comes for its blocks."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if (self.after_steps is None) == (self.after_s is None):
            raise ValueError("expected one of after_steps and after_s")
        if self.leg == "prefill" and not self.after_s:
            raise ValueError("expected after_s above 0 for leg prefill, which ends with its first token")
        return self

    @property
    def unasked(self) -> bool:
        """Whether D is not asked at all."""
        return self.after_s == 0


_WHOLE_AND_BY_IDS = frozenset({"prompt-logprobs", "echo", "siblings"})
"""Parameters whose answers are only read from whole completions."""
_BY_CHAT_OTHERWISE = _WHOLE_AND_BY_IDS | {"logprobs-0", "logprobs-1", "logprobs-20"}
"""Parameters that the chat endpoint does not have, or calls otherwise."""

_BY_CHAT_ALONE = frozenset({"tool"})


def api_of(feature: Feature | Parameter | None) -> Api:
    """Return how a request with a parameter is asked for, if nothing else is said."""
    return "chat" if feature in _BY_CHAT_ALONE else "completion"


def askable(feature: Feature | Parameter, api: Api) -> bool:
    """Return whether a request with a parameter can be asked for in a way."""
    if is_chat(api):
        return feature not in _BY_CHAT_OTHERWISE
    return feature not in _BY_CHAT_ALONE and (api == "completion" or feature not in _WHOLE_AND_BY_IDS)


class TraceRequest(Strict):
    """One request of a trace."""

    prompt: str
    cache: str = ""
    """Requests of one pass through the trace with the same word may share cached blocks; without one, none may."""
    to: Literal["cell", "prefill", "local"] = "cell"
    """Through the cell's topology, to P alone, or to the answering engine alone."""
    delay_s: float = Field(default=0, ge=0, le=60)
    """Seconds after the beginning of its stage, or after the request that it waits for."""
    after: int | None = Field(default=None, ge=0)
    """Number of an earlier request of its stage, from 0, that has to be over before it is sent."""
    max_tokens: int | None = Field(default=None, ge=2)
    abandon: Abandon | None = None
    feature: Feature | Parameter | None = None
    """A parameter with which it is sent, as in the kinds ``features`` and ``parameters``; its own number of tokens
    counts."""
    api: Api = "completion"
    """How its answer is asked for."""
    parameters_of: tuple[int, int] | None = None
    """Stage and number of an earlier hand-off with whose parameters D is asked, once more: a router's mistake."""
    lost: str = ""
    """Name of the parameter that gets lost of them."""
    p_tokens: int = Field(default=1, ge=1, le=16)
    """Output tokens that P is asked for; more than one are a router's mistake."""

    @model_validator(mode="after")
    def _asked_through_the_cell(self) -> Self:
        if self.feature is not None and (self.abandon is not None or self.max_tokens is not None):
            raise ValueError(
                "feature excludes abandon and max_tokens, which say how an answer ends, too; leave them out"
            )
        if self.feature is not None and not askable(self.feature, self.api):
            raise ValueError(f"{self.feature} needs a whole completion by ids; leave api: {self.api} out")
        if self.api != "completion" and self.abandon is not None:
            raise ValueError("api excludes abandon, which streams by itself; leave one out")
        if self.lost and self.parameters_of is None:
            raise ValueError("lost needs parameters_of, which says whose parameters are incomplete")
        if self.mistaken and (self.feature or self.abandon or self.to != "cell" or self.api != "completion"):
            raise ValueError(
                "a mistaken hand-off (parameters_of, p_tokens) goes through the cell without feature, abandon and api, "
                "since only its tokens are judged; leave them out"
            )
        return self

    @property
    def mistaken(self) -> bool:
        """Whether its hand-off is what a router should not do."""
        return self.parameters_of is not None or self.p_tokens > 1


class Trace(_Scenario):
    """Any requests: stages one after the other, the requests of a stage together."""

    kind: Literal["trace"]
    stages: tuple[tuple[TraceRequest, ...], ...] = Field(min_length=1)
    proves: tuple[Literal["abandoned", "preempted", "cached", "changed", "batched", "chunked"], ...] = ()
    """What the engines' counters must show: a request that was given up after tokens were generated for it, a
    preemption, or a prefix hit; of each stage of several requests, that they decoded together (``batched``); of one of
    them, that the prompts did not fit into a step, so that one was computed in chunks; and whether each parameter that
    has to must change the plain engine's answer."""
    held: bool | Literal["answering"] = False
    """Whether the engine that is asked first, P in a pair, is paused until all requests of a stage are queued, so that
    it begins them in the order of their delays; or, with ``answering``, D, whose blocks they take together."""

    chunks_long_prompts: ClassVar[bool] = True
    may_answer_nothing: ClassVar[bool] = True

    @model_validator(mode="after")
    def _waits_for_answers(self) -> Self:
        for number, stage in enumerate(self.stages):
            for at, request in enumerate(stage):
                if request.after is not None and request.after >= at:
                    raise ValueError(
                        f"request {at} of stage {number}: expected after to be the number of an earlier request of its "
                        f"stage, from 0, found {request.after}"
                    )
        return self

    @property
    def requests(self) -> tuple[TraceRequest, ...]:
        return tuple(request for stage in self.stages for request in stage)

    @property
    def most_asked(self) -> int:
        return max(self.max_tokens or 0, *(r.max_tokens or 0 for r in self.requests))

    @property
    def by_plain_alone(self) -> bool:
        return any(r.feature in CHANGING for r in self.requests)

    @property
    def crowded(self) -> bool:
        """Whether requests are under way together, so that a prompt may be prefilled in other chunks than alone."""
        return any(len(stage) > 1 for stage in self.stages)

    @property
    def topologies(self) -> tuple[Topology, ...]:
        pairs_only = any(
            r.to == "prefill" or r.mistaken or (r.abandon is not None and r.abandon.unasked) for r in self.requests
        )
        return ("pd",) if pairs_only else BOTH

    @property
    def acceptance_slack(self) -> float:
        return PRESSURE_SLACK if self.crowded else 0.0


Scenario = Annotated[
    PrefixHit
    | ChunkedPrefill
    | Concurrent
    | Crowd
    | Pressure
    | Refill
    | GivenBack
    | LatePull
    | Aged
    | Recovery
    | SecondPrefill
    | AppendedToken
    | HandOffMistakes
    | SharedBlock
    | Continuation
    | SameStep
    | Sampled
    | Features
    | Parameters
    | Adapters
    | Apis
    | Trace,
    Field(discriminator="kind"),
]
