"""Answers of both endpoints, whole and in pieces, become the same record."""

from __future__ import annotations

import json

import pytest

from harness.engines.answers import Sampling, path_of, request_body
from harness.engines.client import parse_completion
from harness.errors import HandoffError
from harness.prompts.datasets import Turn
from harness.prompts.messages import Messages

IDS, TEXT, PROMPT = [7, 8, 9], "a b c", [1, 2]
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
SPEC = {"per_step_accepted": [1], "per_step_drafted": [3]}
METRICS = {"speculative_decoding": {**SPEC, "num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 1}}


def logprobs(ids):
    return {
        "token_logprobs": [-0.1] * len(ids),
        "top_logprobs": [{f"token_id:{i}": -0.1, "token_id:5": -3.1} for i in ids],
    }


def chat_logprobs(ids):
    def named(i, value):
        return {"token": f"token_id:{i}", "logprob": value}

    return {"content": [{**named(i, -0.1), "top_logprobs": [named(i, -0.1), named(5, -3.1)]} for i in ids]}


def piece(ids, text, end=None, **more):
    told = {"text": text, "token_ids": ids, "logprobs": logprobs(ids), "finish_reason": end, **more}
    return {"model": "target", "choices": [told]}


def chat_piece(ids, text, end=None, **more):
    told = {"delta": {"content": text, **more}, "token_ids": ids, "logprobs": chat_logprobs(ids), "finish_reason": end}
    return {"model": "target", "choices": [told]}


def stream(*pieces, usage=True, end="data: [DONE]\n\n"):
    events = [*pieces, *([{"model": "target", "choices": [], "usage": USAGE, "metrics": METRICS}] if usage else [])]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


WHOLE = {
    "completion": json.dumps(piece(IDS, TEXT, "stop", prompt_token_ids=PROMPT) | {"usage": USAGE, "metrics": METRICS}),
    "completion-stream": stream(
        piece([7], "a", prompt_token_ids=PROMPT) | {"usage": {"completion_tokens": 1}}, piece([8, 9], " b c", "stop")
    ),
    "chat": json.dumps(
        {
            "model": "target",
            "usage": USAGE,
            "metrics": METRICS,
            "prompt_token_ids": PROMPT,
            "choices": [
                {
                    "message": {"role": "assistant", "content": TEXT},
                    "token_ids": IDS,
                    "logprobs": chat_logprobs(IDS),
                    "finish_reason": "stop",
                }
            ],
        }
    ),
    "chat-stream": stream(
        {"model": "target", "choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": PROMPT},
        chat_piece([7], "a"),
        chat_piece([8, 9], " b c", "stop"),
    ),
}


def parsed(text, api="completion-stream"):
    return parse_completion("single", "r", 200, text, 0.1, api=api)


@pytest.mark.parametrize("api", WHOLE)
def test_an_answer_is_recorded_alike_however_it_came(api):
    whole = parsed(WHOLE["completion"], "completion")
    found = parsed(WHOLE[api], api)
    assert found.model_copy(update={"streamed": None}) == whole
    assert (found.cached_tokens, found.runner_ups, found.text) == (1, (5, 5, 5), TEXT)
    assert (found.streamed is not None) is api.endswith("-stream")


def test_the_record_of_a_stream_says_how_it_came():
    found = parsed(WHOLE["completion-stream"]).streamed
    assert found is not None
    assert (found.tokens, found.characters, found.counted) == ((1, 2), (1, 4), (1, None))
    assert (found.ended_at, found.usages, found.closed) == ((1,), 1, True)
    cut = parsed(stream(piece([7], "a"), usage=False, end=""))
    assert cut.streamed is not None and cut.finish_reason is None and cut.usage_completion_tokens is None
    assert (cut.streamed.ended_at, cut.streamed.usages, cut.streamed.closed) == ((), 0, False)


def test_reasoning_is_part_of_the_text():
    found = parsed(stream(chat_piece([7], None, reasoning="why "), chat_piece([8, 9], "b", "stop")), "chat-stream")
    assert (found.text, found.reasoning) == ("why b", "why ")
    assert found.streamed is not None and found.streamed.characters == (4, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (stream(piece([7], "a"), {"error": {"message": "engine died"}}), "engine died"),
        (stream(), "a stream without a piece"),
        ("", "a stream without a piece"),
        (stream({**piece([7], "a"), "model": "other"}, piece([8], "b")), "pieces of 2 models"),
        (stream({"choices": [{}, {}]}), "too many values"),
        ("data: [1]\n\n", "list where an object was expected"),
        ("data: {", "expected a completion"),
    ],
)
def test_a_stream_that_is_no_answer_is_refused(text, words):
    with pytest.raises(HandoffError, match=words):
        parsed(text)


def test_each_endpoint_is_asked_in_its_own_words():
    sampling = Sampling(5, 2)
    messages = Messages((Turn("user", "hello"),), {"date_string": "26 Jul 2024"})
    chat = request_body(messages, sampling, api="chat-stream")
    assert (path_of("chat-stream"), path_of("completion")) == ("/v1/chat/completions", "/v1/completions")
    assert chat["messages"] == [{"role": "user", "content": "hello"}] and chat["max_completion_tokens"] == 5
    assert (chat["logprobs"], chat["top_logprobs"], chat["stream"]) == (True, 2, True)
    assert chat["chat_template_kwargs"] == messages.arguments and chat["stream_options"]["include_usage"]
    assert not {"prompt", "add_special_tokens", "max_tokens"} & chat.keys()
    plain = request_body([1, 2], sampling)
    assert (plain["prompt"], plain["stream"], "stream_options" in plain) == ([1, 2], False, False)
