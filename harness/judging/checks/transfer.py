"""Check, per request, that KV moved from P to D or, in a single-engine control, that none did."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from harness.history.records import COLD, Leg, Observation
from harness.history.verdict import Verdict
from harness.judging.evidence import CellView
from harness.judging.figures import (
    NO_EVIDENCE,
    Counted,
    HandOffParameters,
    PublishedBlocks,
    RouterCounted,
    TransferFigures,
)
from harness.judging.findings import CheckResult, Finding, conclude
from harness.observed.kv_groups import published_groups
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.engine_args import DATA, parallel_size
from harness.prompts.lengths import blocks, freed_blocks, published_blocks
from harness.util.text import counted

NAME = "transfer"
_NO_WINDOW = (None,)
_NOTHING_SEEN = "no hand-off whose parameters were seen"


def transfer(cell: CellView) -> CheckResult:
    """Check parameters, blocks, external tokens, bytes and descriptors of hand-offs; controls move nothing."""
    if cell.handed_off and (why := _unproven(cell)):
        return _by_tokens(cell, why)
    judge = (_routed if cell.routed else _hand_off) if cell.handed_off else _control
    findings: list[Finding] = []
    judged = 0
    for o in cell.all_observations():
        if o.cut_short or o.route != "cell":
            continue
        judged += 1
        findings.extend(judge(cell, o))
    findings.extend(_stages(cell))
    findings.extend(_leases(cell))
    if cell.handed_off:
        findings.extend(_block_bytes(cell))
        findings.extend(_one_p(cell))
    return conclude(NAME, cell.id, judged, findings, figures=_moved(cell) if cell.handed_off else NO_EVIDENCE)


def _unproven(cell: CellView) -> str:
    """Return why no rule says which KV a hand-off has to move, or ""."""
    if not cell.by_nixl:
        connector = cell.settings.connector
        return (
            f"{connector} is not NIXL, whose counters prove which KV moved: that D took prompt tokens from outside "
            "is the only evidence, so a pair with this connector cannot pass; its tokens and acceptance are judged "
            "all the same"
        )
    kind, missing = ("recurrent state", _untold_of_state) if cell.record.recurrent else ("windows", _untold_of_windows)
    return (found := missing(cell)) and (
        f"expected to see which blocks of a model with {kind} P hands over, found {found}, so this pair cannot pass; "
        "its tokens and acceptance are judged all the same"
    )


def _untold_of_windows(cell: CellView) -> str:
    """Return that P was asked for prompts that are longer than a window, but not seen to say what it hands over of
    them, or ""."""
    if not any(cell.record.windows):
        return ""
    asked = cell.history.in_order(cell.id)
    told = any(published_groups(o) for o in asked) or not any(cell.kv_groups.limits(o) for o in asked)
    return "" if told else _NOTHING_SEEN


def _untold_of_state(cell: CellView) -> str:
    """Return what is not known of a pair whose model has recurrent state, without which nothing can be expected of the
    number of its blocks and their bytes, or ""."""
    size = cell.record.block_size
    told = {engine.block_size for role in cell.roles if (engine := cell.engine(role)) is not None}
    groups = {len(published) for o in cell.history.in_order(cell.id) if (published := published_groups(o))}
    if told != {size}:
        return f"engines that do not say that their blocks have {size} tokens, but {_words_of(told)}"
    if len(cell.record.windows) > 1:
        return "sliding windows, too, and nothing that tells their KV-cache groups from those of the state"
    if not groups:
        return _NOTHING_SEEN
    if not cell.kv_groups.clipped or min(groups) <= len(cell.kv_groups.clipped):
        return f"{len(cell.kv_groups.clipped)} of {min(groups)} KV-cache groups of which P publishes a single block"
    if _sizes(cell) is None:
        return (
            "no two hand-offs of unlike numbers of blocks, which would tell the bytes of a block from those of a state"
        )
    return ""


def _words_of(sizes: set[int | None]) -> str:
    return (
        ", ".join("nothing" if size is None else str(size) for size in sorted(sizes, key=lambda n: n or 0)) or "nothing"
    )


def _by_tokens(cell: CellView, why: str) -> CheckResult:
    """Check only that D took its prompt tokens from outside.

    That is no proof of what was moved, nor of which blocks, so that such a cell is UNKNOWN at best.
    """
    alone = [o for o in cell.all_observations() if not o.cut_short and o.route == "cell" and o.concurrent == 1]
    findings = [cell.untested(NAME, why)]
    for o in alone:
        decode = o.leg("decode")
        if decode is None or not decode.counters:
            findings.append(cell.untested(NAME, "expected counters of D for this request, found none", o))
        elif short := _tokens_missing(cell, o, decode):
            findings.append(cell.untested(NAME, short, o, Counted(counters=decode.counters)))
    return conclude(NAME, cell.id, len(alone), findings)


def _tokens_missing(cell: CellView, o: Observation, decode: Leg) -> str:
    """Return that D took fewer prompt tokens from outside than all but those that it computes, at least the last, and
    those that it had, or ""."""
    local = decode.counters.get("prefix_hits", 0)
    wanted = cell.hand_off.fetched_tokens(o) - local
    if decode.external_tokens >= wanted:
        return ""
    return (
        f"expected at least {wanted:.0f} prompt tokens from outside ({local:.0f} were cached on D), found "
        f"{decode.external_tokens:.0f}: part of the prompt was not transferred"
    )


def _moved(cell: CellView) -> TransferFigures:
    legs = [leg for o in cell.all_observations() if (leg := o.leg("decode"))]
    return TransferFigures(
        bytes=int(sum(leg.counters.get("nixl_bytes", 0) for leg in legs)),
        descriptors=int(sum(leg.counters.get("nixl_descriptors", 0) for leg in legs)),
        external_tokens=int(sum(leg.external_tokens for leg in legs)),
    )


def _block_bytes(cell: CellView) -> list[Finding]:
    """Return findings about hand-offs that did not move whole blocks of the size that all blocks of the cell have.

    A block has the bytes of B tokens in every layer of target and drafter, so a missing layer shows as a smaller one.
    """
    sizes = _sizes(cell)
    if sizes is None:
        return []
    size, state = sizes
    findings = []
    scenario, several = cell.scenario, len(cell.record.windows) > 1
    for o, decode in cell.hand_off.counted_alone():
        if o.scenario != scenario:
            continue
        moved = decode.counters["nixl_bytes"]
        # Each answer of several reads the prompt's KV for itself.
        whole = _handed(cell, o) * o.answers
        hits = decode.counters.get("prefix_hits", 0)
        if hits and several:
            # Of layers with a window D has other blocks cached than of the others, and nothing says how many.
            continue
        cached = hits / cell.block_size("prefill")
        pulled = (moved - state) / size
        if cached and pulled > whole - cached:
            findings.append(_shifted(cell, o, whole, cached, pulled))
        elif pulled != whole - cached:
            message = (
                f"expected NIXL to move {whole - cached:.4g} blocks of {size:.0f} bytes"
                f"{f' and {state:.0f} bytes of state' if state else ''}, as in most hand-offs of this cell, found "
                f"{moved:.0f} bytes, which are {pulled:.4g} blocks: layers or blocks are missing, or too many moved"
            )
            findings.append(cell.untested(NAME, message, o, Counted(counters=decode.counters)))
    if cell.record.recurrent and state <= 0:
        message = "expected NIXL to move recurrent state as well as blocks in each hand-off, found only blocks"
        findings.append(cell.untested(NAME, message))
    return findings + _implausible(cell, size)


def _handed(cell: RecordedCell, o: Observation) -> int:
    """Return how many blocks D has to pull for a hand-off, over all KV-cache groups if layers see unlike numbers of
    tokens; blocks of all groups have one size then."""
    tokens, size = cell.hand_off.handed_tokens(o), cell.block_size("prefill")
    whole = blocks(tokens, size)
    if cell.record.windows == _NO_WINDOW:
        return whole
    windows = [w for w in cell.record.windows if w is not None]
    if not windows or not (published := published_groups(o)):
        return whole
    wanted = 0
    for index, group in enumerate(published):
        # Of several windows, the group's is the one that leaves as many blocks as P publishes.
        near = [(abs(published_blocks(tokens, size, window) - len(group)), window) for window in windows]
        # D leaves out what no query will see any more, which may be a block less than P publishes.
        unseen = freed_blocks(tokens, size, min(near)[1]) if index in cell.kv_groups.clipped else 0
        wanted += whole - unseen
    return wanted


def _shifted(cell: CellView, o: Observation, whole: int, cached: float, pulled: float) -> Finding:
    message = (
        f"expected D to pull the {whole - cached:.4g} of P's {whole} blocks that it did not have cached, found "
        f"{pulled:.4g}: it reads P's last blocks, so each block that it pulled holds the KV of earlier tokens"
    )
    decode = o.leg("decode")
    counters = decode.counters if decode is not None else {}
    return cell.wrong_kv(NAME, message, o, Counted(counters=counters))


_OF_A_REQUEST = (
    "remote_block_ids",
    "remote_blocks_expiry_time",
    "remote_num_tokens",
    "remote_prefill_cached_tokens",
    "remote_request_id",
)
"""P's parameters that differ between requests; all others name P and say how it is reached."""
_SORTED = json.JSONEncoder(sort_keys=True)


