"""A run carries what it was judged by, and is judged alike where the paths that it names mean nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.history.checksum import sealed
from harness.history.folder import load_history
from harness.history.layout import CARRIED_BASELINES, CARRIED_KNOWN
from harness.history.verdict import Verdict
from harness.judging.references import References, carry, known_of
from harness.reports.judge_run import assess, check
from harness.util.paths import REPOSITORY, recorded
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import with_profile

NAMED = References(BASELINES, REPOSITORY / "known-defects.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded run that passes by baselines that are not where it is judged."""
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "run"
    shutil.copytree(RUNS / "pass", copy)
    history = load_history(copy)
    assert assess(history).verdict is Verdict.UNKNOWN
    carry(history, References(baselines=BASELINES))
    return copy


def test_run_is_judged_elsewhere_by_what_it_carries(folder: Path):
    summary = assess(load_history(folder))
    assert summary.verdict is Verdict.PASS
    assert any("baselines" in n and "using the copies stored in the run" in n for n in summary.judgement.notices)
    # Those that are named count before those that are carried.
    other = folder.parent / "empty"
    other.mkdir()
    named = assess(load_history(folder), References(baselines=other))
    assert named.verdict is Verdict.UNKNOWN
    assert not any("carries" in n for n in named.judgement.notices if n.startswith("baselines"))


def test_damaged_copy_is_unknown(folder: Path):
    for table in (folder / CARRIED_BASELINES).glob("*.csv"):
        table.write_text(table.read_text().replace("0", "1", 1))
    assert assess(load_history(folder)).verdict is Verdict.UNKNOWN


def test_copy_stands_in_only_where_the_named_one_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here, copy = tmp_path / "here", tmp_path / "run" / "copy"
    here.mkdir()
    copy.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert recorded(here, copy) == here
    assert recorded(tmp_path / "gone", copy) == copy
    assert recorded("/elsewhere/baselines", copy) == copy
    assert recorded("/elsewhere/x", tmp_path / "none") is None
    assert recorded("a\0b", copy) is None


def test_known_defects_are_carried(folder: Path, tmp_path: Path):
    history = load_history(folder)
    listed = tmp_path / "mine.yaml"
    listed.write_text("format: 1\ndefects: []\n")
    carry(history, References(BASELINES, listed))
    assert (folder / CARRIED_KNOWN).read_text() == listed.read_text()
    away = with_profile(history, known_defects="/elsewhere/mine.yaml")
    assert known_of(away) == folder / CARRIED_KNOWN


def test_other_references_than_those_of_the_runs_own_judgement_are_said(folder: Path):
    def notices() -> list[str]:
        return [n for n in assess(load_history(folder)).judgement.notices if "first judged" in n]

    record = json.loads((folder / "run.json").read_text())
    record["profile"]["known_defects"] = "/elsewhere/mine.yaml"
    (folder / "run.json").write_text(json.dumps(sealed(record, folder)))
    (folder / CARRIED_KNOWN).write_text("format: 1\ndefects: []\n")
    assert notices() == []
    check(folder, into=folder)
    assert notices() == []
    (folder / CARRIED_KNOWN).write_text("format: 1\ndefects: []  # edited\n")
    assert notices() == ["changed since the run was first judged (judgement.json): list of expected failures"]
    shutil.rmtree(folder / "references")
    assert "baseline of eagle3" in notices()[0] and "list of expected failures" in notices()[0]
    assert not any("first judged" in n for n in check(folder, NAMED).summary.judgement.notices)
    (folder / "judgement.json").write_text("[]")
    assert notices() == []


def test_what_an_installation_has_in_the_place_of_what_a_run_names_is_said(folder: Path):
    history = load_history(folder)
    shutil.rmtree(folder / "references")
    away = with_profile(history, known_defects="/elsewhere/known-defects.yaml")
    notices = assess(away, References(baselines=BASELINES)).judgement.notices
    assert "known defects: using those of this installation" in notices
