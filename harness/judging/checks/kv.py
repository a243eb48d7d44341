"""Checks of the KV itself, as the engines' plugin noted it: what D received, and what engines computed or reused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.history.records import Observation
from harness.history.token_ids import common_prefix
from harness.history.verdict import Verdict
from harness.history.witness import CELL, Noted
from harness.judging.checks.kv_findings import kv_finding, ranges
from harness.judging.checks.kv_rounding import constant_bounds, measured_bounds
from harness.judging.evidence import CellView
from harness.judging.findings import CheckResult, Finding, conclude
from harness.observed.kv_held import KVReference
from harness.observed.kv_notes import (
    KVBounds,
    KVComparison,
    compare_kept,
    compare_notes,
    states_unpaired,
    tokens_beyond,
)
from harness.profiles.cells import SECOND_P
from harness.scenarios.proving import hits_of
from harness.util.text import counted, listed

HANDED_OVER = "kv-handed-over"
COMPUTED = "kv-computed"
KEPT = "kv-kept"


def watched(cell: CellView) -> bool:
    """Return whether the engines were to note what their KV caches hold."""
    return cell.profile.witness == "kv"


def has_hits(cell: CellView) -> bool:
    """Return whether an engine has taken blocks from its prefix cache."""
    return watched(cell) and any(
        (hits_of(leg) and o.answers == 1) or _found_kept(cell, o, leg.role)
        for o in cell.all_observations()
        for leg in o.legs
    )


def _found_kept(cell: CellView, o: Observation, role: str) -> bool:
    moments = cell.kv_held.found(o, role)
    blocks = any(g.kept is not None and g.kept.blocks for noted in moments for g in noted.groups)
    return blocks or any(s.kept is not None for noted in moments for s in noted.states)


def has_reference(cell: CellView) -> bool:
    """Return whether another answer to one of the prompts is there to compare with."""
    return watched(cell) and any(
        cell.kv_held.other_answer(o, other) is not None
        for o in cell.all_observations()
        if is_noted(o)
        for other in _references(cell).values()
    )


def _is_answered(o: Observation) -> bool:
    return o.error is None and not o.cut_short and o.final is not None


def is_noted(o: Observation) -> bool:
    """Return whether notes name the request: not where it asked for several answers, which have other names."""
    return _is_answered(o) and o.answers == 1


def _references(cell: CellView) -> dict[bool, str]:
    """Return the cells whose answers show the KV of the target (False), and of the drafter (True). In the normal tier,
    nothing shows how far rounding moves a drafter's."""
    of_drafter = {True: cell.name.single} if cell.speculative and cell.judging.tier == "bitwise" else {}
    return {False: _target_reference(cell), **of_drafter}


def _target_reference(cell: CellView) -> str:
    """Return the cell whose cold prompts show the target's KV: without the plain engine, the method's single one."""
    return cell.name.reference if cell.selected(cell.name.reference) else cell.name.single


_NOTHING = KVComparison(0, (), (), 1)


class _Compared(NamedTuple):
    """What a check has compared so far, over all layers."""

    cells: int = 0
    states: int = 0

    def and_of(self, found: KVComparison) -> _Compared:
        return _Compared(self.cells + found.cells, self.states + found.states_compared)

    @property
    def note(self) -> str:
        cells = f"{counted(self.cells, 'cell')} of {CELL} tokens" if self.cells else ""
        states = counted(self.states, "recurrent state") if self.states else ""
        parts = [part for part in (cells, states) if part]
        return f"{listed(parts, 'and')} of a layer compared" if parts else ""


class _HandOff(NamedTuple):
    """A prompt whose KV, or a part of it, one engine received from another."""

    sender: Noted | None
    receiver: Noted | None
    to: str
    """Role of the engine that received."""
    whose: str
    """What the sender is called."""
    when: str
    """When it held what it sent."""
    said: int | None = None
    """Tokens of the turn before and its answer, where they are what was sent."""


def kv_handed_over(cell: CellView) -> CheckResult:
    """Check that D received, bit for bit and in every layer, the KV that P had, in each block that was sent, and P what
    D had, where it reads an answer back."""
    findings = list(_unseen(cell, HANDED_OVER))
    judged, compared = 0, _Compared()
    for o in cell.all_observations():
        for of in _hand_offs(cell, o) if o.answers == 1 else ():
            receiver = "P" if of.whose == "D" else "D"
            if of.sender is None or of.receiver is None:
                side, when = (of.whose, "had") if of.sender is None else (receiver, "received")
                words = f"expected a note of the KV that {side} {when}, found none"
                findings.append(cell.untested(HANDED_OVER, words, o))
                continue
            found = compare_notes(of.receiver, of.sender, received=True)
            judged += bool(found.compared)
            compared = compared.and_of(found)
            if alone := states_unpaired(of.receiver, of.sender):
                words = (
                    f"expected a note of the recurrent state that {of.whose} had after {alone[0]} tokens, found none"
                )
                findings.append(cell.untested(HANDED_OVER, words, o))
            if found.differs:
                words = f"expected {receiver} to hold what {of.whose} had when it {of.when}"
                findings.append(kv_finding(cell, HANDED_OVER, o, of.to, found, words, of.whose))
            elif of.said is not None and (beyond := tokens_beyond(of.receiver, of.said)):
                words = (
                    "P took from D not only the KV of the turn before, but also that of "
                    f"token{'s' if len(beyond) > 1 else ''} {ranges(beyond)}, behind that turn's answer"
                )
                findings.append(cell.finding(HANDED_OVER, Verdict.REGRESSION, "target-kv", words, o))
    return conclude(HANDED_OVER, cell.id, judged, findings, note=compared.note)


