"""What a process tree leaves on a machine, and whose it is. Standard library alone, because the warden uses it.

A process is (pid, start time): pids are reused, pairs of both are not while the machine is up. A segment of shared
memory is (name, inode). Nothing here ends or removes what it cannot tell by these. Linux only.
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
from typing import Any, NamedTuple

SHM = Path("/dev/shm")
MARK = "KV_HARNESS_TREE"
"""Variable that every process of a tree inherits; says nothing where a process has overwritten its environment, as
``setproctitle`` does in vLLM's engine core."""
_FREEZE_S = 2.0
_NAMED = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+|torch_(\d+)_\d+_\d+")
"""Segments that are called after the process that made them: OpenMP's registration (1 KiB; left by every killed engine
of vLLM's CPU build) and torch's shared tensors."""
_RUNTIME = re.compile(
    r"(psm_|sem\.|torch_\d|__KMP_REGISTERED_LIB_\d|pym-|nccl-|cuda\.shm\.|ucx_shm_posix_|vllm_(mm|offload|ec)_).+|.+-cpushm.*"
)
"""How Python's multiprocessing, glibc, torch, OpenMP, NCCL, CUDA, UCX and vLLM 0.32 name what they make. Whatever is
called otherwise may be somebody's data that an engine only reads."""
_REGISTERED = re.compile(rb"0x([0-9a-f]+)-")
_MACHINE_ID = Path("/etc/machine-id")
_FIRST_NAMESPACE = "pid:[4026531836]"
"""``PROC_PID_INIT_INO`` of Linux: the pid namespace of the machine, in which every process is seen."""


class Process(NamedTuple):
    """A process for good. ``start`` is in clock ticks since the boot (field 22 of ``/proc/PID/stat``)."""

    pid: int
    start: int


class Stat(NamedTuple):
    """What is used of ``/proc/PID/stat``."""

    state: str
    """Of a thread that lives."""
    parent: int
    session: int
    start: int


class Segment(NamedTuple):
    """A file in ``/dev/shm``."""

    name: str
    inode: int


# --- processes -------------------------------------------------------------------------------------------------------


def _fields(stat: str) -> list[str]:
    """Of ``stat``, from the third one on. Raises OSError."""
    # Without the file's own read: this is done for every process of the machine, again and again.
    with open(stat, "rb", buffering=0) as file:  # noqa: PTH123
        return file.read(4096).rpartition(b")")[2].decode("ascii", "replace").split()


def _state(pid: int, fields: Sequence[str]) -> str | None:
    """None when no thread lives. A process whose first thread has ended shows as a zombie and keeps all its memory as
    long as another one lives, in the kernel after SIGKILL too."""
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
    """Where the kernel shows what a process holds: nothing of it at a first thread that has ended."""
    whole = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, IndexError):
        if _fields(f"/proc/{pid}/stat")[0] in "ZX":
            return _living_thread(pid) or whole
    return whole


