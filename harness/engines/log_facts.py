"""Facts about an engine's set-up, from its log: vLLM tells them nowhere else, or takes seconds to answer."""

from __future__ import annotations

import re
from typing import NamedTuple

# "Model Runner V2 requires Triton; using the V1 model runner instead." names both: what is *used* counts.
_RUNNER = re.compile(r"[Uu]sing (?:the )?(?:(V[12]) [Mm]odel [Rr]unner|[Mm]odel [Rr]unner (V[12]))")
_BACKEND = re.compile(
    r"attention backend\(s\) \['(\w+)'|[Uu]sing (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend\b"
)
_STEP_TOKENS = re.compile(
    r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)|max_num_scheduled_tokens is set to (\d+)"
)


class LogFacts(NamedTuple):
    """What is known of an engine's set-up; None is what is not."""

    model_runner: str | None
    attention_backend: str | None
    step_tokens: int | None
    """Most tokens of one step."""


def facts_in(log: str) -> LogFacts:
    """Return what the log of an engine tells."""
    return LogFacts(model_runner(log), attention_backend(log), step_tokens(log))


def model_runner(log: str) -> str:
    """Return the model runner that is used. vLLM 0.32 logs it; engines that do not log it run V1."""
    return _first(_RUNNER, log) or "V1"


def attention_backend(log: str) -> str | None:
    """Return the attention backend that is used; None if the log does not name it."""
    return _first(_BACKEND, log)


def step_tokens(log: str) -> int | None:
    """Return the scheduler's token budget for one step; None if the log does not state it."""
    found = [int(a or b) for a, b in _STEP_TOKENS.findall(log)]
    return min(found) if found else None


def _first(pattern: re.Pattern[str], log: str) -> str | None:
    found = pattern.search(log)
    return next(filter(None, found.groups())) if found else None
