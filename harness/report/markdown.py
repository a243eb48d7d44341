"""summary.md: at most 60 lines for a pull request or a CI annotation, verdict first."""

from __future__ import annotations

from harness.findings import Verdict
from harness.history import COLD
from harness.summary import RunSummary, grouped_findings

MAX_LINES = 60
_FINDINGS = 8


def plain_cell(text: str, most: int = 300) -> str:
    """Text for a table cell: one line, nothing that Markdown or HTML would read as markup."""
    flat = " ".join(text.split())
    for char in "\\`*_[]<>|":
        flat = flat.replace(char, f"\\{char}" if char not in "<>" else {"<": "&lt;", ">": "&gt;"}[char])
    return flat[:most]


def render_markdown(summary: RunSummary) -> str:
    run = summary.history.run
    lines = [
        f"# {summary.verdict.symbol} {summary.verdict}",
        "",
        plain_cell(summary.sentence),
        "",
        *(f"**{plain_cell(n)}**\n" for n in summary.judgement.notices if summary.judgement.mutants),
        *(f"{plain_cell(n)}\n" for n in summary.judgement.notices[:6] if not summary.judgement.mutants),
        f"Run `{run.run_id}`, vLLM {run.versions.get('vllm')}, profile {run.profile.get('name')}, "
        f"{run.seconds.get('total', 0):.0f} s.",
        "",
        "| cell | verdict | tokens equal |",
        "|---|---|---|",
    ]
    cells = list(summary.cells.items())
    for cell, verdict in cells[:16]:
        failing = [s for s, v in summary.scenario_grid.get(cell, {}).items() if v is not Verdict.PASS]
        where = f" ({', '.join(failing)})" if failing else ""
        lines.append(f"| {cell} | {verdict.symbol} {verdict}{where} | {summary.equal_tokens.get(cell, '')} |")
    if len(cells) > 16:
        lines.append(f"| … {len(cells) - 16} more | | |")
    if summary.acceptance:
        lines += ["", "| acceptance | rate per position | length (pooled) | steps |", "|---|---|---|---|"]
        for row in summary.acceptance[:12]:
            rates = " ".join(f"{r:.4f}" for r in row.ours.rates) or "–"
            length = f"{row.ours.length_pooled:.3f}" if row.ours.length_pooled else "–"
            lines.append(f"| {row.cell} | {rates} | {length} | {row.ours.steps} |")
    lines += [f"\n{plain_cell(line)} (advisory)" for _, line in summary.published[:4]]
    if summary.diagnosed:
        lines += ["", "## Where", ""]
        for item in summary.diagnosed[:5]:
            assert item.diagnosis is not None
            where = "" if item.scenario == COLD else f" in {item.scenario}"
            lines.append(f"- **{item.verdict}** {item.cell}{where}: {plain_cell(item.diagnosis.text, 500)}")
    groups = grouped_findings(summary.judgement)
    if groups:
        lines += ["", "## Findings", ""]
        for finding, count, strata in groups[:_FINDINGS]:
            where = f" ({', '.join(strata)})" if strata else ""
            if finding.scenario != COLD:
                where = f" in {finding.scenario}"
            lines.append(
                f"- **{finding.verdict}** {finding.cell} {finding.check} ×{count}{where}: {plain_cell(finding.message)}"
            )
        if len(groups) > _FINDINGS:
            lines.append(f"- … {len(groups) - _FINDINGS} more groups in report.html")
    return "\n".join(lines[:MAX_LINES]) + "\n"
