"""Output tokens against the no-speculation single engine of the same run and against the baseline."""

from __future__ import annotations

from typing import Any, NamedTuple

from harness.checks.evidence import CellView
from harness.decision import Facts, decide
from harness.findings import CheckResult, DamageClass, Finding, Verdict, conclude
from harness.history import Leg, Observation
from harness.sequences import common_prefix


class Divergence(NamedTuple):
    """Where two outputs part, and whether the reference could have gone either way there."""

    position: int
    gap: float | None
    """Top-2 log-prob distance in nats of the reference at the position; None when unknown."""
    near_tie: bool


def compare(
    ours: tuple[int, ...], reference: tuple[int, ...], gaps: tuple[float | None, ...] | None, near_tie_nats: float
) -> Divergence | None:
    """First divergence of two outputs, or None when they are equal.

    A near tie needs proof: an unknown gap, or a difference in length, is a hard divergence.
    """
    if ours == reference:
        return None
    at = common_prefix(ours, reference)
    gap = gaps[at] if gaps is not None and at < len(gaps) else None
    inside = at < min(len(ours), len(reference))
    return Divergence(at, gap, bool(inside and gap is not None and gap <= near_tie_nats))


def _evidence(at: Divergence, ours: tuple[int, ...], reference: tuple[int, ...]) -> dict[str, Any]:
    start = max(0, at.position - 3)
    return {
        "position": at.position,
        "reference_gap_nats": at.gap,
        "window_start": start,
        "found": list(ours[start : at.position + 9]),
        "expected": list(reference[start : at.position + 9]),
        "differing_tokens": sum(a != b for a, b in zip(ours, reference, strict=False))
        + abs(len(ours) - len(reference)),
        "output_tokens": len(reference),
    }


def _describe(at: Divergence, ours: tuple[int, ...], reference: tuple[int, ...], against: str) -> str:
    found = ours[at.position] if at.position < len(ours) else "the end of the output"
    wanted = reference[at.position] if at.position < len(reference) else "the end of the output"
    margin = "unknown" if at.gap is None else f"{at.gap:.2f} nats"
    return (
        f"expected the tokens of {against}, found the first difference at output token {at.position}: "
        f"{found} instead of {wanted} (the reference's margin there is {margin}, no near tie)"
    )


def _final(o: Observation | None) -> Leg | None:
    return o.final if o is not None and o.error is None else None


def tokens_reference(cell: CellView) -> CheckResult:
    """Tokens equal those of the no-speculation single engine of the same run, in the same scenario."""
    name = "tokens-reference"
    reference = cell.evidence.history.of(cell.name.reference, scenario=cell.scenario)
    findings: list[Finding] = []
    judged = ties = 0
    for key, o in cell.answered().items():
        other = _final(reference.get(key))
        leg = o.final
        if leg is None or leg.output_ids is None:
            continue
        if other is None or other.output_ids is None:
            findings.append(
                cell.finding(
                    name,
                    Verdict.UNKNOWN,
                    "nothing-tested",
                    f"expected an answer of {cell.name.reference} to compare with, found none",
                    o,
                )
            )
            continue
        judged += 1
        at = compare(leg.output_ids, other.output_ids, other.top_gaps, cell.evidence.judging.near_tie_nats)
        if at is None:
            continue
        if at.near_tie:
            ties += 1
            continue
        findings.append(
            cell.finding(
                name,
                decide(Facts(change="differ", against="tonight"))[0],
                _damage(cell),
                _describe(at, leg.output_ids, other.output_ids, f"{cell.name.reference} of this run"),
                o,
                **_evidence(at, leg.output_ids, other.output_ids),
            )
        )
    return conclude(name, cell.id, judged, findings, note=_tie_note(ties))


def _damage(cell: CellView) -> DamageClass:
    """Where wrong tokens come from when nothing else is known: a cold prompt on one engine meets no KV but its own."""
    return "sampler" if cell.cold and not cell.handed_off else "target-kv"


def _tie_note(ties: int) -> str:
    return f"{ties} near ties of the reference, benign" if ties else ""


def tokens_baseline(cell: CellView) -> CheckResult:
    """Tokens equal the recorded ones of the no-speculation single engine."""
    name = "tokens-baseline"
    lookup = cell.evidence.baselines.get(cell.name.plain)
    if lookup is None or lookup.baseline is None:
        reason = lookup.reason if lookup else "the no-speculation baseline was not looked up"
        return conclude(name, cell.id, 0, [cell.finding(name, Verdict.UNKNOWN, "baseline", reason)])
    rows = lookup.baseline.by_prompt()
    tonight = cell.evidence.history.of(cell.name.reference, scenario=cell.scenario)
    findings: list[Finding] = []
    judged = ties = 0
    for o in cell.answered().values():
        leg, row = o.final, rows.get(o.prompt_id)
        if leg is None or leg.output_ids is None:
            continue
        if row is None:
            findings.append(
                cell.finding(name, Verdict.UNKNOWN, "baseline", "expected this prompt in the baseline, found no row", o)
            )
            continue
        judged += 1
        wanted = row.output_ids[: o.max_tokens]
        reference = _final(tonight.get(o.key))
        gaps = reference.top_gaps if reference and reference.output_ids == wanted else None
        at = compare(leg.output_ids, wanted, gaps, cell.evidence.judging.near_tie_nats)
        if at is None:
            continue
        if at.near_tie:
            ties += 1
            continue
        verdict = _baseline_verdict(cell, leg, reference)
        findings.append(
            cell.finding(
                name,
                verdict,
                "engine-changed" if verdict is Verdict.DRIFT else _damage(cell),
                _describe(at, leg.output_ids, wanted, "the baseline")
                + ("; the single engine of this run moved with it" if verdict is Verdict.DRIFT else ""),
                o,
                **_evidence(at, leg.output_ids, wanted),
            )
        )
    return conclude(name, cell.id, judged, findings, note=_tie_note(ties))


def _baseline_verdict(cell: CellView, leg: Leg, reference: Leg | None) -> Verdict:
    """DRIFT when the engine moved for everyone: the no-speculation single engine of tonight gives these tokens too."""
    same = cell.id == cell.name.reference or (reference is not None and reference.output_ids == leg.output_ids)
    # In a scenario, two cells may meet the same damage: the cold answers tell a drift from it.
    return decide(Facts(change="differ", together=cell.cold and same))[0]
