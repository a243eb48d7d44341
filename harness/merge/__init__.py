"""``harness merge``: parts of one night, recorded on several machines, as one recorded run that is judged once.

Judging needs the whole family: the registered tests of the normal tier are adjusted over all cells together, and error
rates are stated for a night, not for a part of it. The second stage needs no further run: each part has made one for
the tests that its own, smaller family rejected, and Holm's procedure rejects in a part of a family, at the same level,
whatever it rejects in the whole. What the whole rejects and no part ran again is UNKNOWN, as in any run.

A whole recording is never replaced by a later one, and recordings that do not count are judged too, as if they did: a
retry fills in what is missing and gives nothing a second chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.errors import InfrastructureError, UsageError
from harness.history import History
from harness.merge.load import fitting, load_parts
from harness.merge.night import Wanted, night_of
from harness.merge.write import write_merged
from harness.storage import LOCK, FolderLock, writing

__all__ = ["Wanted", "merge"]


def merge(folders: Sequence[Path], out: Path, wanted: Wanted | None = None) -> History:
    """Merge recorded runs into a new run folder ``out`` and load it. Nothing is judged.

    Raises UsageError when a part cannot be taken, or does not fit the others or the profile that was named, and
    InfrastructureError when none is left; nothing is written then. Raises StorageError when the folder cannot be
    written.
    """
    wanted = wanted or Wanted()
    _require_empty(out)
    parts, problems = load_parts(folders, wanted)
    parts, foreign, signature = fitting(parts)
    problems += foreign
    if problems and not wanted.keep_going:
        shown = "\n".join(f"  {p}" for p in problems)
        raise UsageError(f"{len(problems)} of the parts cannot be merged (--keep-going leaves them out):\n{shown}")
    if not parts or signature is None:
        raise InfrastructureError(
            "expected parts of a night, found none that can be used: "
            + ("; ".join(problems) or "no run in the folders")
        )
    night = night_of(parts[0].run, signature, wanted)
    notices = [f"a part was left out: {p}" for p in problems]
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with FolderLock(out):
        # Another merge may have been as fast.
        _require_empty(out)
        return write_merged(out, parts, night, wanted, notices)


def _require_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(p.name != LOCK for p in out.iterdir())):
        raise UsageError(
            f"--out {out}: expected no such folder yet, or an empty one, found something there; name another"
        )
