"""What the KV caches of a run's engines held, as their plugin wrote it (``kv_harness_witness``)."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from harness.errors import DataError
from harness.history.index import LONGEST_LINE
from harness.history.kv_events import is_events
from harness.history.layout import witness_files
from harness.history.notes import engines_of, lines_of, role_of, validated
from harness.util import json_io
from harness.util.byte_cache import ByteCache
from harness.util.strict import Strict

Moment = Literal["begin", "end", "answer", "drafts"]
CELL = 16
"""Tokens in a cell."""
_SKETCH = 8
OUTLINE = 2
"""Projections of a token."""
KEYS_AND_VALUES = ("keys", "values")
LATENT = ("latent",)
"""What a layer of multi-head latent attention (MLA) keeps of a token: one vector for all heads."""
_CACHED = 16 * 2**20
"""Bytes of lines whose notes are kept."""
_REQUEST = re.compile(r"(?:cmpl-(?P<id>.+?)(?:-\d+(?:-[0-9a-f]{8})?)?|chatcmpl-(?P<chat>.+?)(?:-[0-9a-f]{8})?)")
"""How vLLM names the request that came with an X-Request-Id: of completions which choice, and since 0.12 something
random."""
_ROUTED = "___prefill_addr_"
"""How the names of requests begin that vllm-router sends to a pair: with its addresses, whatever its client sent."""


class KVLayer(NamedTuple):
    """A layer of attention with a KV cache."""

    name: str
    drafter: bool


class KeptBlocks(NamedTuple):
    """What blocks that the prefix cache found held when the request was over that had filled them."""

    blocks: tuple[int, ...]
    """Which of the request's blocks; not all that were found are known."""
    digests: NDArray[np.uint64]
    """[layers, kinds, cells of these blocks, heads]"""
    foreign: tuple[int, ...]
    """The request's blocks that were filled for other tokens."""


class NotedGroup(NamedTuple):
    """What the layers of a KV-cache group held of the first tokens of a request."""

    layers: tuple[KVLayer, ...]
    block_size: int
    counted: NDArray[np.bool_]
    """Whether each token counts: those in blocks that a window has left do not, nor what fills the last cell up."""
    digests: NDArray[np.uint64]
    """[layers, kinds, cells, heads]"""
    sketches: NDArray[np.float32]
    """[layers, kinds, cells, projections]"""
    marks: tuple[NDArray[np.uint32], NDArray[np.uint32]] | None
    """By token: of the target's layers together, and of the drafter's. None where several ranks noted a part each."""
    received: frozenset[int] | None
    """The request's blocks that another engine filled; None where none was asked to."""
    outlines: tuple[NDArray[np.float32] | None, NDArray[np.float32] | None] = (None, None)
    """As marks, [tokens, projections]; None where there are no such layers or several ranks noted a part each, and in
    records of earlier versions."""
    kept: KeptBlocks | None = None
    """Of a note before the first step: what the blocks were that the prefix cache found."""
    firsts: tuple[int, ...] = ()
    """Number of each layer's first head among those of all ranks; none where one noted all."""
    kinds: tuple[str, ...] = KEYS_AND_VALUES


class StateLayer(NamedTuple):
    """A layer with recurrent state."""

    name: str
    drafter: bool
    parts: tuple[int, ...]
    """Heads of each of its tensors; one of a convolution."""


class NotedState(NamedTuple):
    """The recurrent state of the layers of a KV-cache group after the first tokens of a request."""

    layers: tuple[StateLayer, ...]
    tokens: int
    digests: tuple[tuple[NDArray[np.uint64], ...], ...]
    """By layer and tensor: [heads]"""
    sketches: NDArray[np.float32]
    """[tensors of all layers, projections]"""
    received: bool = False
    """Whether another engine sent it."""
    kept: tuple[tuple[NDArray[np.uint64], ...], ...] | None = None
    """Of a state that the prefix cache found: the digests that it had when it was computed, where they are known."""
    foreign: bool = False
    """Whether the prefix cache had it of other tokens."""


class NotedDrafts(NamedTuple):
    """What the drafts of a step were sampled from."""

    position: int
    """That of the last token that the target had verified. Drafts follow the token behind it."""
    tokens: tuple[int, ...]
    sketches: NDArray[np.float32]
    """[drafts, projections], of the hidden states that they were sampled from."""


