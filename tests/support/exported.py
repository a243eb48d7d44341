"""An exported file, and how it runs against fake engines."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.commands.export.case import write_case
from harness.commands.export.finding import case_from
from harness.commands.repro import Goal, from_names
from tests.support import fake_engine
from tests.support.engines import ENVIRONMENT

CERTAIN = Goal(1.0, "every request had it")
FAKE = str(Path(fake_engine.__file__))


def named(cell: str, prompt: str = "copy-062-10", scenario: str = "cold", goal: Goal = CERTAIN):
    prepared, target, _ = from_names("cpu", cell, prompt if scenario == "cold" else "", scenario)
    return case_from(prepared, target._replace(goal=goal), ENVIRONMENT)


def literal(text: str, name: str) -> dict:
    """The value that a file gives to a name, without running it."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(name)


def rewritten(file: Path, engines: dict[str, dict], **changes) -> Path:
    """The exported file with fake engines, by role, in the place of vLLM's; they count at once."""
    text = file.read_text()
    assert "\nSETTLE_S = 1.0\n" in text
    text = text.replace("\nSETTLE_S = 1.0\n", "\nSETTLE_S = 0.0\n")
    case = literal(text, "CASE")
    for engine in case["engines"]:
        engine["argv"] = ["$python", FAKE, engine["role"], "$port", json.dumps(engines[engine["role"]])]
        engine["argv"] += ["$target", "$drafter"]
    case |= changes
    start = text.index("CASE: dict[str, Any] = ")
    end = text.index('\nHOST = "127.0.0.1"')
    file.write_text(f"{text[:start]}CASE: dict[str, Any] = {case!r}\n{text[end:]}")
    return file


def run(file: Path, *arguments: str) -> tuple[int, str]:
    """In an isolated interpreter, which sees neither this project nor its folder."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(file), *arguments],
        capture_output=True,
        text=True,
        cwd=file.parent,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def exported_once(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("exported") / "repro.py"
    write_case(named("pd-eagle3"), ENVIRONMENT, file)
    return file


@pytest.fixture
def exported(exported_once, tmp_path) -> Path:
    """An exported file that a test may change."""
    return Path(shutil.copy(exported_once, tmp_path / "repro.py"))
