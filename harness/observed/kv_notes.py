"""Differences between what two KV caches held of the same tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.history.witness import (
    CELL,
    KEYS_AND_VALUES,
    LATENT,
    OUTLINE,
    KVLayer,
    Noted,
    NotedGroup,
    NotedState,
    StateLayer,
)

KINDS = (*KEYS_AND_VALUES, *LATENT)
STATE_KINDS = ("convolution", "state")
_NEVER = math.log(1e6)
"""By chance, outlines show less than one in a million times that a few tokens are so far apart."""


class OtherKV(NamedTuple):
    """A cell of 16 tokens of one layer in which two caches differ."""

    layer: KVLayer
    kind: str
    """One of KINDS: what differs."""
    cell: int
    """Number of the cell in the prompt."""
    heads: tuple[int, ...]
    """The heads that differ; empty of a latent, which is of all heads, and where cells of unlike extent were compared
    by token."""
    distance: float
    """Distance of the two over the size of the second one, as their sketches estimate it: infinite where it is zero,
    not a number where no sketch was kept."""
    zeros: bool
    """Whether the first cache has zeros there, in the heads that differ."""
    elsewhere: int | None
    """The cell in which the second cache has what the first one has here; None if it has it nowhere."""


class OtherState(NamedTuple):
    """A recurrent state of one layer in which two caches differ."""

    layer: StateLayer
    kind: str
    """One of STATE_KINDS."""
    tokens: int
    """The state is that after so many tokens."""
    heads: tuple[int, ...]
    """The heads that differ; empty of a convolution, and where the two have unlike numbers of them."""
    distance: float
    """As that of keys and values."""
    zeros: bool
    """Whether the first cache has zeros there, in the heads that differ."""


class KVBounds(NamedTuple):
    """Distances of two cells over their size up to which they are equal but for rounding; 0: bit for bit."""

    otherwise: float = 0.0
    """Of a layer of attention that is not named."""
    of_states: float = 0.0
    """Of a layer with recurrent state that is not named."""
    by_layer: Mapping[tuple[str, bool], float] = MappingProxyType({})
    """By the layer's name, of its keys or its latent (False) and its values (True), or of its convolution and its
    state."""

    def of(self, layer: KVLayer | StateLayer, values: bool) -> float:
        unnamed = self.of_states if isinstance(layer, StateLayer) else self.otherwise
        return self.by_layer.get((layer.name, values), unnamed)


EXACT = KVBounds()


class KVComparison(NamedTuple):
    """The comparison of two caches over the tokens that both hold."""

    cells: int
    """Cells that were compared, over all layers."""
    places: tuple[OtherKV, ...]
    tokens: tuple[int, ...]
    """The tokens that differ in any layer, where marks tell."""
    block_size: int
    states: tuple[OtherState, ...] = ()
    """The recurrent states that differ."""
    states_compared: int = 0
    """States that were compared, over all layers."""
    drafter: bool = False
    """Whether layers of the drafter alone were compared."""

    @property
    def compared(self) -> int:
        """Cells and states that were compared."""
        return self.cells + self.states_compared

    @property
    def differs(self) -> bool:
        return bool(self.places or self.tokens or self.states)

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

    ``received`` restricts the comparison to what another engine sent, ``tokens`` to so many tokens. Places whose
    distance is within ``bounds`` are taken for rounding.
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
        for owner in {p.layer.drafter for p in found}:
            at = {p.cell for p in found if p.layer.drafter == owner}
            others |= _tokens(mine, other, owner, {cell: common[cell] for cell in at}, bounds)
        # Cells of unlike extent have no digest in common, and no place: their tokens tell.
        uneven = {c: both for c, both in common.items() if not _even(mine, other, c, both)}
        asked = {layer.drafter for layer in mine.layers if drafter in (None, layer.drafter)}
        told = [owner for owner in asked if bounds == EXACT or _tells_of_tokens(mine, other, owner, bounds)]
        cells += len(uneven) * bool(told)
        for owner in told:
            wrong = uneven if bounds == EXACT else _apart(mine, other, owner, uneven, common, bounds)
            others |= _tokens(mine, other, owner, wrong, bounds)
    number, states = _other_states(ours, theirs, drafter, received, bounds, tokens)
    return KVComparison(cells, tuple(places), tuple(sorted(others)), size, tuple(states), number, bool(drafter))


class _StatePair(NamedTuple):
    """The same kind of recurrent state of a layer after the same tokens, in two notes."""

    layer: StateLayer
    kind: int
    tokens: int
    ours: NDArray[np.uint64]
    theirs: NDArray[np.uint64]
    distance: float


def _state_pairs(
    ours: Noted, theirs: Noted, drafter: bool | None, received: bool, tokens: int | None
) -> Iterator[_StatePair]:
    known = {(s.tokens, layer.name): (s, i) for s in theirs.states for i, layer in enumerate(s.layers)}
    for state in ours.states:
        if (received and not state.received) or (tokens is not None and state.tokens > tokens):
            continue
        for i, layer in enumerate(state.layers):
            other = known.get((state.tokens, layer.name))
            if other is None or drafter not in (None, layer.drafter):
                continue
            pairs = zip(state.digests[i], other[0].digests[other[1]], strict=False)
            for kind, (mine, digests) in enumerate(pairs):
                apart = distance_of(_sketch(state, i, kind), _sketch(*other, kind))
                yield _StatePair(layer, kind, state.tokens, mine, digests, apart)


def _sketch(state: NotedState, layer: int, kind: int) -> NDArray[np.float32]:
    sketch: NDArray[np.float32] = state.sketches[sum(len(x.parts) for x in state.layers[:layer]) + kind]
    return sketch


def _other_states(
    ours: Noted, theirs: Noted, drafter: bool | None, received: bool, bounds: KVBounds, tokens: int | None
) -> tuple[int, list[OtherState]]:
    """Return how many states were compared, and those that differ."""
    compared, found = 0, []
    for pair in _state_pairs(ours, theirs, drafter, received, tokens):
        # The kinds of a layer's state count once.
        compared += pair.kind == 0
        bound = bounds.of(pair.layer, bool(pair.kind))
        if np.array_equal(pair.ours, pair.theirs) or (bound and pair.distance <= bound):
            continue
        found.append(_other_state(pair.layer, pair.kind, pair.tokens, pair.ours, pair.theirs, pair.distance))
    return compared, found


def _other_state(
    layer: StateLayer,
    kind: int,
    tokens: int,
    ours: NDArray[np.uint64],
    theirs: NDArray[np.uint64],
    distance: float,
) -> OtherState:
    alike = len(ours) == len(theirs) > 1
    heads = tuple(int(h) for h in np.flatnonzero(ours != theirs)) if alike else ()
    # A layer with one tensor has a convolution, or a state by heads.
    name = STATE_KINDS[0] if kind == 0 and layer.parts[0] == 1 else STATE_KINDS[1]
    return OtherState(layer, name, tokens, heads, distance, not ours[list(heads) or slice(None)].any())


def states_unpaired(receiver: Noted, sender: Noted) -> tuple[int, ...]:
    """Return after how many tokens a receiver holds states that were sent and that the sender has no note of."""
    known = {(s.tokens, layer.name) for s in sender.states for layer in s.layers}
    sent = [s for s in receiver.states if s.received]
    return tuple(sorted({s.tokens for s in sent if not known >= {(s.tokens, layer.name) for layer in s.layers}}))


class CellDistance(NamedTuple):
    """How far two caches are apart in a cell of one layer."""

    layer: KVLayer | StateLayer
    values: bool
    """Of recurrent state: whether it is not that of the convolution."""
    cell: int
    distance: float
    """Over the size of the second one."""


def distances(ours: Noted, theirs: Noted, tokens: int) -> Iterator[CellDistance]:
    """Yield the distances of all cells of the first tokens, and of all states after some of them, in the layers of the
    target."""
    for mine, other, pairs in _alike(ours, theirs, drafter=False):
        for i, j, kind, cell in _places(mine, other, pairs, _common(mine, other, False, tokens)):
            apart = distance_of(mine.sketches[i, kind, cell], other.sketches[j, kind, cell])
            yield CellDistance(mine.layers[i], bool(kind), cell, apart)
    for pair in _state_pairs(ours, theirs, False, False, tokens):
        yield CellDistance(pair.layer, bool(pair.kind), pair.tokens // CELL, pair.distance)


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
            if pairs and mine.kinds == other.kinds:
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
    """Compare what the prefix cache found with what the same blocks, and states, were when they were filled."""
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
    known = [(s, s.kept) for s in found.states if s.kept is not None]
    states = [other for state, kept in known for other in _states_of_kept(state, kept)]
    return KVComparison(cells, tuple(places), (), size, tuple(states), sum(len(s.layers) for s, _ in known))


def _states_of_kept(state: NotedState, kept: Sequence[Sequence[NDArray[np.uint64]]]) -> Iterator[OtherState]:
    for layer, now, before in zip(state.layers, state.digests, kept, strict=True):
        for kind, (ours, theirs) in enumerate(zip(now, before, strict=True)):
            if not np.array_equal(ours, theirs):
                yield _other_state(layer, kind, state.tokens, ours, theirs, float("nan"))


def _places_of_kept(group: NotedGroup, kept: NDArray[np.uint64], cell: int, at: int) -> Iterator[OtherKV]:
    for i, layer in enumerate(group.layers):
        for kind in range(len(group.kinds)):
            now = group.digests[i, kind, cell]
            heads = tuple(int(h) for h in np.flatnonzero(now != kept[i, kind, at]))
            if heads:
                zeros = not now[list(heads)].any()
                yield OtherKV(layer, group.kinds[kind], cell, _named(group, heads), float("nan"), zeros, None)


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
        distance = distance_of(mine.sketches[i, kind, cell], other.sketches[j, kind, cell])
        # A sketch may not show the smallest differences at all.
        bound = bounds.of(mine.layers[i], bool(kind))
        if bound and distance <= bound:
            continue
        heads = tuple(int(h) for h in np.flatnonzero(ours != theirs)) if len(ours) == len(theirs) else ()
        elsewhere = _cell_with(other, j, kind, ours) if ours.any() else None
        zeros = not ours[list(heads) or slice(None)].any()
        place = mine.kinds[kind], cell, _named(mine, heads), distance, zeros, elsewhere
        found.append(OtherKV(mine.layers[i], *place))
    return compared, found


def _named(group: NotedGroup, heads: tuple[int, ...]) -> tuple[int, ...]:
    return () if group.kinds == LATENT else heads


def _places(
    mine: NotedGroup,
    other: NotedGroup,
    pairs: Collection[tuple[int, int]],
    common: dict[int, NDArray[np.bool_]],
) -> Iterator[tuple[int, int, int, int]]:
    """Yield what both notes cover alike: the layer in the one and in the other, the number of the kind, and the
    cell."""
    for cell, both in common.items():
        if _even(mine, other, cell, both):
            for i, j in pairs:
                yield from ((i, j, kind, cell) for kind in range(len(mine.kinds)))


def _cell_with(group: NotedGroup, layer: int, kind: int, digest: NDArray[np.uint64]) -> int | None:
    """Return the first cell that has a digest; None if none has."""
    cells = enumerate(group.digests[layer, kind])
    return next((cell for cell, other in cells if np.array_equal(other, digest)), None)


def _even(mine: NotedGroup, other: NotedGroup, cell: int, both: NDArray[np.bool_]) -> bool:
    """Return whether both notes of a cell cover the same tokens."""
    return np.array_equal(_of_cell(mine, cell), both) and np.array_equal(_of_cell(other, cell), both)


def distance_of(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Return the distance of two sketches over the size of the second one; infinite where that is zero."""
    size = float(np.sqrt(np.square(theirs).sum()))
    return float(np.sqrt(np.square(ours - theirs).sum())) / size if size else float("inf")


