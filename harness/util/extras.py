"""Packages that only running needs: judging does without them, so they are installed by an extra."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from harness.util.paths import IN_CHECKOUT

RUN = ("gguf", "httpcore", "httpx", "huggingface_hub", "pyarrow", "tokenizers", "transformers")
"""The packages of the extra ``run`` that are imported; py-spy, which it has, too, is a program."""
INSTALL_RUN = "pip install 'kv-acceptance-harness[run]'"
_INSTALL_ENGINES = "run ./run_matrix.sh" if IN_CHECKOUT else "pip install 'kv-acceptance-harness[cpu]' (or [gpu])"


def install_engines(executable: str) -> str:
    """Return how an interpreter gets vLLM: by an extra of this package where it is the own one."""
    return _INSTALL_ENGINES if executable == sys.executable else "install vllm and nixl there"


def is_installed(name: str) -> bool:
    """Return whether there is a module of this name, without importing it."""
    return find_spec(name) is not None


def lacking_to_run() -> list[str]:
    """Return the packages of the extra ``run`` that are not installed."""
    return [name for name in RUN if not is_installed(name)]


def why_missing(name: str) -> str | None:
    """Return a sentence for a module that cannot be imported; None when no extra has it."""
    if name.partition(".")[0] not in RUN:
        return None
    return (
        f"running needs packages that are not here ({name} among them): this installation plans and judges; "
        f"{INSTALL_RUN}"
    )
