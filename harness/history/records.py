"""What is recorded: an observation per request, the engines and cells, and the record of the run itself."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from harness.history.verdict import Verdict
from harness.profiles.cells import Role
from harness.profiles.model import Route
from harness.profiles.recorded_profile import RecordedProfile
from harness.profiles.scenarios import ADAPTED, CHANGING, GRAMMARS, Abandon, Api, Feature, OfAdapter, Parameter, stop_at
from harness.util.json_io import finite
from harness.util.names import GroupName, SafeName
from harness.util.signals import SignalName
from harness.util.strict import Strict

Form = Literal["ids", "text"]
Kind = Literal["run", "soak", "drill", "control"]
RESCORE = "rescore"
"""Pseudo-scenario of what the plain engine is asked beside its cell: to re-score the outputs of cells (instance 0), and
to show how it rounds (``harness.history.rounding``)."""
COLD = "cold"
"""Scenario of prompts that the engines have not seen before."""
SUBJECT = "subject"
"""Part of a request that a scenario is about, and of every cold one."""
SentTo = Literal["cell", "prefill", "local", "former-p", "reference", "read-back"]
"""Where a request goes: through the cell's topology, to P alone, to the answering engine alone, to D with the
parameters of an earlier hand-off, as if that P had been restarted since, or as they are, or to P alone, which answers
from what it reads back from D."""

MISTAKES_TOGETHER = " and "
"""Between the mistakes that were made with one hand-off."""

Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A number that an engine counted: any that a column can hold, so that a wrong one is recorded and judged."""


class Speculation(Strict):
    """Per-request acceptance, as vLLM reports it with ``--per-request-spec-decode-metrics detailed``."""

    per_step_accepted: tuple[Count, ...]
    per_step_drafted: tuple[Count, ...]
    num_steps: Count
    num_drafted: Count
    num_accepted: Count
    up_to: bool = False
    """Whether a step may have fewer than k drafts, and one without drafts is not counted as a step."""
    at_limit: bool = False
    """Whether prompt and answer come so near to the end of the context that a step may have no room for drafts, and is
    not counted."""
    may_pad: bool = True
    """Whether a first step after a hand-off may be padded: not where P leaves D more than one token of a prompt."""


LegRole = Literal["single", "prefill", "decode"]
"""Role in which an engine answers: in a P/D pair, D also answers requests alone, as ``single``."""


def leg_role(role: Role) -> LegRole:
    """Return the role in which an engine answers: a second P as the first."""
    return "prefill" if role == "second-prefill" else role


class PlannedRequest(Strict):
    """A request that a run is to send to a cell exactly once, as written down before any engine is started."""

    sequence: int
    """Its number in the order of the cell's requests."""
    prompt_id: str
    form: Form
    scenario: str = COLD
    instance: int = 0
    part: str = SUBJECT
    stage: int = 0
    prompt_sha256: str
    """Hash of the prompt's token ids, source and known answer (``harness.history.plan.prompt_sha256``)."""
    route: SentTo = "cell"
    max_tokens: int | None
    temperature: float = 0.0
    concurrent: int = 1
    abandon: Abandon | None = None
    feature: Feature | Parameter | OfAdapter | None = None
    api: Api = "completion"
    mistake: str | None = None
    legs: tuple[LegRole, ...]
    """Roles of the engines whose answers are recorded, in order. A router hides P's answer."""

    @property
    def place(self) -> tuple[str, Form, str]:
        """What identifies the request within its cell: scenario, form, and ``Observation.key``."""
        return self.scenario, self.form, request_key(self.scenario, self.prompt_id, self.instance, self.part)

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is as usual: a run has hundreds of these."""
        usual = {n: f.default for n, f in type(self).model_fields.items() if not f.is_required()}
        return {k: v for k, v in handler(self).items() if k not in usual or v != usual[k]}


def request_key(scenario: str, prompt_id: str, instance: int, part: str) -> str:
    """Return the key of a request: the prompt, in scenarios with its instance and part."""
    return prompt_id if scenario == COLD else f"{prompt_id}#{instance}.{part}"


def in_words(cell: str, scenario: str) -> str:
    """Return a cell's name, with its scenario unless that is the cold one."""
    return cell if scenario == COLD else f"{cell} in {scenario}"


