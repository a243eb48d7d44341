"""Checks of how answers are delivered: in pieces, from messages, and with what their usage says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from harness.history.engine_interfaces import BY_SOURCE, CACHED_TOKENS_FLAG
from harness.history.records import Leg, Observation
from harness.history.token_ids import common_prefix
from harness.history.verdict import Verdict
from harness.judging.checks.responses import otherwise
from harness.judging.evidence import CellView
from harness.judging.figures import OfEngine
from harness.judging.findings import CheckResult, DamageClass, Finding, conclude
from harness.observed.cell import Answer
from harness.scenarios.apis import WHOLE
from harness.util.text import counted

SAME, STREAMED, CACHED = "same-answer", "streamed", "cached-tokens"


def asked_otherwise(cell: CellView) -> bool:
    """Return whether the cell was asked in other ways than for a whole completion, of each prompt, too. Requests of
    other kinds have no twins, and are compared with the plain engine's and the record."""
    of_apis = cell.config is not None and cell.config.kind == "apis"
    return of_apis and any(o.api != WHOLE for o in cell.all_observations())


def same_answer(cell: CellView) -> CheckResult:
    """Check that an answer in pieces, or to messages, is that of the whole completion: tokens, text, log-probs, end,
    accepted drafts, and P's token."""
    findings: list[Finding] = []
    judged = 0
    answers = cell.answers()
    whole, chats = (
        {(a.o.prompt_id, a.o.instance): a for a in answers.values() if a.o.api == api} for api in (WHOLE, "chat")
    )
    for o, leg, output in answers.values():
        if o.api == WHOLE:
            continue
        twin, chat = (found.get((o.prompt_id, o.instance)) for found in (whole, chats))
        if twin is None:
            findings.append(cell.untested(SAME, "expected a whole completion to compare with, found none", o))
            continue
        judged += 1
        findings += [
            cell.finding(
                SAME, Verdict.REGRESSION, damage, f"expected the {what} of the whole completion, {found}", o, _at(leg)
            )
            for what, damage, found in (*_differences(cell, o, leg, output, twin), *_other_text(o, leg, twin, chat))
        ]
    return conclude(SAME, cell.id, judged, findings)


def _at(leg: Leg) -> OfEngine:
    return OfEngine(role=leg.role)


def _differences(
    cell: CellView, o: Observation, leg: Leg, output: tuple[int, ...], twin: Answer
) -> Iterator[tuple[str, DamageClass, str]]:
    """Yield what differs from the whole completion, with the damage and both figures as text."""
    if output != twin.output:
        at = common_prefix(output, twin.output)
        found = f"found the first difference at output token {at} of {len(twin.output)}"
        yield "tokens", "delivery" if _lost(leg) else cell.wrong_output, found
        return
    if leg.stop_reason != twin.leg.stop_reason:
        yield "stop reason", "sampler", f"{twin.leg.stop_reason!r}, found {leg.stop_reason!r}"
    yield from otherwise(cell, o, leg, twin)


def _other_text(o: Observation, leg: Leg, twin: Answer, chat: Answer | None) -> Iterator[tuple[str, DamageClass, str]]:
    """Yield how the text of the same tokens is another one. A streamed chat has that of the whole chat: both may have
    lost the marks of reasoning to a parser, which completions do not pass."""
    other = chat.leg if o.api == "chat-stream" and chat is not None else twin.leg
    parsed = other is twin.leg and leg.reasoning is not None
    if parsed or other.output_ids != leg.output_ids:
        return
    for what, ours, theirs in (("text", leg.text, other.text), ("reasoning", leg.reasoning, other.reasoning)):
        if ours != theirs:
            at = common_prefix(ours or "", theirs or "")
            yield what, "text", f"found another one from character {at} on"


def _lost(leg: Leg) -> int:
    """Return how many tokens the engine counted that did not come; negative for more, 0 where it did not count."""
    counted = leg.counters.get("generation_tokens")
    return 0 if counted is None else int(counted) - len(leg.output_ids or ())


def has_streams(cell: CellView) -> bool:
    """Return whether an answer came in pieces."""
    return any(leg.streamed is not None for _, leg, _ in cell.answers().values())


def streamed(cell: CellView) -> CheckResult:
    """Check each answer in pieces by itself: as many tokens as the engine made and each piece says, an end in the last
    piece alone, one usage behind it, and the end of the stream."""
    findings: list[Finding] = []
    judged = 0
    for o, leg, _ in cell.answers().values():
        if leg.streamed is None:
            continue
        judged += 1
        findings += [
            cell.finding(STREAMED, Verdict.REGRESSION, "delivery", f"{leg.role} engine: {words}", o, _at(leg))
            for words in _stream_problems(o, leg)
        ]
    return conclude(STREAMED, cell.id, judged, findings)


