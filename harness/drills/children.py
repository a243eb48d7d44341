"""The harness itself as a child: started as a user would, signalled, and judged by what it left in its folder."""

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
from types import TracebackType

from harness.config import REPOSITORY
from harness.drills.model import ControlRun
from harness.drills.tried import Tried
from harness.errors import HarnessError
from harness.findings import Judgement, Verdict
from harness.history import RUN, History, load_history
from harness.parts import lacks
from harness.progress import Reporter
from harness.seal import LINES

_POLL_S = 0.05
_CHECK_S = 300.0
_LIFE_S = 900.0
_END_S = 60.0


def _ended_with_us() -> list[str]:
    """Program in front of a child that has it get TERM when this process is killed. It is of util-linux; without it, a
    child of a killed ``harness drill`` goes on to its own end."""
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "TERM"] if found else []


class Child:
    """A ``harness`` command in a session of its own; its output is a file. Use as a context manager: leaving it ends
    the command, which ends its engines."""

    program: Sequence[str] = (sys.executable, "-m", "harness")

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """The environment is this process's, mark included."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """TERM first: a harness that is killed leaves its engines to their wardens, which takes longer."""
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
        """Wait for a condition while the command runs; False when it ended or took longer."""
        deadline = time.monotonic() + limit_s
        while self.running and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(_POLL_S)
        return False

    def wait(self, limit_s: float) -> int | None:
        """The exit code; None when it takes longer. It is killed then."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            return None


def run_arguments(cell: str, source: str, engine_python: str | None, out: Path) -> list[str]:
    """A run of one cell's cold prompts."""
    chosen = ["--engine-python", engine_python] if engine_python else []
    return ["run", "--profile", source, "--cell", cell, "--scenario", "cold", "--out", str(out), *chosen]


class Undisturbed:
    """Runs that nothing is done to, once for each cell: the control, and how long such a run lives."""

    def __init__(self, source: str, engine_python: str | None, folder: Path, reporter: Reporter, tried: Tried) -> None:
        self._source = source
        self._python = engine_python
        self._folder = folder
        self._reporter = reporter
        self._tried = tried

    def __call__(self, cell: str) -> float:
        """Seconds of a whole run of a cell."""
        return self.control(cell).seconds

    def control(self, cell: str) -> ControlRun:
        """A whole run of a cell; each cell is run once."""
        name = f"control-{cell}"
        for control in self._tried.controls:
            if control.id == name:
                return control
        out = self._folder / name
        with Child(run_arguments(cell, self._source, self._python, out), self._folder / f"{name}.log") as child:
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
        self._tried.controls.append(control)
        self._reporter.line(f"control {name}: {verdict}, {seconds:.0f} s")
        return control


def folder_in(out: Path) -> Path | None:
    """The only run folder below ``out``."""
    return next((p for p in sorted(out.glob("*")) if p.is_dir() and not p.is_symlink()), None)


def whole_lines(folder: Path | None) -> int:
    """Observations that are in the file of a run that is under way."""
    try:
        return (folder / LINES).read_bytes().count(b"\n") if folder is not None else 0
    except OSError:
        return 0


class After:
    """What a run folder says when its run has ended in whatever way."""

    def __init__(self, folder: Path, log: Path) -> None:
        """Judges it by ``harness check``, as a user would."""
        self.reasons: list[str] = []
        self.verdict: Verdict | None = None
        self.recorded = 0
        self.complete = False
        """Whether everything that the plan asks for is there."""
        with Child(["check", str(folder)], log) as check:
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
        missing = lacks(history)
        self.complete = not missing
        self._judged(folder, code)
        self.reasons += [*missing, *(c.reason for c in history.run.cells if c.reason)]

    def _judged(self, folder: Path, code: int | None) -> None:
        try:
            judgement = Judgement.model_validate(json.loads((folder / "judgement.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            self.reasons.append(f"harness check wrote no judgement that can be read: {error}")
            return
        self.verdict = judgement.verdict
        self.reasons += [*judgement.notices, *(f.message for f in judgement.findings)]
        if code != judgement.verdict.exit_code:
            self.reasons.append(f"harness check said {judgement.verdict} and exited with {code}")
            self.verdict = None


def no_run(folder: Path | None) -> bool:
    """Whether nothing was begun to be recorded."""
    return folder is None or not (folder / RUN).is_file()
