"""The historic defects in real engines: each is caught for its reason, and the control passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.mutants.catalogue import HISTORIC
from tests.support.real_engines import living

pytestmark = pytest.mark.engine


def load(folder: Path) -> dict:
    return json.loads((folder / "selftest.json").read_text())


def test_every_historic_defect_is_killed_for_its_reason(quick_selftest):
    code, output, folder = quick_selftest
    assert code == 0, output
    outcomes = {o["mutant"]: o for o in load(folder)["outcomes"]}
    assert set(outcomes) == set(HISTORIC)
    assert {o["kill"] for o in outcomes.values()} == {"killed"}, output
    assert all(o["fired"] for o in outcomes.values())


def test_controls_pass(quick_selftest):
    controls = load(quick_selftest[2])["controls"]
    assert len(controls) == 2
    # V1's drafter entries at the ends of chunks are a known defect.
    assert {c["verdict"] for c in controls} <= {"PASS", "KNOWN"}
    assert sum(c["requests"] for c in controls) > 60


def test_the_law_of_the_lookahead_defect_is_found(quick_selftest):
    (cell,) = json.loads((quick_selftest[2] / "M1" / "judgement.json").read_text())["cells"]
    assert cell["diagnosis"]["law"]["residues"] == [0, 30, 31]
    assert cell["diagnosis"]["location"]["shift"] == 1
    assert "block 0 holds what P has in block 1, +1 block away" in cell["diagnosis"]["text"]


def test_runs_with_a_mutant_are_stamped(quick_selftest):
    folder = quick_selftest[2]
    for name in ("report.html", "summary.md", "junit.xml"):
        assert "INJECTED FAULT M4" in (folder / "M4" / name).read_text(), name
    assert "INJECTED FAULT" not in (folder / "control-pd-eagle3" / "report.html").read_text()
    assert json.loads((folder / "M4" / "run.json").read_text())["mutants"] == ["M4"]


def test_nothing_is_left(quick_selftest):
    sessions = set()
    for run in quick_selftest[2].glob("*/run.json"):
        sessions |= {e["pid"] for e in json.loads(run.read_text())["engines"]}
    assert sessions and living(sessions) == []
