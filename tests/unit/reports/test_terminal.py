"""The summary of a run on terminals of any width: what a reader needs first is never cut."""

from __future__ import annotations

from functools import cache

import pytest

from harness.history.folder import load_history
from harness.judging.references import References
from harness.reports.judge_run import assess
from harness.reports.markdown import plain_cell
from harness.reports.summary import RunSummary, group_place, grouped_findings
from harness.reports.terminal import print_summary
from harness.util.text import counted, lasting
from tests.golden.oracle import BASELINES, RUNS
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


def test_at_80_columns_the_table_says_where_it_fails_and_what_was_accepted():
    row = next(line for line in lines_of(judged("M1"), 80) if line.startswith("pd-eagle3 "))
    assert "12/21" in row and "sub-block" in row and "0.6471 0.5525 0.4958" in row and "baseline" not in row
    assert "baseline 0.9169" in "\n".join(lines_of(judged("M1"), 160))


def test_the_summary_keeps_within_forty_lines_at_80_columns():
    for name in RECORDED:
        assert len([line for line in lines_of(judged(name), 80) if len(line) <= 80]) <= 40, name


def test_a_group_over_several_cells_names_them():
    judgement = judged("interrupted").judgement
    first = grouped_findings(judgement)[0][0]
    cells = {f.cell for f in judgement.findings if (f.check, f.reason) == (first.check, first.reason)}
    place = f"{first.cell} and {len(cells) - 1} other cells"
    assert len(cells) > 1 and group_place(judgement, first) == place
    assert any(f"{place}: complete" in line for line in lines_of(judged("interrupted"), 80))
    assert group_place(judged("M1").judgement, grouped_findings(judged("M1").judgement)[0][0]) == "pd-eagle3"


def test_an_interrupted_run_says_how_to_go_on():
    long = "harness run --resume " + "x" * 100
    assert f"go on: {long}" in lines_of(judged("interrupted")._replace(command=long), 80)
    # A copy cannot be resumed, and a finished run need not be.
    for name in ("interrupted", "M1"):
        assert not any("--resume" in line for line in lines_of(judged(name), 80))


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
