"""The command line with real engines, and the processes that it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from harness.cli.app import main
from harness.history.folder import History, load_history
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.checks.kv import COMPUTED, HANDED_OVER
from harness.judging.checks.registry import judge
from harness.judging.references import baselines_for
from harness.util.paths import REPOSITORY


class Done(NamedTuple):
    """A finished command."""

    code: int
    output: str
    folder: Path | None

    @property
    def history(self) -> History:
        assert self.folder is not None, self.output
        return load_history(self.folder)


def newest(out: Path) -> Path | None:
    link = out / "latest"
    return link.resolve() if link.exists() else next((p for p in out.glob("*-*") if p.is_dir()), None)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send what this process writes to a file, also past ``sys.stdout``."""
    saved = [os.dup(standard) for standard in (1, 2)]
    streams = sys.stdout, sys.stderr
    with path.open("w", encoding="utf-8", buffering=1) as file:
        try:
            for standard in (1, 2):
                os.dup2(file.fileno(), standard)
            sys.stdout = sys.stderr = file
            yield
        finally:
            sys.stdout, sys.stderr = streams
            for standard, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, standard)
                os.close(copy)


def command_line(program: Callable[[], None], name: str, *arguments: str) -> tuple[int, str]:
    """Run a command line in this process, as its own would; return the exit code and the output.

    The engines of all tests are then forked from one process that has imported vLLM. Commands that are interrupted or
    killed have a process of their own.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        output = Path(folder) / "output"
        patch.setattr(sys, "argv", [name, *arguments])
        patch.chdir(REPOSITORY)
        try:
            with _output_to(output):
                program()
            code: object = 0
        except SystemExit as end:
            code = end.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        assert code is None or isinstance(code, int)
        return code or 0, output.read_text(encoding="utf-8")


def harness(*arguments: str, out: Path | None = None) -> Done:
    """Run ``harness`` with these arguments; ``out`` is where its run is recorded."""
    given = arguments if out is None else (*arguments, "--out", str(out))
    code, output = command_line(main, "harness", *given)
    return Done(code, output, newest(out) if out else None)


def left_over(run_folder: Path) -> list[str]:
    """Command lines of live processes in the sessions of the engines that a run started."""
    record = json.loads((run_folder / "run.json").read_text())
    return living({e["pid"] for e in record["engines"]})


def require_the_plain_engines_kv(done: Done) -> None:
    """Every cold prompt of the pair with EAGLE3 was handed over, and computed, bit for bit as the plain engine did."""
    assert done.code == 0, done.output
    judgement = judge(done.history, baselines_for(done.history))
    over, computed = judgement.result("pd-eagle3", HANDED_OVER), judgement.result("pd-eagle3", COMPUTED)
    assert over.verdict is computed.verdict is Verdict.PASS
    cold = [o for o in done.history.in_order("pd-eagle3") if o.scenario == COLD]
    assert over.judged == computed.judged == len(cold) >= 6
    assert judgement.result("single-eagle3", COMPUTED).verdict is Verdict.PASS
    assert done.folder is not None and left_over(done.folder) == []


def living(sessions: set[int]) -> list[str]:
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(" ".join(process.cmdline()))
        except (ProcessLookupError, psutil.Error):
            continue
    return alive