def _one_p(cell: CellView) -> list[Finding]:
    """Return findings about hand-offs whose parameters name another P than most, or another request."""
    given = [(o, p, p.kv_transfer_params) for o in cell.all_observations() if (p := o.leg("prefill"))]
    named = [(o, p, params) for o, p, params in given if params and o.error is None]
    if not named:
        return []
    names = [_SORTED.encode({k: v for k, v in params.items() if k not in _OF_A_REQUEST}) for _, _, params in named]
    which = [cell.hand_off.p_of(o) for o, _, _ in named]
    # Each of several data-parallel ranks of P has a name of its own.
    many = parallel_size(cell.settings.extra_args, [DATA])
    usual_of = {
        one: [name for name, _ in Counter(n for n, of in zip(names, which, strict=True) if of == one).most_common(many)]
        for one in {*which}
    }
    findings = []
    for (o, leg, params), name, one in zip(named, names, which, strict=True):
        usual = usual_of[one]
        cached = params.get("remote_prefill_cached_tokens")
        wrong = []
        if name not in usual:
            wrong.append(f"the P of the other hand-offs, {' or '.join(usual)}, found {name}")
        if leg.request_id not in str(params.get("remote_request_id", leg.request_id)):
            wrong.append(f"request {leg.request_id}, found {params['remote_request_id']}")
        decode = o.leg("decode")
        if decode is not None and decode.request_id != leg.request_id:
            wrong.append(f"the request that D answered, {decode.request_id}, found {leg.request_id}")
        # What P reads back from D counts as cached, too.
        if leg.counters and cached is not None and cached != leg.counters.get("prefix_hits", 0) + leg.external_tokens:
            wrong.append(f"as many cached tokens as P counted, found {cached}")
        findings += [
            cell.untested(NAME, f"expected P to name {words}", o, HandOffParameters(kv_transfer_params=params))
            for words in wrong
        ]
    return findings


