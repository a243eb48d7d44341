"""Locate the damage of one request in its prompt's KV.

In outputs that repeat the prompt, a wrong token or a missing stretch points to the block that holds its source. Block
counts in the hand-off's parameters, bytes moved and cache hits are evidence that does not depend on the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from harness.history.acceptance import Steps, align, by_position, real_steps
from harness.history.records import Leg, Observation
from harness.history.token_ids import common_prefix
from harness.history.verdict import Verdict
from harness.judging.diagnosis.sources import is_copy, repeated, sources
from harness.judging.evidence import CellView
from harness.judging.figures import KVDifference, LogprobDifference
from harness.judging.findings import CheckResult, Finding, Location
from harness.observed.acceptance import drafts_by_crowd, placed_steps
from harness.prompts.lengths import blocks
from harness.util.text import counted


class Request(NamedTuple):
    """A request with its expected result."""

    o: Observation
    leg: Leg
    expected: tuple[int, ...]
    """Reference tokens; empty if unknown."""
    steps: Steps | None
    """Reference of accepted drafts per step; None if unknown."""


def request_of(cell: CellView, o: Observation) -> Request | None:
    """Return a request with its references; None if it has no output."""
    leg = o.final
    if leg is None or leg.output_ids is None:
        return None
    tokens = _reference_tokens(cell, o)
    row = cell.recorded(cell.lineup, o)
    return Request(o, leg, tokens, row.steps if row is not None and row.accepted else None)


def _reference_tokens(cell: CellView, o: Observation) -> tuple[int, ...]:
    """Return the plain engine's tokens from the baseline, or else from this run; empty if neither has the prompt."""
    row = cell.recorded(cell.name.plain, o)
    if row is not None:
        return row.output_ids[: o.most_tokens]
    if cell.is_plain:
        return ()
    reference = cell.answers_of(cell.name.reference).get(o.key)
    leg = reference.final if reference else None
    return leg.output_ids or () if leg else ()


