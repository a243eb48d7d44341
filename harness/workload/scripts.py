"""Scripts: the requests that bring engines into the state of a scenario."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, assert_never

from harness.errors import UsageError
from harness.history.records import SentTo
from harness.history.token_ids import common_prefix
from harness.profiles.model import Profile, TopologyName
from harness.profiles.scenarios import (
    SECOND,
    Abandon,
    AppendedToken,
    ChunkedPrefill,
    Concurrent,
    Continuation,
    Crowd,
    Feature,
    Features,
    LatePull,
    Pair,
    PrefixHit,
    Pressure,
    Recovery,
    Refill,
    SameStep,
    Sampled,
    Scenario,
    SecondPrefill,
    SharedBlock,
    Trace,
    TraceRequest,
)
from harness.prompts.lengths import blocks
from harness.prompts.model import Prompt
from harness.workload.features import stop_at

SHORT = 2
"""Output tokens of requests that only fill caches."""


class Send(NamedTuple):
    """One request of a script."""

    prompt: Prompt
    part: str
    group: str
    """Requests of the same group may share cached blocks; each run of a script has its own groups."""
    route: SentTo = "cell"
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
    feature: Feature | None = None
    """A parameter that must not change the answer."""
    restart: bool = False
    """Whether P is restarted before it is sent."""
    by_second_p: bool = False
    """Whether the second P hands it off."""
    read_back: bool = False
    """Whether P may read the blocks of the request before it back from D."""


class Stage(NamedTuple):
    """Requests that are under way at the same time; the next stage begins when all are answered."""

    sends: tuple[Send, ...]
    hold: Literal["first", "answering"] | None = None
    """Pause an engine until all requests are queued there, so that it begins them in one step: the one that is asked
    first (P in a pair), or the one that gives the output (D in a pair)."""


class Script(NamedTuple):
    """One run through a scenario."""

    scenario: str
    instance: int
    stages: tuple[Stage, ...]

    @property
    def sends(self) -> list[Send]:
        """The requests of all stages, without those that are sent between the legs of another."""
        return [send for stage in self.stages for send in stage.sends]

    @property
    def requests(self) -> int:
        return sum(1 + len(send.between) for send in self.sends)


def scripts(
    scenario: Scenario, prompts: Mapping[str, Prompt], topology: TopologyName, chosen: Sequence[Prompt] = ()
) -> list[Script]:
    """Return the scripts of a scenario for a topology; the list is empty when it cannot run there.

    ``chosen`` are the prompts of a scenario that does not name any (``drawn``).
    """
    if topology not in scenario.topologies:
        return []
    runs = enumerate(_stages(scenario, prompts, chosen))
    return [Script(scenario.id, i, tuple(stages)) for i, stages in runs]


def drawn(scenario: Scenario, profile: Profile, cold: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts, of those that are sent cold, that a scenario is sent which names none: of as many texts as
    there are before a second one of any, and with a whole block that a prefix hit can find."""
    least = (1 + any(m.traits.drops_block for m in profile.methods)) * profile.engine.block_size
    copies: Counter[str] = Counter()
    turns: list[tuple[int, Prompt]] = []
    for prompt in cold:
        if isinstance(scenario, Crowd) or prompt.tokens > least:
            text = prompt.source or prompt.id
            turns.append((copies[text], prompt))
            copies[text] += 1
    return [p for _, p in sorted(turns, key=lambda turn: turn[0])][: scenario.drawn]


