"""Request parameters that must not change an answer, as fields of a request's body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from harness.profiles.scenarios import Feature, stop_at


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
        case "stop-string":
            return {"stop": _stop_strings(known, stop_at(feature, len(known)) or 0, text_of)}
        case "prompt-logprobs":
            return {"prompt_logprobs": 0}
        case _:
            assert_never(feature)


def _stop_strings(known: Sequence[int], last: int, text_of: Callable[[Sequence[int]], str]) -> list[str]:
    """Return two strings, one complete with the token at ``last`` and not before, and before it one that is complete a
    token later.

    Both may be accepted in one step. An engine that goes by the list instead of the text stops at the wrong one (vllm
    #49391).
    """
    return [_complete_at(known, last + 1, 1, text_of), _complete_at(known, last, 2, text_of)]


def _complete_at(known: Sequence[int], at: int, least: int, text_of: Callable[[Sequence[int]], str]) -> str:
    """Return the text of the fewest tokens, at least ``least``, that end with the one at ``at`` and stand nowhere
    before."""
    head = text_of(known[: at + 1])
    tails = (text_of(known[at + 1 - n : at + 1]).strip() for n in range(least, at + 2))
    return next((t for t in tails if head.find(t) == len(head) - len(t)), head)


def for_prefill(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for P, which gives one token."""
    return {name: value for name, value in fields.items() if name != "min_tokens"}
