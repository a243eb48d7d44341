"""Where the damage is: which blocks of a prompt's KV, since which step, and for which prompt lengths.

The outputs of copy and echo prompts repeat the prompt, so each output token was read from one known prompt position.
A token that is wrong, or a stretch that is never repeated, points to the block that holds its source. Where an output
does not repeat its prompt, the same fields are filled as far as the evidence goes, and say so.

Everything here is taken from the observations: block counts in the hand-off's parameters, bytes moved, cache hits,
tokens, acceptance per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from harness.acceptance import align, by_position, real_steps
from harness.checks.evidence import REFERENCE_CELL, CellView
from harness.checks.state import allowed_hit
from harness.checks.transfer import external_tokens
from harness.findings import CheckResult, DamageClass, Diagnosis, Finding, Law, Location, Verdict
from harness.history import Leg, Observation
from harness.strata import blocks, spills

COPY_SHARE = 0.8
"""Share of an output that must be found in the prompt, in order, before its tokens are taken to be copies."""
_TOKEN_CHECKS = ("tokens-reference", "tokens-baseline")
_STEP_CHECKS = ("acceptance-single", "acceptance-baseline")


# --- what an output was read from ------------------------------------------------------------------------------------


def sources(prompt: Sequence[int], output: Sequence[int]) -> list[int | None]:
    """Prompt position that each output token repeats; None where it repeats none.

    A token that occurs once in the prompt has one source. One that occurs more often is taken to follow the token
    before it, as in a copy; otherwise it has none.
    """
    places: dict[int, list[int]] = {}
    for position, token in enumerate(prompt):
        places.setdefault(token, []).append(position)
    found: list[int | None] = []
    for token in output:
        candidates = places.get(token, [])
        previous = found[-1] if found else None
        if previous is not None and previous + 1 in candidates:
            found.append(previous + 1)
        elif len(candidates) == 1:
            found.append(candidates[0])
        else:
            found.append(None)
    return found


def is_copy(origin: Sequence[int | None]) -> bool:
    """Whether an output repeats its prompt: most tokens have a source, each the position after the one before."""
    if not origin:
        return False
    runs = sum(a is not None and b == a + 1 for a, b in pairwise(origin))
    return runs >= COPY_SHARE * max(len(origin) - 2, 1)


def repeated(origin: Sequence[int | None]) -> set[int]:
    """Positions that an output read and went on from: those with their successor behind them, or as the successor."""
    out: set[int] = set()
    for a, b in pairwise(origin):
        if a is not None and b == a + 1:
            out |= {a, b}
    return out


class _Request(NamedTuple):
    """A request with what it should have given."""

    o: Observation
    leg: Leg
    expected: tuple[int, ...]
    """Reference tokens."""
    steps: tuple[int, ...]
    """Reference of accepted drafts per step."""


def _request(cell: CellView, o: Observation) -> _Request | None:
    leg = o.final
    if leg is None or leg.output_ids is None:
        return None
    tokens = _reference_tokens(cell, o)
    lookup = cell.evidence.baselines.get(cell.method)
    row = lookup.baseline.by_prompt().get(o.prompt_id) if lookup and lookup.baseline else None
    return _Request(o, leg, tokens, row.accepted if row else ())


def _reference_tokens(cell: CellView, o: Observation) -> tuple[int, ...]:
    """Tokens of the plain single engine of this run, or of the baseline; empty when neither has the prompt."""
    tonight = cell.evidence.history.of(REFERENCE_CELL, scenario=cell.scenario).get(o.key)
    lookup = cell.evidence.baselines.get("none")
    row = lookup.baseline.by_prompt().get(o.prompt_id) if lookup and lookup.baseline else None
    if row is not None:
        return row.output_ids[: o.max_tokens]
    leg = tonight.final if tonight and cell.id != REFERENCE_CELL else None
    return leg.output_ids or () if leg else ()


# --- location of one finding -----------------------------------------------------------------------------------------


def locate(cell: CellView, results: Sequence[CheckResult]) -> list[CheckResult]:
    """The results with a location in every finding that names a request."""
    observations = {**cell.observations("text"), **cell.observations("ids")}
    cache: dict[str, Location | None] = {}
    out = []
    for result in results:
        found = []
        for finding in result.findings:
            key = finding.part or finding.prompt_id
            o = observations.get(key) if key else None
            if o is not None and finding.verdict is not Verdict.UNKNOWN:
                if o.key not in cache:
                    cache[o.key] = location(cell, o)
                finding = finding.model_copy(update={"location": cache[o.key]})
            found.append(finding)
        out.append(result.model_copy(update={"findings": tuple(found)}))
    return out


def location(cell: CellView, o: Observation) -> Location | None:
    """Where the damage of one request is. None when nothing differs or there is nothing to compare with."""
    request = _request(cell, o)
    if request is None or not request.expected:
        return None
    if request.leg.output_ids != request.expected:
        return _from_tokens(cell, request)
    return _from_steps(cell, request)


def _from_tokens(cell: CellView, r: _Request) -> Location:
    size = cell.record.block_size
    count = blocks(len(r.o.sent_ids), size)
    ours = r.leg.output_ids or ()
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, r.expected, strict=False)) if a != b), min(len(ours), len(r.expected))
    )
    structure = _structure(cell, r.o, count)
    wanted = sources(r.o.sent_ids, r.expected)
    if not is_copy(wanted):
        text = "the expected output does not repeat the prompt, so its tokens do not tell which block was read wrongly"
        return Location(blocks=structure.blocks, of=count, shift=structure.shift, text=_join([structure.text, text]))
    position = wanted[at] if at < len(wanted) else None
    read = repeated(sources(r.o.sent_ids, ours))
    missing = _missing_blocks([p for p in wanted if p is not None], read, size)
    seen = [f"nothing of {name_blocks(missing, count)} is in the output"] if missing else []
    first = f"the first wrong token is output {at}"
    if position is not None:
        first += f", which copies prompt position {position} in block {position // size}"
    seen.append(first)
    if position is not None:
        seen.append(_jump(sources(r.o.sent_ids, ours), at, position, size))
    found = structure.blocks or missing or ((position // size,) if position is not None else ())
    return Location(
        blocks=tuple(found),
        of=count,
        shift=structure.shift,
        position=position,
        text=_join([structure.text, *seen]),
    )


def _jump(origin: Sequence[int | None], at: int, position: int, size: int) -> str:
    """Where the output went instead."""
    there = origin[at] if at < len(origin) else None
    if there is None:
        return "what came instead is no part of the prompt" if at < len(origin) else "the output ends there"
    return f"what came instead is prompt position {there} in block {there // size}, {there - position:+d} tokens away"


def _missing_blocks(wanted: Sequence[int], read: set[int], size: int) -> tuple[int, ...]:
    """Blocks of which the output should have repeated something and repeated nothing."""
    should = {p // size for p in wanted}
    has = {p // size for p in read}
    return tuple(sorted(should - has))


def _from_steps(cell: CellView, r: _Request) -> Location | None:
    """Tokens are right: the steps that accepted fewer drafts show which blocks the drafter could not read."""
    steps = real_steps(r.leg)
    if steps is None or not r.steps or r.leg.output_ids is None:
        return None
    aligned = align(steps.accepted, r.steps, len(r.leg.output_ids))
    if not aligned.differing and steps.accepted == r.steps:
        return None
    size = cell.record.block_size
    count = blocks(len(r.o.sent_ids), size)
    ours, theirs = by_position(steps.accepted), by_position(r.steps)
    first = next((i for i, (a, b) in enumerate(zip(steps.accepted, r.steps, strict=False)) if a != b), None)
    since = "D took over" if cell.handed_off else "the prefill"
    lines = [
        f"acceptance differs from step {first} since {since} on, at {len(aligned.differing)} of {aligned.common} steps "
        "that both begin at the same token"
    ]
    if steps.padded:
        lines[0] += " (a padded first step is not counted)"
    origin = sources(r.o.sent_ids, r.expected)
    if not is_copy(origin):
        lines.append("the output does not repeat the prompt, so the steps do not tell which block the drafter lacks")
        return Location(of=count, step=first, text=_join(lines))
    share: dict[int, list[int]] = {}
    for at, expected in theirs.items():
        source = origin[at] if at < len(origin) else None
        if at in ours and source is not None and expected:
            share.setdefault(source // size, []).append(ours[at] - expected)
    low = tuple(sorted(b for b, gaps in share.items() if sum(g < 0 for g in gaps) >= 0.5 * len(gaps)))
    some = low or tuple(sorted(b for b, gaps in share.items() if any(g < 0 for g in gaps)))
    if some:
        often = "are rejected" if low else "are rejected at some of their steps"
        lines.append(f"drafts that copy {name_blocks(some, count)} {often}")
    return Location(blocks=some, of=count, step=first, text=_join(lines))


class _Structure(NamedTuple):
    """What the hand-off's parameters, the bytes moved and the cache hits say, whatever the output is."""

    blocks: tuple[int, ...] = ()
    shift: int | None = None
    text: str = ""


