"""Judges recorded runs and writes their reports."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from harness.baselines.lookup import Lookup
from harness.errors import DataError, StorageError, UsageError
from harness.history.folder import History, load_history
from harness.history.layout import RUN
from harness.history.superseded import set_aside
from harness.history.verdict import Verdict, worst
from harness.judging.checks.registry import judge
from harness.judging.findings import Judgement
from harness.judging.known_defects import apply_known, covering, expected_anyway
from harness.judging.notices import with_deciding
from harness.judging.references import (
    PROFILE_OWN,
    References,
    carry,
    changed_copies,
    known_of,
    load_stages,
    lookups_for,
    nothing_comparable,
    standing_in,
    unread_list,
    unused_baselines,
    unused_stages,
)
from harness.judging.shares import processes_for
from harness.profiles.known_defects import KnownDefects, load_known
from harness.reports.html import REPORTS, render_html
from harness.reports.inputs import inputs_of, judged_otherwise
from harness.reports.junit import render_junit
from harness.reports.markdown import render_markdown
from harness.reports.summary import NOT_WHOLE, SAME_RECORD, RunSummary, summarise_run
from harness.util.files import write_atomic, write_json, write_traceback
from harness.util.text import counted
from harness.workload.expected import lacking


class Outcome(NamedTuple):
    folder: Path
    summary: RunSummary


def assess(history: History, references: References = PROFILE_OWN, processes: int = 1) -> RunSummary:
    """Judge a history and its later stages, by default against the baselines and known defects of its profile."""
    baselines = lookups_for(history, references)
    known = load_known(references.known or known_of(history))
    other = _other(references)
    judgement = _judged(history, references, baselines, known, other, processes)
    summary = summarise_run(history, judgement, baselines, expected_anyway(judgement, known, history))
    return summary._replace(inputs=inputs_of(history, baselines, known, other))


def judged(history: History, references: References = PROFILE_OWN) -> Judgement:
    """Judge a history as ``assess`` does, without what only reports need."""
    known = load_known(references.known or known_of(history))
    return _judged(history, references, lookups_for(history, references), known, _other(references))


def _judged(
    history: History,
    references: References,
    baselines: Mapping[str, Lookup],
    known: KnownDefects | None,
    other: History | None,
    processes: int = 1,
) -> Judgement:
    stages = load_stages(history)
    judgement = judge(history, baselines, stages, processes, covering(known, history))
    itself = _itself(history, other)
    deciding = [
        itself,
        nothing_comparable(history, other, baselines),
        unread_list(history) if references.known is None else None,
    ]
    others = [
        *unused_stages(history, stages),
        *standing_in(history, references),
        *judged_otherwise(history, references, baselines, known),
        *(unused_baselines(history, references.baselines) if references.against is None else ()),
    ]
    notices = with_deciding(judgement.notices, filter(None, deciding))
    judgement = apply_known(judgement.model_copy(update={"notices": notices}), known, history)
    judgement = judgement.model_copy(update={"notices": (*judgement.notices, *others)})
    if itself and not references.of_both:
        judgement = judgement.model_copy(update={"verdict": worst([judgement.verdict, Verdict.UNKNOWN])})
    for doubt in filter(None, (changed_copies(history, references), _of_set_aside(history, baselines, known))):
        verdict = worst([judgement.verdict, Verdict.UNKNOWN])
        judgement = judgement.model_copy(update={"verdict": verdict, "notices": (doubt, *judgement.notices)})
    absent = lacking(history.run, references.expect) if references.expect is not None else []
    if not absent:
        return judgement
    verdict = worst([judgement.verdict, Verdict.UNKNOWN])
    what = f"{NOT_WHOLE} of profile {references.expect}, found {counted(len(absent), 'difference')}: {absent[0]}"
    return judgement.model_copy(update={"verdict": verdict, "notices": (what, *absent[1:], *judgement.notices)})


def _other(references: References) -> History | None:
    return load_history(references.against) if references.against is not None else None


def _itself(history: History, other: History | None) -> str | None:
    """Return that a run is compared with its own record, as text, or None."""
    if other is None or other.sha256 != history.sha256:
        return None
    return f"{SAME_RECORD}, so nothing can differ; name another run, or leave --against out"


def _of_set_aside(history: History, baselines: Mapping[str, Lookup], known: KnownDefects | None) -> str | None:
    """Return what is wrong with answers that were set aside when the run was resumed, or None: asking again must not
    erase a wrong one, whatever the record says was found."""
    try:
        found = [
            finding
            for then in set_aside(history)
            for finding in apply_known(judge(then, baselines, covering=covering(known, then)), known, then).findings
            if finding.known is None and finding.verdict.fails
        ]
    except DataError as error:
        return str(error)
    if not found or history.run.reasked_after_findings:
        # The record says so itself, and cannot pass.
        return None
    first = found[0]
    return (
        f"answers that were set aside when the run was resumed have {counted(len(found), 'finding')}, so the run "
        f"cannot pass: {first.cell} {first.check} {first.verdict}: {first.message}"
    )


def judge_and_report(
    history: History,
    references: References = PROFILE_OWN,
    into: Path | None = None,
    carrying: bool = False,
    processes: int = 1,
) -> RunSummary:
    """Judge a history and write its reports into a folder, by default its own.

    With ``carrying``, what it was judged by is copied into the run's folder, too.

    A report that cannot be written does not lose the verdict; the summary says why it is missing.
    """
    trouble = ""
    if carrying:
        try:
            history = carry(history, references)
        except StorageError as error:
            trouble = str(error)
    summary = assess(history, references, processes)
    folder = into or history.folder
    if trouble:
        return summary._replace(unwritten=trouble)
    try:
        write_reports(summary, folder)
    except StorageError as error:
        return summary._replace(unwritten=str(error))
    except Exception as error:
        # The verdict is known, even if the recorded run holds something that a page cannot show.
        log = folder / "report-error.txt"
        with contextlib.suppress(StorageError):
            write_traceback(log)
        return summary._replace(unwritten=f"writing the report failed: {type(error).__name__}: {error}; see {log}")
    return summary._replace(written=folder)


def check(run_dir: Path, references: References = PROFILE_OWN, into: Path | None = None) -> Outcome:
    """Judge the run in a folder again, and write reports into the folder ``into``, if there is one. Needs no engine.

    Raises DataError when the record is not the one that ``references`` names, and UsageError when ``into`` is the
    folder of another run, whose reports would be lost, or inside of a run.
    """
    if into is not None and into.resolve() != run_dir.resolve():
        runs = [p for p in (into, *into.resolve().parents) if (p / RUN).exists()]
        if runs:
            what = "that of another run" if runs[0] == into else "one inside of a run"
            raise UsageError(f"--out {into}: expected a folder for reports, found {what}; name another one")
    if references.record == "":
        raise UsageError("--record: expected a hash or the first digits of one, found none; add them, or leave it out")
    history = load_history(run_dir, unread=True)
    if references.record is not None and not str(history.sha256).startswith(references.record):
        raise DataError(f"{run_dir}: expected the record {references.record} (--record), found {history.sha256}")
    processes = processes_for(history)
    if into is None:
        return Outcome(run_dir, assess(history, references, processes))
    return Outcome(run_dir, judge_and_report(history, references, into, processes=processes))


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
