"""Finds the newest self-test and the newest A/A run beside a run. Damaged results are ignored."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from harness.reports.aa_result import AgainstItself
from harness.reports.selftest_result import SelfTest
from harness.util import json_io

_Model = TypeVar("_Model", bound=BaseModel)


class Beside(NamedTuple, Generic[_Model]):
    """A result in a folder beside a run's."""

    found: _Model
    links: dict[str, str]
    """Its pages: name → path relative to the run's folder, quoted for a URL."""


def _newest(folder: Path, name: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return the folders beside the run that have a JSON file of that name, with its contents, newest first."""
    found = []
    for path in folder.resolve().parent.glob(f"*/{name}"):
        if path.parent.is_symlink():
            continue
        try:
            raw = json_io.loads(json_io.read_text(path, 256 * json_io.MIB))
        except (OSError, ValueError):
            continue
        if isinstance(raw, dict):
            found.append((path.parent, raw))
    return sorted(found, key=lambda item: str(item[1].get("started")), reverse=True)


def _newest_valid(folder: Path, name: str, kind: type[_Model], pages: tuple[str, ...]) -> Beside[_Model] | None:
    for beside, raw in _newest(folder, name):
        with contextlib.suppress(ValidationError):
            found = kind.model_validate({k: v for k, v in raw.items() if k in kind.model_fields})
            return Beside(found, {page: f"../{link}" for page in pages if (link := report_link(beside, page))})
    return None


def report_link(folder: Path, page: str = "report.html") -> str | None:
    """Return the path of a folder's page relative to its parent, quoted for a URL; None when it has no such page."""
    return f"{quote(os.fsencode(folder.name), safe='')}/{page}" if (folder / page).is_file() else None


def newest_selftest(folder: Path) -> Beside[SelfTest] | None:
    """Return the newest self-test beside a run."""
    return _newest_valid(folder, "selftest.json", SelfTest, ("report.html",))


def newest_aa(folder: Path) -> Beside[AgainstItself] | None:
    """Return the newest A/A run beside a run."""
    return _newest_valid(folder, "aa.json", AgainstItself, ("aa.md",))
