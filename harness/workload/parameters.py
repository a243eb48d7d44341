"""Request parameters that say what the answer is, as fields of a request's body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, assert_never

from harness.profiles.scenarios import Parameter

_SEED = 11
_FIRST = 6
"""Tokens of the known answer among which an answer has to stay: it copies them, then has to begin anew, so that their
drafts are accepted and they are said again."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["question", "task", "other"]},
        "clear": {"type": "boolean"},
    },
    "required": ["kind", "clear"],
    "additionalProperties": False,
}
"""Of a question: an answer to it ends within the tokens that are asked for."""
CHOICE = ("It is a question.", "It is a task.", "It is neither of these.")
DATE = "(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"
_CHOICES = 6
"""Texts of which a regular expression has one for each token."""


def parameter_fields(
    parameter: Parameter, known: Sequence[int], text_of: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Return the fields that ask for a parameter; arguments as of ``feature_fields``."""
    middle = len(known) // 2
    half = {"allowed_token_ids": list(known[:-1:2])}
    drawn = {"seed": _SEED, **half}
    match parameter:
        case "cap-1" | "cap-2" | "cap-3" | "cap-4" | "cap-5":
            return {}
        case "ignore-eos":
            return {"ignore_eos": True}
        case "stop-at-cap" | "stop-before-cap":
            return {"stop_token_ids": [known[middle]]}
        case "include-stop":
            return {"stop": [complete_at(known, middle, 2, text_of)], "include_stop_str_in_output": True}
        case "allowed-first":
            return {"allowed_token_ids": list(known[:_FIRST])}
        case "frequency-penalty":
            return {"allowed_token_ids": list(known[:_FIRST]), "frequency_penalty": 2.0}
        case "allowed-half":
            return half
        case "presence-penalty":
            return {**half, "presence_penalty": 2.0}
        case "repetition-penalty":
            return {"repetition_penalty": 2.0}
        case "bad-words":
            return {"bad_words": [text_of([known[_FIRST]]).strip()]}
        case "regex":
            return {"structured_outputs": {"regex": _expression([text_of([t]).strip() for t in known[:-1]])}}
        case "logprobs-0" | "logprobs-1" | "logprobs-20":
            return {"logprobs": int(parameter.removeprefix("logprobs-"))}
        case "echo":
            return {"echo": True}
        case "priority":
            return {"priority": 1}
        case "logit-bias":
            return {"logit_bias": {str(known[_FIRST]): -100.0}}
        case "min-p":
            return {**drawn, "min_p": 0.8}
        case "top-p":
            return {**drawn, "top_p": 0.1}
        case "top-k":
            return {**drawn, "top_k": 1}
        case "seed" | "seed-again":
            return drawn
        case "siblings":
            return {**drawn, "n": 3}
        case "json":
            return {"structured_outputs": {"json": SCHEMA}}
        case "choice":
            return {"structured_outputs": {"choice": list(CHOICE)}}
        case "date":
            return {"structured_outputs": {"regex": DATE}}
        case "tool":
            function = {"name": "answer", "parameters": SCHEMA, "strict": True}
            chosen = {"type": "function", "function": {"name": "answer"}}
            return {"tools": [{"type": "function", "function": function}], "tool_choice": chosen}
        case _:
            assert_never(parameter)


def _expression(words: Sequence[str]) -> str:
    """Return a regular expression: the first two words of an answer, then up to eight of a few later ones."""
    return f"{words[0]}{words[1]}({'|'.join(words[3 : 3 + _CHOICES])}){{1,8}}"


def complete_at(known: Sequence[int], at: int, least: int, text_of: Callable[[Sequence[int]], str]) -> str:
    """Return the text of the fewest tokens, at least ``least``, that end with the one at ``at`` and stand nowhere
    before."""
    head = text_of(known[: at + 1])
    tails = (text_of(known[at + 1 - n : at + 1]).strip() for n in range(least, at + 2))
    return next((t for t in tails if head.find(t) == len(head) - len(t)), head)
