"""A folder of its own for the sockets of a tree of processes. Standard library alone, because the warden uses it.

vLLM leaves its sockets (``ipc://VLLM_RPC_BASE_PATH/UUID``) in the temporary folder, five to seven for each engine, also
when that ends well; their names say nothing of whose they are. So every tree gets a folder for them, which is removed
with it. It lies in the folder of ledgers and is called after the tree's mark. The file of vLLM's process group
(``vllm_dist_HEX``, 2 KB) goes to the temporary folder and nowhere else, and stays.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

LONGEST = 107 - len("/01234567-89ab-cdef-0123-456789abcdef")
"""Bytes of the folder's path: those of a socket are 107 at most (``sun_path``), and vLLM calls its sockets after a
UUID."""


class ScratchError(Exception):
    """There can be no such folder; the message is for the engine's log."""


def name_of(mark: str) -> str:
    return f"s-{mark}"


def folder_for(state: Path, mark: str) -> Path:
    """Where the folder of a tree will be. Raises ScratchError when sockets in it would have names that are too long."""
    folder = state / name_of(mark)
    if (found := len(os.fsencode(folder))) > LONGEST:
        raise ScratchError(
            f"sockets of this engine stay in {tempfile.gettempdir()}: expected at most {LONGEST} bytes for the "
            f"path of a folder of its own, so that sockets fit into it, found {found}; set TMPDIR to a shorter path"
        )
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Variables for the tree. ``TMPDIR`` itself stays as it is: torch keeps its precompiled headers there, under a path
    that is part of every kernel's key (``_HEADER_DIR`` of ``torch/_inductor/codecache.py``, torch 2.13), so that with a
    folder of its own each engine compiled for a minute at its first request."""
    return {"VLLM_RPC_BASE_PATH": str(folder)}


def there(folder: Path) -> bool:
    """Whether this is such a folder of this user, in one that nobody else can write to."""
    try:
        above, known = folder.parent.lstat(), folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(above.st_mode) and above.st_uid == os.getuid() and not above.st_mode & 0o077
    return private and stat.S_ISDIR(known.st_mode) and known.st_uid == os.getuid()


def remove(folder: Path) -> str:
    """Remove it with all that is in it; links are not followed. Returns what is left, in words."""
    if not os.path.lexists(folder):
        return ""
    if not there(folder):
        return f"{folder}, which is no folder of this user alone"
    try:
        shutil.rmtree(folder)
    except OSError as error:
        return f"{folder}, which cannot be removed ({error.strerror})"
    return ""
