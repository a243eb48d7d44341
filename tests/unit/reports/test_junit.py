"""junit.xml is what viewers accept: valid by a schema, and its counts are those of its cases, whatever the run was."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.reports.judge_run import assess
from harness.reports.junit import render_junit
from harness.reports.summary import RunSummary
from tests.golden.oracle import RUNS as RECORDED
from tests.support import runs
from tests.support.builders import (
    CELLS,
    LENGTHS,
    change_final,
    flawless,
    garbled,
    history,
    observation,
    summarised,
    with_run,
)
from tests.support.junit import schema


def green(_: Path) -> RunSummary:
    return summarised(history(flawless(), CELLS))


def red(_: Path) -> RunSummary:
    return summarised(runs.red())


def unknown(_: Path) -> RunSummary:
    return summarised(history([observation("pd-none", n, error="engine answered 500") for n in LENGTHS]))


def drift(_: Path) -> RunSummary:
    return summarised(history([garbled(o) if len(o.sent_ids) == 32 else o for o in flawless()], CELLS))


def suspect(_: Path) -> RunSummary:
    """Nothing of the engine is a SUSPECT by itself, so a verdict is put in."""
    made = green(Path())
    cells = list(made.judgement.cells)
    results = list(cells[0].results)
    results[0] = results[0].model_copy(update={"verdict": Verdict.SUSPECT, "note": "shown in the first stage only"})
    cells[0] = cells[0].model_copy(update={"results": tuple(results), "verdict": Verdict.SUSPECT})
    judgement = made.judgement.model_copy(update={"cells": tuple(cells), "verdict": Verdict.SUSPECT})
    return made._replace(judgement=judgement)


def known(tmp_path: Path) -> RunSummary:
    return runs.summarise_known(tmp_path)


def armed(_: Path) -> RunSummary:
    return summarised(with_run(history(flawless(), CELLS), mutants=("M1", "M5b")))


def interrupted(_: Path) -> RunSummary:
    return summarised(with_run(history(flawless(), CELLS), interrupted=True))


def nothing(_: Path) -> RunSummary:
    return summarised(history([], []))


def hostile(tmp_path: Path) -> RunSummary:
    return runs.summarise(runs.hostile(), tmp_path)


def damaged(_: Path) -> RunSummary:
    """Times that are no numbers, a start that is no time, a cell without a name."""
    h = history([change_final(o, output_ids=(9,)) for o in flawless()], CELLS)
    cells = tuple(
        c.model_copy(update={"seconds": math.nan if i else math.inf, "start_seconds": -5.0})
        for i, c in enumerate(h.run.cells)
    )
    return summarised(with_run(h, cells=cells, started=f"yesterday {runs.HOSTILE}", run_id=""))


RUNS: dict[str, tuple[Callable[[Path], RunSummary], Verdict]] = {
    "green": (green, Verdict.PASS),
    "red": (red, Verdict.REGRESSION),
    "unknown": (unknown, Verdict.UNKNOWN),
    "drift": (drift, Verdict.DRIFT),
    "suspect": (suspect, Verdict.SUSPECT),
    "known": (known, Verdict.KNOWN),
    "armed": (armed, Verdict.UNKNOWN),
    "interrupted": (interrupted, Verdict.UNKNOWN),
    "nothing": (nothing, Verdict.UNKNOWN),
    "hostile": (hostile, Verdict.REGRESSION),
    "damaged": (damaged, Verdict.REGRESSION),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_is_valid_and_counts_right(name, tmp_path):
    make, verdict = RUNS[name]
    summary = make(tmp_path)
    assert summary.verdict is verdict
    text = render_junit(summary)
    schema().validate(text)
    root = ET.fromstring(text.encode("utf-8"))
    for suite in root.findall("testsuite"):
        for attribute, path in (("tests", "testcase"), *((f"{k}s", f".//{k}") for k in ("failure", "error"))):
            assert suite.get(attribute) == str(len(suite.findall(path)))
        assert suite.get("skipped") == str(len(suite.findall(".//skipped")))
    assert root.get("tests") == str(len(root.findall(".//testcase")))
    red = len(root.findall(".//failure")) + len(root.findall(".//error"))
    assert (red == 0) == (verdict.exit_code == 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace('tests="', 'tests="-', 1),
        lambda t: t.replace("<testcase ", '<testcase status="run" ', 1),
        lambda t: t.replace('time="0', 'time="nan', 1),
        lambda t: t.replace('timestamp="2026-01-01T00:00:00', 'timestamp="2026-01-01T00:00:00+00:00', 1),
        lambda t: t.replace("</testcase>", "<note/></testcase>", 1),
    ],
)
def test_schema_refuses(change, tmp_path):
    text = render_junit(unknown(tmp_path))
    changed = change(text)
    assert changed != text
    assert not schema().is_valid(changed)


def test_the_message_of_a_failure_is_cut_between_words_and_keeps_what_to_do():
    summary = assess(load_history(RECORDED / "real-model"))
    root = ET.fromstring(render_junit(summary).encode("utf-8"))
    messages = [n.get("message", "") for n in root.iter("error")]
    long = [m for m in messages if "…" in m]
    assert long and all(len(m) <= 300 and ("…; " in m or m.endswith(" …")) for m in long)
