"""Recorded runs of earlier versions, brought to the current schema when they are loaded. Files are never rewritten.

Each step takes the raw ``run.json`` of one schema version to the next; observations have only ever gained fields with
defaults, so they need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCHEMA = 3


def _to_2(raw: dict[str, Any]) -> dict[str, Any]:
    """Schema 2: a tier instead of ``acceptance: exact``; identities carry hardware, vLLM version and KV dtype."""
    profile = dict(raw.get("profile") or {})
    judging = dict(profile.get("judging") or {})
    if judging.pop("acceptance", None) == "exact":
        judging["tier"] = "bitwise"
    profile["judging"] = judging
    # Pressure once waited until so much of the pool was in use; now all its requests are queued together.
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
    """Schema 3: sealed (``harness.seal``). Earlier runs have no seal; one that has it is no earlier one."""
    if kept := {"seal", "record_sha256", "resumed", "kind", "came_to"} & raw.keys():
        raise ValueError(f"{', '.join(sorted(kept))} belong to schema 3")
    return {**raw, "schema_version": 3}


STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _to_2, 2: _to_3}


def migrate(raw: dict[str, Any]) -> dict[str, Any]:
    """The raw record in the current schema; unchanged when there is no way to it."""
    while raw.get("schema_version") in STEPS:
        raw = STEPS[raw["schema_version"]](raw)
    return raw
