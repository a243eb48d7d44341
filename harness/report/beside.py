"""What other commands wrote beside a run: the newest self-test and the newest A/A. Damaged ones are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harness.selftest.outcome import SelfTest

if TYPE_CHECKING:
    from harness.repeat import AgainstItself


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


def newest_selftest(folder: Path) -> SelfTest | None:
    for raw in _newest(folder, "selftest.json"):
        try:
            return SelfTest.model_validate({k: v for k, v in raw.items() if k in SelfTest.model_fields})
        except ValidationError:
            continue
    return None


def newest_aa(folder: Path) -> AgainstItself | None:
    # Judging repetitions writes reports, so its module imports this one.
    from harness.repeat import AgainstItself

    for raw in _newest(folder, "aa.json"):
        try:
            return AgainstItself.model_validate({k: v for k, v in raw.items() if k in AgainstItself.model_fields})
        except ValidationError:
            continue
    return None
