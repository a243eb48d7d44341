"""YAML that is no plain data within bounds is refused before anything is built of it."""

from __future__ import annotations

import time
from datetime import date
from pathlib import Path

import pytest

from harness.errors import DataError, ProfileError
from harness.profiles.known_defects import load_known
from harness.profiles.load import load_profile
from harness.util import yaml_io
from harness.util.paths import REPOSITORY

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)
REFUSED = {
    "aliases": (BOMB, "written out"),
    "lists": ("[" * 100_000, "40 levels"),
    "mappings": ("a: {" + "a: {" * 1000, "40 levels"),
    "entries": ("- " * 50_000 + "x", "40 levels"),
    "itself": ("a: &a [*a]", "written out"),
    "twice": ("a: 1\nb: 2\na: 3", "'a' twice"),
    "twice, deep": ("a:\n  b: 1\n  b: 1", "'b' twice"),
    "number as key": ("1: 2", "keys that are text"),
    "infinite": ("a: .inf", "finite"),
    "none": ("a: [.nan]", "finite"),
    "long integer": ("a: " + "9" * 5000, "integer"),
    "large integer": ("a: " + "9" * 400, "64-bit"),
    "2^63": ("a: 9223372036854775808", "64-bit"),
    "base of 60": ("a: " + "1:" * 200_000 + "1", "64-bit"),
    "base of 60, tagged": ("a: !!int '" + "1:" * 200_000 + "1'", "64-bit"),
    "merged": ("mine: {<<: {x: 1}, y: 3}", "write out"),
    "infinite number": ("a: 1.0e+999", "finite"),
    "twice, by alias": ("&x name: cpu\n*x : other", "written out"),
    "half a character": ('a: "\\ud800"', "."),
    "no date": ("a: 2024-99-99", "."),
    "object": ("!!python/object/apply:os.system ['true']", "constructor"),
    "timestamp": ("a: !!timestamp x", "."),
    "truth": ("a: !!bool x", "."),
    "integer": ("a: !!int ''", "."),
    "bytes": ("a: !!binary aGk=", "constructor"),
    "set": ("a: !!set {b, c}", "constructor"),
    "NUL": ("a: \0", "."),
    "many": ("\n".join("- x" for _ in range(60_000)), "50000 values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words_and_at_once(name, tmp_path):
    text, words = REFUSED[name]
    begun = time.process_time()
    with pytest.raises(ValueError, match=words):
        yaml_io.parse(text)
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"file\.yaml"):
        load_profile(str(path))
    with pytest.raises(DataError, match=r"file\.yaml"):
        load_known(path)
    assert time.process_time() - begun < 2


def test_bytes_that_are_no_text_and_files_that_are_too_large(tmp_path):
    path = tmp_path / "file.yaml"
    for content, words in (
        (b"\xff\xfea\0:\0", "UTF-8"),
        (b"name: caf\xe9", "UTF-8"),
        (b"#" * (yaml_io.MOST_BYTES + 1), "at most 1 MiB"),
    ):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match=words):
            load_profile(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="expected a file"):
        load_known(path)


def test_plain_data_is_read():
    text = 'list: [1, -2.5, yes, ~, text]\nday: 2026-01-01\nquoted: "1"'
    assert yaml_io.parse(text) == {"list": [1, -2.5, True, None, "text"], "day": date(2026, 1, 1), "quoted": "1"}


def test_every_shipped_file_is_read():
    shipped = [*(REPOSITORY / "harness" / "profiles").glob("*.yaml"), REPOSITORY / "known-defects.yaml"]
    assert len(shipped) > 3
    for path in shipped:
        assert isinstance(yaml_io.load(Path(path)), dict)