def _tokens(
    mine: NotedGroup, other: NotedGroup, drafter: bool, cells: Mapping[int, NDArray[np.bool_]], bounds: KVBounds
) -> set[int]:
    """Return the tokens of some cells that differ in the layers of the target or of the drafter, by more than rounding
    moves them. Where that is not told of any token of a cell, all that differ."""
    if mine.marks is None or other.marks is None or not _same_layers(mine, other, drafter):
        return set()
    far = _distances(mine, other, drafter, cells) if _tells_of_tokens(mine, other, drafter, bounds) else {}
    out: set[int] = set()
    for cell in cells:
        differing = {t for t in _held(cells, cell) if mine.marks[drafter][t] != other.marks[drafter][t]}
        out |= {t for t in differing if not far.get(t, 0.0) <= bounds.otherwise} or differing
    return out


def _apart(
    mine: NotedGroup,
    other: NotedGroup,
    drafter: bool,
    cells: Mapping[int, NDArray[np.bool_]],
    common: Mapping[int, NDArray[np.bool_]],
    bounds: KVBounds,
) -> dict[int, NDArray[np.bool_]]:
    """Return those of some cells whose tokens are further apart than rounding, and the few projections of them,
    allow."""
    far = _distances(mine, other, drafter, common)
    out = {}
    for cell in cells:
        squares = [far[t] ** 2 for t in _held(cells, cell)]
        if not np.mean(squares) <= (bounds.otherwise * _spread(len(squares))) ** 2:
            out[cell] = cells[cell]
    return out


