"""The differences of two values of plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def differing(expected: Any, found: Any, place: str) -> Iterator[str]:
    """Yield a description of each place at which two values (plain data) differ."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(k for k in found if k not in expected)]:
            # Records of earlier versions lack lists and mappings that are empty now.
            if key in found or expected[key] not in ([], (), {}):
                yield from differing(expected.get(key), found.get(key), f"{place}.{key}")
    elif (ours := _by_id(expected)) and (theirs := _by_id(found)):
        yield from differing(ours, theirs, place)
        if list(ours) != list(theirs) and ours.keys() == theirs.keys():
            yield f"{place}: expected the order {', '.join(ours)}, found {', '.join(theirs)}"
    elif _lists_of_mappings(expected, found):
        for at, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differing(one, other, f"{place}.{at}")
    elif _plain(expected) != _plain(found):
        yield f"{place}: expected {_short(expected)}, found {_short(found)}"


def _lists_of_mappings(expected: Any, found: Any) -> bool:
    lists = isinstance(expected, list | tuple) and isinstance(found, list | tuple)
    return lists and len(expected) == len(found) and all(isinstance(v, Mapping) for v in (*expected, *found))


def _by_id(value: Any) -> dict[str, Any]:
    """Return a list of mappings by their ids; empty for anything else."""
    named = isinstance(value, list | tuple) and all(isinstance(v, Mapping) and "id" in v for v in value)
    return {str(v["id"]): v for v in value} if named else {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, Mapping) or value is None:
        return "one" if value else "none"
    text = repr(_plain(value))
    return text if len(text) <= 80 else text[:77] + "…"
