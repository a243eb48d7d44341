"""Checks of output tokens, against the no-speculation single engine of the same run and against the baseline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from harness.history.records import Leg, Observation, Sibling
from harness.history.token_ids import Divergence, common_prefix, compare
from harness.judging.decision import DIFFERS, Facts, decide
from harness.judging.evidence import CellView
from harness.judging.figures import OfEngine, TokenDifference
from harness.judging.findings import CheckResult, DamageClass, Finding, conclude
from harness.judging.near_ties import near_tie_nats, parting, rounding_nats
from harness.judging.rounding import allowed
from harness.observed.cell import Answer
from harness.profiles.scenarios import SAMPLED, stop_at

Ids = tuple[int, ...]


def difference(at: Divergence, ours: tuple[int, ...], reference: tuple[int, ...]) -> TokenDifference:
    """Return the tokens around the first difference of an answer from its reference."""
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


def in_words(at: Divergence, ours: tuple[int, ...], reference: tuple[int, ...], against: str) -> str:
    """Return the same as a sentence; ``against`` says whose tokens the reference is."""
    found = ours[at.position] if at.position < len(ours) else "the end of the output"
    wanted = reference[at.position] if at.position < len(reference) else "the end of the output"
    margin = (
        "no near tie is known there"
        if at.gap is None
        else f"not a near tie: the two best tokens are {at.gap:.2f} nats apart there"
    )
    return f"output token {at.position} is {found}, {against} has {wanted} ({margin})"


def _final(o: Observation | None) -> Leg | None:
    return o.final if o is not None and o.error is None else None


def _beside(cell: CellView, name: str, other: str, findings: list[Finding]) -> Iterator[tuple[str, Answer, Leg, Ids]]:
    """Yield each answer of a cell by key, with that of another cell of this run in the same scenario and its tokens;
    add a finding for one without."""
    theirs = cell.answers_of(other)
    for key, answer in cell.answers().items():
        leg = _final(theirs.get(key))
        if leg is None or leg.output_ids is None:
            findings.append(cell.untested(name, f"expected an answer of {other} to compare with, found none", answer.o))
        else:
            yield key, answer, leg, leg.output_ids


def _parted(cell: CellView, name: str, answer: Answer, other: str, wanted: Ids, at: Divergence) -> Finding:
    """Return the finding on an answer that is not that of another cell of this run."""
    message = in_words(at, answer.output, wanted, f"{other} of this run")
    if _as_without_parameter(cell, answer.o, answer.output):
        message += f"; it is the answer to this prompt without {answer.o.feature}"
    damage = _damage(cell, answer.o, at, answer.output, wanted)
    return cell.finding(name, DIFFERS, damage, message, answer.o, difference(at, answer.output, wanted))


def _damage(cell: CellView, o: Observation, at: Divergence, ours: Ids, wanted: Ids) -> DamageClass:
    """Return what is wrong with other tokens: not the KV where only the end is off of an answer that was to be
    stopped."""
    only_the_end = at.position == min(len(ours), len(wanted))
    ends = o.answered_otherwise or stop_at(o.feature, len(wanted)) is not None
    not_kv = (only_the_end and ends) or _as_without_parameter(cell, o, ours) or _read_its_own(cell, o, ours)
    return "sampler" if not_kv else cell.wrong_output


def _as_without_parameter(cell: CellView, o: Observation, ours: Ids) -> bool:
    """Return whether a request with a parameter has the right answer to its prompt, as if it had not been asked with
    it: its KV is right. Another adapter's is not."""
    row = cell.rows(cell.name.plain).get(o.prompt_id) if o.answered_otherwise and not o.adapter else None
    return row is not None and bool(ours) and row.output_ids[: len(ours)] == ours