def _structure(cell: CellView, o: Observation, count: int) -> _Structure:
    for part in (_foreign_hit(cell, o), _surplus(cell, o, count), _nothing_moved(o, count), _cached_prefix(cell, o)):
        if part is not None:
            return part
    return _Structure()


def _surplus(cell: CellView, o: Observation, count: int) -> _Structure | None:
    """P published more blocks than the prompt fills, and D kept the last ones of them."""
    prefill, decode = o.leg("prefill"), o.leg("decode")
    groups = (prefill.kv_transfer_params or {}).get("remote_block_ids") if prefill else None
    if not groups or decode is None:
        return None
    surplus = len(groups[0]) - count
    if surplus <= 0:
        return None
    pulled = _blocks_pulled(cell, decode)
    kept = f", D pulled {pulled}" if pulled is not None else ""
    return _Structure(
        tuple(range(count)),
        surplus,
        f"P published {len(groups[0])} blocks for a prompt of {count}{kept}: D's KV is shifted by {surplus} block"
        f"{'s' if surplus > 1 else ''}, {name_blocks(range(surplus), count)} is missing and the last {surplus} that D "
        "holds was never written",
    )


def _blocks_pulled(cell: CellView, decode: Leg) -> int | None:
    """Blocks that D read, from the bytes moved; a block's size is the median over the cell's cold hand-offs."""
    sizes = []
    for o in cell.evidence.history.of(cell.id).values():
        leg = o.leg("decode")
        if leg and leg.counters.get("nixl_bytes") and not leg.counters.get("prefix_hits"):
            sizes.append(leg.counters["nixl_bytes"] / blocks(len(o.sent_ids), cell.record.block_size))
    moved = decode.counters.get("nixl_bytes")
    return round(moved / median(sizes)) if sizes and moved else None


