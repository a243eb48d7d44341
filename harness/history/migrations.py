"""Migration of recorded runs from earlier versions to the current schema, on loading. Files are never rewritten.

Each step takes the raw ``run.json`` of one schema version to the next. Observations need no migration: they have only
ever gained fields with defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.history.records import COUNTED

SCHEMA = 6


def _to_2(raw: dict[str, Any]) -> dict[str, Any]:
    """Migrate to schema 2: a tier replaces ``acceptance: exact``; identities gain hardware, vLLM version, KV dtype."""
    profile = dict(raw.get("profile") or {})
    judging = dict(profile.get("judging") or {})
    if judging.pop("acceptance", None) == "exact":
        judging["tier"] = "bitwise"
    profile["judging"] = judging
    # Pressure used to wait for a given usage of the pool; now all its requests are queued together.
    profile["scenarios"] = [
        {k: v for k, v in s.items() if (s.get("kind"), k) != ("pressure", "usage")}
        for s in profile.get("scenarios", ())
    ]
    engine = profile.get("engine") or {}
    gpus = (raw.get("hardware") or {}).get("gpus") or []
    on_gpu = engine.get("device") == "gpu"
    hardware = str(gpus[0]).split(",")[0].strip() if on_gpu and gpus else "unknown GPU" if on_gpu else "cpu"
    extra = {"kv_dtype": "auto", "hardware": hardware, "vllm": (raw.get("versions") or {}).get("vllm")}
    identities = {method: {**extra, **identity} for method, identity in (raw.get("identities") or {}).items()}
    return {**raw, "schema_version": 2, "profile": profile, "identities": identities}


def _to_3(raw: dict[str, Any]) -> dict[str, Any]:
    """Migrate to schema 3, which adds a seal. Raises ValueError for keys that only schema 3 has."""
    if kept := {"seal", "record_sha256", "resumed", "kind", "came_to"} & raw.keys():
        raise ValueError(f"{', '.join(sorted(kept))} belong to schema 3")
    return {**raw, "schema_version": 3}


def _to_4(raw: dict[str, Any]) -> dict[str, Any]:
    """Migrate to schema 4, which has a folder for each cell; ``load_history`` reads the one file of earlier ones."""
    return {**raw, "schema_version": 4}


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


STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _to_2, 2: _to_3, 3: _to_4, 4: _to_5, 5: _to_6}


def migrate(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the raw record in the current schema, or unchanged if its version has no migration."""
    while raw.get("schema_version") in STEPS:
        raw = STEPS[raw["schema_version"]](raw)
    return raw
