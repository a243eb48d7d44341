"""Keeps a process tree from outliving its holder, the process that asked for it. Run as a program:

    supervisor.py ABOUT COMMAND ARGUMENT …

It starts COMMAND in a session of its own, with this program's standard error as its output, and writes one line of JSON
to standard output when COMMAND has started, one when it has ended, and one when its whole tree is gone. It kills the
whole tree with SIGKILL as soon as its standard input is closed, which the kernel does even when the holder is killed.
Then it removes the shared memory that nobody uses any more. It consists of two processes, each of which does that if
the other one is killed.

ABOUT is JSON: ``ledger`` (a file), ``mark``, ``holder`` (its pid and start time), ``claims`` (descriptors of locked
files, held until the tree is gone) and ``about`` (further fields of the ledger; ``scratch`` among them is a folder to
create for COMMAND's sockets). The ledger is the record of the process tree, by which ``harness clean`` finds what a
killed supervisor leaves. It is written before COMMAND is started, which fails if it cannot be written, and removed when
the tree is gone and that has been reported.

A killed parent cannot clean up, and a signal at the parent's death (``PR_SET_PDEATHSIG``) reaches the first process
only, but a vLLM server has an engine core and workers below it; here it is the second line (``end_with``). Standard
library only. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

if not __package__:
    # Isolated mode leaves this package off the path. Appended, so that the standard library still comes first.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from harness.supervision import procfs, runtime_dir
from harness.supervision.procfs import Process

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
HANDLED = (*_IGNORED, signal.SIGXFSZ)
"""Signals that a supervisor or Python does not leave at their defaults, as a program that is started expects them."""
Start = Callable[[list[str], dict[str, str]], int]
"""Starts a command in a session of its own, with more variables than the supervisor's, and returns its pid."""
_POLL_S = 0.5
_SCAN_S = 15.0
"""Interval between scans of the tree's processes: more frequent ones cost over 1 % of a core."""
_ORPHANS_S = 2.0
"""Time that children get to end by themselves, and to log the reason, after the first process has ended."""
_KILL_S = 30.0
"""Time after which a process counts as one that cannot be killed, because it hangs in the kernel."""
FORMAT = 4


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that no process can leave the tree."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> dict[int, int]:
    """Reap ended children; return their exit codes by process id, negative for signals."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _pause() -> None:
    time.sleep(0.02)
    reap()


def reply(**fields: object) -> None:
    """Write one line to the holder, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(fields) + "\n").encode())


def log(words: str) -> None:
    """Write one line to the engine's log."""
    with contextlib.suppress(OSError):
        os.write(2, f"harness: {words}\n".encode())


class Waiter:
    """Waits for the end of the holder, SIGTERM, or the end of a child."""

    def __init__(self) -> None:
        self._ended, wake = os.pipe()
        os.set_blocking(self._ended, False)
        os.set_blocking(wake, False)
        self._terminated = False
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The handler raises nothing, so that SIGTERM never interrupts the end of the tree.
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        self._terminated = True

    def closed(self, timeout_s: float) -> bool:
        """Return whether the pipe to the holder is closed or SIGTERM came; wait for that, or until a child has
        ended."""
        ready = [] if self._terminated else select.select([0, self._ended], [], [], timeout_s)[0]
        if self._ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ended, 4096)
        return self._terminated or (0 in ready and not os.read(0, 4096))


