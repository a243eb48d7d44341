"""What earlier runs left on this machine: process trees and their ledgers, shared memory, claims of ports.

A ledger is acted on only when its holder is gone and its identities are those of this machine and pid namespace; a
process only when its pid and start time are listed, or its mark or its ancestry says that it belongs to the tree.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, IPvAnyAddress, ValidationError, model_validator

from harness.engine import ports, scratch, traces, warden
from harness.engine.traces import Process, Segment
from harness.errors import EnvironmentFault

_KILL_S = 30.0
_WARDEN_S = 45.0
"""Longest that a warden takes to end its tree: 4 s for what ends by itself, 30 s for what cannot be killed, 3 s for
segments that others use."""
_POLL_S = 0.05
_LARGEST = 4 * 2**20
"""Bytes; ledgers of a real pair have under 10,000."""


Port = Annotated[int, Field(ge=0, le=65535)]


class Ledger(BaseModel):
    """What a warden wrote about its tree, without the checksum; see ``harness.engine.warden``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: int
    boot: str
    machine: str = ""
    """Empty where it is not known which."""
    namespace: str
    mark: str = Field(pattern="^[0-9a-f]{16}$")
    holder: Process
    warden: Process | None
    engine: Process | None
    members: tuple[Process, ...]
    made: tuple[Segment, ...]
    before: tuple[Segment, ...]
    name: str
    """Group and role."""
    ports: tuple[Port, ...]
    host: IPvAnyAddress
    run: str
    """Folder of the run."""
    scratch: str = ""
    """Folder for temporary files; none where its path would be too long."""
    started: float = Field(ge=0)
    """Seconds since the epoch."""

    @model_validator(mode="after")
    def _holder_is_the_oldest(self) -> Ledger:
        """Nothing that a harness started is older than itself: such a list is of something else."""
        listed = [*self.members, *(p for p in (self.warden, self.engine) if p is not None)]
        if any(p.start < self.holder.start or p.pid <= 1 for p in listed):
            raise ValueError("processes that are older than their harness")
        return self

    @model_validator(mode="after")
    def _scratch_is_its_own(self) -> Ledger:
        """It is removed with all that is in it."""
        if self.scratch:
            folder = Path(self.scratch)
            wanted = (f"kv-harness-{os.getuid()}", scratch.name_of(self.mark))
            if not folder.is_absolute() or ".." in folder.parts or folder.parts[-2:] != wanted:
                raise ValueError("a folder for temporary files that is not called after its mark")
        return self

    @property
    def here(self) -> bool:
        """Whether its process ids mean the processes that are here now."""
        return self.boot == traces.boot() and self.namespace == traces.namespace()

    @property
    def gone_by_reboot(self) -> bool:
        """Whether this very machine was started anew since. A tree of another one, which has the same folder for
        temporary files, may live."""
        again = bool(self.boot and traces.boot()) and self.boot != traces.boot()
        return again and bool(self.machine) and self.machine == traces.machine() and self.started < traces.booted_at()

    @property
    def held(self) -> bool:
        """Whether the harness that asked for the tree lives."""
        return self.here and traces.lives(self.holder)

    def living(self) -> list[Process]:
        """Processes of the tree that live, without its warden."""
        if not self.here:
            return []
        table = traces.processes()
        known = {*self.members, *([self.engine] if self.engine is not None else [])}
        spared = {1, os.getpid(), *(p.pid for p in (self.holder, self.warden) if p is not None and traces.lives(p))}
        roots = {
            pid for pid, found in table.items() if Process(pid, found.start) in known or traces.marked(pid, self.mark)
        }
        if self.warden is not None and traces.lives(self.warden):
            roots |= traces.below([self.warden.pid], table)
        # A session keeps its number while a process is in it.
        engine = self.engine
        if engine is not None and any(table[pid].session == engine.pid for pid in roots):
            roots |= {pid for pid, found in table.items() if found.session == engine.pid}
        mine = (roots | traces.below(roots, table)) - spared
        return sorted(Process(pid, table[pid].start) for pid in mine)

    def segments(self, living: list[Process]) -> list[Segment]:
        """Segments that the tree made and that are there: see ``Tree._is_ours`` of ``harness.engine.warden``."""
        if not self.here:
            return []
        candidates = traces.segments() - set(self.before)
        alive = {p.pid for p in living}
        pids = {m.pid for m in self.members} | alive
        used = traces.users(candidates, alive)

        def is_ours(one: Segment) -> bool:
            maker = traces.named_after(one)
            if one in self.made or (used[one] and traces.of_runtime(one)):
                return True
            if maker is None or maker not in pids:
                return False
            return traces.all_pids_seen() or (maker in alive and traces.registered_by(one, maker))

        return sorted(filter(is_ours, candidates))


