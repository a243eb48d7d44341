"""report.html: one self-contained file. All run data is escaped by the template engine; nothing in it can run."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from harness.findings import Finding
from harness.history import COLD, Observation
from harness.locate.diagnose import damage_name
from harness.summary import RunSummary, grouped_findings

_DIVERGENCES = 24


def environment() -> Environment:
    """The template engine: everything is escaped, and a missing value is an error."""
    env = Environment(
        loader=PackageLoader("harness.report", "templates"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["pct"] = lambda v: "–" if v is None else f"{100 * v:.2f} %"
    env.filters["damage"] = damage_name
    env.filters["num"] = lambda v, digits=3: "–" if v is None else f"{v:.{digits}f}"
    return env


def _token_rows(finding: Finding) -> dict[str, Any]:
    """Expected and found tokens around a first divergence, side by side."""
    evidence = finding.evidence
    start = int(evidence.get("window_start", evidence.get("position", 0)))
    expected, found = list(evidence.get("expected", [])), list(evidence.get("found", []))
    width = max(len(expected), len(found))
    pad = [None] * width
    pairs = zip((expected + pad)[:width], (found + pad)[:width], strict=True)
    return {
        "finding": finding,
        "columns": [
            {
                "index": start + i,
                "expected": e,
                "found": f,
                "differs": e != f,
            }
            for i, (e, f) in enumerate(pairs)
        ],
    }


def _divergences(summary: RunSummary) -> list[dict[str, Any]]:
    tokens = [f for f in summary.judgement.findings if f.check in ("tokens-reference", "tokens-baseline")]
    seen: set[tuple[str, str | None]] = set()
    out = []
    for f in tokens:
        if "expected" in f.evidence and (f.cell, f.prompt_id) not in seen:
            seen.add((f.cell, f.prompt_id))
            out.append(_token_rows(f))
    return out[:_DIVERGENCES]


def _bars(summary: RunSummary) -> list[dict[str, Any]]:
    """Acceptance per position as bars: this run, and the baseline's rate as a mark."""
    out = []
    for row in summary.acceptance:
        positions = []
        for p, rate in enumerate(row.ours.rates):
            reference = row.baseline_rates[p] if row.baseline_rates and p < len(row.baseline_rates) else None
            positions.append({"position": p, "rate": rate, "accepted": row.ours.accepted_at[p], "reference": reference})
        out.append({"row": row, "positions": positions})
    return out


def _slowest(observations: tuple[Observation, ...]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for o in observations:
        worst[o.cell] = max(worst.get(o.cell, 0.0), sum(leg.seconds for leg in o.legs))
    return worst


def render_html(summary: RunSummary) -> str:
    template = environment().get_template("report.html.j2")
    run = summary.history.run
    return template.render(
        summary=summary,
        run=run,
        strata=[s for s in summary.strata if any(s in r for r in summary.grid.values())],
        groups=grouped_findings(summary.judgement),
        bars=_bars(summary),
        divergences=_divergences(summary),
        slowest=_slowest(summary.history.observations),
        transfers={
            c.cell: r.figures
            for c in summary.judgement.cells
            for r in c.results
            if c.scenario == COLD and r.check == "transfer" and r.figures
        },
    )
