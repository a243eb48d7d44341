"""Combine the findings of a cell in a scenario into a diagnosis: damage class, law of lengths and location."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.history.acceptance import real_steps
from harness.history.records import COLD, Observation
from harness.history.token_ids import compare
from harness.history.verdict import Verdict
from harness.judging.diagnosis.laws import Circumstances, law_of
from harness.judging.diagnosis.location import request_of
from harness.judging.evidence import CellView
from harness.judging.figures import KVDifference, LogprobDifference
from harness.judging.findings import CheckResult, DamageClass, Diagnosis, Finding, Law
from harness.judging.near_ties import near_tie_nats
from harness.observed.drafts_end import drafts_end
from harness.stats.binomial import exact_interval
from harness.util.text import counted, percent_range, without_log

_TOKEN_CHECKS = ("tokens-reference", "tokens-baseline")
_KV_CHECKS = ("kv-computed", "kv-handed-over", "kv-kept")
_STEP_CHECKS = ("acceptance-single", "acceptance-cold", "acceptance-baseline")


def diagnose(cell: CellView, results: Sequence[CheckResult]) -> Diagnosis | None:
    """Return the damage class, law of lengths and location of a cell's findings; None without findings."""
    findings = [f for r in results for f in r.findings]
    if not findings:
        return None
    damage = _damage(cell, findings, results)
    supporting = [f for f in findings if _supports(f, damage)] or findings
    keys = {f.part or f.prompt_id for f in supporting if f.prompt_id}
    untested = _untested(findings, supporting) - keys
    compared = [o for o in cell.all_observations() if o.error is None and o.route == "cell" and o.key not in untested]
    judged = {o.key: len(o.sent_ids) for o in compared}
    # A request that broke, or that only prepared the scenario, may have a finding too.
    asked = len(judged.keys() | keys)
    law = None
    if keys and damage not in _NOTHING_FAILED:
        noun = "hand-off" if cell.cold and cell.handed_off else "request"
        law = law_of(_compared(cell, compared, supporting), cell.record.block_size, noun, cell.cold)
    unruled = law is not None and not law.exact
    chosen = _most_telling(cell, supporting)
    return Diagnosis(
        damage=damage,
        failed=len(keys),
        judged=asked,
        law=law,
        location=chosen.location,
        text="; ".join(
            [
                *_words(cell, damage, chosen, len(keys), asked, law),
                *filter(None, [_tenths(cell)] if law is not None and law.of_age and cell.speculative else []),
                # Last, since where the damage is helps more, and a terminal cuts long lines.
                *([comes_and_goes(compared, supporting)] if unruled else []),
            ]
        ),
    )


def _compared(cell: CellView, requests: Sequence[Observation], findings: Sequence[Finding]) -> list[Circumstances]:
    """Return what may decide whether each request fails.

    A prompt that fails as ids is left out as text if nothing is found there: few checks compare texts.
    """
    failed = {(f.part or f.prompt_id, f.form or "ids") for f in findings}
    numbers = _numbers(cell)
    first: dict[str, int] = {}
    for o in cell.history.in_order(cell.id):
        if o.route == "cell":
            first.setdefault(o.prompt_id, o.sequence)
    return [
        Circumstances(
            failed=(o.key, o.form) in failed,
            tokens=len(o.sent_ids),
            number=numbers[o.sequence],
            form=o.form,
            repeated=first.get(o.prompt_id, o.sequence) < o.sequence,
            together=o.concurrent > 1,
            parameter=o.feature or "",
        )
        for o in requests
        if o.form == "ids" or (o.key, o.form) in failed or (o.key, "ids") not in failed
    ]


def _numbers(cell: CellView) -> dict[int, int]:
    """Return by sequence which request of its cell each one is, with those that are not recorded."""
    numbers: dict[int, int] = {}
    unrecorded = 0
    for place, o in enumerate(cell.history.in_order(cell.id), 1):
        unrecorded += max(o.aged_by.values(), default=0)
        numbers[o.sequence] = place + unrecorded
    return numbers


