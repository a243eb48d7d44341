"""summary.md: at most 60 lines for a pull request or a CI annotation, starting with the verdict."""

from __future__ import annotations

from collections.abc import Mapping

from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.reports.summary import RunSummary, group_place, grouped_findings
from harness.util.text import harmless

MAX_LINES = 60
_NOTICES = 3
_CELLS = 12
_ACCEPTANCE = 6
_DIAGNOSES = 4
_FINDINGS = 6
"""These limits, with the lines around what they limit, keep the file within MAX_LINES."""


def plain_cell(text: str, most: int = 300) -> str:
    """Return text as one line, without anything that Markdown or HTML would read as markup."""
    flat = _cut(" ".join(harmless(text).split()), most)
    for char in "\\`*_[]|":
        flat = flat.replace(char, f"\\{char}")
    # A name behind "@" would be notified where the text is posted.
    return flat.replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")


def versions_in_words(versions: Mapping[str, str | None]) -> str:
    """Return the versions that matter most, as far as they are known."""
    return ", ".join(f"{k} {v}" for k, v in versions.items() if v and k in ("vllm", "torch", "nixl"))


def _cut(text: str, most: int) -> str:
    """Return at most ``most`` characters of a line, cut between words, so that no address is cut in two."""
    if len(text) <= most:
        return text
    whole = text[: most - 1].rpartition(" ")[0]
    # A single word that is longer than the line can only be cut within.
    return f"{whole or text[: most - 2]} …"


def _notices(summary: RunSummary) -> list[str]:
    """Return the first notices, each followed by an empty line; bold when mutants were enabled."""
    mark = "**" if summary.judgement.mutants else ""
    return [line for n in summary.judgement.notices[:_NOTICES] for line in (f"{mark}{plain_cell(n)}{mark}", "")]


def render_markdown(summary: RunSummary) -> str:
    run = summary.history.run
    lines = [
        f"# {summary.verdict.symbol} {summary.verdict}",
        "",
        f"{plain_cell(summary.sentence)} Exposure: {plain_cell(summary.exposure.sentence)}."
        + (f" **Next:** {plain_cell(summary.next_step)}." if summary.next_step else ""),
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
    if summary.diagnosed:
        lines += ["", "## Where", ""]
        for item in summary.diagnosed[:_DIAGNOSES]:
            assert item.diagnosis is not None
            where = "" if item.scenario == COLD else f" in {plain_cell(item.scenario)}"
            lines.append(f"- **{item.verdict}** {plain_cell(item.cell)}{where}: {plain_cell(item.diagnosis.text, 500)}")
    groups = grouped_findings(summary.judgement)
    if groups:
        lines += ["", "## Findings", ""]
        for finding, count, strata in groups[:_FINDINGS]:
            where = f" ({', '.join(strata)})" if strata and finding.scenario == COLD else ""
            lines.append(
                f"- **{finding.verdict}** {plain_cell(group_place(summary.judgement, finding))}: {finding.check} "
                f"×{count}{where}: "
                f"{plain_cell(finding.message)}"
            )
        if len(groups) > _FINDINGS:
            lines.append(f"- … {len(groups) - _FINDINGS} more groups in report.html")
    return "\n".join(lines[: MAX_LINES - 1]) + "\n"
