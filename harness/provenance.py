"""Where and with what a run happened: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from harness import __version__
from harness.config import REPOSITORY
from harness.engine.environment import EngineEnvironment


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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
    """Names of the NVIDIA GPUs that the driver shows; empty without one."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


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