def _tenths(cell: CellView) -> str:
    """Return how many of the drafts that the baseline accepts were accepted in the first and in the last tenth of the
    cell's requests so far; empty where that cannot be told."""
    numbers, rows = _numbers(cell), cell.rows(cell.lineup)
    last = max(numbers.values(), default=0)
    seen: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for o, leg, _ in cell.answers().values():
        steps, row, number = real_steps(leg), rows.get(o.prompt_id), numbers[o.sequence]
        if steps is not None and row is not None and not last / 10 < number <= last - last / 10:
            seen[number > last / 10].append((sum(steps.accepted), sum(row.accepted)))
    totals = [
        (sum(found), sum(known)) for pairs in seen.values() if pairs for found, known in [zip(*pairs, strict=True)]
    ]
    if len(totals) < len(seen) or not all(known for _, known in totals):
        return ""
    first, then = (f"{100 * found / known:.0f} %" for found, known in totals)
    return f"accepted drafts relative to the baseline: {first} in the first tenth of the requests, {then} in the last"


_NOTHING_FAILED = ("nothing-tested", "baseline")
"""Classes of missing evidence: of a length that was not compared, no law says that it fails."""
_OF_ONE_CAUSE = ("target-kv", "drafter-kv", "sampler")
"""Classes among which a single check can only guess: wrong KV of the target also gives other text and other drafts."""


def explained(results: Sequence[CheckResult], diagnosis: Diagnosis | None) -> list[CheckResult]:
    """Return the results with what the diagnosis says of their findings: the class of damage that explains all of them,
    and the law of lengths where a finding is evidence for it."""
    if diagnosis is None:
        return list(results)
    return [
        r.model_copy(update={"findings": tuple(_explained(f, diagnosis) for f in r.findings)}) if r.findings else r
        for r in results
    ]


def _explained(finding: Finding, diagnosis: Diagnosis) -> Finding:
    update: dict[str, str] = {}
    alike = {finding.damage, diagnosis.damage} <= {*_OF_ONE_CAUSE} and finding.damage != diagnosis.damage
    if finding.verdict is not Verdict.UNKNOWN and alike:
        update |= {"damage": diagnosis.damage, "taken_for": finding.damage}
    if diagnosis.law is not None and finding.prompt_id and _supports(finding, diagnosis.damage):
        update["law"] = diagnosis.law.text
    return finding.model_copy(update=update)


def _most_telling(cell: CellView, findings: Sequence[Finding]) -> Finding:
    """Return the located finding with the longest prompt, which has the most blocks; else the first finding.

    Tokens and steps tell more than log-probs, and the KV itself more than both.
    """
    located = [f for f in findings if f.location is not None]
    located = [f for f in located if not isinstance(f.evidence, LogprobDifference)] or located
    located = [f for f in located if isinstance(f.evidence, KVDifference)] or located
    return max(located, key=lambda f: _tokens(cell, f)) if located else findings[0]


def _supports(finding: Finding, damage: DamageClass) -> bool:
    """Return whether a finding is evidence for a damage class."""
    if damage in (
        "input",
        "nothing-tested",
        "routing",
        "blocks-kept",
        "reuse-lost",
        "kv-events",
        "no-answer",
        "infrastructure",
    ):
        return finding.damage == damage
    if damage == "drafter-kv":
        seen = isinstance(finding.evidence, KVDifference) and finding.damage == damage
        return (seen or finding.check in _STEP_CHECKS) and finding.verdict is not Verdict.UNKNOWN
    found = finding.damage not in _NOTHING_FAILED
    return finding.damage == damage or (found and finding.check in (*_TOKEN_CHECKS, *_STEP_CHECKS))


def _untested(findings: Sequence[Finding], supporting: Sequence[Finding]) -> set[str | None]:
    """Return the requests for which each check that found something had nothing to compare with: they neither failed
    nor passed."""
    checks = {f.check for f in supporting}
    lacking: dict[str | None, set[str]] = {}
    for f in findings:
        if f.damage in _NOTHING_FAILED and f.check in checks:
            lacking.setdefault(f.part or f.prompt_id, set()).add(f.check)
    return {key for key, lacked in lacking.items() if lacked == checks}


