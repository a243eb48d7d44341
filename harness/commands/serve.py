"""``harness serve``: a cell's engines behind one OpenAI-compatible address, with proof that P/D really happens."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from harness.engines.answers import Sampling, request_body
from harness.engines.api_key import KEY_EXPORTED, header_file
from harness.engines.command import MODEL_NAME
from harness.engines.environment import engines_for
from harness.engines.flags import NO_FLAGS, EngineFlags
from harness.engines.http import LimitedClient
from harness.engines.request import new_id, payload
from harness.engines.response import token_ids
from harness.engines.router import Router
from harness.engines.router_program import program
from harness.engines.session import EngineGroupSession
from harness.errors import HandoffError, UsageError
from harness.profiles.cells import Role, all_cells, start_expected_s
from harness.prompts.model import Prompt
from harness.runner.run import new_folder
from harness.supervision.ports import claim, free_ports
from harness.util.progress import Reporter
from harness.workload.prepare import Prepared, narrowed, prepare


class Proof(NamedTuple):
    """The result of one request through the address."""

    answered: bool
    right: bool | None
    """Whether the tokens are right; None when the right ones are not known."""
    bytes_moved: int | None
    """Bytes that NIXL moved to D; None for a single engine."""
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether the answer is not known to be wrong and, in a pair, KV moved."""
        return self.answered and self.right is not False and self.bytes_moved != 0

    @property
    def sentence(self) -> str:
        if not self.answered:
            return f"UNKNOWN: the address does not answer: {self.problem}"
        tokens = {True: "right tokens", False: "WRONG tokens", None: "tokens that cannot be checked"}[self.right]
        if self.bytes_moved is None:
            return f"one request through the address gave {tokens}"
        if not self.bytes_moved:
            return f"UNKNOWN: one request through the address gave {tokens}, but no KV moved from P to D"
        return f"one request through the address gave {tokens}; {self.bytes_moved:,} bytes of KV moved from P to D"


class Address(NamedTuple):
    """The address of the cell, and what is behind it."""

    url: str
    engines: dict[Role, str]
    proof: Proof
    example: str
    key: str
    """Instructions for using the key."""


def prepare_cell(source: str, cell: str) -> Prepared:
    """Prepare one cell of a profile. Raises UsageError when the pattern matches several."""
    # What is asked of these engines, nobody judges by their KV.
    prepared = prepare(source, [cell], ["cold"]).witnessing("off")
    chosen = [c.id for c in prepared.plan.cells]
    if len(chosen) != 1:
        raise UsageError(f"expected one cell, found {', '.join(chosen)}")
    return narrowed(prepared, prepared.plan.cells[0].variant)


def asking(prepared: Prepared, source: str, address: Address) -> list[str]:
    """Return the command that asks these engines, with the key where ``Address.key`` says that it is exported."""
    (cell,) = prepared.plan.cells
    direct = cell.name.beside(cell.topology)
    routed = direct._replace(route="router").id
    known = {c.id for c in all_cells(prepared.profile)} & {direct.id, routed}
    options = [("--cell", c) for c in sorted(known)] + [(f"--{role}", url) for role, url in address.engines.items()]
    options += [("--router", address.url)] if routed in known else []
    given = [part for option in options for part in option]
    return ["harness", "run", "--profile", source, *given, "--key-variable", KEY_EXPORTED]


def bring_up(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    port: int | None,
    reporter: Reporter,
    serve: Callable[[Address], None],
    flags: EngineFlags = NO_FLAGS,
) -> None:
    """Start the engines and the router, prove them with one request, and call ``serve`` while they are up."""
    environment = engines_for(prepared.profile, prepared.plan, engine_python, flags)
    (group,) = prepared.plan.groups
    program()
    if port is not None:
        claim([port])
    folder = new_folder(out, prepared.profile, "up")
    reporter.step(group.id, start_expected_s(group), start=True)
    with EngineGroupSession(group, prepared.profile, environment, folder / "logs", progress=reporter.line) as session:
        port = port if port is not None else free_ports(1)[0]
        (metrics,) = free_ports(1)
        urls = {role: session.url(role) for role in session.roles}
        log = folder / "logs" / f"{group.id}.router.log"
        with Router(urls, port, metrics, log, session.key) as router, header_file(session.key) as key:
            reporter.line(f"{group.id}: router ready, pid {router.pid}, {router.url}")
            proof = _prove(session, router.url, next(i.prompt for i in prepared.works[0].items), prepared)
            body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "…"}], "max_tokens": 32}
            said = shlex.quote(json.dumps(body, ensure_ascii=False))
            json_type = "-H 'Content-Type: application/json'"
            example = f"curl -s {router.url}/v1/chat/completions {key.curl} {json_type} -d {said}"
            serve(Address(router.url, dict(urls), proof, example, key.use))
        for words in router.left:
            reporter.line(f"{group.id}: LEFT OVER: {words}; see `harness ps` and `harness clean`")


def _prove(session: EngineGroupSession, url: str, prompt: Prompt, prepared: Prepared) -> Proof:
    """Send one prompt through the address and check it against D's counters."""
    workload = prepared.profile.workload
    body = request_body(payload(prompt, "ids"), Sampling(workload.max_tokens, workload.logprobs))
    pair = "decode" in session.roles
    before = session.client("single").snapshot()
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
