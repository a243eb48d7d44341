"""Defects of the API server: what is lost between the engine and the user, in streams and at the chat endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from harness.mutants.hooks import Active, patch
from harness.mutants.model import PAIR, SINGLE, Mutant, Trial, declare, in_both, in_pair, in_single

_APIS = "apis"
_STREAMS = "vllm.entrypoints.openai.completion.serving"
_CHATS = "vllm.entrypoints.openai.chat_completion.serving"
_STATE = "vllm.v1.engine.output_processor"
_MARK = "data: "

declare(
    Mutant(
        "N40",
        "a stream loses the first token of a piece that holds several",
        "class of vllm #55195, #30866",
        "decode",
        "RequestState._new_completion_output leaves it out of a delta, with its text and log-probs",
    ),
    Trial(in_both(_APIS), "delivery", ("streamed",), clean=(*PAIR, *SINGLE)),
)


@patch("N40", _STATE, "RequestState._new_completion_output", ("self", "token_ids", "finish_reason", "stop_reason"))
def _n40(original: Any, active: Active, self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any) -> Any:
    output = original(self, token_ids, finish_reason, stop_reason)
    if self.output_kind.name == "DELTA" and len(output.token_ids) > 1 and active():
        active.fired()
        output.token_ids = list(output.token_ids)[1:]
        output.text = _without_first_word(output.text)
        if output.logprobs:
            output.logprobs = output.logprobs[1:]
    return output


def _without_first_word(text: str) -> str:
    """Return a text without its first word and what is in front of it."""
    head, space, rest = text.lstrip().partition(" ")
    return space + rest if head else text


Change = Callable[[dict[str, Any], dict[str, int]], bool]
"""Changes an event of a stream, and says whether it did. The counts are the stream's own, empty at first."""


async def _changed(events: AsyncIterator[str], active: Active, change: Change) -> AsyncIterator[str]:
    """Yield the events of a stream, changed."""
    counts: dict[str, int] = {}
    async for event in events:
        if not active() or not event.startswith(_MARK + "{"):
            yield event
            continue
        body = json.loads(event.removeprefix(_MARK))
        if change(body, counts):
            active.fired()
            yield f"{_MARK}{json.dumps(body)}\n\n"
        else:
            yield event


declare(
    Mutant(
        "N41",
        "a chat stream loses the text of a piece that holds several tokens",
        "class of vllm #55195, #30866",
        "decode",
        "chat_completion_stream_generator sends the ids of such a piece without the first word",
    ),
    Trial(in_both(_APIS), "text", ("text",), clean=(*PAIR, *SINGLE)),
)


@patch("N41", _CHATS, "OpenAIServingChat.chat_completion_stream_generator", ("self", "request", "result_generator"))
def _n41(original: Any, active: Active, *args: Any, **kwargs: Any) -> Any:
    def change(body: dict[str, Any], _counts: dict[str, int]) -> bool:
        choice: dict[str, Any] = next(iter(body.get("choices") or ()), {})
        if len(choice.get("token_ids") or ()) < 2:
            return False
        choice["delta"]["content"] = _without_first_word(choice["delta"].get("content") or "")
        return True

    return _changed(original(*args, **kwargs), active, change)


declare(
    Mutant(
        "N42",
        "the chat endpoint adds special tokens to a prompt that was handed over",
        "class of vllm #44151",
        "decode",
        "ChatCompletionRequest.build_tok_params forces add_special_tokens where kv_transfer_params came",
    ),
    Trial(in_pair(_APIS), "input", ("echoed-prompt",), clean=(*in_single(_APIS), *PAIR)),
)


@patch(
    "N42",
    "vllm.entrypoints.openai.chat_completion.protocol",
    "ChatCompletionRequest.build_tok_params",
    ("self", "model_config"),
)
def _n42(original: Any, active: Active, self: Any, model_config: Any) -> Any:
    if self.kv_transfer_params is not None and active():
        active.fired()
        self.add_special_tokens = True
    return original(self, model_config)


declare(
    Mutant(
        "N43",
        "a stream says that nothing was cached",
        "usage that is taken before it is known",
        "decode",
        "RequestState._new_request_output has no cached tokens in deltas",
    ),
    Trial(in_single(_APIS), "delivery", ("cached-tokens",), clean=(*PAIR, *SINGLE)),
)


@patch("N43", _STATE, "RequestState._new_request_output", ("self", "external_req_id", "outputs", "finished"))
def _n43(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    if self.output_kind.name == "DELTA" and output.num_cached_tokens and active():
        active.fired()
        output.num_cached_tokens = 0
    return output


declare(
    Mutant(
        "N44",
        "the usage of a stream counts pieces instead of tokens",
        "usage that takes every piece for a token",
        "decode",
        "completion_stream_generator says how many pieces it sent",
    ),
    Trial(in_both(_APIS), "delivery", ("streamed", "response-invariants"), clean=(*PAIR, *SINGLE)),
)


@patch("N44", _STREAMS, "OpenAIServingCompletion.completion_stream_generator", ("self", "request", "engine_inputs"))
def _n44(original: Any, active: Active, *args: Any, **kwargs: Any) -> Any:
    def change(body: dict[str, Any], counts: dict[str, int]) -> bool:
        counts["pieces"] = counts.get("pieces", 0) + bool(body.get("choices"))
        if not body.get("usage"):
            return False
        body["usage"]["completion_tokens"] = counts["pieces"]
        return True

    return _changed(original(*args, **kwargs), active, change)


declare(
    Mutant(
        "N45",
        "a stream ends without a finish reason",
        "a last piece of several tokens whose end is overlooked",
        "decode",
        "completion_stream_generator leaves the finish reason out of a last piece that holds several tokens",
    ),
    Trial(in_both(_APIS), "delivery", ("streamed", "response-invariants"), clean=(*PAIR, *SINGLE)),
)


@patch("N45", _STREAMS, "OpenAIServingCompletion.completion_stream_generator", ("self", "request", "engine_inputs"))
def _n45(original: Any, active: Active, *args: Any, **kwargs: Any) -> Any:
    def change(body: dict[str, Any], _counts: dict[str, int]) -> bool:
        choice: dict[str, Any] = next(iter(body.get("choices") or ()), {})
        if choice.get("finish_reason") is None or len(choice.get("token_ids") or ()) < 2:
            return False
        choice["finish_reason"] = None
        return True

    return _changed(original(*args, **kwargs), active, change)