def _damage(cell: CellView, findings: Sequence[Finding], results: Sequence[CheckResult]) -> DamageClass:
    """Return the class that explains all findings: wrong input causes wrong tokens, which change acceptance."""
    certain = [f for f in findings if f.verdict is not Verdict.UNKNOWN]
    if any(f.damage == "input" for f in certain):
        return "input"
    seen = {f.damage for f in certain if isinstance(f.evidence, KVDifference)}
    if "target-kv" in seen:
        return "target-kv"
    wrong_tokens = [f for f in certain if f.check in _TOKEN_CHECKS and f.verdict is Verdict.REGRESSION]
    delivered = {f.part for f in certain if f.damage == "delivery"}
    if wrong_tokens and {f.part for f in wrong_tokens} <= delivered:
        # The engine counted other tokens than came.
        return "delivery"
    if wrong_tokens and all(f.damage == "known-answer" for f in wrong_tokens):
        return "known-answer"
    if wrong_tokens and (cell.handed_off or not cell.cold) and all(f.damage == "sampler" for f in wrong_tokens):
        # Only the end of answers that were to be stopped, or what all engines of the run say.
        return "sampler"
    if not wrong_tokens and any(f.damage == "routing" for f in certain):
        # What was never handed over is no wrong KV: D computed it by itself.
        return "routing"
    if wrong_tokens or any(f.damage == "target-kv" for f in certain):
        return "sampler" if _same_without(cell, _TOKEN_CHECKS) or _only_when_sampled(cell) else "target-kv"
    changed_steps = [f for f in certain if f.check in _STEP_CHECKS]
    if changed_steps:
        if "drafter-kv" in seen:
            return "drafter-kv"
        if all(f.verdict is Verdict.IMPROVED for f in changed_steps):
            return "engine-changed"
        elsewhere = _same_without(cell, _STEP_CHECKS) or _only_when_sampled(cell)
        return "sampler" if elsewhere or _only_where_rows_move(cell, changed_steps, results) else "drafter-kv"
    if certain:
        return Counter(f.damage for f in certain).most_common(1)[0][0]
    # What broke comes first: without it, more would have been tested.
    for damage in ("infrastructure", "nothing-tested", "baseline"):
        if any(f.damage == damage for f in findings):
            return damage
    return findings[0].damage


def _only_where_rows_move(cell: CellView, changed: Sequence[Finding], results: Sequence[CheckResult]) -> bool:
    """Return whether drafts changed beside other requests alone, in both topologies, while all KV that was compared is
    right: then rows of a batch were exchanged, and no block is wrong."""
    crowded = {o.key for o in cell.all_observations() if o.concurrent > 1}
    kv = [r for r in results if r.check in _KV_CHECKS]
    right = any(r.judged for r in kv if r.check == _KV_CHECKS[0]) and all(r.verdict is Verdict.PASS for r in kv)
    other = cell.sibling("single" if cell.handed_off else "pd")
    beside = other is not None and any(_wrong(other, _STEP_CHECKS))
    return right and beside and {f.part or f.prompt_id for f in changed} <= crowded


def _only_when_sampled(cell: CellView) -> bool:
    """Return whether the prompts of a ``sampled`` scenario are answered correctly cold (temperature zero) by this cell,
    which shows that their KV is correct."""
    config = cell.config
    if config is None or not config.samples:
        return False
    cold = replace(cell, scenario=COLD)
    prompts = {o.prompt_id for o in cell.answered().values()}
    known = [
        r for o in cold.answered().values() if o.prompt_id in prompts and (r := request_of(cold, o)) and r.expected
    ]
    return bool(known) and all((r.leg.output_ids or ()) == tuple(r.expected) for r in known)


