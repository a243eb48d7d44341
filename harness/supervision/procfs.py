"""Processes and shared memory segments, from ``/proc`` and ``/dev/shm``.

A process is identified by (pid, start time), because a pid alone may be reused; a segment of shared memory by (name,
inode). Standard library only, because the supervisor uses it. Linux only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import stat
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

SHM = Path("/dev/shm")
MARK = "KV_HARNESS_TREE"
"""Variable that every process of a tree inherits. Unreadable where a process has overwritten its environment, as
``setproctitle`` does in vLLM's engine core."""
_REGISTRATION = "__KMP_REGISTERED_LIB_"
_NAMED = re.compile(rf"{_REGISTRATION}(\d+)_\d+|torch_(\d+)_\d+_\d+")
"""Segments whose name contains the pid of the process that created them: OpenMP's registration (1 KiB, left by every
killed engine of vLLM's CPU build) and torch's shared tensors."""
_OF_ENGINES = re.compile(r"(nccl-|cuda\.shm\.|ucx_shm_posix_|vllm_(mm|offload|ec)_).+|.+-cpushm.*")
"""Names of segments created by NCCL, CUDA, UCX and vLLM 0.32."""
_SLACK_S = 0.1
"""Seconds by which the clock of files may be behind."""
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKERS_S = 2.0
"""Time that Python's resource trackers get to remove what killed processes left."""
_MACHINE_ID = Path("/etc/machine-id")
_FIRST_NAMESPACE = "pid:[4026531836]"
"""``PROC_PID_INIT_INO`` of Linux: the machine's initial pid namespace, in which every process is visible."""


class Process(NamedTuple):
    """A process, identified even if its pid is reused. ``start`` is in clock ticks since the boot (field 22 of
    ``/proc/PID/stat``)."""

    pid: int
    start: int


class Stat(NamedTuple):
    """The fields of ``/proc/PID/stat`` that are used."""

    state: str
    """State of a living thread."""
    parent: int
    session: int
    start: int


class Segment(NamedTuple):
    """A file in ``/dev/shm``."""

    name: str
    inode: int


# --- processes -------------------------------------------------------------------------------------------------------


def _fields(stat: str) -> list[str]:
    """Return the fields of a ``stat`` file from the third one on. Raises OSError."""
    # Unbuffered, because this is done for every process of the machine, again and again.
    with open(stat, "rb", buffering=0) as file:  # noqa: PTH123
        return file.read(4096).rpartition(b")")[2].decode("ascii", "replace").split()


def _state(pid: int, fields: Sequence[str]) -> str | None:
    """Return the state of a living thread, or None if there is none.

    A process whose first thread has ended looks like a zombie, but keeps all its memory as long as another thread
    lives, even one that is stuck in the kernel after SIGKILL.
    """
    if fields[0] not in "ZX":
        return fields[0]
    if int(fields[17]) > 1:
        thread = _living_thread(pid)
        return None if thread is None else _fields(f"{thread}/stat")[0]
    return None


def _living_thread(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if _fields(f"{thread}/stat")[0] not in "ZX":
                    return thread
    return None


def _folder_of(pid: int) -> Path:
    """Return the folder in ``/proc`` that shows what a process holds: that of an ended first thread shows nothing."""
    whole = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, IndexError):
        if _fields(f"/proc/{pid}/stat")[0] in "ZX":
            return _living_thread(pid) or whole
    return whole


