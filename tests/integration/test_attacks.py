"""No story about a run, told in all fields that belong to it, may leave the run green without a reason."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.history.folder import load_history
from harness.judging.references import References
from harness.reports.judge_run import judged
from tests.support import damage
from tests.support.attacks import BENIGN, Attack, attacked, attacks

pytestmark = pytest.mark.computes

FOLDER = Path(__file__).parents[1] / "golden" / "attacked"
"""A run of real engines: two methods, P/D with and without a router, single, in all states of the profile ``cpu``."""
EVERY = attacks()
SAMPLE = EVERY[::7]
GREEN = ("PASS", "KNOWN")


@functools.cache
def base() -> damage.Run:
    return damage.read(FOLDER)


def outcome(attack: Attack, folder: Path) -> str:
    run = attacked(base(), attack)
    if run is None:
        return "nothing changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDER / "references", folder / "references")
    run.write(folder)
    try:
        return judged(load_history(folder), References()).verdict.value
    except HarnessError:
        return "refused"


def reason(attack: Attack) -> str | None:
    return damage.reason_in(BENIGN, attack.name)


def test_the_run_itself_is_green(tmp_path):
    base().write(tmp_path / "run")
    shutil.copytree(FOLDER / "references", tmp_path / "run" / "references")
    assert judged(load_history(tmp_path / "run"), References()).verdict.value in GREEN


def test_there_are_enough_stories():
    assert len({a.name for a in EVERY}) == len(EVERY) >= 300


@pytest.mark.parametrize("attack", SAMPLE, ids=lambda a: a.name)
def test_no_story_is_green_without_a_reason(attack, tmp_path):
    came = outcome(attack, tmp_path / "run")
    assert came not in GREEN or reason(attack) is not None, came


@pytest.mark.exhaustive
def test_every_story_and_every_reason(tmp_path):
    found = {attack: outcome(attack, tmp_path / "run") for attack in EVERY}
    green = [a for a, came in found.items() if came in GREEN]
    assert [a.name for a in green if reason(a) is None] == []
    assert {reason(a) for a in green} == set(BENIGN.values())


CHANGED = {
    "known-defects.yaml": lambda text: text.replace("defects:", "defects: []\nothers:"),
    "baselines/none.csv": lambda text: text[:-3] + "\n",
}


@pytest.mark.parametrize("name", CHANGED)
def test_copies_that_were_changed_judge_nothing(name, tmp_path):
    base().write(tmp_path / "run")
    shutil.copytree(FOLDER / "references", tmp_path / "run" / "references")
    (file,) = [f for f in (tmp_path / "run" / "references").rglob("*") if f.as_posix().endswith(name)]
    file.write_text(CHANGED[name](file.read_text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        try:
            came = judged(load_history(tmp_path / "run"), References()).verdict.value
        except HarnessError:
            came = "refused"
    assert came not in GREEN