class _Sizes(NamedTuple):
    """Bytes that a hand-off moves."""

    block: float
    """Of each block of attention KV."""
    state: float = 0.0
    """Of the recurrent state, which is as large for all prompts."""


def _sizes(cell: RecordedCell) -> _Sizes | None:
    """Return the most frequent figures of cold hand-offs; None if too few were counted alone."""
    moved = _bytes_by(cell, partial(_handed, cell))
    if not cell.record.recurrent:
        each = [total / n for n, totals in moved.items() for total in totals]
        return _Sizes(statistics.mode(each)) if each else None
    usual = sorted((n, statistics.mode(totals)) for n, totals in moved.items())
    if len(usual) < 2:
        return None
    block = statistics.mode((b - a) / (more - fewer) for (fewer, a), (more, b) in pairwise(usual))
    return _Sizes(block, statistics.mode(total - n * block for n, total in usual)) if block > 0 else None


def _implausible(cell: CellView, size: float) -> list[Finding]:
    """Return a finding if no model's blocks have this size, or if the drafter's layers cannot be among them."""
    if not cell.cold:
        return []
    item = cell.settings.kv_item_bytes
    unit = cell.block_size("prefill") * item
    if size % unit:
        message = (
            f"expected blocks of {cell.block_size('prefill')} tokens and {item} bytes a number to have a "
            f"multiple of {unit} bytes, found {size:.6g}: NIXL's bytes do not prove that KV moved"
        )
        return [cell.untested(NAME, message)]
    if (wrong := _not_as_configured(cell, size)) is not None:
        return [wrong]
    plain = cell.history.cell(cell.name.beside("pd", "none").id)
    if plain is None or not cell.traits.own_layers:
        return []
    # Of all blocks: where layers are of several kinds, a drafter changes how many of them one block holds.
    moved, least = (_bytes_by(c, c.hand_off.handed_tokens) for c in (cell, replace(cell, record=plain)))
    tokens = max(moved.keys() & least.keys(), default=0)
    if not tokens:
        return []
    found, bare = statistics.mode(moved[tokens]), statistics.mode(least[tokens])
    if found <= bare:
        message = (
            f"expected hand-offs of {tokens} tokens to move more than the {bare:.0f} bytes of {plain.cell}, because of "
            f"the drafter's layers, found {found:.0f}: the drafter's KV was not handed over"
        )
        return [cell.untested(NAME, message)]
    return []


