"""Differences between what two KV caches held of the same tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.history.witness import CELL, KVLayer, Noted, NotedGroup

KINDS = ("keys", "values")


class OtherKV(NamedTuple):
    """A cell of 16 tokens of one layer in which two caches differ."""

    layer: KVLayer
    values: bool
    """Whether it is the values that differ, and not the keys."""
    cell: int
    """Number of the cell in the prompt."""
    heads: tuple[int, ...]
    """The heads that differ; empty where cells of unlike extent were compared by token."""
    distance: float
    """Distance of the two over the size of the second one, as their sketches estimate it: infinite where it is zero,
    not a number where no sketch was kept."""
    zeros: bool
    """Whether the first cache has zeros there, in the heads that differ."""
    elsewhere: int | None
    """The cell in which the second cache has what the first one has here; None if it has it nowhere."""


class KVBounds(NamedTuple):
    """Distances of two cells over their size up to which they are equal but for rounding; 0: bit for bit."""

    otherwise: float = 0.0
    """Of a layer that is not named."""
    by_layer: Mapping[tuple[str, bool], float] = MappingProxyType({})
    """By the layer's name, of its keys (False) and its values (True)."""

    def of(self, layer: KVLayer, values: bool) -> float:
        return self.by_layer.get((layer.name, values), self.otherwise)


EXACT = KVBounds()


