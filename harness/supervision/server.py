"""How servers are started: their command, environment and address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from harness import redact

LOOPBACK = "127.0.0.1"
# Inherited variables that would change what is tested, and PYTHONDONTWRITEBYTECODE, with which every process of an
# engine would compile vLLM and torch anew.
SCRUBBED_PREFIXES = ("VLLM_", "OMP_", "KMP_", "UCX_", "NIXL_", "LD_PRELOAD", "PYTHONDONTWRITEBYTECODE", "KV_HARNESS_")


def full_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment: the inherited variables that cannot change what is tested, and its own."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(SCRUBBED_PREFIXES)}
    # Engines download nothing, so they need no tokens.
    base = redact.without_secrets(base)
    if "PYTHONPATH" in env:
        env = {**env, "PYTHONPATH": joined_path(env["PYTHONPATH"], base.get("PYTHONPATH", ""))}
    return {**base, **env}


def url_of(host: str, port: int) -> str:
    """Return the URL of a server; IPv6 addresses are put in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ServerCommand(Protocol):
    """The command that starts a server: an engine or a router."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def argv(self) -> list[str]: ...
    @property
    def env(self) -> dict[str, str]: ...
    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that its program imports, if it is a Python module that may be forked after importing them."""


def joined_path(*paths: str) -> str:
    """Join values of PYTHONPATH. Entries that are not absolute depend on the current folder, and are left out."""
    entries = [e for path in paths for e in path.split(os.pathsep) if e.startswith("/")]
    return os.pathsep.join(dict.fromkeys(entries))