def _hand_offs(cell: CellView, o: Observation) -> Iterator[_HandOff]:
    held, prefill = cell.kv_held, o.leg("prefill")
    if _was_handed_over(cell, o):
        received = held.received(o, "decode")
        if received is not None or _counts_as_received(o):
            yield _HandOff(held.had(o, _prefilling(o)), received, "decode", "P", "handed the prompt over")
    elif not _is_answered(o) or o.route != "read-back":
        return
    if prefill is not None and prefill.external_tokens > 0:
        donor = held.before(o)
        if donor is None or donor.final is None:
            return
        sender, said = held.had_with_answer(donor, "decode"), len(donor.sent_ids) + len(donor.final.output_ids or ())
        yield _HandOff(sender, held.received(o, "prefill"), "prefill", "D", "ended the turn before", said)


def kv_computed(cell: CellView) -> CheckResult:
    """Check that each engine's KV of a prompt, computed, received or cached, is what the plain engine computed, and the
    drafter's what the single engine's drafter did with the cold prompt."""
    # Other checks ask for it, too.
    return cell.shared(COMPUTED, lambda: _kv_computed(cell))


def _kv_computed(cell: CellView) -> CheckResult:
    held, others = cell.kv_held, _references(cell)
    findings = list(_unseen(cell, COMPUTED))
    judged, compared = 0, _Compared()
    for o in cell.all_observations():
        if not is_noted(o) or o.final is None:
            continue
        before = compared
        answers = ((drafter, held.reference(o, other)) for drafter, other in others.items())
        references = {drafter: reference for drafter, reference in answers if reference is not None}
        for role in cell.roles if cell.routed and o.route == "cell" else [leg.role for leg in o.legs]:
            at_end = held.had(o, role)
            if at_end is None:
                findings.append(cell.untested(COMPUTED, f"expected a note of the {role} engine's KV, found none", o))
                continue
            # An engine computes the last token of a prompt itself, whatever stands there before.
            moments = [(noted, "before its first step", len(o.sent_ids) - 1) for noted in held.found(o, role)]
            moments.append((at_end, "at the end of the request", len(o.sent_ids)))
            compared_now = [*_computed(cell, o, role, moments, references)]
            if role == o.final.role:
                compared_now += _answered(cell, o, role, references)
            for found, finding in compared_now:
                compared = compared.and_of(found)
                findings += [finding] if finding is not None else []
        judged += compared != before
    return conclude(COMPUTED, cell.id, judged, _one_each(findings), note=compared.note)


def _computed(
    cell: CellView,
    o: Observation,
    role: str,
    moments: Sequence[tuple[Noted, str, int]],
    references: Mapping[bool, KVReference],
) -> Iterator[tuple[KVComparison, Finding | None]]:
    """Compare what an engine held of so many tokens of a prompt at each moment with what the references of the target
    (False) and of the drafter (True) did."""
    bounds = _bounds(cell)
    for drafter, reference in references.items():
        for noted, when, tokens in moments:
            found = compare_notes(noted, reference.noted, drafter=drafter, bounds=bounds, tokens=tokens)
            words = f"expected the {role} engine to hold {when} what {reference.cell} computed"
            wrong = found.differs and not (drafter and _of_another_answer(o, found, reference))
            yield found, kv_finding(cell, COMPUTED, o, role, found, words, reference.cell) if wrong else None