class Noted(NamedTuple):
    """What an engine's KV caches held of a request at a moment."""

    groups: tuple[NotedGroup, ...]
    states: tuple[NotedState, ...] = ()
    """The state that the request goes on from; at its end, those after each chunk of its prompt."""
    drafts: tuple[NotedDrafts, ...] = ()
    """What it was drafted, step by step."""


class _Place(NamedTuple):
    path: Path
    offset: int
    rank: int


class _GroupOfFile(Strict):
    group: int
    block_size: int
    layers: tuple[tuple[str, bool, int], ...]
    firsts: tuple[int, ...] = ()
    """Number of each layer's first head among those of all ranks; none in records of earlier versions."""
    kinds: tuple[Literal["keys"], Literal["values"]] | tuple[Literal["latent"]] = ("keys", "values")


class _StatesOfFile(Strict):
    group: int
    layers: tuple[tuple[str, bool, tuple[int, ...]], ...]


class _Header(Strict):
    witness: Literal[1]
    rank: int
    ranks: int
    groups: tuple[_GroupOfFile, ...]
    states: tuple[_StatesOfFile, ...] = ()
    unseen: dict[str, str]
    drafts: bool = False


class _KeptRow(Strict):
    blocks: tuple[int, ...]
    digests: str
    foreign: tuple[int, ...]


class _GroupRow(Strict):
    group: int
    counted: str
    digests: str
    sketches: str
    marks: tuple[str, str]
    outlines: tuple[str, str] = ("", "")
    kept: _KeptRow | None = None


class _StateRow(Strict):
    group: int
    tokens: int = Field(ge=1)
    digests: str
    sketches: str
    received: bool = False
    kept: str | None = None
    foreign: bool = False


class _DraftsRow(Strict):
    positions: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    sketches: str


class _Row(Strict):
    request: str
    prompt: str
    moment: Moment
    received: tuple[tuple[int, ...], ...] | None = None
    first: int = Field(default=0, ge=0)
    """Number of the first cell."""
    groups: tuple[_GroupRow, ...]
    states: tuple[_StateRow, ...] = ()
    drafts: _DraftsRow | None = None