def _not_as_configured(cell: CellView, size: float) -> Finding | None:
    """Return the finding that blocks do not have the bytes that the models' configs tell."""
    numbers, item = cell.record.kv_numbers, cell.settings.kv_item_bytes
    # Of some types nothing tells the bytes of a number.
    if numbers is None or item == 1:
        return None
    wanted = cell.block_size("prefill") * numbers * item
    # Each of several ranks moves its own heads, which others have, too, where there are fewer heads than ranks.
    ranks = max(cell.settings.ranks(role) for role in ("prefill", "decode"))
    if wanted <= size <= wanted * ranks:
        return None
    over, of_one = (f" to {wanted * ranks}", ", or those of a rank") if ranks > 1 else ("", "")
    message = (
        f"expected blocks of {cell.block_size('prefill')} tokens to have {wanted}{over} bytes, by the configs "
        f"of the models, found {size:.6g}: layers or heads are missing{of_one}, or moved twice"
    )
    return cell.untested(NAME, message)


def _bytes_by(cell: RecordedCell, size: Callable[[Observation], int]) -> dict[int, list[float]]:
    """Return the bytes of hand-offs of which D had nothing cached, by their size."""
    moved = defaultdict(list)
    for o, leg in cell.hand_off.counted_alone():
        if not leg.counters.get("prefix_hits"):
            moved[size(o)].append(leg.counters["nixl_bytes"])
    return moved


def _control(cell: CellView, o: Observation) -> list[Finding]:
    leg = o.leg("single")
    if leg is None:
        return []
    tokens, moved = leg.external_tokens, leg.counters.get("nixl_bytes", 0)
    if not tokens and not moved:
        return []
    message = (
        f"expected a local prefill in a single-engine control, found {tokens:.0f} prompt tokens and {moved:.0f} bytes "
        "from outside; this cell is not a valid control"
    )
    return [cell.untested(NAME, message, o, Counted(counters=leg.counters))]