class KVComparison(NamedTuple):
    """The comparison of two caches over the tokens that both hold."""

    cells: int
    """Cells that were compared, over all layers."""
    places: tuple[OtherKV, ...]
    tokens: tuple[int, ...]
    """The tokens that differ in any layer, where marks tell."""
    block_size: int

    @property
    def differs(self) -> bool:
        return bool(self.places or self.tokens)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of the first cache that differ."""
        if self.tokens:
            return tuple(sorted({t // self.block_size for t in self.tokens}))
        return tuple(sorted({p.cell * CELL // self.block_size for p in self.places}))


def compare_notes(
    ours: Noted,
    theirs: Noted,
    drafter: bool | None = None,
    received: bool = False,
    bounds: KVBounds = EXACT,
    tokens: int | None = None,
) -> KVComparison:
    """Compare two notes in the layers of the target, of the drafter, or of both (None).

    ``received`` restricts the comparison to blocks that another engine filled, ``tokens`` to so many tokens. Places
    whose distance is within ``bounds`` are taken for rounding.
    """
    cells, size = 0, ours.groups[0].block_size if ours.groups else 1
    places: list[OtherKV] = []
    others: set[int] = set()
    for mine, other, pairs in _alike(ours, theirs, drafter):
        size = mine.block_size
        common = _common(mine, other, received, tokens)
        number, found = _differences(mine, other, pairs, common, bounds)
        cells += number
        places += found
        others |= _tokens(mine, other, common, {p.layer.drafter for p in found}, {p.cell for p in found})
        if bounds == EXACT:
            # Cells of unlike extent have no digest in common, and no place: their tokens tell.
            uneven = [c for c, both in common.items() if not _even(mine, other, c, both)]
            asked = {layer.drafter for layer in mine.layers if drafter in (None, layer.drafter)}
            cells += len(uneven)
            others |= _tokens(mine, other, common, asked, uneven)
    return KVComparison(cells, tuple(places), tuple(sorted(others)), size)


class CellDistance(NamedTuple):
    """How far two caches are apart in a cell of one layer."""

    layer: KVLayer
    values: bool
    cell: int
    distance: float
    """Over the size of the second one."""


def distances(ours: Noted, theirs: Noted, tokens: int) -> Iterator[CellDistance]:
    """Yield the distances of all cells of the first tokens, in the layers of the target."""
    for mine, other, pairs in _alike(ours, theirs, drafter=False):
        for i, j, kind, cell in _places(mine, other, pairs, _common(mine, other, False, tokens)):
            apart = _distance(mine.sketches[i, kind, cell], other.sketches[j, kind, cell])
            yield CellDistance(mine.layers[i], bool(kind), cell, apart)


def _alike(
    ours: Noted, theirs: Noted, drafter: bool | None
) -> Iterator[tuple[NotedGroup, NotedGroup, list[tuple[int, int]]]]:
    """Yield groups that have layers in common, with the places of these layers in both."""
    for mine in ours.groups:
        for other in theirs.groups:
            pairs = [
                (i, other.layers.index(layer))
                for i, layer in enumerate(mine.layers)
                if layer in other.layers and drafter in (None, layer.drafter)
            ]
            if pairs:
                yield mine, other, pairs


def tokens_beyond(receiver: Noted, said: int) -> tuple[int, ...]:
    """Return the tokens in blocks that another engine filled which are behind the first ``said``. The last token that
    the receiver holds does not count: it computes it again."""
    out: set[int] = set()
    for group in receiver.groups:
        held = np.flatnonzero(group.counted)[:-1]
        taken = held[np.isin(held // group.block_size, sorted(group.received or ()))]
        out |= {int(t) for t in taken if t >= said}
    return tuple(sorted(out))


def compare_kept(found: Noted) -> KVComparison:
    """Compare what the prefix cache found with what the same blocks held when they were filled."""
    cells, size = 0, found.groups[0].block_size if found.groups else 1
    places: list[OtherKV] = []
    for group in found.groups:
        if group.kept is None:
            continue
        size = group.block_size
        in_block = size // CELL
        at = (block * in_block + i for block in group.kept.blocks for i in range(in_block))
        for number, cell in enumerate(at):
            if _of_cell(group, cell).all():
                cells += len(group.layers)
                places += _places_of_kept(group, group.kept.digests, cell, number)
    return KVComparison(cells, tuple(places), (), size)


def _places_of_kept(group: NotedGroup, kept: NDArray[np.uint64], cell: int, at: int) -> Iterator[OtherKV]:
    for i, layer in enumerate(group.layers):
        for kind in range(2):
            now = group.digests[i, kind, cell]
            heads = tuple(int(h) for h in np.flatnonzero(now != kept[i, kind, at]))
            if heads:
                yield OtherKV(layer, bool(kind), cell, heads, float("nan"), not now[list(heads)].any(), None)


def _common(mine: NotedGroup, other: NotedGroup, received: bool, tokens: int | None) -> dict[int, NDArray[np.bool_]]:
    """Return, by cell, the tokens that both hold; cells without any are left out."""
    out = {}
    for cell in range(min(len(mine.counted), len(other.counted)) // CELL):
        both = _of_cell(mine, cell) & _of_cell(other, cell)
        if tokens is not None:
            both &= cell * CELL + np.arange(CELL) < tokens
        if received:
            blocks = (cell * CELL + np.arange(CELL)) // mine.block_size
            both &= np.isin(blocks, sorted(mine.received or ()))
        if both.any():
            out[cell] = both
    return out


def _of_cell(group: NotedGroup, cell: int) -> NDArray[np.bool_]:
    return group.counted[cell * CELL : (cell + 1) * CELL]


def _differences(
    mine: NotedGroup,
    other: NotedGroup,
    pairs: Collection[tuple[int, int]],
    common: dict[int, NDArray[np.bool_]],
    bounds: KVBounds,
) -> tuple[int, list[OtherKV]]:
    """Return how many cells were compared, and the places that differ. Cells of which one holds more tokens than the
    other have no digest in common."""
    compared, found = 0, []
    for i, j, kind, cell in _places(mine, other, pairs, common):
        # Keys and values of a cell count once.
        compared += kind == 0
        ours, theirs = mine.digests[i, kind, cell], other.digests[j, kind, cell]
        if np.array_equal(ours, theirs):
            continue
        distance = _distance(mine.sketches[i, kind, cell], other.sketches[j, kind, cell])
        # A sketch may not show the smallest differences at all.
        bound = bounds.of(mine.layers[i], bool(kind))
        if bound and distance <= bound:
            continue
        heads = tuple(int(h) for h in np.flatnonzero(ours != theirs)) if len(ours) == len(theirs) else ()
        elsewhere = _cell_with(other, j, kind, ours) if ours.any() else None
        zeros = not ours[list(heads) or slice(None)].any()
        found.append(OtherKV(mine.layers[i], bool(kind), cell, heads, distance, zeros, elsewhere))
    return compared, found


def _places(
    mine: NotedGroup,
    other: NotedGroup,
    pairs: Collection[tuple[int, int]],
    common: dict[int, NDArray[np.bool_]],
) -> Iterator[tuple[int, int, int, int]]:
    """Yield what both notes cover alike: the layer in the one and in the other, keys (0) or values (1), and the
    cell."""
    for cell, both in common.items():
        if _even(mine, other, cell, both):
            for i, j in pairs:
                yield from ((i, j, kind, cell) for kind in range(2))


def _cell_with(group: NotedGroup, layer: int, kind: int, digest: NDArray[np.uint64]) -> int | None:
    """Return the first cell that has a digest; None if none has."""
    cells = enumerate(group.digests[layer, kind])
    return next((cell for cell, other in cells if np.array_equal(other, digest)), None)


def _even(mine: NotedGroup, other: NotedGroup, cell: int, both: NDArray[np.bool_]) -> bool:
    """Return whether both notes of a cell cover the same tokens."""
    return np.array_equal(_of_cell(mine, cell), both) and np.array_equal(_of_cell(other, cell), both)


def _distance(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Return the distance of two sketches over the size of the second one."""
    size = float(np.sqrt(np.square(theirs).sum()))
    return float(np.sqrt(np.square(ours - theirs).sum())) / size if size else float("inf")


def _tokens(
    mine: NotedGroup,
    other: NotedGroup,
    common: dict[int, NDArray[np.bool_]],
    drafters: Collection[bool],
    cells: Collection[int],
) -> set[int]:
    """Return the tokens of some cells whose marks differ. Marks cover all layers of the target or of the drafter, so
    that they tell nothing where one engine has other layers."""
    if mine.marks is None or other.marks is None:
        return set()
    out = set()
    for drafter in drafters:
        if [x for x in mine.layers if x.drafter == drafter] != [x for x in other.layers if x.drafter == drafter]:
            continue
        for token in _both(common, cells):
            if mine.marks[drafter][token] != other.marks[drafter][token]:
                out.add(token)
    return out


def _both(common: dict[int, NDArray[np.bool_]], cells: Collection[int]) -> Iterator[int]:
    for cell in sorted(cells):
        yield from (cell * CELL + int(t) for t in np.flatnonzero(common[cell]))
