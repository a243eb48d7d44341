"""What ``harness run --prepare`` makes, and in which order."""

from __future__ import annotations

import subprocess

import pytest

from harness.commands import prepare_profile
from harness.commands.prepare_profile import PrepareStep, make_missing, next_step
from harness.errors import EnvironmentFault, UsageError
from tests.support.builders import changed_profile, extending


def test_a_shipped_profile_with_all_that_it_needs_lacks_nothing():
    assert next_step("cpu") is None


def test_baselines_come_after_prompts(tmp_path):
    def other(raw):
        raw["baselines"] = "none-yet"

    path = changed_profile(tmp_path, other)
    step = next_step(path, "/opt/python")
    assert step is not None
    assert step.argv == ("baseline", "record", "--profile", path, "--engine-python", "/opt/python")

    def unbuilt(raw):
        other(raw)
        raw["workload"]["prompts"] = "prompts/mine.jsonl"
        raw["workload"]["recipe"] = {
            "dataset": "a/b",
            "revision": "0" * 40,
            "block_sizes": [32],
            "lookaheads": [3],
            "texts": 8,
            "per_stratum": 2,
        }

    path = changed_profile(tmp_path, unbuilt)
    assert next_step(path).argv == ("prompts", "build", "recipe", "--profile", path)


def test_models_come_first(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    path = extending(tmp_path, target="me/mine")
    assert next_step(path).argv == ("models", "--profile", path, "--download")


STEP = PrepareStep("record the baselines: twice", ("baseline", "record", "--profile", "a b.yaml"))


@pytest.mark.parametrize(("code", "error"), [(2, EnvironmentFault), (64, UsageError)])
def test_command_that_fails_ends_it_with_its_kind_of_exit_code(monkeypatch, code, error):
    said: list[str] = []
    monkeypatch.setattr(prepare_profile, "next_step", lambda *_: STEP)
    monkeypatch.setattr(subprocess, "run", lambda argv, check: subprocess.CompletedProcess(argv, code))
    with pytest.raises(error, match=f"exit code {code}"):
        make_missing("a b.yaml", said.append)
    assert said == ["to record the baselines: twice: harness baseline record --profile 'a b.yaml'"]


def test_command_that_changes_nothing_is_not_repeated(monkeypatch):
    monkeypatch.setattr(prepare_profile, "next_step", lambda *_: STEP)
    monkeypatch.setattr(subprocess, "run", lambda argv, check: subprocess.CompletedProcess(argv, 0))
    with pytest.raises(EnvironmentFault, match="found the same missing as before"):
        make_missing("a b.yaml", lambda _: None)
