"""Checks of the KV itself, as the engines' plugin noted it: what D received, and what engines computed or reused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.history.witness import CELL, Noted
from harness.judging.evidence import CellView
from harness.judging.figures import KVDifference, KVPlace
from harness.judging.findings import CheckResult, DamageClass, Finding, Location, conclude
from harness.observed.kv_held import KVReference
from harness.observed.kv_notes import KINDS, KVComparison, compare_notes
from harness.profiles.cells import SECOND_P
from harness.prompts.lengths import blocks
from harness.util.text import counted

HANDED_OVER = "kv-handed-over"
COMPUTED = "kv-computed"
_ROUNDING = {"float32": 2e-3}
_ROUNDING_16_BITS = 5e-2
"""Distance of two cells over their size up to which they are equal but for rounding. Sketches are kept in half
precision, which alone makes 5e-4; a head's keys of one token, lost from a cell of four heads, make 0.12."""
_SHOWN = 12
"""Places that a finding lists."""


def watched(cell: CellView) -> bool:
    """Return whether the engines were to note what their KV caches hold."""
    return cell.profile.witness == "kv"


def has_reference(cell: CellView) -> bool:
    """Return whether another answer to one of the prompts is there to compare with."""
    return watched(cell) and any(
        cell.kv_held.other_answer(o, other) is not None
        for o in cell.all_observations()
        for other in _references(cell).values()
    )


def _references(cell: CellView) -> dict[bool, str]:
    """Return the cells whose answers show the KV of the target (False), and of the drafter (True)."""
    return {False: _target_reference(cell), **({True: cell.name.single} if cell.speculative else {})}


def _target_reference(cell: CellView) -> str:
    """Return the cell whose cold prompts show the target's KV: without the plain engine, the method's single one."""
    return cell.name.reference if cell.selected(cell.name.reference) else cell.name.single


def kv_handed_over(cell: CellView) -> CheckResult:
    """Check that D received, bit for bit and in every layer, the KV that P had, in each block that was sent."""
    held = cell.kv_held
    findings = list(_unseen(cell, HANDED_OVER))
    judged = compared = 0
    for o in cell.all_observations():
        if not _was_handed_over(cell, o):
            continue
        theirs, ours = held.had(o, _prefilling(o)), held.received(o)
        if ours is None and not _counts_as_received(o):
            continue
        if theirs is None or ours is None:
            side, when = ("P", "had") if theirs is None else ("D", "received")
            findings.append(cell.untested(HANDED_OVER, f"expected a note of the KV that {side} {when}, found none", o))
            continue
        found = compare_notes(ours, theirs, received=True)
        judged += bool(found.cells)
        compared += found.cells
        if found.differs:
            words = "expected D to hold what P had when it handed the prompt over"
            findings.append(_finding(cell, HANDED_OVER, o, "decode", found, words, "P"))
    return conclude(HANDED_OVER, cell.id, judged, findings, note=_note(compared))


def kv_computed(cell: CellView) -> CheckResult:
    """Check that each engine's KV of a prompt, computed, received or cached, is what the plain engine computed, and the
    drafter's what the single engine's drafter did with the cold prompt."""
    held, others = cell.kv_held, _references(cell)
    findings = list(_unseen(cell, COMPUTED))
    judged = compared = 0
    for o in cell.all_observations():
        if o.error is not None or o.cut_short or o.final is None:
            continue
        cells = 0
        answers = ((drafter, held.reference(o, other)) for drafter, other in others.items())
        references = {drafter: reference for drafter, reference in answers if reference is not None}
        for role in cell.roles if cell.routed else [leg.role for leg in o.legs]:
            at_end = held.had(o, role)
            if at_end is None:
                findings.append(cell.untested(COMPUTED, f"expected a note of the {role} engine's KV, found none", o))
                continue
            moments = [(noted, "before its first step") for noted in held.found(o, role)]
            moments.append((at_end, "at the end of the request"))
            for found, finding in _computed(cell, o, role, moments, references):
                cells += found.cells
                findings += [finding] if finding is not None else []
        judged += bool(cells)
        compared += cells
    return conclude(COMPUTED, cell.id, judged, _one_each(findings), note=_note(compared))


def _computed(
    cell: CellView,
    o: Observation,
    role: str,
    moments: Sequence[tuple[Noted, str]],
    references: Mapping[bool, KVReference],
) -> Iterator[tuple[KVComparison, Finding | None]]:
    """Compare what an engine held of a prompt at each moment with what the references of the target (False) and of the
    drafter (True) did."""
    bound = _ROUNDING.get(cell.settings.dtype, _ROUNDING_16_BITS)
    for drafter, reference in references.items():
        for noted, when in moments:
            found = compare_notes(noted, reference.noted, drafter=drafter, bound=bound)
            words = f"expected the {role} engine to hold {when} what {reference.cell} computed"
            wrong = found.differs and not (drafter and _of_another_answer(o, found, reference))
            yield found, _finding(cell, COMPUTED, o, role, found, words, reference.cell) if wrong else None


def _of_another_answer(o: Observation, found: KVComparison, reference: KVReference) -> bool:
    """Return whether a drafter's KV differs only at the last token of a prompt, of answers that begin with different
    tokens: a drafter reads each token together with the next one."""
    ours = next(iter((o.final.output_ids if o.final is not None else None) or ()), None)
    return found.tokens == (len(o.sent_ids) - 1,) and ours != reference.first_token