def _read_its_own(cell: CellView, o: Observation, ours: Ids) -> bool:
    """Return whether a request with a parameter read no KV but its own, or after a hand-off is wrong as the single
    engine of its method is: then KV is not to blame."""
    config = cell.config
    if config is None or not (config.kind == "parameters" or (config.kind == "trace" and o.answered_otherwise)):
        return False
    twin = _final(cell.history.of(cell.name.single, scenario=cell.scenario).get(o.key))
    return not cell.handed_off or (twin is not None and twin.output_ids == ours)


def tokens_reference(cell: CellView) -> CheckResult:
    """Check that tokens equal those of the no-speculation single engine in the same run and scenario."""
    name, other = "tokens-reference", cell.name.reference
    findings: list[Finding] = []
    judged = 0
    ties: list[Leg | None] = []
    for _, answer, leg, wanted in _beside(cell, name, other, findings):
        if cell.speculative and answer.o.feature in SAMPLED:
            # The engine draws other numbers than one without a drafter does.
            continue
        judged += 1
        findings += _other_siblings(cell, name, answer, leg, other)
        if answer.output == wanted:
            continue
        at = parting(cell, answer.o, wanted, leg, cell.recorded(cell.name.plain, answer.o))
        if at is not None and at.near_tie:
            ties.append(leg)
        elif at is not None:
            findings.append(_parted(cell, name, answer, other, wanted, at))
    again, repeated = _not_repeated(cell, name)
    return conclude(name, cell.id, judged + repeated, [*findings, *again], note=_tie_note(ties))


def _other_siblings(cell: CellView, name: str, answer: Answer, plain: Leg, other: str) -> Iterator[Finding]:
    """Yield a finding for each further answer to a request that is not the plain engine's."""
    if not answer.leg.siblings and not plain.siblings:
        return
    for number, (ours, theirs) in enumerate(
        itertools.zip_longest(answer.leg.siblings, plain.siblings, fillvalue=Sibling()), 1
    ):
        apart = [what for what in _OF_SIBLINGS if getattr(ours, what) != getattr(theirs, what)]
        if apart:
            message = (
                f"expected answer {number + 1} to the request to be that of {other} of this run, found another "
                f"{apart[0]}: {str(getattr(ours, apart[0]))[:80]} instead of {str(getattr(theirs, apart[0]))[:80]}"
            )
            yield cell.finding(name, DIFFERS, cell.wrong_output, message, answer.o, OfEngine(role=answer.leg.role))


_OF_SIBLINGS = ("output_ids", "finish_reason", "stop_reason", "text")


def _not_repeated(cell: CellView, name: str) -> tuple[list[Finding], int]:
    """Return a finding for each seeded request that was answered otherwise the second time, and how many were asked
    twice. It is what vLLM promises of a seed, with speculation, too."""
    answers = cell.answers()
    first = {(a.o.prompt_id, a.o.instance): a for a in answers.values() if a.o.feature == "seed"}
    pairs = [(first.get((a.o.prompt_id, a.o.instance)), a) for a in answers.values() if a.o.feature == "seed-again"]
    words = "with the same seed, the same engine gave another answer before"
    apart = [(before, a) for before, a in pairs if before is None or before.output != a.output]
    return [cell.finding(name, DIFFERS, "sampler", words, a.o, OfEngine(role=a.leg.role)) for _, a in apart], len(pairs)


def tokens_single(cell: CellView) -> CheckResult:
    """Check that P/D says what the single engine of the same method says in the same scenario, or the plain one, which
    is right. Where an expected failure excuses what both say, this still holds them together."""
    name, other, lineup = "tokens-single", cell.name.single, cell.name.plain
    plain = cell.answers_of(cell.name.reference)
    findings: list[Finding] = []
    judged = 0
    for key, answer, leg, wanted in _beside(cell, name, other, findings):
        if answer.o.feature in SAMPLED:
            # D draws for its padded step, too.
            continue
        judged += 1
        right, row = _final(plain.get(key)), cell.recorded(lineup, answer.o)
        if answer.output in (
            right.output_ids if right else None,
            row.output_ids[: answer.o.most_tokens] if row else None,
        ):
            # If the other one is wrong, its own checks say so.
            continue
        at = parting(cell, answer.o, wanted, leg, None)
        if at is not None and not at.near_tie:
            findings.append(_parted(cell, name, answer, other, wanted, at))
    return conclude(name, cell.id, judged, findings)


