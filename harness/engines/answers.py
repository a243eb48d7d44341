"""The endpoints that answer a prompt, whole or in pieces: what they are sent, and their answers in one shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.engines.command import MODEL_NAME
from harness.history.records import Streamed
from harness.profiles.scenarios import Api, is_chat, is_streamed
from harness.prompts.messages import Messages

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_DATA = "data:"
_END = "[DONE]"


class Sampling(NamedTuple):
    """Sampling parameters; ``logprobs`` top log-probs are returned per position, and temperature 0 is greedy."""

    max_tokens: int
    logprobs: int
    temperature: float = 0.0


def path_of(api: Api) -> str:
    return CHAT if is_chat(api) else COMPLETIONS


def request_body(
    prompt: Sequence[int] | str | Messages,
    sampling: Sampling,
    model: str = MODEL_NAME,
    api: Api = "completion",
) -> dict[str, Any]:
    """Return the part of the body that all requests to an endpoint share."""
    asked: dict[str, Any] = {"model": model}
    if isinstance(prompt, Messages):
        asked["messages"] = [turn._asdict() for turn in prompt.turns]
        asked |= {"chat_template_kwargs": prompt.arguments} if prompt.arguments else {}
        asked["max_completion_tokens"] = sampling.max_tokens
        logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": sampling.logprobs}
    else:
        asked["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        asked["max_tokens"] = sampling.max_tokens
        logprobs = {"add_special_tokens": False, "logprobs": sampling.logprobs}
    asked |= {"temperature": sampling.temperature, "seed": 0, "stream": is_streamed(api)}
    if is_streamed(api):
        asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return {**asked, **logprobs, "return_token_ids": True, "return_tokens_as_token_ids": True}


def body_of(text: str, api: Api) -> tuple[dict[str, Any], Streamed | None]:
    """Return an answer as that of a whole completion, and how it came in pieces. Raises ValueError, KeyError or
    TypeError for what is none."""
    body, streamed = _together(text, is_chat(api)) if is_streamed(api) else (_json(text), None)
    return (_as_completion(body) if is_chat(api) and "error" not in body else body), streamed


def _json(text: str) -> dict[str, Any]:
    body = json.loads(text)
    if not isinstance(body, dict):
        raise TypeError(f"{type(body).__name__} where an object was expected")
    return body


def _together(text: str, chat: bool) -> tuple[dict[str, Any], Streamed | None]:
    """Put the pieces of a stream together; a stream that says that it failed gives that alone."""
    told = [line.removeprefix(_DATA).strip() for line in text.splitlines() if line.startswith(_DATA)]
    messages = [_json(one) for one in told if one != _END]
    failed = next((message for message in messages if "error" in message), None)
    if failed is not None:
        return failed, None
    pieces = [message for message in messages if message.get("choices")]
    if not pieces:
        raise ValueError("a stream without a piece of an answer")
    choices = []
    for piece in pieces:
        (choice,) = piece["choices"]
        choices.append(choice)
    texts = [(_delta(choice).get("content") if chat else choice.get("text")) or "" for choice in choices]
    ids = [choice.get("token_ids") for choice in choices]
    usages = [message for message in messages if not message.get("choices") and message.get("usage")]
    said = usages[-1] if usages else {}
    whole: dict[str, Any] = {
        "finish_reason": _last(choice.get("finish_reason") for choice in choices),
        "stop_reason": _last(choice.get("stop_reason") for choice in choices),
        "token_ids": None if all(one is None for one in ids) else [token for one in ids for token in one or ()],
        "logprobs": _logprobs([choice["logprobs"] for choice in choices if choice.get("logprobs")]),
    }
    body: dict[str, Any] = {"model": pieces[0].get("model"), "usage": said.get("usage"), "metrics": said.get("metrics")}
    others = {one for piece in pieces if (one := piece.get("model")) != body["model"]}
    if others:
        raise ValueError(f"pieces of {len(others) + 1} models")
    if chat:
        reasoning = [found for choice in choices if (found := _delta(choice).get("reasoning")) is not None]
        message = {"content": "".join(texts), "reasoning": "".join(reasoning) if reasoning else None}
        body |= {"prompt_token_ids": _first(piece.get("prompt_token_ids") for piece in pieces)}
        whole |= {"message": message}
        texts = [f"{_delta(choice).get('reasoning') or ''}{said}" for choice, said in zip(choices, texts, strict=True)]
    else:
        whole |= {
            "text": "".join(texts),
            "prompt_token_ids": _first(choice.get("prompt_token_ids") for choice in choices),
        }
    streamed = Streamed(
        tokens=tuple(len(one or ()) for one in ids),
        characters=tuple(map(len, texts)),
        counted=tuple((piece.get("usage") or {}).get("completion_tokens") for piece in pieces),
        ended_at=tuple(number for number, choice in enumerate(choices) if choice.get("finish_reason") is not None),
        usages=len(usages),
        closed=told[-1:] == [_END],
    )
    return {**body, "choices": [whole]}, streamed


def _delta(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    return choice.get("delta") or {}


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _last(values: Any) -> Any:
    found = [value for value in values if value is not None]
    return found[-1] if found else None


def _logprobs(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Put the log-probs of pieces together, whose lists have an entry per token."""
    if not tables:
        return None
    names = {name for table in tables for name, value in table.items() if isinstance(value, list)}
    return {name: [entry for table in tables for entry in table.get(name) or ()] for name in names}


def _arguments(message: Mapping[str, Any]) -> str:
    """Return the arguments of the tools that an answer calls, which are its text where a tool had to be called."""
    return "".join(str(call["function"]["arguments"]) for call in message.get("tool_calls") or ())


def _as_completion(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of the chat endpoint in the shape of the other one's."""
    (choice,) = body["choices"]
    message = choice["message"]
    reasoning = message.get("reasoning")
    listed = (choice.get("logprobs") or {}).get("content")
    logprobs = None
    if listed is not None:
        logprobs = {
            "token_logprobs": [entry["logprob"] for entry in listed],
            "top_logprobs": [
                {best["token"]: best["logprob"] for best in entry.get("top_logprobs") or ()} for entry in listed
            ],
        }
    taken = ("finish_reason", "stop_reason", "token_ids")
    whole = {
        **{name: choice.get(name) for name in taken},
        "prompt_token_ids": body.get("prompt_token_ids"),
        "text": f"{reasoning or ''}{message.get('content') or ''}{_arguments(message)}",
        "reasoning": reasoning,
        "logprobs": logprobs,
    }
    return {**body, "choices": [whole]}
