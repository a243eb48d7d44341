"""report.html: one self-contained file that works from a file URL and fetches nothing.

The template engine escapes all run data, the JSON of the prompts cannot end its script element, and the page's
Content-Security-Policy allows only our script, by its hash.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from harness import redact
from harness.history.folder import History
from harness.history.layout import files_by_cell
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.diagnosis.diagnose import damage_name
from harness.judging.figures import TransferFigures
from harness.judging.findings import Finding
from harness.judging.notices import INJECTED
from harness.mutants.catalogue import MUTANTS
from harness.profiles.cells import CellName
from harness.prompts.lengths import Stratum
from harness.reports.aa_result import AgainstItself
from harness.reports.charts import Chart, charts_of
from harness.reports.next_steps import can_be_tried, repro_line
from harness.reports.prompts import changes, page_data
from harness.reports.selftest_result import SelfTest, matrix_columns
from harness.reports.summary import RunSummary
from harness.reports.timeline import timeline_of
from harness.util import json_io
from harness.util.files import ends_of
from harness.util.text import cut, harmless, moment, shortened

_TAIL_LINES = 12
_TAIL_BYTES = 64 * 1024
_SECTIONS = (
    (
        "acceptance",
        "Acceptance per position",
        "Share of steps that accepted the draft at each position, with 99 % intervals over prompts, in the baseline "
        "and in each cell of this run.",
    ),
    (
        "steps",
        "Acceptance by step since the hand-off",
        "Mean accepted drafts at each step, for prompts that end on a block boundary (aligned) and for others, in the "
        "baseline and in each cell of this run; the axis ends at the number of drafts. A hand-off that shifts blocks "
        "or loses the drafter's KV shows in the first steps of P/D.",
    ),
    (
        "survival",
        "Identical answers, by token",
        "Share of prompts whose output is still the recorded one, by output token, compared with two equal runs. "
        "A wrong hand-off is a cliff at the start; rounding is a slope.",
    ),
)
_OPEN = 3
"""Causes that are shown with an example; of others the headline is enough until they are opened."""
REPORTS = ("judgement.json", "junit.xml", "summary.md")
"""Files that are written beside the page."""


def environment() -> Environment:
    """Return the template engine: it escapes all text, makes it harmless, and raises on a missing value."""
    env = Environment(
        loader=PackageLoader("harness.reports", "templates"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        finalize=lambda value: harmless(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["pct"] = lambda v: "–" if v is None else f"{100 * v:.2f} %"
    env.filters["damage"] = damage_name
    env.filters["num"] = lambda v, digits=3: "–" if v is None else f"{v:.{digits}f}"
    env.filters["method"] = lambda cell: CellName.of(str(cell)).method
    # Right-to-left characters in the name of a prompt, engine or folder must not reorder the words around it.
    env.filters["bdi"] = lambda text: Markup("<bdi>{}</bdi>").format(shortened(harmless(str(text))))
    env.filters["prose"] = _prose
    env.filters["breakable"] = _breakable
    env.filters["cut"] = cut
    env.filters["anchor"] = anchor
    env.filters["moment"] = lambda text: moment(str(text))
    env.filters["place"] = lambda name: quote(harmless(str(name)), safe="")
    return env


def _prose(text: object) -> Markup:
    """Return text as ``bdi`` does, with the commands that it quotes as code."""
    words = Markup.escape(shortened(harmless(str(text))))
    return Markup("<bdi>{}</bdi>").format(Markup(re.sub(r"`(harness [^`]+)`", r"<code>\1</code>", str(words))))


def _breakable(name: str) -> Markup:
    """Return the name of a setting, which a narrow column may break where its words end."""
    words = re.split(r"(?<=[._])", shortened(harmless(name)))
    return Markup("<bdi>{}</bdi>").format(Markup("<wbr>").join(words))


def anchor(finding: Finding) -> str:
    """Return the id of a finding's element on the page, for links to it."""
    return "finding-" + re.sub(r"[^A-Za-z0-9.]+", "-", finding.id)


