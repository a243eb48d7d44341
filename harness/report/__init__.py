"""Reports of a judged run: terminal, report.html, junit.xml, summary.md, findings.json."""

from __future__ import annotations

from pathlib import Path

from harness.files import write_atomic, write_json
from harness.report.html import render_html
from harness.report.junit import render_junit
from harness.report.markdown import render_markdown
from harness.summary import RunSummary


def write_reports(summary: RunSummary, folder: Path) -> None:
    """Write every report file of a run into its folder."""
    write_json(folder / "judgement.json", summary.judgement.model_dump(mode="json"))
    write_atomic(folder / "report.html", render_html(summary))
    write_atomic(folder / "junit.xml", render_junit(summary))
    write_atomic(folder / "summary.md", render_markdown(summary))
