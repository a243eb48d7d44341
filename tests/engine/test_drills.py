"""A few drills of each kind on real engines: one start of a pair, and a run that is killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from faults.model import Ending
from faults.run import load_drills
from harness.util.paths import REPOSITORY

pytestmark = pytest.mark.engine

DRILLS = ("error-body", "cut", "nan-logprob", "fewer", "no-acceptance", "no-parameters", "other-blocks", "metrics-html")


def test_faults_on_one_pair_are_survived_for_their_reasons(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "faults", *DRILLS, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        cwd=REPOSITORY,
        check=False,
    )
    found = load_drills((tmp_path / "latest-drill").resolve())
    assert {r.id: r.ending for r in found.results} == dict.fromkeys(DRILLS, Ending.SURVIVED), done.stdout
    assert not found.void
    assert found.left_overs == 0, done.stdout
    assert done.returncode == 0, done.stdout
    assert "0 false greens, 0 leftovers" in done.stdout