class Sibling(Strict):
    """Another answer to the same request, of those that ``n`` asked for."""

    output_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    chosen_logprobs: tuple[float, ...] | None = None


class Streamed(Strict):
    """How an answer came in pieces, which are put together in the record."""

    tokens: tuple[Count, ...]
    """Output tokens of each piece."""
    characters: tuple[Count, ...]
    """Characters of each piece."""
    counted: tuple[Count | None, ...]
    """Output tokens up to each piece, as the piece itself says (``continuous_usage_stats``); None where it does not."""
    ended_at: tuple[Count, ...]
    """The pieces, by number from 0, that have a finish reason."""
    usages: Count
    """Messages that have the usage of the whole answer, and no piece of it."""
    closed: bool
    """Whether the stream ended with its end mark."""


class Preferred(Strict):
    """A token of a re-scored output than which the plain engine finds another one likelier."""

    at: Count
    """Output token."""
    rank: Annotated[int, Field(ge=2)]
    """Its place among all tokens by likelihood, the best being 1."""
    best: int
    """The likeliest token there."""


TOPS = 2
"""Likeliest tokens of each output position of which every answer tells the log-probs."""


class Leg(Strict):
    """One HTTP exchange with an engine: its response as recorded."""

    role: LegRole
    request_id: str
    status: int | None = None
    echoed_ids: tuple[int, ...] | None = None
    """Prompt token ids as the server received them."""
    output_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """Token or string that ended the answer, as the engine names it; None for the end token of the model."""
    text: str | None = None
    """Text of the output as the engine returned it; None in records of earlier versions."""
    own_text: str | None = None
    """Text of the same tokens as the harness decodes them (``workload.own_text``), not cut at a stop string."""
    reasoning: str | None = None
    """The part of the text that a parser of the server says is reasoning; None where it has none."""
    usage_prompt_tokens: Count | None = None
    usage_completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    """Prompt tokens that its usage says were cached; None where it does not say, and in records of earlier versions."""
    streamed: Streamed | None = None
    """How it came in pieces; None for one that came whole."""
    chosen_logprobs: tuple[float, ...] | None = None
    top_gaps: tuple[float | None, ...] | None = None
    """Difference in log-probability (nats) between the best and the second-best token, per output token."""
    runner_ups: tuple[int | None, ...] | None = None
    """Second-best token, per output token; None in records of earlier versions."""
    top_logprobs: tuple[dict[int, float], ...] | None = None
    """Log-probs of the likeliest tokens and of the chosen one by token, per output token, where more than the usual
    two likeliest were asked for."""
    siblings: tuple[Sibling, ...] = ()
    """The answers after the first, where several were asked for."""
    speculation: Speculation | None = None
    rescored: tuple[float, ...] | None = None
    """For a re-scoring request, per token of the output that it scores: by how many nats the plain engine, given all
    preceding tokens, prefers a different token; 0 when it agrees."""
    rescored_logprobs: tuple[float, ...] | None = None
    """Log-prob of each of these tokens; None in records of earlier versions."""
    rescored_preferred: tuple[Preferred, ...] | None = None
    """Those of these tokens that are not the plain engine's best, with rank and best token; every other one is the best
    itself, of rank 1. None in records of earlier versions, and where the engine does not tell ranks."""
    prompt_logprobs: tuple[float | None, ...] | None = None
    """Log-probs of the prompt's tokens from the second one on, if asked for; None for one that is no number."""
    kv_transfer_params: Annotated[dict[str, Any], AfterValidator(finite)] | None = None
    counters: dict[str, float] = Field(default_factory=dict)
    """Increase of the engine's counters during this request (concurrency 1)."""
    seconds: float = 0.0

    @cached_property
    def figures(self) -> tuple[bool, bool]:
        """Whether it has a log-prob for each of its tokens, and whether it has the distance of the two best, too."""
        tokens = len(self.output_ids or ())
        said = self.chosen_logprobs is not None and len(self.chosen_logprobs) == tokens
        gaps = self.top_gaps
        return said, said and gaps is not None and len(gaps) == tokens and None not in gaps

    @property
    def ended_by_text(self) -> bool:
        """Whether a stop string ended the answer. The API server finds it, and aborts the request: the engine may have
        gone on by then, and vLLM 0.32.0 gives no acceptance metrics of the request."""
        return isinstance(self.stop_reason, str)

    @property
    def external_tokens(self) -> float:
        """Number of prompt tokens that the engine reports as transferred from another engine."""
        return self.counters.get("prompt_tokens_external_kv_transfer", self.counters.get("external_hits", 0.0))