class KVWitness:
    """The notes of all engines of a run, which are parsed when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Index the notes in a run's folder. Raises DataError for damaged ones."""
        self._headers: dict[Path, _Header] = {}
        self._routed: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        """By group of engines and prompt, the requests that a router named, in the order in which they ended."""
        self._places: dict[tuple[str, str, Moment], list[_Place]] = defaultdict(list)
        self.unseen: dict[str, dict[str, str]] = defaultdict(dict)
        """By group of engines: layers whose caches could not be read, with the reason."""
        self.layers: dict[str, dict[str, dict[str, bool]]] = defaultdict(dict)
        """By group of engines, then role: the layers that it notes, or could not read; whether each is a drafter's."""
        self.drafting: set[str] = set()
        """Groups of engines of which one notes what drafts were sampled from."""
        self.errors: dict[str, list[str]] = defaultdict(list)
        """By group of engines: what went wrong in the plugin."""
        self._parsed: ByteCache[_Place, Noted] = ByteCache(_CACHED)
        """Notes that are asked for again: each reference is, for every cell."""
        for path in witness_files(folder):
            if not is_events(path):
                self._read(path)

    def _read(self, path: Path) -> None:
        engines, role = engines_of(path), role_of(path)
        for offset, row in lines_of(path):
            if "error" in row:
                self.errors[engines].append(str(row["error"]))
            elif "witness" in row:
                self._headers[path] = header = validated(_Header, row, path)
                known = [*(g.layers for g in header.groups), *(g.layers for g in header.states)]
                of_role = self.layers[engines].setdefault(role, {})
                of_role |= {name: drafter for layers in known for name, drafter, _ in layers}
                self.unseen[engines] |= header.unseen
                self.drafting |= {engines} if header.drafts else set()
            elif path not in self._headers:
                raise DataError(f"{path}: expected the layers of the engine in the first line, found a request")
            else:
                named = _REQUEST.fullmatch(str(row.get("request")))
                request = (named["id"] or named["chat"]) if named else str(row.get("request"))
                if request.startswith(_ROUTED) and row.get("moment") == "end":
                    self._routed[engines, str(row.get("prompt"))][request] = None
                place = _Place(path, offset, self._headers[path].rank)
                self._places[request, _side(role), row.get("moment", "")].append(place)

    def routed(self, engines: str, prompt: Sequence[int]) -> list[str]:
        """Return the requests of a prompt that a router has named, in the order in which they ended on one of a group
        of engines."""
        name = hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()[:16]
        return list(self._routed.get((engines, name), ()))

    def noted(self, request: str, role: str, moment: Moment) -> list[Noted]:
        """Return what the engine of a role noted of a request at a moment, in order: several of one that was preempted.
        One that a rank of the engine did not note, whose heads are nobody else's, counts as none. Raises DataError for
        damaged notes."""
        places = self._places.get((request, _side(role), moment), ())
        ranks = max((self._headers[place.path].ranks for place in places), default=1)
        if moment != "drafts" and len({place.rank for place in places}) < ranks:
            return []
        by_rank: dict[int, list[Noted]] = defaultdict(list)
        for place in places:
            by_rank[place.rank].append(self._at(place))
        return [_whole(parts) for parts in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=False)]

    def _at(self, place: _Place) -> Noted:
        if (known := self._parsed.get(place)) is not None:
            return known
        with place.path.open("rb") as stream:
            stream.seek(place.offset)
            line = stream.readline(LONGEST_LINE)
        row = validated(_Row, json_io.loads(line.decode()), place.path)
        groups = {g.group: g for g in self._headers[place.path].groups}
        order = [g.group for g in self._headers[place.path].groups]
        noted = []
        for found in row.groups:
            if found.group not in groups:
                raise DataError(f"{place.path}: expected a group of its layers, found {found.group}")
            received = None if row.received is None else frozenset(row.received[order.index(found.group)])
            noted.append(_behind(row.first, _group(groups[found.group], found, received, place.path)))
        layers = {g.group: tuple(StateLayer(*layer) for layer in g.layers) for g in self._headers[place.path].states}
        if unknown := {s.group for s in row.states} - set(layers):
            raise DataError(f"{place.path}: expected a group of its states, found {min(unknown)}")
        states = tuple(_state(layers[s.group], s, place.path) for s in row.states)
        whole = Noted(tuple(noted), states, _drafts(row.drafts, place.path) if row.drafts is not None else ())
        self._parsed.put(place, whole, len(line))
        return whole


def _side(role: str) -> str:
    """Return which engine of a pair a role is: a single cell is asked of D."""
    return "prefill" if "prefill" in role else "decode"


def _array(text: str, dtype: str, path: Path) -> NDArray[Any]:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype)
    except ValueError as error:
        raise DataError(f"{path}: expected numbers in base 64, found damaged data ({error})") from error


def _group(known: _GroupOfFile, found: _GroupRow, received: frozenset[int] | None, path: Path) -> NotedGroup:
    counted = _array(found.counted, "u1", path).astype(bool)
    cells, layers = len(counted) // CELL, tuple(KVLayer(name, drafter) for name, drafter, _ in known.layers)
    marks = tuple(_array(mark, "<u4", path) for mark in found.marks)
    try:
        shape = len(layers), len(known.kinds), cells
        digests = _array(found.digests, "<u8", path).reshape(*shape, known.layers[0][2])
        sketches = _array(found.sketches, "<f2", path).reshape(*shape, _SKETCH).astype(np.float32)
    except ValueError as error:
        raise DataError(f"{path}: expected {len(layers)} layers of {cells} cells, found another number") from error
    if any(len(mark) != len(counted) for mark in marks):
        raise DataError(f"{path}: expected a mark for each of {len(counted)} tokens, found another number")
    kept = None if found.kept is None else _kept(known, found.kept, cells, path)
    target, drafter = (_outline(text, len(counted), path) for text in found.outlines)
    both, outlines = (marks[0], marks[1]), (target, drafter)
    return NotedGroup(
        layers, known.block_size, counted, digests, sketches, both, received, outlines, kept, known.firsts, known.kinds
    )


def _outline(text: str, tokens: int, path: Path) -> NDArray[np.float32] | None:
    if not text:
        return None
    try:
        return _array(text, "<f2", path).reshape(tokens, OUTLINE).astype(np.float32)
    except ValueError as error:
        raise DataError(f"{path}: expected an outline of each of {tokens} tokens, found another number") from error


