"""Request parameters as fields of a request's body: those that must not change an answer, and the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.profiles.scenarios import Feature, Parameter, stop_at
from harness.workload.parameters import complete_at, parameter_fields


def feature_fields(
    feature: Feature | Parameter, known: Sequence[int], text_of: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
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
        case "stop-string":
            return {"stop": _stop_strings(known, stop_at(feature, len(known)) or 0, text_of)}
        case "prompt-logprobs":
            return {"prompt_logprobs": 0}
        case _:
            return parameter_fields(feature, known, text_of)


def _stop_strings(known: Sequence[int], last: int, text_of: Callable[[Sequence[int]], str]) -> list[str]:
    """Return two strings, one complete with the token at ``last`` and not before, and before it one that is complete a
    token later.

    Both may be accepted in one step. An engine that goes by the list instead of the text stops at the wrong one (vllm
    #49391).
    """
    return [complete_at(known, last + 1, 1, text_of), complete_at(known, last, 2, text_of)]


def for_prefill(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for P, which gives one token of one answer."""
    return {name: value for name, value in fields.items() if name not in ("min_tokens", "n")}
