"""Checks of speculation: drafts happened, and each step accepted as many as in the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from harness.history.acceptance import (
    Aligned,
    Placed,
    Rates,
    RequestCounts,
    Steps,
    align,
    begun_before,
    by_step,
    counts_of_steps,
    may_be_padded,
    pool,
    pool_counts,
    readings,
    real_steps,
    request_counts,
    same_but_for_undrafted,
    same_steps,
)
from harness.history.engine_interfaces import PER_REQUEST, PER_REQUEST_FLAG
from harness.history.records import COLD, Leg, Observation, Speculation
from harness.history.verdict import Verdict
from harness.judging.checks.attached import why_in_total
from harness.judging.decision import Against, Change, Facts, decide
from harness.judging.evidence import CellView
from harness.judging.figures import AcceptanceFigures, DraftFigures, RatesFigures, StepsDifference, TotalsDifference
from harness.judging.findings import CheckResult, DamageClass, Finding, conclude
from harness.observed import acceptance
from harness.observed.cell import Answer
from harness.observed.drafts_end import DraftsEnd, drafts_end
from harness.profiles.scenarios import PRESSURE_SLACK, SAMPLED
from harness.util.text import counted

_SHOWN = 12
"""Steps that a finding shows."""
_NONE: Mapping[str, Any] = {}
_ROUNDED = "within 10 %, not draft by draft: the baseline is of kernels that round 16-bit numbers otherwise"


def may_draft(cell: CellView) -> bool:
    """Return whether an answer has drafts that no grammar took away, or there is none."""
    found = cell.answered().values()
    return not found or any(not o.drafts_filtered for o in found)


def drafts_happened(cell: CellView) -> CheckResult:
    """Check that every request that could draft did; otherwise speculation was not tested."""
    name = "drafts-happened"
    findings: list[Finding] = []
    judged = from_counters = nothing_found = 0
    up_to, known = cell.traits.up_to, cell.steps()
    for key, (o, leg, output) in cell.answers().items():
        if len(output) < 2 or o.drafts_filtered or (leg.ended_by_text and o.concurrent > 1):
            # What is not told of an answer that a string ended, counters tell of requests that are alone.
            continue
        spec = leg.speculation
        if up_to and not _drafted(leg):
            # It may have found nothing to draft; that all requests did is the absence of evidence.
            nothing_found += 1
            continue
        judged += 1
        if spec is None:
            if request_counts(leg, cell.record.draft_tokens) is not None:
                from_counters += 1
                # vLLM tells none of a request with several answers, which it cannot say them of.
                findings += [] if leg.ended_by_text or leg.siblings else _omitted(cell, name, o)
                continue
            problem = (
                "expected per-request acceptance metrics in the response, or growth of the engine's draft counters "
                "while the request was alone on it, found neither: speculation was not tested"
            )
        elif spec.num_drafted == 0 or not (steps := known.get(key)) or not steps.accepted:
            problem = "expected draft steps for this request, found none: speculation was not tested"
        elif len(spec.per_step_drafted) != len(spec.per_step_accepted):
            problem = "expected drafted and accepted counts for every step, found lists of different length"
        elif few := _fewer(cell, o, spec):
            problem = (
                f"expected {'1 to ' if up_to else ''}{cell.record.draft_tokens} drafts in every step, found {few[0]} "
                f"in step {few[1]}: the engine drafts {'otherwise' if up_to else 'fewer'} than it was started with, so "
                "speculation was not tested as configured"
            )
        else:
            continue
        findings.append(cell.untested(name, problem, o))
    if cell.cold and len(found := _paddings(cell)) > 1:
        findings.append(_mixed(cell, name, found))
    if cell.cold and (end := drafts_end(cell)) is not None:
        findings.append(_ends(cell, name, end))
    may = "may draft none for in a crowd" if cell.traits.by_crowd else "may find none for"
    undrafted = sum(s.unaccounted for s in cell.steps().values()) if cell.traits.by_crowd else 0
    notes = [
        f"{from_counters} requests by the engine's counters, steps since the hand-off unknown" if from_counters else "",
        f"{nothing_found} requests without a draft, which {cell.name.method} {may}" if nothing_found else "",
        f"at least {counted(undrafted, 'step')} without drafts, by the tokens" if undrafted else "",
    ]
    return conclude(name, cell.id, judged, findings, note="; ".join(filter(None, notes)), figures=_figures(cell))


def _drafted(leg: Leg) -> bool:
    """Return whether a request had a draft step, without a padded one."""
    steps = real_steps(leg)
    return bool(steps.accepted) if steps is not None else bool(leg.counters.get("drafts"))


def _fewer(cell: CellView, o: Observation, spec: Speculation) -> tuple[int, int] | None:
    """Return the number of drafts and the number of the first step with another number than configured, or None.

    The last step may be cut short by the end of the output, and any step by the end of the context. Beside other
    requests the engine may leave out drafts for which a step has no room, which it has for cold ones.
    """
    k, context = cell.record.draft_tokens, cell.settings.context_tokens
    if o.concurrent > 1 and not cell.cold:
        return None
    if spec.per_step_drafted.count(k) == len(spec.per_step_drafted) and k:
        return None
    length = len(o.sent_ids) + 1
    for number, (drafted, accepted) in enumerate(zip(spec.per_step_drafted, spec.per_step_accepted, strict=True), 1):
        full = context is not None and length + k >= context
        if cell.traits.up_to:
            if not 1 <= drafted <= k:
                return drafted, number
        elif drafted != k and number < len(spec.per_step_drafted) and not full:
            return drafted, number
        length += accepted + 1
    return None


def _paddings(cell: CellView) -> Counter[bool]:
    """Count, of the hand-offs whose steps alone decide it, those with a padded first step and those without.

    Left out are requests whose prompt D computed by itself, after a transfer that failed, and requests beside others,
    of which one that is preempted at once does so, too; and those that are not padded because of their length. vLLM
    pads where one token of the prompt is left.
    """
    answers = cell.answers()
    return Counter(
        s.padded for key, s in cell.steps().items() if s.accepted and s.certain and _paddable(cell, answers[key])
    )


def _paddable(cell: CellView, answer: Answer) -> bool:
    o, leg, _ = answer
    alone = o.route == "cell" and o.concurrent == 1 and leg.role == "decode" and not _too_long(cell, o)
    return alone and leg.counters.get("prompt_tokens_local_compute", 0) <= 1


def _too_long(cell: CellView, o: Observation) -> bool:
    """Return whether the padding behind a prompt would cross a block of recurrent state, where vLLM leaves it out."""
    last, size = len(o.sent_ids) - 1, cell.record.block_size
    return cell.record.recurrent and (last + cell.record.draft_tokens) // size > last // size


def _padded(cell: CellView, o: Observation, paddings: Counter[bool]) -> bool | None:
    """Return whether a first step that may be padded is, by the cell's other hand-offs; None if they do not tell."""
    return paddings[True] > 0 and not _too_long(cell, o) if len(paddings) == 1 else None