def stat_of(pid: int) -> Stat | None:
    """Return the ``Stat`` of a process, or None if it is gone or has no living thread and so holds nothing."""
    try:
        fields = _fields(f"/proc/{pid}/stat")
        state = _state(pid, fields)
        return None if state is None else Stat(state, int(fields[1]), int(fields[3]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def processes() -> dict[int, Stat]:
    """Return all living processes by pid."""
    found = {int(name): stat_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
    return {pid: known for pid, known in found.items() if known is not None}


def process(pid: int) -> Process | None:
    """Return the living process that has this pid now, or None."""
    known = stat_of(pid)
    return None if known is None else Process(pid, known.start)


def lives(one: Process) -> bool:
    """Return whether this very process is alive."""
    return process(one.pid) == one


def below(roots: Collection[int], table: Mapping[int, Stat]) -> set[int]:
    """Return the descendants of ``roots``, without the roots themselves."""
    found: set[int] = set()
    wanted = set(roots)
    while wanted:
        wanted = {pid for pid, known in table.items() if known.parent in wanted} - found - set(roots)
        found |= wanted
    return found


def family(root: int, table: Mapping[int, Stat]) -> set[int]:
    """Return the process with this pid, its descendants, and every other process in its session."""
    session = {pid for pid, known in table.items() if known.session == root}
    return ({root} & table.keys()) | below([root], table) | session


def marked(pid: int, mark: str) -> bool:
    """Return whether a process was started with this mark."""
    try:
        return f"{MARK}={mark}".encode() in (_folder_of(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def send(one: Process, number: signal.Signals) -> None:
    """Signal this very process; do nothing if it is gone or may not be signalled."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            handle = os.pidfd_open(one.pid)
        except OSError:
            if lives(one):
                os.kill(one.pid, number)
            return
        try:
            # The handle refers to the process that had the pid when it was opened.
            if lives(one):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def tracks_resources(pid: int) -> bool:
    """Return whether this is the process in which Python removes the semaphores and shared memory of others once they
    have ended, killed or not (``multiprocessing.resource_tracker``)."""
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill_all(
    find: Callable[[], Collection[Process]], limit_s: float, pause: Callable[[], object]
) -> tuple[set[Process], Collection[Process]]:
    """Kill the processes that ``find`` returns until it returns none, for at most ``limit_s``; ``pause`` is called
    between. Return those that were killed and those that are left.

    Python's resource trackers come last, because they remove the semaphores and shared memory of the others, and end by
    themselves.
    """
    killed: set[Process] = set()
    begun = time.monotonic()
    while (left := find()) and time.monotonic() - begun < limit_s:
        late = time.monotonic() - begun > _TRACKERS_S
        for one in left:
            if late or not tracks_resources(one.pid):
                send(one, signal.SIGKILL)
                killed.add(one)
        pause()
    return killed, left


def boot() -> str:
    """Return the boot id, which changes with each boot and gives pids and start times a new meaning; empty if
    unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def booted_at() -> float:
    """Return when the machine was booted, in seconds since the epoch; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    return 0.0


def machine() -> str:
    """Return an id of the machine that survives reboots; empty if unknown.

    It is a hash of both ``machine-id(5)``, which must not be disclosed and which copies of one image may share, and
    the host name.
    """
    try:
        known = _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    if not re.fullmatch("[0-9a-f]{32}", known):
        return ""
    return hashlib.sha256(f"kv-harness {known} {os.uname().nodename}".encode()).hexdigest()[:16]


def namespace() -> str:
    """Return the pid namespace; empty if unknown. Containers may share a folder for temporary files, but not pids."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


# --- shared memory ---------------------------------------------------------------------------------------------------


def segments() -> set[Segment]:
    """Return the files in ``/dev/shm`` that belong to this user."""
    found: set[Segment] = set()
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                known = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(known.st_mode) and known.st_uid == os.getuid():
                    found.add(Segment(entry.name, known.st_ino))
    return found


def named_after(segment: Segment) -> int | None:
    """Return the pid in the name of a segment, or None if there is none."""
    found = _NAMED.fullmatch(segment.name)
    return None if found is None else int(next(g for g in found.groups() if g))


def allocated(segment: Segment) -> int:
    """Return the bytes that a segment takes; 0 when it is gone."""
    try:
        return (SHM / segment.name).stat().st_blocks * 512
    except OSError:
        return 0


def all_pids_seen() -> bool:
    """Return whether this is the machine's initial pid namespace. In another one, a pid in a name may belong to another
    container that shares ``/dev/shm`` (``--ipc=host``, a pod) and whose processes are not visible here."""
    return namespace() == _FIRST_NAMESPACE


def exit_now(code: int = 0) -> NoReturn:
    """End this process without destructors, and remove the OpenMP registration that would stay: a process that is
    forked from one with the library has its own."""
    with contextlib.suppress(OSError):
        (SHM / f"{_REGISTRATION}{os.getpid()}_{os.getuid()}").unlink()
    os._exit(code)


def _inodes_in_use(pid: int, inodes: Collection[int]) -> set[int]:
    """Return which of these inodes in ``/dev/shm`` a process has mapped or open."""
    found: set[int] = set()
    folder = _folder_of(pid)
    with contextlib.suppress(OSError):
        for line in (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHM}/") and int(fields[4]) in inodes:
                found.add(int(fields[4]))
    with contextlib.suppress(OSError):
        for handle in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(handle.readlink()).startswith(f"{SHM}/") and (inode := handle.stat().st_ino) in inodes:
                    found.add(inode)
    return found


def users(wanted: Iterable[Segment], pids: Iterable[int]) -> dict[Segment, set[int]]:
    """Return which of ``pids`` use each segment, that is, have it mapped or open."""
    found: dict[Segment, set[int]] = {s: set() for s in wanted}
    # Two names may have one inode: hard links (``sem_open`` creates each semaphore under another name and links it), or
    # an inode number that was reused after the first file was removed.
    by_inode: dict[int, list[Segment]] = {}
    for segment in found:
        by_inode.setdefault(segment.inode, []).append(segment)
    if by_inode:
        for pid in pids:
            for inode in _inodes_in_use(pid, by_inode.keys()):
                for segment in by_inode[inode]:
                    found[segment].add(pid)
    return found


def abandoned(since: float, ended: Collection[int]) -> list[Segment]:
    """Return the segments that engines have left: created since then (seconds since the epoch), of this user, named as
    an engine's libraries name theirs, and used by no process.

    Where other containers may share ``/dev/shm``, whose processes are not visible, these are only OpenMP registrations
    of ``ended``, pids of the tree. Segments named by Python's multiprocessing are left to its resource trackers.
    """
    found = [s for s in segments() if _left_by_engine(s, ended) and _changed(s) > since - _SLACK_S]
    used = users(found, processes()) if found else {}
    return sorted(s for s in found if not used[s])


def _left_by_engine(segment: Segment, ended: Collection[int]) -> bool:
    maker = named_after(segment)
    if not all_pids_seen():
        return maker in ended and segment.name.startswith(_REGISTRATION)
    if maker is not None:
        return process(maker) is None
    return _OF_ENGINES.fullmatch(segment.name) is not None


def _changed(segment: Segment) -> float:
    """Return when a segment was created or last changed, in seconds since the epoch; 0 when it is gone."""
    try:
        return (SHM / segment.name).stat().st_ctime
    except OSError:
        return 0.0


def remove_abandoned(since: float, ended: Collection[int]) -> list[str]:
    """Remove the ``abandoned`` segments and return their names."""
    removed = []
    for one in abandoned(since, ended):
        with contextlib.suppress(OSError):
            (SHM / one.name).unlink()
            removed.append(one.name)
    return removed


# --- the folder of ledgers and claims --------------------------------------------------------------------------------


class FolderError(OSError):
    """The folder does not belong to this user alone."""


def folder_path() -> Path:
    """Return the path of the folder of ledgers and claims, in ``TMPDIR`` or ``/tmp``.

    ``tempfile`` is not asked, because it picks another folder when the disk is full, where it would miss the claims of
    other harnesses.
    """
    return Path(os.environ.get("TMPDIR") or "/tmp").absolute() / f"kv-harness-{os.getuid()}"


def state_folder() -> Path:
    """Return the folder of this user's ledgers and claims, creating it if necessary. Raises FolderError when somebody
    else could write to it."""
    path = folder_path()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    known = path.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise FolderError(
            f"expected {path} to be a folder of this user alone (mode 0700), found something else; remove it, or set "
            "TMPDIR to a folder that you own"
        )
    return path


def checksum(ledger: Mapping[str, Any]) -> int:
    """Return the checksum of everything else in a ledger, so that a flipped bit cannot make a living harness look
    gone."""
    rest = {key: value for key, value in ledger.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


PARTIAL = ".new"


def partial_ledger(ledger: Path) -> Path:
    """Return the path under which a ledger is written before it is renamed."""
    return ledger.with_suffix(PARTIAL)


def ledgers(folder: Path) -> Iterator[Path]:
    """Yield the ledgers in the folder, by name."""
    yield from sorted(folder.glob("tree-*.json"))


def drop_claim(handle: int) -> None:
    """Remove the file of a claim and release the claim.

    The file is removed while its lock is held, so that whoever waits for the lock finds that the file was replaced.
    """
    with contextlib.suppress(OSError):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.stat().st_ino == os.fstat(handle).st_ino:
            path.unlink()
    with contextlib.suppress(OSError):
        os.close(handle)
