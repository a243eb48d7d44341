"""Runs a command in a child process, for the sake of its exit code: a library may end the process that uses it.

Ray does: when its shutdown takes more than 30 s, or its node is gone, it calls ``_Exit(1)`` in the process that joined
the cluster, and 1 is the exit code of a regression.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from harness.errors import EXIT_UNKNOWN, EXIT_USAGE
from harness.supervision import supervisor
from harness.util.signals import ENDING

Tell = Callable[[int], None]
_BY_A_PERSON = 0
"""The largest ``si_code`` of a signal that a process has sent; the kernel's own have larger ones."""


def continue_in_child(name: str) -> Tell:
    """Fork, and return in the child only; call what is returned with the exit code as soon as that is known.

    The parent exits with that code, whatever becomes of the child afterwards. A child that ends without a code, other
    than by a failure that the command line reports (2 or 64), leaves the verdict unknown. INT, TERM and HUP that the
    parent gets are passed on, and the child gets TERM when the parent is killed. ``name`` says in messages what runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    told, tell = os.pipe()
    awaited = {*ENDING, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        supervisor.end_with(parent, signal.SIGTERM)
        os.close(told)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return lambda code: _tell(tell, code)
    os.close(tell)
    status = _wait(child, awaited)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    sys.exit(_code(os.read(told, 1), os.waitstatus_to_exitcode(status), name))


def _tell(pipe: int, code: int) -> None:
    """Send the exit code to the parent, behind everything that was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(pipe, bytes([code]))
    os.close(pipe)


def _wait(child: int, awaited: set[signal.Signals]) -> int:
    """Return the child's wait status. Signals are passed on, except a terminal's own, which the child gets as well."""
    while True:
        got = signal.sigwaitinfo(awaited)
        if got.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif got.si_code <= _BY_A_PERSON:
            os.kill(child, got.si_signo)


def _code(told: bytes, ended: int, name: str) -> int:
    if told:
        return told[0]
    if ended in (EXIT_UNKNOWN, EXIT_USAGE):
        return ended
    how = f"killed by signal {-ended}" if ended < 0 else f"ended with exit code {ended}"
    print(
        f"harness: the process of {name} {how} before it had a verdict; verdict UNKNOWN; what it recorded is kept, "
        "see harness run --resume",
        file=sys.stderr,
    )
    return EXIT_UNKNOWN
