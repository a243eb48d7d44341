"""Keeps a process tree from outliving whoever asked for it. Run as a program, with the standard library alone:

    warden.py COMMAND ARGUMENT …

It starts COMMAND in a session of its own, with its own standard error as the output, and writes one line of JSON to
its standard output when that has started and one when it has ended. It ends the whole tree at once, with SIGKILL, when
its standard input is closed: whoever holds the other end of that pipe need not be able to do anything any more.

A parent that is killed cannot clean up, and a signal at the parent's death (``PR_SET_PDEATHSIG``) reaches the first
process only: a vLLM server has an engine core and workers below it. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_POLL_S = 0.5
_ORPHANS_S = 2.0
"""Time that children get to end by themselves, and to write why, after the first process has ended."""
_KILL_S = 30.0
"""After that, what is left cannot be killed: it hangs in the kernel."""


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can leave the tree."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _parent(pid: int) -> int | None:
    """The parent of a living process; None for zombies and for processes that are gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, parent = stat.rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)


def descendants(root: int) -> list[int]:
    """Living processes below ``root``."""
    parents = {int(p.name): _parent(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
    found: list[int] = []
    wanted = {root}
    while wanted:
        wanted = {pid for pid, parent in parents.items() if parent in wanted}
        found += wanted
    return found


def kill_all() -> None:
    """Kill every descendant, and those that they start meanwhile."""
    deadline = time.monotonic() + _KILL_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        reap()


def reap() -> dict[int, int]:
    """Collect ended children: exit codes by process id, negative for signals."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def say(**what: object) -> None:
    """One line to whoever asked; that may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(what) + "\n").encode())


def closed(timeout_s: float) -> bool:
    """Whether the pipe to whoever asked is closed; waits for that."""
    return bool(select.select([0], [], [], timeout_s)[0]) and not os.read(0, 4096)


def watch(command: list[str]) -> None:
    """Start the command and wait until it has ended or nobody wants it any more."""
    actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    try:
        pid = os.posix_spawnp(
            command[0], command, os.environ, file_actions=actions, setsid=True, setsigdef=(*_IGNORED, signal.SIGXFSZ)
        )
    except OSError as error:
        say(failed=f"{command[0]}: {error.strerror}")
        return
    say(pid=pid)
    while not closed(_POLL_S):
        ended = reap()
        if pid in ended:
            # Not before its children are gone: whoever reads this may look for them next.
            deadline = time.monotonic() + _ORPHANS_S
            while descendants(os.getpid()) and time.monotonic() < deadline and not closed(0.05):
                reap()
            kill_all()
            say(ended=ended[pid])
            return


def main() -> None:
    # Not a child of whoever asked: some (Ray's workers among them) kill their children before they end.
    if os.fork():
        os._exit(0)
    with contextlib.suppress(PermissionError):
        os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    adopt_orphans()
    try:
        watch(sys.argv[1:])
    finally:
        kill_all()


if __name__ == "__main__":
    main()