def _spread(tokens: int) -> float:
    """Return how many times its size the distance of so many tokens may seem, once in a million (Laurent and Massart,
    2000)."""
    share = _NEVER / (OUTLINE * tokens)
    return math.sqrt(1 + 2 * math.sqrt(share) + 2 * share)


def _tells_of_tokens(mine: NotedGroup, other: NotedGroup, drafter: bool, bounds: KVBounds) -> bool:
    """Return whether outlines tell how far tokens are apart: not where rounding was measured by layer."""
    both = mine.outlines[drafter] is not None and other.outlines[drafter] is not None
    return both and bounds != EXACT and not bounds.by_layer and _same_layers(mine, other, drafter)


def _distances(
    mine: NotedGroup, other: NotedGroup, drafter: bool, cells: Mapping[int, NDArray[np.bool_]]
) -> dict[int, float]:
    """Return the distances of the tokens of some cells, over the usual size of one."""
    ours, theirs = mine.outlines[drafter], other.outlines[drafter]
    tokens = [t for cell in cells for t in _held(cells, cell)]
    if ours is None or theirs is None or not tokens:
        return {}
    size = float(np.sqrt(np.mean(np.square(theirs[tokens]).sum(axis=1))))
    apart = np.sqrt(np.square(ours[tokens] - theirs[tokens]).sum(axis=1))
    far = apart / size if size else np.where(apart, np.inf, 0.0)
    return dict(zip(tokens, far.tolist(), strict=True))


def _same_layers(mine: NotedGroup, other: NotedGroup, drafter: bool) -> bool:
    """Return whether both have the same layers of the target or of the drafter: marks and outlines cover all."""
    return [x for x in mine.layers if x.drafter == drafter] == [x for x in other.layers if x.drafter == drafter]


def _held(cells: Mapping[int, NDArray[np.bool_]], cell: int) -> list[int]:
    return [cell * CELL + int(t) for t in np.flatnonzero(cells[cell])]