def _mixed(cell: CellView, name: str, found: Counter[bool]) -> Finding:
    """Return the finding that an engine pads the first step after some hand-offs only, and not by their length."""
    message = (
        f"the first step is padded after {found[True]} hand-offs and not after {found[False]}: an empty first step "
        "cannot be told from padding, so lost drafts may look like it"
    )
    return cell.untested(name, message)


def _ends(cell: CellView, name: str, end: DraftsEnd) -> Finding:
    """Return the finding that speculation was not tested beyond a length."""
    message = (
        f"{cell.name.method} {end.words}, so speculation was not tested there. vLLM drafts nothing beyond the "
        "drafter's context; compare max_position_embeddings of its config.json, and max_model_len of "
        "speculative_config, with engine.max_model_len (`harness doctor`)"
    )
    return cell.untested(name, message)


def _omitted(cell: CellView, name: str, o: Observation) -> list[Finding]:
    """Return a finding if an engine that was asked to report acceptance per request did not.

    Counters do not show which step differs. Versions without the feature are recorded as lacking it.
    """
    run = cell.history.run
    engine = cell.engine(cell.answering)
    if PER_REQUEST in run.lacking or engine is None or PER_REQUEST_FLAG not in engine.argv:
        return []
    message = (
        f"expected acceptance figures in the response, which {PER_REQUEST_FLAG} asks for, found none; the engine's "
        "counters alone do not say what each step accepted"
    )
    return [cell.untested(name, message, o)]


def _figures(cell: CellView) -> DraftFigures:
    steps = cell.steps()
    return DraftFigures(
        **dict(rates_figures(pool_counts(cell.counts.by_key.values(), cell.record.draft_tokens))),
        padded_first_steps=sum(s.padded for s in steps.values()),
        by_step=tuple(by_step(s.accepted for s in steps.values())),
    )


