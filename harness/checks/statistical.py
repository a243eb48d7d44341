"""Verdicts of the normal tier: each registered test of a cell, with what it can see and how often it is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.acceptance import by_step
from harness.checks.drafting import cell_steps
from harness.checks.evidence import CellView
from harness.checks.night import Column, RegisteredTest, Tested, TestName
from harness.config import Judging
from harness.decision import Change, Facts, SecondStage, decide
from harness.findings import CheckResult, DamageClass, Finding, Verdict, conclude

_TOKENS: tuple[TestName, ...] = ("survival", "hard-divergence", "rescored")
_YES_OR_NO: tuple[TestName, ...] = ("first-step", "hard-divergence", "rescored")


def check_for(name: TestName) -> Callable[[CellView], CheckResult]:
    """The check that reports a registered test."""

    def judge(cell: CellView) -> CheckResult:
        return judge_test(cell, name)

    return judge


def judge_test(cell: CellView, name: TestName) -> CheckResult:
    """What one registered test says of a cell, by the table of ``harness.decision``."""
    tested = cell.evidence.night.get(RegisteredTest(cell.id, cell.scenario, name))
    if tested is None:
        return conclude(name, cell.id, 0, [_unknown(cell, name, "the test was not among the registered ones")])
    if tested.p is None:
        return conclude(name, cell.id, 0, [_unknown(cell, name, tested.problem)], note=tested.note)
    judging = cell.evidence.judging
    change, columns = change_of(cell, tested)
    blind = change == "none" and _too_blind(tested, judging)
    facts = Facts(
        evidence=not blind,
        quiet=tested.quiet,
        change=change,
        against="tonight" if name in ("acceptance-single", "first-step", "rescored") else "baseline",
        together=change != "none" and _together(cell, name, change),
        second_stage=_second_stage(cell, tested, change),
    )
    verdict, why = decide(facts)
    figures = _figures(tested, judging.stage_alpha)
    if verdict is Verdict.PASS:
        return conclude(name, cell.id, tested.prompts, [], note=_note(tested, cell), figures=figures)
    extra: dict[str, Any] = {} if name in _TOKENS else {"by_step": _steps_since(cell, name)}
    where = _where(figures) if columns and name in ("acceptance-baseline", "acceptance-single") else ""
    finding = cell.finding(
        name,
        verdict,
        _damage(cell, name, change, verdict),
        _message(cell, tested, change, columns, why) + where,
        **figures,
        **extra,
        changed=[c.difference.column for c in columns],
    )
    return conclude(name, cell.id, tested.prompts, [finding], note=tested.note, figures=figures)


def change_of(cell: CellView, tested: Tested) -> tuple[Change, list[Column]]:
    """The direction in which a rejected test moved, and the columns that carry it: beyond chance, with an interval
    that excludes zero, and beyond the practical floor. Tokens that diverge less than equal runs do are no change."""
    judging = cell.evidence.judging
    if tested.adjusted is None or tested.adjusted > judging.stage_alpha:
        return "none", []
    floor = judging.floor_points / 100
    exact = tested.id.name in _YES_OR_NO
    moved = [
        c
        for c in tested.columns
        if c.adjusted <= judging.stage_alpha
        and abs(c.difference.effect) >= floor
        and (exact or c.difference.excludes_zero)
    ]
    if tested.id.name in _TOKENS:
        more = [c for c in moved if c.difference.effect > 0]
        return ("differ", more) if more else ("none", [])
    fell = [c for c in moved if c.difference.effect < 0]
    if fell:
        return "drop", fell
    return ("rise", moved) if moved else ("none", [])


def tripped(evidence_views: Iterable[CellView]) -> list[RegisteredTest]:
    """Registered tests that found a change: those that a second stage has to confirm."""
    out = []
    for view in evidence_views:
        for test, tested in view.evidence.night.items():
            if (test.cell, test.scenario) == (view.id, view.scenario) and change_of(view, tested)[0] != "none":
                out.append(test)
    return out


def _too_blind(tested: Tested, judging: Judging) -> bool:
    """Whether the evidence could have missed a change that must be seen, over all prompts or within one stratum."""
    limits = (
        (tested.detectable, judging.must_detect_points),
        (tested.detectable_stratum, judging.must_detect_stratum_points),
    )
    return any(seen is not None and limit is not None and not seen <= limit / 100 for seen, limit in limits)


def _together(cell: CellView, name: TestName, change: Change) -> bool:
    """The other topology changed alike against the baseline, and P/D does not differ from it tonight."""
    other = "single" if cell.handed_off else "pd"
    result = cell.evidence.night.get(RegisteredTest(cell.name.beside(other).id, cell.scenario, name))
    sibling = cell.sibling(other)
    if sibling is None or result is None or change_of(sibling, result)[0] != change:
        return False
    view = cell if cell.handed_off else sibling
    tonight = cell.evidence.night.get(RegisteredTest(view.id, cell.scenario, "acceptance-single"))
    return tonight is None or change_of(view, tonight)[0] == "none"


def _second_stage(cell: CellView, tested: Tested, change: Change) -> SecondStage:
    if change == "none" or cell.evidence.judging.stages == 1:
        return "not needed"
    if cell.evidence.second is None:
        return "missing"
    again = cell.evidence.second.get(tested.id)
    if again is None or again.p is None:
        return "missing"
    if change_of(cell, again)[0] == change:
        return "confirmed"
    # A second stage that could not have seen it says nothing.
    return "missing" if _too_blind(again, cell.evidence.judging) else "not confirmed"


def _damage(cell: CellView, name: TestName, change: Change, verdict: Verdict) -> DamageClass:
    if verdict in (Verdict.IMPROVED, Verdict.DRIFT):
        return "engine-changed"
    if verdict is Verdict.UNKNOWN:
        return "nothing-tested"
    if name in _TOKENS:
        return "target-kv" if cell.handed_off or not cell.cold else "sampler"
    return "sampler" if change == "rise" or not cell.handed_off else "drafter-kv"


def _unknown(cell: CellView, name: TestName, reason: str) -> Finding:
    return cell.finding(name, Verdict.UNKNOWN, "baseline" if "baseline" in reason else "nothing-tested", reason)


def _points(value: float) -> str:
    return f"{100 * value:+.2f}"


def _describe(column: Column) -> str:
    d = column.difference
    return (
        f"{d.column}: {d.rates[0]:.4f} → {d.rates[1]:.4f} ({_points(d.effect)} points, interval {_points(d.low)} to "
        f"{_points(d.high)}, {d.prompts} prompts)"
    )


def _message(cell: CellView, tested: Tested, change: Change, columns: list[Column], why: str) -> str:
    judging = cell.evidence.judging
    if not columns:
        return (
            f"expected evidence that could show a change of {judging.must_detect_points:g} points over all prompts and "
            f"of {judging.must_detect_stratum_points or 100:g} in each stratum, found one that shows "
            f"{_size(tested.detectable)} and {_size(tested.detectable_stratum)} with {tested.prompts} prompts: {why}; "
            "send more prompts"
            if tested.quiet
            else f"expected two equal runs to agree, found that they do not: {why}"
        )
    shown = "; ".join(_describe(c) for c in columns[:3])
    return (
        f"expected no change beyond chance (registered test, adjusted p {tested.adjusted:.2g}, level "
        f"{judging.stage_alpha:.3g}), found a {change} in {len(columns)} of {len(tested.columns)} columns: {shown}; "
        f"{why}"
    )


def _size(seen: float | None) -> str:
    if seen is None:
        return "(no strata)"
    return f"{100 * seen:.1f} points" if math.isfinite(seen) else "nothing, with so few prompts,"


def _note(tested: Tested, cell: CellView) -> str:
    parts = [tested.note] if tested.note else []
    floor = cell.evidence.judging.stage_alpha
    if tested.adjusted is not None and tested.adjusted <= floor:
        parts.append("a change beyond chance, but below the practical floor")
    if tested.detectable is not None:
        parts.append(f"could have seen {100 * tested.detectable:.2f} points")
    if tested.detectable_stratum is not None:
        parts.append(f"{100 * tested.detectable_stratum:.2f} in the weakest stratum")
    return "; ".join(parts)


def _figures(tested: Tested, alpha: float) -> dict[str, Any]:
    pooled = [c.difference.rates for c in tested.columns if c.difference.column.startswith("all@")]
    conditional = [_conditional([r[side] for r in pooled]) for side in (0, 1)]
    return {
        "reference": {"rates": [_finite(r[0]) for r in pooled]},
        "conditional": {"reference": conditional[0], "found": conditional[1]},
        "p": tested.p,
        "p_adjusted": tested.adjusted,
        "alpha": alpha,
        "prompts": tested.prompts,
        "detectable_points": None if tested.detectable is None else _finite(100 * tested.detectable),
        "detectable_stratum_points": None
        if tested.detectable_stratum is None
        else _finite(100 * tested.detectable_stratum),
        "columns": [
            {
                "column": c.difference.column,
                "reference": _finite(c.difference.rates[0]),
                "found": _finite(c.difference.rates[1]),
                "effect_points": _finite(100 * c.difference.effect),
                "interval_points": [_finite(100 * c.difference.low), _finite(100 * c.difference.high)],
                "prompts": c.difference.prompts,
                "p_adjusted": c.adjusted,
            }
            for c in tested.columns
        ],
    }


def _conditional(rates: Sequence[float]) -> list[float | None]:
    """P(draft p accepted | draft p - 1 accepted): marginal rates inherit every loss before them, these do not."""
    before = [1.0, *rates]
    return [_finite(r / b) if b > 0 else None for r, b in zip(rates, before, strict=False)]


def _where(figures: dict[str, Any]) -> str:
    """The position at which conditional acceptance moved most, in words."""
    sides = figures["conditional"]
    moved = [
        (abs(b - a), p, a, b)
        for p, (a, b) in enumerate(zip(sides["reference"], sides["found"], strict=True))
        if a is not None and b is not None
    ]
    if len(moved) < 2:
        return ""
    _, position, a, b = max(moved)
    return f"; by conditional acceptance the change is at position {position} ({a:.4f} → {b:.4f})"


def _steps_since(cell: CellView, name: TestName) -> dict[str, Any]:
    """Mean accepted drafts by step since the hand-off, of this cell and of what it is compared with."""
    ours = [s.accepted for s in cell_steps(cell).values()]
    if name == "acceptance-baseline":
        lookup = cell.evidence.baselines.get(cell.lineup)
        rows = lookup.baseline.by_prompt() if lookup is not None and lookup.baseline is not None else {}
        theirs = [rows[o.prompt_id].accepted for o in cell.answered().values() if o.prompt_id in rows]
    else:
        single = cell.sibling("single")
        theirs = [s.accepted for s in cell_steps(single).values()] if single is not None else []
    return {"found": [list(r) for r in by_step(ours)], "reference": [list(r) for r in by_step(theirs)]}


def _finite(value: float) -> float | None:
    """JSON has no nan and no infinity."""
    return round(value, 6) if math.isfinite(value) else None
