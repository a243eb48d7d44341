"""Checks of output tokens, against the no-speculation single engine of the same run and against the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from harness.history.records import Leg, Observation
from harness.history.token_ids import Divergence
from harness.history.verdict import Verdict
from harness.judging.decision import Facts, decide
from harness.judging.evidence import CellView
from harness.judging.figures import TokenDifference
from harness.judging.findings import CheckResult, DamageClass, Finding, conclude
from harness.judging.near_ties import parting, plain_baseline, told_runner_ups


def _evidence(at: Divergence, ours: tuple[int, ...], reference: tuple[int, ...]) -> TokenDifference:
    start = max(0, at.position - 3)
    return TokenDifference(
        position=at.position,
        reference_gap_nats=at.gap,
        window_start=start,
        found=ours[start : at.position + 9],
        expected=reference[start : at.position + 9],
        differing_tokens=sum(a != b for a, b in zip(ours, reference, strict=False)) + abs(len(ours) - len(reference)),
        output_tokens=len(reference),
    )


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
    """Check that tokens equal those of the no-speculation single engine in the same run and scenario."""
    name = "tokens-reference"
    reference = cell.history.of(cell.name.reference, scenario=cell.scenario)
    baseline = plain_baseline(cell)
    rows = baseline.by_prompt() if baseline is not None else {}
    findings: list[Finding] = []
    judged = 0
    ties: list[Leg | None] = []
    for key, o in cell.answered().items():
        other = _final(reference.get(key))
        leg = o.final
        if leg is None or leg.output_ids is None:
            continue
        if other is None or other.output_ids is None:
            message = f"expected an answer of {cell.name.reference} to compare with, found none"
            findings.append(cell.untested(name, message, o))
            continue
        judged += 1
        at = parting(cell, o, other.output_ids, other, rows.get(o.prompt_id))
        if at is None or at.near_tie:
            ties += [other] if at is not None else []
            continue
        findings.append(
            cell.finding(
                name,
                decide(Facts(change="differ", against="this run"))[0],
                _damage(cell),
                _describe(at, leg.output_ids, other.output_ids, f"{cell.name.reference} of this run"),
                o,
                _evidence(at, leg.output_ids, other.output_ids),
            )
        )
    return conclude(name, cell.id, judged, findings, note=_tie_note(ties))


def _damage(cell: CellView) -> DamageClass:
    """Return the default damage class of wrong tokens: a cold prompt on a single engine reads no KV but its own."""
    return "sampler" if cell.cold and not cell.handed_off else "target-kv"


def _tie_note(ties: Sequence[Leg | None]) -> str:
    """Describe the near ties from the reference's answers to their prompts."""
    if not ties:
        return ""
    untold = sum(not told_runner_ups(leg) for leg in ties)
    which = f"; {untold} of them with any token, because the record does not name the runner-up" if untold else ""
    return f"{len(ties)} near ties of the reference, benign{which}"


def tokens_baseline(cell: CellView) -> CheckResult:
    """Check that tokens equal those recorded in the baseline of the no-speculation single engine."""
    name = "tokens-baseline"
    lookup = cell.baselines.get(cell.name.plain)
    if lookup is None or lookup.baseline is None:
        reason = lookup.reason if lookup else "the no-speculation baseline was not looked up"
        return conclude(name, cell.id, 0, [cell.finding(name, Verdict.UNKNOWN, "baseline", reason)])
    rows = lookup.baseline.by_prompt()
    references = cell.history.of(cell.name.reference, scenario=cell.scenario)
    findings: list[Finding] = []
    judged = 0
    ties: list[Leg | None] = []
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
        reference = _final(references.get(o.key))
        at = parting(cell, o, wanted, reference, row)
        if at is None or at.near_tie:
            ties += [reference] if at is not None else []
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
                _evidence(at, leg.output_ids, wanted),
            )
        )
    return conclude(name, cell.id, judged, findings, note=_tie_note(ties))


def _baseline_verdict(cell: CellView, leg: Leg, reference: Leg | None) -> Verdict:
    """Return DRIFT if the no-speculation single engine of this run gives the same tokens: the engine itself changed."""
    same = cell.id == cell.name.reference or (reference is not None and reference.output_ids == leg.output_ids)
    # In a scenario two cells may share the same damage, so only cold prompts can show a drift.
    return decide(Facts(change="differ", together=cell.cold and same))[0]
