"""The time and the state of the checkout, as runs record them, and whether the machine has other things to do."""

from __future__ import annotations

import subprocess

import psutil

from harness.util import clock
from harness.util.paths import IN_CHECKOUT, REPOSITORY


def now() -> str:
    """Return the current time in UTC as ISO 8601 text with seconds."""
    return clock.utc().isoformat(timespec="seconds")


def git_state() -> tuple[str | None, bool | None]:
    """Return (commit, dirty) of the harness's own checkout, or (None, None) outside one."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD") if IN_CHECKOUT else None
    status = ask("status", "--porcelain", "--untracked-files=no") if commit else None
    return commit, None if status is None else bool(status)


_BUSY_PERCENT = 30.0
_LOOK_S = 0.5


def others_at_work() -> str | None:
    """Measure for a moment how busy the machine is before anything is started; return a warning, or None."""
    percent = psutil.cpu_percent(interval=_LOOK_S)
    if percent < _BUSY_PERCENT:
        return None
    return (
        f"warning: other processes use {percent:.0f} % of this machine; the run will be slower, and UNKNOWN where it "
        "reaches a time limit"
    )
