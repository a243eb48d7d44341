"""Folders of models at rest: weights in ``model.gguf``, a third of their size in bfloat16, expanded when first used."""

from __future__ import annotations

import math
import re
import shutil
from functools import lru_cache, partial
from pathlib import Path

from harness.errors import ProfileError
from harness.profiles import converted
from harness.profiles.model_reference import GgufSource
from harness.util.files import sha256_file, sha256_json

WEIGHTS = "model.gguf"


def is_at_rest(folder: Path) -> bool:
    """Return whether a folder has its weights in ``model.gguf`` alone."""
    there = (folder / WEIGHTS).is_file() and (folder / "config.json").is_file()
    return there and not any(folder.glob("*.safetensors"))


def source_of(folder: Path) -> GgufSource:
    """Return what is recorded of a folder at rest."""
    return GgufSource(gguf=folder.name, sha256=_hash(folder / WEIGHTS), converter=converted.CONVERTER)


def expanded(folder: Path) -> Path | None:
    """Return the expanded folder of one at rest in the cache, or None."""
    return converted.found(_name(folder))


def expand(folder: Path, tell: converted.Tell) -> Path:
    """Expand a folder at rest into the cache, if it is not there.

    Each tensor keeps its name; floats become bfloat16, integers keep their values, and all other files are copied.
    Raises ProfileError when the file cannot be read, and EnvironmentFault without the package ``gguf`` or room.
    """
    there = expanded(folder)
    if there is not None:
        return there
    converted.require_reader()
    tell(f"expanding {folder} into {converted.root()}")
    return converted.make(_name(folder), source_of(folder).model_dump(), partial(_build, folder), tell)


def _build(folder: Path, out: Path, _: Path) -> None:
    # Numpy takes a while to import, and a plan needs none of this.
    from harness.profiles.gguf_file import GgufFile
    from harness.util.safetensors_file import write_safetensors

    what = str(folder / WEIGHTS)
    source = GgufFile(folder / WEIGHTS, what)
    size = sum(max(2 * math.prod(t.shape), int(t.stored.n_bytes)) for t in source.tensors.values())
    converted.require_room(what, size)
    if not source.tensors:
        raise ProfileError(f"{what}: expected tensors, found none; write the file again")
    write_safetensors(out / "model.safetensors", [source.as_tensor(t, t.name) for t in source.tensors.values()])
    for path in _others(folder):
        shutil.copyfile(path, out / path.name)


def _others(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and p.name not in (WEIGHTS, converted.MANIFEST))


def _name(folder: Path) -> str:
    """Return the name of the expanded folder, which differs with every byte that it is made from."""
    files = {p.name: _hash(p) for p in (folder / WEIGHTS, *_others(folder))}
    key = sha256_json({"files": files, "converter": converted.CONVERTER})
    return f"{_safe(folder.name)}-{key[:16]}"


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def is_expansion(found: str, folder: str) -> bool:
    """Return whether a path is named like the expanded folder of ``folder``, whatever was in it."""
    return re.fullmatch(rf"{re.escape(_safe(Path(folder).name))}-[0-9a-f]{{16}}", Path(found).name) is not None


def _hash(path: Path) -> str:
    found = path.stat()
    return _hash_of(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=256)
def _hash_of(path: Path, size: int, modified: int) -> str:
    """Return the hash of a file, which is read again only when its size or time has changed."""
    return sha256_file(path)
