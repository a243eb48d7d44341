"""Examine whether NIXL moves bytes between two processes, in the memory that P and D keep their KV in."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from harness.commands.doctor import Examined, ask_nixl
from harness.engines.command import variables_of
from harness.engines.environment import EngineEnvironment
from harness.profiles.model import Profile
from harness.supervision.server import full_environment

_LIMIT_S = 120
"""On a fresh disk the imports alone take a minute."""
_CUDA_TRANSPORTS = ("cuda_copy", "cuda_ipc")
# UCX's names for groups of transports.
_UCX_GROUPS = {"all": _CUDA_TRANSPORTS, "cuda": _CUDA_TRANSPORTS}


def transport_items(profile: Profile, environment: EngineEnvironment) -> list[Examined]:
    """Return items that say whether NIXL can move KV; none without P/D by NIXL, and without NIXL."""
    pairs = [part for part in profile.written_parts if "pd" in part.topologies and part.engine.by_nixl]
    if not pairs or environment.nixl is None:
        return []
    part = pairs[0]
    in_cuda = part.engine.device == "gpu" and part.engine.kv_buffer_device == "cuda"
    items = [_transfer_item(part, environment, "cuda" if in_cuda else "cpu")]
    if part.engine.device == "gpu":
        items.append(_tls_item(part.engine.env, _CUDA_TRANSPORTS if in_cuda else ()))
    return items


def _transfer_item(part: Profile, environment: EngineEnvironment, device: str) -> Examined:
    backends = [str(name) for name in part.engine.kv_connector_extra_config.get("backends") or ("UCX",)]
    names = ", ".join(backends)
    what = f"{names} in {'GPU' if device == 'cuda' else 'host'} memory, between two processes"
    variables = full_environment(variables_of(part, environment, "decode", 1, ()))
    answer, said = _asked([environment.executable, ask_nixl.__file__, device, *backends], variables)
    if "moved" in answer:
        return Examined("NIXL transfer", f"{what}: works", True, True)
    if "untried" in answer:
        return Examined(
            "NIXL transfer", f"{what}: not tried, this NIXL has other calls ({answer['untried']})", True, False
        )
    reason = f"{answer['failed']} ({answer['stage']})" if "failed" in answer else said
    more = re.search(r"UCX\s+ERROR\s+(.*)", said)
    return Examined(
        "NIXL transfer",
        f"{what}: {reason}" + (f"; {more[1].strip()}" if more and more[1] not in reason else ""),
        False,
        True,
        "install nixl's CUDA wheel for torch's CUDA (extra `gpu`), or set engine.kv_buffer_device to cpu"
        if device == "cuda"
        else "install the extra `cpu`, or look at UCX_* in engine.env",
    )


def _asked(argv: list[str], variables: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Return the answer of ``ask_nixl``, empty if there is none, and what was said beside it."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False, env=dict(variables)
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {_LIMIT_S} s"
    except OSError as error:
        return {}, str(error)
    for line in reversed(done.stdout.splitlines()):
        with suppress(ValueError):
            if line.startswith("{"):
                return dict(json.loads(line)), done.stderr
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    return {}, f"ended with exit code {done.returncode}: {last[:300]}"


def _tls_item(env: Mapping[str, str], wanted: tuple[str, ...]) -> Examined:
    given = env.get("UCX_TLS")
    dropped = ", ".join(sorted(name for name in os.environ if name.startswith(("UCX_", "NIXL_"))))
    ignored = f"; {dropped} of this shell is not passed on: engine.env may set it" if dropped else ""
    if given is None:
        return Examined("UCX_TLS", f"not set by the profile: UCX chooses{ignored}", True, False)
    named = given.removeprefix("^").split(",")
    named += [t for n in named for t in _UCX_GROUPS.get(n, ())]
    lacking = [t for t in wanted if (t in named) == given.startswith("^")]
    return Examined(
        "UCX_TLS",
        given + (f" leaves out {', '.join(lacking)}" if lacking else "") + ignored,
        not lacking,
        # Whether KV moves all the same, the transfer shows.
        False,
        "KV may move by a detour: add cuda_copy and cuda_ipc to UCX_TLS in engine.env, or leave it out",
    )
