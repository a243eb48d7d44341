"""Checks of responses: all are present, the engines saw our prompts, and each response is self-consistent."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from operator import gt

from harness.history.acceptance import real_steps, request_counts
from harness.history.at_once import in_words
from harness.history.plan import Matched, matched, rows_of
from harness.history.records import COUNTED, TOPS, Leg, Observation, PlannedRequest
from harness.history.token_ids import common_prefix
from harness.history.verdict import Verdict
from harness.judging.checks.failures import failure_of, unproven
from harness.judging.decision import DIFFERS
from harness.judging.evidence import CellView
from harness.judging.figures import EchoDifference, IncompleteCell, OfEngine, StopToken, TextDifference
from harness.judging.findings import CheckResult, DamageClass, Finding, conclude
from harness.judging.rounding import allowed
from harness.observed.at_once import crowd_proof
from harness.observed.cell import Answer
from harness.profiles.scenarios import REFUSED_BESIDE_DRAFTS, SAMPLED
from harness.util.text import counted
from harness.workload.parameters import CHOICE, DATE, SCHEMA

ROUNDED = 1e-5
"""By how much log-probs and probabilities may exceed their limits: records have six decimals, engines 24 bits."""


_HALF, _FAR = -0.7, 12.0
"""Two tokens of which the better one is less probable than a half, or is so much better, add up to no more than 1."""


def complete(cell: CellView) -> CheckResult:
    """Check that every planned request was sent as planned, and answered exactly once without an error; mistaken
    hand-offs, and requests at which an engine fails by itself, are for checks of their own."""
    name = "complete"
    observations = cell.all_observations()
    failed = [o for o in observations if o.error is not None or o.failure is not None]
    refused = sum(_may_refuse(cell, o) for o in failed)
    findings = [
        cell.finding(name, Verdict.UNKNOWN, "infrastructure", f"the exchange broke: {o.error}{unproven(cell, o)}", o)
        for o in failed
        if o.error is not None and o.mistake is None and not _may_refuse(cell, o) and failure_of(cell, o) is None
    ]
    rows = rows_of(cell.history.run, cell.record)
    missing = cell.planned - len(observations)
    unanswered = ""
    if rows is not None:
        found = matched(rows, cell.scenario, cell.every_answer(), in_rounds=cell.history.run.kind == "soak")
        findings += _not_as_planned(cell, found)
        missing = max(missing, len(found.missing))
        unanswered = f"; without an answer: {_named(found.missing)}" if found.missing else ""
    elif cell.record.plan == COUNTED:
        findings += _not_as_planned(cell, matched((), cell.scenario, cell.every_answer())._replace(unplanned=()))
    elif cell.record.state == "complete":
        message = "expected the record to say which requests were planned, found no plan of this cell"
        findings.append(cell.finding(name, Verdict.UNKNOWN, "infrastructure", message))
    findings += _other_engines(cell)
    findings += _unproven_crowds(cell)
    if missing > 0 or cell.record.state != "complete":
        message = (
            f"expected {cell.planned} observations of a complete cell, found {len(observations)}{_incomplete(cell)}"
            f"{unanswered}"
        )
        incomplete = IncompleteCell(reason=cell.record.reason or "")
        findings.append(cell.finding(name, Verdict.UNKNOWN, "infrastructure", message, evidence=incomplete))
    words = f"{counted(refused, 'request')} refused by the engine, which does not take them with a drafter"
    return conclude(name, cell.id, len(observations), findings, note=words if refused else "")


def _unproven_crowds(cell: CellView) -> list[Finding]:
    """Return a finding for cold prompts that were asked together although that is not shown to change nothing, where it
    had to be."""
    together = [o for o in cell.all_observations() if o.concurrent > 1] if cell.cold else []
    found = crowd_proof(cell) if together else None
    if found is None or found.holds:
        return []
    message = (
        f"expected cold prompts one by one, found {counted(len(together), 'request')} sent together: {in_words(found)}"
    )
    return [cell.untested("complete", message, together[0])]


def _may_refuse(cell: CellView, o: Observation) -> bool:
    """Return whether an engine refused what it says it does not do, and nothing else is wrong."""
    return o.refused and cell.speculative and o.feature in REFUSED_BESIDE_DRAFTS


def _incomplete(cell: CellView) -> str:
    """Return, to follow the number of observations found, why there are no more."""
    state, reason = cell.record.state, cell.record.reason
    if state != "complete":
        return f" of a cell that is {state}: {reason or 'no reason was recorded'}"
    return f": {reason}" if reason else ", though the record says that the cell is complete"


def _other_engines(cell: CellView) -> list[Finding]:
    """Return a finding for each answer that names other engines than those recorded for the cell."""
    mine = cell.engine_roles
    answers = cell.all_observations() if mine else []
    others = {roles for roles in {o.engine_roles for o in answers} if {*roles} != mine}
    wanted = f"expected an answer of the engines of this cell, {_roles(mine)}, found one of"
    return [
        cell.finding("complete", Verdict.UNKNOWN, "infrastructure", f"{wanted} {_roles(o.engine_roles)}", o)
        for o in (answers if others else ())
        if o.engine_roles in others
    ]


def _roles(roles: Iterable[str]) -> str:
    return ", ".join(sorted(roles)) or "none"


_NAMED = 4
"""Most requests without an answer that are named."""


def _named(rows: Sequence[PlannedRequest]) -> str:
    names = [f"{row.place[2]} as text" if row.form == "text" else row.place[2] for row in rows]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _not_as_planned(cell: CellView, found: Matched) -> list[Finding]:
    """Return a finding for each answer that is not the only one to a planned request."""
    again = "the record was written twice or put together by hand; record the cell again"
    strange = "an answer to a request that the plan does not have"
    repeated = () if cell.history.run.kind == "soak" else found.repeated
    wrong = [
        *(
            (o, f"expected one answer to this request, found {n}, of which only the last is judged: {again}")
            for o, n in repeated
        ),
        *((o, strange) for o in found.unplanned),
        *((o, f"expected the request to be sent as planned, found {words}") for o, words in found.otherwise),
    ]
    return [cell.finding("complete", Verdict.UNKNOWN, "infrastructure", words, o) for o, words in wrong]


def echoed_prompt(cell: CellView) -> CheckResult:
    """Check that each leg echoes the prompt ids that were sent, which reveals a second BOS or a different template."""
    name = "echoed-prompt"
    findings: list[Finding] = []
    judged = 0
    for o in cell.all_observations():
        for leg in o.legs:
            judged += 1
            sent = cell.hand_off.prompt_of(o, leg.role)
            if leg.echoed_ids is None:
                message = f"expected the {leg.role} engine to echo the prompt ids (return_token_ids), found none"
                findings.append(cell.finding(name, Verdict.UNKNOWN, "input", message, o))
            elif leg.echoed_ids != sent:
                message, difference = _echo_difference(leg.role, sent, leg.echoed_ids)
                findings.append(cell.finding(name, Verdict.REGRESSION, "input", message, o, difference))
    return conclude(name, cell.id, judged, findings)


def _echo_difference(role: str, sent: tuple[int, ...], seen: tuple[int, ...]) -> tuple[str, EchoDifference]:
    """Return how the prompt ids that an engine saw differ from those that were sent, as text and as evidence."""
    at = common_prefix(seen, sent)
    message = (
        f"expected the {role} engine to see the {len(sent)} prompt ids that were sent, found {len(seen)} ids that "
        f"differ from position {at} on (sent {list(sent[at : at + 4])}, seen {list(seen[at : at + 4])})"
    )
    return message, EchoDifference(role=role, position=at, sent=sent[: at + 8], seen=seen[: at + 8])


def response_invariants(cell: CellView) -> CheckResult:
    """Check that the counts, ids, log-probs, finish reason and acceptance sums of each response are consistent."""
    name = "response-invariants"
    findings: list[Finding] = []
    judged = 0
    for o in cell.all_observations():
        for leg in o.legs:
            judged += 1
            problems: list[tuple[str, OfEngine]] = [(p, OfEngine(role=leg.role)) for p in _leg_problems(cell, o, leg)]
            if leg.output_ids and leg.finish_reason == "stop" and _stands_before_end(leg.output_ids):
                words = "the token that stops the request also stands before the end"
                problems.append((words, StopToken(role=leg.role, token=leg.output_ids[-1])))
            problems += [(p, OfEngine(role=leg.role)) for p in _step_problems(o, leg)]
            if not problems:
                continue
            damage: DamageClass = "sampler" if leg.streamed is None else "delivery"
            findings += [
                cell.finding(name, Verdict.REGRESSION, damage, f"{leg.role} engine: {words}", o, evidence)
                for words, evidence in problems
            ]
    return conclude(name, cell.id, judged, findings)


def _stands_before_end(output: tuple[int, ...]) -> bool:
    """Return whether the last token stands before the end, too."""
    return output.index(output[-1]) < len(output) - 1


def _leg_problems(cell: CellView, o: Observation, leg: Leg) -> Iterator[str]:
    """Yield the contradictions in a response."""
    if leg.output_ids is None:
        yield "expected output token ids (return_token_ids), found none"
        return
    if leg.status != 200:
        yield f"expected an answer with status 200, found tokens in one with {leg.status}"
    produced = len(leg.output_ids)
    if produced == 0:
        yield "expected at least one output token, found none"
    total = produced + sum([len(s.output_ids or ()) for s in leg.siblings])
    if leg.usage_completion_tokens != total:
        yield f"expected usage to count {total} output tokens, found {leg.usage_completion_tokens}"
    if o.fields or leg.siblings or o.feature is not None:
        yield from _not_as_asked(o, leg, leg.output_ids)
    if leg.echoed_ids is not None and leg.usage_prompt_tokens != len(leg.echoed_ids):
        yield f"expected usage to count {len(leg.echoed_ids)} prompt tokens, found {leg.usage_prompt_tokens}"
    for label, values in (("log-probs", leg.chosen_logprobs), ("top log-probs", leg.top_gaps)):
        if values is not None and len(values) != produced:
            yield f"expected one entry of {label} per output token ({produced}), found {len(values)}"
    yield from _impossible_logprobs(leg)
    own_prefill = leg.role == "prefill" and o.route == "cell"
    if own_prefill and o.mistake is not None:
        # A router asked P for more, which is judged by what D made of it.
        return
    if own_prefill and produced != 1:
        yield f"expected exactly one token from the prefill leg, found {produced}"
    if leg.finish_reason not in ("stop", "length"):
        yield f"expected finish reason stop or length, found {leg.finish_reason!r}"
    asked = 1 if own_prefill else o.max_tokens
    if leg.finish_reason == "length" and asked is not None and produced < asked and not cell.fills_context(o, leg):
        yield f"the finish reason is length after {produced} tokens, though {asked} were asked for"


def _not_as_asked(o: Observation, leg: Leg, output: tuple[int, ...]) -> Iterator[str]:
    """Yield what an answer shows by itself of a parameter that was not honoured."""
    if not o.fields and not leg.siblings:
        yield from _not_admitted(o, leg)
        return
    stops = [t for t in o.fields.get("stop_token_ids", ()) if t in output]
    own_prefill = leg.role == "prefill" and o.route == "cell"
    if stops and (output.index(stops[0]) < len(output) - 1 or leg.finish_reason != "stop"):
        at = output.index(stops[0])
        yield (
            f"expected the answer to stop at the token {stops[0]} that was to stop it, output token {at}, found "
            f"{len(output)} tokens and the reason {leg.finish_reason}"
        )
    answers = [output, *(s.output_ids or () for s in leg.siblings)]
    allowed_ids = o.fields.get("allowed_token_ids")
    if allowed_ids is not None and (others := [t for ids in answers for t in ids if t not in allowed_ids]):
        yield f"expected allowed tokens alone, found {counted(len(others), 'other')}, {others[0]} among them"
    if o.fields.get("ignore_eos") and leg.finish_reason == "stop":
        yield "the answer ends at the end token, which it was to ignore"
    texts = [text for text in (leg.own_text, *(s.text for s in leg.siblings)) if text is not None]
    if bad := [word for word in o.fields.get("bad_words", ()) if any(word in text for text in texts)]:
        yield f"the answer has the bad word {bad[0]!r}"
    wanted = 1 if own_prefill else o.fields.get("n", 1)
    if len(answers) != wanted:
        yield f"expected {counted(wanted, 'answer')} to the request, found {len(answers)}"
    yield from _not_admitted(o, leg)
    most = o.top_logprobs
    tables = leg.top_logprobs or ({},)
    if most is not None and most > TOPS and any(len(t) not in (most, most + 1) for t in tables):
        yield f"expected log-probs of the {most} likeliest tokens at each output token, found another number"


def _not_admitted(o: Observation, leg: Leg) -> Iterator[str]:
    """Yield that an answer that came to its end is not one that its grammar admits."""
    if leg.own_text is None or leg.finish_reason != "stop":
        return
    # Of a tool that is called, the text is its arguments.
    text = leg.text if o.feature == "tool" and leg.text is not None else leg.own_text
    if o.feature in ("json", "tool") and not _fits_schema(text):
        yield f"expected JSON of the schema that was asked for, found {text[:80]!r}"
    if o.feature == "choice" and text not in CHOICE:
        yield f"expected one of {counted(len(CHOICE), 'text')}, found {text[:80]!r}"
    if o.feature == "date" and re.fullmatch(DATE, text) is None:
        yield f"expected a text of the form {DATE}, found {text[:80]!r}"


def _fits_schema(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    properties = SCHEMA["properties"]
    if not isinstance(found, dict) or found.keys() != properties.keys():
        return False
    return found["kind"] in properties["kind"]["enum"] and type(found["clear"]) is bool


def _impossible_logprobs(leg: Leg) -> Iterator[str]:
    """Yield a contradiction among the log-probs of an answer: two tokens cannot be more probable than all."""
    chosen = leg.chosen_logprobs or ()
    worst = max(chosen, default=0.0)
    if worst > ROUNDED:
        yield f"expected log-probs of at most 0, found {worst:.4g}"
        return
    # Both add up to at most (2 + gap) / ((1 + gap) · (1 - said)), for e^-gap <= 1 / (1 + gap) and e^said alike.
    in_doubt = [
        (at, said, gap)
        for at, (said, gap) in enumerate(zip(chosen, leg.top_gaps or (), strict=False))
        if gap is not None and not (gap >= 0 and (said < _HALF or gap > _FAR or said * (1 + gap) <= -1))
    ]
    for at, said, gap in in_doubt:
        # The best token is at least as probable as the one that was chosen, and the second-best one follows from it.
        both = math.exp(said) * (1 + math.exp(-gap)) if gap >= 0 else 0.0
        if both > 1 + ROUNDED:
            yield (
                f"expected the two best tokens to be at most as probable as all, found {both:.4g} at output token {at} "
                f"(log-prob {said:.4g}, {gap:.4g} nats to the second-best)"
            )
            return
        if gap < 0:
            yield f"the second-best token is above the best one at output token {at}"
            return


def _step_problems(o: Observation, leg: Leg) -> Iterator[str]:
    """Yield the contradictions between the verify steps of a response, its totals and its tokens."""
    spec = leg.speculation
    if spec is None or leg.output_ids is None:
        return
    produced = len(leg.output_ids)
    counted = (len(spec.per_step_accepted), sum(spec.per_step_accepted), sum(spec.per_step_drafted))
    if counted != (spec.num_steps, spec.num_accepted, spec.num_drafted):
        yield "the per-step counts do not add up to the request's totals"
    if any(map(gt, spec.per_step_accepted, spec.per_step_drafted)):
        yield "a step accepts more drafts than it made"
    # The prefill gives the first token, and one more each time a preempted request is resumed. A last step at the end
    # of the context has no drafts.
    prefilled = 1 + o.preemptions(leg) + spec.at_limit
    # A step without drafts is not counted where a method may find none.
    counts_all = not (o.drafts_filtered or spec.up_to)
    if counts_all and counted[0] + counted[1] < produced - prefilled:
        yield f"the verify steps account for fewer than the {produced} output tokens"


def has_plain_answers(cell: CellView) -> bool:
    """Return whether the run asked the plain engine for the same prompts, in this scenario or cold."""
    return not cell.is_plain and cell.asked_alike(cell.name.reference)


def finish_reason(cell: CellView) -> CheckResult:
    """Check that an answer with the tokens of the plain engine of this run ended for the same reason.

    Without an answer of the plain engine in the same scenario, its answer to the cold prompt counts.
    """
    name = "finish-reason"
    plain = cell.answers_of(cell.name.reference)
    cold = cell.history.of(cell.name.reference)
    findings: list[Finding] = []
    judged = 0
    for key, (o, ours, output) in cell.answers().items():
        other = plain.get(key) or (None if o.answered_otherwise else cold.get(o.prompt_id))
        if cell.speculative and o.feature in SAMPLED:
            continue
        theirs = other.final if other is not None else None
        if other is None or theirs is None:
            if cell.asked(cell.name.reference):
                message = f"expected an answer of {cell.name.reference} to compare the end of this one with, found none"
                findings.append(cell.untested(name, message, o))
            continue
        judged += 1
        if (theirs.output_ids, other.max_tokens) != (output, o.max_tokens):
            # Checks of tokens report other tokens, which may end otherwise.
            continue
        if (ours.finish_reason, ours.stop_reason) != (theirs.finish_reason, theirs.stop_reason):
            message = (
                f"expected the request to end as on {cell.name.reference} of this run, for the reason "
                f"{_reason(theirs)}, found {_reason(ours)} with the same tokens"
            )
            findings.append(cell.finding(name, DIFFERS, "sampler", message, o, OfEngine(role=ours.role)))
    return conclude(name, cell.id, judged, findings)


def _reason(leg: Leg) -> str:
    return f"{leg.finish_reason} ({leg.stop_reason!r})" if leg.stop_reason is not None else str(leg.finish_reason)


def text_form(cell: CellView) -> CheckResult:
    """Check that a prompt sent as templated text gives the same answer as when sent as ids: tokens, log-probs, end,
    accepted drafts of each step, and P's token."""
    name = "text-form"
    ids = cell.answers("ids")
    findings: list[Finding] = []
    judged = 0
    for prompt_id, (o, leg, ours) in cell.answers("text").items():
        twin = ids.get(prompt_id)
        if twin is None:
            continue
        judged += 1
        if ours != twin.output:
            findings.append(_other_tokens_as_text(cell, o, ours, twin))
            continue
        findings += [
            cell.finding(name, Verdict.REGRESSION, damage, f"expected the {what} of the prompt as ids, {found}", o)
            for what, damage, found in otherwise(cell, o, leg, twin)
        ]
    return conclude(name, cell.id, judged, findings)


