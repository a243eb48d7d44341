"""Exclusive locks on files, which the kernel releases when their holder dies.

The ``filelock`` package does not fit: its locks cannot be passed to a child (the claim of a port must outlive a killed
harness); it does not report that it has to wait; and on a file system without ``flock`` it falls back to a lock that
outlives its holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path


def open_lock(path: Path, mode: int = 0o600) -> int:
    """Open a lock file, creating it if necessary and keeping its contents, and return its descriptor.

    Raises OSError, with a reason, for a symbolic link, a file with several hard links and anything that is not
    a regular file: the note written into the lock file must never reach a file of the user.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link in place of a file of the harness", str(path)) from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise OSError(errno.ELOOP, "something other than a regular file with a single name", str(path))
    return handle


def take(handle: int) -> bool:
    """Try to lock an open file and return whether it succeeded. Raises OSError where locks are not supported."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for(handle: int) -> None:
    """Lock an open file, waiting for its holder as long as necessary."""
    fcntl.flock(handle, fcntl.LOCK_EX)


def claim(path: Path) -> int | None:
    """Open and lock a file that its holder removes at the end.

    Return its descriptor, or None when another process holds it. Raises OSError as ``open_lock`` does.
    """
    handle = open_lock(path)
    try:
        # The previous holder may have removed the file after it was opened here.
        if take(handle) and is_at(path, handle):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def is_at(path: Path, handle: int) -> bool:
    """Return whether an open file is still the one of this name: its holder may have removed it since."""
    try:
        return path.lstat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


def held(path: Path) -> bool:
    """Return whether any process holds the lock of a file. A shared lock is tried, so that others may look too."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
