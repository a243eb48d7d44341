"""Where the Python processes of a hanging engine are: their stacks, by py-spy, into a file beside the engine's log."""

from __future__ import annotations

import contextlib
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import psutil

from harness import redact

_LIMIT_S = 10.0
"""For each process; all are asked at the same time. A dump of an engine's process takes 0.3 to 2 s."""


def program() -> Path:
    return Path(sysconfig.get_path("scripts")) / "py-spy"


def is_python(process: psutil.Process) -> bool:
    """By its executable: an engine core calls itself VLLM::EngineCore."""
    with contextlib.suppress(psutil.Error, OSError):
        return Path(process.exe()).name.startswith("python")
    return False


class Dumped(NamedTuple):
    """What came of an attempt."""

    stacks: int
    """Processes whose stacks are in the file."""
    trouble: str = ""
    """Why others, or all, are not there; empty when they are."""


def dump_of(processes: Callable[[], Sequence[int]], target: Path, cause: str) -> Dumped:
    """As ``dump``, for what ``processes`` names, which may be gone by now."""
    try:
        pids = processes()
    except Exception as error:
        return _write(target, cause, [], [f"its processes cannot be found ({type(error).__name__}: {error})"])
    return dump(pids, target, cause)


def dump(pids: Sequence[int], target: Path, cause: str) -> Dumped:
    """Append the stacks of these processes to ``target``, without secrets: each begins with a whole command line. What
    keeps them from being read is written there instead; nothing is raised."""
    with ThreadPoolExecutor(max(1, len(pids))) as pool:
        found = list(pool.map(_stack, pids))
    troubles = [text for good, text in found if not good]
    if not found:
        troubles = ["no Python process of this engine is on this machine"]
    return _write(target, cause, [text for good, text in found if good], troubles)


def _write(target: Path, cause: str, texts: Sequence[str], troubles: Sequence[str]) -> Dumped:
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    whole = "\n".join([*texts, *(f"{words}\n" for words in troubles)])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(redact.text(f"=== {stamp}: {cause}\n\n{whole}\n"))
    except OSError as error:
        return Dumped(0, f"{target} cannot be written ({error.strerror})")
    return Dumped(len(texts), redact.text("; ".join(troubles)))


def _stack(pid: int) -> tuple[bool, str]:
    """Whether there are stacks, and these, or why not."""
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
        return False, f"process {pid}: py-spy did not answer within {_LIMIT_S:.0f} s"
    except OSError as error:
        return False, f"process {pid}: py-spy cannot be run ({error.strerror}: {program()}); pip install py-spy"
    if done.returncode:
        why = " ".join(done.stderr.split())[:300]
        return False, f"process {pid}: py-spy found nothing ({why}); see docs/supervision.md#stacks"
    return True, done.stdout