def _leases(cell: CellView) -> list[Finding]:
    """Return findings about leases of P that expired before D had read the blocks.

    P counts an expired lease during whatever request it serves then. A lease that D never took over must expire, and
    that of a late request may: as many expiries as such requests came before, in the same cell or before its first
    recorded request, are expected. Those from before have all ended a lease later, and are counted at the next request.
    """
    findings = []
    counted: set[tuple[str, int, int]] = set()
    prefill, ranks = cell.engine("prefill"), cell.settings.ranks("prefill")
    # Each rank of P counts the end of a lease.
    pending, kept = 0.0, float(ranks * prefill.kept_blocks if prefill else 0)
    ordered = cell.history.in_order(cell.id)
    # Their requests were sent a second time, which is not on record.
    replayed = {_script_of(o) for o in ordered if o.second_try is not None}
    lease_s = cell.settings.kv_lease_s
    if not cell.history.of_cell(cell.id).once(("expired",), lambda: any(map(_counts_expired, ordered))):
        return [_late_request(cell, o) for o in ordered if o.scenario == cell.scenario and o.came_late(lease_s)]
    kept_until = ordered[0].started_at + lease_s if ordered else 0.0
    for o in ordered:
        expired = _expired(o)
        # Concurrent requests share one set of counters.
        place = (o.scenario, o.instance, o.stage) if o.concurrent > 1 else (o.scenario, o.sequence, -1)
        if o.shared_counters and place not in counted:
            counted.add(place)
            expired += o.shared_counters.get("prefill", {}).get("nixl_expired", 0)
        late = o.came_late(lease_s)
        times = 1 + (bool(replayed) and _script_of(o) in replayed)
        pending += ranks * (late + o.attempts - 1 + times * _never_pulled(cell, o))
        from_before, explained = min(expired, kept), min(max(0.0, expired - kept), pending)
        kept = kept - from_before if o.started_at <= kept_until else 0.0
        pending -= explained
        expired -= from_before + explained
        if o.scenario == cell.scenario:
            findings += [_late_request(cell, o)] if late else []
            findings += [_early_expiry(cell, o, math.ceil(expired / ranks))] if expired else []
    return findings


def _counts_expired(o: Observation) -> bool:
    """Return whether leases of P ended during a request or those beside it."""
    return bool(_expired(o) or o.shared_counters.get("prefill", {}).get("nixl_expired"))


def _expired(o: Observation) -> float:
    """Return how many leases of P ended during a request that is alone."""
    return sum([leg.counters.get("nixl_expired", 0.0) for leg in o.legs if leg.role == "prefill"])


def _script_of(o: Observation) -> tuple[str, int, str]:
    """Return what the requests have in common that are sent a second time together."""
    if o.scenario == COLD:
        return o.scenario, o.stage, o.key if o.concurrent == 1 else ""
    return o.scenario, o.instance, ""


def _late_request(cell: CellView, o: Observation) -> Finding:
    seconds, counters = o.legs[-1].seconds, o.legs[-1].counters
    return cell.untested(
        NAME,
        f"D answered after {seconds:.1f} s, of which its engine had the request for "
        f"{counters['queue_seconds'] + counters['inference_seconds']:.1f} s, and P's lease lasts "
        f"{cell.settings.kv_lease_s:g} s: D may have read blocks that P had given to other requests, so this request "
        "is not judged; the machine is too busy, run it again",
        o,
    )


def _early_expiry(cell: CellView, o: Observation, expired: int) -> Finding:
    message = (
        f"expected P to keep its blocks until D has read them, found {expired} leases that expired before that: "
        "D may have read blocks that P had given to other requests"
    )
    return cell.wrong_kv(NAME, message, o)


