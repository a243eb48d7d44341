"""Keeps a process tree from outliving whoever asked for it. Run as a program, with the standard library alone:

    warden.py ABOUT COMMAND ARGUMENT …

It starts COMMAND in a session of its own, with its own standard error as the output, and writes one line of JSON to
its standard output when that has started, one when it has ended, and one when nothing of it is left. It ends the whole
tree at once, with SIGKILL, when its standard input is closed: whoever holds the other end of that pipe need not be able
to do anything any more. Then it removes the shared memory that the tree made.

ABOUT is JSON: ``ledger`` (a file), ``mark``, ``holder`` (pid and start time of whoever asked), ``claims`` (descriptors
of locked files, held until the tree is gone) and ``about`` (what else the ledger says; ``scratch`` in it is a folder to
make, for COMMAND's sockets). The ledger is written before COMMAND is started, which is not done when it cannot be, and
removed when its tree is gone and that has been said: what a warden that is killed itself leaves is found by it.

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

from harness.engine import scratch, traces
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
FORMAT = 3
READABLE = (2, FORMAT)
"""Formats of ledgers: 2 says nothing of the machine."""


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


def note(words: str) -> None:
    """One line to the engine's log."""
    with contextlib.suppress(OSError):
        os.write(2, f"harness: {words}\n".encode())


