"""HTTP client of one engine: token ids in, token ids and acceptance out. Any unexpected answer is an error."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import httpx

from harness import redact
from harness.engines.answers import Sampling, body_of, path_of, request_body
from harness.engines.api_key import ApiKey
from harness.engines.command import MODEL_NAME
from harness.engines.counters import ALL, READ_ONLY, KvPool, delta, parse_counters, parse_kv_pool
from harness.engines.http import LEAVE_AFTER, LimitedClient
from harness.engines.response import (
    answer_text,
    finish_reason,
    finite,
    recordable,
    require_model,
    stop_reason,
    token_ids,
    transfer_params,
)
from harness.errors import AbandonedError, FailedAnswerError, HandoffError, RefusedError, RequestTimeoutError
from harness.history.records import TOPS, Leg, Preferred, Sibling, Speculation, leg_role
from harness.profiles.cells import Role
from harness.profiles.scenarios import Abandon, Api
from harness.prompts.messages import Messages

# The parameters that ask P to keep its blocks for a decode engine (NixlConnector, pull mode).
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_T = TypeVar("_T")
_TOKEN = re.compile(r"token_id:(\d{1,10})")
"""A token as engines name it with ``return_tokens_as_token_ids``."""
_BAD_REQUEST = 400
_COUNTER_WAIT_S = 3.0
_SECOND_WAIT_S = 0.5
"""Wait for counters after they had not grown in time for the request before: an engine that moves no KV never counts
any."""
_COUNTER_POLL_S = 0.01


class Client:
    """The client of one engine. It keeps the last counter snapshot, so that each request costs one scrape. Timeouts
    are limits of whole exchanges, from the first byte out to the last byte in."""

    def __init__(
        self,
        role: Role,
        url: str,
        timeout_s: float,
        key: ApiKey | None = None,
        model: str = MODEL_NAME,
    ) -> None:
        self.role: Role = role
        self.model = model
        """The name under which the engine serves its model."""
        self.url = url
        headers = key.headers if key is not None else None
        self._http = LimitedClient(base_url=url, timeout=timeout_s, headers=headers)
        self._snapshot: dict[str, float] = {}
        self._counters = ""
        """Path of the counters; empty until they are read for the first time."""
        self._patience_s = _COUNTER_WAIT_S

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, timeout_s: float = 5.0) -> httpx.Response:
        return self._http.get(path, timeout=timeout_s)

    def post(self, path: str, timeout_s: float = 10.0) -> httpx.Response:
        """Send an empty POST. Raises HandoffError when there is no answer."""
        with _expecting(f"{self.role} engine: expected an answer to POST {path}"):
            return self._http.post(path, timeout=timeout_s)

    def load_adapter(self, name: str, folder: str, timeout_s: float = 30.0) -> None:
        """Load a LoRA adapter under a name, in the place of one that has it. Raises HandoffError unless it is there."""
        wanted = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        with _expecting(f"{self.role} engine: expected the adapter {folder} to be loaded"):
            response = self._http.post("/v1/load_lora_adapter", json=wanted, timeout=timeout_s)
        if response.status_code != 200:
            raise HandoffError(
                f"{self.role} engine: expected status 200 for the adapter {folder}, found {response.status_code}: "
                f"{redact.quoted(_text(response), 300)}"
            )

    @property
    def last_snapshot(self) -> dict[str, float]:
        """The counters as last read."""
        return self._snapshot

    def snapshot(self) -> dict[str, float]:
        """Read all counters and remember them as the start of the next request. Raises HandoffError."""
        if self._counters:
            self._snapshot = self._read(parse_counters, self._counters)
        else:
            self._snapshot = self._read(parse_counters)
            self._counters = READ_ONLY if self._offers_only_read() else ALL
        return self._snapshot

    def _offers_only_read(self) -> bool:
        """Return whether the engine answers with the counters that are read, all of them, when asked for no others."""
        try:
            return self._read(parse_counters, READ_ONLY).keys() == self._snapshot.keys()
        except HandoffError:
            return False

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens by the engine's tokenizer. Raises HandoffError when it is not told."""
        try:
            response = self._http.post("/detokenize", json={"model": self.model, "tokens": list(ids)})
            response.raise_for_status()
            return str(response.json()["prompt"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise HandoffError(
                f"{self.role} engine: expected the text of {len(ids)} tokens from /detokenize, found "
                f"{type(error).__name__}: {error}"
            ) from error

    def kv_pool(self) -> KvPool:
        """Return the KV pool as the engine reports it. Raises HandoffError."""
        return self._read(parse_kv_pool)

    def _read(self, parse: Callable[[str], _T], path: str = ALL) -> _T:
        """Read and parse the metrics. Raises HandoffError when they cannot be read or parsed."""
        text = self._metrics(path)
        try:
            return parse(text)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise HandoffError(
                f"{self.role} engine: expected metrics in the format of Prometheus, found {type(error).__name__}: "
                f"{error} in {' '.join(text.split())[:200]!r}"
            ) from error

    def _metrics(self, path: str) -> str:
        with _expecting(f"{self.role} engine: expected metrics"):
            return _text(self._http.get(path).raise_for_status())

    def complete(
        self,
        prompt: Sequence[int] | str | Messages,
        sampling: Sampling,
        request_id: str,
        cache_salt: str,
        kv_transfer_params: Mapping[str, Any] | None = None,
        role: Role | None = None,
        await_counters: Sequence[str] = (),
        count: bool = True,
        rescore_from: int | None = None,
        timeout_s: float | None = None,
        abandon: Abandon | None = None,
        fields: Mapping[str, Any] = MappingProxyType({}),
        api: Api = "completion",
    ) -> Leg:
        """Send one request and return the answer, including the growth of the counters.

        ``await_counters`` names counters that must grow before the snapshot is taken: engines publish them with the
        step after the request, so the scrape is repeated for up to 3 s. ``count=False`` does not read counters, for
        requests that are not alone on the engine. ``rescore_from`` asks for the log-probs of the prompt's own tokens
        from that position on; vLLM then computes the prompt without its prefix cache. ``timeout_s`` overrides the
        client's timeout. ``abandon`` says when to give the request up. ``fields`` are added to the body. ``api`` says
        how the answer is asked for; of Messages it is at the chat endpoint.

        Raises AbandonedError when it was given up, RefusedError when the engine would not take the request,
        FailedAnswerError for another status than 200, HandoffError when there is no answer or it has an unexpected
        shape.
        """
        role = role or self.role
        before = self._snapshot
        body = {**request_body(prompt, sampling, self.model, api), "cache_salt": cache_salt, **fields}
        if rescore_from is not None:
            body["prompt_logprobs"] = 1
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = dict(kv_transfer_params)
        start = time.monotonic()
        if abandon is not None:
            response = self._begin(body, request_id, role, abandon)
        else:
            response = self._completion(body, request_id, role, timeout_s, api=api)
        seconds = time.monotonic() - start
        leg = parse_completion(
            role,
            request_id,
            response.status_code,
            _text(response),
            seconds,
            rescore_from,
            fields.get("model", self.model),
            fields.get("n", 1),
            api,
        )
        if not count:
            return leg
        return leg.model_copy(update={"counters": self.counters_after(before, dict.fromkeys(await_counters, 1))})

    def _completion(
        self,
        body: Mapping[str, Any],
        request_id: str,
        role: Role,
        timeout_s: float | None,
        extensions: Mapping[str, int] | None = None,
        api: Api = "completion",
    ) -> httpx.Response:
        limit = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        headers = {"X-Request-Id": request_id}
        with _expecting(f"{role} engine: expected an answer to request {request_id}"):
            return self._http.post(
                path_of(api), json=body, headers=headers, timeout=limit, extensions=dict(extensions or {})
            )

    def _begin(self, body: Mapping[str, Any], request_id: str, role: Role, abandon: Abandon) -> httpx.Response:
        """Send a request and give it up; return the answer if it came before that. Raises AbandonedError when it was
        given up, HandoffError when a streamed answer ended before that."""
        if abandon.after_steps is None:
            try:
                return self._completion(body, request_id, role, abandon.after_s)
            except RequestTimeoutError as error:
                raise AbandonedError(f"given up after {abandon.after_s:g} s") from error
        steps = abandon.after_steps
        streamed = self._completion({**body, "stream": True}, request_id, role, None, {LEAVE_AFTER: steps})
        text = _text(streamed)
        if streamed.status_code == 200 and text.count("\n\n") >= steps and "[DONE]" not in text:
            raise AbandonedError(f"given up after {steps} steps")
        raise HandoffError(
            f"{role} engine: expected to give up request {request_id} after the tokens of {steps} steps, found "
            f"status {streamed.status_code} and an answer that was over: {redact.quoted(text, 200)}; give it up "
            "earlier, or name a prompt with a longer answer"
        )

    def counters_after(self, before: Mapping[str, float], awaited: Mapping[str, int]) -> dict[str, float]:
        """Return the growth of the counters since ``before``.

        Waits until the counters in ``awaited`` have grown by at least the amounts given there: up to 3 s, or 0.5 s if
        the last wait was in vain.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            grown = delta(before, self.snapshot())
            if all(grown.get(name, 0.0) >= count for name, count in awaited.items()):
                self._patience_s = _COUNTER_WAIT_S
                return grown
            if time.monotonic() > deadline:
                self._patience_s = _SECOND_WAIT_S
                return grown
            time.sleep(_COUNTER_POLL_S)


def _text(response: httpx.Response) -> str:
    """Decode the body as UTF-8, whatever charset its header names: Python accepts codecs that are not charsets
    (``hex``, ``rot13``) and raises unexpected errors on them."""
    return response.content.decode("utf-8", errors="replace")


@contextlib.contextmanager
def _expecting(what: str) -> Iterator[None]:
    """Raise HandoffError, or RequestTimeoutError, which says ``what`` was expected, when an exchange fails."""
    try:
        yield
    except httpx.HTTPError as error:
        kind = RequestTimeoutError if isinstance(error, httpx.TimeoutException) else HandoffError
        raise kind(f"{what}, found {type(error).__name__}: {error}") from error


def parse_completion(
    role: Role,
    request_id: str,
    status: int,
    text: str,
    seconds: float,
    rescore_from: int | None = None,
    model: str = MODEL_NAME,
    answers: int = 1,
    api: Api = "completion",
) -> Leg:
    """Turn a completion response into a Leg. Raises RefusedError for status 400, FailedAnswerError for others than 200,
    HandoffError when it is not a valid completion."""
    if status != 200:
        raise (RefusedError if status == _BAD_REQUEST else FailedAnswerError)(
            f"{role} engine: expected status 200 for request {request_id}, found {status}: {redact.quoted(text, 300)}",
            role=leg_role(role),
            status=status,
            words=redact.quoted(text, 300),
        )
    try:
        body, streamed = body_of(text, api)
        if "error" in body:
            _refused_in_a_stream(role, request_id, body["error"])
            raise ValueError(f"an error body: {redact.quoted(str(body['error']), 200)}")
        require_model(body, model)
        choice, *others = body["choices"]
        if len(others) + 1 != answers:
            raise ValueError(f"{len(others) + 1} choices where {answers} were asked for")
        logprobs, usage = _of_output(choice, choice.get("logprobs") or {}), body.get("usage") or {}
        best = _best_two(logprobs.get("top_logprobs"))
        scored = None if rescore_from is None else _rescored(choice, rescore_from)
        leg = Leg(
            role=leg_role(role),
            request_id=request_id,
            status=status,
            echoed_ids=token_ids(choice.get("prompt_token_ids")),
            output_ids=token_ids(choice.get("token_ids")),
            finish_reason=finish_reason(choice.get("finish_reason")),
            stop_reason=stop_reason(choice.get("stop_reason")),
            text=answer_text(choice.get("text")) if rescore_from is None else None,
            reasoning=answer_text(choice.get("reasoning")),
            usage_prompt_tokens=usage.get("prompt_tokens"),
            usage_completion_tokens=usage.get("completion_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            streamed=streamed,
            chosen_logprobs=_floats(logprobs.get("token_logprobs")),
            top_gaps=None if best is None else tuple(map(_gap, best)),
            runner_ups=None if best is None else tuple(map(_runner_up, best)),
            top_logprobs=_top_logprobs(logprobs.get("top_logprobs")),
            siblings=tuple(map(_sibling, others)),
            speculation=_speculation((body.get("metrics") or {}).get("speculative_decoding")),
            kv_transfer_params=transfer_params(body.get("kv_transfer_params")),
            prompt_logprobs=None if rescore_from is not None else _prompt_logprobs(choice),
            rescored=None if scored is None else tuple(s.gap for s in scored),
            rescored_logprobs=None if scored is None else tuple(round(s.logprob, 6) for s in scored),
            rescored_preferred=None if scored is None else _preferred(scored),
            seconds=seconds,
        )
        return recordable(leg)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HandoffError(
            f"{role} engine: expected a completion with one choice for request {request_id}, found "
            f"{redact.quoted(str(error), 200)} in {redact.quoted(text, 200)!r}"
        ) from error


def _refused_in_a_stream(role: Role, request_id: str, error: Any) -> None:
    """Raise RefusedError for an error that vLLM tells with status 200: the headers of a stream are sent before it looks
    at the parameters."""
    if isinstance(error, Mapping) and error.get("code") == _BAD_REQUEST:
        words = redact.quoted(str(error), 300)
        raise RefusedError(
            f"{role} engine: expected an answer to request {request_id}, found it refused in its stream: {words}",
            role=leg_role(role),
            status=_BAD_REQUEST,
            words=words,
        )


def _of_output(choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return log-probs without those of the prompt, which an answer that echoes it begins with."""
    echoed, told = len(choice.get("prompt_token_ids") or ()), len(choice.get("token_ids") or ())
    if len(logprobs.get("token_logprobs") or ()) != echoed + told:
        return logprobs
    return {name: values[echoed:] for name, values in logprobs.items()}


def _sibling(choice: Mapping[str, Any]) -> Sibling:
    return Sibling(
        output_ids=token_ids(choice.get("token_ids")),
        finish_reason=finish_reason(choice.get("finish_reason")),
        stop_reason=stop_reason(choice.get("stop_reason")),
        text=answer_text(choice.get("text")),
        chosen_logprobs=_floats((choice.get("logprobs") or {}).get("token_logprobs")),
    )


def _top_logprobs(value: Any) -> tuple[dict[int, float], ...] | None:
    """Return the log-probs of each position by token, where they are of more tokens than usual (the likeliest and the
    chosen one) and named by their ids."""
    if value is None or all(len(position or ()) <= TOPS + 1 for position in value):
        return None
    return tuple(
        {
            int(named[1]): round(finite(said), 6)
            for token, said in (table or {}).items()
            if (named := _TOKEN.fullmatch(token))
        }
        for table in value
    )


def _floats(value: Any) -> tuple[float, ...] | None:
    return None if value is None else tuple(finite(v) for v in value)


def _best_two(value: Any) -> list[list[tuple[str, float]]] | None:
    """Return the two likeliest tokens of each position with their log-probs, the likelier first."""
    if value is None:
        return None
    tables = [[(token, finite(logprob)) for token, logprob in (position or {}).items()] for position in value]
    return [sorted(table, key=lambda item: item[1], reverse=True)[:TOPS] for table in tables]


def _gap(best: list[tuple[str, float]]) -> float | None:
    return round(best[0][1] - best[1][1], 6) if len(best) == 2 else None


def _runner_up(best: list[tuple[str, float]]) -> int | None:
    """Return the id of the second-best token; None where the answer does not name one by its id."""
    named = _TOKEN.fullmatch(best[1][0]) if len(best) == 2 else None
    return int(named[1]) if named else None


def _prompt_logprobs(choice: Mapping[str, Any]) -> tuple[float | None, ...] | None:
    """Return the log-prob of each prompt token from the second one on; None if there are none in the answer."""
    tables = choice.get("prompt_logprobs")
    if tables is None:
        return None
    tokens = zip(choice["prompt_token_ids"], tables, strict=True)
    values = [float(table[str(token)]["logprob"]) for token, table in list(tokens)[1:]]
    return tuple(round(v, 6) if math.isfinite(v) else None for v in values)


class _ScoredToken(NamedTuple):
    """What the plain engine says of a token of an output that it reads."""

    logprob: float
    gap: float
    """By how many nats it prefers another one."""
    rank: int | None
    best: int


def _rescored(choice: Mapping[str, Any], start: int) -> list[_ScoredToken]:
    """Return what is said of each prompt token from ``start`` on."""
    ids, tables = choice["prompt_token_ids"], choice["prompt_logprobs"]
    if len(tables) != len(ids):
        raise ValueError(f"{len(tables)} prompt log-probs for {len(ids)} prompt tokens")
    return [_scored_token(token, table) for token, table in zip(ids[start:], tables[start:], strict=True)]


def _scored_token(token: int, table: Mapping[str, Mapping[str, Any]]) -> _ScoredToken:
    said = table[str(token)]
    logprob = finite(said["logprob"])
    best, most = max(((t, finite(entry["logprob"])) for t, entry in table.items()), key=itemgetter(1))
    return _ScoredToken(logprob, round(most - logprob, 6), said.get("rank"), int(best))


def _preferred(scored: Sequence[_ScoredToken]) -> tuple[Preferred, ...] | None:
    """Return those that are not the best; None where a rank is not told."""
    others = [(at, s) for at, s in enumerate(scored) if s.gap > 0]
    if any(s.rank is None for _, s in others):
        return None
    return tuple(Preferred(at=at, rank=s.rank, best=s.best) for at, s in others if s.rank is not None)


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
