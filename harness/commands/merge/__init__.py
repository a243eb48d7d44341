"""``harness merge``: join parts of one run, recorded on several machines, into one recorded run that is judged once.

Of each cell the first recording that completed it counts, in the order in which the parts were started. Later ones are
neither judged nor compared with it, so a retry fills in what is missing, but replaces nothing.

Judging needs the whole family: the registered tests of the normal tier are adjusted over all cells together, and error
rates are stated for a whole run, not for a part of it. The second stage needs no further run: each part has run one
for the tests that its own, smaller family rejected, and at the same level Holm's procedure rejects in a part of a
family whatever it rejects in the whole. A test that the whole family rejects and no part repeated is UNKNOWN, as in
any run.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.commands.merge.assemble import assemble
from harness.commands.merge.expected_run import MergeOptions, expected_run
from harness.commands.merge.load import load_parts, matching_parts
from harness.commands.merge.write import merged_record, write_merged
from harness.errors import InfrastructureError, UsageError
from harness.history.folder import History, load_history
from harness.util.storage import LOCK, FolderLock, writing

__all__ = ["MergeOptions", "merge"]


def merge(folders: Sequence[Path], out: Path, wanted: MergeOptions | None = None) -> History:
    """Merge recorded runs into a new run folder ``out`` and load it, without judging it.

    Raises UsageError when a part cannot be used, or does not match the others or the profile that was given, and
    InfrastructureError when no part is left or no part completed a cell; nothing has been written then. Raises
    StorageError when the folder cannot be written, and leaves it empty.
    """
    wanted = wanted or MergeOptions()
    _require_empty(out)
    parts, problems = load_parts(folders, wanted)
    parts, foreign, signature = matching_parts(parts)
    problems += foreign
    if problems and not wanted.keep_going:
        shown = "\n".join(f"  {p}" for p in problems)
        raise UsageError(f"{len(problems)} of the parts cannot be merged (--keep-going leaves them out):\n{shown}")
    if not parts or signature is None:
        raise InfrastructureError(
            "there are no parts that can be merged: " + ("; ".join(problems) or "no run in the folders")
        )
    expected = expected_run(parts[0].run, signature, wanted)
    whole = assemble([p.history for p in parts])
    run = merged_record(parts, whole, expected, out.resolve().name)
    lacking = [f"  {c.cell}: {c.reason or c.state}" for c in run.cells if c.state != "complete"]
    if lacking and not wanted.keep_going:
        raise InfrastructureError(
            f"no part completed {len(lacking)} of {len(run.cells)} cells; record them again, or leave them UNKNOWN "
            "with --keep-going:\n" + "\n".join(lacking)
        )
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with FolderLock(out):
        # Another merge may have written to it before we had the lock.
        _require_empty(out)
        notices = [f"a part was left out: {p}" for p in problems]
        with _removed_on_failure(out):
            said = write_merged(out, parts, whole, run, expected, notices)
            written = load_history(out)
        # With --expect, the profile is the user's own.
        return written.model_copy(update={"own": wanted.expect is not None, "notices": (*written.notices, *said)})


@contextlib.contextmanager
def _removed_on_failure(out: Path) -> Iterator[None]:
    """Remove what was written to a folder that was empty if the rest cannot be, so that another try is not refused."""
    try:
        yield
    except BaseException:
        for path in out.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
        raise


def _require_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(p.name != LOCK for p in out.iterdir())):
        raise UsageError(f"--out {out}: this folder has files in it; name a new or an empty one")