def _stages(scenario: Scenario, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt] = ()) -> list[list[Stage]]:
    """Return the stages of each run through a scenario. Raises KeyError for a prompt that ``prompts`` lacks."""
    limit = scenario.max_tokens
    match scenario:
        case PrefixHit():
            if isinstance(scenario.pairs, int):
                return [_prefix_hit(scenario, p, p) for p in chosen]
            return [_prefix_hit(scenario, prompts[pair.donor], prompts[pair.subject]) for pair in scenario.pairs]
        case Crowd():
            return [[_crowd(scenario, crowd)] for crowd in crowds(scenario, chosen)]
        case ChunkedPrefill():
            return [[_one(prompts[p], "subject", "a", limit)] for p in scenario.prompts]
        case Concurrent():
            return [_concurrent(scenario, prompts) for _ in range(scenario.rounds)]
        case Pressure():
            return [_pressure(scenario, prompts)]
        case Refill():
            fill = [_one(prompts[p], f"fill{i}", "b", SHORT) for i, p in enumerate(scenario.fill)]
            return [
                [_one(prompts[p], "before", "a", limit), *fill, _one(prompts[p], "subject", "a", limit)]
                for p in scenario.prompts
            ]
        case LatePull():
            between = tuple(
                Send(prompts[p], f"fill{i}", "b", "prefill", max_tokens=SHORT) for i, p in enumerate(scenario.fill)
            )
            return [
                [Stage((Send(prompts[p], "subject", "a", max_tokens=limit, between=between),))]
                for p in scenario.prompts
            ]
        case Recovery():
            return [
                [
                    _one(prompts[p], "before", "b", SHORT),
                    Stage((Send(prompts[p], "subject", "a", "former-p", max_tokens=limit, restart=scenario.restart),)),
                    _one(prompts[p], "again", "a", limit),
                    *([_one(prompts[p], "after", "c", limit)] if scenario.restart else ()),
                ]
                for p in scenario.prompts
            ]
        case SecondPrefill():
            return [_by_turns(scenario, [prompts[p] for p in scenario.prompts])]
        case AppendedToken():
            return [_appended(scenario, prompts, p) for p in scenario.prompts]
        case Sampled():
            return [
                [Stage((Send(prompts[p], "subject", "a", max_tokens=limit, temperature=scenario.temperature),))]
                for p in scenario.prompts
            ]
        case Features():
            return [_features(scenario, prompts[p]) for p in scenario.prompts]
        case SharedBlock():
            order = (("donor", scenario.first), ("again", scenario.first), ("bridge", scenario.bridge))
            return [
                [
                    *(_one(prompts[p], part, "a", SHORT if part == "again" else limit) for part, p in order),
                    _one(prompts[scenario.second], "subject", "a", limit),
                ]
            ]
        case Continuation():
            return [_continuation(scenario, prompts, p) for p in scenario.continued]
        case SameStep():
            return [[_same_step(prompts, pair, limit)] for pair in scenario.pairs]
        case Trace():
            return [_trace(scenario, prompts)]
        case _:
            assert_never(scenario)


def _one(prompt: Prompt, part: str, group: str, max_tokens: int | None) -> Stage:
    return Stage((Send(prompt, part, group, max_tokens=max_tokens),))


def _prefix_hit(scenario: PrefixHit, donor: Prompt, subject: Prompt) -> list[Stage]:
    route: SentTo = "local" if scenario.where == "decode" else "prefill"
    first = Stage((Send(donor, "donor", "a", route, max_tokens=SHORT),))
    return [first, _one(subject, "subject", "a", scenario.max_tokens)]


def crowds(scenario: Crowd, chosen: Sequence[Prompt]) -> list[list[Prompt]]:
    """Divide prompts into crowds of at most ``together``, whose sizes differ by one at most."""
    count = math.ceil(len(chosen) / scenario.together)
    return [list(chosen[n::count]) for n in range(count)]


def _crowd(scenario: Crowd, crowd: Sequence[Prompt]) -> Stage:
    sends = [
        Send(p, f"r{n}", f"c{n}", max_tokens=scenario.max_tokens, after_s=n * ORDER_S) for n, p in enumerate(crowd)
    ]
    return Stage(tuple(sends), hold="first")


def _continuation(scenario: Continuation, prompts: Mapping[str, Prompt], name: str) -> list[Stage]:
    """Return a turn and the next one.

    Where the next one is the beginning of the first answer alone, that is one token longer, because the KV of a token
    is computed in the step after it.
    """
    donor, continued = prompts[scenario.donor], prompts[name]
    repeated = common_prefix((*donor.ids, *(donor.expected or ())), continued.ids)
    answered = max(repeated - donor.tokens + (repeated == continued.tokens), SHORT)
    subject = Send(continued, "subject", "a", max_tokens=scenario.max_tokens, read_back=scenario.read_back)
    return [_one(donor, "donor", "a", answered), Stage((subject,))]


