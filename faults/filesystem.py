"""Drills on the output folder: two concurrent runs, a full disk, a read-only file system."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from faults.cli_child import After, Child, folder_in, folders_in, run_arguments, undisturbed, whole_lines
from faults.context import Context
from faults.leaks import Footprint
from faults.model import Drill, Result
from faults.verdict import Seen, judge_drill
from harness.errors import (
    EXIT_IMPROVED,
    EXIT_PASS,
    EXIT_REGRESSION,
    EXIT_SUSPECT,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    EnvironmentFault,
)
from harness.history.verdict import Verdict

_CELL = "single-none"
_LIMIT_S = 900.0
_END_S = 30.0
_FULL_KIB = 256
"""Size of the disk: less than a run's observations, since a run whose report alone does not fit can pass."""

_LITTLE = 16 << 10
"""Bytes: more than a drill's largest observation, about 14 KB."""

TWO = Drill(
    "two-runs",
    "folder",
    "two runs at once in one output folder",
    "both from start to end; neither may touch the other",
    (Verdict.PASS,),
    "each is as correct as alone",
    _LIMIT_S,
)
FULL = Drill(
    "disk-full",
    "folder",
    f"a disk of {_FULL_KIB} KiB that fills up",
    "the output folder, during the run",
    (Verdict.UNKNOWN,),
    "the disk is full",
    _LIMIT_S,
)
READ_ONLY = Drill(
    "read-only",
    "folder",
    "a read-only file system",
    "the output folder, from the start",
    (Verdict.UNKNOWN,),
    "Read-only file system",
    60.0,
)
FOLDERS = (TWO, FULL, READ_ONLY)


