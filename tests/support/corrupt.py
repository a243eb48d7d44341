"""Damaged copies of a file, the same ones every time: what disks, editors, tools and bad luck make of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

Form = Literal["json", "lines", "table", "yaml", "binary"]


class Damage(NamedTuple):
    kind: str
    data: bytes | None
    """None: a folder of that name is in the place of the file."""


DEEP = 100_000
_RAW = {
    "huge numbers": ("1e999", "-1e999", "1" + "0" * 400, "9" * 5000, "1e-999", "99999999999999999999"),
    "no numbers": ("NaN", "Infinity", "-Infinity", "0x10", "+1", "01"),
    "deep nesting": ("[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP),
    "other types": ("null", "true", '""', "[]", "{}", "[null]", '"\\ud800"', '"\\u0000"', "-1", "0.5"),
}
"""What stands in the place of a value of JSON."""
_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)
_YAML = {
    "alias bombs": (_BOMB, "a: &a [*a]\n", "a: &a {<<: *a}\n", "a: *nothing\n"),
    "deep nesting": ("a: " + "[" * DEEP, "- " * DEEP, "a: {" * 1000),
    "code": ("a: !!python/object/apply:os.system ['true']\n", "a: !!python/name:os.system\n"),
    "other types": (
        "a: !!timestamp x\n",
        "a: !!binary aGk=\n",
        "1: 2\n",
        "? [a]\n: b\n",
        "a: 2024-99-99\n",
        "a: .inf\n",
    ),
    "huge numbers": ("a: " + "9" * 5000 + "\n", "a: 1.0e+999\n", "a: " + "9" * 400 + "\n"),
}


def damages(data: bytes, form: Form, seed: int, flips: int = 40) -> list[Damage]:
    """Distinct damaged copies, none equal to the file."""
    rng = random.Random(seed)
    found = [*_bytes(data, rng, flips), *_encodings(data, form), Damage("folder in its place", None)]
    if form in ("json", "lines"):
        found += _json(data, form, rng)
    if form in ("lines", "table", "yaml"):
        found += _lines(data, rng)
    if form == "yaml":
        found += _yaml(data, rng)
    return list(reversed({d.data: d for d in reversed(found) if d.data != data}.values()))


def _bytes(data: bytes, rng: random.Random, flips: int) -> Iterator[Damage]:
    size = len(data)
    for _ in range(flips):
        at = rng.randrange(size)
        yield Damage("bit flips", data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    digits = [i for i, b in enumerate(data) if 48 <= b <= 57]
    for at in rng.sample(digits, min(len(digits), flips // 2)):
        other = rng.choice([d for d in b"0123456789" if d != data[at]])
        yield Damage("changed digits", data[:at] + bytes([other]) + data[at + 1 :])
    for at in [0, 1, size - 1, *(rng.randrange(size) for _ in range(12))]:
        yield Damage("truncation", data[:at])
    for _ in range(4):
        a, b = sorted(rng.randrange(size) for _ in range(2))
        yield Damage("zeroed stretches", data[:a] + bytes(b - a) + data[b:])
        yield Damage("repeated stretches", data[:b] + data[a:b] + data[b:])
        yield Damage("lost stretches", data[:a] + data[b:])
        yield Damage("NUL", data[:a] + b"\0" + data[a:])
    yield Damage("binary", rng.randbytes(2000))
    yield Damage("binary", rng.randbytes(size))
    yield Damage("written twice", data + data)
    yield Damage("trailing rubbish", data + b"x")
    yield Damage("whitespace", data + b"\n")


def _encodings(data: bytes, form: Form) -> Iterator[Damage]:
    if form == "binary":
        return
    text = data.decode()
    yield Damage("wrong encodings", text.encode("utf-16"))
    yield Damage("wrong encodings", text.encode("utf-16-be"))
    yield Damage("wrong encodings", text.encode("utf-32"))
    yield Damage("wrong encodings", b"\xef\xbb\xbf" + data)
    yield Damage("wrong encodings", data[: len(data) // 2] + b"caf\xe9" + data[len(data) // 2 :])
    yield Damage("wrong encodings", data + b"\xff")
    yield Damage("wrong encodings", text.encode("cp037", errors="replace"))
    yield Damage("line ends", data.replace(b"\n", b"\r\n"))
    yield Damage("line ends", data.replace(b"\n", b"\r"))


def _lines(data: bytes, rng: random.Random) -> Iterator[Damage]:
    lines = data.splitlines(keepends=True)
    for _ in range(6):
        i, j = (rng.randrange(len(lines)) for _ in range(2))
        swapped = list(lines)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield Damage("swapped lines", b"".join(swapped))
        yield Damage("lost lines", b"".join(lines[:i] + lines[i + 1 :]))
        yield Damage("duplicate lines", b"".join([*lines[: i + 1], lines[i], *lines[i + 1 :]]))
        yield Damage("duplicate lines", data + lines[i])
        yield Damage("torn lines", b"".join([*lines[:i], lines[i][: len(lines[i]) // 2], b"\n", *lines[i + 1 :]]))


_MARK = '"@@here@@"'


def _json(data: bytes, form: Form, rng: random.Random) -> Iterator[Damage]:
    texts = data.decode().splitlines() if form == "lines" else [data.decode()]

    def edited(change: Callable[[Any], object], raw: str = "") -> bytes:
        at = rng.randrange(len(texts))
        value = json.loads(texts[at])
        change(value)
        text = json.dumps(value, indent=None if form == "lines" else 2).replace(_MARK, raw)
        return ("\n".join([*texts[:at], text, *texts[at + 1 :]]) + "\n").encode()

    for kind, snippets in _RAW.items():
        for raw in snippets:
            for _ in range(2):
                yield Damage(kind, edited(lambda v: _replace(v, rng), raw))
    for _ in range(12):
        yield Damage("swapped fields", edited(lambda v: _swap(v, rng)))
        yield Damage("lost fields", edited(lambda v: v.pop(rng.choice(list(v)))))
        yield Damage("unknown fields", edited(lambda v: v.update({f"x{rng.random()}": 1})))
    for _ in range(6):
        at = rng.randrange(len(texts))
        key = rng.choice(list(json.loads(texts[at])))
        twice = texts[at].replace("{", f'{{"{key}": 1,', 1)
        yield Damage("duplicate keys", "\n".join([*texts[:at], twice, *texts[at + 1 :], ""]).encode())


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def _replace(value: Any, rng: random.Random) -> None:
    inside, key = rng.choice(list(_places(value)))
    inside[key] = _MARK.strip('"')


def _swap(value: Any, rng: random.Random) -> None:
    (a, i), (b, j) = (rng.choice([p for p in _places(value) if isinstance(p[0], dict)]) for _ in range(2))
    # Of one inside of the other, the outer one is lost.
    if a is not b[j] and b is not a[i]:
        a[i], b[j] = b[j], a[i]
        if any(x is y for x, y in ((a, a[i]), (b, b[j]))) or _looped(value):
            a[i], b[j] = 0, 0


def _looped(value: Any) -> bool:
    try:
        json.dumps(value)
    except (ValueError, RecursionError):
        return True
    return False


def _yaml(data: bytes, rng: random.Random) -> Iterator[Damage]:
    text = data.decode()
    for kind, snippets in _YAML.items():
        for raw in snippets:
            yield Damage(kind, raw.encode())
            yield Damage(kind, f"{text}\n{raw}".encode())
    lines = text.splitlines()
    valued = [i for i, line in enumerate(lines) if ": " in line and not line.lstrip().startswith("#")]
    for raw in (
        "9" * 400,
        "1e999",
        ".nan",
        "null",
        "[]",
        "{}",
        "'\\0'",
        '"\\ud800"',
        "!!int x",
        "-1",
        "true",
        "~",
        "''",
    ):
        for _ in range(4):
            at = rng.choice(valued)
            changed = f"{lines[at].split(': ')[0]}: {raw}"
            yield Damage("other values", "\n".join([*lines[:at], changed, *lines[at + 1 :], ""]).encode())
    for at in rng.sample(valued, min(6, len(valued))):
        yield Damage("duplicate keys", "\n".join([*lines[: at + 1], lines[at], *lines[at + 1 :], ""]).encode())
        yield Damage("indentation", "\n".join([*lines[:at], " " + lines[at], *lines[at + 1 :], ""]).encode())
        yield Damage("tabs", "\n".join([*lines[:at], "\t" + lines[at], *lines[at + 1 :], ""]).encode())
