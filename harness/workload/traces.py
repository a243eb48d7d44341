"""Random traces: requests that share prefixes, overlap, outgrow the KV pool and are given up, by a seed.

They have parameters, are asked at both endpoints, whole and in pieces, and a router mistakes some of their hand-offs.
What a request is asked with is drawn by random numbers of its own, so that a seed has kept its prompts, stages and
caches since traces had nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple, get_args

from harness.history.token_ids import common_prefix
from harness.profiles.kv_layout import recurrent, target_config
from harness.profiles.model import Profile
from harness.profiles.scenarios import (
    GRAMMARS,
    OF_TEXT,
    SAMPLED,
    Abandon,
    Api,
    Feature,
    Parameter,
    Trace,
    TraceRequest,
    askable,
    is_chat,
    temperature_of,
    tokens_asked,
)
from harness.prompts.lengths import blocks
from harness.prompts.messages import messages_of
from harness.prompts.model import Prompt
from harness.scenarios.hand_off_mistakes import P_TOKENS
from harness.scenarios.parameters import LONG_ENOUGH
from harness.workload.parameters import parameter_fields

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

_WITH_PARAMETER = 0.6
"""Share of the requests with a parameter, of those that may have one."""
_OTHERWISE = 0.5
"""Share of the requests that are asked otherwise than for a whole completion by ids."""
_MISTAKEN = 0.15
"""Share of the traces that have mistaken hand-offs, and so run in pairs alone."""
_FEATURES: tuple[Feature | Parameter, ...] = (
    *get_args(Feature),
    *(p for p in get_args(Parameter) if p not in SAMPLED | OF_TEXT),
    *("seed", "top-p", "min-p", "siblings"),
)
"""What is drawn from; ``seed-again`` follows each ``seed``."""
_HARMLESS = ("do_remote_decode", "remote_num_tokens", "remote_blocks_expiry_time", "tp_size")
_SOURCE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")
_LOST_SOURCE = 0.2
"""Share of the parameters that get lost without which D does not know where to read. It is started again then."""
_SIBLINGS = parameter_fields("siblings", (0, 0), lambda _: "")["n"]


class _Surface(NamedTuple):
    """What requests of a profile may be asked with."""

    draw: random.Random
    profile: Profile
    prompts: dict[str, Prompt]
    all_parameters: bool
    """Whether grammars and seeds are drawn. With recurrent state a CPU engine ends where a grammar leaves fewer drafts,
    and where a seeded prompt is computed in parts, as all of such a model are."""
    said: dict[str, bool]
    """Whether there are messages that are rendered to a prompt, by its id."""


def random_traces(profile: Profile, prompts: Sequence[Prompt], seed: int) -> Iterator[Trace]:
    """Yield traces without end. The same profile, prompts and seed give the same ones."""
    draw = random.Random(seed)
    surface = _surface(profile, prompts, seed)
    size = profile.engine.block_size
    for number in count():
        base = draw.choice(prompts)
        relatives = [p for p in prompts if common_prefix(base.ids, p.ids) >= size] or [base]
        stages = tuple(_stage(draw, profile, prompts, relatives) for _ in range(draw.randint(*_STAGES)))
        # At least one request that is answered to its end, by engines that the others have left as they are.
        last = (TraceRequest(prompt=base.id, cache="a"),)
        asked = _asked(surface, stages)
        yield Trace(id=f"trace-{seed}-{number}", kind="trace", stages=(*asked, last))


def _surface(profile: Profile, prompts: Sequence[Prompt], seed: int) -> _Surface:
    plain = profile.engine.device != "cpu" or not recurrent(target_config(profile))
    known = {p.id: p for p in prompts}
    return _Surface(random.Random(f"surface {seed}"), profile, known, plain, said={})


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


def _asked(surface: _Surface, stages: Sequence[tuple[TraceRequest, ...]]) -> tuple[tuple[TraceRequest, ...], ...]:
    """Return the same requests, some with a parameter, some asked otherwise, and in some traces with mistaken hand-offs
    among them."""
    if surface.draw.random() < _MISTAKEN and surface.profile.engine.pulls_by_nixl:
        # Only pairs are asked these, so that no plain engine would say what parameters change.
        return _with_mistakes(surface, stages)
    found = []
    for stage in stages:
        some = tuple(_surfaced(surface, r, alone=len(stage) == 1) for r in stage)
        seeded = tuple(r.model_copy(update={"feature": "seed-again"}) for r in some if r.feature == "seed")
        found += [some, seeded] if seeded else [some]
    return tuple(found)


def _surfaced(surface: _Surface, request: TraceRequest, alone: bool) -> TraceRequest:
    if request.abandon is not None:
        return request
    draw = surface.draw
    feature: Feature | Parameter | None = None
    if request.max_tokens is None and draw.random() < _WITH_PARAMETER:
        drawn = draw.choice(_FEATURES)
        feature = drawn if _fits(surface, request, drawn, alone) else None
    api: Api = "completion"
    if draw.random() < _OTHERWISE:
        api = draw.choice(get_args(Api))
        possible = (feature is None or askable(feature, api)) and (not is_chat(api) or _said(surface, request.prompt))
        api = api if possible else "completion"
    return request.model_copy(update={"feature": feature, "api": api})


def _fits(surface: _Surface, request: TraceRequest, feature: Feature | Parameter, alone: bool) -> bool:
    """Return whether a request can be sent with a parameter, so that its answer can be judged, and no other's is
    spoilt."""
    prompt, engine = surface.prompts[request.prompt], surface.profile.engine
    known = len(prompt.expected or ())
    if known < LONG_ENOUGH or (feature in GRAMMARS and not surface.all_parameters):
        return False
    # Each of several answers has a prompt of its own in the step.
    in_step = prompt.tokens * (_SIBLINGS if feature == "siblings" else 1)
    whole = engine.max_num_batched_tokens is None or in_step <= engine.max_num_batched_tokens
    if temperature_of(feature) and not (surface.all_parameters and alone and whole):
        return False
    asked = tokens_asked(feature, known) or known
    room = engine.max_model_len - prompt.tokens - (0 if alone else _AWAY)
    return asked <= min(room, surface.profile.workload.max_tokens)


def _said(surface: _Surface, prompt: str) -> bool:
    """Return whether a chat endpoint can be asked a prompt."""
    if prompt not in surface.said:
        folder = surface.profile.tokenizer_folder
        surface.said[prompt] = folder.is_dir() and messages_of(surface.profile, surface.prompts[prompt]) is not None
    return surface.said[prompt]


def _with_mistakes(
    surface: _Surface, stages: Sequence[tuple[TraceRequest, ...]]
) -> tuple[tuple[TraceRequest, ...], ...]:
    """Return the stages with one or two mistakes behind them, each a stage of its own."""
    draw = surface.draw
    found = list(stages)
    for _ in range(draw.randint(1, 2)):
        sent = [
            ((i, j), r)
            for i, stage in enumerate(found)
            for j, r in enumerate(stage)
            if r.to == "cell" and r.abandon is None and not r.mistaken
        ]
        if not sent or draw.random() < 0.25:
            prompt = draw.choice(list(surface.prompts))
            found.append((TraceRequest(prompt=prompt, p_tokens=P_TOKENS),))
            continue
        # Mostly the last one, whose blocks P has not used for others yet.
        place, request = sent[-1] if draw.random() < 0.7 else draw.choice(sent)
        again = TraceRequest(prompt=request.prompt, parameters_of=place, max_tokens=request.max_tokens)
        way = draw.choice(("again", "again", "together", "lost"))
        if way == "lost":
            lost = draw.choice(_SOURCE if draw.random() < _LOST_SOURCE else _HARMLESS)
            found.append((again.model_copy(update={"lost": lost}),))
        else:
            found.append((again,) * (2 if way == "together" else 1))
    return tuple(found)
