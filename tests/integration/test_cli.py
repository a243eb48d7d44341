"""The command line: help, exit codes and one clear sentence for bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.history.checksum import sealed
from harness.util.paths import REPOSITORY
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import recorded
from tests.support.program import harness, run
from tests.support.run_files import answers
from tools.probe_models.__main__ import app as probe_models

REPORTS = ("judgement.json", "junit.xml", "report.html", "summary.md")


def test_module_is_the_program():
    done = subprocess.run(
        [sys.executable, "-m", "harness", "plan", "--profile", "nowhere"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )
    forked = harness("plan", "--profile", "nowhere")
    assert (done.returncode, done.stdout) == (forked.code, forked.output)
    assert done.returncode == 64


def test_probe_models_are_trained_by_a_program_beside_the_package():
    shown = CliRunner().invoke(probe_models, ["build", "--help"])
    assert shown.exit_code == 0 and "Train the probe models" in shown.output


def test_help_states_the_exit_codes():
    code, output = run("--help")
    assert code == 0 and "Usage" in output and "64 wrong usage" in output


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["run", "--nonsense"], 64, "nonsense"),
        (["dance"], 64, "dance"),
        (["run", "--profile", "nowhere"], 64, "expected a shipped profile"),
        (["run", "--cell", "pd-medusa"], 64, "there is no such cell"),
        (["run", "--base-port", "12"], 64, "base-port"),
        (["check", "/nowhere"], 64, "expected the folder of a recorded run"),
        (["report", "/tmp"], 64, "expected the folder of a recorded run"),
        (["baseline", "record", "--from", "/nowhere"], 64, "expected the folder of a recorded run"),
        (
            ["baseline", "record", "--from", "/nowhere", "-c", "single-none", "-n", "2", "--engine-arg=--x"],
            64,
            "starts no engines, so --cell, --engine-arg and --repeat would be ignored; leave them out",
        ),
        (["baseline", "record", "--from", "/nowhere", "--single", "http://x"], 64, "so --single would be ignored"),
        (["check", str(RUNS / "pass"), "--record", ""], 64, "--record: expected a hash or the first digits of one"),
        (["probe", "measure", "/nowhere"], 64, "expected the folder of a recorded run"),
        (["run", "--scenario", "warm"], 64, "there is no such scenario"),
        (["run", "--scenario", "late-pull", "--cell", "single-*"], 64, "need a prefill engine"),
        (["run", "--mutant", "M99", "--cell", "single-none"], 64, "there is no such fault"),
        (["run", "--mutant", "M1", "--mutant", "M4"], 64, "expected one injected fault at a time, found M1, M4"),
        (["run", "--quick", "--profile", "nightly"], 64, "nightly has no quick form"),
        (["run", "--quick", "--resume", "/nowhere"], 64, "--resume takes --quick from the recorded run; leave it out"),
        (["run", "--prepare", "--resume", "/nowhere"], 64, "--resume takes --prepare from the recorded run"),
        (["run", "--part", "--fail-fast"], 64, "--part and --fail-fast exclude each other"),
        (["run", "--resume", "/nowhere", "--fail-fast"], 64, "--resume and --fail-fast exclude each other"),
        (["selftest", "--mutant", "M99"], 64, "there is no such fault"),
        (["selftest", "--mutant", "M1", "--quick"], 64, "exclude each other; keep one"),
        (["selftest", "--engine-python", "/nowhere/python"], 2, "could not be run"),
        (["aa", "--repeat", "1"], 64, "repeat"),
        (["aa", "--from", "x", "-n", "5", "-c", "y"], 64, "so --repeat and --cell would be ignored; leave them out"),
        (["aa", "--cell", "pd-medusa"], 64, "there is no such cell"),
        (["plan", "--full", "-c", "pd-none", "-s", "cold"], 64, "so --cell and --scenario would be ignored"),
        (["plan", "--full", "--effect", "1"], 64, "--full prints the profile, so --effect would be ignored; leave it"),
        (["plan", "--full", "--commands"], 64, "so --commands would be ignored"),
        (["plan", "--full", "--engine-python", "x"], 64, "so --engine-python would be ignored"),
        (["plan", "--schema", "--full"], 64, "prints the schema of all profiles, so --full would be ignored"),
        (["plan", "--schema", "-p", "cpu"], 64, "so --profile would be ignored"),
        (["plan", "--commands", "--json"], 64, "so --json would be ignored"),
        (["plan", "--engine-python", "x"], 64, "--engine-python is for the commands of engines; add --commands"),
        (["prompts", "build", "echo", "--out", "/tmp/x"], 64, "name the tokenizer: --tokenizer DIR"),
        (["prompts", "build", "echo", "--tokenizer", "/nowhere", "--out", "/tmp/x"], 64, "tokenizer_config"),
        (["models", "--profile", "cpu", "--cell", "pd-medusa"], 64, "there is no such cell"),
        (["baseline", "list", "--baselines", "/nowhere"], 64, "there is no such folder; correct the path"),
    ],
)
def test_bad_input(arguments, code, sentence):
    found, output = run(*arguments)
    assert found == code, output
    assert sentence in output


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        ("", ["plan", "-p", "FILE"], "expected a mapping at the top level, found nothing"),
        ("- a\n", ["plan", "-p", "FILE"], "expected a mapping at the top level, found a list"),
        ("extends: cpu\n  bad: [\n", ["plan", "-p", "FILE"], "not allowed in this context at line 2, column 6"),
        (
            "extends: cpu\nname: a/../b\n",
            ["plan", "-p", "FILE"],
            "name: expected a name of letters, digits and . _ + ~ -",
        ),
        ("a file", ["prompts", "build", "copy", "--out", "FILE"], "this file exists and is no prompt set"),
        ("a file", ["baseline", "list", "--baselines", "FILE"], "there is no such folder"),
    ],
)
def test_bad_file_is_told_in_plain_words_and_left_alone(tmp_path: Path, content, arguments, sentence):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    found, output = run(*(str(file) if word == "FILE" else word for word in arguments))
    assert found == 64 and sentence in " ".join(output.split()), output
    assert file.read_text() == content


def test_a_folder_without_a_record_or_baselines_is_told(tmp_path: Path):
    assert "there are no baselines in" in run("baseline", "list", "--baselines", str(tmp_path))[1]
    (tmp_path / "run.json").write_text("{}")
    code, output = run("check", str(tmp_path))
    assert code == 64 and "it has no schema_version, so it is no record of a run" in " ".join(output.split())


@pytest.mark.parametrize(("name", "cell"), [("pass", "single-dflash"), ("known", "single-none")])
def test_a_run_without_cold_answers_measures_no_probe(tmp_path: Path, name, cell):
    code, output = run("probe", "measure", str(RUNS / name), "--out", str(tmp_path / "quality.json"))
    assert code == 64 and not list(tmp_path.iterdir())
    assert f"expected answers to the cold prompts of {cell}, with log-probs, found none" in " ".join(output.split())


def test_plan_starts_nothing_and_names_every_cell():
    code, output = run("plan")
    assert code == 0
    for cell in ("pd-none", "single-none", "pd-eagle3", "single-eagle3", "pd-dflash", "pd-mtp", "single-mtp"):
        assert cell in output


def test_the_quick_form_is_planned_like_a_profile(tmp_path: Path):
    code, quick = run("plan", "--quick")
    assert code == 0
    assert quick == run("plan", "--profile", "cpu-quick")[1]
    (tmp_path / "mine-quick.yaml").write_text("{format: 1, name: mine-quick, extends: cpu, topologies: [single]}")
    code, mine = run("plan", "--quick", "--profile", str(tmp_path / "mine.yaml"))
    assert code == 0
    assert "profile mine-quick" in mine


def test_check_without_baselines_is_unknown(tmp_path: Path):
    recorded(tmp_path)
    code, output = run("check", str(tmp_path), "--baselines", str(tmp_path))
    assert code == 2 and "UNKNOWN" in output


def test_report_of_a_recorded_run_exits_with_zero(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    recorded(folder)
    code, output = run("report", str(folder))
    assert code == 0 and "report.html" in output
    assert run("report", str(folder), "--out", str(tmp_path / "else"))[0] == 0
    assert sorted(p.name for p in (tmp_path / "else").iterdir()) == sorted(REPORTS)


def test_check_leaves_the_reports_of_a_run_alone_unless_told_otherwise(tmp_path: Path):
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir()
        recorded(folder)
    (here / "report.html").write_text("as the run wrote it")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    code, output = run("check", str(here))
    assert code == 2 and output.rstrip().endswith("report: none written (--out DIR, --write)")
    code, output = run("check", str(here), "--out", str(other))
    assert code == 64 and "found that of another run" in output
    assert run("check", str(here), "--out", str(tmp_path / "x"), "--write")[0] == 64
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    code, output = run("check", str(here), "--out", str(tmp_path / "elsewhere"))
    assert code == 2 and f"report: {tmp_path / 'elsewhere'}/report.html" in output
    assert {p: p.read_bytes() for p in before} == before
    run("check", str(here), "--write")
    for name in ("judgement.json", "junit.xml", "summary.md"):
        assert (here / name).read_bytes() == (tmp_path / "elsewhere" / name).read_bytes()
    assert "as the run wrote it" not in (here / "report.html").read_text()


def test_runs_are_compared_and_trended_with_baselines_of_the_users_own(tmp_path: Path):
    """The baselines that the runs name belong to other prompts by now; the same option as for check replaces them."""
    for name in ("a", "b"):
        folder = shutil.copytree(RUNS / "pass", tmp_path / "runs" / name)
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(sealed({**record, "run_id": name}, folder)))
    first, second = (str(tmp_path / "runs" / n) for n in ("a", "b"))
    mine = ["--baselines", str(BASELINES)]
    code, output = run("report", "--compare", first, second, "--out", str(tmp_path / "c"))
    assert code == 0 and "UNKNOWN" in output and "PASS" not in output
    code, output = run("report", "--compare", first, second, "--out", str(tmp_path / "c"), *mine)
    assert code == 0 and "PASS" in output and "UNKNOWN" not in output
    code, output = run("trend", str(tmp_path / "runs"))
    assert code == 0 and "2 not passing" in output
    code, output = run("trend", str(tmp_path / "runs"), *mine)
    assert code == 0 and "2 runs, all passing" in output


def test_damaged_run_is_refused(tmp_path: Path):
    recorded(tmp_path)
    answers(tmp_path, "pd-eagle3").write_text('{"cell": 1}\n')
    code, output = run("check", str(tmp_path))
    assert code == 64 and "changed or damaged" in output


def test_baselines_are_not_recorded_from_pairs(tmp_path: Path):
    recorded(tmp_path)
    code, _ = run("baseline", "record", "--from", str(tmp_path), "--baselines", str(tmp_path / "b"))
    assert code == 64
    assert not (tmp_path / "b").exists()
