"""Where the Python processes of a hanging engine are: their stacks, by py-spy, into a file beside the engine's log."""

from __future__ import annotations

import contextlib
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import psutil

_LIMIT_S = 10.0
"""For each process; all are asked at the same time. A dump of an engine's process takes 0.3 to 2 s."""


def program() -> Path:
    return Path(sysconfig.get_path("scripts")) / "py-spy"


def is_python(process: psutil.Process) -> bool:
    """By its executable: an engine core calls itself VLLM::EngineCore."""
    with contextlib.suppress(psutil.Error, OSError):
        return Path(process.exe()).name.startswith("python")
    return False


def dump_of(processes: Callable[[], Sequence[int]], target: Path, cause: str) -> None:
    """As ``dump``, for what ``processes`` names."""
    dump(processes(), target, cause)


def dump(pids: Sequence[int], target: Path, cause: str) -> None:
    """Append the stacks of these processes to ``target``. What keeps them from being read is written there instead;
    nothing is raised."""
    with ThreadPoolExecutor(max(1, len(pids))) as pool:
        texts = list(pool.map(_stack, pids)) or ["no Python process of this engine is on this machine\n"]
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(f"=== {stamp}: {cause}\n\n" + "\n".join(texts) + "\n")


def _stack(pid: int) -> str:
    command = [str(program()), "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"process {pid}: py-spy did not answer within {_LIMIT_S:.0f} s\n"
    except OSError as error:
        return f"process {pid}: py-spy cannot be run ({error.strerror}: {program()}); pip install py-spy\n"
    if done.returncode:
        why = " ".join(done.stderr.split())[:300]
        return f"process {pid}: py-spy found nothing ({why}); see docs/supervision.md#stacks\n"
    return done.stdout
