"""Orphans of earlier runs on this machine: process trees, shared memory, claimed ports, and their ledgers.

A ledger is the file in which a supervisor records its process tree. A ledger is acted on only when its holder, the
harness that asked for the tree, is gone, and when it was written on this machine and in this pid namespace. A process
is killed only when its pid and start time are listed, or when its mark or its ancestry shows that it belongs to the
tree.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, IPvAnyAddress, ValidationError, model_validator

from harness.errors import EnvironmentFault
from harness.supervision import ports, procfs
from harness.supervision import runtime_dir as scratch
from harness.supervision.procfs import Process, Segment
from harness.supervision.supervisor import FORMAT
from harness.util import file_lock

_KILL_S = 30.0
_SUPERVISOR_S = 45.0
"""Longest that a supervisor takes to end its tree: 4 s for what ends by itself, 30 s for what cannot be killed."""
_POLL_S = 0.05
_LARGEST = 4 * 2**20
"""Bytes of the largest ledger that is read. Real ones are smaller by orders of magnitude."""


Port = Annotated[int, Field(ge=0, le=65535)]


class Ledger(BaseModel):
    """A supervisor's record of its process tree, without the checksum; see ``harness.supervision.supervisor``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: int
    boot: str
    machine: str = ""
    """Empty if unknown."""
    namespace: str
    mark: str = Field(pattern="^[0-9a-f]{16}$")
    holder: Process
    """The harness that asked for the tree."""
    warden: Process | None
    """The supervisor."""
    engine: Process | None
    members: tuple[Process, ...]
    name: str
    """Group and role of the engine."""
    ports: tuple[Port, ...]
    host: IPvAnyAddress
    run: str
    """Folder of the run."""
    scratch: str = ""
    """The folder for its sockets; empty if the path would be too long."""
    started: float = Field(ge=0)
    """Seconds since the epoch."""

    @model_validator(mode="after")
    def _holder_is_the_oldest(self) -> Ledger:
        """Raise ValueError when a listed process is older than its harness: the list must be of something else."""
        listed = [*self.members, *(p for p in (self.warden, self.engine) if p is not None)]
        if any(p.start < self.holder.start or p.pid <= 1 for p in listed):
            raise ValueError("it lists processes that are older than their harness")
        return self

    @model_validator(mode="after")
    def _scratch_is_its_own(self) -> Ledger:
        """Raise ValueError unless the folder is named after the mark: it is removed with all its contents."""
        if self.scratch:
            folder = Path(self.scratch)
            wanted = (f"kv-harness-{os.getuid()}", scratch.name_of(self.mark))
            if not folder.is_absolute() or ".." in folder.parts or folder.parts[-2:] != wanted:
                raise ValueError("its folder for temporary files is not named after its mark")
        return self

    @property
    def here(self) -> bool:
        """Whether its process ids refer to processes of this boot and pid namespace."""
        return self.boot == procfs.boot() and self.namespace == procfs.namespace()

    @property
    def gone_by_reboot(self) -> bool:
        """Whether this very machine has been rebooted since. A tree of another machine with the same folder for
        temporary files may still be running."""
        again = bool(self.boot and procfs.boot()) and self.boot != procfs.boot()
        return again and bool(self.machine) and self.machine == procfs.machine() and self.started < procfs.booted_at()

    @property
    def holder_lives(self) -> bool:
        """Whether the harness that asked for the tree is still running."""
        return self.here and procfs.lives(self.holder)

    def living(self) -> list[Process]:
        """Return the living processes of the tree, without its supervisor."""
        if not self.here:
            return []
        table = procfs.processes()
        known = {*self.members, *([self.engine] if self.engine is not None else [])}
        spared = {1, os.getpid(), *(p.pid for p in (self.holder, self.warden) if p is not None and procfs.lives(p))}
        roots = {
            pid for pid, found in table.items() if Process(pid, found.start) in known or procfs.marked(pid, self.mark)
        }
        if self.warden is not None and procfs.lives(self.warden):
            roots |= procfs.below([self.warden.pid], table)
        # A session id is not reused while a process is in the session.
        engine = self.engine
        if engine is not None and any(table[pid].session == engine.pid for pid in roots):
            roots |= {pid for pid, found in table.items() if found.session == engine.pid}
        mine = (roots | procfs.below(roots, table)) - spared
        return sorted(Process(pid, table[pid].start) for pid in mine)

    @property
    def pids(self) -> set[int]:
        """Pids of the tree's processes, ended ones included."""
        return {p.pid for p in (*self.members, self.engine, self.warden) if p is not None}

    def segments(self) -> list[Segment]:
        """Return the shared memory that engines have left since the tree began and that nobody uses any more."""
        return procfs.abandoned(self.started, self.pids) if self.here else []


class Damaged(NamedTuple):
    """A ledger that cannot be read; it is kept and otherwise ignored."""

    path: Path
    why: str


