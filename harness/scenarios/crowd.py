"""Prompts that are sent cold, too, in crowds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import Crowd
from harness.prompts.lengths import blocks
from harness.prompts.model import Prompt
from harness.scenarios.base import ORDER_S, Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.possible import pool_of, too_many
from harness.scenarios.proving import batched, stage_counters, step_overflows

PROVEN = 0.9
"""Share of the crowds that must prove the state: now and then prompts fill a step exactly, or answers are short."""


class CrowdKind(Kind[Crowd]):
    def stages(self, config: Crowd, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [[_together(config, crowd)] for crowd in crowds(config, chosen)]

    def impossible(self, config: Crowd, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        return too_many(config.together, profile)

    def gaps(self, config: Crowd, seen: Occurrence) -> Iterator[Gap]:
        """Prove of a crowd what the scenario says that it proves."""
        cell, parts = seen.cell, seen.parts
        requests = list(parts.values())
        first = requests[0]
        if "batched" in config.proves:
            yield from batched(cell, requests, stage_counters(cell, first, cell.answering))
        if "chunked" in config.proves:
            yield from step_overflows(cell, requests)
        if "preempted" in config.proves:
            found = stage_counters(cell, first, cell.answering).get("preemptions", 0)
            if found < 1:
                yield Gap(first, "expected at least one preemption while the KV pool was over-committed, found none")

    def enough(self, rounds: int) -> int:
        return math.ceil(PROVEN * rounds)

    def draws(self, prompt: Prompt, least: int) -> bool:
        return True

    def not_drawn(self, config: Crowd, profile: Profile, chosen: Sequence[Prompt]) -> str | None:
        size, pool, budget = profile.engine.block_size, profile.engine.kv_blocks, profile.engine.max_num_batched_tokens
        for crowd in crowds(config, chosen):
            tokens, most = sum(p.tokens for p in crowd), profile.workload.max_tokens
            if "chunked" in config.proves and budget is not None and tokens <= budget:
                return (
                    f"a crowd of {tokens} tokens fits into one step (engine.max_num_batched_tokens = {budget}); "
                    "lower the budget or send more together"
                )
            if "preempted" in config.proves and pool is not None:
                wanted = sum(blocks(p.tokens + most, size) for p in crowd)
                if wanted <= pool - 1:
                    return pool_of(f"fewer than the {wanted + 1} blocks that a crowd and its answers need", pool)
        return None


def crowds(config: Crowd, chosen: Sequence[Prompt]) -> list[list[Prompt]]:
    """Divide prompts into crowds of at most ``together``, whose sizes differ by one at most."""
    count = math.ceil(len(chosen) / config.together)
    return [list(chosen[n::count]) for n in range(count)]


def _together(config: Crowd, crowd: Sequence[Prompt]) -> Stage:
    sends = [Send(p, f"r{n}", f"c{n}", max_tokens=config.max_tokens, after_s=n * ORDER_S) for n, p in enumerate(crowd)]
    return Stage(tuple(sends), hold="first")
