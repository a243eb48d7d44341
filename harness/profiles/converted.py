"""The cache of converted models. A folder there is made once, whole or not at all, by one process at a time; where
files are missing or have another size, it is made anew."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.errors import EnvironmentFault
from harness.util import file_lock, json_io
from harness.util.extras import is_installed, why_missing
from harness.util.files import free_at, sha256_file
from harness.util.paths import cache_folder

CONVERTER = 1
"""Version of the conversion. A change of any byte that it writes needs another one."""
MANIFEST = "kv-harness-model.json"
_FORMAT = "kv-acceptance-harness/converted-model/1"
_WEIGHTS = ".safetensors"
_MOST_BYTES = json_io.MIB
_MB = 1e6

Tell = Callable[[str], None]
Build = Callable[[Path, Path], None]
"""Writes a model into the first folder, with the second one for what it needs meanwhile; both are empty. Raises what it
likes."""


def root() -> Path:
    return cache_folder("models")


def found(name: str) -> Path | None:
    """Return the folder of a converted model, or None when it was not made or is not whole. Contents are not read."""
    folder = root() / name
    files = _manifest(folder)
    if files is None:
        return None
    try:
        whole = all((folder / file).stat().st_size == facts["size"] for file, facts in files.items())
    except (OSError, KeyError, TypeError):
        return None
    return folder if whole else None


def size_of(folder: Path) -> int:
    """Return the bytes of a converted model."""
    return sum(int(facts["size"]) for facts in (_manifest(folder) or {}).values())


def damaged(folder: Path) -> list[str]:
    """Return the files of a converted model whose contents are not those that were written. Reads everything."""
    files = _manifest(folder)
    if files is None:
        return [MANIFEST]
    return sorted(name for name, facts in files.items() if not _is_as_written(folder / name, facts))


def _is_as_written(path: Path, facts: Mapping[str, Any]) -> bool:
    try:
        return sha256_file(path) == facts.get("sha256")
    except OSError:
        return False


def _manifest(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Return size and hash of each file of a converted model, or None where there is no list of them."""
    try:
        raw = json_io.loads(json_io.read_text(folder / MANIFEST, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    files = raw.get("files") if isinstance(raw, dict) and raw.get("format") == _FORMAT else None
    return files if isinstance(files, dict) and all(isinstance(f, dict) for f in files.values()) else None


def make(name: str, source: Mapping[str, Any], build: Build, tell: Tell) -> Path:
    """Return the folder of a converted model, which is made if it is not there; another process that makes it is waited
    for.

    ``source`` says what it is made from. Raises EnvironmentFault when the cache cannot be written, and what ``build``
    raises.
    """
    with _writing():
        root().mkdir(parents=True, exist_ok=True)
    with _locked(name, tell):
        folder = found(name)
        return folder if folder is not None else _make(name, source, build)


def _make(name: str, source: Mapping[str, Any], build: Build) -> Path:
    folder, prefix = root() / name, f".making-{name}-"
    # Left by a process that was killed, or damaged: the lock is ours.
    for old in (folder, *root().glob(f"{prefix}*")):
        shutil.rmtree(old, ignore_errors=True)
    making = root() / f"{prefix}{secrets.token_hex(4)}"
    try:
        with _writing():
            model, work = making / "model", making / "work"
            for new in (making, model, work):
                new.mkdir()
            build(model, work)
            _store_weights(model)
            _write_manifest(model, source)
            model.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _store_weights(folder: Path) -> None:
    """Turn weights into links to files named after their hashes, as in the hub's cache: a run that identifies the model
    takes the name instead of reading them (``files.sha256_named``)."""
    blobs = folder / "blobs"
    blobs.mkdir()
    for path in sorted(folder.glob(f"*{_WEIGHTS}")):
        digest = sha256_file(path)
        path.rename(blobs / digest)
        path.symlink_to(Path("blobs") / digest)


def _write_manifest(folder: Path, source: Mapping[str, Any]) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    whole = {"format": _FORMAT, "converter": CONVERTER, "source": dict(source), "files": files}
    (folder / MANIFEST).write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _locked(name: str, tell: Tell) -> Iterator[None]:
    """Hold the lock of a model. The kernel releases it when its holder is killed."""
    with _writing():
        handle = file_lock.open_lock(root() / f".{name}.lock")
    try:
        with _writing():
            taken = file_lock.take(handle)
        if not taken:
            tell(f"{name} is being made by another process; waiting for it")
            file_lock.wait_for(handle)
        yield
    finally:
        os.close(handle)


@contextmanager
def _writing() -> Iterator[None]:
    """Turn an OSError of the block into an EnvironmentFault that names the cache."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"the cache of models {root()} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a "
            "writable folder with room"
        ) from error


def require_reader() -> None:
    """Raise EnvironmentFault unless the package ``gguf`` is installed, which reads what is converted."""
    if not is_installed("gguf"):
        raise EnvironmentFault(why_missing("gguf"))


def free() -> int:
    """Return the free bytes on the file system of the cache."""
    return free_at(root())


def require_room(what: str, size: int) -> None:
    """Raise EnvironmentFault unless the cache has room for so many bytes."""
    there = free()
    if size > there:
        raise EnvironmentFault(
            f"{what}: expected {size / _MB:.0f} MB of free disk at {root()}, found {there / _MB:.0f} MB; make room, or "
            "set XDG_CACHE_HOME to a larger disk"
        )