def rates_figures(rates: Rates) -> RatesFigures:
    """Convert pooled rates to figures for a report."""
    return RatesFigures(
        requests=rates.requests,
        steps=rates.steps,
        accepted_at=rates.accepted_at,
        rates=_rounded(rates),
        acceptance_length_pooled=rates.length_pooled,
        acceptance_length_per_prompt=rates.length_per_prompt,
    )


def _rounded(rates: Rates) -> tuple[float, ...]:
    return tuple(round(r, 6) for r in rates.rates)


def has_single(cell: CellView) -> bool:
    """Return whether a P/D cell has the single engine of its method, cold or for requests with a grammar or another
    parameter, whose drafts no baseline has."""
    return cell.has_twin and (cell.cold or any(map(_drafted_otherwise, cell.answered().values())))


def _drafted_otherwise(o: Observation) -> bool:
    """Return whether no baseline has the drafts of a request, but the single engine with the same parameter."""
    return o.drafts_filtered or (o.answered_otherwise and o.feature not in SAMPLED)


def acceptance_single(cell: CellView) -> CheckResult:
    """Check that P/D accepts, step for step, as many drafts as the single engine of the same method in this run."""
    single = cell.sibling("single")
    if not cell.cold and any(map(_drafted_otherwise, cell.answered().values())):
        return _with_a_parameter(cell, single.answers() if single else {})
    references = single.steps() if single else {}
    totals = single.counts.by_key if single else {}
    against = f"{cell.name.single} of this run"
    return _judge(cell, "acceptance-single", references, against, reference_totals=totals)


def _with_a_parameter(cell: CellView, twins: Mapping[str, Answer]) -> CheckResult:
    """Compare the answers with a parameter, which leaves the same drafts to both."""
    name = "acceptance-single"
    findings: list[Finding] = []
    judged = 0
    slack = acceptance.acceptance_slack(cell)
    for key, (o, leg, _) in cell.answers().items():
        if not _drafted_otherwise(o) or leg.ended_by_text:
            continue
        twin = twins.get(key)
        ours, theirs = (_accepted_readings(one) for one in (leg, twin.leg if twin is not None else None))
        if not theirs:
            findings.append(_no_reference(cell, name, o, f"{cell.name.single} of this run"))
            continue
        judged += 1
        pairs = [(mine, other) for mine in ours for other in theirs]
        if not any(mine == other or (slack and _close(mine, other, slack)) for mine, other in pairs):
            more = bool(ours) and sum(ours[0]) > sum(theirs[0])
            verdict, damage = _attribute(cell, name, more, together=False)
            message = (
                f"expected the accepted drafts of {cell.name.single} of this run with the same {_named(o)}, "
                f"{list(theirs[-1][:_SHOWN])}, found {list(ours[-1][:_SHOWN]) if ours else 'none'}"
            )
            findings.append(cell.finding(name, verdict, damage, message, o))
    return conclude(name, cell.id, judged, findings)


def _close(ours: Sequence[int], theirs: Sequence[int], slack: float) -> bool:
    """Return whether two answers that were prefilled in other chunks accepted as many drafts: on average within the
    slack, or in all but one step."""
    apart = abs(_mean(ours) - _mean(theirs)) <= slack * _mean(theirs)
    return apart or min(len(ours), len(theirs)) < 2 or abs(len(ours) - len(theirs)) <= 1


def _named(o: Observation) -> str:
    return "grammar" if o.drafts_filtered else "parameter"


def _accepted_readings(leg: Leg | None) -> tuple[tuple[int, ...], ...]:
    """Return the accepted drafts of each step, and the same without a first step that may be padded: where a parameter
    leaves steps without drafts, the counts do not tell. Nothing without acceptance metrics."""
    steps = real_steps(leg) if leg is not None else None
    if leg is None or leg.speculation is None or steps is None:
        return ()
    if steps.padded:
        return readings(leg, steps)
    every = leg.speculation.per_step_accepted
    return (every, every[1:]) if every[:1] == (0,) and may_be_padded(leg) else (every,)


