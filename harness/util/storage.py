"""Writing of records: file-system errors in one sentence, and one writer at a time per folder."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from harness.errors import StorageError, UsageError
from harness.util import file_lock

LOCK = ".lock"
"""Lock file of a run folder's writer; it says nothing about the run."""
_REMEDY = {
    errno.ENOSPC: "the disk is full; make room",
    errno.EDQUOT: "the quota is used up; make room",
    errno.EROFS: "it is on a read-only file system; use another folder",
    errno.EACCES: "writing there is not allowed; use another folder",
    errno.EPERM: "writing there is not allowed; use another folder",
    errno.EIO: "the device failed; use another one",
    errno.ELOOP: "the harness does not write through links; remove it",
    errno.EFBIG: "the file would exceed the size limit; raise it (ulimit -f)",
}


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return the error for the user that explains an OSError."""
    what = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDY.get(error.errno or 0, "use another folder")
    return StorageError(f"{path} cannot be written ({what}): {remedy}, and run again; what was recorded before is kept")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


class LineFile:
    """An append-only log whose lines are written completely or, as far as possible, not at all.

    When ``append`` returns, the operating system has the line, so the death of this process cannot lose it; after
    ``close`` it is on the disk. When a write fails, the partial line is removed and nothing more is written: a line
    after half of one would make both unreadable.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises StorageError."""
        self.path = path
        self._failed: StorageError | None = None
        with writing(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._fd).st_size
        self._open = True

    def append(self, line: str) -> None:
        """Append a line. Raises StorageError, after a failure with every call."""
        if self._failed is not None:
            raise self._failed
        rest = memoryview(line.encode() + b"\n")
        whole = self._size + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._failed = storage_error(self.path, error)
            self._remove_partial_line()
            raise self._failed from error
        self._size = whole

    def _remove_partial_line(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            # Readers recognise a torn last line.
            return

    def close(self) -> None:
        """Flush to the disk and close. Raises StorageError when that fails, unless ``append`` already did."""
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
    """The lock of the one process that writes a run folder, held until that process ends or releases it."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises UsageError when another process holds it, and StorageError when the folder cannot be
        written or has a link in place of the lock."""
        self.path = folder / LOCK
        while not (taken := self._take()) and not file_lock.is_at(self.path, self._fd):
            # Its last holder removed the file after it was opened here.
            os.close(self._fd)
        if not taken:
            owner = os.pread(self._fd, 40, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise UsageError(
                f"{folder}: process {owner or 'unknown'} is writing to this folder; wait until that run has ended, "
                "or name another folder"
            )
        # The holder's id is only a note for people: on a full disk the lock holds without it.
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass

    def _take(self) -> bool:
        with writing(self.path):
            self._fd = file_lock.open_lock(self.path, 0o644)
        try:
            return file_lock.take(self._fd) and file_lock.is_at(self.path, self._fd)
        except OSError as error:
            os.close(self._fd)
            raise storage_error(self.path, error) from error

    def release(self) -> None:
        """Remove the lock file and release it: a finished run must have none, which a copy of it would take along."""
        if self._fd >= 0:
            if file_lock.is_at(self.path, self._fd):
                with contextlib.suppress(OSError):
                    self.path.unlink()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
