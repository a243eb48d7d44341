"""Random traces: requests that share prefixes, overlap, outgrow the KV pool and are given up, by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

from harness.history.token_ids import common_prefix
from harness.profiles.model import Profile
from harness.profiles.scenarios import Abandon, Trace, TraceRequest
from harness.prompts.lengths import blocks
from harness.prompts.model import Prompt

_STAGES = (2, 4)
_SHARED = 0.7
"""Share of the requests whose prompt has blocks in common with others of the trace."""
_ABANDONED = 0.15
_IN_PREFILL = 0.05
"""Share of those given up by time that are given up at P. Few, because P keeps the blocks of one that it had just
answered until the lease ends, and hardly answers anything meanwhile."""
_LIMITED = 0.2
"""Share of the requests that ask for fewer tokens than the answer has."""
_MOST_LIMIT = 64
_ELSEWHERE = 0.15
"""Share of the requests that go to the answering engine alone."""
_DELAYS_S = (0.0, 0.0, 0.01, 0.03, 0.1)
_MOST_STEPS = 4
"""Most engine steps after which a streamed answer is left; any answer of ``_STREAMED`` tokens has more."""
_STREAMED = 40
_AWAY = 16
"""Tokens that requests beside others stay away from the end of the context: where one of a step is there, vLLM drafts
for none of them."""
_CROWD = 1.5
"""Most KV blocks that the requests of a stage need together, as a multiple of the pool."""


def random_traces(profile: Profile, prompts: Sequence[Prompt], seed: int) -> Iterator[Trace]:
    """Yield traces without end. The same profile, prompts and seed give the same ones."""
    draw = random.Random(seed)
    size = profile.engine.block_size
    for number in count():
        base = draw.choice(prompts)
        relatives = [p for p in prompts if common_prefix(base.ids, p.ids) >= size] or [base]
        stages = tuple(_stage(draw, profile, prompts, relatives) for _ in range(draw.randint(*_STAGES)))
        # At least one request that is answered to its end, by engines that the others have left as they are.
        last = (TraceRequest(prompt=base.id, cache="a"),)
        yield Trace(id=f"trace-{seed}-{number}", kind="trace", stages=(*stages, last))


def _stage(
    draw: random.Random, profile: Profile, prompts: Sequence[Prompt], relatives: Sequence[Prompt]
) -> tuple[TraceRequest, ...]:
    wanted = draw.choice((1, 1, 1, 2, 3, profile.engine.max_num_seqs + 1))
    room = float("inf") if profile.engine.kv_blocks is None else _CROWD * profile.engine.kv_blocks
    requests: list[TraceRequest] = []
    for _ in range(wanted):
        shared = draw.random() < _SHARED
        prompt = draw.choice(relatives if shared else prompts)
        most = profile.workload.max_tokens
        request = _request(draw, prompt, draw.choice("ab") if shared else "", most, alone=wanted == 1)
        context = min(profile.engine.max_model_len - _AWAY - prompt.tokens, most)
        if wanted > 1 and len(prompt.expected or ()) > context:
            request = request.model_copy(update={"max_tokens": min(request.max_tokens or context, context)})
        room -= blocks(prompt.tokens + (request.max_tokens or prompt.tokens), profile.engine.block_size)
        if requests and room < 0:
            break
        requests.append(request)
    return tuple(requests)


def _request(draw: random.Random, prompt: Prompt, cache: str, most: int, alone: bool) -> TraceRequest:
    abandon = _abandon(draw, prompt) if draw.random() < _ABANDONED else None
    limit = draw.randint(2, min(_MOST_LIMIT, most)) if abandon is None and draw.random() < _LIMITED else None
    to: Literal["cell", "local"] = "local" if draw.random() < _ELSEWHERE else "cell"
    delay_s = 0.0 if alone else draw.choice(_DELAYS_S)
    return TraceRequest(prompt=prompt.id, cache=cache, to=to, delay_s=delay_s, max_tokens=limit, abandon=abandon)


def _abandon(draw: random.Random, prompt: Prompt) -> Abandon:
    if prompt.expected is not None and len(prompt.expected) >= _STREAMED and draw.random() < 0.5:
        return Abandon(after_steps=draw.randint(1, _MOST_STEPS))
    if draw.random() < _IN_PREFILL:
        return Abandon(leg="prefill", after_s=round(draw.uniform(0.005, 0.05), 3))
    return Abandon(after_s=round(draw.uniform(0.01, 0.3), 3))
