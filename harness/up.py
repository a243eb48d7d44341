"""A cell's engines behind one OpenAI-compatible address, for any other client, and proof that P/D really happens."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from harness.engine.answer import token_ids
from harness.engine.client import Sampling, request_body
from harness.engine.command import MODEL_NAME, Role
from harness.engine.exchange import new_id, payload
from harness.engine.key import header_file
from harness.engine.limited import LimitedClient
from harness.engine.ports import claim, free_ports
from harness.engine.router import Router, program
from harness.engine.topology import EngineGroupSession
from harness.errors import HandoffError, UsageError
from harness.matrix import start_expected_s
from harness.operations import Prepared, engines_for, narrowed, new_folder, prepare
from harness.progress import Reporter
from harness.prompts import Prompt


class Proof(NamedTuple):
    """What one request through the address showed."""

    answered: bool
    right: bool | None
    """Whether the tokens are the known right ones; None when these are not known."""
    bytes_moved: int | None
    """By NIXL to D; None without a pair."""
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing speaks against the address; a pair must have moved KV."""
        return self.answered and self.right is not False and self.bytes_moved != 0

    @property
    def sentence(self) -> str:
        if not self.answered:
            return f"UNKNOWN: the address does not answer: {self.problem}"
        tokens = {True: "right tokens", False: "WRONG tokens", None: "tokens that nothing is known of"}[self.right]
        if self.bytes_moved is None:
            return f"one request through the address gave {tokens}"
        if not self.bytes_moved:
            return f"UNKNOWN: one request through the address gave {tokens}, but no KV moved from P to D"
        return f"one request through the address gave {tokens}; {self.bytes_moved:,} bytes of KV moved from P to D"


class Address(NamedTuple):
    """Where the cell can be asked, and what is behind it."""

    url: str
    engines: dict[Role, str]
    proof: Proof
    example: str
    key: str
    """How to use the key, in words for a person."""


def prepare_cell(source: str, cell: str) -> Prepared:
    """One cell of a profile. Raises UsageError when the pattern means several."""
    prepared = prepare(source, [cell], ["cold"])
    chosen = [c.id for c in prepared.plan.cells]
    if len(chosen) != 1:
        raise UsageError(f"expected one cell, found {', '.join(chosen)}")
    return narrowed(prepared, prepared.plan.cells[0].variant)


def bring_up(
    prepared: Prepared,
    out: Path,
    engine_python: str,
    port: int | None,
    reporter: Reporter,
    serve: Callable[[Address], None],
) -> None:
    """Start the engines and the router, prove one request, and call ``serve`` while all of it is up."""
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    (group,) = prepared.plan.groups
    program()
    if port is not None:
        claim([port])
    folder = new_folder(out, prepared.profile, "up")
    reporter.step(group.id, start_expected_s(group))
    with EngineGroupSession(group, prepared.profile, environment, folder / "logs", progress=reporter.line) as session:
        port = port if port is not None else free_ports(1)[0]
        (metrics,) = free_ports(1)
        urls = {role: session.url(role) for role in session.roles}
        log = folder / "logs" / f"{group.id}.router.log"
        with Router(urls, port, metrics, log, session.key) as router, header_file(session.key) as key:
            reporter.line(f"{group.id}: router ready, pid {router.pid}, {router.url}")
            prompt = next(i.prompt for i in prepared.works[0].items)
            proof = _prove(session, router.url, prompt, prepared)
            body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "…"}], "max_tokens": 32}
            said = shlex.quote(json.dumps(body, ensure_ascii=False))
            json_type = "-H 'Content-Type: application/json'"
            example = f"curl -s {router.url}/v1/chat/completions {key.curl} {json_type} -d {said}"
            serve(Address(router.url, dict(urls), proof, example, key.use))
        for words in router.left:
            reporter.line(f"{group.id}: LEFT OVER: {words}; see `harness ps` and `harness clean`")


def _prove(session: EngineGroupSession, url: str, prompt: Prompt, prepared: Prepared) -> Proof:
    """Send one prompt through the address and see what D counted."""
    workload = prepared.profile.workload
    body = request_body(payload(prompt, "ids"), Sampling(workload.max_tokens, workload.logprobs))
    pair = "decode" in session.roles
    client = session.client("single")
    before = client.snapshot()
    try:
        with LimitedClient(headers=session.key.headers, timeout=prepared.profile.timeouts.request) as asking:
            answer = asking.post(f"{url}/v1/completions", json={**body, "cache_salt": new_id()})
        answer.raise_for_status()
        tokens = token_ids(answer.json()["choices"][0].get("token_ids"))
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        session.require_alive()
        return Proof(False, None, None, f"{type(error).__name__}: {error}")
    right = None
    if prompt.expected is not None and tokens is not None:
        right = tokens == prompt.expected[: workload.max_tokens]
    return Proof(True, right, _moved(session, before) if pair else None)


def _moved(session: EngineGroupSession, before: dict[str, float]) -> int:
    with contextlib.suppress(HandoffError):
        return int(session.client("decode").counters_after(before, {"nixl_bytes": 1}).get("nixl_bytes", 0))
    return 0
