"""Peak memory of this process, since its start or the last reset, and of another one with its children.

``ru_maxrss`` is not suitable: it survives exec, so a child starts with its parent's peak.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil

_SELF = Path("/proc/self")
_LOOK_S = 0.2


def peak_mib() -> float:
    """Return ``VmHWM`` in MiB."""
    lines = (_SELF / "status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def forget_peak() -> None:
    """Reset the peak to the current resident memory (``proc_pid_clear_refs(5)``)."""
    descriptor = os.open(_SELF / "clear_refs", os.O_WRONLY)
    try:
        os.write(descriptor, b"5")
    finally:
        os.close(descriptor)


def peak_together_mib(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process to end, and return the most that it and its children were seen to have together, in MiB. What
    they share counts once (``Pss``)."""
    most = 0.0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            every = [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]
            most = max(most, sum(map(_pss_mib, every)))
        time.sleep(_LOOK_S)
    return most


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) / 1024