def script_json(value: Any) -> Markup:
    """Return JSON for a script element, in which no text can end the element or become markup."""
    text = json.dumps(_harmless_values(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _harmless_values(value: Any) -> Any:
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, dict):
        return {k: _harmless_values(v) for k, v in value.items()}
    return [_harmless_values(v) for v in value] if isinstance(value, list | tuple) else value


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _worst_first(summary: RunSummary) -> list[str]:
    """Return the scenarios, those that do not pass first: the last columns of a wide table may lie beyond the edge."""
    rows = summary.scenario_grid.values()
    return sorted(
        summary.scenarios, key=lambda name: -max((row[name].severity for row in rows if name in row), default=0)
    )


def _tails(summary: RunSummary) -> dict[str, dict[str, str]]:
    """Return the last lines of the engines' logs by cell and file, for cells that could not be judged."""
    out: dict[str, dict[str, str]] = {}
    for cell, verdict in summary.cells.items():
        record = summary.history.cell(cell)
        if verdict is not Verdict.UNKNOWN or record is None:
            continue
        for path in sorted((summary.history.folder / "logs").glob(f"{glob.escape(record.group)}.*.log")):
            if path.is_symlink():
                # In a run from another machine, a link could point to any file.
                continue
            out.setdefault(cell, {})[path.name] = _tail(path)
    return out


def _tail(path: Path) -> str:
    try:
        lines = ends_of(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"(cannot be read: {error.strerror})"
    return "\n".join(redact.text(line[:2000])[:400] for line in lines)


def files_of(history: History) -> list[tuple[str, str]]:
    """Return the raw files of a run as (name, URL relative to the run's folder): records, answers, logs and stacks."""
    found = [path for cell in files_by_cell(history.folder).values() for path in cell]
    found += sorted(path for path in (history.folder / "logs").glob("*") if path.is_file() and not path.is_symlink())
    names = [
        "run.json",
        *REPORTS,
        "observations.parquet",
        *(path.relative_to(history.folder).as_posix() for path in found),
    ]
    # Without the dot, a file called "https:" would be read as a scheme.
    return [(name, "./" + quote(os.fsencode(name))) for name in names]


def render_page(template: str, env: Environment, charts: Sequence[Chart], data: Any = None, **values: Any) -> str:
    """Render a page with its charts, its data and our script embedded."""
    script = (files("harness.reports") / "assets" / "report.js").read_text(encoding="utf-8")
    return env.get_template(template).render(
        charts=charts, data=script_json(data or {}), script=Markup(script), policy=Markup(_hash(script)), **values
    )


def render_html(summary: RunSummary) -> str:
    """Render report.html. Odd data is shown as it is, escaped, and raises nothing."""
    env = environment()
    history, prompts = summary.history, summary.prompts
    env.tests["tried"] = can_be_tried
    env.filters["repro"] = lambda f: repro_line(history, f)
    env.filters["row"] = prompts.find
    env.filters["short"] = lambda text: shortened(" ".join(text.split()), 400)
    env.filters["or_blank"] = lambda value: "" if value is None else value
    env.filters["changes"] = lambda row: changes(row.expected, row.output)
    env.filters["piece"] = lambda token: prompts.pieces.get(token, str(token))
    selftest = _newest(history.folder, "selftest.json", SelfTest, "report.html")
    tried = {f.id: repro_line(history, f) for f in summary.judgement.findings if can_be_tried(f)}
    return render_page(
        "report.html.j2",
        env,
        charts_of(summary.figures),
        data=page_data(prompts, tried),
        summary=summary,
        run=history.run,
        alarms=[n for n in summary.judgement.notices if n.startswith(INJECTED)],
        notices=[n for n in summary.judgement.notices if not n.startswith(INJECTED)],
        figures=summary.figures,
        strata=[s.value for s in Stratum if any(s in r for r in prompts.by_stratum.values())],
        scenarios=_worst_first(summary),
        verdicts=list(dict.fromkeys(c.verdict for c in summary.judgement.cells)),
        causes=summary.found,
        untested=summary.untested,
        known=summary.expected,
        most_open=_OPEN,
        heat=prompts.by_length,
        lengths=sorted({length for row in prompts.by_length.values() for length in row}),
        timeline=timeline_of(history, summary.cells),
        sections=_SECTIONS,
        selftest=selftest,
        kill_columns=matrix_columns(selftest.found.outcomes) if selftest else [],
        mutants=MUTANTS,
        aa=_newest(history.folder, "aa.json", AgainstItself, "aa.md"),
        tails=_tails(summary),
        files=files_of(history),
        transfers={
            c.cell: r.figures
            for c in summary.judgement.cells
            for r in c.results
            if c.scenario == COLD and isinstance(r.figures, TransferFigures)
        },
    )


_Model = TypeVar("_Model", SelfTest, AgainstItself)


class Beside(NamedTuple, Generic[_Model]):
    """A result in a folder beside a run's."""

    found: _Model
    links: dict[str, str]
    """Its pages: name → path relative to the run's folder, quoted for a URL."""


def _newest(folder: Path, name: str, kind: type[_Model], page: str) -> Beside[_Model] | None:
    """Return the newest valid result in a JSON file of that name in a folder beside the run, with its page."""
    found = []
    for path in folder.resolve().parent.glob(f"*/{name}"):
        # A text that is no result, or one of another version, is none.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            raw = json_io.loads(json_io.read_text(path, 256 * json_io.MIB))
            result = kind.model_validate({k: v for k, v in raw.items() if k in kind.model_fields})
            if not path.parent.is_symlink():
                found.append((result.started, path.parent, result))
    if not found:
        return None
    _, beside, result = max(found, key=lambda item: item[0])
    link = f"../{quote(os.fsencode(beside.name), safe='')}/{page}"
    return Beside(result, {page: link} if (beside / page).is_file() else {})
