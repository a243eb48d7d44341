"""The folder for the sockets of one process tree. Standard library only, because the supervisor uses it.

vLLM leaves its sockets (``ipc://VLLM_RPC_BASE_PATH/UUID``) in the temporary folder even when an engine ends normally,
and their names do not show whose they are. So every tree gets a folder for them, which is removed with the tree. It
lies in the folder of ledgers and is named after the tree's mark. The file of vLLM's process group (``vllm_dist_HEX``,
2 KB) always goes to the temporary folder, and stays there.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

LONGEST = 107 - len("/01234567-89ab-cdef-0123-456789abcdef")
"""Bytes of the folder's path: a socket's path has 107 at most (``sun_path``), and vLLM names its sockets by UUID."""


class ScratchError(Exception):
    """A tree cannot have such a folder; the message is for the engine's log."""


def name_of(mark: str) -> str:
    return f"s-{mark}"


def folder_for(state: Path, mark: str) -> Path:
    """Return where the folder of a tree will be. Raises ScratchError when its sockets' paths would be too long."""
    folder = state / name_of(mark)
    if (found := len(os.fsencode(folder))) > LONGEST:
        raise ScratchError(
            f"sockets of this engine stay in {tempfile.gettempdir()}: expected a path of at most {LONGEST} bytes for a "
            f"folder of its own, so that socket paths fit, found {found}; set TMPDIR to a shorter path"
        )
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return the variables for the tree.

    ``TMPDIR`` itself stays as it is: torch keeps its precompiled headers there, under a path that is part of every
    kernel's key (``_HEADER_DIR`` of ``torch/_inductor/codecache.py``, torch 2.13), so that each engine with a
    ``TMPDIR`` of its own would compile all kernels anew.
    """
    return {"VLLM_RPC_BASE_PATH": str(folder)}


def _is_private(folder: Path) -> bool:
    """Return whether this is a folder of this user inside one that nobody else can write to."""
    try:
        above, known = folder.parent.lstat(), folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(above.st_mode) and above.st_uid == os.getuid() and not above.st_mode & 0o077
    return private and stat.S_ISDIR(known.st_mode) and known.st_uid == os.getuid()


def remove(folder: Path) -> str:
    """Remove the folder and its contents without following links; return a description of what is left, if any."""
    if not os.path.lexists(folder):
        return ""
    if not _is_private(folder):
        return f"{folder}, which is not a folder of this user alone"
    try:
        shutil.rmtree(folder)
    except OSError as error:
        return f"{folder}, which cannot be removed ({error.strerror})"
    return ""
