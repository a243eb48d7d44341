"""Strict JSON: rejects duplicate keys, NaN and infinity, numbers beyond 64 bits, and lone surrogates.

Python's parser accepts ``NaN``, reads ``1e999`` as infinity, keeps the last of two equal keys, and makes integers of
any length; each of these would be evidence that nobody wrote.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, NoReturn

MIB = 1 << 20
_DIGITS = 20
"""Characters of the longest 64-bit integer, with its sign."""
_UNCLEAR = (b'\\":', b'" :', b'"  ', b"\t", b"\r", b"\n")
"""What may hide a key, or look like one, when quotes before colons are counted."""
_WHOLE = frozenset({int, str, bool, type(None)})
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str) -> Any:
    """Parse strict JSON. Raises ValueError for anything else."""
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _SURROGATE.search(text):
        # Raises UnicodeEncodeError, a ValueError, for a lone surrogate, which could not be written anywhere.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def has_keys(text: bytes, keys: int) -> bool:
    """Return whether valid JSON surely has so many keys in all its objects, without parsing it again: a parser that
    found that many met none twice. False where it would take a parser to tell."""
    # Each key has a colon behind it. Where strings have some, too, those behind quotes count, unless a quote is within
    # a string, or space may stand before a colon.
    if text.count(b":") == keys:
        return True
    return text.count(b'":') == keys and not any(unclear in text for unclear in _UNCLEAR)


def require_each_key_once(text: bytes) -> None:
    """Raise ValueError for JSON with two equal keys in an object, of which parsers keep one or the other."""
    try:
        json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text(path: Path, limit: int) -> str:
    """Return the text of a UTF-8 file of at most ``limit`` bytes. Raises ValueError and OSError."""
    if path.exists() and not path.is_file():
        raise ValueError("expected a file, found something else")
    with path.open("rb") as stream:
        # No more than there is, because room for all of it is made before it is read.
        data = stream.read(min(limit, os.fstat(stream.fileno()).st_size) + 1)
    if len(data) > limit:
        raise ValueError(f"expected at most {limit / MIB:g} MiB, found more")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text, found an invalid byte at offset {error.start}") from error


def finite(value: Any) -> Any:
    """Return the value unchanged. Raises ValueError when a number in it is NaN or infinite."""
    try:
        if not _is_finite(value):
            _require_finite(value)
    except RecursionError:
        _require_finite(value)
    return value


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in it are surely finite: the usual parameters have a handful of values, and lists of
    integers."""
    kind = type(value)
    if kind is list:
        return {*map(type, value)} <= _WHOLE or all(map(_is_finite, value))
    if kind is dict:
        return all(map(_is_finite, value.values()))
    return kind in _WHOLE or (kind is float and math.isfinite(value))


def _require_finite(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected finite numbers, found {value}")
    if isinstance(value, dict):
        for item in value.values():
            _require_finite(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _require_finite(item)


def printable(value: Any) -> Any:
    """Return plain data in which unprintable strings are escaped so that they can be encoded as UTF-8.

    Python turns bytes of arguments and paths that are not UTF-8 into lone surrogates, which could not be read back.
    """
    if isinstance(value, str):
        return value if value.isprintable() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {printable(k): printable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [printable(v) for v in value]
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"expected each key once, found {twice[:80]!r} twice")
    return out


def _constant(text: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, found {text}")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"expected finite numbers, found {text[:40]}")
    return value


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer of {len(text)} digits is too large (64 bits)")
    value = int(text)
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"expected 64-bit integers, found {text}")
    return value
