"""A finished run is sealed: what was changed afterwards is found, and never judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import DataError
from harness.history.folder import History, load_history
from harness.history.migrations import SCHEMA
from harness.history.parquet import write_parquet
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.util import json_io
from harness.util.files import sha256_json
from tests.support.builders import history, lookups, observation, written_run
from tests.support.reseal import reseal
from tests.support.run_files import answers

LENGTHS = [31, 32, 40, 64]


def recorded(folder: Path, parquet: bool = True) -> History:
    """A run that passes, as the harness writes it."""
    cells = ("single-none", "single-eagle3", "pd-eagle3")
    made = history([observation(c, n, sequence=i) for c in cells for i, n in enumerate(LENGTHS)], folder=folder)
    if parquet:
        write_parquet(folder, made.observations)
    written_run(folder, made)
    return made.model_copy(update={"own": False})


def verdict(folder: Path) -> Verdict:
    return judge(load_history(folder), lookups(LENGTHS)).verdict


def flip(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))


def refused(words: str, folder: Path) -> None:
    with pytest.raises(DataError, match=words):
        load_history(folder)


def test_sealed_run_is_judged(tmp_path):
    made = recorded(tmp_path)
    loaded = load_history(tmp_path)
    raw = json.loads((tmp_path / "run.json").read_text())
    assert loaded == made.model_copy(update={"sha256": raw["record_sha256"]})
    assert verdict(tmp_path) is Verdict.PASS
    assert raw["schema_version"] == SCHEMA
    assert sum(f["lines"] for f in raw["seal"]["files"].values()) == len(made.observations)


def test_changed_digit_of_an_observation_is_found(tmp_path):
    recorded(tmp_path)
    flip(answers(tmp_path, "pd-eagle3"), '"usage_prompt_tokens":31', '"usage_prompt_tokens":30')
    refused(r"cells/pd-eagle3/observations\.jsonl: .* changed or damaged", tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"planned": 4', '"planned": 3'),
        ('"finished": "2026', '"finished": "2027'),
        ('"state": "complete"', '"state": "pending"'),
        ('"lines": 4', '"lines": 5'),
        ('"schema_version": 6', '"schema_version": 3'),
        ('"schema_version": 6', '"schema_version": 5'),
        ('"mutants": []', '"mutants": ["M1"]'),
    ],
)
def test_changed_record_is_found(tmp_path, old, new):
    recorded(tmp_path)
    flip(tmp_path / "run.json", old, new)
    refused(r"run\.json", tmp_path)


def test_lines_swapped_lost_or_added_are_found(tmp_path):
    recorded(tmp_path)
    path = answers(tmp_path, "pd-eagle3")
    lines = path.read_text().splitlines(keepends=True)
    for damaged in (lines[1:], lines[:-1], [lines[1], lines[0], *lines[2:]], [*lines, lines[-1]]):
        path.write_text("".join(damaged))
        refused("changed or damaged", tmp_path)
    path.unlink()
    refused(r"pd-eagle3/observations\.jsonl: expected the 4 .* found no such file", tmp_path)


@pytest.mark.parametrize("extra", ["cells/pd-mtp/observations.jsonl", "observations.jsonl"])
def test_file_that_the_run_did_not_end_with_is_found(tmp_path, extra):
    recorded(tmp_path)
    (tmp_path / extra).parent.mkdir(exist_ok=True)
    (tmp_path / extra).write_text(answers(tmp_path, "pd-eagle3").read_text())
    refused("found this file beside them", tmp_path)


def test_answers_in_the_folder_of_another_cell_are_damage(tmp_path):
    recorded(tmp_path)
    answers(tmp_path, "single-none").write_text(answers(tmp_path, "single-eagle3").read_text())
    reseal(tmp_path)
    refused("line 1: expected an observation of single-none, found one of single-eagle3", tmp_path)


def test_copy_to_query_is_never_judged(tmp_path):
    made = recorded(tmp_path)
    (tmp_path / "observations.parquet").write_bytes(b"PAR1 nonsense")
    assert load_history(tmp_path).observations == made.observations


def test_run_without_an_end_is_never_green(tmp_path):
    recorded(tmp_path)
    reseal(tmp_path, lambda r: r.update(finished=None))
    assert json.loads((tmp_path / "run.json").read_text())["seal"] is None
    judged = judge(load_history(tmp_path), lookups(LENGTHS))
    assert judged.verdict is Verdict.UNKNOWN
    assert any("never finished" in n for n in judged.notices)


def test_end_without_a_seal_is_damage(tmp_path):
    recorded(tmp_path)
    raw = json.loads((tmp_path / "run.json").read_text())
    raw.pop("record_sha256")
    raw["seal"] = None
    (tmp_path / "run.json").write_text(json.dumps({**raw, "record_sha256": sha256_json(raw)}))
    refused("expected a seal", tmp_path)


@pytest.mark.parametrize("schema", [4, 5])
def test_run_of_an_earlier_schema_is_judged(tmp_path, schema):
    made = recorded(tmp_path)

    def earlier(raw: dict) -> None:
        raw["schema_version"] = schema
        for cell in raw["cells"]:
            del cell["emptied_s"]
            if schema == 4:
                del cell["plan"]
        if schema == 4:
            del raw["plans"]

    reseal(tmp_path, earlier)
    loaded = load_history(tmp_path)
    assert loaded.observations == made.observations and loaded.run.schema_version == SCHEMA
    assert json.loads((tmp_path / "run.json").read_text())["schema_version"] == schema
    assert verdict(tmp_path) is Verdict.PASS


@pytest.mark.parametrize("schema", [1, 2, 3, 99, "6"])
def test_run_of_an_unknown_schema_is_refused_with_what_to_do(tmp_path, schema):
    recorded(tmp_path)
    reseal(tmp_path, lambda r: r.update(schema_version=schema))
    refused(f"expected history schema 4 to 6, found {schema!r}; use the harness version", tmp_path)


def test_run_without_a_schema_is_refused_with_what_to_do(tmp_path):
    recorded(tmp_path)
    reseal(tmp_path, lambda r: r.update(schema_version=None))
    refused("it has no schema_version, so it is no record of a run; correct the path", tmp_path)


@pytest.mark.parametrize(
    ("schema", "change", "found"),
    [
        (4, {}, "plans belong to schema 5"),
        (5, {}, "emptied_s belongs to schema 6"),
        (5, {"cells": [3]}, "shape of schema 5"),
        (4, {"cells": None, "plans": {}}, "shape of schema 4"),
    ],
)
def test_record_that_is_not_of_the_schema_it_names_is_damaged(tmp_path, schema, change, found):
    recorded(tmp_path)
    reseal(tmp_path, lambda r: r.update(schema_version=schema, **change))
    refused(f"is damaged: .*{found}", tmp_path)


@pytest.mark.parametrize("tail", [b'{"cell": "pd-eag', b"\0\0\0\0", '{"cell": "é'.encode()[:-1], b"  "])
def test_torn_last_line_of_a_killed_run_is_left_out(tmp_path, tail):
    made = recorded(tmp_path, parquet=False)
    reseal(tmp_path, lambda r: r.update(finished=None))
    with answers(tmp_path, "pd-eagle3").open("ab") as stream:
        stream.write(tail)
    loaded = load_history(tmp_path)
    assert loaded.observations == made.observations and loaded.torn_line is bool(tail.strip())
    assert answers(tmp_path, "pd-eagle3").read_bytes().endswith(tail)


@pytest.mark.parametrize("garbage", [b'{"cell": "pd-eag', b"\0\0\0\0", b"", b"\xff", b"[]"])
def test_torn_line_in_the_middle_is_damage(tmp_path, garbage):
    recorded(tmp_path, parquet=False)
    reseal(tmp_path, lambda r: r.update(finished=None))
    path = answers(tmp_path, "pd-eagle3")
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:3], garbage, *lines[3:]]) + b"\n")
    refused("line 4", tmp_path)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "a": 2}', "NaN", "[-Infinity]", "1e999", "9" * 21, '"\\ud800"', "[" * 100_000, "", "\ufeff{}", "{} {}"],
)
def test_json_that_nobody_means_is_refused(text):
    with pytest.raises(ValueError):
        json_io.loads(text)


def test_json_as_it_is_meant():
    text = '{"a": [1, -2.5, true, null, "\\ud83d\\ude00"], "b": 9223372036854775807}'
    assert json_io.loads(text) == json.loads(text)