class Failure(Strict):
    """What came of an engine in place of an answer: a response with another status than 200, or its end."""

    role: LegRole
    """Role in which it was asked; of one that ended, its own."""
    status: int | None = None
    """None where the engine ended without a response."""
    words: str
    """Its own: the body of the response, or the exception that it logged before it ended."""
    ended: Count | None = None
    """The exit code of its process, negative for a signal; None while it is alive."""

    @property
    def by_itself(self) -> bool:
        """Whether the engine failed by its own doing: one that is busy, was ended by a signal that others send, or did
        not say why it ended, may have failed for what the machine did."""
        if self.ended is not None:
            return self.ended not in _SENT_BY_OTHERS and bool(self.words)
        return self.status is not None and self.status >= _SERVER_ERROR and self.status not in _BUSY

    @property
    def refused(self) -> bool:
        """Whether the engine is alive and said that it does not answer such a request."""
        return self.ended is None and self.status is not None


_BAD_REQUEST, _SERVER_ERROR = 400, 500
_BUSY = (503, 504)
_SENT_BY_OTHERS = (-1, -2, -9, -15)
"""HUP, INT, KILL (also the kernel's, for want of memory) and TERM."""


class SecondTry(Strict):
    """What came of a request that was sent again, the requests before it in its script included, with caches of its
    own, because an engine had failed at it."""

    failure: Failure | None = None
    error: str | None = None
    """Why there is no answer, or why the request could not be sent again."""
    legs: tuple[Leg, ...] = ()


