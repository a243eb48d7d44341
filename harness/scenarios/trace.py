"""Any requests: stages one after the other, the requests of a stage together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from harness.history.records import MISTAKES_TOGETHER, Observation
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.model import Profile
from harness.profiles.scenarios import OF_TEXT, Abandon, Trace, TraceRequest, api_of, is_chat
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.features import send_with
from harness.scenarios.hand_off_mistakes import LOST
from harness.scenarios.parameters import LONG_ENOUGH, gaps_of
from harness.scenarios.possible import demand, fewest_held, pool_of, unsaid
from harness.scenarios.proving import batched, stage_counters, step_overflows

_PATIENCE_S = 10.0
"""Seconds within which D has to answer a request whose hand-off is mistaken, or to refuse it."""


class TraceKind(Kind[Trace]):
    def stages(self, config: Trace, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        hold: Literal["first", "answering"] = "answering" if config.held == "answering" else "first"
        return [
            [
                Stage(
                    tuple(_of_trace(config, (i, j), r, prompts) for j, r in enumerate(stage)),
                    hold=hold if config.held else None,
                )
                for i, stage in enumerate(config.stages)
            ]
        ]

    def impossible(self, config: Trace, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        """Return which request could never be admitted, or what could not be proven, or None."""
        pool = profile.engine.kv_blocks
        for request in config.requests:
            wanted = demand([request.prompt], profile, prompts, request.max_tokens or config.max_tokens)
            if pool is not None and wanted > pool - 1:
                return pool_of(f"at least {wanted + 1} blocks, which {request.prompt} and its answer need", pool)
        if pool is not None and (problem := _not_kept(config, profile, prompts, pool)):
            return problem
        if problem := _unanswered_reference(config, profile):
            return problem
        chats = [r.prompt for r in config.requests if is_chat(r.api) or is_chat(api_of(r.feature))]
        if problem := unsaid(chats, profile, prompts):
            return problem
        for request in config.requests:
            known = len(prompts[request.prompt].expected or ())
            if request.feature is not None and request.feature not in OF_TEXT and known < LONG_ENOUGH:
                return (
                    f"expected a known answer of at least {LONG_ENOUGH} tokens to {request.prompt}, which is asked "
                    f"with {request.feature}, found {known}; name a copy prompt that is longer"
                )
        for name in ("batched", "chunked"):
            if name in config.proves and not config.crowded:
                return f"expected a stage of several requests, which `proves: [{name}]` is about, found none; add one"
        if "chunked" in config.proves and not config.held:
            return "expected held: true, without which no step has the prompts of all, for `proves: [chunked]`; set it"
        if "abandoned" in config.proves and not any(r.abandon and r.abandon.after_steps for r in config.requests):
            return (
                "expected a request with abandon.after_steps, which `proves: [abandoned]` needs, found none; add one, "
                "or remove `abandoned` from proves"
            )
        return None

    def gaps(self, config: Trace, seen: Occurrence) -> Iterator[Gap]:
        """Prove what the trace is to prove. A trace that proves nothing is judged by its answers alone."""
        observations = list(seen.parts.values())
        first = observations[0]
        if "abandoned" in config.proves and not any(_generated_and_given_up(seen.cell, o) for o in observations):
            yield Gap(first, "expected a request to be given up after tokens were generated for it, found none")
        if "preempted" in config.proves and not _grown(observations, "preemptions"):
            yield Gap(first, "expected at least one preemption, found none: the requests did not outgrow the KV pool")
        for o in observations:
            yield from gaps_of(seen, o, must_change="changed" in config.proves)
        crowds = [
            crowd for n in range(len(config.stages)) if len(crowd := [o for o in observations if o.stage == n]) > 1
        ]
        for crowd in crowds if "batched" in config.proves else ():
            yield from batched(seen.cell, crowd, stage_counters(seen.cell, crowd[0], seen.cell.answering))
        if "chunked" in config.proves:
            lacking = [list(step_overflows(seen.cell, crowd)) for crowd in crowds]
            yield from min(lacking, key=len, default=[])
        if "cached" in config.proves and not _grown(observations, "prefix_hits"):
            yield Gap(first, "expected a hit in a prefix cache, found none")


def _not_kept(config: Trace, profile: Profile, prompts: Mapping[str, Prompt], pool: int) -> str | None:
    """Return why P could not keep the blocks of a stage for a D that is held, or None."""
    if config.held != "answering" or "pd" not in profile.topologies:
        return None
    handed = [[r.prompt for r in stage if r.to == "cell"] for stage in config.stages]
    most = max(sum(fewest_held(profile, prompts[p].tokens) for p in names) for names in handed)
    if most <= pool - 1:
        return None
    return pool_of(f"at least {most + 1} blocks, which P keeps for D while it is held", pool)


def _unanswered_reference(config: Trace, profile: Profile) -> str | None:
    """Return why there are no parameters of a hand-off to ask D with again, or None."""
    if not any(r.mistaken for r in config.requests):
        return None
    if not profile.engine.pulls_by_nixl:
        return (
            "expected NIXL's connector and engine.kv_transfer: pull, whose hand-offs D reads with P's parameters, "
            "found others; leave parameters_of and p_tokens out"
        )
    for number, stage in enumerate(config.stages):
        for at in (r.parameters_of for r in stage if r.parameters_of is not None):
            earlier = config.stages[at[0]] if 0 <= at[0] < number else ()
            named = earlier[at[1]] if 0 <= at[1] < len(earlier) else None
            if named is None or named.to != "cell" or named.mistaken:
                return (
                    f"expected an ordinary hand-off of an earlier stage behind parameters_of {list(at)}, found none "
                    "there; it is the number of its stage and its own in that, both from 0"
                )
    return None


def _of_trace(config: Trace, place: tuple[int, int], request: TraceRequest, prompts: Mapping[str, Prompt]) -> Send:
    part = part_of(place)
    prompt, group = prompts[request.prompt], f"cache {request.cache}" if request.cache else part
    after = () if request.after is None else (part_of((place[0], request.after)),)
    if request.feature is not None:
        asked = send_with(request.feature, prompt, config.max_tokens, part, group)
        route = asked.route if request.to == "cell" else request.to
        api = request.api if request.api != "completion" else asked.api
        return asked._replace(route=route, after_s=request.delay_s, after=after, api=api)
    send = Send(
        prompt,
        part,
        group,
        request.to,
        max_tokens=request.max_tokens or config.max_tokens,
        after_s=request.delay_s,
        after=after,
        abandon=request.abandon,
        api=request.api,
    )
    if not request.mistaken:
        return send
    # An engine that waits for KV which it never asks for waits for ever.
    send = send._replace(mistake=_mistake(config, place, request), abandon=Abandon(leg="decode", after_s=_PATIENCE_S))
    if request.parameters_of is None:
        return send._replace(p_tokens=request.p_tokens)
    return send._replace(route="reference", reference=part_of(request.parameters_of), lost=request.lost)


def part_of(place: tuple[int, int]) -> str:
    """Return the part of the request with a number in a stage."""
    return f"r{place[0]}-{place[1]}"


def _mistake(config: Trace, place: tuple[int, int], request: TraceRequest) -> str:
    """Return what is done to a hand-off: where P was asked for others since, it may have used its blocks for them."""
    if request.parameters_of is None:
        return "more-tokens"
    stage, number = request.parameters_of
    asked = [((i, j), r) for i, some in enumerate(config.stages[: place[0] + 1]) for j, r in enumerate(some)]
    to_p = [r for at, r in asked if at > (stage, number) and r.to != "local" and r.parameters_of is None]
    if request.lost:
        return MISTAKES_TOGETHER.join([*(["used-late"] if to_p else []), f"{LOST}{request.lost}"])
    if to_p:
        return "used-late"
    beside = sum(r.parameters_of == request.parameters_of for r in config.stages[place[0]])
    return "shared" if beside > 1 else "used-twice"


def _generated_and_given_up(cell: RecordedCell, o: Observation) -> bool:
    """Return whether the engine generated tokens for a request that has the engines to itself and no answer."""
    generated = stage_counters(cell, o, cell.answering).get("generation_tokens", 0)
    return o.abandon is not None and o.final is None and o.concurrent == 1 and generated > 0


def _grown(observations: list[Observation], name: str) -> bool:
    counted = [leg.counters for o in observations for leg in o.legs]
    counted += [counters for o in observations for counters in o.shared_counters.values()]
    return any(counters.get(name, 0) for counters in counted)
