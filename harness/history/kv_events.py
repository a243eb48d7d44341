"""What engines told subscribers of their prefix caches (vLLM's KV events), as the run's subscriber wrote it down.

One file for each engine, ``witness/<group>.<role>-events.<pid>.jsonl``, whose first line says so; each other line is a
message: its number, its time, and its events.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Literal, NamedTuple

from harness.history.layout import witness_files
from harness.history.notes import engines_of, lines_of, role_of, validated
from harness.util.strict import Strict

MARK = "kv_events"
"""Key of the first line of a file with events."""
SUFFIX = "-events"
"""Ends the role in the name of such a file."""


def is_events(path: Path) -> bool:
    """Return whether a file among the notes of KV caches has events."""
    return role_of(path).endswith(SUFFIX)


class KVEvent(Strict):
    """Blocks that an engine put into its prefix cache or took out, or (``cleared``) that it took out all."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: tuple[str, ...] = ()
    parent: str | None = None
    """Hash of the block before the first one; None at the beginning of a prompt."""
    tokens: tuple[int, ...] = ()
    block_size: int = 0
    adapter: str | None = None
    """Name of the LoRA adapter that computed them."""
    group: int = 0
    """Number of the KV-cache group."""


class KVMessage(Strict):
    """A message of an engine: what its scheduler did in a step."""

    number: int
    """Counted by the engine, from 0."""
    at: float
    """Seconds since 1970."""
    events: tuple[KVEvent, ...]


class EngineEvents(NamedTuple):
    """What an engine has told, in the order of its arrival."""

    messages: tuple[KVMessage, ...]
    errors: tuple[str, ...]
    """What the subscriber could not read."""


def read_events(folder: Path, group: str) -> dict[str, EngineEvents]:
    """Return what a run's engines of a group told, by role. Raises DataError for damaged files."""
    found: dict[str, list[KVMessage]] = defaultdict(list)
    errors: dict[str, list[str]] = defaultdict(list)
    for path in filter(is_events, witness_files(folder)):
        if engines_of(path) != group:
            continue
        role = role_of(path).removesuffix(SUFFIX)
        found[role] += ()
        for _, row in lines_of(path):
            if "error" in row:
                errors[role].append(str(row["error"]))
            elif MARK not in row:
                found[role].append(validated(KVMessage, row, path))
    return {role: EngineEvents(tuple(messages), tuple(errors[role])) for role, messages in found.items()}