class Observation(Strict):
    """All responses to one prompt in one cell, as recorded."""

    cell: SafeName
    prompt_id: str
    form: Form
    scenario: str = COLD
    instance: int = 0
    """Number of the run through the scenario that this belongs to."""
    part: str = SUBJECT
    """The request's purpose in its scenario: subject, donor, fill, holder, late, …"""
    stage: int = 0
    route: SentTo = "cell"
    temperature: float = 0.0
    max_tokens: int | None = None
    """Requested number of output tokens; None in records of earlier versions, which used the workload's."""
    asked_at: float | None = None
    """When the request was sent to the answering engine, in stages of several requests: seconds since 1970 by
    ``harness.util.clock``, which never jumps within a process."""
    held_until: float | None = None
    """When that engine was resumed, in stages that pause it until all requests are queued."""
    concurrent: int = 1
    """Number of requests under way at the same time. Above 1, counters are known only for all of them together."""
    abandon: Abandon | None = None
    """When the client was to give the request up; its answer, if it came before that, is not judged."""
    feature: Feature | Parameter | OfAdapter | None = None
    """A parameter with which it was sent."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """The fields of the request's body that asked for it; empty in records of earlier versions."""
    api: Api = "completion"
    """How its answer was asked for; P's is always asked for whole."""
    mistake: str | None = None
    """What was done to its hand-off that a router should not do: its answer is right or refused, and not judged
    otherwise."""
    shared_counters: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Increase of each engine's counters over several requests: those under way together; on P, a request and those
    sent between its legs; or a request that a router handed off."""
    aged_by: dict[str, Count] = Field(default_factory=dict)
    """How many requests of one token each engine finished just before it that are not recorded, to grow old."""
    sequence: int
    sent_ids: tuple[int, ...]
    """Token ids of the prompt, sent as such or as the text that must tokenise to them."""
    source: str | None = None
    """The text that the prompt was made of, where other prompts may be padded copies of it; None in records of earlier
    versions and for prompts that have no copies."""
    known_answer: tuple[int, ...] | None = None
    """The right output, for prompts that have only one; None for others and in records of earlier versions."""
    engine_roles: tuple[str, ...]
    legs: tuple[Leg, ...]
    attempts: int = 1
    """2 when D received the request after P's lease had ended (``came_late``), so that the hand-off was repeated; the
    second one is recorded."""
    error: str | None = None
    failure: Failure | None = None
    """What came of an engine in place of an answer; None where there was an answer, or nothing came at all."""
    second_try: SecondTry | None = None
    """Of a request at which an engine failed by itself."""
    started_at: float
    """Time by ``harness.util.clock``; in a resumed run, each process has its own clock."""

    @property
    def most_tokens(self) -> int | None:
        """Number of tokens after which the answer is cut short: where its stop string is complete, or by its limit."""
        if self.feature == "stop-string" and self.known_answer:
            return (stop_at(self.feature, len(self.known_answer)) or 0) + 1
        return self.max_tokens

    @property
    def key(self) -> str:
        """Key that is unique within cell, form and scenario: the prompt, in scenarios with its instance and part."""
        return request_key(self.scenario, self.prompt_id, self.instance, self.part)

    def process_of(self, leg: Leg) -> str:
        """Return the role of the engine that gave an answer: in a P/D pair, D also answers alone."""
        return leg.role if leg.role in self.engine_roles else "decode"

    def preemptions(self, leg: Leg) -> int:
        """Return how often the engine that gave an answer preempted a request of this stage, this one or another."""
        return int(self.shared_counters.get(self.process_of(leg), {}).get("preemptions", 0))

    def leg(self, role: str) -> Leg | None:
        for leg in self.legs:
            if leg.role == role:
                return leg
        return None

    @property
    def tokens_said(self) -> int:
        """Output tokens of an answer; 0 of an output that was re-scored."""
        said = self.final if self.scenario != RESCORE else None
        return len(said.output_ids or ()) if said is not None else 0

    @cached_property
    def final(self) -> Leg | None:
        """The leg whose output a user would receive."""
        if self.route == "read-back":
            return self.leg("prefill")
        single = None
        for leg in self.legs:
            if leg.role == "decode":
                return leg
            if leg.role == "single" and single is None:
                single = leg
        return single

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens that a user would receive; none without an answer, or without ids in it."""
        final = self.final
        return (final.output_ids if final is not None else None) or ()

    @property
    def ended_at(self) -> float:
        """When it was answered: ``started_at`` and the time of its legs, without what the harness did between them."""
        return self.started_at + sum(leg.seconds for leg in self.legs)

    @property
    def scores(self) -> bool:
        """Whether the request re-scores an output."""
        return self.scenario == RESCORE and self.instance == 0

    @property
    def drafts_filtered(self) -> bool:
        """Whether a grammar removes drafts that it does not admit, so that steps verify fewer of them, or none."""
        return self.feature in GRAMMARS

    @property
    def looked_up(self) -> bool:
        """Whether the engine asks its caches for the prompt: for log-probs of a prompt, vLLM computes all of it."""
        return self.feature not in ("prompt-logprobs", "echo")

    @property
    def answered_otherwise(self) -> bool:
        """Whether a parameter decides what its answer is, so that the plain engine's with the same parameter is the
        right one, and no baseline has it."""
        return self.feature in CHANGING

    @property
    def adapter(self) -> str:
        """Which LoRA adapter answers it, so that no other has computed its KV; "" for the target itself."""
        return self.feature if self.feature in ADAPTED else ""

    @property
    def refused(self) -> bool:
        """Whether the engine would not take the request as it was sent."""
        return self.failure is not None and self.failure.status == _BAD_REQUEST

    @property
    def answers(self) -> int:
        """Number of answers that it asked for, each of which is a request of its own to the engine."""
        asked = self.fields.get("n", 1)
        return asked if isinstance(asked, int) else 1

    @property
    def top_logprobs(self) -> int | None:
        """Log-probs that were asked for beside each output token's; None: the workload's."""
        asked = self.fields.get("logprobs")
        return asked if isinstance(asked, int) else None

    @property
    def asked_for(self) -> tuple[object, ...]:
        """What was asked for: requests that are equal in this have the same right answer."""
        return self.sent_ids, self.form, self.api, self.max_tokens, self.temperature, self.feature

    @property
    def mistakes(self) -> tuple[str, ...]:
        """What a router did to the hand-off."""
        return tuple(self.mistake.split(MISTAKES_TOGETHER)) if self.mistake else ()

    @property
    def cut_short(self) -> bool:
        """Whether the exchange broke or was to be given up, or its hand-off mistaken, so that its answer is not judged
        as others are."""
        return self.error is not None or self.abandon is not None or self.mistake is not None

    def came_late(self, lease_s: float) -> bool:
        """Return whether D's engine received the request when P's lease had ended or could no longer be renewed.

        Such a delay says nothing about the engines. D renews a lease every sixth of its length once its engine has the
        request (vLLM 0.32.0), so a request comes late when it spends more than five sixths outside D's engine, in
        neither its queue nor its inference. This is known only for requests that are alone on the engines; the result
        is False when D does not count both times.
        """
        leg = self.leg("decode")
        if leg is None or self.route != "cell" or self.concurrent > 1:
            return False
        counters = leg.counters
        if "queue_seconds" not in counters or "inference_seconds" not in counters:
            return False
        outside = leg.seconds - counters["queue_seconds"] - counters["inference_seconds"]
        return outside > lease_s * 5 / 6

    def after_late(self, late: Observation) -> Observation:
        """Return this observation as the second attempt after a late one, with the expired leases counted there."""
        counted = _summed(("nixl_expired",), *(leg.counters for leg in late.legs), *late.shared_counters.values())
        if not counted:
            return self.model_copy(update={"attempts": 2})
        own = self.shared_counters.get("prefill", {})
        grown = own | _summed(tuple(counted), counted, own)
        return self.model_copy(update={"attempts": 2, "shared_counters": self.shared_counters | {"prefill": grown}})


