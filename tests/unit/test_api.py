"""What ``import harness`` offers: names, types, frames, errors in words; and the notebook that uses them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pandas as pd
import pytest

import harness
from harness import api
from harness.history.acceptance import pool_counts
from harness.observed.recorded_cell import recorded_cells
from harness.util.paths import REPOSITORY
from tests.golden.oracle import BASELINES, RUNS

RED = RUNS / "M1"


def test_package_offers_the_names_of_the_api_without_loading_them():
    assert set(harness.__all__) == {*api.__all__, "__version__"}
    assert len(api.__all__) <= 15
    heavy = "[m for m in ('pydantic', 'scipy', 'pandas') if m in sys.modules]"
    loaded = f"import harness, sys; print(harness.__version__, {heavy})"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout == f"{harness.__version__} []\n"
    with pytest.raises(AttributeError, match="no attribute 'History'"):
        _ = harness.History
    docs = (REPOSITORY / "docs" / "api.md").read_text()
    assert [n for n in api.__all__ if f"`{n}" not in docs] == []


@pytest.mark.parametrize("name", [n for n in api.__all__ if n[0].islower()])
def test_functions_have_types_and_words(name: str):
    function = getattr(harness, name)
    assert function.__doc__
    hints = typing.get_type_hints(function, globalns={**vars(api), "pd": pd})
    assert "return" in hints and len(hints) > 1


def test_run_is_loaded_and_judged():
    run = harness.load_run(str(RED))
    assert isinstance(run, harness.Run)
    judgement = harness.judge(run, baselines=BASELINES)
    assert judgement.verdict is harness.Verdict.REGRESSION
    assert judgement == harness.judge(RED, baselines=str(BASELINES))
    assert all(isinstance(f, harness.Finding) for f in judgement.findings)
    # Another folder of baselines has none for it.
    assert harness.judge(RUNS / "pass", baselines=BASELINES).verdict is harness.Verdict.PASS
    assert harness.judge(RUNS / "pass", baselines=RUNS).verdict is harness.Verdict.UNKNOWN


def test_observations_are_those_of_the_record():
    run = harness.load_run(RUNS / "plan-rows")
    frame = harness.observations(run)
    assert len(frame) == len(run.observations) > 50
    assert frame.groupby("cell").size().to_dict() == {c.cell: len(run.in_order(c.cell)) for c in run.run.cells}
    first = run.in_order(run.run.cells[0].cell)[0]
    row = frame.iloc[0]
    assert (row.prompt_id, row.prompt_tokens, row.output_ids) == (
        first.prompt_id,
        len(first.sent_ids),
        first.final.output_ids,
    )
    plain = frame[frame.method == "none"]
    assert plain.steps.isna().all() and len(plain)
    assert set(harness.observations(run, RED).run) == {run.run.run_id, "M1"}


def test_acceptance_is_that_of_the_report_and_strata_add_up_to_it():
    run = harness.load_run(RED)
    frame = harness.acceptance(run)
    (view,) = recorded_cells(run)
    assert frame.rate.tolist() == list(pool_counts(view.counts.by_key.values(), 3).rates)
    assert frame.position.tolist() == [0, 1, 2]
    strata = harness.acceptance(run, by_stratum=True)
    assert strata.stratum.nunique() > 2
    sums = strata.groupby("position")[["requests", "steps", "accepted"]].sum().reset_index(drop=True)
    assert (sums == frame[["requests", "steps", "accepted"]]).all(axis=None)


def test_reports_are_written_elsewhere(tmp_path: Path):
    judgement = harness.write_reports(RED, tmp_path / "out", baselines=BASELINES)
    assert json.loads((tmp_path / "out" / "judgement.json").read_text())["verdict"] == judgement.verdict.value
    (tmp_path / "file").write_text("")
    with pytest.raises(harness.HarnessError, match="file"):
        harness.write_reports(RED, tmp_path / "file", baselines=BASELINES)
    with pytest.raises(harness.HarnessError, match="another run"):
        harness.write_reports(RED, RUNS / "M4", baselines=BASELINES)
    copy = shutil.copytree(RED, tmp_path / "copy")
    with pytest.raises(harness.HarnessError, match="inside of a run"):
        harness.write_reports(copy, copy / "cells", baselines=BASELINES)
    run = harness.load_run(copy)
    judgement = harness.write_reports(run, tmp_path / "of-a-run", baselines=BASELINES)
    assert (tmp_path / "of-a-run" / "report.html").is_file()
    for shown in (run, judgement):
        assert run.run.run_id in repr(shown) and max(len(repr(shown)), len(str(shown))) < 300


def test_runs_are_compared():
    found = harness.compare(RED, RUNS / "M4", baselines=BASELINES)
    (pair,) = (c for c in found.cells if c.cell == "pd-eagle3")
    assert pair.verdicts == (harness.Verdict.REGRESSION, harness.Verdict.REGRESSION)
    assert 0 < pair.equal < pair.common and "different tokens" in found.sentence


def test_bad_input_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(harness.HarnessError, match="expected the folder of a recorded run"):
        harness.load_run(tmp_path)
    with pytest.raises(harness.HarnessError, match="baselines and against exclude each other"):
        harness.judge(RED, baselines=BASELINES, against=RED)
    with pytest.raises(harness.HarnessError, match="expected a run or the path of a folder, found None"):
        harness.load_run(None)
    with pytest.raises(harness.HarnessError, match="expected a folder of baselines, found none"):
        harness.judge(RED, baselines=tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(harness.HarnessError, match=r"kv-acceptance-harness\[frames\]"):
        harness.observations(RED)


def test_notebook_runs_without_a_checkout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "latest").symlink_to(RED.absolute())
    cells = json.loads((REPOSITORY / "examples" / "frames.ipynb").read_text())["cells"]
    # The shipped baselines, which a run without copies is judged by, are of other prompts than the recorded run's.
    space: dict[str, object] = {"RECORDED": BASELINES}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec("".join(cell["source"]).replace("None", "RECORDED"), space)
    assert "pd-eagle3/transfer" in capsys.readouterr().out
    assert sorted(eval("failing[failing > 0]", space).index) == [0, 30, 31]
