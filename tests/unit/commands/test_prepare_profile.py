"""What ``--prepare`` says when one of its commands fails."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from harness.commands import prepare_profile
from harness.commands.prepare_profile import PrepareStep, make_missing, next_step
from harness.errors import EnvironmentFault

HUB_ONLY = """\
format: 1
name: mine
extends: gpu
target: nobody/no-such-model@0123456789012345678901234567890123456789
"""


def test_a_failed_download_names_the_way_without_a_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    profile = tmp_path / "mine.yaml"
    profile.write_text(HUB_ONLY)
    step = next_step(str(profile))
    assert step is not None and step.argv == ("models", "--profile", str(profile), "--download")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2))
    told: list[str] = []
    with pytest.raises(EnvironmentFault) as refused:
        make_missing(str(profile), told.append)
    assert told == [f"to download the models that are not here: harness models --profile {profile} --download"]
    assert f"harness prompts build recipe --profile {profile} --file FILE" in str(refused.value)
    assert "fill a cache elsewhere and set HF_HOME" in str(refused.value)


def test_a_step_without_another_way_names_none(monkeypatch):
    monkeypatch.setattr(prepare_profile, "next_step", lambda *_: PrepareStep("record", ("baseline", "record")))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2))
    with pytest.raises(EnvironmentFault, match=r"failed \(exit code 2\); fix what it reports$"):
        make_missing("cpu", lambda _: None)


def test_beside_servers_that_run_already_no_engine_is_started(monkeypatch):
    step = PrepareStep("record", ("baseline", "record", "--profile", "mine.yaml"))
    monkeypatch.setattr(prepare_profile, "next_step", lambda *_: step)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a command was run"))
    told: list[str] = []
    make_missing("mine.yaml", told.append, attached=True)
    assert told[0].endswith("an engine alone, harness baseline record --profile mine.yaml --single URL")
