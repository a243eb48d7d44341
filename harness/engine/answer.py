"""What an answer's values may be: only what can be recorded and read again as it was."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from harness.engine.command import MODEL_NAME
from harness.history import Leg

_LARGEST_ID = 2**31 - 1
"""Vocabularies have up to some 260,000 entries, and engines keep ids in 32 bits."""

_REASON = re.compile(r"[a-z_]{1,32}")
_MOST_PARAMETERS = 2**20
"""Characters of a hand-off's parameters as JSON. Block ids of a prompt of a million tokens need half of it."""


def token_ids(value: Any) -> tuple[int, ...] | None:
    """Raises ValueError for anything but token ids."""
    if value is None:
        return None
    for token in value:
        if type(token) is not int or not 0 <= token <= _LARGEST_ID:
            raise ValueError(f"{str(token)[:40]!r} where a token id was expected")
    return tuple(value)


def finite(value: Any) -> float:
    """A log-prob. Raises ValueError or TypeError when it is none, NaN or infinite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} where a log-prob was expected")
    return number


def finish_reason(value: Any) -> str | None:
    """A word, as every reason of vLLM is ("stop", "length", "abort", "error", "repetition"). Raises ValueError."""
    if value is not None and not (isinstance(value, str) and _REASON.fullmatch(value)):
        raise ValueError(f"a finish_reason that is no word: {str(value)[:60]!r}")
    return value


def handed_over(value: Any) -> dict[str, Any] | None:
    """What P says to D: of any content, which D gets as it is, but not of any size, since each is recorded. Raises
    ValueError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"kv_transfer_params that are no object: {str(value)[:60]!r}")
    size = len(json.dumps(value))
    if size > _MOST_PARAMETERS:
        raise ValueError(f"kv_transfer_params of {size:,} characters, more than {_MOST_PARAMETERS:,}")
    return value


def require_model(body: dict[str, Any]) -> None:
    """Raises ValueError when the answer names another model than the one that was asked."""
    model = body.get("model", MODEL_NAME)
    if model != MODEL_NAME:
        raise ValueError(
            f"an answer of the model {str(model)[:80]!r} where one of the model {MODEL_NAME!r} was expected"
        )


def recordable(leg: Leg) -> Leg:
    """The leg, when what is written of it can be read again. Raises ValueError otherwise: of NaN, of lone surrogates
    and of numbers beyond 64 bits, a record would be lost or another one."""
    for count in _counts(leg):
        if abs(count) >= 2**63:
            raise ValueError(f"{str(count)[:40]} where a count was expected")
    if Leg.model_validate_json(leg.model_dump_json()) != leg:
        raise ValueError("values that JSON cannot carry")
    return leg


def _counts(leg: Leg) -> list[int]:
    spec = leg.speculation
    found = [leg.usage_prompt_tokens or 0, leg.usage_completion_tokens or 0]
    if spec is not None:
        found += [*spec.per_step_accepted, *spec.per_step_drafted, spec.num_steps, spec.num_drafted, spec.num_accepted]
    return found
