"""Report a self-test on the terminal, in selftest.json, report.html and selftest.md, with the same kill matrix."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.history.verdict import Verdict
from harness.mutants.catalogue import MUTANTS
from harness.reports.html import environment
from harness.reports.markdown import plain_cell, versions_in_words
from harness.reports.selftest_result import Kill, MutantOutcome, SelfTest, matrix_columns
from harness.reports.terminal import STYLE, print_conclusion, verdict_text
from harness.util.files import write_atomic, write_json

KILL_STYLE = {Kill.KILLED: "green", Kill.OTHER: "yellow", Kill.SURVIVED: "bold red", Kill.UNTESTED: "yellow"}


def write_selftest(test: SelfTest, folder: Path) -> None:
    write_json(folder / "selftest.json", {**test.model_dump(mode="json"), "exit_code": test.exit_code})
    write_atomic(folder / "selftest.md", render_markdown(test))
    template = environment().get_template("selftest.html.j2")
    html = template.render(test=test, columns=matrix_columns(test.outcomes), mutants=MUTANTS)
    write_atomic(folder / "report.html", html)


def print_selftest(test: SelfTest, console: Console) -> None:
    """Print the kill matrix, the controls, and why mutants were not killed for their reason."""
    columns = matrix_columns(test.outcomes)
    table = Table(title="kill matrix (faults × checks)", title_justify="left")
    table.add_column("fault", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True)
    for number, _ in enumerate(columns, 1):
        table.add_column(str(number), justify="center", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for outcome in test.outcomes:
        marks = [_mark(outcome.checks.get(c)) for c in columns]
        result = Text(f"{outcome.kill.symbol} {outcome.kill.value}", style=KILL_STYLE[outcome.kill])
        table.add_row(outcome.mutant, result, _after(outcome), *marks, escape(MUTANTS[outcome.mutant].title))
    console.print(table)
    console.print("after: requests of the cell and scenario until the first one with a finding", highlight=False)
    console.print("checks: " + ", ".join(f"{i} {c}" for i, c in enumerate(columns, 1)), highlight=False)
    for control in test.controls:
        console.print(
            Text.assemble(
                verdict_text(control.verdict), f"  control {control.id}: {control.requests} requests, all faults off"
            )
        )
        for line in control.findings:
            console.print(f"    {escape(line)}", highlight=False)
    for outcome in test.outcomes:
        if outcome.kill is not Kill.KILLED:
            console.print(
                Text(f"{outcome.kill.symbol} {outcome.mutant} {outcome.kill.value}", KILL_STYLE[outcome.kill])
            )
            console.print(f"    expected {escape(outcome.expected)}", highlight=False)
            console.print(f"    found {escape(outcome.reason)}", highlight=False)
    for mutant, reason in test.not_tried.items():
        console.print(f"{mutant} not tried: {escape(reason)}", highlight=False)
    print_conclusion(test.sentence, test.exit_code, console)


def _after(outcome: MutantOutcome) -> str:
    return "–" if outcome.caught is None else str(outcome.caught.requests)


def _mark(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text(" ")
    return Text("·" if verdict is Verdict.PASS else verdict.symbol, style=STYLE[verdict])


def render_markdown(test: SelfTest) -> str:
    """Render the kill matrix as a Markdown page that fits into ``docs/``."""
    columns = matrix_columns(test.outcomes)
    lines = [
        "# Kill matrix",
        "",
        f"{test.sentence} Profile {test.profile}, {versions_in_words(test.versions)}.",
        "",
        *(line for m, reason in test.not_tried.items() for line in (f"{m} not tried: {plain_cell(reason)}.", "")),
        "✘ the check fails, ? it is UNKNOWN, ▲ improved, ⇄ drift, · it passes, empty: it does not apply to what the "
        "fault needs. *after* is how many requests of its cell and scenario were answered until the first one with a "
        "finding, and how many output tokens; –: no single request shows it.",
        "",
        "| fault | result | after | " + " | ".join(columns) + " |",
        "|---|---|---|" + "---|" * len(columns),
    ]
    for o in test.outcomes:
        marks = [_mark(o.checks.get(c)).plain.strip() for c in columns]
        title = plain_cell(MUTANTS[o.mutant].title)
        after = "–" if o.caught is None else f"{o.caught.requests} ({o.caught.tokens} tokens)"
        lines.append(f"| {o.mutant} {title} | {o.kill.symbol} {o.kill.value} | {after} | {' | '.join(marks)} |")
    lines += ["", "## Controls", "", "| engines | verdict | requests |", "|---|---|---|"]
    lines += [f"| {c.id} | {c.verdict.symbol} {c.verdict} | {c.requests} |" for c in test.controls]
    lines += ["", "## What was found", ""]
    for o in test.outcomes:
        lines += [
            f"### {o.mutant}: {plain_cell(MUTANTS[o.mutant].title)}",
            "",
            f"Expected: {plain_cell(o.expected)}.",
            "",
        ]
        lines += [f"- {plain_cell(text, 900)}" for text in o.found] or ["- nothing"]
        lines.append("")
    return "\n".join(lines)
