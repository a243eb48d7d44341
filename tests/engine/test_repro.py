"""An injected defect: reproduced, made small, and shown by a file that knows nothing of this project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from harness.commands.export import archive_of
from harness.mutants import MUTANTS_VARIABLE, SWITCH_VARIABLE
from harness.mutants.install import PLUGIN_FOLDER
from harness.prompts.lengths import spills
from harness.util.paths import REPOSITORY
from tests.support.real_engines import Done, harness

pytestmark = pytest.mark.engine

CASE = ("repro", "--cell", "pd-eagle3", "--prompt", "copy-062-10", "--mutant", "M1")
"""A pair whose P publishes the blocks of its lookahead too."""


class Small(NamedTuple):
    """What shrinking left."""

    done: Done
    record: dict
    file: Path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    out = tmp_path_factory.mktemp("small")
    file = out / "repro.py"
    shrink = ("--shrink", "--starts", "0", "--export", str(file), "--export-issue", "--out", str(out))
    done = harness(*CASE, *shrink)
    records = list(out.glob("*/shrink.json"))
    assert records, done.output
    return Small(done, json.loads(records[0].read_text()), file)


def test_one_prompt_is_tried_again_and_again(tmp_path):
    """What one try leaves in the blocks must not heal the next."""
    done = harness(*CASE, "--repeat", "3", "--out", str(tmp_path))
    assert done.code == 1, done.output
    assert "reproduced: pd-eagle3/copy-062-10 in 3 of 3 tries" in done.output


@pytest.mark.exhaustive
def test_the_smallest_case_and_its_law(small: Small):
    assert small.done.code == 1, small.done.output
    record = small.record
    assert record["problem"] == "" and record["symptom"] == "tokens"
    # One block of 32 tokens less two: the shortest prompt whose lookahead of three slots takes a second block.
    assert len(record["prompt"]) == 30 and record["max_tokens"] == 1
    assert record["expected"] != record["observed"]
    failing = {int(n) for n, failed in record["lengths"].items() if failed}
    assert len(record["lengths"]) >= 56
    assert failing == {int(n) for n in record["lengths"] if spills(int(n), 32, 3)}
    assert "N mod 32 is one of {0, 30, 31}" in record["law"]
    assert record["law"] in small.done.output
    assert f"2 engine starts, {record['requests']} requests" in small.done.output


def alone(file: Path) -> tuple[int, str]:
    """The program in an interpreter that sees nothing of this project's folder."""
    command, out = [sys.executable, "-I", str(file)], subprocess.PIPE
    done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, text=True, cwd="/", timeout=900, check=False)
    return done.returncode, done.stdout


def copied(small: Small, folder: Path) -> Path:
    shutil.copy(archive_of(small.file), folder)
    return Path(shutil.copy(small.file, folder))


def engines() -> list[int]:
    """Processes of vLLM servers that the exported program started."""
    lines = {p.pid: " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if "vllm" in line and "repro-models/target" in line]


@pytest.mark.exhaustive
def test_the_exported_program_shows_the_defect_alone(small: Small, tmp_path):
    file, switch = copied(small, tmp_path), tmp_path / "switch"
    switch.write_text("M1")
    arm = f"{MUTANTS_VARIABLE}=M1 {SWITCH_VARIABLE}={switch} PYTHONPATH={PLUGIN_FOLDER}:{REPOSITORY}"
    text = file.read_text()
    file.write_text(text.replace('"prefill": r"""\n', f'"prefill": r"""\n{arm} '))
    code, output = alone(file)
    assert code == 1, output
    assert "the first wrong token is output 0" in output and "THE DEFECT SHOWS" in output
    assert engines() == []


@pytest.mark.exhaustive
def test_the_exported_program_passes_without_the_defect(small: Small, tmp_path):
    code, output = alone(copied(small, tmp_path))
    assert code == 0, output
    assert "the defect does not show" in output and "KV moved from P to D:" in output
    assert engines() == []


def test_the_issue_says_what_a_maintainer_needs(small: Small):
    text = small.file.with_suffix(".md").read_text()
    assert small.record["law"] in text and "vLLM 0.32.0" in text
    assert "NixlConnector" in text and "Injected faults: M1" in text
    assert str(small.file.parent) not in text
