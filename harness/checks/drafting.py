"""Speculation: drafts happened, and each step accepted what the references accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.acceptance import Rates, Steps, pool, real_steps, same_steps
from harness.checks.evidence import CellView
from harness.findings import CheckResult, DamageClass, Finding, Verdict, conclude
from harness.history import Leg, Observation

_SHOWN = 12


def drafts_happened(cell: CellView) -> CheckResult:
    """Every request that could draft did, with the configured number of drafts; otherwise nothing was tested."""
    name = "drafts-happened"
    findings: list[Finding] = []
    judged = 0
    for o in cell.answered().values():
        leg = o.final
        if leg is None or leg.output_ids is None or len(leg.output_ids) < 2:
            continue
        judged += 1
        spec = leg.speculation
        if spec is None:
            findings.append(
                cell.finding(
                    name,
                    Verdict.UNKNOWN,
                    "nothing-tested",
                    "expected per-request acceptance metrics in the response, found none; this "
                    "engine version may lack --per-request-spec-decode-metrics",
                    o,
                )
            )
        elif spec.num_drafted == 0 or not (steps := real_steps(leg, cell.handed_off)) or not steps.accepted:
            findings.append(
                cell.finding(
                    name,
                    Verdict.UNKNOWN,
                    "nothing-tested",
                    "expected draft steps for this request, found none: speculation was not tested",
                    o,
                )
            )
        elif len(spec.per_step_drafted) != len(spec.per_step_accepted):
            findings.append(
                cell.finding(
                    name,
                    Verdict.UNKNOWN,
                    "nothing-tested",
                    "expected drafted and accepted counts for every step, found lists of different length",
                    o,
                )
            )
    return conclude(name, cell.id, judged, findings, figures=_figures(cell))


def _figures(cell: CellView) -> dict[str, Any]:
    steps = cell_steps(cell)
    return {
        **rates_dict(pool([s.accepted for s in steps.values()], cell.record.draft_tokens)),
        "padded_first_steps": sum(s.padded for s in steps.values()),
    }


def cell_steps(cell: CellView) -> dict[str, Steps]:
    """Real verify steps per prompt of a cell."""
    out = {}
    for prompt_id, o in cell.answered().items():
        if o.final is not None and (steps := real_steps(o.final, cell.handed_off)) is not None:
            out[prompt_id] = steps
    return out


def rates_dict(rates: Rates) -> dict[str, Any]:
    return {
        "requests": rates.requests,
        "steps": rates.steps,
        "accepted_at": list(rates.accepted_at),
        "rates": [round(r, 6) for r in rates.rates],
        "acceptance_length_pooled": rates.length_pooled,
        "acceptance_length_per_prompt": rates.length_per_prompt,
    }


def acceptance_single(cell: CellView) -> CheckResult:
    """Accepted counts of P/D equal, step for step, those of the single engine of the same method in this run."""
    name = "acceptance-single"
    single_id = f"single-{cell.method}"
    references = {}
    for prompt_id, o in cell.evidence.history.of(single_id).items():
        if o.error is None and o.final is not None and (steps := real_steps(o.final, handed_off=False)):
            references[prompt_id] = steps.accepted
    return _judge(cell, name, references, f"{single_id} of this run", moved_together=None)


def acceptance_baseline(cell: CellView) -> CheckResult:
    """Accepted counts equal the recorded ones of the single engine, step for step."""
    name = "acceptance-baseline"
    lookup = cell.evidence.baselines.get(cell.method)
    if lookup is None or lookup.baseline is None:
        reason = lookup.reason if lookup else f"the baseline of {cell.method} was not looked up"
        return conclude(name, cell.id, 0, [cell.finding(name, Verdict.UNKNOWN, "baseline", reason)])
    references = {r.prompt_id: r.accepted for r in lookup.baseline.rows}
    return _judge(cell, name, references, "the baseline", moved_together=_other_topology(cell))


def _other_topology(cell: CellView) -> dict[str, tuple[int, ...]]:
    """Steps of the same method in the other topology of this run: what tells DRIFT from REGRESSION."""
    other = "single" if cell.handed_off else "pd"
    out = {}
    for prompt_id, o in cell.evidence.history.of(f"{other}-{cell.method}").items():
        if o.error is None and o.final is not None and (steps := real_steps(o.final, other == "pd")):
            out[prompt_id] = steps.accepted
    return out


def _judge(
    cell: CellView,
    name: str,
    references: Mapping[str, Sequence[int]],
    against: str,
    moved_together: Mapping[str, tuple[int, ...]] | None,
) -> CheckResult:
    findings: list[Finding] = []
    ours: list[tuple[int, ...]] = []
    theirs: list[tuple[int, ...]] = []
    for prompt_id, o in cell.answered().items():
        leg = o.final
        steps = real_steps(leg, cell.handed_off) if leg else None
        if leg is None or steps is None:
            continue
        reference = references.get(prompt_id)
        if reference is None:
            findings.append(
                cell.finding(
                    name,
                    Verdict.UNKNOWN,
                    "baseline",
                    f"expected this prompt's accepted counts in {against}, found none",
                    o,
                )
            )
            continue
        ours.append(steps.accepted)
        theirs.append(tuple(reference))
        if not same_steps(leg, steps, reference):
            together = moved_together is not None and moved_together.get(prompt_id) == steps.accepted
            findings.append(_difference(cell, name, o, leg, steps, tuple(reference), against, together))
    k = cell.record.draft_tokens
    mine, reference_rates = pool(ours, k), pool(theirs, k)
    figures = {"ours": rates_dict(mine), "reference": rates_dict(reference_rates), "against": against}
    return conclude(name, cell.id, len(ours), findings, figures=figures)


def _difference(
    cell: CellView,
    name: str,
    o: Observation,
    leg: Leg,
    steps: Steps,
    reference: tuple[int, ...],
    against: str,
    together: bool,
) -> Finding:
    at = next(
        (i for i, (a, b) in enumerate(zip(steps.accepted, reference, strict=False)) if a != b),
        min(len(steps.accepted), len(reference)),
    )
    mean = _mean(steps.accepted), _mean(reference)
    more = mean[0] > mean[1]
    verdict, damage = _attribute(name, more, together)
    how = "the same mean in another order" if mean[0] == mean[1] else "more" if more else "fewer"
    return cell.finding(
        name,
        verdict,
        damage,
        f"expected the accepted drafts per step of {against} (mean {mean[1]:.3f} over {len(reference)} steps), found "
        f"{how} (mean {mean[0]:.3f} over {len(steps.accepted)} steps), from step {at} on"
        + ("; both topologies moved together" if together else ""),
        o,
        step=at,
        found=list(steps.accepted[at : at + _SHOWN]),
        expected=list(reference[at : at + _SHOWN]),
        found_mean=mean[0],
        expected_mean=mean[1],
        found_rates=rates_dict(pool([steps.accepted], cell.record.draft_tokens))["rates"],
        expected_rates=rates_dict(pool([reference], cell.record.draft_tokens))["rates"],
        padded_first_step=steps.padded,
        raw=list(leg.speculation.per_step_accepted[:_SHOWN]) if leg.speculation else [],
    )


def _attribute(name: str, more: bool, together: bool) -> tuple[Verdict, DamageClass]:
    """Verdict and class of a difference.

    Against the single engine of the same run any difference is wrong: both ran the same code. Against the baseline,
    more acceptance wants a new baseline, and less in both topologies alike is a change of the engine.
    """
    if name == "acceptance-single":
        return Verdict.REGRESSION, "sampler" if more else "drafter-kv"
    if more:
        return Verdict.IMPROVED, "engine-changed"
    if together:
        return Verdict.DRIFT, "engine-changed"
    return Verdict.REGRESSION, "drafter-kv"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