def prefill_token(cell: CellView) -> CheckResult:
    """Check that P's own token is the first one of the output, which D computes anew from the KV that it was handed.

    In the bitwise tier the plain engine tells which token is right, of this run or in the baseline, so that a wrong
    one of D is not blamed on P; in the normal tier D's counts, and P's may differ by rounding.
    """
    name = "prefill-token"
    bitwise = cell.judging.tier == "bitwise"
    plain = cell.answers_of(cell.name.reference) if bitwise else {}
    lineup = cell.name.plain
    findings: list[Finding] = []
    judged = 0
    for key, (o, leg, output) in cell.answers().items():
        prefill, row = o.leg("prefill"), cell.recorded(lineup, o) if bitwise else None
        said, reference = (prefill.output_ids if prefill is not None else None), _final(plain.get(key))
        if o.route != "cell" or prefill is None or not said or not output:
            continue
        if cell.speculative and o.feature in SAMPLED:
            # Drawn by P with other random numbers than by D, which draws for a padded step.
            continue
        judged += 1
        references = (reference.output_ids if reference else None, row.output_ids if row else None, output)
        right = next(tokens[:1] for tokens in references if tokens)
        appended = len(cell.hand_off.prompt_of(o, "prefill")) < len(o.sent_ids)
        if appended:
            right = o.sent_ids[-1:]
        if bitwise and not appended and (apart := _apart(o, prefill, leg)) > allowed(cell, o):
            message = (
                "expected the prefill engine to find its token as probable as D, which computes it anew from the KV "
                f"that it was handed, found {apart:.3g} nats between them"
            )
            findings.append(cell.finding(name, DIFFERS, "target-kv", message, o, OfEngine(role="prefill")))
        if right == said[:1]:
            continue
        bound = near_tie_nats(cell, o) if bitwise else rounding_nats(cell)
        at = compare(right, said[:1], prefill.top_gaps, bound, prefill.runner_ups if bitwise else None)
        if at is None or at.near_tie:
            continue
        gap = "an unknown distance" if at.gap is None else f"{at.gap:.2f} nats"
        place = "the last of D's prompt" if appended else "the first of the output"
        message = (
            f"expected the prefill engine's token to be {place}, {right[0]}, found {said[0]}, which it prefers by "
            f"{gap} (rounding is at most {bound:g})"
        )
        verdict, _ = decide(Facts(change="differ", against="this run", few=not bitwise))
        findings.append(cell.finding(name, verdict, "sampler", message, o, OfEngine(role="prefill")))
    return conclude(name, cell.id, judged, findings)


def _apart(o: Observation, prefill: Leg, decode: Leg) -> float:
    """Return how far apart P and D are in what they say of the first token, in nats; infinite if only one of them says
    it, 0 if they chose differently or had other requests beside it."""
    if o.concurrent > 1 or not decode.output_ids or prefill.output_ids != decode.output_ids[:1]:
        return 0.0
    said = [[(x or (None,))[0] for x in (leg.chosen_logprobs, leg.top_gaps)] for leg in (prefill, decode)]
    pairs = list(zip(*said, strict=True))
    if any((p is None) != (d is None) for p, d in pairs):
        return math.inf
    return max((abs(p - d) for p, d in pairs if p is not None and d is not None), default=0.0)


def has_prefill(cell: CellView) -> bool:
    """Return whether P's answers are seen, which a router keeps to itself, and are to the whole prompt: P may leave its
    last tokens to D."""
    return cell.handed_off and not cell.routed and not cell.record.held_back