def _summed(names: tuple[str, ...], *counters: dict[str, float]) -> dict[str, float]:
    return {name: total for name in names if (total := sum(c.get(name, 0.0) for c in counters))}


ATTACHED = "attached"
"""Stands for the program of a server that the harness did not start, before its address."""


class EngineRecord(Strict):
    """An engine as started."""

    role: SafeName
    group: GroupName
    node: str | None = None
    """The cluster node that it ran on; None for the harness's own machine."""
    pid: int
    argv: tuple[str, ...]
    env: dict[str, str]
    log: SafeName
    ready_seconds: float
    model_runner: str | None
    attention_backend: str | None
    kv_blocks: int | None = None
    """Size of the KV pool in blocks, as the engine reports it."""
    block_size: int | None = None
    """Tokens of a block of attention KV, as it reports, which vLLM raises until a block has the bytes of a state."""
    step_tokens: int | None = None
    """Most tokens that the engine schedules in one step, as it reports."""
    kept_blocks: int = 0
    """Hand-offs before the first recorded request that P answered and D did not finish, for example because the first
    handshake timed out: their leases end during the run."""
    counters: tuple[str, ...] | None = None
    """Names of the counters that it has, whether or not they have grown; None in records of earlier versions."""
    mutants: tuple[str, ...] = ()
    """Mutants that are enabled in this engine."""

    @property
    def attached(self) -> bool:
        """Whether it ran already, and was only asked."""
        return self.argv[:1] == (ATTACHED,)

    def in_group(self, name: str) -> EngineRecord:
        """Return the record under another name of its group, which its log begins with."""
        return self.model_copy(update={"group": name, "log": name + self.log.removeprefix(self.group)})


_NO_PROCESS = re.compile(
    r"port \d+ on [^\s,]+, which is in use"
    r"|shared memory that cannot be examined \([^()]*\)"
    r"|shared memory /dev/shm/[\w.-]+, used by pid \d+"
)
"""What may be left over without a process that still runs."""
COUNTED = "counted"
"""Stands for the plan of a cell that was recorded before schema 5."""


def numbered(group: str, number: int) -> str:
    """Return the name of a group's engines that others followed: before the n-th resumption, or in the n-th part of a
    merged run."""
    return f"{group}~{number}"


def unnumbered(group: str) -> str:
    """Return the name that ``numbered`` was given."""
    return group.split("~")[0]


def unverified_tokens(draft_tokens: int, modules: int) -> int:
    """Return of how many tokens at the end of what an engine has computed later modules saw drafts. Their KV may
    change, and its prefix cache ends before them (``num_reprefillable_tokens`` of vLLM 0.32.0)."""
    return draft_tokens - 1 if modules > 1 else 0


