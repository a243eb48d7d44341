"""Keeps a process tree from outliving whoever asked for it. Run as a program, with the standard library alone:

    warden.py ABOUT COMMAND ARGUMENT …

It starts COMMAND in a session of its own, with its own standard error as the output, and writes one line of JSON to
its standard output when that has started, one when it has ended, and one when nothing of it is left. It ends the whole
tree at once, with SIGKILL, when its standard input is closed: whoever holds the other end of that pipe need not be able
to do anything any more. Then it removes the shared memory that the tree made.

ABOUT is JSON: ``ledger`` (a file), ``mark``, ``holder`` (pid and start time of whoever asked), ``claims`` (descriptors
of locked files, held until the tree is gone) and ``about`` (what else the ledger says). The ledger is written before
COMMAND is started and removed when its tree is gone: what a warden that is killed itself leaves is found by it.

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
from typing import Any

if not __package__:
    # As a program in isolated mode it does not find this package; the standard library still comes first.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from harness.engine import traces
from harness.engine.traces import Process, Segment

_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_POLL_S = 0.5
_LOOK_S = 15.0
"""Between looks at the processes of the tree, which take 17 ms on a busy machine with 115 of them: every 2 s was over
1 % of a core. New segments are looked at when they come."""
_ORPHANS_S = 2.0
"""Time that children get to end by themselves, and to write why, after the first process has ended."""
_KILL_S = 30.0
"""After that, what is left cannot be killed: it hangs in the kernel."""
_USED_S = 3.0
_YOUNG_S = 10.0
"""For so long a new segment is asked for its users at every poll, and then when the tree ends: it takes 10 ms and more
for each process, and segments of other harnesses stay new."""
FORMAT = 1


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can leave the tree."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Living processes below ``root``."""
    return list(traces.below([root], traces.processes()))


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


class Waiter:
    """Waits for the pipe to whoever asked, and for children."""

    def __init__(self) -> None:
        self._ended, wake = os.pipe()
        os.set_blocking(self._ended, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def closed(self, timeout_s: float) -> bool:
        """Whether the pipe to whoever asked is closed; waits for that, or until a child has ended."""
        ready = select.select([0, self._ended], [], [], timeout_s)[0]
        if self._ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ended, 4096)
        return 0 in ready and not os.read(0, 4096)