def _never_pulled(cell: CellView, o: Observation) -> bool:
    """Return whether P answered a hand-off and D read nothing, so that the lease must expire, or may have. D tells P
    that it had everything cached."""
    if o.abandon is not None and o.final is None:
        return True
    prefill, decode = o.leg("prefill"), o.leg("decode")
    if prefill is None or not prefill.kv_transfer_params:
        return False
    if decode is None:
        return True
    return bool(decode.counters) and not (
        decode.counters.get("nixl_bytes") or cell.prefix_cache.has_all_cached(o, decode)
    )


def _stages(cell: CellView) -> list[Finding]:
    """Return findings about concurrent requests, whose transfers and tokens can only be verified together."""
    if not cell.handed_off:
        return []
    stages: dict[tuple[int, int], list[Observation]] = {}
    for o in cell.all_observations():
        if o.concurrent > 1 and o.error is None and o.route == "cell":
            stages.setdefault((o.instance, o.stage), []).append(o)
    findings = []
    sizes = _sizes(cell) if stages else None
    for members in stages.values():
        if any(o.abandon is not None for o in members):
            # How much was moved for a request before it was given up is not known.
            continue
        counters = members[0].shared_counters.get("decode", {})
        # Of prompts with a common prefix, the later one may find the blocks of the earlier in D's cache.
        cached = counters.get("prefix_hits", 0)
        if cached:
            cached = min(cached, sum(cell.prefix_cache.hit_of_any(cell.all_observations(), o) for o in members))
        wanted = sum(map(cell.hand_off.fetched_tokens, members)) - cached
        least = len(members) - cell.prefix_cache.most_all_cached(members, counters)
        moved = counters.get("prompt_tokens_external_kv_transfer", counters.get("external_hits", 0.0))
        transfers, whole = counters.get("nixl_transfers", 0), counters.get("nixl_bytes", 0)
        if moved < wanted or transfers < least or len({bool(n) for n in (moved, transfers, whole)}) > 1:
            message = (
                f"expected {least} NIXL transfers of {wanted:.0f} prompt tokens for requests sent together, "
                f"found {transfers:.0f} transfers, {moved:.0f} tokens and {whole:.0f} bytes"
            )
            if own := counters.get("prompt_tokens_local_compute"):
                message += f"; D computed {counted(int(own), 'prompt token')} itself"
            findings.append(cell.untested(NAME, message, members[0], Counted(counters=counters)))
        findings += _failed(cell, members[0], counters)
        if sizes is not None and (whole - transfers / cell.hand_off.transfers_each * sizes.state) % sizes.block:
            message = (
                f"expected whole blocks of {sizes.block:.0f} bytes for requests sent together, found a part of one"
            )
            findings.append(cell.untested(NAME, message, members[0], Counted(counters=counters)))
        elif sizes is not None and cell.cold and not cached:
            # Nothing of a cold prompt is cached, so that each is read whole.
            each = sum(_handed(cell, o) * sizes.block + sizes.state for o in members)
            if whole != each:
                message = (
                    f"expected NIXL to move {each:.0f} bytes for {counted(len(members), 'cold prompt')} sent together, "
                    f"by those sent alone, found {whole:.0f}: layers or blocks are missing, or too many moved"
                )
                findings.append(cell.untested(NAME, message, members[0], Counted(counters=counters)))
    return findings


def _failed(cell: CellView, o: Observation, counters: dict[str, float]) -> list[Finding]:
    failed = counters.get("nixl_failed_transfers", 0) + counters.get("nixl_failed_notifications", 0)
    if not failed:
        return []
    message = f"expected no failed NIXL transfer or notification, found {failed:.0f}"
    return [cell.finding(NAME, Verdict.UNKNOWN, "infrastructure", message, o, Counted(counters=counters))]


def _hand_off(cell: CellView, o: Observation) -> list[Finding]:
    prefill, decode = o.leg("prefill"), o.leg("decode")
    if prefill is None or decode is None or not prefill.kv_transfer_params:
        message = "no KV moved: a leg of the hand-off, or P's parameters, are missing"
        return [cell.untested(NAME, message, o)]
    return _parameters(cell, o, prefill) + (_movement(cell, o, decode) if o.concurrent == 1 else [])


