"""Speculation: drafts happened, and each step accepted what the references accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.acceptance import (
    Aligned,
    Rates,
    RequestCounts,
    Steps,
    align,
    by_step,
    pool,
    pool_counts,
    real_steps,
    request_counts,
    same_steps,
)
from harness.baseline.summary import counts
from harness.checks.evidence import CellView
from harness.checks.night import cell_counts
from harness.decision import Change, Facts, decide
from harness.engine.environment import PER_REQUEST
from harness.findings import CheckResult, DamageClass, Finding, Verdict, conclude
from harness.history import Leg, Observation

_SHOWN = 12
_PER_REQUEST_FLAG = "--per-request-spec-decode-metrics"


def drafts_happened(cell: CellView) -> CheckResult:
    """Every request that could draft did, with the configured number of drafts; otherwise nothing was tested."""
    name = "drafts-happened"
    findings: list[Finding] = []
    judged = from_counters = 0
    for o in cell.answered().values():
        leg = o.final
        if leg is None or leg.output_ids is None or len(leg.output_ids) < 2:
            continue
        judged += 1
        spec = leg.speculation
        if spec is None:
            if request_counts(leg, cell.record.draft_tokens) is not None:
                from_counters += 1
                findings += _omitted(cell, name, o)
                continue
            findings.append(
                cell.finding(
                    name,
                    Verdict.UNKNOWN,
                    "nothing-tested",
                    "expected per-request acceptance metrics in the response, or growth of the engine's draft counters "
                    "while the request was alone on it, found neither: speculation was not tested",
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
    note = (
        f"{from_counters} requests by the engine's counters, steps since the hand-off unknown" if from_counters else ""
    )
    return conclude(name, cell.id, judged, findings, note=note, figures=_figures(cell))


def _omitted(cell: CellView, name: str, o: Observation) -> list[Finding]:
    """An engine that was started to report acceptance per request must do so: counters do not say which step differs.
    Versions that cannot are recorded as lacking it."""
    run = cell.evidence.history.run
    engine = cell.engine(cell.answering)
    if PER_REQUEST in run.lacking or engine is None or _PER_REQUEST_FLAG not in engine.argv:
        return []
    return [
        cell.finding(
            name,
            Verdict.UNKNOWN,
            "nothing-tested",
            f"expected acceptance figures in the response, which {_PER_REQUEST_FLAG} asks for, found none; the "
            "engine's counters alone do not say what each step accepted",
            o,
        )
    ]


def _figures(cell: CellView) -> dict[str, Any]:
    steps = cell_steps(cell)
    counted, _ = cell_counts(cell)
    return {
        **rates_dict(pool_counts(counted.values(), cell.record.draft_tokens)),
        "padded_first_steps": sum(s.padded for s in steps.values()),
        "by_step": [list(row) for row in by_step(s.accepted for s in steps.values())],
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
    spare = cell_counts(single)[0] if single else {}
    against = f"{cell.name.single} of this run"
    return _judge(cell, "acceptance-single", references, against, moved_together=None, spare=spare)


def acceptance_baseline(cell: CellView) -> CheckResult:
    """Accepted counts equal the recorded ones of the single engine, step for step."""
    name = "acceptance-baseline"
    lookup = cell.evidence.baselines.get(cell.lineup)
    if lookup is None or lookup.baseline is None:
        reason = lookup.reason if lookup else f"the baseline of {cell.lineup} was not looked up"
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
    spare: Mapping[str, RequestCounts] | None = None,
) -> CheckResult:
    """Compare each request with the reference of its key, or of its prompt; ``spare`` are totals of references whose
    steps are not known."""
    findings: list[Finding] = []
    ours: list[tuple[int, ...]] = []
    theirs: list[tuple[int, ...]] = []
    by_totals: list[RequestCounts] = []
    totals, recognised = cell_counts(cell)
    k = cell.record.draft_tokens
    share = cell.acceptance_slack
    spare = spare or {}
    for key, o in cell.answered().items():
        leg = o.final
        steps = real_steps(leg) if leg else None
        if leg is None or leg.output_ids is None or len(leg.output_ids) < 2:
            continue
        reference = references.get(key, references.get(o.prompt_id))
        if steps is None:
            counted, wanted = totals.get(key), _reference_totals(reference, spare.get(key), k)
            if wanted is None and counted is not None:
                findings.append(_no_reference(cell, name, o, against))
            elif counted is not None and wanted is not None and not _cut_short(cell, o):
                by_totals.append(counted)
                findings += _totals(cell, name, o, counted, wanted, against, recognised)
            continue
        if reference is None:
            findings.append(_no_reference(cell, name, o, against))
            continue
        ours.append(steps.accepted)
        theirs.append(tuple(reference))
        compared = Compared(leg, steps, tuple(reference), align(steps.accepted, reference, len(leg.output_ids)))
        if not _agrees(cell, compared, share):
            other = moved_together.get(key) if moved_together is not None else None
            findings.append(_difference(cell, name, o, compared, against, other == steps.accepted))
    mine, reference_rates = pool(ours, k), pool(theirs, k)
    if by_totals:
        mine = pool_counts(by_totals, k)
    figures = {"ours": rates_dict(mine), "reference": rates_dict(reference_rates), "against": against}
    return conclude(
        name, cell.id, len(ours) + len(by_totals), findings, _totals_note(by_totals, recognised), figures=figures
    )


def _no_reference(cell: CellView, name: str, o: Observation, against: str) -> Finding:
    return cell.finding(
        name, Verdict.UNKNOWN, "baseline", f"expected this prompt's accepted counts in {against}, found none", o
    )


def _reference_totals(reference: Sequence[int] | None, spare: RequestCounts | None, k: int) -> RequestCounts | None:
    if reference is not None:
        at, steps = counts(reference, k)
        return RequestCounts(steps, at, "per-request")
    return spare


def _cut_short(cell: CellView, o: Observation) -> bool:
    """Whether the request asked for fewer tokens than the reference has, so that totals cannot be equal."""
    most = cell.evidence.history.run.profile.get("workload", {}).get("max_tokens")
    return o.max_tokens is not None and most is not None and o.max_tokens < int(most)


def _totals_note(by_totals: Sequence[RequestCounts], recognised: bool) -> str:
    if not by_totals:
        return ""
    return (
        f"{len(by_totals)} requests by totals from the engine's counters at concurrency 1, because this version "
        "reports no acceptance per request: which step differs is not known"
    ) + ("; a padded first step was recognised in all of them" if recognised else "")


def _totals(
    cell: CellView,
    name: str,
    o: Observation,
    counted: RequestCounts,
    wanted: RequestCounts,
    against: str,
    recognised: bool,
) -> list[Finding]:
    """Compare a request of which only totals are known: steps, and steps that accepted the draft at each position."""
    at, steps = wanted.accepted_at, wanted.steps
    if (counted.steps, counted.accepted_at) == (steps, at):
        return []
    # A hand-off whose padding could not be recognised may have one step more that accepted nothing.
    if (
        cell.handed_off
        and not recognised
        and counted.surplus >= 1
        and (counted.steps - 1, counted.accepted_at) == (steps, at)
    ):
        return []
    more = sum(counted.accepted_at) / max(counted.steps, 1) > sum(at) / max(steps, 1)
    verdict, damage = _attribute(name, more, together=False)
    return [
        cell.finding(
            name,
            verdict,
            damage,
            f"expected {steps} steps accepting {list(at)} drafts per position as {against}, found {counted.steps} "
            f"accepting {list(counted.accepted_at)}; from the engine's counters, so which step differs is not known",
            o,
            found_totals=[counted.steps, *counted.accepted_at],
            expected_totals=[steps, *at],
        )
    ]


class Compared(NamedTuple):
    """The steps of one request beside their reference."""

    leg: Leg
    steps: Steps
    reference: tuple[int, ...]
    aligned: Aligned


def _agrees(cell: CellView, c: Compared, share: float) -> bool:
    """Cold: equal step for step. In scenarios, whose requests may be cut short: equal wherever both begin a step. Under
    pressure a prompt is prefilled in other chunks than alone, and a resumed request takes one token from its prefill,
    which shifts all its steps: there the mean over the request must agree within a share. Cold prompts under load may
    have one step more or less besides: of seven steps that is 14 %."""
    if share:
        return (
            abs(_mean(c.steps.accepted) - _mean(c.reference)) <= share * _mean(c.reference)
            or len(c.steps.accepted) < 2
            or (cell.cold and abs(len(c.steps.accepted) - len(c.reference)) <= 1)
        )
    if cell.cold:
        return same_steps(c.leg, c.steps, c.reference)
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
    tonight = name == "acceptance-single"
    change: Change = "rise" if more else "drop"
    verdict, _ = decide(Facts(change=change, against="tonight" if tonight else "baseline", together=together))
    if verdict is Verdict.IMPROVED:
        return verdict, "engine-changed"
    # Both topologies alike: drafting or verification itself, not KV that was handed over.
    return verdict, "sampler" if more or verdict is Verdict.DRIFT else "drafter-kv"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
