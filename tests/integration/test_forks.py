"""Work in forked processes: results in order, errors as one process raises them, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.errors import DataError, InfrastructureError
from harness.util import forks
from harness.util.forks import in_forks, may_fork
from harness.util.paths import REPOSITORY


def children() -> list[int]:
    return [p.pid for p in psutil.Process().children()]


@pytest.fixture(autouse=True)
def nobody_is_left_behind():
    before = children()
    yield
    assert children() == before


def test_results_are_those_of_one_process_in_its_order():
    shared = {"by": 3}
    tasks = list(range(20))
    assert in_forks(lambda n: n * shared["by"], tasks, 3, "counting") == [3 * n for n in tasks]


def test_processes_work_at_the_same_time_and_take_what_is_next():
    def slow_first(n: int) -> int:
        time.sleep(0.6 if n == 0 else 0.0)
        return os.getpid()

    by = in_forks(slow_first, range(6), 2, "waiting")
    assert os.getpid() not in by
    assert by[0] not in by[1:] and len(set(by[1:])) == 1


def test_more_processes_than_tasks_are_not_started():
    assert in_forks(lambda n: n, [7], 4, "counting") == [7]
    assert in_forks(lambda n: n, [], 4, "counting") == []


def test_large_results_arrive():
    assert [len(r) for r in in_forks(lambda n: b"x" * n, [8 << 20, 1, 8 << 20], 2, "copying")] == [8 << 20, 1, 8 << 20]


def test_an_error_is_raised_with_its_words_and_its_place():
    def fails(n: int) -> int:
        if n == 3:
            raise DataError(f"line {n} is damaged")
        return n

    with pytest.raises(DataError) as raised:
        in_forks(fails, range(6), 2, "reading")
    assert str(raised.value) == "line 3 is damaged"
    assert "in fails" in raised.value.__notes__[0]


class Unpicklable(Exception):
    def __init__(self, what: str, more: Callable[[], None]) -> None:
        super().__init__(what)
        self.more = more


def test_an_error_that_cannot_be_passed_on_is_told_in_words():
    def fails(_: int) -> None:
        raise Unpicklable("odd", lambda: None)

    with pytest.raises(RuntimeError, match="Unpicklable: odd") as raised:
        in_forks(fails, [1], 1, "reading")
    assert "in fails" in raised.value.__notes__[0]


def test_a_result_that_cannot_be_passed_on_is_an_error():
    with pytest.raises(Exception, match="pickle"):
        in_forks(lambda n: lambda: n, [1], 1, "reading")


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9, as the kernel does when memory runs out"),
        (lambda: os.kill(os.getpid(), signal.SIGUSR1), "killed by signal 10, so nothing"),
        (lambda: os._exit(3), "ended with exit code 3"),
        (sys.exit, "ended with exit code 1"),
    ],
)
def test_a_process_that_is_killed_is_an_error_that_says_what_to_do(end: Callable[[], None], how: str):
    def ends(n: int) -> int:
        if n == 2:
            end()
        return n

    with pytest.raises(InfrastructureError, match=f"judging x: .*{how}.*taskset -c 0"):
        in_forks(ends, range(9), 2, "judging x")


def test_without_a_process_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch):
    def refused() -> int:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(os, "fork", refused)
    assert in_forks(lambda _: os.getpid(), [1, 2], 2, "counting") == [os.getpid()] * 2


def test_with_fewer_processes_than_wanted_all_is_done(monkeypatch: pytest.MonkeyPatch):
    fork, left = os.fork, [1]

    def one() -> int:
        if not left:
            raise BlockingIOError("too many processes")
        left.pop()
        return fork()

    monkeypatch.setattr(os, "fork", one)
    by = in_forks(lambda _: os.getpid(), range(4), 3, "counting")
    assert len(set(by)) == 1 and by[0] != os.getpid()


def test_an_interrupt_ends_all_at_once():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            in_forks(lambda _: time.sleep(60), range(4), 2, "waiting")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 20


def test_signals_of_the_terminal_are_the_parents_to_handle():
    """A terminal sends them to all processes of a command; a task that has begun goes on until the parent decides."""

    def signalled(number: int) -> int:
        os.kill(os.getpid(), number)
        return number

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    assert in_forks(signalled, numbers, 2, "waiting") == numbers


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path):
    script = textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from harness.util.forks import in_forks

        def work(n):
            Path(sys.argv[1], str(os.getpid())).touch()
            time.sleep(60)

        in_forks(work, range(4), 2, "waiting")
    """)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY) as parent:
        _until(lambda: len(list(tmp_path.iterdir())) == 2)
        parent.kill()
    forked = [int(p.name) for p in tmp_path.iterdir()]
    _until(lambda: not any(map(_runs, forked)))


CHECK = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from harness.cli.app import main
    from harness.history import index
    from harness.judging import shares
    from harness.judging.checks import registry
    from harness.util import allowance

    told = Path(sys.argv.pop())

    def judge_cell(*_):
        (told / str(os.getpid())).touch()
        time.sleep(60)

    index.IN_MEMORY = shares.CACHED = 0
    allowance.cores = lambda: [0, 1]
    registry.judge_cell = judge_cell
    main()
""")
RUN = REPOSITORY / "tests" / "golden" / "runs" / "merged"


@pytest.mark.parametrize(
    ("number", "to", "code", "words"),
    [
        (signal.SIGINT, "all", 2, "interrupted by the user (Ctrl-C); verdict UNKNOWN"),
        (signal.SIGTERM, "all", 2, "ended by a TERM signal (a time limit or job control); verdict UNKNOWN"),
        (signal.SIGTERM, "parent", 2, "ended by a TERM signal (a time limit or job control); verdict UNKNOWN"),
        (signal.SIGKILL, "parent", -signal.SIGKILL, ""),
        (signal.SIGKILL, "forked", 2, f"judging {RUN}: one of several processes was killed by signal 9"),
    ],
)
def test_harness_check_that_is_ended_leaves_no_process(tmp_path: Path, number: int, to: str, code: int, words: str):
    command = [sys.executable, "-c", CHECK, "check", str(RUN), str(tmp_path)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        _until(lambda: len(list(tmp_path.iterdir())) == 2)
        forked = [int(p.name) for p in tmp_path.iterdir()]
        assert parent.pid not in forked
        if to == "all":
            os.killpg(parent.pid, number)
        else:
            os.kill(parent.pid if to == "parent" else forked[0], number)
        said, why = parent.communicate(timeout=30)
    assert parent.returncode == code
    assert said == "" and words in why and "Traceback" not in why
    _until(lambda: not any(map(_runs, forked)))


def _until(done: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < 30
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    assert may_fork()
    saying = threading.Thread(name=forks.SAYING)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), saying])
    assert may_fork()
    other = threading.Thread(name="reader")
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), saying, other])
    assert not may_fork()
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    monkeypatch.setattr(threading, "current_thread", lambda: other)
    assert not may_fork()
