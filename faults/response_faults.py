"""Faults in answers, as functions of an exchange in the proxy: the engine's real answer with one thing corrupted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from faults.proxy import Answer, Call, Fault, FaultError

Change = Callable[[dict[str, Any]], object]
_JSON = (("content-type", "application/json"),)


def _require_change(before: object, after: object) -> None:
    """Raise FaultError when a fault changed nothing."""
    if before == after:
        raise FaultError("the fault changed nothing")


def edited(change: Change) -> Fault:
    """Apply ``change`` to the engine's JSON, in place."""

    def fault(call: Call) -> Answer:
        answer = call.forward()
        body = answer.json
        change(body)
        _require_change(answer.json, body)
        return answer.with_json(body)

    return fault


def altered_request(change: Change) -> Fault:
    """Apply ``change`` to the harness's request; the engine's answer is real."""

    def fault(call: Call) -> Answer:
        body = call.request.json
        change(body)
        _require_change(call.request.json, body)
        return call.forward(call.request.with_json(body))

    return fault


def instead(status: int, body: bytes, headers: tuple[tuple[str, str], ...] = _JSON) -> Fault:
    """Return a fixed answer without asking the engine."""
    return lambda _: Answer(status, headers, body)


def spoiled_text(change: Callable[[bytes], bytes]) -> Fault:
    """Apply ``change`` to the bytes of the engine's answer, with a matching content length."""

    def fault(call: Call) -> Answer:
        answer = call.forward()
        body = change(answer.body)
        _require_change(answer.body, body)
        return answer._replace(body=body)

    return fault


def on_the_wire(answer: Answer, body: bytes, length: int | None = None) -> bytes:
    """Return an HTTP/1.1 answer as bytes; ``length`` is what the header claims."""
    kept = "".join(f"{k}: {v}\r\n" for k, v in answer.headers)
    size = len(answer.body) if length is None else length
    return f"HTTP/1.1 {answer.status} OK\r\n{kept}Content-Length: {size}\r\n\r\n".encode() + body


def _sent(call: Call, data: bytes) -> bool:
    """Send raw bytes; the fault has acted once they are sent while the harness listens."""
    if call.abandoned or not call.send(data):
        return False
    call.acted()
    return True