def acceptance_baseline(cell: CellView) -> CheckResult:
    """Check that accepted drafts equal, step for step, those recorded in the single engine's baseline."""
    name = "acceptance-baseline"
    baseline = cell.baseline_or_reason(cell.lineup)
    if isinstance(baseline, str):
        return conclude(name, cell.id, 0, [cell.no_baseline(name, baseline)])
    references = {r.prompt_id: r.steps for r in baseline.rows}
    # The other topology tells DRIFT from REGRESSION.
    other = cell.sibling("single" if cell.handed_off else "pd")
    rounded = cell.of_other_kernels(cell.lineup)
    return _judge(
        cell, name, references, "the baseline", moved_together=other.steps() if other else {}, rounded=rounded
    )


def _judge(
    cell: CellView,
    name: str,
    references: Mapping[str, Steps],
    against: str,
    moved_together: Mapping[str, Steps] = _NONE,
    reference_totals: Mapping[str, RequestCounts] = _NONE,
    rounded: bool = False,
) -> CheckResult:
    """Compare each request with the reference of its key, or else of its prompt.

    ``moved_together`` holds the steps of the other topology. ``reference_totals`` is used for references whose steps
    are unknown. ``rounded`` references are of other kernels, whose rounding turns a draft now and then: they are
    compared as where steps are divided otherwise.
    """
    findings: list[Finding] = []
    ours: list[RequestCounts] = []
    theirs: list[RequestCounts] = []
    by_totals: list[RequestCounts] = []
    totals, recognised = cell.counts
    k = cell.record.draft_tokens
    slack = _slack(cell, rounded)
    paddings = _paddings_of_hand_offs(cell)
    alone: bool | None = None
    reported = cell.steps()
    for key, (o, leg, output) in cell.answers().items():
        if len(output) < 2 or o.drafts_filtered or o.answered_otherwise:
            continue
        steps = reported.get(key)
        reference = references.get(key, references.get(o.prompt_id))
        if steps is None:
            known = counts_of_steps(reference.accepted, reference.drafted, k) if reference is not None else None
            totals_of, wanted = totals.get(key), known or reference_totals.get(key)
            if wanted is None and totals_of is not None:
                findings.append(_no_reference(cell, name, o, against))
            elif totals_of is not None and wanted is not None and not _shortened(cell, o):
                by_totals.append(totals_of)
                theirs.append(wanted)
                close = rounded and _close_totals(totals_of, wanted)
                findings += [] if close else _totals(cell, name, o, leg, totals_of, wanted, against, recognised)
            continue
        if reference is None:
            findings.append(_no_reference(cell, name, o, against))
            continue
        ours.append(totals[key])
        theirs.append(counts_of_steps(reference.accepted, reference.drafted, k))
        compared = _compared(cell, o, output, steps, reference)
        if not _agrees(cell, compared, slack, _padded(cell, o, paddings)):
            other = moved_together.get(key)
            together = other is not None and (other.accepted, other.drafted) == (steps.accepted, steps.drafted)
            alone = alone if alone is not None else _only_in_this_state(cell, references, rounded)
            findings.append(_difference(cell, name, o, compared, against, together, alone))
    mine, reference_rates = pool_counts([*ours, *by_totals], k), pool_counts(theirs, k)
    figures = AcceptanceFigures(ours=rates_figures(mine), reference=rates_figures(reference_rates), against=against)
    return conclude(
        name,
        cell.id,
        len(ours) + len(by_totals),
        findings,
        "; ".join(filter(None, (_totals_note(cell, by_totals, recognised), _ROUNDED if rounded else ""))),
        figures=figures,
    )


def _close_totals(ours: RequestCounts, wanted: RequestCounts) -> bool:
    """Return whether other kernels may have rounded the one to the other: as many drafts a step within the slack, or a
    step more or less."""
    mine, theirs = (sum(c.accepted_at) / max(c.steps, 1) for c in (ours, wanted))
    return abs(mine - theirs) <= PRESSURE_SLACK * theirs or abs(ours.steps - wanted.steps) <= 1


def _paddings_of_hand_offs(cell: CellView) -> Counter[bool]:
    return _paddings(cell) if cell.cold and cell.handed_off else Counter()


def _slack(cell: CellView, rounded: bool) -> float:
    return max(acceptance.acceptance_slack(cell), PRESSURE_SLACK if rounded else 0.0)


