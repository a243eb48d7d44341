"""Drills on the harness itself: how a signalled run is judged by its folder. The child is a program that stands in for
the harness; no engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from faults import cli_child, filesystem, kill_timing
from faults.cli_child import After, Child, folder_in, whole_lines
from faults.context import Context
from faults.kill_timing import TWICE, MomentDriller, cell_of, moment_drills
from faults.leaks import MARK, new_mark
from faults.model import ControlRun, Ending
from faults.results import Tried
from harness.errors import EnvironmentFault
from harness.history.verdict import Verdict
from harness.util.paths import REPOSITORY
from harness.util.progress import Reporter
from tests.support import program
from tests.support.builders import history, observation, with_answers, with_cells, written_run
from tests.support.supervised import wait_for


def recorded(folder: Path, state: str = "complete", count: int = 3) -> Path:
    """A run of three observations of which so many are there."""
    made = with_cells(history([observation("single-none", n) for n in (40, 50, 60)], folder=folder), state=state)
    left = with_answers(made, made.observations[:count])
    return written_run(folder, left, finished=made.run.finished if count == 3 else None)


def test_a_run_that_was_cut_short_is_unknown_and_keeps_what_it_has(tmp_path):
    after = After(recorded(tmp_path / "run", "pending", 2), tmp_path / "log")
    assert after.verdict is Verdict.UNKNOWN
    assert after.recorded == 2
    assert not after.complete
    assert any("pending" in r or "not complete" in r for r in after.reasons)


def test_a_damaged_run_has_no_verdict(tmp_path):
    folder = recorded(tmp_path / "run")
    (folder / "run.json").write_text("{")
    after = After(folder, tmp_path / "log")
    assert after.verdict is None
    assert "run.json" in after.reasons[0]


def test_moments_alternate_between_signals_and_sometimes_take_a_pair():
    drills = moment_drills(20)
    assert len({d.id for d in drills}) == 20
    assert sum(d.id.startswith("kill") for d in drills) == 10
    assert {cell_of(n) for n in range(1, 21)} == {"single-none", "pd-eagle3"}
    assert moment_drills(0) == ()


class Forked(Child):
    """A command of the harness for the drills, which has ended when it was made."""

    def __init__(self, arguments: tuple[str, ...], log: Path) -> None:
        done = program.harness(*arguments)
        with log.open("a", encoding="utf-8") as stream:
            stream.write(done.output)
        self.log = log
        self.popen = _Exited(done.code)


class _Exited:
    """As much of ``subprocess.Popen`` as is used of a process that has ended."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode

    def wait(self, _timeout: float | None = None) -> int:
        return self.returncode


def judged_by_a_fork(monkeypatch):
    """What a drill left is judged by ``harness check``. A server that starts later would carry the drill's mark."""
    program.start_server()
    monkeypatch.setattr(cli_child, "Child", Forked)


class FakeHarness(Child):
    """Stands in for ``harness run``: records two of three observations and waits for a signal."""

    ends = ""

    def __init__(self, arguments, log: Path) -> None:
        if arguments[0] != "run":
            super().__init__(arguments, log)
            return
        out = Path(arguments[arguments.index("--out") + 1])
        recorded(out / "20260101-000000-fake", "pending", 2)
        # What comes after the program are arguments that it does not read.
        program = f"import signal, time\n{self.ends}\nprint('ready', flush=True)\ntime.sleep(60)"
        self.program = (sys.executable, "-c", program)
        super().__init__((), log)
        # A busy machine may take seconds to start it.
        while self.running and "ready" not in self.text:
            time.sleep(0.05)


@pytest.fixture
def context(tmp_path, monkeypatch):
    """A set of drills whose controls are there already."""
    judged_by_a_fork(monkeypatch)
    mark, tried = new_mark(), Tried()
    monkeypatch.setitem(os.environ, MARK, mark)
    for cell in ("single-none", "pd-eagle3"):
        tried.controls.append(ControlRun(id=f"control-{cell}", verdict=Verdict.PASS, requests=3, seconds=2.0))
    with Reporter(1.0) as reporter:
        yield Context(SimpleNamespace(source="cpu"), None, None, tmp_path, reporter, mark, tried)


