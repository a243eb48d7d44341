"""Writing what a run records: trouble of the file system in one sentence, and one writer at a time per folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.errors import StorageError, UsageError

LOCK = ".lock"
"""File in a run folder that its writer holds; it says nothing about the run."""
_REMEDY = {
    errno.ENOSPC: "the disk is full; make room",
    errno.EDQUOT: "the quota is used up; make room",
    errno.EROFS: "it is on a read-only file system; use another folder",
    errno.EACCES: "writing there is not allowed; use another folder",
    errno.EPERM: "writing there is not allowed; use another folder",
    errno.EIO: "the device failed; use another one",
    errno.EFBIG: "the file is larger than is allowed here; raise the limit (ulimit -f)",
}


def storage_error(path: Path, error: OSError) -> StorageError:
    """The sentence for what the file system said."""
    what = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDY.get(error.errno or 0, "use another folder")
    return StorageError(
        f"{path}: expected to write it, found {what}: {remedy}, and run again; what was recorded before is kept"
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises StorageError, naming ``path``, when the file system refuses what is done inside."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


class LineFile:
    """A file that lines are appended to, each whole or not at all as far as that can be done.

    A line is with the operating system when ``append`` returns: the death of this process cannot lose it. It is on the
    disk itself after ``close``. When a write fails, the part of the line that was written is taken back, and nothing
    more is written: a line after half of one would make both unreadable.
    """

    def __init__(self, path: Path) -> None:
        """Raises StorageError."""
        self.path = path
        self._failed: StorageError | None = None
        with writing(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._fd).st_size
        self._open = True

    def append(self, line: str) -> None:
        """Raises StorageError, from then on with every call."""
        if self._failed is not None:
            raise self._failed
        rest = memoryview(line.encode() + b"\n")
        whole = self._size + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._failed = storage_error(self.path, error)
            self._take_back()
            raise self._failed from error
        self._size = whole

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            # A torn last line is recognised when it is read.
            return

    def close(self) -> None:
        """Raises StorageError when the disk did not take what was written, unless that was said before."""
        if not self._open:
            return
        self._open = False
        try:
            os.fsync(self._fd)
        except OSError as error:
            if self._failed is None:
                raise storage_error(self.path, error) from error
        finally:
            os.close(self._fd)


class FolderLock:
    """Held by the one process that writes a run folder, until it ends or lets go (``flock``, which dies with its
    owner). Raises UsageError when another one has it, and StorageError when the folder cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        with writing(self.path):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 40, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise UsageError(
                f"{folder}: expected a folder that nobody writes to, found one in use by process {owner or 'unknown'}; "
                "wait until that run has ended, or name another folder"
            ) from error
        except OSError as error:
            os.close(self._fd)
            raise storage_error(self.path, error) from error
        # Who holds it is for people alone: a full disk does not unlock it.
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
