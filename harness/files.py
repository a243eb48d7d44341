"""Files: hashes, atomic writes and JSON lines, so that damaged data is recognised and recorded data is never lost."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import redact, strict_json
from harness.errors import DataError
from harness.storage import writing

_MOST_BYTES = 256 * strict_json.MIB
"""Of a file of JSON lines that is read as a whole."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """Hash of a JSON value in canonical form (sorted keys, no spaces)."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_named(path: Path) -> str | None:
    """Hash under which the hub's cache filed a large file: a link into ``blobs``, where such files are called by their
    SHA-256. None for any other file."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    named = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) and blob.is_file()
    return blob.name if named else None


def sha256_files(folder: Path, names: Iterable[str]) -> str:
    """Hash of the named files of a folder that exist, names included, in sorted order."""
    digest = hashlib.sha256()
    for name in sorted(names):
        path = folder / name
        if path.is_file():
            # Reading 16 GB takes longer than a cell; downloads are filed by their hash.
            digest.update(f"{name}\0{sha256_named(path) or sha256_file(path)}\n".encode())
    return digest.hexdigest()


def model_hash(folder: Path) -> str:
    """Hash of a checkpoint: its config and weights, and its code where it brings some."""
    weights = [p.name for p in folder.glob("*.safetensors")]
    return sha256_files(folder, ["config.json", *weights, *(p.name for p in folder.glob("*.py"))])


def tokenizer_hash(folder: Path) -> str:
    return sha256_files(folder, ["tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"])


def template_hash(folder: Path) -> str:
    return sha256_files(folder, ["chat_template.jinja", "tokenizer_config.json"])


def ends_of(path: Path, most: int) -> str:
    """Text of a regular file; of one with more than twice ``most`` bytes, its first and its last ``most``. What is not
    UTF-8 is replaced. Raises OSError, also for what is no regular file: a pipe would be waited for."""
    with os.fdopen(_without_waiting(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= 2 * most:
            data = stream.read(2 * most)
        else:
            first = stream.read(most)
            stream.seek(size - most)
            data = first + b"\n[...]\n" + stream.read(most)
    return data.decode(errors="replace")


def _without_waiting(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` in one step, so that a reader sees the old or the new content and never half of it.

    Raises StorageError when the file system refuses it; the old content is kept then.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink(missing_ok=True)
            raise


def write_traceback(path: Path) -> None:
    """Keep the traceback of the exception that is being handled, without secrets. Raises StorageError."""
    write_atomic(path, redact.text(traceback.format_exc()))


def write_json(path: Path, value: Any, sort_keys: bool = True) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=sort_keys) + "\n")


def read_json_lines(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSON-lines file. Raises DataError naming the file and line."""
    try:
        text = strict_json.read_text(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"{what} {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{what} {path}: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = strict_json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{what} {path}, line {number}: expected a JSON object, found text that does not parse ({error})"
            ) from error
        if not isinstance(value, dict):
            raise DataError(f"{what} {path}, line {number}: expected a JSON object, found {type(value).__name__}")
        yield number, value