def _by_turns(scenario: SecondPrefill, prompts: Sequence[Prompt]) -> list[Stage]:
    """Return hand-offs of all prompts by each P, of which one is always a prompt ahead of the other."""
    ahead = [*prompts[1:], prompts[0]]
    return [
        Stage((Send(prompt, f"{by}{n}", f"{by}{n}", max_tokens=scenario.max_tokens, by_second_p=by == SECOND),))
        for n, pair in enumerate(zip(prompts, ahead, strict=True))
        for by, prompt in zip(("first", SECOND), pair, strict=True)
    ]


def _appended(scenario: AppendedToken, prompts: Mapping[str, Prompt], name: str) -> list[Stage]:
    subject = Stage((Send(prompts[name], "subject", "a", max_tokens=scenario.max_tokens, appended=True),))
    if scenario.donor is None:
        return [subject]
    return [Stage((Send(prompts[scenario.donor], "donor", "a", "local", max_tokens=SHORT),)), subject]


def _features(scenario: Features, prompt: Prompt) -> list[Stage]:
    answered = len(prompt.expected or ())
    # With log-probs of the prompt D computes all of it, whatever P has.
    routes: dict[Feature, SentTo] = {"prompt-logprobs": "local"}
    stages = []
    for feature in scenario.features:
        # A request that is not stopped has the tokens of one that is, and another finish reason.
        last = stop_at(feature, answered)
        limit = scenario.max_tokens if last is None else last + 1
        send = Send(prompt, feature, feature, routes.get(feature, "cell"), max_tokens=limit, feature=feature)
        stages.append(Stage((send,)))
    return stages


def _same_step(prompts: Mapping[str, Prompt], pair: Pair, limit: int | None) -> Stage:
    first = Send(prompts[pair.donor], "donor", "a", max_tokens=limit)
    second = Send(prompts[pair.subject], "subject", "a", max_tokens=limit, after_s=ORDER_S)
    return Stage((first, second), hold="first")


def _trace(scenario: Trace, prompts: Mapping[str, Prompt]) -> list[Stage]:
    return [
        Stage(
            tuple(_of_trace(r, f"r{i}-{j}", prompts, scenario.max_tokens) for j, r in enumerate(stage)),
            hold="first" if scenario.held else None,
        )
        for i, stage in enumerate(scenario.stages)
    ]


def _of_trace(request: TraceRequest, part: str, prompts: Mapping[str, Prompt], limit: int | None) -> Send:
    return Send(
        prompts[request.prompt],
        part,
        f"cache {request.cache}" if request.cache else part,
        request.to,
        max_tokens=request.max_tokens or limit,
        after_s=request.delay_s,
        abandon=request.abandon,
    )


def _concurrent(scenario: Concurrent, prompts: Mapping[str, Prompt]) -> list[Stage]:
    """Return the stages of the concurrent scenario.

    The short requests start together with the long one, which has the second batch row. When all short ones have ended,
    it has moved to the first row, whichever ended first; then the late ones are sent, and the first of them takes the
    row that it left, through which its blocks may still be overwritten. Finally the long one is repeated from the
    cache, which shows whether its blocks were overwritten.

    Late requests wait for the answers of the short ones instead of a fixed time: a request that is admitted in the step
    in which another ends takes that one's row, so that nothing moves and a drafter that writes through a stale row (M3)
    goes unnoticed.
    """
    limit = scenario.max_tokens
    short = [Send(prompts[p], f"together{i}", f"t{i}", max_tokens=limit) for i, p in enumerate(scenario.together)]
    holder = Send(prompts[scenario.holder], "holder", "h", max_tokens=limit)
    queue = [short[0], holder, *short[1:]]
    queue = [send._replace(after_s=i * ORDER_S) for i, send in enumerate(queue)]
    ended = tuple(send.part for send in short)
    late = [
        Send(prompts[p], f"late{i}", f"l{i}", max_tokens=limit, after_s=i * ORDER_S, after=ended)
        for i, p in enumerate(scenario.late)
    ]
    again = Send(holder.prompt, "again", holder.group, max_tokens=limit)
    return [Stage((*queue, *late), hold="first"), Stage((again,))]


ORDER_S = 0.03
"""Seconds between requests that must be queued in order: longer than the API server takes for one (about 10 ms)."""