@pytest.fixture
def driller(context, monkeypatch):
    monkeypatch.setattr(kill_timing, "Child", FakeHarness)
    return MomentDriller(context, 1), context.tried


def test_a_killed_harness_is_judged_by_what_it_left(driller):
    drill, tried = driller
    drill.run([moment_drills(2)[1]])
    (result,) = tried.results
    assert result.ending is Ending.SURVIVED, result
    assert result.verdict is Verdict.UNKNOWN
    assert result.recorded == result.planned == 2
    assert result.left == ()


def test_a_harness_that_does_not_end_is_not_survived(driller, monkeypatch):
    monkeypatch.setattr(FakeHarness, "ends", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    monkeypatch.setattr(kill_timing, "_BOUND_S", 1.0)
    drill, tried = driller
    drill.run([moment_drills(1)[0]])
    (result,) = tried.results
    assert result.ending is Ending.FAILED
    assert any("found none" in p for p in result.problems)


@pytest.mark.parametrize("code", [0, 2, 64])
@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_a_run_that_ended_before_the_signal_is_lost(driller, monkeypatch, code, name):
    monkeypatch.setattr(FakeHarness, "ends", f"raise SystemExit({code})")
    monkeypatch.setattr(kill_timing, "_TRIES", 1)
    drill, tried = driller
    monkeypatch.setattr(drill._random, "uniform", lambda *_: 5.0)
    drill.run([moment_drills(2)[name == "KILL"]])
    assert tried.results[0].ending is Ending.LOST


def test_a_moment_beyond_the_end_is_drawn_again_within_the_shorter_life(driller, monkeypatch):
    drill, tried = driller
    made = iter(["raise SystemExit(0)", "import os\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(2))"])

    class Shorter(FakeHarness):
        """Its first run ends at once."""

        def __init__(self, arguments, log: Path) -> None:
            if arguments[0] == "run":
                self.ends = next(made)
            super().__init__(arguments, log)

    monkeypatch.setattr(kill_timing, "Child", Shorter)
    lives = []
    monkeypatch.setattr(drill._random, "uniform", lambda _, life: lives.append(life) or (1.0 if len(lives) == 1 else 0))
    drill.run([moment_drills(1)[0]])
    (result,) = tried.results
    assert result.ending is Ending.SURVIVED, result
    assert lives[1] < lives[0] == 2.0


@pytest.mark.parametrize(
    ("code", "ending"),
    [(0, Ending.FALSE_GREEN), (1, Ending.FAILED), (2, Ending.SURVIVED), (64, Ending.FAILED), (None, Ending.FAILED)],
)
def test_the_exit_code_after_term_tells_what_happened(driller, monkeypatch, code, ending):
    """It is what a nightly job goes by; None is TERM's own effect, which reports nothing and ends no engine."""
    handler = "signal.SIG_DFL" if code is None else f"lambda *_: os._exit({code})"
    monkeypatch.setattr(FakeHarness, "ends", f"import os\nsignal.signal(signal.SIGTERM, {handler})")
    drill, tried = driller
    drill.run([moment_drills(1)[0]])
    assert tried.results[0].ending is ending, tried.results[0]


def test_an_interrupt_of_the_drills_ends_the_child_and_is_passed_on(driller, monkeypatch):
    started = []

    class Interrupted(FakeHarness):
        """Whoever waits for it is interrupted."""

        def until(self, condition, limit_s):
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(kill_timing, "Child", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        driller[0].run([moment_drills(1)[0]])
    assert not started[0].running
    # Told to end, not killed: it is the one that can end its engines.
    assert started[0].popen.returncode == -signal.SIGTERM


PARENT = """
import sys
import time
from pathlib import Path
from faults.cli_child import Child
Child.program = (sys.executable, "-c", "import time; time.sleep(60)")
print(Child((), Path(sys.argv[1])).popen.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_ends_with_drills_that_are_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        # setpriv asks the kernel for the signal, and then becomes the program.
        wait_for(lambda: child.name() != "setpriv")
        parent.kill()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


class FakeFiller(Child):
    """Stands in for ``harness run`` on a small disk: records three observations, fills the disk or not, loses what it
    recorded or not, and ends."""

    fills, loses, says, code = True, False, "found No space left on device: the disk is full; make room", 2

    def __init__(self, arguments, log: Path) -> None:
        if arguments[0] != "run":
            super().__init__(arguments, log)
            return
        folder = recorded(Path(arguments[arguments.index("--out") + 1]) / "20260101-000000-fake")
        lines = [
            "import time",
            "time.sleep(0.3)",
            f"if {self.fills}:",
            "    try:",
            f"        open({str(folder / 'more')!r}, 'wb', 0).write(b'x' * (1 << 20))",
            f"        open({str(folder / 'more')!r}, 'ab', 0).write(b'x' * (1 << 20))",
            "    except OSError:",
            "        time.sleep(0.3)",
            f"if {self.loses}:",
            f"    open({str(folder / 'observations.jsonl')!r}, 'r+b').truncate(10)",
            f"print({self.says!r})",
            f"raise SystemExit({self.code})",
        ]
        self.program = (sys.executable, "-c", "\n".join(lines))
        super().__init__((), log)


@pytest.fixture
def of_a_folder(context):
    """Tries one drill on a folder."""

    def tried(drill):
        filesystem.FolderDriller(context).run([drill])
        return context.tried.results[0]

    return tried


@pytest.fixture
def filled(of_a_folder, monkeypatch):
    """Tries the full disk with changes of the stand-in. Without the right to mount it fails: CI has it."""

    def tried(**changes):
        for name, value in changes.items():
            monkeypatch.setattr(FakeFiller, name, value)
        monkeypatch.setattr(filesystem, "Child", FakeFiller)
        return of_a_folder(filesystem.FULL)

    return tried


def test_a_disk_that_was_full_is_survived_with_all_that_was_recorded(filled):
    result = filled()
    assert result.recorded == result.planned == 3
    # What the stand-in left is a whole run without a baseline: UNKNOWN.
    assert result.ending is Ending.SURVIVED, result


def test_a_disk_that_was_not_full_is_lost(filled):
    assert filled(fills=False).ending is Ending.LOST


def test_a_record_that_was_cut_on_a_full_disk_is_not_survived(filled):
    result = filled(loses=True)
    assert result.ending is Ending.FAILED
    assert any("expected 3 recorded observations" in p for p in result.problems)


def test_a_run_that_ends_for_another_reason_has_not_named_the_disk(filled):
    assert filled(says="the single engine ended by itself").ending is Ending.FAILED


def test_a_green_exit_on_a_full_disk_is_a_false_green(filled):
    assert filled(code=0).ending is Ending.FALSE_GREEN


def test_a_read_only_folder_is_named_by_the_harness_itself(of_a_folder):
    result = of_a_folder(filesystem.READ_ONLY)
    assert result.ending is Ending.SURVIVED, result


def test_a_mount_that_is_refused_is_an_environment_fault(tmp_path):
    with pytest.raises(EnvironmentFault, match="mount"), filesystem.mounted(tmp_path / "m", "size=no-such-size"):
        pass


def test_folders_are_read_while_they_grow(tmp_path):
    assert folder_in(tmp_path) is None
    assert whole_lines(None) == 0
    folder = recorded(tmp_path / "run", "pending", 2)
    (tmp_path / "latest").symlink_to("run")
    assert folder_in(tmp_path) == folder
    assert whole_lines(folder) == 2
    assert not cli_child.no_run(folder)
    assert TWICE.id == "interrupt-twice"
