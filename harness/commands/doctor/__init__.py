"""``harness doctor``: what this machine can run, and what is missing."""

from __future__ import annotations

from typing import NamedTuple


class Examined(NamedTuple):
    """One thing that was looked at."""

    what: str
    found: str
    ok: bool
    needed: bool
    advice: str = ""
