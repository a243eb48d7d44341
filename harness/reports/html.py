"""report.html: one self-contained file that works from a file URL and fetches nothing.

The template engine escapes all run data, the JSON of the charts cannot end its script element, and the page's
Content-Security-Policy allows only our two scripts, by their hashes.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from harness import redact
from harness.history.folder import History
from harness.history.records import COLD, Observation
from harness.history.verdict import Verdict
from harness.judging.diagnosis.diagnose import damage_name
from harness.judging.figures import TransferFigures
from harness.judging.findings import Finding
from harness.mutants.catalogue import MUTANTS
from harness.profiles.cells import CellName
from harness.reports.charts import Chart, charts_of, library
from harness.reports.links import newest_aa, newest_selftest
from harness.reports.selftest_result import matrix_columns
from harness.reports.summary import RunSummary, can_be_tried, causes, group_place, grouped_findings
from harness.util.files import ends_of
from harness.util.paths import REPOSITORY
from harness.util.text import harmless, shortened

_TAIL_LINES = 12
_TAIL_BYTES = 64 * 1024
_SECTIONS = (
    (
        "acceptance",
        "Acceptance per position",
        "Share of steps that accepted the draft at each position, with 99 % intervals over prompts, in the baseline "
        "and in each cell of this run. Acceptance length is given pooled over all steps and as the mean over prompts.",
    ),
    (
        "steps",
        "Acceptance by step since the hand-off",
        "Mean accepted drafts at each step, for prompts that end on a block boundary (aligned) and for others. A "
        "hand-off that shifts blocks or loses the drafter's KV shows in the first steps of P/D.",
    ),
    (
        "survival",
        "Survival of identity",
        "Share of prompts whose output still equals the recorded one, by output token, compared with two equal runs. "
        "A wrong hand-off is a cliff at the start; rounding is a slope.",
    ),
)
_OPEN = 4
"""Maximum number of groups of known findings, and of worst prompts, that are shown unfolded."""


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
    env.filters["anchor"] = anchor
    env.filters["place"] = lambda name: quote(harmless(str(name)), safe="")
    return env


def anchor(finding: Finding) -> str:
    """Return the id of a finding's element on the page, for links to it."""
    return "finding-" + re.sub(r"[^A-Za-z0-9.]+", "-", finding.id)


def repro_line(history: History, finding: Finding) -> str:
    """Return the command that tries a finding again, with the flags that the run's engines had."""
    folder = history.folder
    shown = folder.relative_to(REPOSITORY) if folder.is_relative_to(REPOSITORY) else folder
    return shlex.join(["harness", "repro", str(shown), finding.id, *history.run.engine_flags])


def script_json(value: Any) -> Markup:
    """Return JSON for a script element, in which no text can end the element or break a chart expression."""
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


def _slowest(observations: Iterable[Observation]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for o in observations:
        worst[o.cell] = max(worst.get(o.cell, 0.0), sum(leg.seconds for leg in o.legs))
    return worst


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


def render_page(template: str, env: Environment, charts: Sequence[Chart], **values: Any) -> str:
    """Render a page with its charts, the charting library and our script embedded."""
    script = (files("harness.reports") / "assets" / "report.js").read_text(encoding="utf-8")
    return env.get_template(template).render(
        charts=charts,
        chart_data=script_json([{"id": c.id, "spec": c.spec} for c in charts]),
        library=Markup(library()),
        script=Markup(script),
        policy=Markup(f"{_hash(library())} {_hash(script)}"),
        **values,
    )


def render_html(summary: RunSummary) -> str:
    """Render report.html. Odd data is shown as it is, escaped, and raises nothing."""
    env = environment()
    env.tests["tried"] = can_be_tried
    env.filters["in_words"] = lambda f: group_place(summary.judgement, f)
    env.filters["repro"] = lambda f: repro_line(summary.history, f)
    selftest = newest_selftest(summary.history.folder)
    groups = grouped_findings(summary.judgement)
    return render_page(
        "report.html.j2",
        env,
        charts_of(summary.figures),
        summary=summary,
        run=summary.history.run,
        figures=summary.figures,
        strata=[s for s in summary.strata if any(s in r for r in summary.grid.values())],
        methods=list(dict.fromkeys(CellName.of(cell).method for cell in summary.cells)),
        verdicts=list(dict.fromkeys(c.verdict for c in summary.judgement.cells)),
        groups=[g for g in groups if g[0].known is None],
        causes=causes(summary.verdict, groups),
        known_groups=[g for g in groups if g[0].known is not None],
        most_open=_OPEN,
        sections=_SECTIONS,
        selftest=selftest,
        kill_columns=matrix_columns(selftest.found.outcomes) if selftest else [],
        mutants=MUTANTS,
        aa=newest_aa(summary.history.folder),
        tails=_tails(summary),
        slowest=_slowest(summary.history.observations),
        transfers={
            c.cell: r.figures
            for c in summary.judgement.cells
            for r in c.results
            if c.scenario == COLD and isinstance(r.figures, TransferFigures)
        },
    )