def _only_in_this_state(cell: CellView, references: Mapping[str, Steps], rounded: bool) -> bool:
    """Return whether the cell's cold answers accepted as many drafts as their references, so that it is the state of
    this scenario that changes results, in every topology, and not the engine."""
    if cell.cold:
        return False
    cold = replace(cell, scenario=COLD)
    paddings = _paddings_of_hand_offs(cold)
    agreed = []
    for o, leg, output in cold.answers().values():
        steps, reference = real_steps(leg), references.get(o.prompt_id)
        if steps is not None and reference is not None:
            compared = _compared(cold, o, output, steps, reference)
            agreed.append(_agrees(cold, compared, _slack(cold, rounded), _padded(cold, o, paddings)))
    return bool(agreed) and all(agreed)


def _no_reference(cell: CellView, name: str, o: Observation, against: str) -> Finding:
    return cell.no_baseline(name, f"expected this prompt's accepted counts in {against}, found none", o)


def _shortened(cell: CellView, o: Observation) -> bool:
    """Return whether the request asked for fewer tokens than its reference has, so that totals cannot be equal."""
    most = cell.history.run.asked_for.max_tokens
    return o.most_tokens is not None and most is not None and o.most_tokens < most


def _totals_note(cell: CellView, by_totals: Sequence[RequestCounts], recognised: bool) -> str:
    if not by_totals:
        return ""
    return (
        f"acceptance of {counted(len(by_totals), 'request')} compared in total, by the engine's counters at "
        f"concurrency 1, not step by step: {why_in_total(cell)}"
    ) + ("; a padded first step was recognised in all of them" if recognised else "")


def _totals(
    cell: CellView,
    name: str,
    o: Observation,
    leg: Leg,
    counted: RequestCounts,
    wanted: RequestCounts,
    against: str,
    recognised: bool,
) -> list[Finding]:
    """Compare a request by totals: the number of steps, and of steps that accepted the draft at each position."""
    at, steps = wanted.accepted_at, wanted.steps
    if (counted.steps, counted.accepted_at) == (steps, at):
        return []
    # An unrecognised padded first step shows as one extra step that accepted nothing. It leaves a surplus, unless the
    # answer fills the context, where a last step without drafts may be missing.
    if (
        cell.may_pad
        and not recognised
        and (counted.surplus >= (0 if cell.fills_context(o, leg) else 1) or cell.traits.up_to)
        and (counted.steps - 1, counted.accepted_at) == (steps, at)
    ):
        return []
    more = sum(counted.accepted_at) / max(counted.steps, 1) > sum(at) / max(steps, 1)
    verdict, damage = _attribute(cell, name, more, together=False)
    message = (
        f"expected {steps} steps accepting {list(at)} drafts per position as {against}, found {counted.steps} "
        f"accepting {list(counted.accepted_at)}; from the engine's counters, so which step differs is not known"
    )
    difference = TotalsDifference(found_totals=(counted.steps, *counted.accepted_at), expected_totals=(steps, *at))
    return [cell.finding(name, verdict, damage, message, o, difference)]


class Compared(NamedTuple):
    """The verify steps of one request and of its reference."""

    leg: Leg
    steps: Steps
    reference: tuple[int, ...]
    aligned: Aligned
    drafted: tuple[int, ...] | None
    """Drafts of the reference's steps, for a method that drafts up to k."""
    tokens: int
    """Number of output tokens."""
    preemptions: int
    """Preemptions on the answering engine while the request was on it, of this request or of those beside it."""
    by_crowd: bool = False
    """Whether how many a step drafts depends on the requests beside it, so that only ``placed`` tells anything."""
    placed: Placed | None = None
    """Then, the steps at the output positions where they may have begun; None if they cannot make the answer."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """The reference as far as the request went, which may have asked for fewer tokens."""
        if self.up_to:
            return self.reference[: len(self.steps.accepted)] if self.cut else self.reference
        return self.reference[: self.aligned.begun]

    @property
    def up_to(self) -> bool:
        """Whether steps without drafts are missing in both lists, so that the steps' positions are not known."""
        return self.steps.drafted is not None

    @property
    def cut(self) -> bool:
        """Whether the answer ended at the number of tokens that was asked for, possibly before the reference's."""
        return self.leg.finish_reason == "length"

    @property
    def same_drafts(self) -> bool:
        """Whether each step drafted as many tokens as the reference's, as far as both are known."""
        if self.drafted is None or self.leg.speculation is None or not self.up_to:
            return True
        ours = (self.steps.drafted, self.leg.speculation.per_step_drafted)
        return any(found == self.drafted[: len(found or ()) if self.cut else None] for found in ours)


