"""A judged run as plain data for every report: one place that decides what is shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from harness.acceptance import Rates, pool, real_steps
from harness.checks.evidence import CellView, Evidence
from harness.config import Judging
from harness.findings import Finding, Judgement, Verdict, worst
from harness.history import History
from harness.strata import Stratum


class AcceptanceRow(NamedTuple):
    """Acceptance per position of one speculative cell, and of what it is compared with."""

    cell: str
    ours: Rates
    baseline_rates: list[float] | None
    padded: int
    tokens_equal: str
    """How many prompts gave exactly the tokens of the baseline, as "n/m"."""


class StratumCell(NamedTuple):
    verdict: Verdict
    prompts: int


class RunSummary(NamedTuple):
    history: History
    judgement: Judgement
    strata: list[str]
    grid: dict[str, dict[str, StratumCell]]
    """Cell → stratum → verdict; the key ``all`` holds findings that name no prompt."""
    acceptance: list[AcceptanceRow]
    equal_tokens: dict[str, str]

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def sentence(self) -> str:
        return describe(self.history, self.judgement)


def summarise_run(history: History, judgement: Judgement) -> RunSummary:
    evidence = Evidence(history, {}, Judging())
    views = {record.cell: CellView(evidence, record) for record in history.run.cells}
    by_place: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in judgement.findings:
        by_place[finding.cell, finding.stratum or "all"].append(finding)
    strata = [s.value for s in Stratum]
    grid: dict[str, dict[str, StratumCell]] = {}
    for cell_id, view in views.items():
        row: dict[str, StratumCell] = {}
        count: dict[str, int] = defaultdict(int)
        for o in view.observations().values():
            count[view.stratum(o)] += 1
        for stratum in strata:
            found = by_place.get((cell_id, stratum), [])
            if count[stratum] or found:
                verdict = worst(f.verdict for f in found) if found else Verdict.PASS
                row[stratum] = StratumCell(verdict, count[stratum])
        general = by_place.get((cell_id, "all"), [])
        if general:
            row["all"] = StratumCell(worst(f.verdict for f in general), 0)
        grid[cell_id] = row
    return RunSummary(
        history=history,
        judgement=judgement,
        strata=strata,
        grid=grid,
        acceptance=[_acceptance_row(v, judgement) for v in views.values() if v.speculative],
        equal_tokens={cell: _equal_tokens(judgement, cell) for cell in views},
    )


def _figures(judgement: Judgement, cell: str, check: str) -> Mapping[str, Any]:
    for verdict in judgement.cells:
        if verdict.cell == cell:
            for result in verdict.results:
                if result.check == check:
                    return result.figures
    return {}


def _equal_tokens(judgement: Judgement, cell: str) -> str:
    for verdict in judgement.cells:
        if verdict.cell == cell:
            results = {r.check: r for r in verdict.results}
            result = results.get("tokens-reference") or results.get("tokens-baseline")
            if result is None or not result.judged:
                return "not judged"
            wrong = len({f.prompt_id for f in result.findings if f.verdict is not Verdict.UNKNOWN})
            return f"{result.judged - wrong}/{result.judged}"
    return "not judged"


def _acceptance_row(view: CellView, judgement: Judgement) -> AcceptanceRow:
    steps = [s for o in view.answered().values() if o.final and (s := real_steps(o.final)) is not None]
    reference = _figures(judgement, view.id, "acceptance-baseline").get("reference") or {}
    return AcceptanceRow(
        cell=view.id,
        ours=pool([s.accepted for s in steps], view.record.draft_tokens),
        baseline_rates=reference.get("rates") or None,
        padded=sum(s.padded for s in steps),
        tokens_equal=_equal_tokens(judgement, view.id),
    )


def describe(history: History, judgement: Judgement) -> str:
    """What happened, in one sentence."""
    cells = len(judgement.cells)
    bad = [c for c in judgement.cells if c.verdict is not Verdict.PASS]
    requests = len(history.observations)
    if judgement.verdict is Verdict.PASS:
        who = "The cell passes" if cells == 1 else f"All {cells} cells pass"
        return (
            f"{who}: {requests} requests gave the right tokens, speculation accepted what it should, and every P/D "
            "request moved its KV."
        )
    names = ", ".join(f"{c.cell} {c.verdict}" for c in bad[:6]) + (" …" if len(bad) > 6 else "")
    if not bad:
        return f"{judgement.verdict}: {'; '.join(judgement.notices) or 'no cell was judged'}."
    return f"{len(bad)} of {cells} cells do not pass ({names}); {len(judgement.findings)} findings."


def grouped_findings(judgement: Judgement) -> list[tuple[Finding, int, list[str]]]:
    """Findings of the same cell, check and class as one: (first, how many, their strata), gravest first."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = defaultdict(list)
    for f in judgement.findings:
        groups[f.cell, f.check, f.verdict, f.damage].append(f)
    order = list(Verdict)
    out = [(fs[0], len(fs), sorted({f.stratum for f in fs if f.stratum})) for fs in groups.values()]
    return sorted(out, key=lambda g: -order.index(g[0].verdict))
