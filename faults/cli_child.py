"""Run the harness itself as a child process: start it like a user, signal it, and judge what its folder says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from faults.context import Context
from faults.model import ControlRun
from harness.commands.missing_evidence import missing_evidence
from harness.errors import HarnessError
from harness.history.folder import History, load_history
from harness.history.layout import RUN, files_by_cell
from harness.history.verdict import Verdict
from harness.reports.judge_run import judgement_from
from harness.util.paths import REPOSITORY

_POLL_S = 0.05
_CHECK_S = 300.0
_LIFE_S = 900.0
_END_S = 60.0


def _ended_with_us() -> list[str]:
    """Return the prefix of a command that gets TERM when this process is killed (``setpriv`` of util-linux).

    Without that program, a child of a killed ``python -m faults`` runs to its own end.
    """
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "TERM"] if found else []


class Child:
    """A ``harness`` command in a session of its own, with its output in a file.

    Use it as a context manager: leaving it ends the command, which ends its engines.
    """

    program: Sequence[str] = (sys.executable, "-m", "harness")

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """Start the command in this process's environment, mark included."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.begun = time.monotonic()
        with log.open("ab") as stream:
            self.popen = subprocess.Popen(
                [*_ended_with_us(), *self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                start_new_session=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """End the command, with TERM first: after KILL, supervisors have to end the engines, which is slower."""
        if self.running:
            self.popen.send_signal(signal.SIGTERM)
            self.wait(_END_S)

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for a condition; return False when the command ended first or ``limit_s`` passed."""
        deadline = time.monotonic() + limit_s
        while self.running and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(_POLL_S)
        return False

    def wait(self, limit_s: float) -> int | None:
        """Wait and return the exit code; after ``limit_s``, kill the command and return None."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            return None


def run_arguments(context: Context, cell: str, out: Path) -> list[str]:
    """Return the arguments for a run of one cell's cold prompts."""
    chosen = ["--profile", context.prepared.source, "--cell", cell, "--scenario", "cold", "--out", str(out)]
    return ["run", *chosen, *(["--engine-python", context.engine_python] if context.engine_python else [])]


def undisturbed(context: Context, cell: str) -> ControlRun:
    """Return the control run of a cell: a run without a fault, which also measures how long such a run takes. Each cell
    is run once."""
    name = f"control-{cell}"
    for control in context.tried.controls:
        if control.id == name:
            return control
    out = context.folder / name
    with Child(run_arguments(context, cell, out), context.folder / f"{name}.log") as child:
        code = child.wait(_LIFE_S)
    seconds = time.monotonic() - child.begun
    verdict = Verdict.PASS if code == 0 else Verdict.UNKNOWN
    control = ControlRun(
        id=name,
        verdict=verdict,
        requests=whole_lines(folder_in(out)),
        seconds=round(seconds, 1),
        findings=() if code == 0 else (child.text[-600:],),
    )
    context.tried.controls.append(control)
    context.reporter.line(f"control {name}: {verdict}, {seconds:.0f} s")
    return control


def folders_in(out: Path) -> list[Path]:
    """Return the run folders below ``out``, and no link to one."""
    return [p for p in sorted(out.glob("*")) if p.is_dir() and not p.is_symlink()]


def folder_in(out: Path) -> Path | None:
    """Return the only run folder below ``out``."""
    return next(iter(folders_in(out)), None)


def whole_lines(folder: Path | None) -> int:
    """Return the number of whole observations of a run in progress."""
    files = [f for of_cell in files_by_cell(folder).values() for f in of_cell] if folder is not None else []
    try:
        return sum(f.read_bytes().count(b"\n") for f in files)
    except OSError:
        return 0


class After:
    """The verdict and evidence of a run folder after its run has ended in any way."""

    def __init__(self, folder: Path, log: Path) -> None:
        """Judge the folder with ``harness check --write``, like a user."""
        self.reasons: list[str] = []
        self.verdict: Verdict | None = None
        self.recorded = 0
        self.complete = False
        """Whether everything in the plan was recorded."""
        with Child(["check", str(folder), "--write"], log) as check:
            code = check.wait(_CHECK_S)
        if "Traceback" in check.text:
            self.reasons.append("harness check ended with a traceback")
            return
        try:
            history: History = load_history(folder)
        except HarnessError as error:
            self.reasons.append(str(error))
            return
        self.recorded = len(history.observations)
        missing = missing_evidence(history)
        self.complete = not missing
        self._judged(folder, code)
        self.reasons += [*missing, *(c.reason for c in history.run.cells if c.reason)]

    def _judged(self, folder: Path, code: int | None) -> None:
        try:
            judgement = judgement_from(json.loads((folder / "judgement.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            self.reasons.append(f"harness check wrote no readable judgement: {error}")
            return
        self.verdict = judgement.verdict
        self.reasons += [*judgement.notices, *(f.message for f in judgement.findings)]
        if code != judgement.verdict.exit_code:
            self.reasons.append(f"harness check gave {judgement.verdict} and exited with {code}")
            self.verdict = None


def no_run(folder: Path | None) -> bool:
    """Return whether recording has not started."""
    return folder is None or not (folder / RUN).is_file()
