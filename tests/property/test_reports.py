"""However much goes wrong and whatever the texts hold, reports for people stay short, and verdicts come first."""

from __future__ import annotations

import io
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.history.verdict import Verdict
from harness.judging.findings import CellVerdict, CheckResult, Diagnosis, Judgement
from harness.reports.causes import causes_of
from harness.reports.junit import render_junit
from harness.reports.markdown import MAX_LINES, render_markdown
from harness.reports.summary import RunSummary
from harness.reports.terminal import print_summary
from tests.support.builders import CELLS, finding, flawless, history, summarised
from tests.support.junit import schema

GREEN = summarised(history(flawless(), CELLS))
RED = st.sampled_from([Verdict.REGRESSION, Verdict.DRIFT, Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.KNOWN])
TEXT = st.text(st.characters(codec=None), max_size=40) | st.sampled_from(
    ["x" * 3000, "a\nb" * 50, "\x1b[31m", "\u2028"]
)


@st.composite
def very_red(draw) -> RunSummary:
    """Up to 40 cells in up to three scenarios with findings of everything."""
    judged = []
    for number in range(draw(st.integers(1, 40))):
        cell, scenario = f"pd-eagle3.{number}", draw(st.sampled_from(["cold", "refill", "prefix-hit"]))
        # The first one can be tried again: evidence that is missing cannot.
        verdict = draw(RED if number else RED.filter(lambda v: v is not Verdict.UNKNOWN))
        message, prompt = draw(TEXT), draw(TEXT)
        said = {"scenario": scenario, "verdict": verdict, "message": message, "stratum": "aligned"}
        if verdict is Verdict.KNOWN:
            said |= {"known": "some-defect", "link": "https://example.org/1"}
        findings = tuple(
            finding(cell, prompt, check=check, **said) for check in ("tokens-baseline", "tokens-reference", "transfer")
        )
        results = tuple(
            CheckResult(check=f.check, cell=cell, verdict=verdict, judged=9, findings=(f,), note=message)
            for f in findings
        )
        diagnosis = Diagnosis(damage="target-kv", failed=3, judged=9, text=message)
        judged.append(CellVerdict(cell=cell, scenario=scenario, verdict=verdict, diagnosis=diagnosis, results=results))
    notices = tuple(draw(st.lists(TEXT, max_size=12)))
    worst = max((c.verdict for c in judged), key=list(Verdict).index)
    judgement = Judgement(run_id="r", verdict=worst, cells=tuple(judged), notices=notices)
    published = [("eagle3", t) for t in draw(st.lists(TEXT, max_size=6))]
    run = GREEN.history.run.model_copy(update={"seconds": {"total": 9.0}})
    return GREEN._replace(
        judgement=judgement,
        causes=causes_of(GREEN.history, judgement, {}),
        history=GREEN.history.model_copy(update={"run": run}),
        written=GREEN.history.folder,
        acceptance=GREEN.acceptance * 5,
        published=published,
        scenario_grid={c.cell: {c.scenario: c.verdict} for c in judged},
    )


@given(very_red())
@settings(max_examples=40)
def test_summary_has_at_most_60_lines_and_the_verdict_first(summary: RunSummary):
    lines = render_markdown(summary).split("\n")
    assert len(lines) <= MAX_LINES == 60
    assert lines[0] == f"# {summary.verdict.symbol} {summary.verdict}"
    assert max(map(len, lines)) < 1000


@given(very_red(), st.sampled_from([80, 100, 160, 220]))
@settings(max_examples=40)
def test_terminal_has_at_most_40_lines_with_the_verdict_first_and_the_report_last(summary: RunSummary, width: int):
    stream = io.StringIO()
    print_summary(summary, Console(file=stream, width=width, color_system=None))
    text = stream.getvalue()
    lines = text.strip("\n").split("\n")
    assert len(lines) <= 40 and lines[0].startswith(f"{summary.verdict.symbol} {summary.verdict}")
    assert lines[-1] == "report: run/report.html"
    assert lines[-2].startswith("reproduce: harness repro run ") == bool(summary.repro)
    # Nothing reaches the terminal that it would obey.
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]


@given(very_red())
@settings(max_examples=20)
def test_junit_is_valid_whatever_the_texts_hold(summary: RunSummary):
    schema().validate(render_junit(summary))
