"""A few drills of each kind on real engines: one start of a pair, and a run that is killed."""

from __future__ import annotations

import pytest

from faults import request_runner
from faults.cli import app
from faults.model import Ending
from faults.run import load_drills
from harness.cli.app import main
from tests.support.real_engines import command_line

pytestmark = pytest.mark.engine

DRILLS = ("error-body", "cut", "nan-logprob", "fewer", "no-acceptance", "no-parameters", "other-blocks", "metrics-html")


LEASE_S = 4
"""Two of the faults leave blocks on P until its lease ends, which is waited for. Right engines hand off within half a
second."""


def test_faults_on_one_pair_are_survived_for_their_reasons(tmp_path, monkeypatch):
    monkeypatch.setattr(request_runner, "LEASE_S", LEASE_S)
    code, output = command_line(lambda: main(app), "faults", *DRILLS, "--out", str(tmp_path))
    found = load_drills((tmp_path / "latest-drill").resolve())
    assert {r.id: r.ending for r in found.results} == dict.fromkeys(DRILLS, Ending.SURVIVED), output
    assert not found.void
    assert found.left_overs == 0, output
    assert code == 0, output
    assert "0 false greens, 0 leftovers" in output
