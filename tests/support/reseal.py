"""Recorded runs that a test edits, sealed anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from harness.history.checksum import sealed
from harness.history.layout import RUN
from harness.util.files import write_json


def reseal(folder: Path, change: Callable[[dict], object] = lambda raw: None) -> None:
    """Apply a change to a run's record, and seal it with its observations as they are now."""
    raw = json.loads((folder / RUN).read_text())
    change(raw)
    write_json(folder / RUN, sealed(raw, folder), sort_keys=False)
