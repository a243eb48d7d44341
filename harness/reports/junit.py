"""junit.xml: one suite per cell and scenario, one case per check.

A failure is a REGRESSION, DRIFT or IMPROVED, an error is UNKNOWN or SUSPECT, and a known defect is skipped.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime

from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.exposure import Exposure
from harness.judging.findings import CellVerdict, CheckResult
from harness.reports.cause_words import detail_of, sentence_of
from harness.reports.causes import Cause
from harness.reports.inputs import Inputs
from harness.reports.summary import RunSummary
from harness.util.text import abridged, counted

# XML 1.0 forbids most control characters, even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MESSAGE_CHARS = 300


def xml_safe(text: str) -> str:
    """Replace the characters that XML 1.0 forbids."""
    return _FORBIDDEN.sub("�", text)


def _name(text: str) -> str:
    """Return a name that is a single line and never empty."""
    return xml_safe(" ".join(text.split())) or "unnamed"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) and value > 0 else "0.000"


def _moment(started: str) -> dict[str, str]:
    """Return the ``timestamp`` attribute, in UTC and without a zone as JUnit wants it; empty for an invalid time."""
    try:
        moment = datetime.fromisoformat(started)
    except ValueError:
        return {}
    utc = moment.astimezone(UTC) if moment.tzinfo else moment
    return {"timestamp": utc.strftime("%Y-%m-%dT%H:%M:%S")}


def _detail(result: CheckResult) -> str:
    """Return an example of what a check found, and how many more there are."""
    first = result.findings[0].message if result.findings else result.note or "nothing to examine"
    more = result.found - 1
    return xml_safe(f"{first}\n… and {counted(more, 'more finding')}" if more > 0 else first)


def _told(summary: RunSummary, view: CellVerdict, result: CheckResult) -> str:
    """Return the causes of what a check found, each with the command that shows it again, and an example; of one that
    examined nothing, first that it did not."""
    causes = [xml_safe(_cause(cause)) for cause in summary.causes_behind(view, result)]
    parts = [*causes, _detail(result)] if result.findings else [_detail(result), *causes]
    return "\n".join(parts)


def _cause(cause: Cause) -> str:
    told = [f"{sentence_of(cause)} ({counted(cause.count, 'finding')} in all)", detail_of(cause)]
    return "\n".join(filter(None, [*told, f"reproduce: {cause.command}" if cause.command else ""]))


def _brief(text: str) -> str:
    """Return a text as an attribute that viewers show in one line."""
    return xml_safe(abridged(text, _MESSAGE_CHARS))


def _run_name(summary: RunSummary) -> str:
    mutants = summary.judgement.mutants
    return summary.history.run.run_id + (f" INJECTED FAULT {', '.join(mutants)}" if mutants else "")


def render_junit(summary: RunSummary) -> str:
    root = ET.Element("testsuites", name=xml_safe(_run_name(summary)))
    for cell in summary.judgement.cells:
        record = summary.history.cell(cell.cell)
        # A cell's time is recorded for all its scenarios together; the cold suite carries it.
        seconds = record.seconds + record.start_seconds if record and cell.scenario == COLD else 0.0
        name = _name(cell.cell if cell.scenario == COLD else f"{cell.cell}.{cell.scenario}")
        suite = ET.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(cell.results)),
            failures=str(sum(r.verdict.fails for r in cell.results)),
            errors=str(sum(r.verdict in (Verdict.UNKNOWN, Verdict.SUSPECT) for r in cell.results)),
            skipped=str(sum(r.verdict is Verdict.KNOWN for r in cell.results)),
            time=_seconds(seconds),
        )
        for attribute, moment in _moment(summary.history.run.started).items():
            suite.set(attribute, moment)
        if len(root) == 1:
            # A run has no properties of its own in this format, so its first suite carries them.
            properties = ET.SubElement(suite, "properties")
            told: dict[str, Exposure | Inputs | None] = {"exposure": summary.exposure, "judged-from": summary.inputs}
            for what, of_run in told.items():
                if of_run is not None:
                    ET.SubElement(properties, "property", name=what, value=xml_safe(of_run.sentence))

        for result in cell.results:
            case = ET.SubElement(suite, "testcase", classname=name, name=_name(result.check), time="0")
            if result.verdict is Verdict.PASS:
                continue
            if result.verdict is Verdict.KNOWN:
                known = ", ".join(sorted({f.known or "" for f in result.findings}))
                ET.SubElement(case, "skipped", message=_brief(f"KNOWN, expected failure {known}: {_detail(result)}"))
                continue
            kind = "error" if result.verdict in (Verdict.UNKNOWN, Verdict.SUSPECT) else "failure"
            detail = _told(summary, cell, result)
            message = _brief(detail.splitlines()[0]) if detail else ""
            node = ET.SubElement(case, kind, type=result.verdict.value, message=message)
            node.text = detail
    red = any(suite.get(key) != "0" for suite in root for key in ("failures", "errors"))
    if summary.verdict.exit_code != 0 and not red:
        # A run that was interrupted or had mutants enabled may have only passing checks, yet must not look green.
        suite = ET.SubElement(
            root, "testsuite", name="run", tests="1", failures="0", errors="1", skipped="0", time="0.000"
        )
        case = ET.SubElement(suite, "testcase", classname="run", name="verdict", time="0")
        node = ET.SubElement(case, "error", type=summary.verdict.value, message=_brief(summary.brief))
        node.text = xml_safe("\n".join(summary.judgement.notices) or summary.sentence)
    for key in ("tests", "failures", "errors"):
        root.set(key, str(sum(int(suite.get(key, 0)) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