class Tree:
    """The processes below this one, and the ledger that records them."""

    def __init__(self, request: dict[str, Any]) -> None:
        """Write the first ledger. ``request`` is ABOUT of the command line. Raises OSError."""
        self._ledger = Path(request["ledger"])
        self._request = request
        self._claims: list[int] = request["claims"]
        for handle in self._claims:
            os.set_inheritable(handle, False)
        self._members: set[Process] = set()
        self.pids: set[int] = set()
        """Pids of the tree's processes so far, supervisors included."""
        self._scratch = Path(named) if (named := request["about"].get("scratch")) else None
        self._engine: Process | None = None
        self._scanned = 0.0
        self._trouble = ""
        self._give_up_at = 0.0
        """When remaining processes count as ones that cannot be killed; 0 before the first kill."""
        self._write()

    def _write(self) -> None:
        """Replace the ledger atomically. Raises OSError."""
        ledger = {
            "format": FORMAT,
            "boot": procfs.boot(),
            "machine": procfs.machine(),
            "namespace": procfs.namespace(),
            "mark": self._request["mark"],
            "holder": self._request["holder"],
            "warden": procfs.process(os.getpid()),
            "engine": self._engine,
            "members": sorted(self._members),
            **self._request["about"],
        }
        temporary = procfs.partial_ledger(self._ledger)
        try:
            temporary.write_text(json.dumps({**ledger, "checksum": procfs.checksum(ledger)}), encoding="utf-8")
            temporary.replace(self._ledger)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def make_scratch(self) -> dict[str, str]:
        """Create the tree's folder for sockets, if it is to have one, and return the variables for it. Raises
        OSError."""
        if self._scratch is None:
            return {}
        self._scratch.mkdir(mode=0o700)
        return runtime_dir.environment(self._scratch)

    def started(self, pid: int) -> None:
        """Record the process that was started."""
        self._engine = procfs.process(pid)
        self.scan()

    @property
    def engine_start(self) -> int:
        """Start time of the engine's process; 0 if it was gone at once."""
        return self._engine.start if self._engine is not None else 0

    def scan(self) -> None:
        """Record the processes of the tree if that is due. A failure must not end the engine; it is logged, once."""
        if self._scanned and time.monotonic() - self._scanned < _SCAN_S:
            return
        known, first = self._members, not self._scanned
        self._scanned = time.monotonic()
        try:
            self._members = self._living()
            self.pids |= {one.pid for one in self._members}
            if first or known != self._members:
                self._write()
            self._trouble = ""
        except Exception as error:
            if not self._trouble:
                log(
                    f"the ledger cannot be brought up to date ({type(error).__name__}: {error}); if this supervisor is "
                    "killed, processes that start from now on will not be found"
                )
            self._trouble = f"the ledger {self._ledger}, which cannot be written"

    def _living(self) -> set[Process]:
        """Return the living processes of the tree.

        Known members are looked up one by one: while its parent dies, a process has no parent for a moment, and a
        killed process takes a while to end.
        """
        table = procfs.processes()
        found = {Process(pid, table[pid].start) for pid in procfs.below([os.getpid()], table)}
        return found | {m for m in self._members if m.pid in table and table[m.pid].start == m.start}

    def kill(self) -> Collection[Process]:
        """Kill every descendant, including those that are started meanwhile; return those that cannot be killed."""
        self._give_up_at = self._give_up_at or time.monotonic() + _KILL_S
        return procfs.kill_all(self._seen, self._give_up_at - time.monotonic(), _pause)[1]

    def _seen(self) -> set[Process]:
        """Return the living processes of the tree, and remember them."""
        living = self._living()
        self._members |= living
        self.pids |= {one.pid for one in living}
        return living

    def end(self) -> None:
        """Kill the tree, remove what it created, report what is left, and remove the ledger if nothing is."""
        name = self._request["about"].get("name")
        left = [f"process {p.pid} of {name}, which cannot be killed" for p in sorted(self.kill())]
        removed = []
        try:
            removed = procfs.remove_abandoned(self._request["about"]["started"], self.pids)
        except Exception as error:
            left.append(f"shared memory that cannot be examined ({type(error).__name__}: {error})")
        if self._scratch is not None and not left and (words := runtime_dir.remove(self._scratch)):
            left.append(words)
        if left:
            self._scanned = 0.0
            self.scan()
            left += [self._trouble] if self._trouble else []
        self._release_claims()
        # Before the ledger is removed: a holder that finds no ledger and has no reply knows that somebody removed it.
        reply(left=left, removed=removed)
        if not left:
            # A partial one lies beside it when the owner was killed while writing.
            for path in (self._ledger, procfs.partial_ledger(self._ledger)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _release_claims(self) -> None:
        """Release the claims; the holder removes their files as long as it is alive, because it holds them too."""
        holder_lives = procfs.lives(Process(*self._request["holder"]))
        for handle in self._claims:
            if holder_lives:
                os.close(handle)
            else:
                procfs.drop_claim(handle)


def spawn(command: list[str], env: dict[str, str]) -> int:
    """Start the command in a session of its own and return its pid. Raises OSError."""
    mine = os.getpid()

    def prepare() -> None:
        end_with(mine)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)

    process = subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
        preexec_fn=prepare,
    )
    # ``reap`` waits for it.
    process.returncode = 0
    return process.pid


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process, a child of ``parent``, a signal when its parent ends. For engines it is the
    second line, for when harness and supervisor are killed together. It reaches this process alone, and its children
    only if they notice.

    The supervisor has one thread; of a parent with several, the end of the one that forked would count.
    """
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def watch(tree: Tree, waiter: Waiter, start: Start, command: list[str], mark: str) -> None:
    """Start the command and wait until it has ended or the holder no longer wants it."""
    if waiter.closed(0):
        return
    try:
        env = {procfs.MARK: mark, **tree.make_scratch()}
    except OSError as error:
        reply(failed=f"its folder for temporary files cannot be created: {error}; make room there, or set TMPDIR")
        return
    try:
        pid = start(command, env)
    except OSError as error:
        reply(failed=f"{command[0]}: {error.strerror}")
        return
    tree.started(pid)
    reply(pid=pid, start=tree.engine_start, warden=procfs.process(os.getpid()))
    while not waiter.closed(_POLL_S):
        ended = reap()
        tree.scan()
        if pid in ended:
            # Reported only when its children are gone, because the holder may look for them next.
            deadline = time.monotonic() + _ORPHANS_S
            while (
                procfs.below([os.getpid()], procfs.processes())
                and time.monotonic() < deadline
                and not waiter.closed(0.05)
            ):
                reap()
            tree.kill()
            reply(ended=ended[pid])
            return


def supervise(request: dict[str, Any], command: list[str], start: Start = spawn) -> None:
    """Start the command and own its tree until that is gone. ``request`` is ABOUT of the command line.

    Two processes do that, of which the second one owns the tree. The first one waits, and ends the tree if the second
    one is killed; the second one ends it if the first one is. So neither the end of a supervisor nor that of a
    supervisor and the holder together leaves anything behind.
    """
    # Must not be a child of the holder: some holders (Ray's workers among them) kill their children before they end.
    if os.fork():
        procfs.exit_now()
    with contextlib.suppress(PermissionError):
        os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        tree = Tree(request)
    except OSError as error:
        ledger = request["ledger"]
        reply(failed=f"its ledger {ledger} cannot be written: {error.strerror}; make room there, or set TMPDIR")
        reply(left=[], removed=[], kept=[])
        return
    # What the second process leaves behind becomes this one's.
    adopt_orphans()
    first = os.getpid()
    if (second := os.fork()) > 0:
        tree.pids.add(second)
        stand_by(tree, second)
        return
    tree.pids.add(first)
    waiter = Waiter()
    end_with(first, signal.SIGTERM)
    adopt_orphans()
    try:
        watch(tree, waiter, start, command, request["mark"])
    finally:
        tree.end()


def stand_by(tree: Tree, other: int) -> None:
    """Wait for the process that owns the tree; end the tree in its place if it did not."""
    _, status = os.waitpid(other, 0)
    if status != 0:
        tree.end()


if __name__ == "__main__":
    supervise(json.loads(sys.argv[1]), sys.argv[2:])