def read_ledger(path: Path) -> Ledger | Damaged | None:
    """Load a ledger; return None when it does not exist, because whoever wrote it has removed it."""
    try:
        known = path.lstat()
        if known.st_uid != os.getuid() or not path.is_file() or path.is_symlink() or known.st_size > _LARGEST:
            return Damaged(path, "expected a small file of this user, found something else")
        raw = json.loads(path.read_bytes())
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            return Damaged(path, f"expected a ledger of format {FORMAT}, found something else")
        if raw.pop("checksum", None) != procfs.checksum(raw):
            return Damaged(path, "expected content that matches its checksum, found a mismatch")
        found = Ledger.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        return Damaged(path, f"expected a valid ledger, found at {where}: {first['msg']}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return Damaged(path, f"expected a ledger, but it cannot be read ({error})")
    if path.name != (name := f"tree-{found.holder.pid}-{found.mark}.json"):
        return Damaged(path, f"expected a ledger that belongs under this name, found that of {name}")
    return found


class Ended(NamedTuple):
    """Descriptions of what was done about a tree, and of what is left of it."""

    done: list[str]
    left: list[str]


def end_tree(path: Path | None, ledger: Ledger) -> Ended:
    """Kill the living processes of a tree and remove what it created, whoever holds it.

    The ledger at ``path`` is removed too, unless something is left; ``path`` is None when there is no ledger file.
    """
    done: list[str] = []
    if ledger.warden is not None and ledger.here and procfs.lives(ledger.warden):
        _end_supervisor(ledger.warden)
        done.append(f"told supervisor {ledger.warden.pid} of {ledger.name} to end")
        # Its ledger may be more complete by now, or gone because it has ended everything itself.
        newer = read_ledger(path) if path is not None else None
        ledger = newer if isinstance(newer, Ledger) and newer.mark == ledger.mark else ledger
    killed, left = _kill(ledger, done)
    if ledger.here:
        removed = procfs.remove_abandoned(ledger.started, ledger.pids | killed)
        done += [f"removed shared memory {procfs.SHM / name}" for name in removed]
    if ledger.scratch and not ledger.living() and os.path.lexists(ledger.scratch):
        words = scratch.remove(Path(ledger.scratch))
        (left if words else done).append(words or f"removed {ledger.scratch}")
    if not left and path is not None:
        # A partial ledger lies beside it when the supervisor was killed while writing one.
        with contextlib.suppress(OSError):
            procfs.partial_ledger(path).unlink()
        path.unlink(missing_ok=True)
        done.append(f"removed {path}")
    return Ended(done, left)


def _end_supervisor(supervisor: Process) -> None:
    """Tell the owner of a tree to end, and kill it if it does not, so that the supervisor that stands by takes over."""
    known = procfs.stat_of(supervisor.pid)
    # Both are in a session of their own, which the one that stands by leads.
    standby = procfs.process(known.session) if known is not None else None
    procfs.send(supervisor, signal.SIGTERM)
    if not _ends(supervisor):
        procfs.send(supervisor, signal.SIGKILL)
    if standby is not None:
        _ends(standby)


def _ends(supervisor: Process) -> bool:
    """Wait for the end of a supervisor and return whether it has ended."""
    deadline = time.monotonic() + _SUPERVISOR_S
    while procfs.lives(supervisor) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not procfs.lives(supervisor)


def _kill(ledger: Ledger, done: list[str]) -> tuple[set[int], list[str]]:
    """Kill the processes of a tree and any others of it that appear; return the pids that were killed, and descriptions
    of those that survive."""
    killed, living = procfs.kill_all(ledger.living, _KILL_S, lambda: time.sleep(_POLL_S))
    done += [f"killed process {p.pid} of {ledger.name}" for p in sorted(killed - set(living))]
    return {p.pid for p in killed}, [f"process {p.pid} of {ledger.name}, which cannot be killed" for p in living]


# --- all trees of this user ------------------------------------------------------------------------------------------

State = Literal["running", "left over", "elsewhere"]


class Found(NamedTuple):
    """A tree and what is left of it."""

    path: Path
    ledger: Ledger
    state: State
    """``running``: its harness is alive. ``elsewhere``: it belongs to another pid namespace or machine, so that its
    state cannot be determined here."""
    processes: list[Process]
    segments: list[Segment]
    listening: list[int]
    """Those of its ports that are in use."""

    def as_json(self) -> dict[str, Any]:
        known = self.ledger
        return {
            "state": self.state,
            "name": known.name,
            "run": known.run,
            "harness_pid": known.holder.pid,
            "engine_pid": known.engine.pid if known.engine is not None else None,
            "ports": list(known.ports),
            "listening": self.listening,
            "age_s": round(self.age_s, 1),
            "processes": [p.pid for p in self.processes],
            "shared_memory": [s.name for s in self.segments],
            "temporary_files": known.scratch if os.path.lexists(known.scratch) else None,
            "ledger": str(self.path),
        }

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.ledger.started)


