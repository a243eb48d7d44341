"""summary.md: at most 60 lines for a pull request or a CI annotation, starting with the verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from harness.history.verdict import Verdict
from harness.judging.notices import INJECTED
from harness.reports.cause_words import BRIEF, detail_of, sentence_of
from harness.reports.summary import RunSummary
from harness.util.text import counted, cut, harmless

MAX_LINES = 60
_NOTICES = 3
_CELLS = 12
_ACCEPTANCE = 6
_CAUSES = 6
_EXPECTED = 3
_COMMAND_CHARS = 700
"""These limits, with the lines around what they limit, keep the file within MAX_LINES."""


def plain_cell(text: str, most: int = 300) -> str:
    """Return text as one line, without anything that Markdown or HTML would read as markup."""
    flat = cut(" ".join(harmless(text).split()), most)
    for char in "\\`*_[]|":
        flat = flat.replace(char, f"\\{char}")
    # A name behind "@" would be notified where the text is posted.
    return flat.replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")


def versions_in_words(versions: Mapping[str, str | None]) -> str:
    """Return the versions that matter most, as far as they are known."""
    names = {"vllm": "vllm", "prefill_vllm": "vllm of P", "torch": "torch", "nixl": "nixl"}
    return ", ".join(f"{names[k]} {v}" for k, v in versions.items() if v and k in names)


def code(text: str) -> str:
    """Return text as one line of code, between more backticks than it has in a row."""
    flat = " ".join(harmless(text).split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _notices(summary: RunSummary) -> list[str]:
    """Return the first notices, each followed by an empty line; bold that of an injected fault."""
    shown = summary.judgement.notices[:_NOTICES]
    marks = ["**" if n.startswith(INJECTED) else "" for n in shown]
    return [line for n, mark in zip(shown, marks, strict=True) for line in (f"{mark}{plain_cell(n)}{mark}", "")]


def render_markdown(summary: RunSummary) -> str:
    run = summary.history.run
    lines = [
        f"# {summary.verdict.symbol} {summary.verdict}",
        "",
        f"{plain_cell(summary.brief, 500)} Exposure: {plain_cell(summary.exposure.sentence)}."
        + (f" **Next:** {plain_cell(summary.next_step)}." if summary.next_step and not summary.only_repro else ""),
        "",
        *([plain_cell(summary.remote_code), ""] if summary.remote_code else []),
        *_notices(summary),
        f"Run {plain_cell(run.run_id)}, vLLM {plain_cell(str(run.versions.get('vllm')))}, profile "
        f"{plain_cell(run.asked_for.name)}, {run.seconds.get('total', 0):.0f} s."
        + (f" Judged from {plain_cell(summary.inputs.sentence)}." if summary.inputs is not None else ""),
        "",
        "| cell | verdict | cold tokens equal |",
        "|---|---|---|",
    ]
    cells = list(summary.cells.items())
    for cell, verdict in cells[:_CELLS]:
        failing = [s for s, v in summary.scenario_grid.get(cell, {}).items() if v is not Verdict.PASS]
        where = f" ({plain_cell(', '.join(failing))})" if failing else ""
        lines.append(
            f"| {plain_cell(cell)} | {verdict.symbol} {verdict}{where} | {summary.equal_tokens.get(cell, '')} |"
        )
    if len(cells) > _CELLS:
        lines.append(f"| … {len(cells) - _CELLS} more | | |")
    if summary.acceptance:
        lines += ["", "| acceptance | rate per position | length (pooled) | steps |", "|---|---|---|---|"]
        for row in summary.acceptance[:_ACCEPTANCE]:
            rates = " ".join(f"{r:.4f}" for r in row.ours.rates) or "–"
            length = f"{row.ours.length_pooled:.3f}" if row.ours.length_pooled else "–"
            lines.append(f"| {plain_cell(row.cell)} | {rates} | {length} | {row.ours.steps} |")
    for _, line in summary.published[:2]:
        lines += ["", f"{plain_cell(line)} (advisory)"]
    return "\n".join([*lines, *_causes(summary)][: MAX_LINES - 1]) + "\n"


def _causes(summary: RunSummary) -> Iterator[str]:
    """Yield the causes: each with where it is and the command that shows it again, then the expected failures."""
    if summary.found:
        yield from ("", "## Causes", "")
    for cause in summary.found[:_CAUSES]:
        yield f"- **{cause.verdict}** {plain_cell(sentence_of(cause, BRIEF), 500)} ({counted(cause.count, 'finding')})"
        if detail := detail_of(cause):
            yield f"  - {plain_cell(detail, 500)}"
        if cause.command and len(cause.command) <= _COMMAND_CHARS:
            yield f"  - reproduce: {code(cause.command)}"
    if len(summary.found) > _CAUSES:
        yield f"- … {counted(len(summary.found) - _CAUSES, 'more cause')} in report.html"
    if summary.untested:
        yield f"- {summary.untested_words}"
    if summary.expected:
        yield from ("", "## Expected failures", "")
    for cause in summary.expected[:_EXPECTED]:
        yield f"- **{cause.known}** {plain_cell(sentence_of(cause, BRIEF), 500)} ({counted(cause.count, 'finding')})"