def _routed(cell: CellView, o: Observation) -> list[Finding]:
    """Check a routed request by the engines' counters, the only evidence: P answered, and D received external KV."""
    decode = o.leg("decode")
    if o.concurrent > 1 or decode is None:
        return []
    fallback = _local_prefill(o, decode)
    return [_not_handed_off(cell, o, decode, fallback)] if fallback else _movement(cell, o, decode)


def _local_prefill(o: Observation, decode: Leg) -> str:
    """Return the evidence that D computed the prompt itself although the router reported success; else empty.

    Missing counters are not evidence.
    """
    if decode.counters.get("nixl_bytes", 0) or decode.external_tokens:
        return ""
    computed = decode.counters.get("prompt_tokens_local_compute", 0)
    if computed < len(o.sent_ids) - decode.counters.get("prefix_hits", 0):
        return ""
    asked = o.shared_counters.get("prefill", {}).get("finished_requests", 0)
    return f"D computed {computed:.0f} prompt tokens itself, took none from outside, and P " + (
        "answered for nothing" if asked else "was never asked"
    )


def _not_handed_off(cell: CellView, o: Observation, decode: Leg, why: str) -> Finding:
    message = (
        f"expected the router to hand {len(o.sent_ids)} prompt tokens from P to D, or to fail, found an answer with "
        f"status {decode.status} and no hand-off: {why}; see the router's log and its command line"
    )
    counted = RouterCounted(counters=decode.counters, prefill_counters=o.shared_counters.get("prefill", {}))
    return cell.finding(NAME, Verdict.REGRESSION, "routing", message, o, counted)


def _parameters(cell: CellView, o: Observation, prefill: Leg) -> list[Finding]:
    """Check P's parameters: the prompt's tokens, and per KV-cache group the blocks that they fill, or those of them
    that a sliding window leaves."""
    params = prefill.kv_transfer_params or {}
    given = HandOffParameters(kv_transfer_params=params)
    held = cell.hand_off.handed_tokens(o)
    if params.get("do_remote_prefill") is not True or params.get("do_remote_decode") is not False:
        message = "P's parameters do not tell D to pull (do_remote_prefill alone)"
        return [cell.untested(NAME, message, o, given)]
    groups = params.get("remote_block_ids")
    count = params.get("remote_num_tokens", held)
    findings = []
    if not isinstance(groups, list) or not groups or not all(isinstance(g, list) and g for g in groups):
        message = f"expected P to publish block ids per KV-cache group, found {groups!r}: nothing to pull"
        return [cell.untested(NAME, message, o)]
    if type(count) is not int:
        message = f"expected P to say of how many tokens it publishes KV, found remote_num_tokens = {count!r}"
        return [cell.untested(NAME, message, o, given)]
    if count != held:
        message = f"expected P to publish KV of {held} tokens, found remote_num_tokens = {count}"
        if cell.record.modules > 1 and count > held:
            message += ": what later modules have of the tokens beyond is the KV of drafts"
            findings.append(cell.finding(NAME, Verdict.REGRESSION, "drafter-kv", message, o, given))
        else:
            findings.append(cell.wrong_kv(NAME, message, o, given))
    if "remote_num_tokens" not in params:
        message = "P does not say of how many tokens it publishes KV (remote_num_tokens)"
        findings.append(cell.untested(NAME, message, o, given))
    size = cell.block_size("prefill")
    allowed = sorted({published_blocks(count, size, window) for window in cell.record.windows})
    longest = max(range(len(groups)), key=lambda index: len(groups[index])) if len(groups) > 1 else 0
    pool = p.kv_blocks if (p := cell.engine("prefill")) is not None else None
    for index, group in enumerate(groups):
        held_ids = group[_null_blocks(cell, index, group, count) :]
        if pool is not None and (strange := [b for b in held_ids if type(b) is not int or not 0 < b < pool]):
            message = (
                f"expected P to publish blocks 1 to {pool - 1} of its pool in KV-cache group {index}, found "
                f"{strange[0]!r}: D reads memory that is no block of P"
            )
            findings.append(cell.wrong_kv(NAME, message, o, given))
        if len({*held_ids} if {*map(type, held_ids)} <= {int} else {*map(str, held_ids)}) < len(held_ids):
            message = f"P published a block of KV-cache group {index} twice: D reads the KV of other tokens there"
            findings.append(cell.wrong_kv(NAME, message, o, given))
        # The group with the most blocks has the layers that see most; which of the others has a window is not told.
        wanted = allowed[-1] if index == longest else min(allowed, key=lambda n: abs(n - len(group)))
        if cell.record.recurrent:
            wanted = 1 if index in cell.kv_groups.clipped else allowed[-1]
        if len(group) != wanted:
            message = (
                f"expected P to publish {_wanted_words(cell, count, wanted)} in KV-cache group {index}, "
                f"found {len(group)}"
            )
            published = PublishedBlocks(
                kv_transfer_params=params, group=index, expected_blocks=wanted, published_blocks=len(group)
            )
            findings.append(cell.wrong_kv(NAME, message, o, published))
    return findings


