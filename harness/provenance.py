"""Where and with what a run happened: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from harness import __version__, clock
from harness.config import REPOSITORY
from harness.engine.environment import EngineEnvironment
from harness.schedule.gpus import visible_here


def now() -> str:
    return clock.utc().isoformat(timespec="seconds")


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and GPUs of this machine; no host name."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
        "gpus": gpus(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def gpus() -> list[str]:
    """Name and memory of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves; empty without one."""
    return [f"{d.gpu.name}, {1024 * d.gpu.memory_gib:.0f} MiB" for d in visible_here().devices]


def gpu_name(found: Sequence[str]) -> str:
    """What the engines' hardware is called in the identity of a baseline, by what ``gpus`` found."""
    return found[0].split(",")[0].strip() if found else "unknown GPU"


def git_state() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the harness's own checkout; (None, None) outside one."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(REPOSITORY), *words],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    status = ask("status", "--porcelain", "--untracked-files=no") if commit else None
    return commit, None if status is None else bool(status)


def versions(environment: EngineEnvironment) -> dict[str, str | None]:
    return {
        "harness": __version__,
        "vllm": environment.vllm,
        "vllm_build": environment.vllm_build,
        "torch": environment.torch,
        "transformers": environment.transformers,
        "nixl": environment.nixl,
        "python": environment.python,
    }
