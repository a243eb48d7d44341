"""The differences of two values of plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any


def differing(expected: Any, found: Any, place: str) -> Iterator[str]:
    """Yield a description of each place at which two values (plain data) differ."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(k for k in found if k not in expected)]:
            # Records of earlier versions lack lists and mappings that are empty now.
            if key in found or expected[key] not in ([], (), {}):
                yield from differing(expected.get(key), found.get(key), f"{place}.{key}")
    elif (ours := _by_name(expected)) and (theirs := _by_name(found)):
        yield from differing(ours, theirs, place)
        if list(ours) != list(theirs) and ours.keys() == theirs.keys():
            yield f"{place}: expected the order {', '.join(ours)}, found {', '.join(theirs)}"
    elif _lists_of_mappings(expected, found):
        for at, (one, other) in enumerate(zip_longest(expected, found)):
            yield from differing(one, other, f"{place}.{at}")
    elif _plain(expected) != _plain(found):
        yield _at_first(_plain(expected), _plain(found), place)


def _lists_of_mappings(expected: Any, found: Any) -> bool:
    lists = isinstance(expected, list | tuple) and isinstance(found, list | tuple)
    return lists and all(isinstance(v, Mapping) for v in (*expected, *found))


def _by_name(value: Any) -> dict[str, Any]:
    """Return a list of mappings by their ids, or else by their kinds; empty for anything else, and where two have the
    same."""
    if not isinstance(value, list | tuple) or not all(isinstance(v, Mapping) for v in value):
        return {}
    for key in ("id", "kind"):
        named = {str(v[key]): v for v in value if key in v}
        if len(named) == len(value):
            return named
    return {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_SHOWN = 80
"""Most characters of a value that are shown."""


def _at_first(expected: Any, found: Any, place: str) -> str:
    """Describe the difference of two values; of long lists that of their first entries that differ."""
    lists = isinstance(expected, list) and isinstance(found, list)
    if lists and max(len(repr(expected)), len(repr(found))) > _SHOWN:
        for at, (one, other) in enumerate(zip(expected, found, strict=False)):
            if one != other:
                return _at_first(one, other, f"{place}.{at}")
        return f"{place}: expected {len(expected)} entries, found {len(found)}"
    start = 0
    if isinstance(expected, str) and isinstance(found, str):
        pairs = enumerate(zip_longest(expected, found))
        start = max(0, next(at for at, (one, other) in pairs if one != other) - _SHOWN // 2)
    return f"{place}: expected {_short(expected, start)}, found {_short(found, start)}"


def _short(value: Any, start: int) -> str:
    """Return a value in a few words, of a long text those from ``start`` on."""
    if isinstance(value, Mapping) or value is None:
        return "one" if value else "none"
    text = repr(value)
    if len(text) <= _SHOWN:
        return text
    text = repr("…" + value[start:]) if start and isinstance(value, str) else text
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "…"