def _stream_problems(o: Observation, leg: Leg) -> Iterator[str]:
    found = leg.streamed
    assert found is not None
    lost = _lost(leg) if o.concurrent == 1 and not leg.ended_by_text else 0
    if lost:
        came = len(leg.output_ids or ())
        yield (
            f"expected the {came + lost} tokens that the engine counted, found {came} in the pieces of the stream: "
            + (f"{lost} did not come" if lost > 0 else f"{-lost} came twice")
        )
    upto = accumulate(found.tokens)
    for number, (said, have) in enumerate(zip(found.counted, upto, strict=False)):
        if said is not None and said != have:
            yield f"expected piece {number} to count {have} tokens up to its end in its usage, found {said}"
            break
    last = len(found.tokens) - 1
    if found.ended_at != (last,):
        at = ", ".join(map(str, found.ended_at))
        pieces = f"piece{'s' if len(found.ended_at) > 1 else ''} {at}" if at else "no piece"
        yield f"the finish reason is in {pieces}, not in the last one ({last}) alone"
    if found.usages != 1:
        yield f"the usage of the whole answer came {found.usages} times, not once behind its pieces"
    if not found.closed:
        yield "the stream stopped before its end mark"


def offers_cached_tokens(cell: CellView) -> bool:
    """Return whether an engine says how many tokens of a prompt were cached, or was asked to, where counters tell."""
    asked = any(CACHED_TOKENS_FLAG in e.argv for role in cell.roles if (e := cell.engine(role)) is not None)
    if not asked and all(leg.cached_tokens is None for o in cell.all_observations() for leg in o.legs):
        return False
    return any(asked or leg.cached_tokens is not None for _, leg, _ in _told(cell))


def _told(cell: CellView) -> Iterator[tuple[Observation, Leg, set[int]]]:
    """Yield the answers to requests that had the engines to themselves, with the numbers of cached tokens that they may
    say by the engines' counters."""
    for o in cell.all_observations():
        # Of several answers to a request the usage tells one's number.
        if o.error is None and o.concurrent == 1 and o.answers == 1:
            yield from ((o, leg, wanted) for leg in o.legs if (wanted := _cached(cell, o, leg)))


def cached_tokens(cell: CellView) -> CheckResult:
    """Check that the usage of a request counts as many cached prompt tokens as the engine's counters: D says P's number
    after a hand-off that tells it, and its own otherwise."""
    findings: list[Finding] = []
    judged = silent = 0
    for o, leg, wanted in _told(cell):
        if leg.cached_tokens is None:
            silent += 1
            continue
        judged += 1
        if leg.cached_tokens not in wanted:
            message = (
                f"{leg.role} engine: expected usage to count {' or '.join(map(str, sorted(wanted)))} cached prompt "
                f"tokens, as the engines' counters show, found {leg.cached_tokens}"
            )
            findings.append(cell.finding(CACHED, Verdict.REGRESSION, "delivery", message, o, _at(leg)))
    if silent:
        said = f"found nothing in {counted(silent, 'answer')}"
        findings.append(cell.untested(CACHED, f"expected usage to say how many prompt tokens were cached, {said}"))
    return conclude(CACHED, cell.id, judged, findings)


def _cached(cell: CellView, o: Observation, leg: Leg) -> set[int]:
    """Return the numbers of cached tokens that an answer's usage may have; none where counters do not tell."""
    if not leg.counters:
        return set()
    own = _counted(cell, leg.counters)
    if leg.role != "decode" or o.route != "cell":
        return {own} if o.route != "former-p" else set()
    if cell.routed:
        # The router hides what P said to D.
        prefill = o.shared_counters.get("prefill")
        return {own, _counted(cell, prefill)} if prefill else set()
    prefilled = o.leg("prefill")
    told = (prefilled.kv_transfer_params or {}).get("remote_prefill_cached_tokens") if prefilled is not None else None
    if prefilled is None or not isinstance(told, int):
        return {own}
    return {_counted(cell, prefilled.counters) if prefilled.counters else told}


def _counted(cell: CellView, counters: dict[str, float]) -> int:
    """Return how many prompt tokens an engine counted as cached, its own and another's."""
    if BY_SOURCE in cell.history.run.lacking:
        return int(counters.get("prefix_hits", 0) + counters.get("external_hits", 0))
    sources = ("local_cache_hit", "external_kv_transfer")
    return int(sum(counters.get(f"prompt_tokens_{source}", 0) for source in sources))
