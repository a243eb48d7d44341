"""Findings about the KV itself: which of it differs, and what stands there instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.history.witness import CELL, LATENT
from harness.judging.evidence import CellView
from harness.judging.figures import KVDifference, KVOfLayers, KVPlace, KVState
from harness.judging.findings import DamageClass, Finding, Location
from harness.observed.kv_notes import KINDS, STATE_KINDS, KVComparison
from harness.prompts.lengths import blocks
from harness.util.text import listed

_SHOWN = 12
"""Places that a finding lists."""


def kv_finding(
    cell: CellView, check: str, o: Observation, role: str, found: KVComparison, words: str, whose: str
) -> Finding:
    """Return the finding of a role's KV that is another than that of ``whose``; ``words`` say what was expected."""
    only_drafter = all(p.layer.drafter for p in found.places) if found.places else found.drafter
    damage: DamageClass = "drafter-kv" if only_drafter else "target-kv"
    count = _blocks(o, found)
    where = _where(found, count, whose)
    evidence = KVDifference(
        role=role,
        places=tuple(
            KVPlace(
                layer=p.layer.name,
                kind=p.kind,
                heads=p.heads,
                first_token=p.cell * CELL,
                zeros=p.zeros,
                found_at=None if p.elsewhere is None else p.elsewhere * CELL,
            )
            for p in found.places[:_SHOWN]
        ),
        differing=len(found.places),
        tokens=found.tokens,
        prompt_tokens=len(o.sent_ids),
        by_layer=tuple(_by_layer(found)),
        states=tuple(
            KVState(layer=s.layer.name, kind=s.kind, heads=s.heads, after=s.tokens, zeros=s.zeros)
            for s in found.states[:_SHOWN]
        ),
    )
    finding = cell.finding(check, Verdict.REGRESSION, damage, f"{words}, found {where}", o, evidence)
    moved = _moved(found)
    first = min(found.tokens, default=min((p.cell * CELL for p in found.places), default=None))
    location = Location(
        blocks=found.blocks,
        of=count,
        shift=moved[1] - moved[0] if moved is not None else None,
        position=first,
        text=where,
    )
    return finding.model_copy(update={"location": location})


def _blocks(o: Observation, found: KVComparison) -> int:
    """Return how many blocks a request's prompt has; together with its answer, where one of those differs."""
    of_prompt = blocks(len(o.sent_ids), found.block_size)
    if max(found.blocks, default=0) < of_prompt:
        return of_prompt
    return blocks(len(o.sent_ids) + len(o.output), found.block_size)


def _by_layer(found: KVComparison) -> Iterator[KVOfLayers]:
    """Yield what differs in each layer, taking together those that follow each other and differ alike."""
    layers = _in_order([*(p.layer.name for p in found.places), *(s.layer.name for s in found.states)])
    for alike, group in groupby(layers, lambda layer: _of_layer(found, layer)):
        yield alike.model_copy(update={"layers": tuple(group)})


def _of_layer(found: KVComparison, layer: str) -> KVOfLayers:
    """Return what differs in a layer, without its name."""
    places = [p for p in found.places if p.layer.name == layer]
    states = [s for s in found.states if s.layer.name == layer]
    keys, values, latent = (
        tuple(sorted({p.cell * CELL // found.block_size for p in places if p.kind == kind})) for kind in KINDS
    )
    return KVOfLayers(
        layers=(),
        keys=keys,
        values=values,
        latent=latent,
        states=tuple(sorted({s.tokens for s in states})),
        zeros=all(p.zeros for p in places) and all(s.zeros for s in states),
    )


def _where(found: KVComparison, count: int, whose: str) -> str:
    """Describe which KV and which recurrent state differ, and what stands there instead."""
    words = [_where_of_kv(found, count, whose)] if found.places or found.tokens else []
    return listed([*words, _where_of_states(found)] if found.states else words, "and")


def _where_of_states(found: KVComparison) -> str:
    # What an early state is wrong in, the later ones are, too.
    after = min(s.tokens for s in found.states)
    first = [s for s in found.states if s.tokens == after]
    kinds = [kind for kind in STATE_KINDS if any(s.kind == kind for s in first)]
    heads = sorted({h for s in first for h in s.heads})
    parts = [
        f"another {' and '.join('recurrent state' if kind == 'state' else kind for kind in kinds)}",
        _layers(_in_order(s.layer.name for s in first)),
        f"in head{'s' if len(heads) > 1 else ''} {ranges(heads)}" if heads else "",
        f"after {after} tokens",
    ]
    return " ".join(p for p in parts if p) + (": zeros" if all(s.zeros for s in first) else "")


def _where_of_kv(found: KVComparison, count: int, whose: str) -> str:
    layers = _in_order(p.layer.name for p in found.places)
    kinds = [kind for kind in KINDS if any(p.kind == kind for p in found.places)]
    heads = sorted({h for p in found.places for h in p.heads})
    some = all(p.heads for p in found.places) and bool(heads)
    parts = [
        f"{'another' if kinds == [*LATENT] else 'other'} {' and '.join(kinds) or 'KV'}",
        _layers(layers) if layers else "",
        f"in head{'s' if len(heads) > 1 else ''} {ranges(heads)}" if some else "",
        f"in block{'s' if len(found.blocks) > 1 else ''} {ranges(found.blocks)} of {count}",
        f"(token{'s' if len(found.tokens) > 1 else ''} {ranges(found.tokens)})" if found.tokens else "",
    ]
    return " ".join(p for p in parts if p) + _instead(found, whose)


def _in_order(layers: Iterable[str]) -> list[str]:
    """Return the names of layers once each, by their numbers: groups of unlike layers come one after the other."""
    numbered = {layer: [int(n) for n in re.findall("[0-9]+", layer)] for layer in layers}
    return sorted(numbered, key=lambda layer: (re.sub("[0-9]+", "", layer), numbered[layer]))


def _layers(layers: list[str]) -> str:
    return f"in layer {layers[0]}" if len(layers) == 1 else f"in {len(layers)} layers ({layers[0]} to {layers[-1]})"


def _instead(found: KVComparison, whose: str) -> str:
    if found.places and all(p.zeros for p in found.places):
        return ": zeros"
    if (moved := _moved(found)) is not None:
        here, there = moved
        plural = "s" if abs(there - here) > 1 else ""
        return f": block {here} holds what {whose} has in block {there}, {there - here:+d} block{plural} away"
    return ""


def _moved(found: KVComparison) -> tuple[int, int] | None:
    """Return the first block that holds what the other engine has elsewhere, and where it has that; None unless most
    places do."""
    moved = [(p.cell, p.elsewhere) for p in found.places if p.elsewhere is not None]
    if not moved or 2 * len(moved) < len(found.places):
        return None
    here, there = (cell * CELL // found.block_size for cell in moved[0])
    return here, there


def ranges(numbers: tuple[int, ...] | list[int]) -> str:
    """Return numbers as text, those that follow each other as a range: ``0 to 2, 5``."""
    out = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        items = [number for _, number in run]
        out.append(str(items[0]) if len(items) == 1 else f"{items[0]} to {items[-1]}")
    return ", ".join(out)