def cut(call: Call) -> None:
    """Send half of the body that the header promises, and close the connection."""
    answer = call.forward()
    _sent(call, on_the_wire(answer, answer.body[: len(answer.body) // 2]))


def closed(call: Call) -> None:
    """Close the connection without an answer."""
    call.acted()


def reset(call: Call) -> None:
    """Reset the connection without an answer."""
    call.acted()
    call.reset()


def garbage(call: Call) -> None:
    """Send bytes that are not HTTP."""
    _sent(call, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 40)


def old_http(call: Call) -> None:
    """Send an HTTP/1.0 answer without a length that ends in the middle of its JSON."""
    answer = call.forward()
    _sent(call, b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + answer.body[:-40])


def hung(call: Call) -> None:
    """Send no answer at all, and keep the connection open."""
    call.acted()
    call.wait(600)


def dripping(seconds: float) -> Fault:
    """Send the engine's answer one byte a second for ``seconds``, then the rest at once: no single read is slow."""

    def fault(call: Call) -> None:
        answer = call.forward()
        call.send(on_the_wire(answer, b""))
        for at in range(int(seconds)):
            if not _sent(call, answer.body[at : at + 1]) or call.wait(1):
                return
        call.send(answer.body[int(seconds) :])

    return fault


def padded(mebibytes: int) -> Fault:
    """Send the engine's answer behind ``mebibytes`` of white space, in pieces."""

    def fault(call: Call) -> None:
        answer = call.forward()
        length = mebibytes * 2**20 + len(answer.body)
        if not call.send(on_the_wire(answer, b"", length=length)):
            return
        blank = b" " * 2**20
        for _ in range(mebibytes):
            if not _sent(call, blank):
                return
        call.send(answer.body)

    return fault


def labelled(encoding: str) -> Fault:
    """Declare a content encoding that the engine's answer does not have."""

    def fault(call: Call) -> Answer:
        answer = call.forward()
        return answer._replace(headers=(*answer.headers, ("content-encoding", encoding)))

    return fault


def elsewhere(url: Callable[[], str]) -> Fault:
    """Forward the unchanged request to another real server."""
    return lambda call: call.forward(to=url())


# --- changes of a completion ------------------------------------------------------------------------------------


def choice(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["choices"][0]
    return found


def speculation(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["metrics"]["speculative_decoding"]
    return found


def repeat_tokens(body: dict[str, Any]) -> None:
    """Repeat one token from the middle on; every count still agrees."""
    ids = choice(body)["token_ids"]
    middle = len(ids) // 2
    ids[middle:-1] = [ids[middle]] * len(ids[middle:-1])


def drop_token(body: dict[str, Any]) -> None:
    """Drop one token, so that there is one fewer than usage says."""
    choice(body)["token_ids"].pop()


def shorten(body: dict[str, Any]) -> None:
    """Drop the last three tokens, and adjust every count."""
    found = choice(body)
    found["token_ids"] = found["token_ids"][:-3]
    for name in ("token_logprobs", "top_logprobs", "tokens", "text_offset"):
        if (found.get("logprobs") or {}).get(name):
            found["logprobs"][name] = found["logprobs"][name][:-3]
    body["usage"]["completion_tokens"] -= 3
    found["finish_reason"] = "length"


def add_token(body: dict[str, Any]) -> None:
    """Add one token, so that there is one more than usage says."""
    ids = choice(body)["token_ids"]
    ids.insert(0, ids[0])


def no_tokens(body: dict[str, Any]) -> None:
    choice(body)["token_ids"] = []
    body["usage"]["completion_tokens"] = 0


def echo_another(body: dict[str, Any]) -> None:
    """Echo the prompt with its first token doubled, as with a second BOS."""
    ids = choice(body)["prompt_token_ids"]
    ids.insert(0, ids[0])
    body["usage"]["prompt_tokens"] += 1


def steps_cut(body: dict[str, Any]) -> None:
    """Omit half of the verify steps, and adjust the totals."""
    spec = speculation(body)
    half = len(spec["per_step_accepted"]) // 2
    for name in ("per_step_accepted", "per_step_drafted"):
        spec[name] = spec[name][:half]
    spec["num_spec_steps"] = half
    spec["num_draft_tokens"] = sum(spec["per_step_drafted"])
    spec["num_accepted_draft_tokens"] = sum(spec["per_step_accepted"])


def no_drafts(body: dict[str, Any]) -> None:
    """Report zero drafts although speculation is on."""
    spec = speculation(body)
    spec.update(
        per_step_accepted=[], per_step_drafted=[], num_spec_steps=0, num_draft_tokens=0, num_accepted_draft_tokens=0
    )


def set_logprob(value: float | None) -> Change:
    def change(body: dict[str, Any]) -> None:
        choice(body)["logprobs"]["token_logprobs"][3] = value

    return change


def set_top_logprobs(value: float) -> Change:
    """Give every alternative of one token the value, so that its margin is unknown."""

    def change(body: dict[str, Any]) -> None:
        top = choice(body)["logprobs"]["top_logprobs"]
        top[3] = dict.fromkeys(top[3], value)

    return change


def set_token(value: object) -> Change:
    def change(body: dict[str, Any]) -> None:
        choice(body)["token_ids"][3] = value

    return change


def nested(_: bytes) -> bytes:
    return b"[" * 100_000


def nan_counters(text: bytes) -> bytes:
    """Set every token counter to NaN."""
    return re.sub(rb"(?m)^(vllm:generation_tokens_total.*) \S+$", rb"\1 NaN", text)


ERROR_BODY = json.dumps({"error": {"message": "internal", "type": "InternalServerError", "code": 500}}).encode()
SURROGATE = b'{"error": {"message": "\\ud800 \\u0000 <script>alert(1)</script> \\u001b[31m"}}'
HTML = b"<!DOCTYPE html><html><head><title>Welcome to nginx!</title></head><body></body></html>"