class Tree:
    """The processes below this one, what they made, and the ledger that says so."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._ledger = Path(said["ledger"])
        self._said = said
        self._claims: list[int] = said["claims"]
        for handle in self._claims:
            os.set_inheritable(handle, False)
        self._before = traces.segments()
        self._members: set[Process] = set()
        self._made: set[Segment] = set()
        self._new: dict[Segment, float] = {}
        """When each segment was seen first that may be another tree's."""
        self._engine: Process | None = None
        self._looked = 0.0
        self.write()

    def write(self) -> None:
        """Write the ledger, in one step."""
        ledger = {
            "format": FORMAT,
            "boot": traces.boot(),
            "namespace": traces.namespace(),
            "mark": self._said["mark"],
            "holder": self._said["holder"],
            "warden": traces.process(os.getpid()),
            "engine": self._engine,
            "members": sorted(self._members),
            "made": sorted(self._made),
            "before": sorted(self._before),
            **self._said["about"],
        }
        temporary = self._ledger.with_suffix(".new")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(ledger), encoding="utf-8")
            temporary.replace(self._ledger)

    def started(self, pid: int) -> None:
        self._engine = traces.process(pid)
        self.look()
        self.write()

    def look(self) -> None:
        """Note the processes of the tree, and the segments that they made."""
        self._look(everything=False)

    def _look(self, everything: bool) -> None:
        now = time.monotonic()
        fresh = traces.segments() - self._before - self._made
        self._new = {s: self._new.get(s, now) for s in fresh}
        asked = {s for s, seen in self._new.items() if everything or now - seen < _YOUNG_S}
        if not everything and not asked and now - self._looked < _LOOK_S:
            return
        self._looked = now
        known = len(self._members), len(self._made)
        mine = self._below()
        self._members |= mine
        self._note_segments(asked, {p.pid for p in mine})
        if known != (len(self._members), len(self._made)):
            self.write()

    def _below(self) -> set[Process]:
        """Living processes of the tree. Those that were seen before are asked for by name: while its parent dies, a
        process is below nobody for a moment, and one that was killed takes a while to end."""
        table = traces.processes()
        found = {Process(pid, table[pid].start) for pid in traces.below([os.getpid()], table)}
        return found | {m for m in self._members if m.pid in table and table[m.pid].start == m.start}

    def _note_segments(self, asked: set[Segment], mine: set[int]) -> None:
        pids = {m.pid for m in self._members}
        used = traces.users(asked, mine)
        for one in list(self._new):
            if used.get(one) or traces.named_after(one) in pids:
                self._made.add(one)
                del self._new[one]

    def kill(self) -> None:
        """Kill every descendant, and those that they start meanwhile."""
        deadline = time.monotonic() + _KILL_S
        traces.freeze(self._below)
        self._look(everything=True)
        while time.monotonic() < deadline:
            left = self._below()
            if not left:
                break
            self._members |= left
            for one in left:
                traces.send(one, signal.SIGKILL)
            time.sleep(0.02)
            reap()

    def end(self) -> None:
        """Kill what lives, remove what it made, say what is left, and let go of the ledger when that is nothing."""
        self.kill()
        reap()
        self._look(everything=True)
        left = [f"process {p.pid} of {self._said['about'].get('name')}, which cannot be killed" for p in self._below()]
        removed, kept = self._remove()
        left += kept
        if left:
            self.write()
        else:
            with contextlib.suppress(OSError):
                self._ledger.unlink()
        self._let_go()
        say(left=left, removed=removed)

    def _remove(self) -> tuple[list[str], list[str]]:
        """As ``traces.remove``, with some patience for others that still use a segment: they may be ending too."""
        deadline = time.monotonic() + _USED_S
        removed, kept = traces.remove(self._made)
        while kept and time.monotonic() < deadline:
            time.sleep(0.1)
            more, kept = traces.remove(self._made)
            removed += more
        return removed, kept

    def _let_go(self) -> None:
        """Of the claims; their files are the holder's to remove while it lives and holds them too."""
        held = traces.lives(Process(*self._said["holder"]))
        for handle in self._claims:
            if held:
                os.close(handle)
            else:
                traces.drop_claim(handle)


def watch(tree: Tree, command: list[str], mark: str) -> None:
    """Start the command and wait until it has ended or nobody wants it any more."""
    waiter = Waiter()
    if waiter.closed(0):
        return
    actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    ignored = (*_IGNORED, signal.SIGXFSZ)
    env = {**os.environ, traces.MARK: mark}
    try:
        pid = os.posix_spawnp(command[0], command, env, file_actions=actions, setsid=True, setsigdef=ignored)
    except OSError as error:
        say(failed=f"{command[0]}: {error.strerror}")
        return
    tree.started(pid)
    say(pid=pid)
    while not waiter.closed(_POLL_S):
        ended = reap()
        tree.look()
        if pid in ended:
            # Not before its children are gone: whoever reads this may look for them next.
            deadline = time.monotonic() + _ORPHANS_S
            while descendants(os.getpid()) and time.monotonic() < deadline and not waiter.closed(0.05):
                reap()
            tree.kill()
            say(ended=ended[pid])
            return


def _end(*_: object) -> None:
    # A second signal must not cut the end short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def main() -> None:
    # Not a child of whoever asked: some (Ray's workers among them) kill their children before they end.
    if os.fork():
        os._exit(0)
    with contextlib.suppress(PermissionError):
        os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    said = json.loads(sys.argv[1])
    tree = Tree(said)
    signal.signal(signal.SIGTERM, _end)
    adopt_orphans()
    try:
        watch(tree, sys.argv[2:], said["mark"])
    finally:
        tree.end()


if __name__ == "__main__":
    main()