def _pressure(scenario: Pressure, prompts: Mapping[str, Prompt]) -> list[Stage]:
    limit = scenario.max_tokens
    load = [Send(prompts[p], f"load{i}", f"p{i}", max_tokens=limit) for i, p in enumerate(scenario.load)]
    local = [Send(prompts[p], f"local{i}", f"q{i}", "local", max_tokens=limit) for i, p in enumerate(scenario.local)]
    waiting = Send(prompts[scenario.waiting.subject], "waiting", "a", max_tokens=limit, last=True)
    return [
        _one(prompts[scenario.waiting.donor], "donor", "a", SHORT),
        # Paused until all are queued: otherwise one could end before the next begins. Waiting for a given usage of the
        # pool is no alternative, since a busy engine may leave /metrics unanswered for seconds.
        Stage((*load, *local, waiting), hold="answering"),
    ]


# --- what can be known before an engine is started -----------------------------------------------------------------


_LONG_ENOUGH = 4
"""Known tokens of a prompt that is asked with features: it is stopped after the first and before the last."""


def require_possible(profile: Profile, prompts: Mapping[str, Prompt], *sent: Sequence[Prompt]) -> None:
    """Raise UsageError when a scenario names an unknown prompt, cannot occur with the profile's engine settings, or
    cannot be judged in its tier. ``sent`` are the prompts that are sent cold, in each stage."""
    for scenario in profile.scenarios:
        if profile.judging.tier == "normal" and not (scenario.drawn and scenario.max_tokens is None):
            raise UsageError(
                f"scenario {scenario.id}: expected prompts by number, answered in full, which registered tests compare "
                "with the same prompts cold (normal tier), found prompts by name or max_tokens; use the kinds "
                "prefix-hit and crowd, or a profile of the bitwise tier"
            )
        for cold in sent if scenario.drawn else ():
            problem = _not_drawn(scenario, profile, drawn(scenario, profile, cold))
            if problem:
                raise UsageError(f"scenario {scenario.id} cannot occur: {problem}")
        try:
            _stages(scenario, prompts)
        except KeyError as missing:
            raise UsageError(
                f"scenario {scenario.id}: expected prompts of {profile.workload.prompts.name}, found "
                f"{missing.args[0]!r}, which is not in it; correct the id or rebuild the prompt set"
            ) from None
        most, own = profile.workload.max_tokens, scenario.requests if isinstance(scenario, Trace) else ()
        asked = max(r.max_tokens or 0 for r in (scenario, *own))
        if asked > most:
            raise UsageError(
                f"scenario {scenario.id}: expected max_tokens of at most workload.max_tokens = {most}, the length that "
                f"baselines record, found {asked}; lower it or raise workload.max_tokens"
            )
        problem = _impossible(scenario, profile, prompts)
        if problem:
            raise UsageError(f"scenario {scenario.id} cannot occur: {problem}")


def shared_blocks(a: Prompt, b: Prompt, block_size: int) -> int:
    """Return the number of whole blocks in the common prefix of two prompts."""
    return common_prefix(a.ids, b.ids) // block_size


def _demand(names: Sequence[str], profile: Profile, prompts: Mapping[str, Prompt], limit: int | None) -> int:
    """Return the number of KV blocks that the prompts and their outputs need together."""
    size = profile.engine.block_size
    most = limit or profile.workload.max_tokens
    return sum(blocks(prompts[n].tokens + min(most, prompts[n].tokens), size) for n in names)


