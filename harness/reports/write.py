"""Writes the reports of a judged run."""

from __future__ import annotations

from pathlib import Path

from harness.reports.html import render_html
from harness.reports.junit import render_junit
from harness.reports.markdown import render_markdown
from harness.reports.summary import RunSummary
from harness.util.files import write_atomic, write_json


def write_reports(summary: RunSummary, folder: Path) -> None:
    """Write judgement.json, report.html, junit.xml and summary.md into a folder."""
    write_json(folder / "judgement.json", summary.judgement.model_dump(mode="json"))
    write_atomic(folder / "report.html", render_html(summary))
    write_atomic(folder / "junit.xml", render_junit(summary))
    write_atomic(folder / "summary.md", render_markdown(summary))
