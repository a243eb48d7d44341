"""Peak resident memory of this process, as Linux counts it since the process began or was last asked to forget.

``ru_maxrss`` is no such thing: it survives exec, so a child has its parent's peak at least.
"""

from __future__ import annotations

import os
from pathlib import Path

_SELF = Path("/proc/self")


def peak_mib() -> float:
    """``VmHWM``, in MiB."""
    lines = (_SELF / "status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def forget_peak() -> None:
    """The peak is what is resident now (``proc_pid_clear_refs(5)``)."""
    descriptor = os.open(_SELF / "clear_refs", os.O_WRONLY)
    try:
        os.write(descriptor, b"5")
    finally:
        os.close(descriptor)
