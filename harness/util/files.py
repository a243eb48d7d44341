"""Hashes, atomic writes and JSON lines: damaged data is recognised, and recorded data is never lost."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import redact
from harness.errors import DataError
from harness.util import json_io
from harness.util.storage import writing

_MOST_BYTES = 256 * json_io.MIB
"""Largest JSON-lines file that is read at once."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def free_at(folder: Path) -> int:
    """Return the free bytes on the file system of a folder, which need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """Return the hash of a JSON value in canonical form (sorted keys, no spaces)."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_named(path: Path) -> str | None:
    """Return the hash under which the hub's cache stores a large file, or None for any other file.

    Such a file is a link into ``blobs``, where files are named after their SHA-256.
    """
    if not path.is_symlink():
        return None
    blob = path.resolve()
    named = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) and blob.is_file()
    return blob.name if named else None


def sha256_files(folder: Path, names: Iterable[str]) -> str:
    """Return one hash over the names and contents of those of the named files that exist, in sorted order."""
    digest = hashlib.sha256()
    for name in sorted(names):
        path = folder / name
        if path.is_file():
            # Reading many GB takes longer than a cell; the cache names downloads by their hash.
            digest.update(f"{name}\0{sha256_named(path) or sha256_file(path)}\n".encode())
    return digest.hexdigest()


def model_hash(folder: Path) -> str:
    """Return the hash of a checkpoint: its config and weights, and its code if it has any."""
    weights = [p.name for p in folder.glob("*.safetensors")]
    return sha256_files(folder, ["config.json", *weights, *(p.name for p in folder.glob("*.py"))])


def tokenizer_hash(folder: Path) -> str:
    return sha256_files(folder, ["tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"])


def template_hash(folder: Path) -> str:
    return sha256_files(folder, ["chat_template.jinja", "tokenizer_config.json"])


def ends_of(path: Path, most: int) -> str:
    """Return the text of a regular file, or its first and last ``most`` bytes when it is more than twice as long.

    Bytes that are not UTF-8 are replaced. Raises OSError, also for anything but a regular file (a pipe would block).
    """
    with os.fdopen(_open_regular(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= 2 * most:
            data = stream.read(2 * most)
        else:
            first = stream.read(most)
            stream.seek(size - most)
            data = first + b"\n[...]\n" + stream.read(most)
    return data.decode(errors="replace")


def _open_regular(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path`` atomically, so that a reader sees the old or the new content and never a part of it. Raises
    StorageError when the file system refuses it; the old content is kept then."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            # Not by ``tempfile``, whose files are this user's alone: who may read them is up to the umask.
            with temporary.open("xb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def write_traceback(path: Path) -> None:
    """Write the traceback of the exception being handled, without secrets. Raises StorageError."""
    write_atomic(path, redact.text(traceback.format_exc()))


def require_no_links(folder: Path) -> None:
    """Raise DataError for a link or special file in a recorded folder: reading it may never end, writing may change a
    file of the user."""
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                mode = (Path(path) / name).lstat().st_mode
            except FileNotFoundError:
                # Of a run in progress.
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "something that is neither a file nor a folder"
                raise DataError(
                    f"{Path(path) / name}: expected regular files and folders in a recorded run, found {kind}; remove "
                    "it, or copy what it points to into its place"
                )


def write_json(path: Path, value: Any, sort_keys: bool = True) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=sort_keys) + "\n")


def read_json_lines(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line of a JSON-lines file. Raises DataError naming the file and line."""
    try:
        text = json_io.read_text(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"{what} {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{what} {path}: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json_io.loads(line)
        except ValueError as error:
            raise DataError(
                f"{what} {path}, line {number}: expected a JSON object, found text that does not parse ({error})"
            ) from error
        if not isinstance(value, dict):
            raise DataError(f"{what} {path}, line {number}: expected a JSON object, found {type(value).__name__}")
        yield number, value