def _impossible(scenario: Scenario, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
    size, pool = profile.engine.block_size, profile.engine.kv_blocks
    budget = profile.engine.max_num_batched_tokens
    match scenario:
        case PrefixHit():
            return _no_sharing(() if isinstance(scenario.pairs, int) else scenario.pairs, prompts, size)
        case Crowd():
            return _too_many(scenario.together, profile)
        case ChunkedPrefill():
            short = [p for p in scenario.prompts if budget is not None and prompts[p].tokens <= budget]
            if short:
                return (
                    f"expected prompts longer than engine.max_num_batched_tokens = {budget}, found {short[0]} of "
                    f"{prompts[short[0]].tokens} tokens; lower the budget or name longer prompts"
                )
        case Concurrent():
            names = [scenario.holder, *scenario.together, *scenario.late]
            wanted = _demand(names, profile, prompts, scenario.max_tokens)
            if pool is not None and wanted > pool - 1:
                return _pool(f"at least {wanted + 1} blocks, so that no request is preempted", pool)
            return _too_many(len(scenario.together) + 1, profile)
        case Pressure():
            return _no_pressure(scenario, profile, prompts)
        case Refill() | LatePull():
            wanted = sum(blocks(prompts[n].tokens, size) for n in scenario.fill)
            if pool is not None and wanted < pool - 1:
                return _pool(f"at most {wanted + 1} blocks, which its fill can use up", pool)
        case Recovery():
            if profile.engine.kv_load_failure_policy != "recompute":
                return (
                    "expected engine.kv_load_failure_policy: recompute, with which D computes what it cannot fetch, "
                    f"found {profile.engine.kv_load_failure_policy}; set it, or leave the scenario out"
                )
            if profile.engine.pushes:
                return (
                    "expected engine.kv_transfer: pull, with which D finds that P is gone, found push, with which D "
                    "waits for P; leave the scenario out (without_scenarios)"
                )
        case SecondPrefill():
            if not profile.engine.by_nixl:
                return (
                    "expected NIXL's connector, whose hand-offs name the P that D reads from, found "
                    f"engine.kv_connector: {profile.engine.kv_connector}; leave the scenario out"
                )
        case AppendedToken():
            return _not_appended(scenario, profile, prompts)
        case Features():
            short = [p for p in scenario.prompts if len(prompts[p].expected or ()) < _LONG_ENOUGH]
            if short:
                return (
                    f"expected prompts with a known answer of at least {_LONG_ENOUGH} tokens, found "
                    f"{len(prompts[short[0]].expected or ())} of {short[0]}; name a copy prompt that is longer"
                )
        case SharedBlock():
            return _not_shared(scenario, prompts, size)
        case Continuation():
            return _not_continued(scenario, profile, prompts)
        case SameStep():
            return _no_sharing(scenario.pairs, prompts, size) or _too_many(2, profile)
        case Trace():
            return _no_trace(scenario, profile, prompts)
    return None


def _not_drawn(scenario: Scenario, profile: Profile, chosen: Sequence[Prompt]) -> str | None:
    """Return why the prompts that a scenario is sent cannot bring about its state, in words, or None."""
    if len(chosen) < scenario.drawn:
        return (
            f"expected {scenario.drawn} suitable prompts that are sent cold, found {len(chosen)}; ask for fewer, or "
            "build more"
        )
    if not isinstance(scenario, Crowd):
        return None
    size, pool, budget = profile.engine.block_size, profile.engine.kv_blocks, profile.engine.max_num_batched_tokens
    for crowd in crowds(scenario, chosen):
        tokens, most = sum(p.tokens for p in crowd), profile.workload.max_tokens
        if "chunked" in scenario.proves and budget is not None and tokens <= budget:
            return (
                f"expected crowds of more tokens than engine.max_num_batched_tokens = {budget}, found one of {tokens}; "
                "lower the budget or send more together"
            )
        if "preempted" in scenario.proves and pool is not None:
            wanted = sum(blocks(p.tokens + most, size) for p in crowd)
            if wanted <= pool - 1:
                return _pool(f"fewer than the {wanted + 1} blocks that a crowd and its answers need", pool)
    return None


def _no_trace(scenario: Trace, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
    """Return which request could never be admitted, or what could not be proven, in words, or None."""
    pool = profile.engine.kv_blocks
    for request in scenario.requests:
        wanted = _demand([request.prompt], profile, prompts, request.max_tokens or scenario.max_tokens)
        if pool is not None and wanted > pool - 1:
            return _pool(f"at least {wanted + 1} blocks, which {request.prompt} and its answer need", pool)
    if "abandoned" in scenario.proves and not any(r.abandon and r.abandon.after_steps for r in scenario.requests):
        return (
            "expected a request with abandon.after_steps, which `proves: [abandoned]` is about, found none; add one "
            "or leave that out"
        )
    return None


def _no_pressure(scenario: Pressure, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
    """Return why there would be no pressure, in words, or None.

    The prompts must leave no room for the waiting one, and P must be able to keep all handed-off blocks while D is
    paused.
    """
    size, pool = profile.engine.block_size, profile.engine.kv_blocks
    waiting = blocks(prompts[scenario.waiting.subject].tokens, size)
    kept = sum(blocks(prompts[p].tokens, size) for p in scenario.load)
    before = kept + sum(blocks(prompts[p].tokens, size) for p in scenario.local)
    if pool is not None and before + waiting <= pool - 1:
        return _pool(f"fewer than the {before + waiting + 1} blocks that its prompts need together", pool)
    if pool is not None and kept + waiting > pool - 1 and "pd" in scenario.topologies:
        return _pool(
            f"at least {kept + waiting + 1} blocks, so that P can keep `load` and `waiting` for D, or load moved to "
            "`local`",
            pool,
        )
    return _too_many(len(scenario.load) + len(scenario.local) + 1, profile) or _no_sharing(
        (scenario.waiting,), prompts, size
    )


def _too_many(together: int, profile: Profile) -> str | None:
    if together <= profile.engine.max_num_seqs:
        return None
    return (
        f"expected engine.max_num_seqs of at least {together}, found {profile.engine.max_num_seqs}; raise it or send "
        "fewer prompts together"
    )


def _pool(wanted: str, pool: int) -> str:
    return f"expected a KV pool (engine.kv_blocks) of {wanted}, found {pool}; change the pool or the prompts"


def _no_sharing(pairs: Sequence[Pair], prompts: Mapping[str, Prompt], size: int) -> str | None:
    for pair in pairs:
        if shared_blocks(prompts[pair.donor], prompts[pair.subject], size) < 1:
            return (
                f"expected donor {pair.donor} and subject {pair.subject} to have their first block of {size} tokens "
                "in common, found them to differ; name prompts that share a prefix"
            )
    return None


def _not_shared(scenario: SharedBlock, prompts: Mapping[str, Prompt], size: int) -> str | None:
    first, bridge, second = (prompts[p] for p in (scenario.first, scenario.bridge, scenario.second))
    if shared_blocks(first, second, size) or shared_blocks(bridge, second, size) < 1:
        return "expected `second` to share its first block with `bridge` and not with `first`"
    if first.ids[size : 2 * size] != second.ids[size : 2 * size]:
        return "expected `first` and `second` to have the same tokens in their second block"
    return None


def _not_appended(scenario: AppendedToken, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
    """Return why D's last token would not be P's answer, or why D has nothing cached, in words, or None."""
    drops_block = any(method.traits.drops_block for method in profile.methods)
    for name in scenario.prompts:
        if not any(_continues(prompts[name], p) for p in prompts.values()):
            return (
                f"expected the last token of {name} to be the answer to those before it, which a copy or echo prompt "
                "tells, found none that does; name a prompt that continues one"
            )
        if scenario.donor is not None:
            shared = shared_blocks(prompts[scenario.donor], prompts[name], profile.engine.block_size)
            if shared <= drops_block:
                return (
                    f"expected the donor {scenario.donor} to have {1 + drops_block} whole blocks in common with "
                    f"{name}, found {shared}; name another one"
                )
    return None


def _continues(turn: Prompt, prompt: Prompt) -> bool:
    """Return whether the one prompt is the other with the beginning of its known answer."""
    return turn.tokens > prompt.tokens and (*prompt.ids, *(prompt.expected or ()))[: turn.tokens] == turn.ids


def _not_continued(scenario: Continuation, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
    """Return why the cache would not hold blocks of the first answer, in words, or None."""
    if scenario.read_back and not profile.engine.read_back_s:
        return (
            "expected engine.kv_connector_extra_config with bidirectional_kv_xfer: true, with which P reads from D, "
            "found a connector that hands KV over one way; set it, or leave out read_back"
        )
    size = profile.engine.block_size
    donor = prompts[scenario.donor]
    if donor.expected is None:
        return f"expected a donor whose answer is known, found none for {scenario.donor}; name a copy or echo prompt"
    turn = (*donor.ids, *donor.expected)
    drops_block = any(method.traits.drops_block for method in profile.methods)
    # With most drafters, the last matched block is computed again.
    needed = (donor.tokens // size + 1 + drops_block) * size + 1
    for name in scenario.continued:
        repeated = common_prefix(turn, prompts[name].ids)
        if not donor.tokens < repeated < donor.tokens + profile.workload.max_tokens:
            return (
                f"expected {name} to begin with {scenario.donor} and the beginning of its answer, of less than "
                f"workload.max_tokens = {profile.workload.max_tokens} tokens, found something else"
            )
        if repeated < needed:
            return (
                f"expected {name} to repeat at least {needed} tokens of the turn before, so that a block of the answer "
                f"is found in the cache, found {repeated}; name a longer one"
            )
    return None
