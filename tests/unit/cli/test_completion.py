"""Values that a shell completes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli import completion
from harness.judging.findings import Judgement
from harness.profiles.load import shipped_profile_names
from tests.golden.oracle import EXPECTED


def given(**params):
    return SimpleNamespace(params=params)


def test_profiles_are_the_shipped_ones_and_files(tmp_path: Path):
    assert completion.profile_names() == shipped_profile_names()
    assert completion.profiles("cpu-q") == ["cpu-quick"]
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "more").mkdir()
    assert completion.profiles(f"{tmp_path}/m") == [f"{tmp_path}/mine.yaml", f"{tmp_path}/more/"]


def test_cells_and_scenarios_are_those_of_the_profile():
    assert completion.cells(given(), "pd-e") == ["pd-eagle3", "pd-eagle3-router"]
    assert "pd-eagle3+llama31-8b" in completion.cells(given(profile="nightly"), "pd-eagle3")
    assert completion.scenarios(given(profile="cpu-quick"), "") == ["cold", "prefix-hit", "concurrent"]


def test_nothing_is_completed_for_a_profile_that_cannot_be_read():
    assert completion.cells(given(profile="nowhere"), "") == []


def test_faults_come_with_what_they_are():
    assert dict(completion.faults("M1"))["M1"] == "P publishes its lookahead blocks"
    assert completion.faults("x") == []


@pytest.fixture
def reports(tmp_path: Path, monkeypatch) -> Path:
    for name in ("20260101-cpu", "20260102-cpu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
    shutil.copy(EXPECTED / "M1" / "judgement.json", tmp_path / "20260102-cpu")
    (tmp_path / "latest").symlink_to("20260102-cpu")
    monkeypatch.setattr(completion, "DEFAULT_OUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_offered_newest_first(reports: Path):
    assert completion.runs("") == ["latest", "20260102-cpu", "20260101-cpu"]


def test_findings_are_those_of_the_run(reports: Path):
    raw = json.loads((reports / "latest" / "judgement.json").read_text())
    judged = Judgement.model_validate({name: raw[name] for name in Judgement.model_fields})
    assert completion.findings(given(run_dir="latest"), "") == list(dict.fromkeys(f.id for f in judged.findings))
    assert completion.findings(given(), "pd-eagle3/transfer/copy-030") == ["pd-eagle3/transfer/copy-030-03/ids"]
    assert completion.runs_or_findings("pd-eagle3/transfer/copy-030") == ["pd-eagle3/transfer/copy-030-03/ids"]
    assert completion.findings(given(run_dir="20260101-cpu"), "") == []
    (reports / "20260101-cpu" / "judgement.json").write_text('{"cells": 3}')
    assert completion.findings(given(run_dir="20260101-cpu"), "") == []
