"""Answers that fault drills showed to pass, to crash the harness or to cost a record: they are refused by name."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest

from harness.engines.answers import Sampling
from harness.engines.client import Client, parse_completion
from harness.engines.counters import parse_counters
from harness.errors import HandoffError
from harness.history.engine_interfaces import PER_REQUEST
from harness.history.records import Leg
from harness.history.verdict import Verdict
from harness.judging.checks.drafting import drafts_happened
from tests.support.builders import change_final, engine, history, observation, view, with_run


def answer(**changes: object) -> dict:
    choice = {
        "token_ids": [1, 2, 3],
        "prompt_token_ids": [4, 5],
        "finish_reason": "length",
        "logprobs": {"token_logprobs": [-0.1] * 3, "top_logprobs": [{"a": -0.1, "b": -3.0}] * 3},
    }
    return {"model": "target", "choices": [choice | changes]}


def parsed(body: dict) -> Leg:
    return parse_completion("single", "id", 200, json.dumps(body), 0.1)


def test_a_right_answer_is_taken():
    assert parsed(answer()).output_ids == (1, 2, 3)


@pytest.mark.parametrize("token", [10**400, 2**70, 2**31, -1, 1.5, "7", True, None], ids=lambda v: str(v)[:12])
def test_token_ids_are_small_whole_numbers(token):
    with pytest.raises(HandoffError, match="where a token id was expected"):
        parsed(answer(token_ids=[1, token]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 10**400])
@pytest.mark.parametrize("where", ["chosen", "top"])
def test_log_probs_are_finite(value, where):
    chosen = [-0.1, value, -0.1] if where == "chosen" else [-0.1] * 3
    top = [{"a": value, "b": -1.0}] if where == "top" else [{"a": -0.1}]
    with pytest.raises(HandoffError, match="where a log-prob was expected"):
        parsed(answer(logprobs={"token_logprobs": chosen, "top_logprobs": top * 3}))


def test_what_cannot_be_written_and_read_again_is_no_answer():
    for body in (
        answer(finish_reason="\ud800"),
        answer() | {"kv_transfer_params": {"a": float("nan")}},
        answer() | {"usage": {"prompt_tokens": 2**70}},
    ):
        with pytest.raises(HandoffError, match="expected a completion"):
            parsed(body)


def test_an_answer_of_another_model_is_refused():
    with pytest.raises(HandoffError, match="'another' where one from the model 'target'"):
        parsed(answer() | {"model": "another"})


@pytest.mark.parametrize(
    "text", ["<!DOCTYPE html><p>hello", "vllm:generation_tokens_total NaN\n", "vllm:num_preemptions_total{ 1\n"]
)
def test_metrics_of_another_shape_are_a_broken_exchange(text, monkeypatch):
    client = Client("decode", "http://127.0.0.1:1", 1.0)
    monkeypatch.setattr(client, "_metrics", lambda _: text)
    with pytest.raises(HandoffError, match="expected metrics in the format of Prometheus"):
        client.snapshot()
    client.close()
    with pytest.raises(ValueError):
        parse_counters(text)


def test_an_engine_that_is_asked_for_acceptance_and_omits_it_is_unknown():
    told = engine("single-eagle3", "single").model_copy(
        update={"argv": ("--per-request-spec-decode-metrics", "detailed")}
    )
    counters = {"drafts": 7.0, "accepted_at_0": 7.0}
    silent = change_final(observation("single-eagle3"), speculation=None, counters=counters)

    def judged(**changes: object):
        recorded = history([silent], engines=(told.model_copy(update=changes.pop("engine", {})),))
        return drafts_happened(view(with_run(recorded, **changes), "single-eagle3"))

    found = judged()
    assert found.verdict is Verdict.UNKNOWN
    assert "acceptance figures in the response" in found.findings[0].message
    # Versions that cannot report it are judged by counters, as they always were.
    assert judged(lacking={PER_REQUEST: "…"}).verdict is Verdict.PASS
    assert judged(engine={"argv": ()}).verdict is Verdict.PASS


@pytest.mark.parametrize("charset", ["hex", "rot13", "idna", "undefined", "utf-7", "no such"])
def test_charset_of_an_answer_changes_nothing(charset, monkeypatch):
    """Python knows charsets that are none, and fails on them in ways of its own."""
    served = httpx.Response(
        200,
        content=json.dumps(answer()).encode(),
        headers={"Content-Type": f"application/json; charset={charset}"},
        request=httpx.Request("POST", "http://127.0.0.1:1/v1/completions"),
    )
    client = Client("single", "http://127.0.0.1:1", 1.0)
    monkeypatch.setattr(client._http, "post", lambda *_, **__: served)
    monkeypatch.setattr(client._http, "get", lambda *_, **__: served)
    assert client.complete([4, 5], Sampling(3, 2), "id", "salt", count=False).output_ids == (1, 2, 3)
    with pytest.raises(HandoffError, match="expected metrics in the format of Prometheus"):
        client.snapshot()
    client.close()


def test_an_answer_of_an_adapter_is_taken_where_it_was_asked(monkeypatch):
    client = Client("decode", "http://127.0.0.1:1", 1.0)
    said = json.dumps(answer() | {"model": "odd-words"})
    monkeypatch.setattr(client._http, "post", lambda *_, **__: httpx.Response(200, text=said))
    sampling = Sampling(8, 2, 0.0)
    leg = client.complete([1, 2], sampling, "r", "salt", count=False, fields={"model": "odd-words"})
    assert leg.status == 200
    with pytest.raises(HandoffError, match="'odd-words' where one from the model 'target'"):
        client.complete([1, 2], sampling, "r", "salt", count=False)


@pytest.mark.parametrize(("status", "words"), [(200, ""), (404, "expected status 200 for the adapter /there")])
def test_an_adapter_is_loaded_or_the_request_not_sent(status, words, monkeypatch):
    client, asked = Client("decode", "http://127.0.0.1:1", 1.0), []

    def post(path, json, timeout):
        asked.append((path, json))
        return httpx.Response(status, text="No adapter found")

    monkeypatch.setattr(client._http, "post", post)
    with pytest.raises(HandoffError, match=words) if words else contextlib.nullcontext():
        client.load_adapter("some", "/there")
    assert asked == [
        ("/v1/load_lora_adapter", {"lora_name": "some", "lora_path": "/there", "load_inplace": True}),
    ]
