"""Paths that data names: what a profile may reach, and what a recorded run may.

A profile is written by the user, or comes from somebody else and is named by the user. Its relative paths stay below
its own folder, or below the repository when it lies there; an absolute path says for itself where it leads. A recorded
run is data from anywhere: judging it reads nothing outside of the repository and the current folder, unless an option
names it. Both are decided by the words of a path: a symbolic link is the affair of whoever made it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


def beneath(path: Path, folder: Path) -> bool:
    """Whether a path leads to the folder or below it, by its words."""
    return Path(os.path.normpath(path.absolute())).is_relative_to(Path(os.path.normpath(folder.absolute())))


def joined(base: Path, value: str) -> Path:
    """``value`` of a profile in the folder ``base``, absolute. Raises ValueError when it is relative and leaves it."""
    if "\0" in value:
        raise ValueError("expected a path, found one with a zero byte")
    home = REPOSITORY if beneath(base, REPOSITORY) else base
    path = base / value
    if not Path(value).is_absolute() and not beneath(path, home):
        raise ValueError(
            f"expected a path below {home}, found {value!r}, which leads out of it; move what it names there, or write "
            "an absolute path"
        )
    return path.resolve()


def recorded(value: Any) -> Path | None:
    """A path that a recorded run names; None when judging may not read there."""
    text = str(value)
    if "\0" in text:
        return None
    path = Path(text)
    return path if any(beneath(path, home) for home in (REPOSITORY, Path.cwd())) else None
