"""Finding the browser: by name, on the PATH, installed where that is allowed, or said clearly what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.util.paths import REPOSITORY
from tests.browser.chromium import NoBrowser, find_chromium
from tests.support.program import script


def program(folder: Path, name: str, does: str = "exit 0") -> Path:
    return script(folder / name, f"#!/bin/sh\n{does}\n")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with what the script needs and no browser."""
    for tool in ("dirname", "tail", "bash"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    program(tmp_path, "id", "echo 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    return tmp_path


def ensure(bare: Path) -> subprocess.CompletedProcess[str]:
    script = f"set -euo pipefail; source scripts/environment.sh; VENV={bare}; ensure_chromium; echo $CHROMIUM"
    return subprocess.run(
        ["bash", "-c", script], cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True, check=False
    )


def test_browser_on_the_path_is_found(bare):
    made = program(bare, "google-chrome")
    assert find_chromium() == str(made) == ensure(bare).stdout.strip()
    first = program(bare, "chromium")
    assert find_chromium() == str(first) == ensure(bare).stdout.strip()


def test_named_browser_comes_first_and_a_wrong_name_is_a_mistake(bare, monkeypatch):
    program(bare, "chromium")
    named = program(bare, "mine")
    monkeypatch.setenv("CHROMIUM", str(named))
    assert find_chromium() == str(named) == ensure(bare).stdout.strip()
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    with pytest.raises(NoBrowser, match="expected CHROMIUM to name a Chromium"):
        find_chromium()
    refused = ensure(bare)
    assert refused.returncode == 2 and "expected CHROMIUM to name a Chromium" in refused.stderr


def test_without_a_browser_it_is_said_what_to_do(bare):
    with pytest.raises(NoBrowser, match="apt-get install chromium"):
        find_chromium()
    refused = ensure(bare)
    assert refused.returncode == 2
    assert "expected chromium, chromium-browser or google-chrome on the PATH" in refused.stderr


def test_root_with_apt_gets_one(bare):
    shutil.copy(str(shutil.which("ln", path="/bin:/usr/bin")), bare / "ln")
    program(bare, "apt-get", f'[ "$2" = update ] || ln -sf {bare}/id {bare}/chromium')
    made = ensure(bare)
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(bare / "chromium")


def test_failed_installation_shows_its_log(bare):
    program(bare, "apt-get", "echo no network; exit 100")
    refused = ensure(bare)
    assert refused.returncode == 2 and "no network" in refused.stderr
    assert "apt-get could not install chromium" in refused.stderr


def test_nobody_but_root_installs(bare):
    program(bare, "id", "echo 1000")
    program(bare, "apt-get", "echo should not run; exit 1")
    refused = ensure(bare)
    assert refused.returncode == 2 and "should not run" not in refused.stderr
