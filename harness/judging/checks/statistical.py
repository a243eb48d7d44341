"""Verdicts of the normal tier: turns the results of registered tests into check results with figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harness.history.acceptance import by_step
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.checks.model import (
    Column,
    Pooled,
    PooledDrafts,
    RegisteredTest,
    Results,
    Tested,
    TestName,
    required,
)
from harness.judging.decision import Change, Facts, SecondStage, decide
from harness.judging.detection import Detectable, describe
from harness.judging.evidence import CellView
from harness.judging.figures import (
    AcceptanceTestEvidence,
    ColumnFigures,
    ConditionalRates,
    HypothesisFigures,
    PositionRates,
    StepsBeside,
    TokenTestEvidence,
)
from harness.judging.findings import CheckResult, DamageClass, Finding, conclude
from harness.observed import acceptance
from harness.profiles.model import Judging

_TOKENS: tuple[TestName, ...] = ("survival", "rescored")
_OF_TARGET: tuple[TestName, ...] = (*_TOKENS, "logprobs-single")
"""Tests of what the target says, whatever is drafted."""
_OF_THIS_RUN: tuple[TestName, ...] = (
    "rescored",
    "logprobs-single",
    "acceptance-single",
    "acceptance-cold",
    "first-step",
)
"""Tests against other answers of the same run, as are all those in scenarios."""


def judge_test(cell: CellView, tested: Tested, results: Results) -> CheckResult:
    """Turn the result of one registered test into a check result, using the table in ``harness.judging.decision``.

    ``results`` holds all tests, since the verdict also depends on the other topology and on the second stage.
    """
    name = tested.id.name
    if tested.p is None:
        return conclude(name, cell.id, 0, [_unknown(cell, name, tested.problem)], note=tested.note)
    judging = cell.judging
    change, columns = change_of(cell, tested)
    underpowered = change == "none" and _underpowered(tested, judging)
    facts = Facts(
        evidence=not underpowered,
        quiet=tested.quiet,
        change=change,
        against="this run" if name in _OF_THIS_RUN or not cell.cold else cell.against(cell.lineup),
        together=change != "none" and _moved_together(cell, name, change, results.first),
        second_stage=_second_stage(cell, tested, change, results.second),
    )
    verdict, why = decide(facts)
    figures = _figures(tested, judging.stage_alpha)
    if verdict is Verdict.PASS:
        return conclude(name, cell.id, tested.sample.prompts, [], note=_note(tested, cell), figures=figures)
    where = _where(figures) if columns and name.startswith("acceptance-") else ""
    finding = cell.finding(
        name,
        verdict,
        _damage(cell, name, change, verdict),
        _message(cell, tested, change, columns, why) + where,
        evidence=_evidence(cell, name, figures, columns),
    )
    return conclude(name, cell.id, tested.sample.prompts, [finding], note=tested.note, figures=figures)


def change_of(cell: CellView, tested: Tested) -> tuple[Change, list[Column]]:
    """Return the direction in which a rejected test moved, and the columns that moved.

    A column moved if its change is beyond chance; acceptance must have moved by the practical floor, too, with an
    interval that excludes zero. Tokens that are wrong less often than between equal runs are not a change.
    """
    judging = cell.judging
    if tested.adjusted is None or tested.adjusted > judging.stage_alpha:
        return "none", []
    beyond = [c for c in tested.columns if c.adjusted <= judging.stage_alpha]
    if tested.id.name in _TOKENS:
        more = [c for c in beyond if c.difference.effect > 0]
        return ("differ", more) if more else ("none", [])
    moved = [c for c in beyond if _matters(cell, tested.id.name, c)]
    fell = [c for c in moved if c.difference.effect < 0]
    if fell:
        return "drop", fell
    return ("rise", moved) if moved else ("none", [])


def _matters(cell: CellView, name: TestName, column: Column) -> bool:
    """Return whether a column moved by the practical floor, with an interval that excludes zero and what acceptance may
    move by without a defect."""
    d = column.difference
    slack = acceptance.mean_slack(cell) if name.startswith("acceptance-") else 0.0
    far = abs(d.effect) >= cell.judging.floor_points / 100
    return far and (name == "first-step" or d.excludes(slack * d.rates[0]))


def tripped(views: Iterable[CellView], results: Mapping[RegisteredTest, Tested]) -> list[RegisteredTest]:
    """Return the registered tests that found a change, which a second stage must confirm."""
    return [
        test
        for view in views
        for test, tested in results.items()
        if (test.cell, test.scenario) == (view.id, view.scenario) and change_of(view, tested)[0] != "none"
    ]


def judge_pooled(cell: CellView, pooled: Pooled) -> CheckResult:
    """Turn a test of many cells together into the check result of one of them.

    If it found more wrong answers than they are compared with, the cells that contribute to them have a finding.
    """
    tested, hits = pooled.tested, pooled.cells[cell.id]
    if tested.p is None:
        return conclude("pooled", cell.id, 0, [_unknown(cell, "pooled", tested.problem)], note=tested.note)
    judging = cell.judging
    more = [c for c in tested.columns if c.adjusted <= pooled.alpha and c.difference.effect > 0]
    mine = [c for c in more if hits[c.difference.column].ours > hits[c.difference.column].theirs]
    change: Change = "differ" if mine else "none"
    facts = Facts(evidence=bool(more) or not _underpowered(tested, judging), change=change, against="this run")
    verdict, why = decide(facts)
    figures = _figures(tested, pooled.alpha)
    if verdict is Verdict.PASS:
        note = "; ".join((*_sight_note(tested), *(["other cells have more wrong answers"] if more else [])))
        return conclude("pooled", cell.id, tested.sample.prompts, [], note=note, figures=figures)
    finding = cell.finding(
        "pooled",
        verdict,
        "target-kv" if mine else "nothing-tested",
        _pooled_message(cell, pooled, mine, why) if mine else _blind_message(cell, tested, why),
        evidence=TokenTestEvidence(**dict(figures), changed=tuple(c.difference.column for c in mine)),
    )
    return conclude("pooled", cell.id, tested.sample.prompts, [finding], note=tested.note, figures=figures)


def judge_pooled_drafts(cell: CellView, pooled: PooledDrafts) -> CheckResult:
    """Turn the test of the drafts of all P/D cells together into the check result of one of them: the cells that
    moved as all together did have a finding."""
    tested, mine = pooled.tested, pooled.cells[cell.id]
    name = tested.id.name
    if tested.p is None:
        return conclude(name, cell.id, 0, [_unknown(cell, name, tested.problem)], note=tested.note)
    moved = [c for c in tested.columns if c.adjusted <= pooled.alpha and _matters(cell, name, c)]
    too = [c for c in moved if _same_way(c, mine.get(c.difference.column))]
    change: Change = "none" if not too else "drop" if too[0].difference.effect < 0 else "rise"
    verdict, why = decide(Facts(change=change, against="this run"))
    figures = _figures(tested, pooled.alpha)
    if verdict is Verdict.PASS:
        note = "; ".join((*_sight_note(tested), *(["other cells moved"] if moved else [])))
        return conclude(name, cell.id, tested.sample.prompts, [], note=note, figures=figures)
    message = (
        f"a {change} of accepted drafts after hand-offs, over all P/D cells together and against their single "
        f"engines (p {tested.p:.2g}, level {pooled.alpha:.2g}): {'; '.join(map(_describe, too))}; of this cell"
        + ", ".join(f"{a:.4f} → {b:.4f}" for a, b in (mine[c.difference.column] for c in too))
        + f"; {why}"
    )
    finding = cell.finding(name, verdict, cell.wrong_drafts, message, evidence=_evidence(cell, name, figures, too))
    return conclude(name, cell.id, tested.sample.prompts, [finding], note=tested.note, figures=figures)


def _same_way(column: Column, rates: tuple[float, float] | None) -> bool:
    return rates is not None and (rates[1] - rates[0]) * column.difference.effect > 0


def _pooled_message(cell: CellView, pooled: Pooled, columns: Sequence[Column], why: str) -> str:
    name = columns[0].difference.column
    ours, theirs, prompts = pooled.cells[cell.id][name]
    whose, than, its = (
        ("of all P/D cells together", "of their single engines", "of its single engine")
        if cell.cold
        else (f"of all cells together in {cell.scenario}", "to the same prompts cold", "cold")
    )
    return (
        f"more wrong answers {whose} than {than} (pooled test, p {pooled.tested.p:.2g}, level {pooled.alpha:.2g}): "
        f"{'; '.join(_describe(c) for c in columns)}; {ours} of this cell, {theirs} {its} "
        f"({name.removeprefix('all@')}: {', '.join(prompts)}); {why}"
    )


def _underpowered(tested: Tested, judging: Judging) -> bool:
    """Return whether the test could have missed a change that must be detected, over all prompts or in one stratum."""
    limits = zip((tested.seen, tested.seen_in_stratum), required(tested.id.name, judging), strict=True)
    return any(seen is not None and not seen.enough(points) for seen, points in limits)


def _moved_together(cell: CellView, name: TestName, change: Change, results: Mapping[RegisteredTest, Tested]) -> bool:
    """Return whether both topologies moved alike against the baseline and do not differ from each other in this run."""
    other = "single" if cell.handed_off else "pd"
    result = results.get(RegisteredTest(cell.name.beside(other).id, cell.scenario, name))
    sibling = cell.sibling(other)
    if sibling is None or result is None or change_of(sibling, result)[0] != change:
        return False
    view = cell if cell.handed_off else sibling
    paired = results.get(RegisteredTest(view.id, cell.scenario, "acceptance-single"))
    return paired is None or change_of(view, paired)[0] == "none"


def _second_stage(
    cell: CellView, tested: Tested, change: Change, second: Mapping[RegisteredTest, Tested] | None
) -> SecondStage:
    if change == "none" or cell.judging.stages == 1:
        return "not needed"
    again = second.get(tested.id) if second is not None else None
    if again is None or again.p is None:
        return "missing"
    if change_of(cell, again)[0] == change:
        return "confirmed"
    # A second stage that could not have detected the change neither confirms nor refutes it.
    return "missing" if _underpowered(again, cell.judging) else "not confirmed"


def _damage(cell: CellView, name: TestName, change: Change, verdict: Verdict) -> DamageClass:
    if verdict in (Verdict.IMPROVED, Verdict.DRIFT):
        return "engine-changed"
    if verdict is Verdict.UNKNOWN:
        return "nothing-tested"
    if name in _OF_TARGET:
        return cell.wrong_output
    return "sampler" if change == "rise" else cell.wrong_drafts


def _unknown(cell: CellView, name: TestName, reason: str) -> Finding:
    return cell.finding(name, Verdict.UNKNOWN, "baseline" if "baseline" in reason else "nothing-tested", reason)


def _points(value: float) -> str:
    return f"{100 * value:+.2f}"


def _describe(column: Column) -> str:
    d = column.difference
    return (
        f"{d.column}: {d.rates[0]:.4f} → {d.rates[1]:.4f} ({_points(d.effect)} points, interval {_points(d.low)} to "
        f"{_points(d.high)}, {d.units} texts)"
    )


def _message(cell: CellView, tested: Tested, change: Change, columns: list[Column], why: str) -> str:
    judging = cell.judging
    if not columns:
        if not tested.quiet:
            return f"two equal runs do not agree: {why}"
        return _blind_message(cell, tested, why)
    shown = "; ".join(_describe(c) for c in columns[:3])
    return (
        f"a {change} beyond chance (registered test, adjusted p {tested.adjusted:.2g}, level "
        f"{judging.stage_alpha:.3g}) in {len(columns)} of {len(tested.columns)} columns: {shown}; {why}"
    )


def _blind_message(cell: CellView, tested: Tested, why: str) -> str:
    points, in_stratum = required(tested.id.name, cell.judging)
    wanted = [f"{points:g} points over all prompts"] + ([f"{in_stratum:g} in each stratum"] if in_stratum else [])
    found = [f"{_size(tested.seen)} over all"]
    if tested.seen_in_stratum is not None:
        found.append(f"{_size(tested.seen_in_stratum)} in the weakest stratum")
    more = "more P/D cells with their single engines" if cell.cold else "more cells"
    remedy = f"send more prompts, or {more}" if tested.id.name == "pooled" else "send more prompts"
    return (
        f"a change of {' and of '.join(wanted)} has to be seen, and {tested.sample.prompts} prompts of "
        f"{tested.sample.units} texts show {' and '.join(found)}: {why}; {remedy} (`harness plan` says what they "
        "show)"
    )


def _size(seen: Detectable | None) -> str:
    return describe(seen) if seen is not None else "nothing"


def _note(tested: Tested, cell: CellView) -> str:
    beyond = tested.adjusted is not None and tested.adjusted <= cell.judging.stage_alpha
    floor = ["a change beyond chance, but below the practical floor"] if beyond else []
    return "; ".join((*_sight_note(tested), *floor))


def _sight_note(tested: Tested) -> list[str]:
    """Return what the test could have seen, after its own note."""
    parts = [tested.note] if tested.note else []
    if tested.seen is not None:
        parts.append(f"could have seen {describe(tested.seen)}")
    if tested.seen_in_stratum is not None:
        parts.append(f"in the weakest stratum {describe(tested.seen_in_stratum)}")
    return parts


def _figures(tested: Tested, alpha: float) -> HypothesisFigures:
    pooled = [c.difference.rates for c in tested.columns if c.difference.column.startswith("all@")]
    conditional = [_conditional([r[side] for r in pooled]) for side in (0, 1)]
    return HypothesisFigures(
        reference=PositionRates(rates=tuple(_finite(r[0]) for r in pooled)),
        conditional=ConditionalRates(reference=conditional[0], found=conditional[1]),
        p=tested.p,
        p_adjusted=tested.adjusted,
        alpha=alpha,
        prompts=tested.sample.prompts,
        texts=tested.sample.units,
        detectable_points=_percent(tested.seen),
        detectable_prompts=_prompts(tested.seen),
        detectable_stratum_points=_percent(tested.seen_in_stratum),
        columns=tuple(_column(c) for c in tested.columns),
    )


def _percent(seen: Detectable | None) -> float | None:
    return None if seen is None else _finite(100 * seen.share)


def _prompts(seen: Detectable | None) -> int | None:
    return int(seen.prompts) if seen is not None and math.isfinite(seen.prompts) else None


def _column(column: Column) -> ColumnFigures:
    d = column.difference
    return ColumnFigures(
        column=d.column,
        reference=_finite(d.rates[0]),
        found=_finite(d.rates[1]),
        effect_points=_finite(100 * d.effect),
        interval_points=(_finite(100 * d.low), _finite(100 * d.high)),
        prompts=d.units,
        p_adjusted=column.adjusted,
    )


def _evidence(
    cell: CellView, name: TestName, figures: HypothesisFigures, columns: Sequence[Column]
) -> TokenTestEvidence:
    """Return the figures as evidence of a finding, including the means by step for tests of acceptance."""
    shared = dict(figures) | {"changed": tuple(c.difference.column for c in columns)}
    if name in _OF_TARGET:
        return TokenTestEvidence(**shared)
    return AcceptanceTestEvidence(**shared, by_step=_steps_since(cell, name))


def _conditional(rates: Sequence[float]) -> tuple[float | None, ...]:
    """Return P(draft p accepted | draft p - 1 accepted), which, unlike marginal rates, inherits no earlier losses."""
    before = [1.0, *rates]
    return tuple(_finite(r / b) if b > 0 else None for r, b in zip(rates, before, strict=False))


def _where(figures: HypothesisFigures) -> str:
    """Return the position at which conditional acceptance moved most."""
    sides = figures.conditional
    moved = [
        (abs(b - a), p, a, b)
        for p, (a, b) in enumerate(zip(sides.reference, sides.found, strict=True))
        if a is not None and b is not None
    ]
    if len(moved) < 2:
        return ""
    _, position, a, b = max(moved)
    return f"; by conditional acceptance the change is at position {position} ({a:.4f} → {b:.4f})"


def _steps_since(cell: CellView, name: TestName) -> StepsBeside:
    """Return mean accepted drafts by step since the hand-off, of this cell and of its reference."""
    ours = [s.accepted for s in cell.steps().values()]
    if name == "acceptance-baseline":
        rows = cell.rows(cell.lineup)
        theirs = [rows[o.prompt_id].accepted for o in cell.answered().values() if o.prompt_id in rows]
    elif name == "acceptance-cold":
        theirs = [s.accepted for s in replace(cell, scenario=COLD).steps().values()]
    else:
        single = cell.sibling("single")
        theirs = [s.accepted for s in single.steps().values()] if single is not None else []
    return StepsBeside(found=tuple(by_step(ours)), reference=tuple(by_step(theirs)))


def _finite(value: float) -> float | None:
    """Round to six decimals; NaN and infinity, which JSON lacks, become None."""
    return round(value, 6) if math.isfinite(value) else None
