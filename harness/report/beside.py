"""What other commands wrote beside a run: the newest self-test and the newest A/A. Damaged ones are none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.selftest.outcome import SelfTest

if TYPE_CHECKING:
    from harness.repeat import AgainstItself

_Model = TypeVar("_Model", bound=BaseModel)


def _newest(folder: Path, name: str) -> list[dict[str, Any]]:
    """Contents of the files of that name in folders beside the run, the newest first."""
    found = []
    for path in folder.resolve().parent.glob(f"*/{name}"):
        if path.parent.is_symlink():
            continue
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(raw, dict):
            found.append(raw)
    return sorted(found, key=lambda raw: str(raw.get("started")), reverse=True)


def _newest_valid(folder: Path, name: str, kind: type[_Model]) -> _Model | None:
    for raw in _newest(folder, name):
        with contextlib.suppress(ValidationError):
            return kind.model_validate({k: v for k, v in raw.items() if k in kind.model_fields})
    return None


def newest_selftest(folder: Path) -> SelfTest | None:
    """The newest self-test beside a run."""
    return _newest_valid(folder, "selftest.json", SelfTest)


def newest_aa(folder: Path) -> AgainstItself | None:
    """The newest A/A beside a run."""
    # Judging repetitions writes reports, so its module imports this one.
    from harness.repeat import AgainstItself

    return _newest_valid(folder, "aa.json", AgainstItself)
