"""YAML as data: of bounded size, depth and expansion, no key twice, keys that are text, numbers that are numbers.

The events of a file are counted before anything is built of it, so that a few lines of aliases that stand for millions
of values cost nothing.
"""

from __future__ import annotations

import math
import re
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.strict_json import MIB, read_text

MOST_BYTES = MIB
"""Of any YAML file that is read; the largest of ours has 6 KiB."""
_DEPTH = 40
_VALUES = 50_000
"""With every alias written out; a profile has some hundred."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BITS = 1 << 63
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9_:.]{64,}")
"""PyYAML reads ``1:1:1`` to the base of 60, in quadratic time: 400 kB took 9 s."""
_ODD = (AttributeError, LookupError, TypeError, ArithmeticError, RecursionError)
"""What PyYAML raises for tags that do not fit their values: AttributeError for ``!!timestamp x``, KeyError for
``!!bool x``."""


def load(path: Path) -> tuple[str, Any]:
    """The text of a YAML file and what it says. Raises ValueError, in words, and OSError."""
    text = read_text(path, MOST_BYTES)
    return text, parse(text)


def parse(text: str) -> Any:
    """Raises ValueError, in words, for what is no plain data within bounds."""
    try:
        _count(text)
        loader = _LOADER(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, *_ODD) as error:
        raise ValueError(" ".join(str(error).split())[:500]) from error
    return _plain(value)


class _Open(NamedTuple):
    """A mapping or list that has begun and not ended."""

    mapping: bool
    anchor: str | None
    keys: set[str]
    values: list[int]
    """Sizes of what is directly in it; of a mapping keys and values in turn."""


def _count(text: str) -> None:
    """Raises ValueError when the text is nested too deeply, becomes too much, or has a key twice."""
    open_: list[_Open] = []
    sizes: dict[str, int] = {}
    total = 0

    def add(size: int, key: str | None = None) -> None:
        nonlocal total
        total += size
        if total > _VALUES:
            raise ValueError(f"expected at most {_VALUES} values with all aliases written out, found more")
        if not open_:
            return
        top = open_[-1]
        if key is not None and top.mapping and len(top.values) % 2 == 0 and key != "<<":
            if key in top.keys:
                raise ValueError(f"expected each key once, found {key[:80]!r} twice")
            top.keys.add(key)
        top.values.append(size)

    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"expected an alias of something before it, found *{event.anchor}")
            if open_ and open_[-1].mapping and len(open_[-1].values) % 2 == 0:
                # Which key it is stands elsewhere, and may be there twice.
                raise ValueError(f"expected keys that are written out, found *{event.anchor}")
            add(sizes[event.anchor])
        elif isinstance(event, yaml.ScalarEvent):
            if _LONG_NUMBER.fullmatch(event.value) and (event.implicit[0] or event.tag is not None):
                raise ValueError("expected integers of 64 bits, found a larger one")
            if event.anchor:
                sizes[event.anchor] = 1
            add(1, event.value)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if len(open_) >= _DEPTH:
                raise ValueError(f"expected at most {_DEPTH} levels, found more")
            open_.append(_Open(isinstance(event, yaml.MappingStartEvent), event.anchor, set(), []))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = open_.pop()
            size = 1 + sum(done.values)
            if done.anchor:
                sizes[done.anchor] = size
            # What is in it was counted when it came.
            total -= size - 1
            add(size)


def _plain(value: Any) -> Any:
    """The value, when all keys are text, all text can be written, all numbers are finite and of 64 bits, and there is
    nothing else but dates."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"expected keys that are text, found {key!r}; put it in quotes where YAML would read a number"
                )
            _plain(key)
            _plain(item)
    elif isinstance(value, list):
        for item in value:
            _plain(item)
    elif isinstance(value, str):
        value.encode()
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected finite numbers, found {value}")
    elif isinstance(value, int) and not -_BITS <= value < _BITS:
        raise ValueError("expected integers of 64 bits, found a larger one")
    elif not isinstance(value, int | float | date | None):
        raise ValueError(f"expected plain data, found {type(value).__name__}")
    return value
