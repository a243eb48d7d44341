"""How servers are started: their command, environment and address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from harness import redact

LOOPBACK = "127.0.0.1"
INHERITED = (
    # Where things are.
    *("HOME", "PATH", "TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH"),
    *("SSL_CERT_DIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
    # What compiles kernels.
    *("CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "MAX_JOBS", "TORCH_CUDA_ARCH_LIST"),
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    # Who asks, and how text is written.
    *("USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "TZ", "PYTHONHASHSEED", "PYTHONUNBUFFERED"),
    # Which GPUs and networks there are.
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
)
INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "ROCM_", "HSA_")
"""Beside INHERITED, the beginnings of what engines and routers inherit. Nothing else reaches them: a setting of vLLM,
OpenMP, UCX or NIXL would change what is tested, and anything may be a secret. Profiles set more in ``engine.env``."""


def full_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment: the inherited variables that it needs, and its own."""
    base = {k: v for k, v in os.environ.items() if k in INHERITED or k.startswith(INHERITED_PREFIXES)}
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
