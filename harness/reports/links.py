"""Finds the newest self-test and the newest A/A run beside a run. Damaged results are ignored."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import quote

from harness.reports.aa_result import AgainstItself
from harness.reports.selftest_result import SelfTest
from harness.util import json_io

_Model = TypeVar("_Model", SelfTest, AgainstItself)


class Beside(NamedTuple, Generic[_Model]):
    """A result in a folder beside a run's."""

    found: _Model
    links: dict[str, str]
    """Its pages: name → path relative to the run's folder, quoted for a URL."""


def _newest(folder: Path, name: str, kind: type[_Model], page: str) -> Beside[_Model] | None:
    """Return the newest valid result in a JSON file of that name in a folder beside the run, with its page."""
    found = []
    for path in folder.resolve().parent.glob(f"*/{name}"):
        # A text that is no result, or one of another version, is none.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            raw = json_io.loads(json_io.read_text(path, 256 * json_io.MIB))
            result = kind.model_validate({k: v for k, v in raw.items() if k in kind.model_fields})
            if not path.parent.is_symlink():
                found.append((result.started, path.parent, result))
    if not found:
        return None
    _, beside, result = max(found, key=lambda item: item[0])
    link = f"../{quote(os.fsencode(beside.name), safe='')}/{page}"
    return Beside(result, {page: link} if (beside / page).is_file() else {})


def newest_selftest(folder: Path) -> Beside[SelfTest] | None:
    return _newest(folder, "selftest.json", SelfTest, "report.html")


def newest_aa(folder: Path) -> Beside[AgainstItself] | None:
    return _newest(folder, "aa.json", AgainstItself, "aa.md")
