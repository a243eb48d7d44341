"""The ``vllm-router`` package, which supports NIXL P/D, in front of a group's engines.

Like an engine it runs in a session of its own, is ended by its recorded id, and requires the group's key
(``guard/guarded_router.py``).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

from harness import redact
from harness.engines.api_key import GUARD_FOLDER, ApiKey, require_guarded
from harness.engines.guard.guarded_router import URLS_VARIABLE
from harness.engines.http import get
from harness.engines.router_program import PROGRAM, program
from harness.errors import EngineStartError
from harness.history.records import EngineRecord
from harness.profiles.cells import Role
from harness.supervision.process import SupervisedEngine
from harness.supervision.server import LOOPBACK, full_environment

_READY_S = 60.0
_POLL_S = 0.25


class RouterCommand(NamedTuple):
    """The command that starts the router."""

    port: int
    argv: list[str]
    env: dict[str, str]
    name: str = "router"
    host: str = LOOPBACK
    preload: tuple[str, ...] = ()


def launcher() -> list[str]:
    """Return the command for the program with its port guarded. Raises EnvironmentFault when it is not installed."""
    program()
    return [sys.executable, "-I", str(GUARD_FOLDER / "guarded_router.py")]


def router_command(urls: Mapping[Role, str], port: int, metrics_port: int, key: ApiKey) -> RouterCommand:
    """Return the command of a router in front of these engines. Its retries are off, because they would hide a failed
    hand-off."""
    argv = [*launcher(), *router_arguments(urls, port, metrics_port)]
    answering = next(urls[r] for r in ("decode", "single", "prefill") if r in urls)
    # The router sends this key to a pair. It also replaces an inherited OPENAI_API_KEY, which must not get there.
    return RouterCommand(port, argv, {"OPENAI_API_KEY": key.value, URLS_VARIABLE: f"{answering}/v1/models"})


def router_arguments(urls: Mapping[Role, str], port: int, metrics_port: int) -> list[str]:
    """Return the arguments of ``vllm-router`` in front of these engines."""
    argv = ["--host", LOOPBACK, "--port", str(port), "--policy", "round_robin", "--disable-retries"]
    argv += ["--disable-circuit-breaker", "--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)]
    if "prefill" not in urls:
        return [*argv, "--worker-urls", *urls.values()]
    argv += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    return [*argv, "--prefill", urls["prefill"], "--decode", urls["decode"]]


class Router:
    """A running router. A context manager; leaving it ends the process."""

    def __init__(self, urls: Mapping[Role, str], port: int, metrics_port: int, log: Path, key: ApiKey) -> None:
        self._command = router_command(urls, port, metrics_port, key)
        self._key = key
        self._log = log
        self._claimed = (port, metrics_port)
        self._process: SupervisedEngine | None = None
        self.left: list[str] = []
        """Descriptions of what could not be ended."""
        self.ready_seconds = 0.0

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._command.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> Router:
        env = full_environment(self._command.env)
        self._process = SupervisedEngine(self._command, self._log, env, self._claimed)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> list[str]:
        """End the router; return descriptions of what is left of it."""
        if self._process is not None:
            self.left = self._process.stop(5.0)
            self._process = None
            with contextlib.suppress(OSError):
                redact.file(self._log)
        return self.left

    def require_alive(self) -> None:
        """Raise EngineDiedError when the router is gone."""
        if self._process is not None:
            self._process.require_alive()

    def record(self, group: str) -> EngineRecord:
        """Return how the router was started, for the provenance of a run."""
        return EngineRecord(
            role="router",
            group=group,
            pid=self.pid or 0,
            argv=redact.words(self._command.argv),
            env=redact.environment(self._command.env),
            log=self._log.name,
            ready_seconds=round(self.ready_seconds, 2),
            model_runner=None,
            attention_backend=None,
        )

    def _wait(self) -> None:
        """Wait until the router serves its engines' model. Raises EngineStartError or EngineDiedError."""
        assert self._process is not None
        deadline = time.monotonic() + _READY_S
        while True:
            self._process.require_alive()
            try:
                if get(f"{self.url}/v1/models", self._key.headers, 5.0).status_code == 200:
                    require_guarded(self.url, f"the {self._command.name}")
                    self.ready_seconds = time.monotonic() - self._process.started
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"expected {PROGRAM} to serve {self.url}/v1/models within {_READY_S:.0f} s, but it does not; "
                    f"last lines of {self._log}:\n{self._process.log_tail()}"
                )
            time.sleep(_POLL_S)