def stat_of(pid: int) -> Stat | None:
    """None for processes that are gone, and for those of which no thread lives, which hold nothing any more."""
    try:
        fields = _fields(f"/proc/{pid}/stat")
        state = _state(pid, fields)
        return None if state is None else Stat(state, int(fields[1]), int(fields[3]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def processes() -> dict[int, Stat]:
    """All living processes."""
    found = {int(name): stat_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208
    return {pid: known for pid, known in found.items() if known is not None}


def process(pid: int) -> Process | None:
    """The living process that has this pid now."""
    known = stat_of(pid)
    return None if known is None else Process(pid, known.start)


def lives(one: Process) -> bool:
    return process(one.pid) == one


def below(roots: Collection[int], table: Mapping[int, Stat]) -> set[int]:
    """Descendants of ``roots``, without them."""
    found: set[int] = set()
    wanted = set(roots)
    while wanted:
        wanted = {pid for pid, known in table.items() if known.parent in wanted} - found - set(roots)
        found |= wanted
    return found


def marked(pid: int, mark: str) -> bool:
    """Whether a process was started with this mark."""
    try:
        return f"{MARK}={mark}".encode() in (_folder_of(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def send(one: Process, number: signal.Signals) -> None:
    """Signal this very process; nothing when it is gone or may not be signalled."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            handle = os.pidfd_open(one.pid)
        except OSError:
            if lives(one):
                os.kill(one.pid, number)
            return
        try:
            # The handle stays with the process that had the pid when it was opened.
            if lives(one):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def freeze(find: Callable[[], Iterable[Process]]) -> None:
    """Stop these processes, and those that they start meanwhile, so that what they hold can be looked at: one that runs
    on can make a segment between the look at it and its end."""
    deadline = time.monotonic() + _FREEZE_S
    stopped: set[Process] = set()
    while (fresh := set(find()) - stopped) and time.monotonic() < deadline:
        for one in fresh:
            send(one, signal.SIGSTOP)
        stopped |= fresh
    while time.monotonic() < deadline and any(
        (known := stat_of(p.pid)) is not None and known.start == p.start and known.state not in "Tt" for p in stopped
    ):
        time.sleep(0.005)


def boot() -> str:
    """Changes with each start of the machine; with it, pids and start times mean something else."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def booted_at() -> float:
    """When the machine was started, in seconds since the epoch; 0 where that cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    return 0.0


def machine() -> str:
    """Of the machine, the same after it was started anew; empty where that cannot be told. Machines that are copies of
    one image may share their ``machine-id(5)``, which is to be told to nobody as it is, and others their name."""
    try:
        known = _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    if not re.fullmatch("[0-9a-f]{32}", known):
        return ""
    return hashlib.sha256(f"kv-harness {known} {os.uname().nodename}".encode()).hexdigest()[:16]


def namespace() -> str:
    """Of process ids: containers may share a folder for temporary files and not their pids."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


# --- shared memory ---------------------------------------------------------------------------------------------------


def segments() -> set[Segment]:
    """Files in ``/dev/shm`` that belong to this user."""
    found: set[Segment] = set()
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                known = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(known.st_mode) and known.st_uid == os.getuid():
                    found.add(Segment(entry.name, known.st_ino))
    return found


def named_after(segment: Segment) -> int | None:
    """The pid in the name of a segment."""
    found = _NAMED.fullmatch(segment.name)
    return None if found is None else int(next(g for g in found.groups() if g))


def of_runtime(segment: Segment) -> bool:
    """Whether it is called as the libraries of engines call theirs."""
    return _RUNTIME.fullmatch(segment.name) is not None


def all_pids_seen() -> bool:
    """Whether this is the machine's first pid namespace. In another one, a pid in a name may be of another container
    that shares ``/dev/shm`` (``--ipc=host``, a pod), and its processes are not seen."""
    return namespace() == _FIRST_NAMESPACE


def registered_by(segment: Segment, pid: int) -> bool:
    """Whether this very process wrote an OpenMP registration: it holds the address of a variable of its library, which
    is random for each process. The process must live."""
    with contextlib.suppress(OSError, ValueError):
        if found := _REGISTERED.match((SHM / segment.name).read_bytes()[:64]):
            address = int(found.group(1), 16)
            for line in (_folder_of(pid) / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
                span, mode = line.split(maxsplit=2)[:2]
                low, _, high = span.partition("-")
                if int(low, 16) <= address < int(high, 16):
                    return "w" in mode
    return False


def _held(pid: int, inodes: Collection[int]) -> set[int]:
    """Inodes that a process has mapped or open in ``/dev/shm``."""
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
    """Which of ``pids`` use each segment: they have it mapped or open."""
    found: dict[Segment, set[int]] = {s: set() for s in wanted}
    # Two names may be of one inode: links (``sem_open`` makes each semaphore under another name first, and links
    # it), or a number that was used again after the first one was removed.
    by_inode: dict[int, list[Segment]] = {}
    for segment in found:
        by_inode.setdefault(segment.inode, []).append(segment)
    if by_inode:
        for pid in pids:
            for inode in _held(pid, by_inode.keys()):
                for segment in by_inode[inode]:
                    found[segment].add(pid)
    return found


def remove(wanted: Collection[Segment], tree: Collection[int] = ()) -> tuple[list[str], list[str]]:
    """Remove segments that no living process outside of ``tree`` uses. Returns names that were removed, and, in words,
    what was left."""
    removed, left = [], []
    living = processes()
    others = {pid for pid in living if pid not in tree}
    there = sorted(segments() & set(wanted))
    used = users(there, others)
    for one in there:
        maker = named_after(one)
        by = used[one] | ({maker} & others if maker is not None else set())
        if by:
            left.append(f"shared memory {SHM / one.name}, used by pid {', '.join(map(str, sorted(by)))}")
            continue
        try:
            (SHM / one.name).unlink(missing_ok=True)
            removed.append(one.name)
        except OSError as error:
            left.append(f"shared memory {SHM / one.name}, which cannot be removed ({error.strerror})")
    return removed, left


# --- the folder of ledgers and claims --------------------------------------------------------------------------------


class FolderError(OSError):
    """The folder is not ours."""


def folder_path() -> Path:
    """In ``TMPDIR``, or ``/tmp``. Not where ``tempfile`` would go: that tries to write, and takes another folder when
    the disk is full, where nobody else's claims are."""
    return Path(os.environ.get("TMPDIR") or "/tmp").absolute() / f"kv-harness-{os.getuid()}"


def state_folder() -> Path:
    """The folder of this user's ledgers and claims, made when it is not there. Raises FolderError when somebody else
    could write to it."""
    path = folder_path()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    known = path.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise FolderError(
            f"expected {path} to be a folder of this user alone (mode 0700), found something else; remove it, or set "
            "TMPDIR to a folder of your own"
        )
    return path


def checksum(ledger: Mapping[str, Any]) -> int:
    """Of everything else in a ledger, so that no changed bit of it makes a living harness look gone."""
    rest = {key: value for key, value in ledger.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


HALF = ".new"


def half(ledger: Path) -> Path:
    """Where a ledger is written before it gets its name."""
    return ledger.with_suffix(HALF)


def ledgers(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("tree-*.json"))


def drop_claim(handle: int) -> None:
    """Remove the file of a claim that nobody else holds, and let go of it. Its lock is still held here, so that
    whoever waits for it finds that the file is another one by now."""
    with contextlib.suppress(OSError):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.stat().st_ino == os.fstat(handle).st_ino:
            path.unlink()
    with contextlib.suppress(OSError):
        os.close(handle)
