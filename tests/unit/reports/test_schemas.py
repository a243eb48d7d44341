"""The JSON schemas in docs/schemas are those of the models, and what runs write is valid by them."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import jsonschema
import pytest

from harness.history.layout import files_by_cell
from harness.judging.references import References
from harness.reports.judge_run import check
from harness.reports.schemas import schemas, text_of
from harness.util.paths import REPOSITORY
from tests.golden.oracle import BASELINES, RUNS

STORED = REPOSITORY / "docs" / "schemas"


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((STORED / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_stored_schemas_are_those_of_the_models():
    """After a change: python -m harness.reports.schemas docs/schemas"""
    assert {p.name: p.read_text() for p in STORED.iterdir()} == {
        f"{name}.schema.json": text_of(schema) for name, schema in schemas().items()
    }


@pytest.mark.parametrize("run", ["plan-rows", "M1", "merged"])
def test_recorded_files_are_valid(run: str, tmp_path: Path):
    folder = RUNS / run
    raw = json.loads((folder / "run.json").read_text())
    if run == "plan-rows":
        validator("run").validate(raw)
    for files in files_by_cell(folder).values():
        for line in files[0].read_text().splitlines():
            validator("observation").validate(json.loads(line))
    copy = tmp_path / run
    shutil.copytree(folder, copy)
    check(copy, References(baselines=BASELINES), tmp_path / "out")
    validator("judgement").validate(json.loads((tmp_path / "out" / "judgement.json").read_text()))


@pytest.mark.parametrize("name", ["run", "observation", "judgement"])
def test_fields_have_words_and_unknown_keys_are_refused(name: str):
    schema = schemas()[name]
    assert schema["additionalProperties"] is False
    assert any("description" in p for p in schema["properties"].values())
    with pytest.raises(jsonschema.ValidationError):
        validator(name).validate({"surprise": 1})
