"""Peak resident memory of this process, since its start or the last reset.

``ru_maxrss`` is not suitable: it survives exec, so a child starts with its parent's peak.
"""

from __future__ import annotations

import os
from pathlib import Path

_SELF = Path("/proc/self")


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
