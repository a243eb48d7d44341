"""Drills on the folder that runs are written into: two runs at once, a full disk, a read-only one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.drills.children import After, Child, Undisturbed, folder_in, run_arguments, whole_lines
from harness.drills.footprint import Footprint, sweep
from harness.drills.model import Drill, Result
from harness.drills.tried import Tried
from harness.drills.verdict import Seen, judge_drill, lost
from harness.errors import EnvironmentFault
from harness.findings import Verdict
from harness.progress import Reporter

_CELL = "single-none"
_LIMIT_S = 900.0
_END_S = 30.0
_FULL_KIB = 512
"""A run writes 1.2 MB and more, most of it while requests are sent."""

TWO = Drill(
    "two-runs",
    "folder",
    "two runs at once in one output folder",
    "both from start to end; neither may touch the other",
    (Verdict.PASS,),
    "each is as right as alone",
    _LIMIT_S,
)
FULL = Drill(
    "disk-full",
    "folder",
    f"a disk of {_FULL_KIB} KiB that fills up",
    "the output folder, during the run",
    (Verdict.UNKNOWN,),
    "No space left|disk is full|interrupted|not complete|expected .* observations",
    _LIMIT_S,
)
READ_ONLY = Drill(
    "read-only",
    "folder",
    "a read-only file system",
    "the output folder, from the start",
    (Verdict.UNKNOWN,),
    "[Rr]ead-only",
    60.0,
)
FOLDERS = (TWO, FULL, READ_ONLY)


class FolderDriller:
    """Runs the harness into folders in trouble."""

    def __init__(
        self, source: str, engine_python: str | None, folder: Path, reporter: Reporter, mark: str, tried: Tried
    ) -> None:
        self._source = source
        self._python = engine_python
        self._folder = folder
        self._reporter = reporter
        self._mark = mark
        self._tried = tried

    def run(self, drills: Sequence[Drill]) -> None:
        Undisturbed(self._source, self._python, self._folder, self._reporter, self._tried)(_CELL)
        by_id = {TWO.id: self._two, FULL.id: self._full, READ_ONLY.id: self._read_only}
        for drill in drills:
            footprint = Footprint(self._mark)
            try:
                result = by_id[drill.id](footprint)
            except Exception as error:
                result = lost(drill, f"{type(error).__name__}: {error}", footprint.left(0), drill.id)
            sweep(footprint)
            self._tried.add(result, self._reporter)

    def _child(self, name: str, out: Path) -> Child:
        return Child(run_arguments(_CELL, self._source, self._python, out), self._folder / f"{name}.log")

    def _two(self, footprint: Footprint) -> Result:
        """Both verdicts must be those of runs alone, each in a folder with its own observations only."""
        out = self._folder / TWO.id
        begun = time.monotonic()
        children = [self._child(f"{TWO.id}-{n}", out) for n in (1, 2)]
        codes = [c.wait(_LIMIT_S) for c in children]
        seconds = time.monotonic() - begun
        folders = [p for p in sorted(out.glob("*")) if p.is_dir() and not p.is_symlink()]
        reasons = []
        verdict: Verdict | None = None
        recorded = planned = 0
        if codes != [0, 0] or len(folders) != 2:
            reasons.append(f"expected two runs that pass, found exit codes {codes} and {len(folders)} folders")
        else:
            afters = [After(f, self._folder / f"{TWO.id}.check.log") for f in folders]
            counts = [whole_lines(f) for f in folders]
            planned, recorded = sum(counts), sum(a.recorded for a in afters)
            latest = (out / "latest").resolve()
            if all(a.complete and a.verdict is Verdict.PASS for a in afters) and latest in folders:
                verdict = Verdict.PASS
                reasons.append("each is as right as alone, and latest is one of them")
        seen = Seen(verdict, tuple(reasons), planned, recorded, seconds, footprint.left(_END_S))
        return judge_drill(TWO, seen, TWO.id)

    def _full(self, footprint: Footprint) -> Result:
        out, kept = self._folder / FULL.id, self._folder / f"{FULL.id}-kept"
        with mounted(out, f"size={_FULL_KIB}k"):
            child = self._child(FULL.id, out)
            code = child.wait(_LIMIT_S)
            seconds = time.monotonic() - child.begun
            folder = folder_in(out)
            before = whole_lines(folder)
            left = footprint.left(_END_S)
            if folder is not None:
                shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("logs"))
        return self._said(FULL, child, code, kept if folder else None, before, seconds, left)

    def _read_only(self, footprint: Footprint) -> Result:
        out = self._folder / READ_ONLY.id
        with mounted(out, "size=64k,ro"):
            child = self._child(READ_ONLY.id, out)
            code = child.wait(_LIMIT_S)
            seconds = time.monotonic() - child.begun
            left = footprint.left(_END_S)
        return self._said(READ_ONLY, child, code, None, 0, seconds, left)

    def _said(
        self,
        drill: Drill,
        child: Child,
        code: int | None,
        folder: Path | None,
        before: int,
        seconds: float,
        left: tuple[str, ...],
    ) -> Result:
        """What the command said, and what its folder says when there is one."""
        reasons = [" ".join(child.text[-2000:].split())]
        verdict: Verdict | None = Verdict.UNKNOWN if code not in (0, None) else None
        recorded = 0
        if code == 0:
            verdict = Verdict.PASS
        elif folder is not None:
            after = After(folder, self._folder / f"{drill.id}.check.log")
            reasons += after.reasons
            verdict, recorded = after.verdict, after.recorded
        if "Traceback" in child.text:
            reasons.insert(0, "the harness ended with a traceback")
            verdict = None
        return judge_drill(drill, Seen(verdict, tuple(reasons), before, recorded, seconds, left), drill.id)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory at ``folder``. Raises EnvironmentFault when this user may not mount one."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentFault(f"expected to mount a file system for this drill, found: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
