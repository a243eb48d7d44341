"""Drills on the harness: TERM and KILL at random moments of its lifetime, and Ctrl-C twice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from faults.cli_child import After, Child, folder_in, no_run, run_arguments, undisturbed, whole_lines
from faults.context import Context
from faults.leaks import Footprint
from faults.model import Drill, Ending, Result
from faults.verdict import Seen, judge_drill, lost
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN
from harness.history.verdict import Verdict

MOMENTS = 20
_SINGLE, _PAIR = "single-none", "pd-eagle3"
_EVERY_PAIR = 5
"""Interval at which a pair is run instead of a single engine."""
_LIFE_S = 900.0
_BOUND_S = 60.0
_END_S = 30.0
_TRIES = 3
"""Tries of a drill: after a slow control, a moment can fall behind the end of the run."""
_UNKNOWN = (Verdict.UNKNOWN,)
_REASON = "interrupted|ended by a TERM signal|not complete|expected .* observations|nothing was recorded|pending"


def moment_drills(moments: int = MOMENTS) -> tuple[Drill, ...]:
    """Return drills with alternating TERM and KILL, each at its own moment."""
    out = []
    for number in range(1, moments + 1):
        name = "TERM" if number % 2 else "KILL"
        strikes = f"the harness, at a random moment of a run of {cell_of(number)}"
        title = f"{name} at a random moment"
        out.append(Drill(f"{name.lower()}-{number:02}", "harness", title, strikes, _UNKNOWN, _REASON, _BOUND_S))
    return tuple(out)


TWICE = Drill(
    "interrupt-twice",
    "harness",
    "Ctrl-C twice",
    "the harness, during the requests and again at once",
    _UNKNOWN,
    "interrupted",
    _BOUND_S,
)


def cell_of(number: int) -> str:
    return _PAIR if number % _EVERY_PAIR == 0 else _SINGLE


_VERDICTS = {EXIT_PASS: Verdict.PASS, EXIT_REGRESSION: Verdict.REGRESSION}
"""What a nightly job takes an exit code for."""


def _right_exit_codes(begun: bool, complete: bool) -> set[int]:
    """Return the right exit codes of an interrupted run: 2, 0 if everything was recorded, and death by the signal if
    nothing was."""
    return {EXIT_UNKNOWN} | ({EXIT_PASS} if complete else set()) | (set() if begun else {-signal.SIGTERM})


class MomentDriller:
    """Runs the harness repeatedly and ends it with signals."""

    def __init__(self, context: Context, seed: int) -> None:
        self._context = context
        self._random = random.Random(seed)
        self._life: dict[str, float] = {}
        """Seconds that a run of a cell takes: as the control, or a later run that was shorter."""

    def run(self, drills: Sequence[Drill]) -> None:
        """Run the drills after a control for each cell, within whose duration moments are drawn."""
        for drill in drills:
            number = int(drill.id.rpartition("-")[2]) if drill.id != TWICE.id else 1
            cell = cell_of(number)
            self._life.setdefault(cell, undisturbed(self._context, cell).seconds)
            self._context.attempt(drill, partial(self._retried, drill, cell))

    def _retried(self, drill: Drill, cell: str, footprint: Footprint) -> Result:
        """Retry when the run ended before its moment, now with that run's duration."""
        result = self._drill(drill, cell, footprint, drill.id)
        for number in range(2, _TRIES + 1):
            if result.ending is not Ending.LOST or drill.id == TWICE.id:
                break
            self._context.reporter.line(f"{drill.id}: {'; '.join(result.problems)}; trying again")
            result = self._drill(drill, cell, footprint, f"{drill.id}-{number}")
        return result

    def _drill(self, drill: Drill, cell: str, footprint: Footprint, name: str) -> Result:
        out, life = self._context.folder / name, self._life[cell]
        with Child(run_arguments(self._context, cell, out), self._context.folder / f"{name}.log") as child:
            if drill.id == TWICE.id:
                reached = child.until(lambda: whole_lines(folder_in(out)) >= 5, _LIFE_S)
                where = "after 5 requests"
            else:
                moment = self._random.uniform(0.0, life)
                child.until(lambda: time.monotonic() - child.begun >= moment, _LIFE_S)
                reached, where = child.running, f"after {moment:.1f} of about {life:.0f} s"
                if not reached:
                    self._life[cell] = min(life, time.monotonic() - child.begun)
            before = whole_lines(folder_in(out))
            since = time.monotonic()
            self._signal(drill, child)
            code = child.wait(_BOUND_S)
            seconds = time.monotonic() - since
        left = footprint.left(_END_S)
        return self._judge(
            drill._replace(strikes=f"{drill.strikes}: {where}"), child, out, code, before, seconds, left, reached
        )

    def _signal(self, drill: Drill, child: Child) -> None:
        if drill.id == TWICE.id:
            child.popen.send_signal(signal.SIGINT)
            time.sleep(0.5)
            child.popen.send_signal(signal.SIGINT)
        else:
            child.popen.send_signal(signal.SIGKILL if drill.id.startswith("kill") else signal.SIGTERM)

    def _judge(
        self,
        drill: Drill,
        child: Child,
        out: Path,
        code: int | None,
        before: int,
        seconds: float,
        left: tuple[str, ...],
        reached: bool,
    ) -> Result:
        folder = folder_in(out)
        reasons: list[str] = []
        recorded, verdict, complete = 0, None, False
        if folder is None or no_run(folder):
            # The signal came before there was anything to record.
            reasons.append("nothing was recorded before the signal")
            verdict = Verdict.UNKNOWN
        else:
            after = After(folder, self._context.folder / f"{drill.id}.check.log")
            reasons += after.reasons
            recorded, verdict = after.recorded, after.verdict
            complete = after.complete
            if complete:
                # All evidence was recorded before the signal, so the run has to pass.
                title = f"{drill.title}, after everything was recorded"
                drill = drill._replace(verdicts=(Verdict.PASS,), reason="", title=title)
                reasons.append("complete")
        if "Traceback" in child.text:
            reasons.insert(0, "the harness ended with a traceback")
            verdict = None
        if code is None:
            reasons.insert(0, f"the harness did not end within {_BOUND_S:.0f} s of the signal")
            verdict = None
        elif not drill.id.startswith("kill") and code not in _right_exit_codes(not no_run(folder), complete):
            reasons.insert(0, f"the harness ended with exit code {code}, which does not reflect what happened")
            verdict = _VERDICTS.get(code)
        if not reached or (drill.id.startswith("kill") and code != -signal.SIGKILL):
            return lost(drill, f"the run had ended before the signal, with exit code {code}", left, drill.id)
        seen = Seen(verdict, tuple(reasons), before, recorded, seconds, left)
        return judge_drill(drill, seen, drill.id)
