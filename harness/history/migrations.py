"""Migration of recorded runs from earlier versions to the current schema, on loading. Files are never rewritten.

Each step takes the raw ``run.json`` of one schema version to the next. Observations need no migration: they have only
ever gained fields with defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.history.records import COUNTED

OLDEST, SCHEMA = 4, 6
"""First schema that is read, and the current one. Schemas 1 to 3, with all cells in one file, were never
published."""


def _to_5(raw: dict[str, Any]) -> dict[str, Any]:
    """Migrate to schema 5, which has every planned request and not only their number. Raises ValueError for keys that
    only schema 5 has."""
    if "plans" in raw or any("plan" in cell for cell in raw["cells"]):
        raise ValueError("plans belong to schema 5")
    return {**raw, "schema_version": 5, "cells": [{**cell, "plan": COUNTED} for cell in raw["cells"]]}


def _to_6(raw: dict[str, Any]) -> dict[str, Any]:
    """Migrate to schema 6, which says when the KV pools were empty. Raises ValueError for keys that only it has."""
    if any("emptied_s" in cell for cell in raw["cells"]):
        raise ValueError("emptied_s belongs to schema 6")
    return {**raw, "schema_version": 6, "cells": [{**cell, "emptied_s": {}} for cell in raw["cells"]]}


STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {4: _to_5, 5: _to_6}


def migrate(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the raw record in the current schema, or unchanged if its version has no migration."""
    while raw.get("schema_version") in STEPS:
        raw = STEPS[raw["schema_version"]](raw)
    return raw
