"""Python stacks of an engine that hangs, written by py-spy to a file beside the engine's log."""

from __future__ import annotations

import contextlib
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import psutil

from harness import redact

_LIMIT_S = 10.0
"""Time limit for the dump of one process; all processes are dumped at the same time."""


def program() -> Path:
    return Path(sysconfig.get_path("scripts")) / "py-spy"


def is_python(process: psutil.Process) -> bool:
    """Return whether a process runs Python, by its executable: an engine core renames itself VLLM::EngineCore."""
    with contextlib.suppress(psutil.Error, OSError):
        return Path(process.exe()).name.startswith("python")
    return False


class Dumped(NamedTuple):
    """The result of one attempt to write stacks."""

    stacks: int
    """Number of processes whose stacks are in the file."""
    trouble: str = ""
    """Why stacks are missing; empty if none are."""


class StackFiles:
    """Writes the stacks of a group's engines beside their logs, once per engine and cause."""

    def __init__(self, folder: Path, group_id: str, progress: Callable[[str], None]) -> None:
        self._folder = folder
        self._group_id = group_id
        self._progress = progress
        self._lock = threading.Lock()
        self._written: set[tuple[str, str]] = set()

    def dump(self, processes: Mapping[str, Callable[[], Sequence[int]]], cause: str) -> None:
        """Append the stacks of all engines at the same time, and report the result as progress.

        ``processes`` maps each role to a function that finds the process ids of its engine. May be called from several
        threads; raises nothing.
        """
        with self._lock:
            wanted = {role: find for role, find in processes.items() if (role, cause) not in self._written}
            self._written |= {(role, cause) for role in wanted}
        if not wanted:
            return
        with ThreadPoolExecutor(len(wanted)) as pool:
            asked = {
                role: pool.submit(dump_of, find, self._folder / f"{self._group_id}.{role}.stacks.txt", cause)
                for role, find in wanted.items()
            }
        found = {role: answer.result() for role, answer in asked.items()}
        said = [f"stacks of {role} are in the logs" for role, one in found.items() if one.stacks]
        said += [f"no stacks of {role}: {one.trouble}" for role, one in found.items() if not one.stacks]
        self._progress(f"{self._group_id}: no answer in time ({cause}): {'; '.join(said)}")


def dump_of(processes: Callable[[], Sequence[int]], target: Path, cause: str) -> Dumped:
    """Do as ``dump`` for the process ids that ``processes`` finds; a failure to find them is written down as well."""
    try:
        pids = processes()
    except Exception as error:
        return _write(target, cause, [], [f"its processes cannot be found ({type(error).__name__}: {error})"])
    return dump(pids, target, cause)


def dump(pids: Sequence[int], target: Path, cause: str) -> Dumped:
    """Append the stacks of these processes to ``target``, or the reasons why they cannot be read.

    Secrets are removed, because each dump begins with a whole command line. Raises nothing.
    """
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
    """Dump one process: return True and its stacks, or False and the reason why there are none."""
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