def _kept(known: _GroupOfFile, found: _KeptRow, cells: int, path: Path) -> KeptBlocks:
    of_blocks = len(found.blocks) * known.block_size // CELL
    if any(not 0 <= block < cells * CELL // known.block_size for block in (*found.blocks, *found.foreign)):
        raise DataError(f"{path}: expected kept blocks of the request, found others")
    try:
        shape = len(known.layers), len(known.kinds), of_blocks, known.layers[0][2]
        digests = _array(found.digests, "<u8", path).reshape(shape)
    except ValueError as error:
        raise DataError(f"{path}: expected digests of {len(found.blocks)} kept blocks, found another number") from error
    return KeptBlocks(found.blocks, digests, found.foreign)


def _drafts(found: _DraftsRow, path: Path) -> tuple[NotedDrafts, ...]:
    ends = np.cumsum([len(tokens) for tokens in found.tokens]).tolist()
    try:
        sketches = _array(found.sketches, "<f4", path).reshape(ends[-1] if ends else 0, _SKETCH)
        steps = zip(found.positions, found.tokens, np.split(sketches, ends)[:-1], strict=True)
        return tuple(NotedDrafts(*step) for step in steps)
    except ValueError as error:
        raise DataError(f"{path}: expected a sketch of each draft, found another number") from error


def _state(layers: tuple[StateLayer, ...], found: _StateRow, path: Path) -> NotedState:
    try:
        sketches = _array(found.sketches, "<f4", path).reshape(sum(len(layer.parts) for layer in layers), _SKETCH)
    except ValueError as error:
        raise DataError(f"{path}: expected a sketch of each state of {len(layers)} layers, found others") from error
    kept = None if found.kept is None else _by_tensor(layers, found.kept, path)
    digests = _by_tensor(layers, found.digests, path)
    return NotedState(layers, found.tokens, digests, sketches, found.received, kept, found.foreign)


def _by_tensor(layers: tuple[StateLayer, ...], text: str, path: Path) -> tuple[tuple[NDArray[np.uint64], ...], ...]:
    """Return the digests of states by layer and tensor."""
    digests = _array(text, "<u8", path)
    if len(digests) != (parts := sum(sum(layer.parts) for layer in layers)):
        raise DataError(f"{path}: expected {parts} digests of states, found {len(digests)}")
    out, at = [], 0
    for layer in layers:
        ends = at + np.cumsum(layer.parts)
        out.append(tuple(digests[end - heads : end] for end, heads in zip(ends, layer.parts, strict=True)))
        at = int(ends[-1])
    return tuple(out)


def _behind(first: int, group: NotedGroup) -> NotedGroup:
    """Return a group whose cells begin with one of the request, with cells in front that do not count."""
    if not first:
        return group
    cells, tokens = ((0, 0), (0, 0), (first, 0), (0, 0)), (first * CELL, 0)
    marks = group.marks and (np.pad(group.marks[0], tokens), np.pad(group.marks[1], tokens))
    target, drafter = (None if o is None else np.pad(o, (tokens, (0, 0))) for o in group.outlines)
    return group._replace(
        counted=np.pad(group.counted, tokens),
        digests=np.pad(group.digests, cells),
        sketches=np.pad(group.sketches, cells),
        marks=marks,
        outlines=(target, drafter),
    )


def _whole(parts: tuple[Noted, ...]) -> Noted:
    """Return what the ranks of an engine noted, each of its own heads, as one."""
    if len(parts) == 1:
        return parts[0]
    groups = [g for of_ranks in zip(*(part.groups for part in parts), strict=True) for g in _of_all(of_ranks)]
    states = tuple(_state_of_all(s) for s in zip(*(part.states for part in parts), strict=False))
    # Each rank has the whole hidden state.
    return Noted(tuple(groups), states, parts[0].drafts)


def _of_all(ranks: Sequence[NotedGroup]) -> Iterator[NotedGroup]:
    """Yield what the ranks of an engine noted of a group, by layers whose heads are spread alike over the ranks."""
    spread: dict[tuple[int, ...], list[int]] = defaultdict(list)
    heads = ranks[0].digests.shape[-1]
    for layer in range(len(ranks[0].layers)):
        spread[tuple(g.firsts[layer] if g.firsts else n * heads for n, g in enumerate(ranks))].append(layer)
    kept = _kept_by_all([g.kept for g in ranks])
    for firsts, layers in spread.items():
        # Ranks by their first head: several that have the same noted copies.
        copies = [[n for n, first in enumerate(firsts) if first == one] for one in sorted(set(firsts))]
        yield ranks[0]._replace(
            layers=tuple(ranks[0].layers[n] for n in layers),
            digests=np.concatenate([_agreed([ranks[n].digests[layers] for n in same]) for same in copies], axis=-1),
            sketches=np.sum([np.mean([ranks[n].sketches[layers] for n in same], axis=0) for same in copies], axis=0),
            marks=None,
            outlines=(None, None),
            kept=kept and kept._replace(digests=_kept_digests(ranks, layers, copies)),
            firsts=(),
        )


def _agreed(copies: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return the digests of heads that several ranks have; where these are not alike, others than any of them."""
    alike = np.all([copies[0] == other for other in copies], axis=0)
    return np.where(alike, copies[0], np.sum(copies, axis=0, dtype=np.uint64))


def _kept_digests(
    ranks: Sequence[NotedGroup], layers: Sequence[int], copies: Sequence[Sequence[int]]
) -> NDArray[np.uint64]:
    kept = [g.kept.digests for g in ranks if g.kept is not None]
    return np.concatenate([_agreed([kept[n][layers] for n in same]) for same in copies], axis=-1)


def _state_of_all(parts: Sequence[NotedState]) -> NotedState:
    """Return what the ranks of an engine noted of a state, each of its own heads, as one."""
    layers = tuple(
        layer._replace(parts=tuple(sum(heads) for heads in zip(*(p.layers[i].parts for p in parts), strict=True)))
        for i, layer in enumerate(parts[0].layers)
    )
    kept = [p.kept for p in parts if p.kept is not None]
    return parts[0]._replace(
        layers=layers,
        digests=_beside([p.digests for p in parts]),
        sketches=np.sum([p.sketches for p in parts], axis=0),
        kept=_beside(kept) if len(kept) == len(parts) else None,
        foreign=any(p.foreign for p in parts),
    )


def _beside(parts: Sequence[tuple[tuple[NDArray[np.uint64], ...], ...]]) -> tuple[tuple[NDArray[np.uint64], ...], ...]:
    return tuple(
        tuple(np.concatenate(tensors) for tensors in zip(*of_layer, strict=True))
        for of_layer in zip(*parts, strict=True)
    )


def _kept_by_all(parts: Sequence[KeptBlocks | None]) -> KeptBlocks | None:
    """Return which blocks the ranks of an engine remembered, with the first one's digests; None where they remembered
    other blocks."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.blocks for part in known}) != 1:
        return None
    foreign = sorted({block for part in known for block in part.foreign})
    return known[0]._replace(foreign=tuple(foreign))


def joined(prompt: Noted, answer: Noted) -> Noted:
    """Return one note of a prompt and of the cells behind those that it fills."""
    behind = {group.layers: group for group in answer.groups}
    return prompt._replace(
        groups=tuple(_joined(g, behind[g.layers]) if g.layers in behind else g for g in prompt.groups)
    )


def _joined(front: NotedGroup, behind: NotedGroup) -> NotedGroup:
    # A cell that the answer has gone on with is the answer's; windows may have left some of those.
    first = int(np.flatnonzero(behind.counted)[0]) // CELL if behind.counted.any() else len(behind.counted) // CELL
    kept = min(first, len(front.counted) // CELL)

    def put(a: NDArray[Any], b: NDArray[Any], unit: int, axis: int = 0) -> NDArray[Any]:
        out = b.copy()
        at = (slice(None),) * axis + (slice(kept * unit),)
        out[at] = a[at]
        return out

    marks = None
    if front.marks is not None and behind.marks is not None:
        target, drafter = (put(a, b, CELL) for a, b in zip(front.marks, behind.marks, strict=True))
        marks = (target, drafter)
    lines = [
        None if a is None or b is None else put(a, b, CELL)
        for a, b in zip(front.outlines, behind.outlines, strict=True)
    ]
    return front._replace(
        counted=put(front.counted, behind.counted, CELL),
        digests=put(front.digests, behind.digests, 1, axis=2),
        sketches=put(front.sketches, behind.sketches, 1, axis=2),
        marks=marks,
        outlines=(lines[0], lines[1]),
    )
