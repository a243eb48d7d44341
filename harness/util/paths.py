"""Path containment: which paths a profile may reach, and which a recorded run may.

A profile is chosen by the user, whoever wrote it. Its relative paths stay below its own folder, or below the repository
when it lies there; absolute paths are taken as they are. A recorded run is data from anywhere: judging it reads nothing
outside the repository and the current folder, unless an option names it. Both rules look at the path as text; symbolic
links are followed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PROJECT = "kv-acceptance-harness"
IMPORT_ROOT = Path(__file__).resolve().parents[2]
"""The folder that the package is imported from: a checkout, or a site-packages folder."""
_PACKAGED = IMPORT_ROOT / "harness" / "data"
IN_CHECKOUT = (IMPORT_ROOT / "pyproject.toml").is_file() and not _PACKAGED.is_dir()
REPOSITORY = IMPORT_ROOT if IN_CHECKOUT else _PACKAGED
"""The root of the shipped data: prompts, baselines, models, locks. A wheel carries it inside of the package."""
DEFAULT_OUT = (REPOSITORY if IN_CHECKOUT else Path.cwd()) / "reports"
_SHIPPED = ("baselines", "known-defects.yaml")


def cache_folder(kind: str) -> Path:
    """Return the folder of this user's cache for one kind of thing; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / PROJECT / kind


def beneath(path: Path, folder: Path) -> bool:
    """Return whether a path names the folder or something below it; symbolic links are not resolved."""
    return Path(os.path.normpath(path.absolute())).is_relative_to(Path(os.path.normpath(folder.absolute())))


def joined(base: Path, value: str) -> Path:
    """Return the absolute path for ``value`` in a profile in the folder ``base``. Raises ValueError when it is relative
    and leads out of that folder, or out of the repository when that is in it."""
    if "\0" in value:
        raise ValueError("a path must have no zero byte")
    home = REPOSITORY if beneath(base, REPOSITORY) else base
    path = base / value
    if not Path(value).is_absolute() and not beneath(path, home):
        raise ValueError(
            f"expected a path below {home}, found {value!r}, which leads out of it; move the file there, or write an "
            "absolute path"
        )
    return path.resolve()


def recorded(value: Any, carried: Path) -> Path | None:
    """Return a path that a recorded run names, or None when judging may not read there.

    Where there is nothing that may be read, the copy that the run carries at ``carried`` stands in, if it has one.
    """
    text = str(value)
    if "\0" in text:
        return None
    path = Path(text)
    near = any(beneath(path, home) for home in (REPOSITORY, Path.cwd()))
    if carried.exists() and not (near and path.exists()):
        return carried
    return path if near else _shipped(path)


def _shipped(path: Path) -> Path | None:
    """The shipped data of this installation in the place of another checkout's, which a run made there names."""
    for parts in (path.parts[-2:], path.parts[-1:]):
        here = REPOSITORY.joinpath(*parts)
        if parts and parts[0] in _SHIPPED and here.exists():
            return here
    return None