def _foreign_hit(cell: CellView, o: Observation) -> _Structure | None:
    """Blocks taken from a prefix cache beyond what can be this prompt's (found by ``state-occurred``)."""
    size = cell.record.block_size
    allowed = allowed_hit(cell, o)
    if allowed is None:
        return None
    for leg in o.legs:
        hits = int(leg.counters.get("prefix_hits", 0))
        if hits > allowed:
            wrong = tuple(range(allowed // size, hits // size))
            return _Structure(
                wrong,
                None,
                f"the {leg.role} engine took {hits} tokens from its prefix cache where at most {allowed} can be this "
                f"prompt's: {name_blocks(wrong, blocks(len(o.sent_ids), size))} came from somebody else",
            )
    return None


def _nothing_moved(o: Observation, count: int) -> _Structure | None:
    decode = o.leg("decode")
    if decode is None or not decode.counters or decode.counters.get("nixl_bytes", 0) > 0:
        return None
    if external_tokens(decode) <= 0:
        return None
    return _Structure(
        tuple(range(count)),
        None,
        f"D counts {external_tokens(decode):.0f} tokens from outside and no byte moved: all {count} blocks are missing",
    )


def _cached_prefix(cell: CellView, o: Observation) -> _Structure | None:
    """D had the first blocks itself and pulled the rest: either may be the damaged part, the tokens tell which."""
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
    """Block indices in words: ``block 2``, ``blocks 1 to 3``, ``all 4 blocks``."""
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


# --- the law of lengths ----------------------------------------------------------------------------------------------


def law_of_lengths(failed: Mapping[int, bool], block_size: int, most_lookahead: int = 8) -> Law | None:
    """The simplest rule on prompt lengths that explains which failed.

    ``failed`` maps each tested length to whether it failed. Tried in this order: all or none; lengths at, above or
    below one value; residues modulo the block size. None when nothing failed; a law that leaves exceptions says so.
    """
    bad = sorted(n for n, f in failed.items() if f)
    good = sorted(n for n, f in failed.items() if not f)
    if not bad:
        return None
    tested = tuple(sorted({n % block_size for n in failed}))
    if len(bad) == 1 and good:
        text = f"only the length {bad[0]} fails of {len(bad) + len(good)} tested: no law can be told from one"
        return Law(text=text, tested=tested, exact=False)
    if not good:
        return Law(text=f"every tested length fails ({len(bad)} from {bad[0]} to {bad[-1]})", tested=tested)
    if bad[0] > good[-1]:
        return Law(text=f"fails if and only if the prompt has more than {good[-1]} tokens", tested=tested)
    if bad[-1] < good[0]:
        return Law(text=f"fails if and only if the prompt has fewer than {good[0]} tokens", tested=tested)
    residues = tuple(sorted({n % block_size for n in bad}))
    exceptions = [n for n in good if n % block_size in residues]
    if exceptions:
        return _threshold_on_residues(bad, good, residues, block_size, tested)
    named = _residue_text(residues, block_size)
    return Law(
        text=f"fails if and only if {named}{_spill_text(residues, tested, block_size, most_lookahead)}",
        residues=residues,
        modulus=block_size,
        tested=tested,
    )


def _residue_text(residues: Sequence[int], block_size: int) -> str:
    if len(residues) == 1:
        return f"N mod {block_size} = {residues[0]}"
    return f"N mod {block_size} is one of {{{', '.join(map(str, residues))}}}"


def _spill_text(residues: Sequence[int], tested: Sequence[int], block_size: int, most: int) -> str:
    """Whether the residues are those at which a lookahead of L slots takes one block more than the prompt fills."""
    fits = [
        lookahead
        for lookahead in range(1, min(most, block_size - 1) + 1)
        if {r for r in tested if spills(r or block_size, block_size, lookahead)} == set(residues)
    ]
    untested = f"; {len(tested)} of {block_size} residues were tested"
    if not fits:
        return untested
    which = f"{fits[0]}" if len(fits) == 1 else f"{fits[0]} to {fits[-1]}"
    return f", which is where a lookahead of {which} slots takes one more block than the prompt fills{untested}"


def _threshold_on_residues(
    bad: Sequence[int], good: Sequence[int], residues: tuple[int, ...], block_size: int, tested: tuple[int, ...]
) -> Law:
    """Residues explain the failures only from some length on, or not at all."""
    last_good = max(n for n in good if n % block_size in residues)
    if all(n > last_good for n in bad):
        text = f"fails if and only if {_residue_text(residues, block_size)} and N is more than {last_good}"
        return Law(text=text, residues=residues, modulus=block_size, tested=tested)
    return Law(
        text=f"no rule on the length explains it: {len(bad)} of {len(bad) + len(good)} tested lengths fail "
        f"({', '.join(map(str, bad[:8]))}{' …' if len(bad) > 8 else ''})",
        tested=tested,
        exact=False,
    )


# --- what the findings of a cell say together ------------------------------------------------------------------------


def diagnose(cell: CellView, results: Sequence[CheckResult]) -> Diagnosis | None:
    """Class, law of lengths and location of a cell's findings; None when there are none."""
    findings = [f for r in results for f in r.findings]
    if not findings:
        return None
    damage = _damage(cell, findings)
    mine = [f for f in findings if _supports(f, damage)] or findings
    keys = {f.part or f.prompt_id for f in mine if f.prompt_id}
    judged = {o.key: len(o.sent_ids) for o in cell.every() if o.error is None and o.route == "cell"}
    law = None
    if cell.cold and keys:
        failed: dict[int, bool] = {}
        for key, tokens in judged.items():
            failed[tokens] = failed.get(tokens, False) or key in keys
        law = law_of_lengths(failed, cell.record.block_size)
    chosen = _most_telling(cell, mine)
    located = chosen.location
    return Diagnosis(
        damage=damage,
        failed=len(keys),
        judged=len(judged),
        law=law,
        location=located,
        text=_words(cell, damage, chosen, len(keys), len(judged), law),
    )


def _most_telling(cell: CellView, findings: Sequence[Finding]) -> Finding:
    """The located finding of the longest prompt, which has the most blocks to tell apart; else the first one."""
    located = [f for f in findings if f.location is not None]
    return max(located, key=lambda f: _tokens(cell, f)) if located else findings[0]


def _supports(finding: Finding, damage: DamageClass) -> bool:
    """Whether a finding is evidence of the class that the cell's findings were given."""
    if damage in ("input", "nothing-tested"):
        return finding.damage == damage
    if damage == "drafter-kv":
        return finding.check in _STEP_CHECKS and finding.verdict is not Verdict.UNKNOWN
    return finding.damage == damage or finding.check in (*_TOKEN_CHECKS, *_STEP_CHECKS)


def _damage(cell: CellView, findings: Sequence[Finding]) -> DamageClass:
    """The class that explains the findings: a wrong input makes wrong tokens, wrong tokens other acceptance."""
    certain = [f for f in findings if f.verdict is not Verdict.UNKNOWN]
    if any(f.damage == "input" for f in certain):
        return "input"
    wrong_tokens = [f for f in certain if f.check in _TOKEN_CHECKS and f.verdict is Verdict.REGRESSION]
    if wrong_tokens or any(f.damage == "target-kv" for f in certain):
        return "sampler" if _same_without(cell, _TOKEN_CHECKS) else "target-kv"
    fewer = [f for f in certain if f.check in _STEP_CHECKS]
    if fewer:
        if all(f.verdict is Verdict.IMPROVED for f in fewer):
            return "engine-changed"
        return "sampler" if _same_without(cell, _STEP_CHECKS) else "drafter-kv"
    if certain:
        return Counter(f.damage for f in certain).most_common(1)[0][0]
    for damage in ("nothing-tested", "infrastructure", "baseline"):
        if any(f.damage == damage for f in findings):
            return damage
    return findings[0].damage


def _same_without(cell: CellView, checks: Sequence[str]) -> bool:
    """Whether a cold prompt on one engine, which meets no KV but its own, goes wrong in the same way.

    Only a speculative engine can: plain decoding that goes wrong alone has no sampler of drafts.
    """
    plain = cell if cell.cold and not cell.handed_off else cell.sibling("single", "cold")
    if plain is None or not plain.speculative:
        return False
    for o in plain.answered().values():
        request = _request(plain, o)
        if request is None or not request.expected:
            continue
        if checks is _TOKEN_CHECKS and request.leg.output_ids != request.expected:
            return True
        steps = real_steps(request.leg)
        if checks is _STEP_CHECKS and steps is not None and request.steps and steps.accepted != request.steps:
            return True
    return False


_NAMES: dict[str, str] = {
    "input": "wrong input",
    "target-kv": "wrong KV of the target",
    "drafter-kv": "wrong KV of the drafter",
    "sampler": "drafting or verification",
    "nothing-tested": "nothing tested",
    "engine-changed": "the engine changed",
    "infrastructure": "infrastructure",
    "baseline": "no baseline",
}


def damage_name(damage: str) -> str:
    """A damage class in words."""
    return _NAMES.get(damage, damage)


def _words(
    cell: CellView,
    damage: DamageClass,
    chosen: Finding,
    failed: int,
    judged: int,
    law: Law | None,
) -> str:
    parts = [f"{damage_name(damage)} in {failed} of {judged} requests" if failed else damage_name(damage)]
    if damage in ("target-kv", "drafter-kv", "sampler", "input") and law is not None:
        parts.append(law.text)
    if chosen.location is not None:
        name = chosen.part or chosen.prompt_id
        parts.append(f"{name} ({_tokens(cell, chosen)} tokens): {chosen.location.text}")
    elif not cell.cold or damage in ("nothing-tested", "infrastructure", "baseline"):
        parts.append(" ".join(chosen.message.split())[:240])
    return "; ".join(parts)


def _tokens(cell: CellView, finding: Finding) -> int:
    key = finding.part or finding.prompt_id
    o = {**cell.observations("text"), **cell.observations("ids")}.get(key or "")
    return len(o.sent_ids) if o else 0
