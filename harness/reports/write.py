"""Writes the reports of a judged run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness.judging.findings import Judgement
from harness.reports.html import REPORTS, render_html
from harness.reports.junit import render_junit
from harness.reports.markdown import render_markdown
from harness.reports.summary import RunSummary
from harness.util.files import write_atomic, write_json


def judgement_json(summary: RunSummary) -> dict[str, Any]:
    """Return the judgement with the run's exposure and what it was made of, which files of earlier versions lack."""
    made_of = {"inputs": summary.inputs.as_json()} if summary.inputs is not None else {}
    return {**summary.judgement.model_dump(mode="json"), "exposure": summary.exposure.as_json(), **made_of}


def judgement_from(raw: dict[str, Any]) -> Judgement:
    """Return the judgement that ``judgement_json`` wrote. Raises ValueError when it cannot be one."""
    return Judgement.model_validate({key: raw[key] for key in raw.keys() & Judgement.model_fields.keys()})


def linked_from(folder: Path, run: Path, page: str) -> str:
    """Return the page of a run as it has to be in another folder: with relative links that start at the run's, but for
    those to the reports written beside it."""
    if folder.absolute() == run.absolute():
        return page
    to_run = quote(os.fsencode(os.path.relpath(run.resolve(), folder.resolve())))
    markup, script, rest = page.partition("<script")
    beside = "|".join(map(re.escape, REPORTS))
    return re.sub(rf'(?<=\shref=")(?![#/]|[a-z]+:|\./(?:{beside})")', f"{to_run}/", markup) + script + rest


def write_reports(summary: RunSummary, folder: Path) -> None:
    """Write judgement.json, report.html, junit.xml and summary.md into a folder, whose page links to the run's."""
    write_json(folder / "judgement.json", judgement_json(summary))
    write_atomic(folder / "report.html", linked_from(folder, summary.history.folder, render_html(summary)))
    write_atomic(folder / "junit.xml", render_junit(summary))
    write_atomic(folder / "summary.md", render_markdown(summary))
