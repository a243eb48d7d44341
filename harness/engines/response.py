"""Validation of an answer's values: only values that can be recorded and read back unchanged are accepted."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from harness.engines.command import MODEL_NAME
from harness.history.records import Leg

_LARGEST_ID = 2**31 - 1
"""Engines keep ids in 32 bits; vocabularies are far smaller."""

_REASON = re.compile(r"[a-z_]{1,32}")
_MOST_PARAMETERS = 2**20
"""Characters of a hand-off's parameters as JSON; the block ids of a prompt of a million tokens need half of that."""


def token_ids(value: Any) -> tuple[int, ...] | None:
    """Return a sequence of token ids as a tuple, None as None. Raises ValueError for anything else."""
    if value is None:
        return None
    for token in value:
        if type(token) is not int or not 0 <= token <= _LARGEST_ID:
            raise ValueError(f"{str(token)[:40]!r} where a token id was expected")
    return tuple(value)


def finite(value: Any) -> float:
    """Return a log-prob as a float. Raises ValueError or TypeError when it is not a finite number."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number} where a log-prob was expected")
    return number


def finish_reason(value: Any) -> str | None:
    """Return a finish reason, which is one word ("stop", "length", "abort", "error", "repetition"), or None. Raises
    ValueError for anything else."""
    if value is not None and not (isinstance(value, str) and _REASON.fullmatch(value)):
        raise ValueError(f"a finish_reason that is not a word: {str(value)[:60]!r}")
    return value


def answer_text(value: Any) -> str | None:
    """Return the text of an answer, None as None. Raises ValueError for anything else."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"a text that is none: {str(value)[:60]!r}")
    return value


def stop_reason(value: Any) -> int | str | None:
    """Return the token or the string that ended an answer, None as None. Raises ValueError for anything else."""
    if value is None or isinstance(value, str):
        return value
    if type(value) is not int or not 0 <= value <= _LARGEST_ID:
        raise ValueError(f"a stop_reason that is neither a token nor a string: {str(value)[:60]!r}")
    return value


def transfer_params(value: Any) -> dict[str, Any] | None:
    """Return P's parameters for D. Their content is free, but their size is limited, because each is recorded. Raises
    ValueError when they are not an object or too large."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"kv_transfer_params that are not an object: {str(value)[:60]!r}")
    size = len(json.dumps(value))
    if size > _MOST_PARAMETERS:
        raise ValueError(f"kv_transfer_params of {size:,} characters, more than {_MOST_PARAMETERS:,}")
    return value


def require_model(body: dict[str, Any], wanted: str = MODEL_NAME) -> None:
    """Raise ValueError when the answer names a model other than the requested one."""
    model = body.get("model", wanted)
    if model != wanted:
        raise ValueError(
            f"an answer from the model {str(model)[:80]!r} where one from the model {wanted!r} was expected"
        )


def recordable(leg: Leg) -> Leg:
    """Return the leg if its record can be read back unchanged. Raises ValueError otherwise: JSON would lose or change
    NaN and lone surrogates."""
    if Leg.model_validate_json(leg.model_dump_json()) != leg:
        raise ValueError("values that JSON cannot carry")
    return leg
