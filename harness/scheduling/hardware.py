"""The hardware of this machine, as runs record it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from harness.scheduling.gpus import in_words, visible_here


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory and GPUs with their driver of this machine, without its host name."""
    devices = visible_here().devices
    return {
        "processor": _processor(),
        "processor_model": _processor_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
        "gpus": in_words(devices),
        "gpu_driver": devices[0].gpu.driver if devices else None,
    }


def _processor_model() -> str:
    """Return family, model and stepping, by which processors of one name differ, and the kernels chosen for them."""
    found = dict.fromkeys(("cpu family", "model", "stepping"), "?")
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if found.get(key.strip()) == "?":
                found[key.strip()] = value.strip()
    except OSError:
        pass
    return "/".join(found.values())


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
