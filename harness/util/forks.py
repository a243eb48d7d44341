"""Work that is shared out to forked processes: each has what this one has in memory, and gives back its results."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple, NoReturn, TypeVar

from harness.errors import InfrastructureError
from harness.util.progress import SAYING
from harness.util.signals import ENDING, deferred, ignored

Task = TypeVar("Task")
Result = TypeVar("Result")
_SET_PDEATHSIG = 1


class _Fork(NamedTuple):
    pid: int
    pipe: Connection


class _Raised(NamedTuple):
    """What a task raised."""

    error: Exception


def may_fork() -> bool:
    """Return whether this process has no thread that may hold a lock while it is copied. The one that says what takes
    long holds none but that of standard error, which copies open anew."""
    here = threading.main_thread()
    alone = all(t is here or t.name == SAYING for t in threading.enumerate())
    return sys.platform == "linux" and threading.current_thread() is here and alone


def in_forks(work: Callable[[Task], Result], tasks: Sequence[Task], processes: int, doing: str) -> list[Result]:
    """Return what ``work`` makes of each task, in their order; they are begun in their order, too.

    The first error that a task raises is raised here. Raises InfrastructureError when a process is killed; ``doing``
    says of what. None is left behind, whatever ends this call.
    """
    found: dict[int, Result] = {}
    waiting = iter(range(len(tasks)))
    with _forked(work, tasks, min(processes, len(tasks))) as forks:
        if not forks:
            return [work(task) for task in tasks]
        by_pipe = {fork.pipe: fork for fork in forks}
        busy = {fork.pipe: at for fork, at in zip(forks, waiting, strict=False)}
        for pipe, at in busy.items():
            _tell(by_pipe[pipe], at, doing)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                fork, at = by_pipe[ready], busy.pop(ready)
                found[at] = _answer(fork, doing)
                if (following := next(waiting, None)) is not None:
                    busy[ready] = following
                    _tell(fork, following, doing)
    return [found[at] for at in range(len(tasks))]


def _tell(fork: _Fork, at: int, doing: str) -> None:
    try:
        fork.pipe.send(at)
    except OSError as error:
        raise _lost(fork, doing) from error


def _answer(fork: _Fork, doing: str) -> Any:
    try:
        # Nobody but a copy of this process has the other end.
        answer = fork.pipe.recv()
    except (EOFError, OSError) as error:
        raise _lost(fork, doing) from error
    if isinstance(answer, _Raised):
        raise answer.error
    return answer


def _lost(fork: _Fork, doing: str) -> InfrastructureError:
    os.kill(fork.pid, signal.SIGKILL)
    # It is reaped with the others, so that until then no other process has its number.
    ended = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    killed = ended.si_code != os.CLD_EXITED
    how = f"was killed by signal {ended.si_status}" if killed else f"ended with exit code {ended.si_status}"
    memory = ", as the kernel does when memory runs out" if killed and ended.si_status == signal.SIGKILL else ""
    return InfrastructureError(
        f"{doing}: one of several processes {how}{memory}, so nothing is concluded; do it again with more free memory, "
        "or in one process, which `taskset -c 0` before the command brings about"
    )


@contextmanager
def _forked(work: Callable[[Task], Any], tasks: Sequence[Task], count: int) -> Iterator[list[_Fork]]:
    """Yield the processes, fewer than ``count`` where the system refuses more, and end them."""
    forks: list[_Fork] = []
    try:
        # A signal in between would leave a process that nobody knows.
        with deferred(), contextlib.suppress(OSError):
            while len(forks) < count:
                forks.append(_fork(work, tasks, forks))
        yield forks
    finally:
        # They have nothing to save.
        with ignored():
            for fork in forks:
                fork.pipe.close()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fork.pid, signal.SIGKILL)
            for fork in forks:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(fork.pid, 0)


def _fork(work: Callable[[Task], Any], tasks: Sequence[Task], others: Sequence[_Fork]) -> _Fork:
    ours, theirs = Pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 counts threads of libraries, which see to themselves; see ``may_fork`` for the others.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
    if pid == 0:
        _end_with(parent)
        _serve(work, tasks, theirs, [ours, *(fork.pipe for fork in others)])
    theirs.close()
    return _Fork(pid, ours)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Supervisors, which carry no other package with them, do
    the same."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _serve(
    work: Callable[[Task], Any], tasks: Sequence[Task], pipe: Connection, of_parent: Sequence[Connection]
) -> NoReturn:
    """Do tasks until the parent has none, or is gone."""
    code = 1
    try:
        # The parent gets the same signals, and decides.
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        for other in of_parent:
            other.close()
        # The lock of the old one may be held by a thread that only the parent has.
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        # What is shared with the parent stays shared as long as nobody looks for cycles in it.
        gc.freeze()
        while True:
            pipe.send_bytes(_done(work, tasks[pipe.recv()]))
    except (EOFError, OSError):
        code = 0
    finally:
        os._exit(code)


def _done(work: Callable[[Task], Any], task: Task) -> bytes:
    try:
        return pickle.dumps(work(task), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        error.add_note(f"raised in a process of its own:\n{traceback.format_exc()}")
        return _pickled(error)


def _pickled(error: Exception) -> bytes:
    try:
        raised = pickle.dumps(_Raised(error))
        # Some errors cannot be made again from what they keep.
        copy.deepcopy(error)
    except Exception:
        said = RuntimeError(f"{type(error).__name__}: {error}")
        said.add_note(error.__notes__[-1])
        return pickle.dumps(_Raised(said))
    return raised