def _tie_note(ties: Sequence[Leg | None]) -> str:
    """Describe the near ties from the reference's answers to their prompts."""
    if not ties:
        return ""
    untold = sum(leg is None or leg.runner_ups is None for leg in ties)
    which = f"; {untold} of them with any token, because the record does not name the runner-up" if untold else ""
    return f"{len(ties)} near ties of the reference, benign{which}"


def tokens_baseline(cell: CellView) -> CheckResult:
    """Check that tokens equal those recorded in the baseline of the no-speculation single engine."""
    name = "tokens-baseline"
    baseline = cell.baseline_or_reason(cell.name.plain)
    if isinstance(baseline, str):
        return conclude(name, cell.id, 0, [cell.no_baseline(name, baseline)])
    rows = baseline.by_prompt()
    references = cell.answers_of(cell.name.reference)
    findings: list[Finding] = []
    judged = 0
    ties: list[Leg | None] = []
    for o, _, output in cell.answers().values():
        if o.answered_otherwise:
            continue
        row = rows.get(o.prompt_id)
        if row is None:
            findings.append(cell.no_baseline(name, "expected an answer to this prompt in the reference, found none", o))
            continue
        judged += 1
        wanted = row.output_ids[: o.most_tokens]
        if output == wanted != _known(o, wanted):
            findings.append(_wrong_as_recorded(cell, name, o, output))
            continue
        reference = _final(references.get(o.key))
        at = parting(cell, o, wanted, reference, row, recorded=True)
        if at is None or at.near_tie:
            ties += [reference] if at is not None else []
            continue
        findings.append(_not_as_recorded(cell, name, o, output, reference, wanted, at))
    return conclude(name, cell.id, judged, findings, note=_tie_note(ties))


def _known(o: Observation, otherwise: Ids) -> Ids:
    """Return the only right answer to a request, as far as it was asked for; ``otherwise`` where there is none."""
    return o.known_answer[: o.most_tokens] if o.known_answer is not None else otherwise


def _wrong_as_recorded(cell: CellView, name: str, o: Observation, output: Ids) -> Finding:
    """Return the finding on tokens that the reference has, too, and that are wrong: another run may be wrong, where
    stored baselines were held against the known answers."""
    known = _known(o, output)
    at = Divergence(common_prefix(output, known), None, near_tie=False)
    verdict, _ = decide(Facts(change="differ", against="known answer"))
    message = f"{in_words(at, output, known, 'the known answer')}; the reference is wrong, too"
    return cell.finding(name, verdict, "known-answer", message, o, difference(at, output, known))


def _not_as_recorded(
    cell: CellView,
    name: str,
    o: Observation,
    output: tuple[int, ...],
    reference: Leg | None,
    wanted: tuple[int, ...],
    at: Divergence,
) -> Finding:
    """Return the finding on tokens that are not those of the baseline.

    If the plain engine of this run gives the same tokens, the engine itself changed: DRIFT, unless the right answer is
    known to be another one.
    """
    same = cell.is_plain or (reference is not None and reference.output_ids == output)
    # In a scenario two cells may share the same damage, so only cold prompts can show a drift.
    together = cell.cold and same
    known = _known(o, output)
    damage, remark = _damage(cell, o, at, output, wanted), ""
    facts = Facts(change="differ", against=cell.against(cell.name.plain), together=together)
    if together and output != known:
        facts, damage = facts._replace(against="known answer"), "known-answer"
        remark = "; the single engine of this run gives them, too, but they are not the known answer to this prompt"
    elif together and facts.against == "other engines":
        damage, remark = "sampler", "; all engines of this run say so, and those that recorded it said otherwise"
    elif together:
        damage, remark = "engine-changed", "; the single engine of this run moved with it"
    message = in_words(at, output, wanted, "the baseline") + remark
    return cell.finding(name, decide(facts)[0], damage, message, o, difference(at, output, wanted))
