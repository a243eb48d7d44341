"""The historic defects in real engines: each is caught for its reason, and the control passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.mutants.catalogue import HISTORIC
from tests.support.real_engines import harness, living

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    out = tmp_path_factory.mktemp("selftest")
    done = harness("selftest", "--quick", "--out", str(out))
    return done.code, done.output, (out / "latest-selftest").resolve()


def load(folder: Path) -> dict:
    return json.loads((folder / "selftest.json").read_text())


def test_every_historic_defect_is_killed_for_its_reason(quick):
    code, output, folder = quick
    assert code == 0, output
    outcomes = {o["mutant"]: o for o in load(folder)["outcomes"]}
    assert set(outcomes) == set(HISTORIC)
    assert {o["kill"] for o in outcomes.values()} == {"killed"}, output
    assert all(o["fired"] for o in outcomes.values())


def test_controls_pass(quick):
    controls = load(quick[2])["controls"]
    assert len(controls) == 2
    # V1's drafter entries at the ends of chunks are a known defect.
    assert {c["verdict"] for c in controls} <= {"PASS", "KNOWN"}
    assert sum(c["requests"] for c in controls) > 60


def test_the_law_of_the_lookahead_defect_is_found(quick):
    (cell,) = json.loads((quick[2] / "M1" / "judgement.json").read_text())["cells"]
    assert cell["diagnosis"]["law"]["residues"] == [0, 30, 31]
    assert cell["diagnosis"]["location"]["shift"] == 1
    assert "block 0 holds what P has in block 1, +1 block away" in cell["diagnosis"]["text"]


def test_runs_with_a_mutant_are_stamped(quick):
    folder = quick[2]
    for name in ("report.html", "summary.md", "junit.xml"):
        assert "INJECTED FAULT M4" in (folder / "M4" / name).read_text(), name
    assert "INJECTED FAULT" not in (folder / "control-pd-eagle3" / "report.html").read_text()
    assert json.loads((folder / "M4" / "run.json").read_text())["mutants"] == ["M4"]


def test_nothing_is_left(quick):
    sessions = set()
    for run in quick[2].glob("*/run.json"):
        sessions |= {e["pid"] for e in json.loads(run.read_text())["engines"]}
    assert sessions and living(sessions) == []
