"""HTTP client of one engine: token ids in, token ids and acceptance out. Strict: anything unexpected is an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import httpx

from harness import redact
from harness.engine.answer import finish_reason, finite, handed_over, recordable, require_model, token_ids
from harness.engine.command import MODEL_NAME, Role
from harness.engine.counters import delta, parse_counters, parse_kv_blocks
from harness.engine.key import ApiKey
from harness.engine.limited import LimitedClient
from harness.errors import HandoffError, RequestTimeoutError
from harness.history import Leg, Speculation

# The empty hand-off that asks P to keep its blocks for a decode engine (NixlConnector, pull mode).
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_T = TypeVar("_T")
_COUNTER_WAIT_S = 3.0
_COUNTER_POLL_S = 0.01


class Sampling(NamedTuple):
    """``logprobs`` is how many top log-probs each position returns; a temperature of 0 is greedy decoding."""

    max_tokens: int
    logprobs: int
    temperature: float = 0.0


def request_body(prompt: Sequence[int] | str, sampling: Sampling) -> dict[str, Any]:
    """What every completion request says."""
    return {
        "model": MODEL_NAME,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": 0,
        "stream": False,
        "add_special_tokens": False,
        "return_token_ids": True,
        "logprobs": sampling.logprobs,
        "return_tokens_as_token_ids": True,
    }


class Client:
    """Talks to one engine. Keeps the last counter snapshot, so that each request costs one scrape. Times are limits of
    whole exchanges, from the first byte out to the last byte in."""

    def __init__(self, role: Role, url: str, timeout_s: float, key: ApiKey | None = None) -> None:
        self.role: Role = role
        self.url = url
        headers = key.headers if key is not None else None
        self._http = LimitedClient(base_url=url, timeout=timeout_s, headers=headers)
        self._snapshot: dict[str, float] = {}

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, timeout_s: float = 5.0) -> httpx.Response:
        return self._http.get(path, timeout=timeout_s)

    def post(self, path: str, timeout_s: float = 10.0) -> httpx.Response:
        """An empty POST. Raises HandoffError when there is no answer."""
        try:
            return self._http.post(path, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise _broken(error)(
                f"{self.role} engine: expected an answer to POST {path}, found {type(error).__name__}: {error}"
            ) from error

    @property
    def last_snapshot(self) -> dict[str, float]:
        """Counters as they were read last."""
        return self._snapshot

    def snapshot(self) -> dict[str, float]:
        """Read all counters now and remember them as the start of the next request."""
        self._snapshot = self._read(parse_counters)
        return self._snapshot

    def kv_blocks(self) -> int | None:
        """Size of the KV pool in blocks, if the engine says it."""
        return self._read(parse_kv_blocks)

    def _read(self, parse: Callable[[str], _T]) -> _T:
        """What is in the metrics now. Raises HandoffError when there are none."""
        text = self._metrics()
        try:
            return parse(text)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise HandoffError(
                f"{self.role} engine: expected metrics as Prometheus writes them, found {type(error).__name__}: "
                f"{error} in {' '.join(text.split())[:200]!r}"
            ) from error

    def _metrics(self) -> str:
        try:
            response = self._http.get("/metrics")
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise _broken(error)(
                f"{self.role} engine: expected metrics, found {type(error).__name__}: {error}"
            ) from error
        return _text(response)

    def complete(
        self,
        prompt: Sequence[int] | str,
        sampling: Sampling,
        request_id: str,
        cache_salt: str,
        kv_transfer_params: Mapping[str, Any] | None = None,
        role: Role | None = None,
        await_counters: Sequence[str] = (),
        count: bool = True,
        rescore_from: int | None = None,
        timeout_s: float | None = None,
    ) -> Leg:
        """Send one completion request and return what came back, counters included.

        ``await_counters`` names counters that must grow before the snapshot is taken: engines publish them with
        the step after the request, so the scrape is repeated for up to 3 s. ``count=False`` leaves counters alone,
        for requests that are not alone on the engine. ``rescore_from`` asks how likely the prompt's own tokens are
        from that position on; vLLM computes such a prompt afresh, without its prefix cache. ``timeout_s`` replaces the
        client's limit.
        Raises HandoffError on a status other than 200 or an answer of another shape.
        """
        role = role or self.role
        before = self._snapshot
        body = {**request_body(prompt, sampling), "cache_salt": cache_salt}
        if rescore_from is not None:
            body["prompt_logprobs"] = 1
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = dict(kv_transfer_params)
        start = time.monotonic()
        try:
            limit = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
            response = self._http.post(
                "/v1/completions", json=body, headers={"X-Request-Id": request_id}, timeout=limit
            )
        except httpx.HTTPError as error:
            raise _broken(error)(
                f"{role} engine: expected an answer to request {request_id}, found {type(error).__name__}: {error}"
            ) from error
        seconds = time.monotonic() - start
        leg = parse_completion(role, request_id, response.status_code, _text(response), seconds, rescore_from)
        if not count:
            return leg
        return leg.model_copy(update={"counters": self.counters_after(before, dict.fromkeys(await_counters, 1))})

    def counters_after(self, before: Mapping[str, float], awaited: Mapping[str, int]) -> dict[str, float]:
        """Growth of the counters since ``before``, once those in ``awaited`` have grown by at least as much."""
        deadline = time.monotonic() + _COUNTER_WAIT_S
        while True:
            grown = delta(before, self.snapshot())
            if all(grown.get(name, 0.0) >= count for name, count in awaited.items()) or time.monotonic() > deadline:
                return grown
            time.sleep(_COUNTER_POLL_S)


def _text(response: httpx.Response) -> str:
    """The body as UTF-8, whatever charset its header names: Python knows some that are none (``hex``, ``rot13``) and
    fails on them in ways of its own."""
    return response.content.decode("utf-8", errors="replace")


def _broken(error: httpx.HTTPError) -> type[HandoffError]:
    return RequestTimeoutError if isinstance(error, httpx.TimeoutException) else HandoffError


def parse_completion(
    role: Role, request_id: str, status: int, text: str, seconds: float, rescore_from: int | None = None
) -> Leg:
    """Turn a completion response into a Leg. Raises HandoffError when it has another shape."""
    if status != 200:
        raise HandoffError(
            f"{role} engine: expected status 200 for request {request_id}, found {status}: {redact.quoted(text, 300)}"
        )
    try:
        body = httpx.Response(200, text=text).json()
        if "error" in body:
            raise ValueError(f"an error body: {redact.quoted(str(body['error']), 200)}")
        require_model(body)
        (choice,) = body["choices"]
        logprobs = choice.get("logprobs") or {}
        leg = Leg(
            role=role,
            request_id=request_id,
            status=status,
            echoed_ids=token_ids(choice.get("prompt_token_ids")),
            output_ids=token_ids(choice.get("token_ids")),
            finish_reason=finish_reason(choice.get("finish_reason")),
            usage_prompt_tokens=(body.get("usage") or {}).get("prompt_tokens"),
            usage_completion_tokens=(body.get("usage") or {}).get("completion_tokens"),
            chosen_logprobs=_floats(logprobs.get("token_logprobs")),
            top_gaps=_gaps(logprobs.get("top_logprobs")),
            speculation=_speculation((body.get("metrics") or {}).get("speculative_decoding")),
            kv_transfer_params=handed_over(body.get("kv_transfer_params")),
            rescored=None if rescore_from is None else _rescored(choice, rescore_from),
            seconds=seconds,
        )
        return recordable(leg)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HandoffError(
            f"{role} engine: expected a completion with one choice for request {request_id}, found "
            f"{redact.quoted(str(error), 200)} in {redact.quoted(text, 200)!r}"
        ) from error


def _floats(value: Any) -> tuple[float, ...] | None:
    return None if value is None else tuple(finite(v) for v in value)


def _gaps(value: Any) -> tuple[float | None, ...] | None:
    if value is None:
        return None
    gaps: list[float | None] = []
    for position in value:
        best = sorted((finite(v) for v in (position or {}).values()), reverse=True)[:2]
        gaps.append(round(best[0] - best[1], 6) if len(best) == 2 else None)
    return tuple(gaps)


def _rescored(choice: Mapping[str, Any], start: int) -> tuple[float, ...]:
    """Per prompt token from ``start`` on, by how many nats another token would have been likelier; 0 when none."""
    ids, tables = choice["prompt_token_ids"], choice["prompt_logprobs"]
    if len(tables) != len(ids):
        raise ValueError(f"{len(tables)} prompt log-probs for {len(ids)} prompt tokens")
    out = []
    for token, table in zip(ids[start:], tables[start:], strict=True):
        best = max(finite(entry["logprob"]) for entry in table.values())
        out.append(round(best - finite(table[str(token)]["logprob"]), 6))
    return tuple(out)


def _speculation(value: Any) -> Speculation | None:
    if value is None:
        return None
    return Speculation(
        per_step_accepted=tuple(value.get("per_step_accepted") or ()),
        per_step_drafted=tuple(value.get("per_step_drafted") or ()),
        num_steps=value["num_spec_steps"],
        num_drafted=value["num_draft_tokens"],
        num_accepted=value["num_accepted_draft_tokens"],
    )