class Damaged(NamedTuple):
    """A ledger that cannot be read; it is kept, and nothing is done about it."""

    path: Path
    why: str


def read_ledger(path: Path) -> Ledger | Damaged | None:
    """None when it is not there: whoever wrote it has removed it."""
    try:
        known = path.lstat()
        if known.st_uid != os.getuid() or not path.is_file() or path.is_symlink() or known.st_size > _LARGEST:
            return Damaged(path, "expected a small file of this user, found something else")
        raw = json.loads(path.read_bytes())
        if not isinstance(raw, dict) or raw.get("format") not in warden.READABLE:
            return Damaged(
                path, f"expected a ledger of format {' or '.join(map(str, warden.READABLE))}, found something else"
            )
        if raw.pop("checksum", None) != traces.checksum(raw):
            return Damaged(path, "expected what its checksum is of, found something else")
        found = Ledger.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        return Damaged(path, f"expected a ledger, found in {where}: {first['msg']}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return Damaged(path, f"expected a ledger, found that it cannot be read ({error})")
    if path.name != (name := f"tree-{found.holder.pid}-{found.mark}.json"):
        return Damaged(path, f"expected the ledger of this name, found that of {name}")
    return found


class Ended(NamedTuple):
    """What was done about a tree, in words."""

    done: list[str]
    left: list[str]


def end_tree(path: Path | None, ledger: Ledger) -> Ended:
    """End what lives of a tree and remove what it made and its ledger, whoever holds it. The ledger stays when
    something is left; without a path there is none."""
    done: list[str] = []
    segments: set[Segment] = set()
    if ledger.warden is not None and ledger.here and traces.lives(ledger.warden):
        segments = _end_warden(ledger.warden, ledger)
        done.append(f"warden {ledger.warden.pid} of {ledger.name} was told to end")
        # It knows more by now, and may have ended everything itself.
        newer = read_ledger(path) if path is not None else None
        ledger = newer if isinstance(newer, Ledger) and newer.mark == ledger.mark else ledger
    traces.freeze(ledger.living)
    living = ledger.living()
    segments |= set(ledger.segments(living))
    left = _kill(ledger, living, done)
    removed, kept = traces.remove(segments | set(ledger.segments([])), {p.pid for p in living})
    done += [f"removed shared memory {traces.SHM / name}" for name in removed]
    left += kept
    if ledger.scratch and not ledger.living() and os.path.lexists(ledger.scratch):
        words = scratch.remove(Path(ledger.scratch))
        (left if words else done).append(words or f"removed {ledger.scratch}")
    if not left and path is not None:
        # Half a ledger lies beside it when its warden was killed while it wrote one.
        with contextlib.suppress(OSError):
            traces.half(path).unlink()
        path.unlink(missing_ok=True)
        done.append(f"removed {path}")
    return Ended(done, left)


def _end_warden(one: Process, ledger: Ledger) -> set[Segment]:
    """Tell a warden to end, and kill it when it does not; returns segments that were in use then."""
    segments: set[Segment] = set()
    traces.send(one, signal.SIGTERM)
    deadline = time.monotonic() + _WARDEN_S
    while traces.lives(one) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if traces.lives(one):
        traces.freeze(ledger.living)
        segments |= set(ledger.segments(ledger.living()))
        traces.send(one, signal.SIGKILL)
    return segments


def _kill(ledger: Ledger, living: list[Process], done: list[str]) -> list[str]:
    """Kill these and what else of the tree shows up; returns what could not be killed, in words."""
    killed: set[Process] = set()
    deadline = time.monotonic() + _KILL_S
    while living and time.monotonic() < deadline:
        for one in living:
            traces.send(one, signal.SIGKILL)
            killed.add(one)
        time.sleep(_POLL_S)
        living = ledger.living()
    done += [f"killed process {p.pid} of {ledger.name}" for p in sorted(killed - set(living))]
    return [f"process {p.pid} of {ledger.name}, which cannot be killed" for p in living]


# --- everything that there is ----------------------------------------------------------------------------------------

State = Literal["running", "left over", "elsewhere"]


class Found(NamedTuple):
    """A tree and what there is of it."""

    path: Path
    ledger: Ledger
    state: State
    """``running``: its harness lives. ``elsewhere``: of another pid namespace or machine, which nothing can be said of
    here."""
    processes: list[Process]
    segments: list[Segment]
    listening: list[int]
    """Its ports that something listens on."""

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
    """All trees and claims of this user."""

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
    state: State = "running" if ledger.held else "left over"
    if not ledger.here and not ledger.gone_by_reboot:
        state = "elsewhere"
    living = ledger.living()
    listening = [p for p in ledger.ports if ports.in_use(p, str(ledger.host))] if ledger.here else []
    return Found(path, ledger, state, living, ledger.segments(living), listening)


def _claimed(path: Path) -> bool:
    """Whether somebody holds a claim; looks without taking it."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _claim_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("port-*") if p.name[5:].isdigit() and p.is_file() and not p.is_symlink())


def _claim_files_but_of(elsewhere: Sequence[Ledger], folder: Path) -> list[Path]:
    """Claims that may be looked at by locking them: not every file system shows a lock to another machine."""
    spared = {f"port-{port}" for ledger in elsewhere for port in ledger.ports}
    cores = (p for p in folder.glob("core-*") if p.name[5:].isdigit() and p.is_file() and not p.is_symlink())
    return [p for p in _claim_files(folder) if p.name not in spared] + ([] if elsewhere else sorted(cores))


def survey() -> Survey:
    """What there is. Raises EnvironmentFault when the folder is somebody else's."""
    folder = _folder()
    if folder is None:
        return Survey([], [], [])
    # One that is gone meanwhile was of a tree that has ended.
    read = [(path, read_ledger(path)) for path in traces.ledgers(folder)]
    trees = [_found(path, ledger) for path, ledger in read if isinstance(ledger, Ledger)]
    damaged = [ledger for _, ledger in read if isinstance(ledger, Damaged)]
    with ports.locked():
        claims = [int(p.name[5:]) for p in _claim_files(folder) if _claimed(p)]
    return Survey(trees, damaged, claims)


def clean() -> Ended:
    """End and remove what earlier runs left; what belongs to a living harness or cannot be read stays as it is. Raises
    EnvironmentFault when the folder is somebody else's."""
    folder = _folder()
    done: list[str] = []
    left: list[str] = []
    elsewhere: list[Ledger] = []
    if folder is None:
        return Ended(done, left)
    for path in traces.ledgers(folder):
        ledger = read_ledger(path)
        if ledger is None:
            continue
        if isinstance(ledger, Damaged):
            left.append(f"{path}: {ledger.why}; look at it and remove it yourself")
            continue
        # Asked again for each: trees end while others are being ended.
        state = _found(path, ledger).state
        if state == "left over":
            ended = end_tree(path, ledger)
            done += ended.done
            left += ended.left
        elif state == "elsewhere":
            elsewhere.append(ledger)
    with ports.locked():
        swept = [p for p in _claim_files_but_of(elsewhere, folder) if ports.sweep(p)]
    if swept:
        done.append(f"removed {len(swept)} files of claims that nobody holds")
    for new in folder.glob(f"tree-*{traces.HALF}"):
        # It may get its name, or its warden may end, at any moment.
        with contextlib.suppress(OSError):
            if _abandoned(new):
                new.unlink()
    return Ended(done, left)


def _abandoned(new: Path) -> bool:
    """Whether this is half a ledger, of a warden that was killed while it wrote one. Raises OSError."""
    if abs(time.time() - new.lstat().st_mtime) < _WARDEN_S:
        return False
    ledger = read_ledger(new.with_suffix(".json"))
    if isinstance(ledger, Ledger):
        return ledger.here and (ledger.warden is None or not traces.lives(ledger.warden))
    holder = new.name.split("-")[1]
    return ledger is None and holder.isdecimal() and traces.process(int(holder)) is None


def _folder() -> Path | None:
    """The folder of ledgers; None when there is none."""
    if not os.path.lexists(traces.folder_path()):
        return None
    try:
        return traces.state_folder()
    except OSError as error:
        raise EnvironmentFault(str(error)) from error
