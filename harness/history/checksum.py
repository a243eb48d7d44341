"""The seal of a finished run: checksums by which changes to its files are detected and never judged.

``run.json`` contains the number of lines and the SHA-256 of each file of observations, and the SHA-256 of itself in
canonical form without that last field. An unfinished run has no seal of its observations, and cannot pass. This detects
damage and accidental edits; it is not a signature, since anyone who can write the folder can seal it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import DataError
from harness.history.layout import LINES, files_by_cell, witness_files
from harness.util.files import sha256_json
from harness.util.strict import Strict

SEAL, OWN_SHA256 = "seal", "record_sha256"
_CHUNK = 1 << 20
_REMEDY = "restore the folder from a copy, or run again: changed records are not judged"


class _FileSeal(Strict):
    lines: int
    sha256: str


class Seal(Strict):
    """Checksums of a run's observations at its end."""

    files: dict[str, _FileSeal]
    """By path in the folder of the run; empty files are left out."""


def seal_of(folder: Path) -> Seal:
    """Compute the seal of the observations that a folder contains now."""
    files = [folder / LINES, *(f for files in files_by_cell(folder).values() for f in files), *witness_files(folder)]
    return Seal(
        files={
            path.relative_to(folder).as_posix(): _file_seal(path)
            for path in files
            if path.is_file() and path.stat().st_size
        }
    )


def _file_seal(path: Path) -> _FileSeal:
    lines, digest = 0, hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            lines += chunk.count(b"\n")
            digest.update(chunk)
    return _FileSeal(lines=lines, sha256=digest.hexdigest())


def sealed(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a record with its own hash, and if it is finished with the seal of the folder's observations."""
    out = {k: v for k, v in raw.items() if k not in (SEAL, OWN_SHA256)}
    out[SEAL] = seal_of(folder).model_dump(mode="json") if out.get("finished") is not None else None
    return {**out, OWN_SHA256: sha256_json(out)}


def opened(raw: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], Seal | None]:
    """Return a record as it was before ``sealed``, and its seal. Raises DataError when it has been changed since."""
    own = raw.get(OWN_SHA256)
    out = {k: v for k, v in raw.items() if k != OWN_SHA256}
    if own != sha256_json(out):
        raise DataError(
            f"{path}: the record was changed or damaged since it was written (its hash does not match); {_REMEDY}"
        )
    given = out.pop(SEAL, None)
    if (given is None) != (out.get("finished") is None):
        found = "a finished run without one" if given is None else "one in an unfinished run"
        raise DataError(f"{path}: expected a seal in finished runs alone, found {found}; {_REMEDY}")
    try:
        return out, None if given is None else Seal.model_validate(given)
    except ValidationError as error:
        raise DataError(f"{path}: expected a seal of its observations, found {given!r}; {_REMEDY}") from error


def check_observations(folder: Path, seal: Seal | None) -> None:
    """Raise DataError when the observations in a folder are not those that were sealed; None allows any."""
    if seal is None:
        return
    now = seal_of(folder).files
    for name in sorted(seal.files.keys() | now.keys()):
        before, after = seal.files.get(name), now.get(name)
        if before == after:
            continue
        if before is None:
            raise DataError(
                f"{folder / name}: expected the observations that the run ended with, found this file beside them; "
                f"{_REMEDY}"
            )
        changed = f"the file changed or damaged ({after.lines} lines, another hash)" if after is not None else None
        found = changed or "no such file"
        raise DataError(
            f"{folder / name}: expected the {before.lines} observations that the run ended with, found {found}; "
            f"{_REMEDY}"
        )