def _one_each(findings: list[Finding]) -> list[Finding]:
    """Return the first finding of each request: what was wrong before its first step still is at its end."""
    seen: set[tuple[str | None, str | None, str | None]] = set()
    out = []
    for f in findings:
        key = (f.part or f.prompt_id, f.form, f.damage)
        if f.prompt_id is None or key not in seen:
            out.append(f)
        seen.add(key)
    return out


def _was_handed_over(cell: CellView, o: Observation) -> bool:
    """Return whether a request was answered after a hand-off."""
    answered = o.error is None and not o.cut_short and o.route == "cell" and o.leg("decode") is not None
    return answered and (cell.routed or o.leg(_prefilling(o)) is not None)


def _prefilling(o: Observation) -> str:
    """Return the role of the P that a request was sent to."""
    return SECOND_P if o.leg(SECOND_P) is not None else "prefill"


def _counts_as_received(o: Observation) -> bool:
    decode = o.leg("decode")
    return decode is not None and (decode.external_tokens > 0 or decode.counters.get("nixl_bytes", 0) > 0)


def _unseen(cell: CellView, check: str) -> Iterator[Finding]:
    """Yield, once for the cell, what of the KV no one saw."""
    if not cell.first_view:
        return
    for layer, why in cell.kv_held.unseen.items():
        yield cell.untested(check, f"expected to see the KV of layer {layer}, found that {why}")
    for error in dict.fromkeys(cell.kv_held.errors):
        yield cell.untested(check, f"expected the engines to note what their KV caches hold, found an error: {error}")


def _note(compared: int) -> str:
    return f"{counted(compared, 'cell')} of {CELL} tokens of a layer compared" if compared else ""


def _finding(
    cell: CellView, check: str, o: Observation, role: str, found: KVComparison, words: str, whose: str
) -> Finding:
    only_drafter = bool(found.places) and all(p.layer.drafter for p in found.places)
    damage: DamageClass = "drafter-kv" if only_drafter else "target-kv"
    where = _where(found, blocks(len(o.sent_ids), found.block_size), whose)
    evidence = KVDifference(
        role=role,
        places=tuple(
            KVPlace(
                layer=p.layer.name,
                kind=KINDS[p.values],
                heads=p.heads,
                first_token=p.cell * CELL,
                zeros=p.zeros,
                found_at=None if p.elsewhere is None else p.elsewhere * CELL,
            )
            for p in found.places[:_SHOWN]
        ),
        differing=len(found.places),
        tokens=found.tokens,
    )
    finding = cell.finding(check, Verdict.REGRESSION, damage, f"{words}, found {where}", o, evidence)
    moved = _moved(found)
    first = min(found.tokens, default=min((p.cell * CELL for p in found.places), default=None))
    location = Location(
        blocks=found.blocks,
        of=blocks(len(o.sent_ids), found.block_size),
        shift=moved[1] - moved[0] if moved is not None else None,
        position=first,
        text=where,
    )
    return finding.model_copy(update={"location": location})


def _where(found: KVComparison, count: int, whose: str) -> str:
    """Return in words which KV differs, and what stands there instead."""
    layers = list(dict.fromkeys(p.layer.name for p in found.places))
    kinds = [kind for kind in KINDS if any(KINDS[p.values] == kind for p in found.places)]
    heads = sorted({h for p in found.places for h in p.heads})
    some = all(p.heads for p in found.places) and bool(heads)
    parts = [
        f"other {' and '.join(kinds) or 'KV'}",
        _layers(layers) if layers else "",
        f"in head{'s' if len(heads) > 1 else ''} {_ranges(heads)}" if some else "",
        f"in block{'s' if len(found.blocks) > 1 else ''} {_ranges(found.blocks)} of {count}",
        f"(tokens {_ranges(found.tokens)})" if found.tokens else "",
    ]
    return " ".join(p for p in parts if p) + _instead(found, whose)


def _layers(layers: list[str]) -> str:
    return f"in layer {layers[0]}" if len(layers) == 1 else f"in {len(layers)} layers ({layers[0]} to {layers[-1]})"


def _instead(found: KVComparison, whose: str) -> str:
    if found.places and all(p.zeros for p in found.places):
        return ": zeros"
    if (moved := _moved(found)) is not None:
        here, there = moved
        return f": block {here} holds what {whose} has in block {there}, {there - here:+d} blocks away"
    return ""


def _moved(found: KVComparison) -> tuple[int, int] | None:
    """Return the first block that holds what the other engine has elsewhere, and where it has that; None unless most
    places do."""
    moved = [(p.cell, p.elsewhere) for p in found.places if p.elsewhere is not None]
    if not moved or 2 * len(moved) < len(found.places):
        return None
    here, there = (cell * CELL // found.block_size for cell in moved[0])
    return here, there


def _ranges(numbers: tuple[int, ...] | list[int]) -> str:
    """Return numbers in words, those that follow each other as a range: ``0 to 2, 5``."""
    out = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        items = [number for _, number in run]
        out.append(str(items[0]) if len(items) == 1 else f"{items[0]} to {items[-1]}")
    return ", ".join(out)
