"""The hardware of this machine, as runs record it."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from harness.scheduling.gpus import in_words, visible_here


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory and GPUs with their driver of this machine, without its host name."""
    devices, processor = visible_here().devices, _of_processor()
    return {
        "processor": processor.get("model name", platform.processor() or "unknown"),
        # By these, processors of one name differ, and the kernels chosen for them.
        "processor_model": "/".join(processor.get(name, "?") for name in ("cpu family", "model", "stepping")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
        "gpus": in_words(devices),
        "gpu_driver": devices[0].gpu.driver if devices else None,
    }


def _of_processor() -> dict[str, str]:
    """Return what the kernel tells of the first processor."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    return found