def _null_blocks(cell: CellView, index: int, group: Sequence[Any], tokens: int) -> int:
    """Return how many blocks at the front of a published KV-cache group may be block 0, which stands for none, and are:
    those that a sliding window has left, in a group that has one. Any may have one where no hand-off of the cell is so
    long that fewer blocks tell which do."""
    if group[0] != 0 or (cell.kv_groups.clipped and index not in cell.kv_groups.clipped):
        return 0
    size = cell.block_size("prefill")
    left_out = blocks(tokens, size) - len(group)
    freed = [freed_blocks(tokens, size, w) - left_out for w in cell.record.windows if w is not None]
    nulls = sum(1 for _ in takewhile(lambda block: type(block) is int and block == 0, group))
    return min(nulls, max(freed, default=0), len(group) - 1)


def _wanted_words(cell: CellView, tokens: int, wanted: int) -> str:
    filled = blocks(tokens, cell.block_size("prefill"))
    if wanted < filled:
        return "one block of state" if cell.record.recurrent else f"the last {wanted} of {filled} blocks"
    return f"ceil({tokens} / {cell.block_size('prefill')}) = {wanted} blocks"


def _not_proven(decode: Leg) -> list[str]:
    """Return which figures that prove a transfer D does not have."""
    moved, parts = decode.counters.get("nixl_bytes", 0), decode.counters.get("nixl_descriptors", 0)
    tokens = decode.external_tokens
    if moved > 0 and parts > 0 and tokens > 0:
        return []
    proof = {"bytes by NIXL": moved, "descriptors by NIXL": parts, "prompt tokens from outside": tokens}
    return [name for name, value in proof.items() if value <= 0]


def _movement(cell: CellView, o: Observation, decode: Leg) -> list[Finding]:
    """Check that D received all prompt tokens but the last, which it recomputes, and those that it had cached."""
    counters = decode.counters
    if not counters:
        message = "expected counters of the decode engine for this request, found none: no proof of a transfer"
        return [cell.untested(NAME, message, o)]
    if cell.prefix_cache.has_all_cached(o, decode):
        return _failed(cell, o, counters)
    findings = []
    absent = _not_proven(decode)
    if absent:
        message = f"expected proof that KV moved to D, found no {', no '.join(absent)}: D may have prefilled by itself"
        findings.append(cell.untested(NAME, message, o, Counted(counters=counters)))
    elif missing := _tokens_missing(cell, o, decode):
        findings.append(cell.untested(NAME, missing, o, Counted(counters=counters)))
    return findings + _failed(cell, o, counters)
