"""The path of the router's program, for code that does not start one."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from harness.errors import EnvironmentFault

PROGRAM = "vllm-router"


def program() -> Path:
    """Return the router's program in this environment. Raises EnvironmentFault when it is not installed."""
    path = Path(sysconfig.get_path("scripts")) / PROGRAM
    if not path.is_file():
        raise EnvironmentFault(
            f"expected {PROGRAM} at {path} for cells behind a router, found none; install it with "
            "pip install 'kv-acceptance-harness[router]', or leave those cells out (routes: [client] in the profile, "
            "or --cell with the others)"
        )
    return path
