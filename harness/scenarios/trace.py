"""Any requests: stages one after the other, the requests of a stage together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import Observation
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.model import Profile
from harness.profiles.scenarios import Trace, TraceRequest
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.features import send_with
from harness.scenarios.parameters import LONG_ENOUGH, gaps_of
from harness.scenarios.possible import demand, pool_of
from harness.scenarios.proving import stage_counters


class TraceKind(Kind[Trace]):
    def stages(self, config: Trace, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [
            [
                Stage(
                    tuple(_of_trace(r, f"r{i}-{j}", prompts, config.max_tokens) for j, r in enumerate(stage)),
                    hold="first" if config.held else None,
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
        for request in config.requests:
            known = len(prompts[request.prompt].expected or ())
            if request.feature is not None and known < LONG_ENOUGH:
                return (
                    f"expected a known answer of at least {LONG_ENOUGH} tokens to {request.prompt}, which is asked "
                    f"with {request.feature}, found {known}; name a copy prompt that is longer"
                )
        if "abandoned" in config.proves and not any(r.abandon and r.abandon.after_steps for r in config.requests):
            return (
                "expected a request with abandon.after_steps, which `proves: [abandoned]` is about, found "
                "none; add one or leave that out"
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
            yield from gaps_of(seen, o)
        if "cached" in config.proves and not _grown(observations, "prefix_hits"):
            yield Gap(first, "expected a hit in a prefix cache, found none")


def _of_trace(request: TraceRequest, part: str, prompts: Mapping[str, Prompt], limit: int | None) -> Send:
    if request.feature is not None:
        group = f"cache {request.cache}" if request.cache else part
        asked = send_with(request.feature, prompts[request.prompt], limit, part, group)
        route = asked.route if request.to == "cell" else request.to
        return asked._replace(route=route, after_s=request.delay_s)
    return Send(
        prompts[request.prompt],
        part,
        f"cache {request.cache}" if request.cache else part,
        request.to,
        max_tokens=request.max_tokens or limit,
        after_s=request.delay_s,
        abandon=request.abandon,
    )


def _generated_and_given_up(cell: RecordedCell, o: Observation) -> bool:
    """Return whether the engine generated tokens for a request that has the engines to itself and no answer."""
    generated = stage_counters(cell, o, cell.answering).get("generation_tokens", 0)
    return o.abandon is not None and o.final is None and o.concurrent == 1 and generated > 0


def _grown(observations: list[Observation], name: str) -> bool:
    counted = [leg.counters for o in observations for leg in o.legs]
    counted += [counters for o in observations for counters in o.shared_counters.values()]
    return any(counters.get(name, 0) for counters in counted)