def held_back(recurrent: bool, draft_tokens: int, modules: int) -> int:
    """Return how many tokens at the end of a prompt P leaves to D (``_prefill_backoff`` of NIXL's connector in vLLM
    0.32.0): a state takes a token in once, and what later modules see there are drafts."""
    return max(int(recurrent), unverified_tokens(draft_tokens, modules))


class CellRecord(Strict):
    """The course of one cell."""

    cell: SafeName
    group: GroupName
    block_size: int
    lookahead: int
    draft_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """Of each kind of attention layer of target and drafter, how many tokens a query sees; None means all."""
    recurrent: bool = False
    """Whether the target has layers with a state instead of attention, which is handed over by other rules."""
    modules: int = 1
    """Modules of multi-token prediction that draft one after the other, each of which sees one token more than the one
    before; 1 for other drafters."""
    kv_numbers: int | None = None
    """Numbers of a token's KV that a hand-off moves, by the configs of the models; None where they do not tell, and in
    records of earlier versions."""
    texts: bool = False
    """Whether answers were recorded with their texts; False in records of earlier versions."""
    route: Route = "client"
    """Who performed the hand-off: the harness, or a router."""
    planned: int
    """Number of planned cold observations."""
    scenarios: dict[str, int] = Field(default_factory=dict)
    """Number of planned observations, by scenario."""
    plan: str | None = None
    """The key of its requests in ``RunRecord.plans``; ``COUNTED`` where only their number was recorded; None if it is
    not known what was planned, so that the cell cannot pass."""
    state: Literal["pending", "complete", "failed", "interrupted"] = "pending"
    reason: str | None = None
    request_seconds: float = 0.0
    """Time between sending requests and receiving their responses."""
    seconds: float = 0.0
    """Time of the whole cell, including reading counters and writing records."""
    start_seconds: float = 0.0
    """Time until the engines were ready, charged to the first cell of the group."""
    emptied_s: dict[str, float | None] | None = None
    """Seconds after the last request until no block of an engine's KV pool was in use, by role; None for an engine that
    still had some after P's leases had ended. Empty in records before schema 6, and if vLLM cannot be asked."""
    left_over: tuple[str, ...] = ()
    """What could not be ended or removed when the engines ended; charged to the first cell of the group."""

    @property
    def unverified(self) -> int:
        """``unverified_tokens`` of the cell's method."""
        return unverified_tokens(self.draft_tokens, self.modules)

    @property
    def held_back(self) -> int:
        """``held_back`` of the cell's target and method."""
        return held_back(self.recurrent, self.draft_tokens, self.modules)

    @property
    def several_kinds(self) -> bool:
        """Whether layers are of several kinds, whose KV vLLM keeps and caches in groups of their own."""
        return self.recurrent or len(self.windows) > 1

    def left_to_d(self, tokens: int) -> int:
        """Return how many of a prompt's tokens P leaves to D; none where the prompt has no more than those."""
        return self.held_back if tokens > self.held_back else 0

    @property
    def left_running(self) -> bool:
        """Whether processes of its engines may still be running; anything else left over is memory or a port."""
        return any(not _NO_PROCESS.fullmatch(words) for words in self.left_over)


class Part(Strict):
    """A recorded run that is part of a merged one, with the circumstances of its recording."""

    run_id: SafeName
    started: str
    finished: str | None
    command: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    hardware: dict[str, Any]
    seconds: dict[str, float] = Field(default_factory=dict)
    cells: dict[str, str]
    """States of the cells that it recorded."""
    counted: tuple[str, ...]
    """Cells whose recording in this part is the one that is judged."""
    second_stage: bool = False


class Merged(Strict):
    """The parts of a merged run (``harness merge``)."""

    parts: tuple[Part, ...]
    notices: tuple[str, ...] = ()
    unsettled: bool = False
    """Whether something about the parts keeps the run from passing, whatever its cells say."""


