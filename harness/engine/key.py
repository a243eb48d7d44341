"""The key that a group of engines answers to: random, never on a command line, never written down.

Each group of engines gets one of its own, and forgets it with its processes, which never live longer than the run.
Engines are handed it in their environment: ``/proc/PID/cmdline`` is for every user of a machine to read,
``/proc/PID/environ`` for their owner alone.
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
from harness.engine.guard.kv_harness_guard import KEY_VARIABLE
from harness.engine.limited import get
from harness.errors import EngineStartError

GUARD_FOLDER = Path(__file__).resolve().parent / "guard"
GUARD = "kv_harness_guard.KeyGuard"
PROBED = ("/v1/models", "/metrics", "/pause")
"""What vLLM's own check guards, and two paths that it does not."""


class ApiKey:
    """Says its value to nobody who prints it."""

    def __init__(self, value: str | None = None) -> None:
        """A new one, or one that is known."""
        self.value = value or secrets.token_urlsafe(32)
        redact.remember(self.value)

    @classmethod
    def of(cls, env: Mapping[str, str]) -> ApiKey:
        """The key of an engine that was started with these variables. Raises KeyError for any other process."""
        return cls(env[KEY_VARIABLE])

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.value}"}

    @property
    def environment(self) -> dict[str, str]:
        """What an engine is handed."""
        return {KEY_VARIABLE: self.value}

    def __repr__(self) -> str:
        return f"ApiKey({redact.MARK})"


def guarded_path(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with the guard's folder in front of what else it puts on the engine's path, and without the current
    folder there, in which anything may lie."""
    return {**env, "PYTHONPATH": joined_path(str(GUARD_FOLDER), env.get("PYTHONPATH", "")), "PYTHONSAFEPATH": "1"}


def joined_path(*paths: str) -> str:
    """Values of PYTHONPATH as one. Entries that are no absolute path mean the current folder, and are left out."""
    entries = [e for path in paths for e in path.split(os.pathsep) if e.startswith("/")]
    return os.pathsep.join(dict.fromkeys(entries))


def require_guarded(url: str, name: str, timeout_s: float = 10.0) -> None:
    """Ask a server that is ready, without a key. Raises EngineStartError when it answers instead of refusing."""
    for path in PROBED:
        try:
            # Without what ~/.netrc or a proxy would add. A POST to /pause would act; a GET is refused by the guard, and
            # by an open server with 405.
            status = get(f"{url}{path}", {}, timeout_s).status_code
        except httpx.HTTPError as error:
            raise EngineStartError(
                f"expected {name} to refuse a request for {path} without the run's key, found no answer "
                f"({type(error).__name__}: {error}); see its log"
            ) from error
        if status != 401:
            raise EngineStartError(
                f"expected {name} at {url} to refuse a request for {path} without the run's key (status 401), found "
                f"status {status}: it answers everybody, so nothing is asked of it; see whether another server took "
                "the port, or whether this vLLM lacks --middleware"
            )


class HeaderFile(NamedTuple):
    """A key for the commands of a person: ``curl -H @FILE``, which keeps it off curl's own command line too."""

    path: Path

    @property
    def curl(self) -> str:
        return f"-H @{self._quoted}"

    @property
    def use(self) -> str:
        return f"key: {self.curl} for curl; for other clients export OPENAI_API_KEY=$(sed 's/.* //' {self._quoted})"

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self.path))


@contextlib.contextmanager
def header_file(key: ApiKey) -> Iterator[HeaderFile]:
    """The key in a file that only this user can read, outside of the run's folder, for as long as the context lasts."""
    handle, name = tempfile.mkstemp(prefix="kv-harness-key-")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(f"Authorization: Bearer {key.value}\n")
        yield HeaderFile(Path(name))
    finally:
        Path(name).unlink(missing_ok=True)