def _same_without(cell: CellView, checks: Sequence[str]) -> bool:
    """Return whether cold prompts on a single engine, which read no KV but their own, fail in the same way, and the
    hand-offs fail, too: where these are right, drafting and verification are, and the engine's own prefill is not.

    This applies only to speculative engines, since plain decoding does not sample drafts.
    """
    single = cell if cell.cold and not cell.handed_off else cell.sibling("single", COLD)
    if single is None or not single.speculative or not any(_wrong(single, checks)):
        return False
    pair = cell.sibling("pd", COLD)
    compared = list(_wrong(pair, checks)) if pair is not None else []
    return not compared or any(compared)


def _wrong(cell: CellView, checks: Sequence[str]) -> Iterator[bool]:
    """Yield of each answer with a known one whether it fails such checks."""
    for o in cell.answered().values():
        request = request_of(cell, o)
        if request is None or not request.expected:
            continue
        wrong = False
        if checks is _TOKEN_CHECKS:
            near = near_tie_nats(cell, o)
            at = compare(request.leg.output_ids or (), request.expected, request.leg.top_gaps, near)
            wrong = at is not None and not at.near_tie
        steps = real_steps(request.leg)
        if checks is _STEP_CHECKS and steps is not None and request.steps is not None:
            wrong |= steps.accepted != request.steps.accepted
        yield wrong


_NAMES: dict[str, str] = {
    "input": "wrong input",
    "target-kv": "wrong KV of the target",
    "drafter-kv": "wrong KV of the drafter",
    "drafter-input": "wrong drafter input",
    "sampler": "drafting or verification",
    "text": "text does not match the tokens",
    "delivery": "an answer changed on its way to the client",
    "nothing-tested": "nothing tested",
    "engine-changed": "the engine changed",
    "known-answer": "wrong by the known answer",
    "infrastructure": "infrastructure",
    "routing": "the router does not hand off",
    "blocks-kept": "KV blocks are not freed",
    "reuse-lost": "cached blocks are not reused",
    "kv-events": "wrong KV events",
    "no-answer": "requests on which the engine fails",
    "baseline": "no baseline",
}


def damage_name(damage: str) -> str:
    return _NAMES.get(damage, damage)


def _words(
    cell: CellView, damage: DamageClass, chosen: Finding, failed: int, judged: int, law: Law | None
) -> list[str]:
    parts = [f"{damage_name(damage)} in {failed} of {counted(judged, 'request')}" if failed else damage_name(damage)]
    if damage in ("target-kv", "drafter-kv", "sampler", "input") and law is not None:
        parts.append(law.text)
    if damage in ("drafter-kv", "sampler") and cell.cold and (end := drafts_end(cell)) is not None:
        parts.append(end.words)
    if chosen.location is not None:
        name = chosen.part or chosen.prompt_id
        parts.append(f"{name} ({_tokens(cell, chosen)} tokens): {chosen.location.text}")
    elif not cell.cold or damage in (
        "drafter-input",
        "routing",
        "blocks-kept",
        "reuse-lost",
        "no-answer",
        "nothing-tested",
        "infrastructure",
        "baseline",
    ):
        parts.append(without_log(chosen.message))
    return parts


def _tokens(cell: CellView, finding: Finding) -> int:
    key = finding.part or finding.prompt_id
    o = {**cell.observations("text"), **cell.observations("ids")}.get(key or "")
    return len(o.sent_ids) if o else 0


def comes_and_goes(compared: Sequence[Observation], findings: Sequence[Finding]) -> str:
    """Describe how often requests fail, and whether one failed that passed when its prompt was sent again, as
    text instead of as ids or the other way round. The interval of the rate is Clopper and Pearson's."""
    # That a prompt has another answer as text than as ids is this very difference.
    failed = {(f.part or f.prompt_id, f.form) for f in findings if f.prompt_id and f.check != "text-form"}
    asked = {(o.key, o.form) for o in compared} | failed
    both = sorted(str(key) for key, form in failed if any(k == key and (k, f) not in failed for k, f in asked))
    bounds = f"{percent_range(*exact_interval(len(failed), len(asked)))} with 95 % confidence"
    rate = f"{len(failed)} of {len(asked)} requests, {bounds}"
    if both:
        return f"intermittent: {both[0]} fails once and passes once with the same tokens; {rate}"
    return f"intermittent if these prompts pass when they are sent again ({rate})"