def _compared(cell: CellView, o: Observation, output_ids: Sequence[int], steps: Steps, reference: Steps) -> Compared:
    """Return the steps to compare: those that begin where the context has room for k drafts."""
    leg = o.final
    assert leg is not None
    if cell.settings.context_tokens is not None and steps.drafted is None:
        room = cell.settings.context_tokens - len(o.sent_ids) - cell.record.draft_tokens
        if room < len(output_ids):
            steps, reference = (s._replace(accepted=begun_before(s.accepted, room)) for s in (steps, reference))
    aligned = align(steps.accepted, reference.accepted, len(output_ids))
    found = Compared(leg, steps, reference.accepted, aligned, reference.drafted, len(output_ids), o.preemptions(leg))
    if not acceptance.drafts_by_crowd(cell, o, reference):
        return found
    return found._replace(by_crowd=True, placed=acceptance.placed_steps(cell, o, steps, reference))


_FEW_STEPS = 2
"""So few steps within the slack, and one more or less is beyond it as soon as drafts are rarely accepted."""


def _agrees(cell: CellView, c: Compared, slack: float, padded: bool | None) -> bool:
    """Return whether a request accepted as many drafts as its reference.

    Cold prompts must be equal step for step, where a first step that may be padded is read as one that is or is not
    (``padded``; None: either); other scenarios, where requests may be shorter, wherever both begin a
    step. Under pressure a prompt is chunked differently, and a resumed request takes one token from its prefill, which
    shifts all later steps: there the mean must agree within ``slack``, or all steps but those of the preemptions that
    the engine counted. Other requests beside others, and short ones, in which one step exceeds the slack, may also
    differ by one step. Where a crowd makes steps draft fewer tokens, or none, those count that begin where the
    reference's do, cut to as many drafts.
    """
    if c.by_crowd:
        if c.placed is None:
            return False
        aligned = c.placed.aligned
        return not aligned.differing or abs(aligned.found - aligned.expected) <= slack * aligned.expected
    if (
        slack
        and not c.up_to
        and any(same_but_for_undrafted(r, c.reference, c.tokens, c.preemptions) for r in _readings_of_preempted(c))
    ):
        return True
    if slack:
        config = cell.config
        may_shift = config is None or config.steps_may_move or len(c.wanted) * slack < _FEW_STEPS
        return (
            abs(_mean(c.steps.accepted) - _mean(c.wanted)) <= slack * _mean(c.wanted)
            or len(c.steps.accepted) < 2
            or (may_shift and abs(len(c.steps.accepted) - len(c.wanted)) <= 1)
        )
    if not c.same_drafts:
        return False
    if cell.cold:
        if padded is None or c.steps.certain or c.leg.speculation is None:
            return same_steps(c.leg, c.steps, c.reference)
        return (c.steps.accepted if padded else c.leg.speculation.per_step_accepted) == c.reference
    if c.up_to and c.leg.speculation is not None:
        return any(r == (c.reference[: len(r)] if c.cut else c.reference) for r in readings(c.leg, c.steps))
    return not c.aligned.differing


def _readings_of_preempted(c: Compared) -> Iterator[tuple[int, ...]]:
    """Yield the steps, and once more without a first one that may be padded: what the steps do not account for tells
    nothing of it where some of the tokens came from prefills."""
    yield c.steps.accepted
    handed_off = c.leg.role == "decode" and c.leg.speculation is not None and c.leg.speculation.may_pad
    if handed_off and c.preemptions and not c.steps.padded and c.steps.accepted[:1] == (0,):
        yield c.steps.accepted[1:]


class _Shown(NamedTuple):
    """Accepted drafts per step that a finding shows beside each other, from the step that differs on."""

    at: int
    found: tuple[int, ...]
    expected: tuple[int, ...]
    drafted: tuple[Sequence[int] | None, Sequence[int] | None]
    """How many drafts the steps had; None where the engine does not tell."""


def _shown(cell: CellView, c: Compared) -> _Shown:
    if c.placed is None:
        expected = c.reference if cell.cold else c.wanted
        drafted = c.steps.drafted, c.drafted and c.drafted[: len(expected)]
        return _Shown(_first_step(c), c.steps.accepted, expected, drafted)
    # Only the steps that the reference tells something about, and of its drafts as many as they had.
    told = [i for i, e in enumerate(c.placed.expected) if e is not None]
    found, expected = (tuple(v[i] or 0 for i in told) for v in (c.steps.accepted, c.placed.expected))
    at = next((i for i, (a, e) in enumerate(zip(found, expected, strict=True)) if a != e), 0)
    return _Shown(at, found, expected, (c.steps.drafted and tuple(c.steps.drafted[i] for i in told),) * 2)


