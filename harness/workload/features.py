"""Request parameters that must not change an answer, as fields of a request's body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from harness.profiles.scenarios import Feature
from harness.scenarios.features import stop_at


def feature_fields(feature: Feature, known: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return the fields that ask for a feature.

    ``known`` are the tokens of the right answer, the last of which ends it; ``text_of`` gives the text of tokens as the
    engine's grammar sees it.
    """
    match feature:
        case "grammar":
            return {"structured_outputs": {"choice": [text_of(known[:-1])]}}
        case "min-tokens":
            return {"min_tokens": len(known) - 1}
        case "stop-token" | "stop-at-once":
            return {"stop_token_ids": [known[stop_at(feature, len(known)) or 0]]}
        case "prompt-logprobs":
            return {"prompt_logprobs": 0}
        case _:
            assert_never(feature)


def for_prefill(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for P, which gives one token."""
    return {name: value for name, value in fields.items() if name != "min_tokens"}
