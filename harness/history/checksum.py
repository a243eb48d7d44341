"""The seal of a finished run: checksums by which changes to its files are detected and never judged.

``run.json`` of schema 3 contains the number of lines of ``observations.jsonl`` and their SHA-256, the SHA-256 of the
Parquet copy, and the SHA-256 of itself in canonical form without that last field. An unfinished run has no seal of its
observations, and cannot pass. This detects damage and accidental edits; it is not a signature, since anyone who can
write the folder can seal it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pydantic import ValidationError

from harness.errors import DataError
from harness.util.files import sha256_file, sha256_json
from harness.util.strict import Strict

LINES = "observations.jsonl"
PARQUET = "observations.parquet"
SEALED_FROM = 3
"""First schema of histories with a seal."""
_SEAL, _OWN = "seal", "record_sha256"
_CHUNK = 1 << 20
_REMEDY = "restore the folder from a copy, or run again: changed records are not judged"


class Seal(Strict):
    """Checksums of a run's observations at its end."""

    lines: int
    sha256: str
    """Hash of the JSON lines."""
    parquet_sha256: str | None = None


def seal_of(folder: Path) -> Seal:
    """Compute the seal of the observations that a folder contains now, in one pass."""
    lines, digest = 0, hashlib.sha256()
    if (folder / LINES).is_file():
        with (folder / LINES).open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                lines += chunk.count(b"\n")
                digest.update(chunk)
    parquet = folder / PARQUET
    return Seal(
        lines=lines,
        sha256=digest.hexdigest(),
        parquet_sha256=sha256_file(parquet) if parquet.is_file() else None,
    )


def sealed(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a record with its own hash, and if it is finished with the seal of the folder's observations."""
    out = {k: v for k, v in raw.items() if k not in (_SEAL, _OWN)}
    out[_SEAL] = seal_of(folder).model_dump(mode="json") if out["finished"] is not None else None
    return {**out, _OWN: sha256_json(out)}


def unsealed(raw: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], Seal | None]:
    """Return a record as it was before ``sealed``, and its seal. Raises DataError when it has been changed since."""
    own = raw.get(_OWN)
    out = {k: v for k, v in raw.items() if k != _OWN}
    if own != sha256_json(out):
        raise DataError(
            f"{path}: expected the record as it was written, found it changed or damaged (its hash does not match); "
            f"{_REMEDY}"
        )
    given = out.pop(_SEAL, None)
    if (given is None) != (out.get("finished") is None):
        found = "a finished run without one" if given is None else "one in an unfinished run"
        raise DataError(f"{path}: expected a seal in finished runs alone, found {found}; {_REMEDY}")
    try:
        return out, None if given is None else Seal.model_validate(given)
    except ValidationError as error:
        raise DataError(f"{path}: expected a seal of its observations, found {given!r}; {_REMEDY}") from error


def check_observations(folder: Path, seal: Seal | None) -> tuple[str | None, list[str]]:
    """Return which of the two files of observations counts (None without either), and notices about the other one.

    The JSON lines count if they exist, or else the Parquet copy. Raises DataError when the file that counts is not the
    one that was sealed.
    """
    lines, parquet = folder / LINES, folder / PARQUET
    if not lines.is_file():
        return _without_lines(folder, seal)
    now = seal_of(folder)
    if seal is not None and (now.lines, now.sha256) != (seal.lines, seal.sha256):
        intact = seal.parquet_sha256 is not None and now.parquet_sha256 == seal.parquet_sha256
        remedy = f"{PARQUET} is unchanged: remove {LINES} to judge from it" if intact else _REMEDY
        raise DataError(
            f"{lines}: expected the {seal.lines} observations that the run ended with, found the file changed or "
            f"damaged ({now.lines} lines, another hash); {remedy}"
        )
    if now.parquet_sha256 is None:
        return LINES, []
    agrees = now.parquet_sha256 == seal.parquet_sha256 if seal is not None else _same_records(lines, parquet)
    return LINES, [] if agrees else [f"{PARQUET} does not agree with {LINES} and was ignored; {LINES} counts"]


def _without_lines(folder: Path, seal: Seal | None) -> tuple[str | None, list[str]]:
    parquet = folder / PARQUET
    if seal is None:
        return (PARQUET, []) if parquet.is_file() else (None, [])
    if parquet.is_file():
        if sha256_file(parquet) == seal.parquet_sha256:
            return PARQUET, []
        raise DataError(
            f"{parquet}: expected the observations that the run ended with, found the file changed or damaged, and no "
            f"{LINES}; {_REMEDY}"
        )
    if seal.lines:
        raise DataError(
            f"{folder / LINES}: expected the run's {seal.lines} observations, found no such file; {_REMEDY}"
        )
    return None, []


def _same_records(lines: Path, parquet: Path) -> bool:
    """Return whether an unsealed Parquet copy has the same records as the complete lines, in the same order."""
    try:
        copied, given = hashlib.sha256(), hashlib.sha256()
        for batch in pq.ParquetFile(parquet).iter_batches(batch_size=1024, columns=["record"]):
            for record in batch.column(0).to_pylist():
                copied.update(str(record).encode() + b"\n")
        for line in _whole_lines(lines):
            given.update(line)
    except Exception:
        # Whatever the file is, it is not a copy of the lines.
        return False
    return copied.digest() == given.digest()


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n") and line.strip():
                yield line
