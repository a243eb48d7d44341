"""The summary of a run on terminals of any width: what a reader needs first is never cut."""

from __future__ import annotations

import re
from functools import cache

import pytest

from harness.history.folder import load_history
from harness.judging.references import References
from harness.reports.judge_run import assess
from harness.reports.markdown import plain_cell
from harness.reports.summary import RunSummary
from harness.reports.terminal import print_summary
from harness.util.text import counted, lasting
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import with_run
from tests.support.pages import printed

RECORDED = ["M1", "M4", "M5a", "normal-tier", "interrupted", "merged", "known", "pass"]


@cache
def judged(name: str) -> RunSummary:
    return assess(load_history(RUNS / name), References(baselines=BASELINES))


def lines_of(summary: RunSummary, width: int) -> list[str]:
    return printed(print_summary, summary, width).splitlines()


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_cell_and_verdict_are_never_cut(name, width):
    summary = judged(name)
    lines = lines_of(summary, width)
    (head,) = (n for n, line in enumerate(lines) if line.startswith("cell ") and "verdict" in line)
    rows = lines[head + 2 : head + 2 + min(8, len(summary.cells))]
    shown = {tuple(row.split()[:3:2]) for row in rows}
    assert shown <= {(cell, verdict.value) for cell, verdict in summary.cells.items()} and len(shown) == len(rows)
    assert all(len(line) <= width for line in lines[head : head + 2 + len(rows)])


def test_at_80_columns_the_table_has_each_rate_behind_that_of_the_baseline():
    row = next(line for line in lines_of(judged("M1"), 80) if line.startswith("pd-eagle3 "))
    assert row.split()[3:] == ["12/21", "0.917→0.647", "0.799→0.553", "0.735→0.496"]
    assert "sub-block, aligned" in next(line for line in lines_of(judged("M1"), 120) if line.startswith("pd-eagle3 "))
    assert "baseline 0.9169" in "\n".join(lines_of(judged("M1"), 160))
    same = next(line for line in lines_of(judged("M4"), 80) if line.startswith("single-eagle3 "))
    assert same.endswith("0.919 0.838 0.770 =".ljust(35))


def test_where_acceptance_did_not_change_the_table_says_where_it_fails():
    row = next(line for line in lines_of(judged("interrupted"), 80) if line.startswith("pd-none-router "))
    assert row.rstrip().endswith("cold, concurrent")


def test_the_summary_keeps_within_forty_lines_at_80_columns():
    for name in RECORDED:
        assert len([line for line in lines_of(judged(name), 80) if len(line) <= 80]) <= 40, name


def test_a_notice_that_decides_the_verdict_comes_before_those_that_do_not():
    """Why an expected failure did not cover what looks like it."""
    summary = assess(load_history(RUNS / "known"))
    assert "expected at least 8 findings, found 4" in summary.judgement.notices[0]
    assert len(summary.judgement.notices) > 1
    assert any("expected at least 8 findings" in line for line in lines_of(summary, 160))


def test_what_is_left_out_is_said_to_be_where_it_can_be_read(tmp_path):
    summary = assess(load_history(RUNS / "known"))
    (line,) = (line for line in lines_of(summary, 160) if "more notice" in line)
    assert "--json" in line and "--out DIR" in line and "in the report" not in line
    (line,) = (line for line in lines_of(summary._replace(written=tmp_path), 160) if "more notice" in line)
    assert line.rstrip().endswith("in the report")


def test_times_of_cells_side_by_side_are_said_to_be_added_up():
    def last(name, **seconds):
        summary = judged(name)
        recorded = summary.history.run.seconds
        made = with_run(summary.history, seconds={**recorded, **seconds})
        lines = lines_of(summary._replace(history=made), 160)
        return next(line for line in lines if " s, requests " in line).rstrip()

    assert last("pass", total=60.0, engine_start=20.0, requests=30.0, engine_stop=1.0, own=9.0) == (
        "60 s: engine start 20 s, requests 30 s, engine stop 1 s, harness 9 s"
    )
    # As this run was recorded, by a version that knew no own time here.
    assert last("gpu") == (
        "293 s; of all cells, some side by side: engine start 150 s, requests 391 s, engine stop 3 s"
    )
    assert last("gpu", own=12.3).endswith("engine stop 3 s; harness alone 12 s")


def causes_in(lines: list[str]) -> list[str]:
    """The lines behind the table, up to the times and the commands."""
    (rule,) = (n for n, line in enumerate(lines) if line.startswith("───"))
    behind = "\n".join(lines[rule:])
    return re.findall(r"^[✘≈⇄?▲] [A-Z]+  .*$", behind, re.M)


def test_one_cause_is_one_paragraph():
    for width in (80, 120, 160):
        (line,) = causes_in(lines_of(judged("M5a"), width))
        assert line.startswith("✘ REGRESSION  pd-eagle3 in pressure: ")
    assert len(causes_in(lines_of(judged("interrupted"), 160))) == 2


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_gravest_cause_has_its_place_within_three_lines(width):
    text = " ".join(lines_of(judged("M1"), width))
    assert "copy-096-19 (96 tokens): P published 4 blocks for a prompt of 3, D pulled 3" in " ".join(text.split())


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_line_that_is_cut_ends_behind_a_word(name, width):
    whole = [line for line in lines_of(judged(name), width) if "   " not in line]
    assert not [line for line in whole if line.endswith("…") and not re.search(r"\S …$", line)]


def test_a_run_that_passes_has_no_command_to_reproduce():
    """An expected failure needs none."""
    assert judged("known").expected and judged("known").repro == ""
    assert "harness repro" not in "\n".join(lines_of(judged("known"), 160))


def test_an_interrupted_run_says_how_to_go_on():
    long = "harness run --resume " + "x" * 100
    assert f"go on: {long}" in lines_of(judged("interrupted")._replace(command=long), 80)
    # A copy cannot be resumed: the original is, where it was recorded.
    text = " ".join(" ".join(lines_of(judged("interrupted"), 80)).split())
    assert "go on where the run was recorded: harness run --resume runs/full/20261122-203323-cpu-54e3" in text
    assert not any("--resume" in line for line in lines_of(judged("M1"), 80))


def test_a_line_is_cut_between_words():
    text = "covered by https://example.org/a/very/long/address and more"
    assert plain_cell(text, 30) == "covered by …" and plain_cell(text, len(text)) == text
    assert plain_cell("x" * 40, 30) == "x" * 28 + " …"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(1, "1 second"), (40, "40 seconds"), (240, "4 minutes"), (93, "2 minutes"), (48_240, "13.4 hours")],
)
def test_times_are_said_as_people_do(seconds, words):
    assert lasting(seconds) == words


def test_one_is_no_plural():
    assert (counted(1, "cell"), counted(0, "cell"), counted(1204, "cell")) == ("1 cell", "0 cells", "1,204 cells")
