"""What other commands wrote beside a run: the newest self-test and the newest A/A. Damaged ones are none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from harness import strict_json
from harness.selftest.outcome import SelfTest

if TYPE_CHECKING:
    from harness.repeat import AgainstItself

_Model = TypeVar("_Model", bound=BaseModel)


class Beside(NamedTuple, Generic[_Model]):
    """A result beside a run."""

    found: _Model
    links: dict[str, str]
    """Its files for people, by name, relative to the run's folder and fit for a URL."""


def _newest(folder: Path, name: str) -> list[tuple[Path, dict[str, Any]]]:
    """Folders beside the run that have a file of that name, with its contents, the newest first."""
    found = []
    for path in folder.resolve().parent.glob(f"*/{name}"):
        if path.parent.is_symlink():
            continue
        try:
            raw = strict_json.loads(strict_json.read_text(path, 256 * strict_json.MIB))
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
    """Path of a folder's page, relative to its parent and fit for a URL whatever the folder is called; None when it
    has no such page."""
    return f"{quote(os.fsencode(folder.name), safe='')}/{page}" if (folder / page).is_file() else None


def newest_selftest(folder: Path) -> Beside[SelfTest] | None:
    """The newest self-test beside a run."""
    return _newest_valid(folder, "selftest.json", SelfTest, ("report.html",))


def newest_aa(folder: Path) -> Beside[AgainstItself] | None:
    """The newest A/A beside a run."""
    # Judging repetitions writes reports, so its module imports this one.
    from harness.repeat import AgainstItself

    return _newest_valid(folder, "aa.json", AgainstItself, ("aa.md",))