def locate(cell: CellView, results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the results with a location added to every certain finding about a request."""
    observations = {**cell.observations("text"), **cell.observations("ids")}
    seen = {
        f.part or f.prompt_id: f.location
        for r in results
        for f in r.findings
        if isinstance(f.evidence, KVDifference) and f.location is not None and f.damage == "target-kv"
    }
    cache: dict[str, Location | None] = {}
    out = []
    for result in results:
        found = []
        for finding in result.findings:
            key = finding.part or finding.prompt_id
            o = observations.get(key) if key else None
            # With a routing failure no KV was handed over, so none can be damaged.
            if o is not None and finding.verdict is not Verdict.UNKNOWN and finding.damage != "routing":
                if o.key not in cache:
                    cache[o.key] = location(cell, o)
                finding = finding.model_copy(update={"location": _of(finding, cell, o, cache[o.key], seen.get(key))})
            found.append(finding)
        out.append(result.model_copy(update={"findings": tuple(found)}))
    return out


def _of(
    finding: Finding, cell: CellView, o: Observation, found: Location | None, seen: Location | None
) -> Location | None:
    """Return the location of a finding; ``found`` is that of its request, ``seen`` where its KV itself is wrong.

    Log-probs tell that there is damage that leaves all tokens right; where it is, the KV says alone.
    """
    if finding.location is not None:
        # A check that saw the KV itself.
        return finding.location
    moved = finding.evidence
    if not isinstance(moved, LogprobDifference) or (found is not None and found.position is not None):
        return found
    return seen or _from_logprobs(cell, o, moved)


def location(cell: CellView, o: Observation) -> Location | None:
    """Return where the damage of one request is; None if nothing differs or there is no reference."""
    request = request_of(cell, o)
    if request is None or not request.expected:
        return None
    if request.leg.output_ids != request.expected:
        return _from_tokens(cell, request)
    return _from_steps(cell, request)


def _from_tokens(cell: CellView, r: Request) -> Location:
    size = cell.record.block_size
    count = blocks(len(r.o.sent_ids), size)
    ours = r.leg.output_ids or ()
    at = common_prefix(ours, r.expected)
    structure = _structure(cell, r.o, count)
    wanted = sources(r.o.sent_ids, r.expected)
    if not is_copy(wanted):
        text = "the expected output does not repeat the prompt, so its tokens do not tell which block was read wrongly"
        return _located(structure, count, [text])
    position = wanted[at] if at < len(wanted) else None
    missing = _missing_blocks([p for p in wanted if p is not None], repeated(sources(r.o.sent_ids, ours)), size)
    whole = "the prompt" if len(missing) == count else name_blocks(missing, count)
    seen = [f"the output repeats nothing of {whole}"] if missing else []
    first = f"the first wrong token is output {at}"
    if position is not None:
        first += f", which copies prompt position {position} in block {position // size}"
    seen.append(first)
    if position is not None:
        seen.append(_jump(r.o.sent_ids, ours, at, position, size))
    found = missing or ((position // size,) if position is not None else ())
    return _located(structure, count, seen, found, position)


def _located(
    structure: _Structure, count: int, words: Sequence[str], found: Sequence[int] = (), position: int | None = None
) -> Location:
    """Return a location: the blocks that the structural evidence names, or else those that were ``found``."""
    return Location(
        blocks=structure.blocks or tuple(found),
        of=count,
        shift=structure.shift,
        position=position,
        text=_join([structure.text, *words]),
    )


def _jump(prompt: Sequence[int], output: Sequence[int], at: int, position: int, size: int) -> str:
    """Return from where the output continued instead."""
    if at >= len(output):
        return "the output ends there"
    there = sources(prompt, output)[at]
    if there is not None:
        return f"it has prompt position {there} of block {there // size} instead, {there - position:+d} tokens away"
    return f"the wrong token {'occurs several times' if output[at] in prompt else 'does not occur'} in the prompt"


def _missing_blocks(wanted: Sequence[int], read: set[int], size: int) -> tuple[int, ...]:
    """Return the blocks that the output should have repeated in part but did not."""
    should = {p // size for p in wanted}
    return tuple(sorted(should - {p // size for p in read}))


def _from_steps(cell: CellView, r: Request) -> Location | None:
    """Locate damage when all tokens are right: steps that accept fewer drafts show which blocks the drafter lacks."""
    steps = real_steps(r.leg)
    if steps is None or r.steps is None or r.leg.output_ids is None:
        return None
    placed = placed_steps(cell, r.o, steps, r.steps) if drafts_by_crowd(cell, r.o, r.steps) else None
    wanted: Sequence[int | None] = placed.expected if placed is not None else r.steps.accepted
    pairs = enumerate(zip(steps.accepted, wanted, strict=False))
    first = next((i for i, (a, b) in pairs if b is not None and a != b), None)
    if first is None:
        return None
    aligned = placed.aligned if placed is not None else align(steps.accepted, r.steps.accepted, len(r.leg.output_ids))
    size = cell.record.block_size
    count = blocks(len(r.o.sent_ids), size)
    ours, theirs = by_position(steps.accepted), by_position(r.steps.accepted)
    if placed is not None:
        ours = dict(zip(placed.at, steps.accepted, strict=True))
        theirs = {at: e for at, e in zip(placed.at, placed.expected, strict=True) if e is not None}
    since = "the hand-off" if cell.handed_off else "the prefill"
    if steps.drafted is not None and placed is None:
        # Steps without drafts are not counted, so that the others' positions are not known.
        return Location(of=count, step=first, text=f"acceptance differs from step {first} after {since}")
    lines = [
        f"acceptance differs from step {first} after {since}, at {len(aligned.differing)} of {aligned.common} "
        "comparable steps"
    ]
    if steps.padded:
        lines[0] += " (the padded first step is left out)"
    origin = sources(r.o.sent_ids, r.expected)
    if not is_copy(origin):
        lines.append("the output does not repeat the prompt, so the steps do not tell which block the drafter lacks")
        return Location(of=count, step=first, text=_join(lines))
    gaps_by_block: dict[int, list[int]] = {}
    for at, expected in theirs.items():
        source = origin[at] if at < len(origin) else None
        if at in ours and source is not None and expected:
            gaps_by_block.setdefault(source // size, []).append(ours[at] - expected)
    low = tuple(sorted(b for b, gaps in gaps_by_block.items() if sum(g < 0 for g in gaps) >= 0.5 * len(gaps)))
    some = low or tuple(sorted(b for b, gaps in gaps_by_block.items() if any(g < 0 for g in gaps)))
    if some:
        often = "are rejected" if low else "are rejected at some of their steps"
        lines.append(f"drafts that copy {name_blocks(some, count)} {often}")
    return Location(blocks=some, of=count, step=first, text=_join(lines))


def _from_logprobs(cell: CellView, o: Observation, moved: LogprobDifference) -> Location:
    """Return what log-probs tell of the place of damage: which tokens moved most. Those copy the damaged block as often
    as the one that is copied next, so they name no block."""
    size = cell.record.block_size
    count = blocks(len(o.sent_ids), size)
    structure = _structure(cell, o, count)
    if moved.logprob_position is None:
        text = "the tokens are right and only the smallest distance is known, so they do not tell which block moved"
        return _located(structure, count, [text])
    origin = sources(o.sent_ids, o.output)
    seen = [f"the log-probs differ from output {moved.logprob_position} on"]
    if not is_copy(origin):
        seen.append("the output does not repeat the prompt, so they do not tell which block was read wrongly")
        return _located(structure, count, seen)
    largest = max(change for _, change in moved.most)
    found = sorted({p // size for at, change in moved.most if change >= largest / 2 and (p := origin[at]) is not None})
    where = f"those that copy {name_blocks(found, count)} moved most, by up to {largest:.2g} nats"
    seen += [f"{where}; the damage is there or in what is copied just before or after"] if found else []
    return _located(structure, count, seen)


class _Structure(NamedTuple):
    """Evidence that does not depend on the output: hand-off parameters, bytes moved and cache hits."""

    blocks: tuple[int, ...] = ()
    shift: int | None = None
    text: str = ""


def _structure(cell: CellView, o: Observation, count: int) -> _Structure:
    return (
        _foreign_hit(cell, o)
        or _surplus(cell, o, count)
        or _computed_alone(o)
        or _nothing_moved(cell, o, count)
        or _cached_prefix(cell, o)
        or _Structure()
    )


def _surplus(cell: CellView, o: Observation, count: int) -> _Structure | None:
    """Detect that P published more blocks than the prompt fills, of which D kept the last ones."""
    prefill, decode = o.leg("prefill"), o.leg("decode")
    groups = (prefill.kv_transfer_params or {}).get("remote_block_ids") if prefill else None
    if not isinstance(groups, list) or not groups or not isinstance(groups[0], list) or decode is None:
        return None
    surplus = len(groups[0]) - blocks(len(o.sent_ids), cell.block_size("prefill"))
    if surplus <= 0:
        return None
    pulled = _blocks_pulled(cell, decode)
    kept = f", D pulled {pulled}" if pulled is not None else ""
    rest = f"last {surplus} blocks were" if surplus > 1 else "last block was"
    return _Structure(
        tuple(range(count)),
        surplus,
        f"P published {len(groups[0])} blocks for a prompt of {count}{kept}: D's KV is shifted by {surplus} block"
        f"{'s' if surplus > 1 else ''}, {name_blocks(range(surplus), count)} {'are' if surplus > 1 else 'is'} missing, "
        f"and D's {rest} never written",
    )


def _blocks_pulled(cell: CellView, decode: Leg) -> int | None:
    """Return how many blocks D read, from the bytes moved; a block's size is the median over cold hand-offs."""
    sizes = []
    for o in cell.history.of(cell.id).values():
        leg = o.leg("decode")
        if leg and leg.counters.get("nixl_bytes") and not leg.counters.get("prefix_hits"):
            sizes.append(leg.counters["nixl_bytes"] / blocks(len(o.sent_ids), cell.block_size("prefill")))
    moved = decode.counters.get("nixl_bytes")
    return round(moved / median(sizes)) if sizes and moved else None


def _foreign_hit(cell: CellView, o: Observation) -> _Structure | None:
    """Detect blocks taken from a prefix cache that cannot be this prompt's (reported by ``state-occurred``)."""
    size = cell.record.block_size
    for leg in o.legs:
        hits = int(leg.counters.get("prefix_hits", 0))
        allowed = cell.prefix_cache.allowed_hit(o, o.process_of(leg)) if hits else None
        if allowed is not None and hits > allowed:
            wrong = tuple(range(allowed // size, hits // size))
            return _Structure(
                wrong,
                None,
                f"the {leg.role} engine took {hits} tokens from its prefix cache where at most {allowed} can be this "
                f"prompt's: another prompt filled {name_blocks(wrong, blocks(len(o.sent_ids), size))}",
            )
    return None


def _computed_alone(o: Observation) -> _Structure | None:
    """Detect that D computed the whole prompt by itself: a hit that it had counted before a transfer failed, or for
    which nothing came, is no block of this prompt's KV."""
    decode = o.leg("decode")
    if decode is None or decode.counters.get("prompt_tokens_local_compute", 0) < len(o.sent_ids):
        return None
    failed = decode.counters.get("nixl_failed_transfers", 0)
    why = f"after {counted(round(failed), 'failed transfer')}" if failed else "without a transfer"
    return _Structure((), None, f"D computed all {len(o.sent_ids)} prompt tokens by itself, {why}")


def _nothing_moved(cell: CellView, o: Observation, count: int) -> _Structure | None:
    """Detect that D counted external tokens although no byte was transferred."""
    decode = o.leg("decode")
    if not cell.by_nixl or decode is None or not decode.counters or decode.counters.get("nixl_bytes", 0) > 0:
        return None
    if decode.external_tokens <= 0:
        return None
    return _Structure(
        tuple(range(count)),
        None,
        f"D counts {decode.external_tokens:.0f} tokens from outside and no byte moved: all {count} blocks are missing",
    )


def _cached_prefix(cell: CellView, o: Observation) -> _Structure | None:
    """Describe that D had the first blocks cached and pulled the rest; the tokens tell which part is damaged."""
    decode = o.leg("decode")
    hits = int(decode.counters.get("prefix_hits", 0)) if decode else 0
    count = blocks(len(o.sent_ids), cell.record.block_size)
    local = hits // cell.record.block_size
    if not local or decode is None or not decode.counters.get("nixl_bytes"):
        return None
    return _Structure(
        (),
        None,
        f"D had {name_blocks(range(local), count)} in its cache and pulled {name_blocks(range(local, count), count)}",
    )


def name_blocks(indices: Sequence[int] | range, count: int) -> str:
    """Return block indices as text: ``block 2``, ``blocks 1 to 3``, ``all 4 blocks``."""
    items = list(indices)
    if not items:
        return "no block"
    if len(items) == count:
        return f"all {count} blocks" if count > 1 else "its only block"
    if len(items) == 1:
        return f"block {items[0]}"
    if items == list(range(items[0], items[-1] + 1)):
        return f"blocks {items[0]} to {items[-1]}"
    return "blocks " + ", ".join(map(str, items))


def _join(parts: Sequence[str]) -> str:
    return "; ".join(p for p in parts if p)
