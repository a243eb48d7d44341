"""The key that a group of engines requires: random, never on a command line, never recorded.

Each group of engines gets its own key, which lives no longer than the group's processes. Engines get it in their
environment, because every user of a machine can read ``/proc/PID/cmdline``, but only the owner ``/proc/PID/environ``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

from harness import redact
from harness.engines.guard.kv_harness_guard import KEY_VARIABLE
from harness.engines.http import get
from harness.errors import EngineStartError
from harness.supervision.server import joined_path

GUARD_FOLDER = Path(__file__).resolve().parent / "guard"
GUARD = "kv_harness_guard.KeyGuard"
PROBED = ("/v1/models", "/metrics", "/pause")
"""A path that vLLM's own check guards, and two that it does not."""


class ApiKey:
    """A key whose value does not appear when it is printed."""

    def __init__(self, value: str | None = None) -> None:
        """Create a new key, or wrap a known ``value``; either way it is redacted from now on."""
        self.value = value or secrets.token_urlsafe(32)
        redact.remember(self.value)

    @classmethod
    def of(cls, env: Mapping[str, str]) -> ApiKey:
        """Return the key of an engine that was started with these variables. Raises KeyError for other processes."""
        return cls(env[KEY_VARIABLE])

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.value}"}

    @property
    def environment(self) -> dict[str, str]:
        """The variable that hands the key to an engine."""
        return {KEY_VARIABLE: self.value}

    def __repr__(self) -> str:
        return f"ApiKey({redact.MARK})"


def guarded_path(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with the guard's folder first on the engine's Python path, and without the current folder, which
    may contain anything."""
    return {**env, "PYTHONPATH": joined_path(str(GUARD_FOLDER), env.get("PYTHONPATH", "")), "PYTHONSAFEPATH": "1"}


def require_guarded(url: str, name: str, timeout_s: float = 10.0) -> None:
    """Send requests without the key to a server that is ready. Raises EngineStartError unless it refuses them."""
    for path in PROBED:
        try:
            # Without what ~/.netrc or a proxy would add. A POST to /pause would take effect; the guard refuses a GET
            # with 401, and an open server with 405.
            status = get(f"{url}{path}", {}, timeout_s).status_code
        except httpx.HTTPError as error:
            raise EngineStartError(
                f"expected {name} to refuse a request for {path} without the run's key, found no answer "
                f"({type(error).__name__}: {error}); see its log"
            ) from error
        if status != 401:
            raise EngineStartError(
                f"expected {name} at {url} to refuse a request for {path} without the run's key (status 401), found "
                f"status {status}: it answers everybody, so it is not used; check whether another server took the "
                "port, or whether this vLLM lacks --middleware"
            )


KEY_EXPORTED = "OPENAI_API_KEY"
"""The variable in which other clients than curl, and ``harness run``, are told to look for the key."""


class HeaderFile(NamedTuple):
    """A file with the key for a person's commands: ``curl -H @FILE`` keeps it off curl's command line too."""

    path: Path

    @property
    def curl(self) -> str:
        return f"-H @{self._quoted}"

    @property
    def use(self) -> str:
        return f"key: {self.curl} for curl; for other clients export {KEY_EXPORTED}=$(sed 's/.* //' {self._quoted})"

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self.path))


@contextlib.contextmanager
def header_file(key: ApiKey) -> Iterator[HeaderFile]:
    """Keep the key in a file that only this user can read, outside the run's folder, while the context lasts."""
    handle, name = tempfile.mkstemp(prefix="kv-harness-key-")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(f"Authorization: Bearer {key.value}\n")
        yield HeaderFile(Path(name))
    finally:
        Path(name).unlink(missing_ok=True)
