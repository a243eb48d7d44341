"""Speculation: drafts happened, and each step accepted what the references accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.acceptance import Aligned, Rates, Steps, align, pool, real_steps, same_steps
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
        elif spec.num_drafted == 0 or not (steps := real_steps(leg)) or not steps.accepted:
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
    """Real verify steps of a view, by observation key."""
    out = {}
    for key, o in cell.answered().items():
        if o.final is not None and (steps := real_steps(o.final)) is not None:
            out[key] = steps
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
    single = cell.sibling("single")
    references = {key: s.accepted for key, s in cell_steps(single).items()} if single else {}
    return _judge(cell, "acceptance-single", references, f"single-{cell.method} of this run", moved_together=None)


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
    other = cell.sibling("single" if cell.handed_off else "pd")
    return {key: s.accepted for key, s in cell_steps(other).items()} if other else {}


def _judge(
    cell: CellView,
    name: str,
    references: Mapping[str, Sequence[int]],
    against: str,
    moved_together: Mapping[str, tuple[int, ...]] | None,
) -> CheckResult:
    """Compare each request with the reference of its key, or of its prompt."""
    findings: list[Finding] = []
    ours: list[tuple[int, ...]] = []
    theirs: list[tuple[int, ...]] = []
    for key, o in cell.answered().items():
        leg = o.final
        steps = real_steps(leg) if leg else None
        if leg is None or steps is None or leg.output_ids is None or len(leg.output_ids) < 2:
            continue
        reference = references.get(key, references.get(o.prompt_id))
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
        compared = Compared(leg, steps, tuple(reference), align(steps.accepted, reference, len(leg.output_ids)))
        if not _agrees(cell, compared):
            other = moved_together.get(key) if moved_together is not None else None
            findings.append(_difference(cell, name, o, compared, against, other == steps.accepted))
    k = cell.record.draft_tokens
    mine, reference_rates = pool(ours, k), pool(theirs, k)
    figures = {"ours": rates_dict(mine), "reference": rates_dict(reference_rates), "against": against}
    return conclude(name, cell.id, len(ours), findings, figures=figures)


class Compared(NamedTuple):
    """The steps of one request beside their reference."""

    leg: Leg
    steps: Steps
    reference: tuple[int, ...]
    aligned: Aligned


def _agrees(cell: CellView, c: Compared) -> bool:
    """Cold: equal step for step. In scenarios, whose requests may be cut short: equal wherever both begin a step. Under
    pressure a prompt is prefilled in other chunks than alone, and a resumed request takes one token from its prefill,
    which shifts all its steps: there the mean over the request must agree within a share."""
    if cell.cold:
        return same_steps(c.leg, c.steps, c.reference)
    share = cell.acceptance_slack
    if share:
        return (
            abs(_mean(c.steps.accepted) - _mean(c.reference)) <= share * _mean(c.reference) or len(c.steps.accepted) < 2
        )
    return not c.aligned.differing


def _difference(cell: CellView, name: str, o: Observation, c: Compared, against: str, together: bool) -> Finding:
    found, expected = c.steps.accepted, c.reference
    if cell.cold or cell.acceptance_slack:
        mean = _mean(found), _mean(expected)
        counted = f"mean {mean[1]:.3f} over {len(expected)} steps", f"mean {mean[0]:.3f} over {len(found)} steps"
    else:
        common = max(c.aligned.common, 1)
        mean = c.aligned.found / common, c.aligned.expected / common
        counted = f"{c.aligned.expected} over {c.aligned.common} steps", str(c.aligned.found)
    more = mean[0] > mean[1]
    verdict, damage = _attribute(name, more, together)
    how = "the same mean in another order" if mean[0] == mean[1] else "more" if more else "fewer"
    at = _first_step(c)
    return cell.finding(
        name,
        verdict,
        damage,
        f"expected the accepted drafts per step of {against} ({counted[0]}), found {how} ({counted[1]}), from step "
        f"{at} on" + ("; both topologies moved together" if together else ""),
        o,
        step=at,
        positions=list(c.aligned.differing),
        common_steps=c.aligned.common,
        found=list(found[at : at + _SHOWN]),
        expected=list(expected[at : at + _SHOWN]),
        found_mean=mean[0],
        expected_mean=mean[1],
        found_rates=rates_dict(pool([found], cell.record.draft_tokens))["rates"],
        expected_rates=rates_dict(pool([expected], cell.record.draft_tokens))["rates"],
        padded_first_step=c.steps.padded,
        raw=list(c.leg.speculation.per_step_accepted[:_SHOWN]) if c.leg.speculation else [],
    )


def _first_step(c: Compared) -> int:
    """Index of the first verify step that accepted something else than the reference did there."""
    pairs = zip(c.steps.accepted, c.reference, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(c.steps.accepted), len(c.reference)))


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
        # Without a hand-off it is the same: drafting or verification itself, not KV that was handed over.
        return Verdict.DRIFT, "sampler"
    return Verdict.REGRESSION, "drafter-kv"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