class Resumption(Strict):
    """One resumption of an interrupted run (``harness run --resume``)."""

    at: str
    command: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    hardware: dict[str, Any]
    cells: tuple[str, ...]
    """Cells that were repeated from their beginning."""
    set_aside: int
    """Number of earlier observations that no longer count; they are kept in ``files``."""
    files: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    """Findings in the responses that were set aside. A repetition must not erase them: such a run cannot pass."""

    @property
    def sentence(self) -> str:
        """Sentence for reports."""
        kept = f"; {self.set_aside} earlier answers were set aside ({', '.join(self.files)})" if self.set_aside else ""
        wrong = f", which had findings, so the run cannot pass: {'; '.join(self.found)}" if self.found else ""
        return f"resumed at {self.at}: {', '.join(self.cells) or 'no cell'} asked again{kept}{wrong}"


class RunRecord(Strict):
    """Provenance of a run (``run.json``)."""

    schema_version: int
    run_id: SafeName
    harness_version: str
    started: str
    finished: str | None
    command: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    profile: dict[str, Any]
    """The profile as used; it has at least a ``name``."""
    prompts_sha256: str
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    identities: dict[str, dict[str, Any]]
    """Per lineup, the identity that its baseline must have: hashes of models, tokenizer and prompts, and settings."""
    engines: tuple[EngineRecord, ...] = ()
    cells: tuple[CellRecord, ...]
    plans: dict[str, tuple[PlannedRequest, ...]] = Field(default_factory=dict)
    """Every request that was to be sent, by ``plan_key``; cells that are sent the same share them."""
    seconds: dict[str, float] = Field(default_factory=dict)
    interrupted: bool = False
    ended_by: SignalName | None = None
    """The signal that interrupted it; None if none did, and in records of earlier versions."""
    mutants: tuple[str, ...] = ()
    """Injected defects: such a run says nothing about the engine."""
    engine_flags: tuple[str, ...] = ()
    """Options of the command line that added arguments and variables to the engines."""
    rescore: bool = False
    """Whether the plain single engine was to re-score the outputs."""
    rounding: bool = False
    """Whether it was to show how it rounds."""
    lacking: dict[str, str] = Field(default_factory=dict)
    """Interfaces that this vLLM version lacks, and what that costs."""
    references: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of each copy of a baseline or list of known defects that the run carries, by its path in the folder;
    empty in records of earlier versions."""
    merged: Merged | None = None
    """The parts of a merged run; None in any other run."""
    resumed: tuple[Resumption, ...] = ()
    """Every resumption of the run."""
    kind: Kind = "run"
    """What the run was recorded for (``harness.history.run_kind``)."""
    came_to: Verdict | None = None
    """The verdict of a soak as a whole, which its observations alone do not show; None until it ends and in other
    runs."""

    @property
    def asked_for(self) -> RecordedProfile:
        """The recorded profile."""
        return RecordedProfile(self.profile)

    @property
    def attached(self) -> bool:
        """Whether the run asked servers that ran already, and started none."""
        return any(engine.attached for engine in self.engines)

    @property
    def limiting_verdicts(self) -> tuple[Verdict, ...]:
        """Upper bounds on the verdict of the run, whatever its cells say."""
        doubt = (Verdict.UNKNOWN,) if self.cannot_pass else ()
        return (*doubt, self.came_to) if self.came_to is not None else doubt

    @property
    def normal(self) -> bool:
        """Whether the run may be judged in the normal tier, by registered tests."""
        return self.asked_for.tier in ("normal", "auto")

    @property
    def cannot_pass(self) -> bool:
        """Whether the run cannot pass, whatever its cells say.

        That is so if it was interrupted or did not finish, a defect was injected, or its engines have one that may be
        switched on, its parts contradict each other, requests with findings were repeated, it is a soak without a
        verdict, or its engines may still be running.
        """
        unsettled = self.merged is not None and self.merged.unsettled
        no_soak_verdict = self.kind == "soak" and self.came_to is None
        unfinished = self.finished is None or no_soak_verdict or any(c.left_running for c in self.cells)
        return self.interrupted or unfinished or bool(self.all_mutants) or unsettled or self.reasked_after_findings

    @property
    def all_mutants(self) -> tuple[str, ...]:
        """Mutants that were enabled, or else those that an engine has; in the control of a self-test they are switched
        off."""
        installed = (m for e in self.engines for m in e.mutants) if self.kind != "control" else ()
        return self.mutants or tuple(dict.fromkeys(installed))

    @property
    def reasked_after_findings(self) -> bool:
        """Whether observations with findings were set aside when the run was resumed."""
        return any(r.found for r in self.resumed)