class Waiter:
    """Waits for the pipe to whoever asked, and for children."""

    def __init__(self) -> None:
        self._ended, wake = os.pipe()
        os.set_blocking(self._ended, False)
        os.set_blocking(wake, False)
        self._told = False
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Raises nothing: whenever it comes, the tree is ended whole.
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: object) -> None:
        self._told = True

    def closed(self, timeout_s: float) -> bool:
        """Whether the pipe to whoever asked is closed, or SIGTERM came; waits for that, or until a child has ended."""
        ready = [] if self._told else select.select([0, self._ended], [], [], timeout_s)[0]
        if self._ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ended, 4096)
        return self._told or (0 in ready and not os.read(0, 4096))


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
        self._read: set[Segment] = set()
        """Segments that the tree uses and that are called as no library calls its own."""
        self._scratch = Path(named) if (named := said["about"].get("scratch")) else None
        self._engine: Process | None = None
        self._looked = 0.0
        self._troubled = False
        self._give_up_at = 0.0
        """When what is left counts as what cannot be killed; 0 as long as nothing is killed."""
        self._unwritten = ""
        self._write()

    def write(self) -> None:
        """Write the ledger; what cannot be written is said in the engine's log, once."""
        try:
            self._write()
            self._unwritten = ""
        except OSError as error:
            if not self._unwritten:
                note(f"the ledger cannot be written ({error.strerror}); what starts now is lost with this warden")
            self._unwritten = f"the ledger {self._ledger}, which cannot be written ({error.strerror})"

    def _write(self) -> None:
        """In one step. Raises OSError."""
        ledger = {
            "format": FORMAT,
            "boot": traces.boot(),
            "machine": traces.machine(),
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
        temporary = traces.half(self._ledger)
        try:
            temporary.write_text(json.dumps({**ledger, "checksum": traces.checksum(ledger)}), encoding="utf-8")
            temporary.replace(self._ledger)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def make_scratch(self) -> dict[str, str]:
        """Make the tree's folder for temporary files, when it is to have one; returns variables for it. Raises
        OSError."""
        if self._scratch is None:
            return {}
        self._scratch.mkdir(mode=0o700)
        return scratch.environment(self._scratch)

    def started(self, pid: int) -> None:
        self._engine = traces.process(pid)
        self.look()
        self.write()

    @property
    def engine_start(self) -> int:
        """Of the engine's process; 0 when that was gone at once."""
        return self._engine.start if self._engine is not None else 0

    def look(self) -> None:
        """Note the processes of the tree, and the segments that they made. What goes wrong here ends no engine."""
        try:
            self._look(everything=False)
        except Exception as error:
            if not self._troubled:
                note(f"what the processes hold cannot be looked at ({type(error).__name__}: {error})")
            self._troubled = True

    def _look(self, everything: bool) -> None:
        now = time.monotonic()
        fresh = traces.segments() - self._before - self._made
        self._new = {s: self._new.get(s, now) for s in fresh}
        asked = {s for s, seen in self._new.items() if everything or now - seen < _YOUNG_S}
        if not everything and not asked and now - self._looked < _LOOK_S:
            return
        self._looked = now
        known = set(self._members), len(self._made)
        mine = self._below()
        self._members |= mine
        self._note_segments(asked, {p.pid for p in mine})
        # What the others made is noted by now.
        self._members = mine
        if known != (self._members, len(self._made)):
            self.write()

    def _below(self) -> set[Process]:
        """Living processes of the tree. Those that were seen before are asked for by name: while its parent dies, a
        process is below nobody for a moment, and one that was killed takes a while to end."""
        table = traces.processes()
        found = {Process(pid, table[pid].start) for pid in traces.below([os.getpid()], table)}
        return found | {m for m in self._members if m.pid in table and table[m.pid].start == m.start}

    def _note_segments(self, asked: set[Segment], mine: set[int]) -> None:
        used = traces.users(asked, mine)
        for one in list(self._new):
            if self._is_ours(one, bool(used.get(one)), mine):
                self._made.add(one)
                del self._new[one]
            elif used.get(one) and not traces.of_runtime(one):
                self._read.add(one)

    def _is_ours(self, one: Segment, used: bool, mine: set[int]) -> bool:
        """Whether the tree made a segment: it uses it, and it is called as libraries call theirs; or it is called after
        a process of the tree, by which that process is meant and none of another container."""
        if used and traces.of_runtime(one):
            return True
        maker = traces.named_after(one)
        if maker is None or maker not in {m.pid for m in self._members}:
            return False
        return traces.all_pids_seen() or (maker in mine and traces.registered_by(one, maker))

    def kill(self) -> None:
        """Kill every descendant, and those that they start meanwhile."""
        self._give_up_at = self._give_up_at or time.monotonic() + _KILL_S
        traces.freeze(self._below)
        self._last_look()
        while left := self._below():
            self._members |= left
            for one in left:
                traces.send(one, signal.SIGKILL)
            time.sleep(0.02)
            reap()
            if time.monotonic() > self._give_up_at:
                break

    def _last_look(self) -> None:
        """The processes are stopped by now: whatever goes wrong here must not leave them so."""
        try:
            self._look(everything=True)
        except Exception as error:
            note(f"what the processes hold cannot be looked at ({type(error).__name__}: {error})")

    def end(self) -> None:
        """Kill what lives, remove what it made, say what is left, and let go of the ledger when that is nothing."""
        self.kill()
        reap()
        self._last_look()
        left = [f"process {p.pid} of {self._said['about'].get('name')}, which cannot be killed" for p in self._below()]
        try:
            removed, kept = self._remove()
        except Exception as error:
            removed, kept = [], [f"shared memory that cannot be looked at ({type(error).__name__}: {error})"]
        left += kept
        if self._scratch is not None and not self._below() and (words := scratch.remove(self._scratch)):
            left.append(words)
        if left:
            self.write()
            left += [self._unwritten] if self._unwritten else []
        self._let_go()
        # Whoever finds no ledger and has not read this knows that something else removed it.
        say(left=left, removed=removed, kept=self._foreign())
        if not left:
            with contextlib.suppress(OSError):
                self._ledger.unlink()

    def _foreign(self) -> list[str]:
        """What is there of segments that the tree used, and that may be somebody's data, in words."""
        there = traces.segments() & self._read
        return [f"{traces.SHM / s.name}, which it had open and which no library calls so" for s in sorted(there)]

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


def watch(tree: Tree, waiter: Waiter, command: list[str], mark: str) -> None:
    """Start the command and wait until it has ended or nobody wants it any more."""
    if waiter.closed(0):
        return
    actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    ignored = (*_IGNORED, signal.SIGXFSZ)
    try:
        env = {**os.environ, traces.MARK: mark, **tree.make_scratch()}
    except OSError as error:
        say(failed=f"its folder for temporary files cannot be made: {error}; make room there, or set TMPDIR")
        return
    try:
        pid = os.posix_spawnp(command[0], command, env, file_actions=actions, setsid=True, setsigdef=ignored)
    except OSError as error:
        say(failed=f"{command[0]}: {error.strerror}")
        return
    tree.started(pid)
    say(pid=pid, start=tree.engine_start, warden=traces.process(os.getpid()))
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


def main() -> None:
    # Not a child of whoever asked: some (Ray's workers among them) kill their children before they end.
    if os.fork():
        os._exit(0)
    with contextlib.suppress(PermissionError):
        os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    waiter = Waiter()
    said = json.loads(sys.argv[1])
    try:
        tree = Tree(said)
    except OSError as error:
        say(failed=f"its ledger {said['ledger']} cannot be written: {error.strerror}; make room there, or set TMPDIR")
        say(left=[], removed=[], kept=[])
        return
    adopt_orphans()
    try:
        watch(tree, waiter, sys.argv[2:], said["mark"])
    finally:
        tree.end()


if __name__ == "__main__":
    main()
