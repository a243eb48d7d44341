"""``harness doctor``: what this machine can run, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Examined(NamedTuple):
    """One thing that was looked at."""

    what: str
    found: str
    ok: bool
    needed: bool
    advice: str = ""

    @classmethod
    def of_file(cls, what: str, found: str | Path | None, needed: bool, advice: str) -> Examined:
        """Return the item of a file that is there or not."""
        return cls(what, "not found" if found is None else str(found), found is not None, needed, advice)
