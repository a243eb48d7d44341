"""What ``--json`` prints: one JSON value of a fixed shape, and nothing else."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from harness.cli.app import main
from harness.history.verdict import Verdict
from tests.golden.oracle import BASELINES, RUNS
from tests.support.program import inside, keeping_signals

DOCUMENTED = Path(__file__).parents[3] / "docs" / "command-line.md"


def printed(*arguments: str) -> tuple[int, str, str]:
    out, err, code = io.StringIO(), io.StringIO(), 0
    words = ["harness", *arguments, "--json"]
    with keeping_signals(), redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", words):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def value(*arguments: str):
    code, out, _ = printed(*arguments)
    assert out.isascii() and "\x1b" not in out
    return code, json.loads(out)


def documented(command: str) -> list[str]:
    """The keys that the table of docs/command-line.md gives a command, without those in brackets."""
    row = re.search(rf"^\| {re.escape(command)}[^|]*\|([^\n]*)\|$", DOCUMENTED.read_text(encoding="utf-8"), re.M)
    assert row is not None, command
    return re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", row[1]))


@pytest.fixture
def run(tmp_path: Path):
    def copy(name: str) -> str:
        shutil.copytree(RUNS / name, tmp_path / name)
        return str(tmp_path / name)

    return copy


@pytest.mark.parametrize("name", ["M1", "pass", "known", "interrupted"])
def test_a_judged_run(run, name):
    code, found = value("check", run(name), "--baselines", str(BASELINES))
    assert list(found) == documented("`check`")
    assert code == found["exit_code"] == Verdict(found["verdict"]).exit_code
    assert found["cells"] and all(list(c) == documented("… `cells`") for c in found["cells"])
    assert all(list(c) == documented("… `causes`") for c in found["causes"])
    assert all(list(f) == documented("… `findings`") for f in found["findings"])
    assert sum(c["count"] for c in found["causes"]) == sum(1 + f["more"] for f in found["findings"])
    assert bool(found["findings"]) == (name != "pass")
    assert found["injected_faults"] == (["M1"] if name == "M1" else [])


def test_acceptance_and_diagnosis_are_numbers_and_words(run):
    cell = value("check", run("M1"), "--baselines", str(BASELINES))[1]["cells"][0]
    assert [round(r, 4) for r in cell["acceptance"]] == [0.6471, 0.5525, 0.4958]
    assert cell["tokens_equal"] == "12/21" and "N mod 32" in cell["diagnoses"][0]


def test_next_step_of_a_red_run_is_the_command_that_shows_its_cause_again(run):
    folder = run("M1")
    found = value("check", folder, "--baselines", str(BASELINES))[1]
    command = f"harness repro {folder} pd-eagle3/tokens-baseline/copy-094-17/ids"
    assert found["next_step"] == f"reproduce it: {command}" and found["causes"][0]["command"] == command
    assert found["sentence"].startswith(f"With M1 injected, {found['causes'][0]['sentence']}. 1 of 1 cell ")
    assert value("check", run("known"), "--baselines", str(BASELINES))[1]["next_step"] is None


def test_two_runs_and_many(run, tmp_path: Path):
    one = run("pass")
    code, found = value("report", one, "--compare", one, "--out", str(tmp_path / "compared"))
    assert code == 0 and list(found) == documented("`report --compare`")
    assert found["cells"][0]["verdicts"] and found["new"] == found["resolved"] == []
    other = run("resumed")
    code, found = value("trend", str(tmp_path))
    assert code == 0 and list(found) == documented("`trend`")
    assert {r["folder"] for r in found["runs"]} == {one, other}


@pytest.mark.parametrize(
    "command", [["plan"], ["plan", "-p", "gpu"], ["models"], ["baseline", "list"], ["ps"], ["doctor"]]
)
def test_what_a_profile_and_a_machine_have(command):
    assert list(value(*command)[1]) == documented(f"`{' '.join(w for w in command[:2] if w != '-p')}`")


def test_a_plan_has_what_the_terminal_shows():
    found = value("plan", "--quick", "-c", "pd-eagle3", "-c", "single-none")[1]
    seconds = [found["expected_seconds"], *(e["expected_seconds"] for e in found["engines"])]
    assert seconds == [round(s, 1) for s in seconds]
    (strata,) = found["strata"]
    assert (strata["variant"], strata["file"], strata["block_size"]) == ("", "probe.jsonl", 32)
    assert list(strata["prompts"]) == ["none", "eagle3"]
    assert strata["prompts"]["eagle3"] == {"sub-block": 3, "aligned": 3, "lookahead": 2, "first": 3, "middle": 4}
    assert any("no prefix hit" in m["what"] and "pd-eagle3 (P, D)" in m["cells"] for m in found["missed"])
    assert {r["lineup"] for r in found["rounding"]} >= {"none", "eagle3"}
    assert all(r["tokens"] and 0 <= r["median"] <= r["percentile_99"] <= r["largest"] for r in found["rounding"])
    assert all(row["exact"] for row in found["detectable"])


@pytest.mark.parametrize("what", ["profiles", "cells", "scenarios", "faults"])
def test_lists(what):
    code, found = value("list", what)
    assert code == 0 and len(found) > 5
    assert all(list(row) == documented(f"`list {what}`") for row in found)
    if what == "scenarios":
        said = {row["scenario"]: row["what"] for row in found}
        assert len(set(said.values())) == len(said)
        assert said["prefix-hit-on-p"].endswith("(where: prefill)")
        assert said["min-tokens"].endswith("(features: min-tokens)")


def test_the_findings_of_a_run_are_listed(run):
    code, found = value("list", "findings", run("M1"), "--baselines", str(BASELINES))
    assert code == 0 and found and all(list(f) == documented("… `findings`") for f in found)


def test_findings_are_listed_for_people(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    where = run("M1")
    _, found = value("list", "findings", where, "--baselines", str(BASELINES))
    code, out = inside("list", "findings", where, "--baselines", str(BASELINES))
    assert code == 0 and all(f["id"] in out for f in found)
    assert "REGRESSION" in out and "expected P to publish" in out
    code, out = inside("list", "findings", run("pass"), "--baselines", str(BASELINES))
    assert code == 0 and out.endswith(": none")


def test_a_wrong_command_line_prints_nothing_on_standard_output():
    for wrong in (["check", "/nowhere"], ["plan", "-p", "nowhere"], ["plan", "--full"], ["list", "dances"]):
        code, out, err = printed(*wrong)
        assert (code, out) == (64, "") and err
