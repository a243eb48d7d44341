"""One thing that `harness doctor` looked at."""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    what: str
    found: str
    ok: bool
    needed: bool
    advice: str = ""