def _answered(
    cell: CellView, o: Observation, role: str, references: Mapping[bool, KVReference]
) -> Iterator[tuple[KVComparison, Finding | None]]:
    """Compare an engine's KV of an answer with that of the references of the target (False) and of the drafter (True),
    up to the first other token."""
    ours, ids = cell.kv_held.answer(o, role), o.output
    for drafter, reference in references.items():
        if ours is None or reference.answer is None:
            if reference.answer is not None and not drafter and len(ids) > 1:
                words = f"expected a note of the {role} engine's KV of its answer, found none"
                yield _NOTHING, cell.untested(COMPUTED, words, o)
            continue
        # The KV of a token stands at its place; that of the last one is not computed.
        same = len(o.sent_ids) + common_prefix(ids, reference.output_ids)
        if drafter:
            # It reads each token together with the next one, and stops where the context has no room for its drafts.
            same = min(same - 1, cell.kv_held.drafted(o), reference.drafted)
        found = compare_notes(ours, reference.answer, drafter=drafter, bounds=_bounds(cell), tokens=same)
        words = f"expected the {role} engine to hold of its answer what {reference.cell} computed"
        yield found, kv_finding(cell, COMPUTED, o, role, found, words, reference.cell) if found.differs else None


def _bounds(cell: CellView) -> KVBounds:
    return constant_bounds(cell) if cell.judging.tier == "bitwise" else measured_bounds(cell)


def kv_kept(cell: CellView) -> CheckResult:
    """Check that a block that the prefix cache finds is, bit for bit, what it was when it was filled, and was filled
    for the same tokens."""
    held = cell.kv_held
    findings = list(_unseen(cell, KEPT))
    judged, compared = 0, _Compared()
    for o in cell.all_observations():
        for role in cell.roles if cell.routed and o.route == "cell" else [leg.role for leg in o.legs]:
            moments = held.found(o, role)
            if not moments and o.answers == 1 and hits_of(o.leg(role)):
                words = f"expected a note of what the {role} engine found in its prefix cache, found none"
                findings.append(cell.untested(KEPT, words, o))
            for noted in moments:
                found = compare_kept(noted)
                judged += any(g.kept is not None and (g.kept.blocks or g.kept.foreign) for g in noted.groups) or any(
                    s.kept is not None or s.foreign for s in noted.states
                )
                compared = compared.and_of(found)
                findings += _changed(cell, o, role, noted, found)
    return conclude(KEPT, cell.id, judged, findings, note=compared.note)


def _changed(cell: CellView, o: Observation, role: str, noted: Noted, found: KVComparison) -> Iterator[Finding]:
    foreign = sorted({block for g in noted.groups if g.kept is not None for block in g.kept.foreign})
    if foreign:
        words = (
            f"the {role} engine's prefix cache gave block{'s' if len(foreign) > 1 else ''} {ranges(foreign)}, filled "
            "for other tokens than these"
        )
        yield cell.finding(KEPT, Verdict.REGRESSION, "target-kv", words, o)
    if others := sorted({s.tokens for s in noted.states if s.foreign}):
        words = f"the {role} engine's prefix cache gave the recurrent state after other tokens than these {others[0]}"
        yield cell.finding(KEPT, Verdict.REGRESSION, "target-kv", words, o)
    if found.differs:
        words = f"expected the {role} engine's prefix cache to find blocks as they were when they were filled"
        yield kv_finding(cell, KEPT, o, role, found, words, "the same engine")


def _of_another_answer(o: Observation, found: KVComparison, reference: KVReference) -> bool:
    """Return whether a drafter's KV differs only at the last token of a prompt, of answers that begin with different
    tokens: a drafter reads each token together with the next one."""
    ours = next(iter(o.output), None)
    return found.tokens == (len(o.sent_ids) - 1,) and ours != next(iter(reference.output_ids), None)


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
    answered = _is_answered(o) and o.route == "cell" and o.leg("decode") is not None
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
        yield cell.untested(check, f"the KV of layer {layer} was not seen: {why}")
    for error in dict.fromkeys(cell.kv_held.errors):
        yield cell.untested(check, f"the engines could not note what their KV caches hold: {error}")
    for words in _left_out(cell):
        yield cell.untested(check, words)


def _left_out(cell: CellView) -> Iterator[str]:
    """Yield which layers an engine neither notes nor names as unseen, though others that it is compared with have them,
    or its method says that it has a drafter's: only layers that both have are compared."""
    held = cell.kv_held
    own, reference, unseen = held.layers_of(cell.id), held.layers_of(_target_reference(cell)), held.unseen
    every = {k: v for of in (*own.values(), *reference.values()) for k, v in of.items()}
    target = [name for name, drafter in every.items() if not drafter]
    for role, layers in own.items():
        if lost := [name for name in target if name not in layers and name not in unseen]:
            yield f"expected the {role} engine to note the KV of layer {lost[0]}, as others do, found none of it"
        if _drafts_by_layers(cell, role) and not any(layers.values()) and not unseen:
            yield f"expected the {role} engine to note the KV of its drafter's layers, found none"


def _drafts_by_layers(cell: CellView, role: str) -> bool:
    """Return whether an engine has a drafter with attention of its own: P may have no drafter."""
    method = cell.profile.method(cell.name.method)
    without = role != "decode" and role != "single" and method.get("prefill_num_speculative_tokens") == 0
    return cell.speculative and cell.traits.own_layers and not without