def _means(cell: CellView, c: Compared, shown: _Shown) -> tuple[tuple[float, float], tuple[str, str]]:
    """Return the mean found and the expected one, and what is said of each: of all steps, or of those that begin at
    the same output tokens."""
    if cell.cold or acceptance.acceptance_slack(cell) or c.up_to:
        means = _mean(shown.found), _mean(shown.expected)
        of = zip(means, (shown.found, shown.expected), strict=True)
        found, expected = (f"mean {mean:.3f} over {counted(len(steps), 'step')}" for mean, steps in of)
        return means, (found, expected)
    common = max(c.aligned.common, 1)
    said = str(c.aligned.found), f"{c.aligned.expected} over {counted(c.aligned.common, 'step')}"
    return (c.aligned.found / common, c.aligned.expected / common), said


def _difference(
    cell: CellView, name: str, o: Observation, c: Compared, against: str, together: bool, alone: bool
) -> Finding:
    """Return the finding on a request; ``alone`` says that the cell's cold answers agree with their references."""
    shown = _shown(cell, c)
    (mean, expected_mean), (said, expected_said) = _means(cell, c, shown)
    how_compared = ", where they begin with the reference's and cut to as many drafts" if c.placed is not None else ""
    more = mean > expected_mean
    verdict, damage = _attribute(cell, name, more, together, alone)
    how = "the same mean in another order" if mean == expected_mean else "more" if more else "fewer"
    ended = o.route == "cell" and c.leg.finish_reason == "stop"
    aligned = c.placed.aligned if c.placed is not None else c.aligned
    part = slice(shown.at, shown.at + _SHOWN)
    found_rates, expected_rates = (
        _rounded(pool([steps], cell.record.draft_tokens, [drafted]))
        for steps, drafted in zip((shown.found, shown.expected), shown.drafted, strict=True)
    )
    return cell.finding(
        name,
        verdict,
        damage,
        f"expected the accepted drafts per step of {against} ({expected_said}), found {how} ({said}), from step "
        f"{shown.at} on{how_compared}"
        + ("; both topologies moved together" if together else "")
        + ("; the cold answers of these engines are as recorded, so this state changes results" if alone else ""),
        o,
        StepsDifference(
            step=shown.at,
            positions=aligned.differing,
            common_steps=aligned.common,
            found=shown.found[part],
            expected=shown.expected[part],
            found_mean=mean,
            expected_mean=expected_mean,
            found_rates=found_rates,
            expected_rates=expected_rates,
            padded_first_step=c.steps.padded,
            last_alone=ended and 0 < shown.at == len(shown.found) - 1 == len(shown.expected) - 1,
            raw=c.leg.speculation.per_step_accepted[:_SHOWN] if c.leg.speculation else (),
        ),
    )


def _first_step(c: Compared) -> int:
    """Return the index of the first verify step whose accepted count differs from the reference."""
    pairs = zip(c.steps.accepted, c.reference, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(c.steps.accepted), len(c.reference)))


def _attribute(
    cell: CellView, name: str, more: bool, together: bool, alone: bool = False
) -> tuple[Verdict, DamageClass]:
    """Return the verdict and damage class of a difference.

    Against the single engine of the same run any difference is wrong, since both ran the same code, and so is one in a
    scenario alone, since the same engines answer cold prompts as recorded (``alone``). Otherwise, against the
    baseline, a rise calls for a new baseline, and a drop in both topologies alike means that the engine changed.
    """
    change: Change = "rise" if more else "drop"
    against: Against = "this run" if alone or name == "acceptance-single" else cell.against(cell.lineup)
    verdict, _ = decide(Facts(change=change, against=against, together=together))
    if verdict is Verdict.IMPROVED:
        return verdict, "engine-changed"
    # If both topologies moved alike, drafting or verification changed, not the KV that was handed over; and a method
    # that drafts without a model has none.
    without_kv = more or verdict is Verdict.DRIFT or (together and against == "other engines")
    without_kv |= cell.traits.drafter == "none"
    return verdict, "sampler" if without_kv else "drafter-kv"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