class Survey(NamedTuple):
    """All process trees and claimed ports of this user."""

    trees: list[Found]
    damaged: list[Damaged]
    claims: list[int]
    """Ports that are claimed now."""

    def as_json(self) -> dict[str, Any]:
        return {
            "trees": [t.as_json() for t in self.trees],
            "damaged": [{"ledger": str(d.path), "why": d.why} for d in self.damaged],
            "claimed_ports": self.claims,
        }


def _found(path: Path, ledger: Ledger) -> Found:
    state: State = "running" if ledger.holder_lives else "left over"
    if not ledger.here and not ledger.gone_by_reboot:
        state = "elsewhere"
    living = ledger.living()
    listening = [p for p in ledger.ports if ports.in_use(p, str(ledger.host))] if ledger.here else []
    segments = ledger.segments() if state == "left over" else []
    return Found(path, ledger, state, living, segments, listening)


def _claim_files(folder: Path, kind: str) -> list[Path]:
    """Return the claim files of a kind: ``port``, ``core`` or ``gpu``."""
    found = (p for p in folder.glob(f"{kind}-*") if kind == "gpu" or p.name[len(kind) + 1 :].isdigit())
    return sorted(p for p in found if p.is_file() and not p.is_symlink())


def _lockable_claim_files(elsewhere: Sequence[Ledger], folder: Path) -> list[Path]:
    """Return the claim files that may be tested by locking them.

    Those of trees elsewhere may not: not every file system shows a lock to another machine.
    """
    spared = {f"port-{port}" for ledger in elsewhere for port in ledger.ports}
    free = [p for p in _claim_files(folder, "port") if p.name not in spared]
    return free + ([] if elsewhere else [*_claim_files(folder, "core"), *_claim_files(folder, "gpu")])


def survey() -> Survey:
    """List all trees and claims of this user. Raises EnvironmentFault when the folder is somebody else's."""
    folder = _folder()
    if folder is None:
        return Survey([], [], [])
    # A ledger that disappears meanwhile belonged to a tree that has ended.
    read = [(path, read_ledger(path)) for path in procfs.ledgers(folder)]
    trees = [_found(path, ledger) for path, ledger in read if isinstance(ledger, Ledger)]
    damaged = [ledger for _, ledger in read if isinstance(ledger, Damaged)]
    with ports.locked():
        claims = [int(p.name[5:]) for p in _claim_files(folder, "port") if file_lock.held(p)]
    return Survey(trees, damaged, claims)


def left_over() -> str | None:
    """Return a sentence if earlier runs left something on this machine, or None. Raises EnvironmentFault as ``survey``
    does."""
    trees = [tree for tree in survey().trees if tree.state == "left over"]
    if not trees:
        return None
    return (
        f"warning: {len(trees)} process trees of earlier runs are left over, with "
        f"{sum(len(tree.processes) for tree in trees)} living processes; `harness ps` lists them and "
        "`harness clean` ends them"
    )


def clean() -> Ended:
    """End and remove what earlier runs left; what belongs to a living harness or cannot be read stays as it is. Raises
    EnvironmentFault when the folder is somebody else's."""
    folder = _folder()
    done: list[str] = []
    left: list[str] = []
    elsewhere: list[Ledger] = []
    if folder is None:
        return Ended(done, left)
    for path in procfs.ledgers(folder):
        ledger = read_ledger(path)
        if ledger is None:
            continue
        if isinstance(ledger, Damaged):
            left.append(f"{path}: {ledger.why}; inspect it and remove it yourself")
            continue
        # Determined anew for each: trees end while others are being ended.
        state = _found(path, ledger).state
        if state == "left over":
            ended = end_tree(path, ledger)
            done += ended.done
            left += ended.left
        elif state == "elsewhere":
            elsewhere.append(ledger)
    with ports.locked():
        swept = [p for p in _lockable_claim_files(elsewhere, folder) if ports.sweep(p)]
    if swept:
        done.append(f"removed {len(swept)} claim files that nobody holds")
    for new in folder.glob(f"tree-*{procfs.PARTIAL}"):
        # It may be renamed, or its supervisor may end, at any moment.
        with contextlib.suppress(OSError):
            if _abandoned(new):
                new.unlink()
    return Ended(done, left)


def _abandoned(new: Path) -> bool:
    """Whether this is a partial ledger whose supervisor was killed while writing it. Raises OSError."""
    if abs(time.time() - new.lstat().st_mtime) < _SUPERVISOR_S:
        return False
    ledger = read_ledger(new.with_suffix(".json"))
    if isinstance(ledger, Ledger):
        return ledger.here and (ledger.warden is None or not procfs.lives(ledger.warden))
    holder = new.name.split("-")[1]
    return ledger is None and holder.isdecimal() and procfs.process(int(holder)) is None


def _folder() -> Path | None:
    """Return the folder of ledgers, or None if it does not exist."""
    if not os.path.lexists(procfs.folder_path()):
        return None
    try:
        return procfs.state_folder()
    except OSError as error:
        raise EnvironmentFault(str(error)) from error