def _other_tokens_as_text(cell: CellView, o: Observation, ours: tuple[int, ...], twin: Answer) -> Finding:
    at = common_prefix(ours, twin.output)
    # If the engines saw equal ids, the form in which the prompt was sent is not to blame.
    seen, seen_as_ids = ([leg.echoed_ids for leg in x.legs] for x in (o, twin.o))
    same = seen == seen_as_ids and None not in seen
    message = (
        f"expected the same output for the prompt as text and as ids, found a difference at output token {at}; "
        + ("the engines saw the same prompt ids both times" if same else "compare the echoed ids")
    )
    damage: DamageClass = "target-kv" if same else "input"
    difference = TextDifference(position=at, as_text=ours[at : at + 6], as_ids=twin.output[at : at + 6])
    return cell.finding("text-form", Verdict.REGRESSION, damage, message, o, difference)


def otherwise(cell: CellView, o: Observation, leg: Leg, twin: Answer) -> Iterator[tuple[str, DamageClass, str]]:
    """Yield what differs between two answers of one cell with the same tokens, with the damage and both figures in
    words."""
    if leg.finish_reason != twin.leg.finish_reason:
        yield "end", "sampler", f"{twin.leg.finish_reason}, found {leg.finish_reason}"
    for what, mine, theirs in (
        ("log-probs", leg.chosen_logprobs, twin.leg.chosen_logprobs),
        ("distances of the two best tokens", leg.top_gaps, twin.leg.top_gaps),
    ):
        apart = [abs(a - b) for a, b in zip(mine or (), theirs or (), strict=False) if a is not None and b is not None]
        bound = allowed(cell, o, twin.o)
        if max(apart, default=0.0) > bound:
            yield what, cell.wrong_output, f"within {bound:.2g} nats, found {max(apart):.3g}"
    k = cell.record.draft_tokens
    accepted, as_ids = (_drafts(one, k) for one in (leg, twin.leg))
    if accepted != as_ids:
        yield "accepted drafts", cell.wrong_drafts, f"{as_ids}, found {accepted}"
    first, of_ids = (p.output_ids if (p := x.leg("prefill")) is not None else None for x in (o, twin.o))
    if first != of_ids:
        yield "token of the prefill engine", "sampler", f"{of_ids}, found {first}"


def _drafts(leg: Leg, k: int) -> object:
    """Return what an answer says of its drafts: accepted in each step, or where it does not say so, in all of them."""
    steps = real_steps(leg)
    return list(steps.accepted) if steps is not None else request_counts(leg, k)