class FolderDriller:
    """Runs the harness with output folders that have a fault."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requests = 0
        """Requests of a run without a fault."""

    def run(self, drills: Sequence[Drill]) -> None:
        self._requests = undisturbed(self._context, _CELL).requests
        by_id = {TWO.id: self._two, FULL.id: self._full, READ_ONLY.id: self._read_only}
        for drill in drills:
            self._context.attempt(drill, by_id[drill.id])

    def _child(self, name: str, out: Path) -> Child:
        return Child(run_arguments(self._context, _CELL, out), self._context.folder / f"{name}.log")

    def _two(self, footprint: Footprint) -> Result:
        """Run two at once; each must get the verdict of a run alone, with only its own observations in its folder."""
        out = self._context.folder / TWO.id
        begun = time.monotonic()
        with contextlib.ExitStack() as held:
            children = [held.enter_context(self._child(f"{TWO.id}-{n}", out)) for n in (1, 2)]
            # A run counts if it has an answer while the other is still running.
            both = children[0].until(lambda: len(_begun(out)) == 2 and children[1].running, _LIMIT_S)
            codes = [c.wait(_LIMIT_S) for c in children]
        seconds = time.monotonic() - begun
        folders = folders_in(out)
        reasons = []
        verdict: Verdict | None = None
        recorded = 0
        if any("Traceback" in c.text for c in children):
            reasons.append("a run printed a traceback")
        elif codes != [0, 0] or len(folders) != 2:
            reasons.append(f"expected two runs that pass, found exit codes {codes} and {len(folders)} folders")
        else:
            afters = [After(f, self._context.folder / f"{TWO.id}.check.log") for f in folders]
            recorded = sum(a.recorded for a in afters)
            latest = (out / "latest").resolve()
            if all(a.complete and a.verdict is Verdict.PASS for a in afters) and latest in folders:
                verdict = Verdict.PASS
                reasons.append("each is as correct as alone, and latest is one of them")
        # Only the control can tell what the runs should contain.
        seen = Seen(verdict, tuple(reasons), 2 * self._requests, recorded, seconds, footprint.left(_END_S), both)
        return judge_drill(TWO, seen, TWO.id)

    def _full(self, footprint: Footprint) -> Result:
        out, kept = self._context.folder / FULL.id, self._context.folder / f"{FULL.id}-kept"
        with mounted(out, f"size={_FULL_KIB}k") as mount:
            with self._child(FULL.id, out) as child:
                watch = _Filling(out)
                child.until(watch.look, _LIMIT_S)
                code = child.wait(_LIMIT_S)
                seconds = time.monotonic() - child.begun
            folder = folder_in(out)
            left = footprint.left(_END_S)
            if folder is not None:
                shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("logs"))
        ended = _Ended(code, child.text, seconds, (*left, *mount.left), watch.full, watch.recorded)
        return self._said(FULL, ended, kept if folder else None)

    def _read_only(self, footprint: Footprint) -> Result:
        out = self._context.folder / READ_ONLY.id
        with mounted(out, "size=64k,ro") as mount:
            with self._child(READ_ONLY.id, out) as child:
                code = child.wait(_LIMIT_S)
                seconds = time.monotonic() - child.begun
            left = footprint.left(_END_S)
        return self._said(READ_ONLY, _Ended(code, child.text, seconds, (*left, *mount.left)), None)

    def _said(self, drill: Drill, ended: _Ended, folder: Path | None) -> Result:
        """Judge the drill by the output of the command and, if there is one, by its folder."""
        reasons = [" ".join(ended.text[-2000:].split())]
        verdict = _VERDICTS.get(ended.code) if ended.code is not None else None
        recorded = 0
        if verdict is Verdict.UNKNOWN and folder is not None:
            after = After(folder, self._context.folder / f"{drill.id}.check.log")
            reasons += after.reasons
            verdict, recorded = after.verdict, after.recorded
        if "Traceback" in ended.text:
            reasons.insert(0, "the harness ended with a traceback")
            verdict = None
        seen = Seen(verdict, tuple(reasons), ended.before, recorded, ended.seconds, ended.left, ended.struck)
        return judge_drill(drill, seen, drill.id)


_VERDICTS = {
    EXIT_PASS: Verdict.PASS,
    EXIT_REGRESSION: Verdict.REGRESSION,
    EXIT_UNKNOWN: Verdict.UNKNOWN,
    EXIT_IMPROVED: Verdict.IMPROVED,
    EXIT_SUSPECT: Verdict.SUSPECT,
    EXIT_USAGE: Verdict.UNKNOWN,
}
"""The verdict that an exit code means to a nightly job; any other code is not a verdict."""


def _begun(out: Path) -> list[Path]:
    """Return the runs with at least one answer."""
    return [p for p in folders_in(out) if whole_lines(p)]


class _Ended(NamedTuple):
    """A command that ended."""

    code: int | None
    text: str
    seconds: float
    left: tuple[str, ...]
    struck: bool = True
    """Whether the fault took place."""
    before: int = 0
    """Observations seen in the folder while the command ran."""


class _Filling:
    """Monitors a folder while a run writes into it."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.full = False
        """Whether at any moment there was no room for another observation. The disk never looks entirely full, because
        a line that does not fit is removed at once."""
        self.recorded = 0
        """Most whole observations at any moment."""

    def look(self) -> bool:
        """Take a sample. Always returns False, since the caller waits for the run to end by itself."""
        disk = os.statvfs(self._out)
        self.full |= disk.f_bavail * disk.f_frsize <= _LITTLE
        self.recorded = max(self.recorded, whole_lines(folder_in(self._out)))
        return False


class Mount:
    """A mounted file system."""

    def __init__(self) -> None:
        self.left: tuple[str, ...] = ()
        """Why it could not be unmounted; empty if it was."""


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Mount]:
    """Mount a file system in memory at ``folder``. Raises EnvironmentFault when this user may not mount one."""
    folder.mkdir(parents=True)
    done = _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    if done.returncode:
        raise EnvironmentFault(f"expected to mount a file system for this test, found: {done.stderr.strip()}")
    mount = Mount()
    try:
        yield mount
    finally:
        done = _run("umount", "--lazy", str(folder))
        if done.returncode:
            mount.left = (f"mount {folder.name}: {done.stderr.strip()}",)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)
