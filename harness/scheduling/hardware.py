"""The hardware of this machine, as runs record it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from harness.scheduling.gpus import gpus


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory and GPUs of this machine, without its host name."""
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
