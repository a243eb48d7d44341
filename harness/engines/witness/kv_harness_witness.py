"""A vLLM plugin that notes what KV caches hold: digests and sketches by request, layer, head and cell of 16 tokens.

``KV_HARNESS_WITNESS`` names a folder; without it the plugin does nothing. Each process that owns KV caches appends
lines of JSON to a file of its own there: one that describes its layers, and one for each moment of a request:

``begin``   before its first step, over the tokens that it did not compute itself: received ones and prefix hits
``end``     when it has ended, over its prompt
``answer``  at the same time, over the cells behind those that its prompt fills, up to its last token with KV
``drafts``  at the same time, and at a preemption: what each of its drafts was sampled from

Recurrent state is noted after each chunk of a prompt, with the number of tokens that it is of, and written with the
moment ``end``; and ``begin`` has the state that a request goes on from.

Beside what a prefix hit finds stands what its blocks held when the request that filled them had ended.

What is noted does not depend on the layout of the cache, the size of a block or the number of ranks: keys and values of
a token are read through the places to which the attention backend itself writes them, found out once per layer.

* A **digest** is 64 bits for each layer, keys or values, cell and head: the sum of all elements, as integers, times
  fixed odd factors, modulo 2**64. A cell of zeros has the digest zero. Equal digests mean equal bits.
* A **sketch** is ``SKETCH`` projections on fixed random signs, in half precision, for each layer, keys or values, and
  cell: the squared distance of two sketches, over ``SKETCH``, estimates the squared distance of what they are of.
* A **state's digests** are the same for each layer, tensor and head: of a convolution one over all of it.
* Of a **draft**, the sketch is of the drafter's hidden state that it was sampled from, in single precision: what a
  drafter is given in a step, and what it reads, are all in it.
* A **token's mark** is 32 bits over all layers of the target, or all of the drafter: it says where a cell differs. Its
  **outline** is ``OUTLINE`` projections of the same, in half precision: it says whether by more than rounding.

The folder of this module is on the engines' Python path, and the ``dist-info`` beside it declares ``register`` to vLLM.
It uses the standard library and torch alone, and takes no input but requests' states in its own process.
"""

from __future__ import annotations

import base64
import collections
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

FOLDER_VARIABLE = "KV_HARNESS_WITNESS"
NAME_VARIABLE = "KV_HARNESS_WITNESS_NAME"
"""What the names of an engine's files begin with."""
FORMAT = 1
CELL = 16
"""Tokens in a cell. Sizes of blocks are multiples of it."""
SKETCH = 8
"""Projections in a sketch."""
OUTLINE = 2
"""Those of one token."""
_NULL_BLOCK = 0
_OTHERS = bytes([1, 0, *range(2, 256)])
"""Translates whether tokens count into whether they do not."""
_AT_ONCE = 4096
"""Most tokens that are read at a time, a multiple of a cell: so many of a layer are copied on the device."""
_ELEMENTS = {"cpu": 2**18}
"""Elements that are copied and read together, by device: on CPUs, what their caches keep."""
_MOST_ELEMENTS = 2**23
"""Those on other devices."""
_STEPS = 32
"""Steps whose drafts are sketched together."""
_HIDDEN = 2**20
"""Numbers of hidden states that wait for that."""
_MOST_KEPT = 8192
"""Blocks whose content is remembered until they are hit or filled anew, those of the latest requests."""
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"


def register() -> None:
    """Watch the KV caches of this process if the environment asks for it. vLLM calls this in each of its processes."""
    global _writer
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or _writer is not None:
        return
    _writer = Writer(Path(folder))
    waiting: dict[str, Callable[[ModuleType], None]] = {_V1: _watch_v1, _V2: _watch_v2, _NIXL: _watch_transfers}
    # A forked engine has imported some of them before.
    for name in [name for name in waiting if name in sys.modules]:
        _safely(waiting.pop(name))(sys.modules[name])
    sys.meta_path.insert(0, _WatchingFinder(waiting))


class Writer:
    """Appends rows to this process's file, in a thread of its own, so that no step of the engine waits for a device."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._rows: queue.SimpleQueue[Callable[[], dict[str, Any]]] = queue.SimpleQueue()

    def put(self, row: Callable[[], dict[str, Any]]) -> None:
        """Queue a row, which the thread calls to have it."""
        # A forked process has neither the thread nor the file of its parent.
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._rows = queue.SimpleQueue()
            threading.Thread(target=self._write, name="kv-harness-witness", daemon=True).start()
        self._rows.put(row)

    def _write(self) -> None:
        path = self._folder / f"{os.environ.get(NAME_VARIABLE, 'engine')}.{self._pid}.jsonl"
        # Unbuffered, each row in one write: an engine that is killed leaves whole lines, or one torn at the end.
        with path.open("ab", buffering=0) as stream:
            while True:
                make = self._rows.get()
                try:
                    row = make()
                except Exception as error:
                    row = {"error": f"{type(error).__name__}: {error}"}
                stream.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


_writer: Writer | None = None


class Layer(NamedTuple):
    """A layer of attention, and where its cache keeps what."""

    name: str
    drafter: bool
    heads: int
    first_head: int
    """Number of its first head among those of all ranks."""
    places: Any
    """Places in a block, int64 [2 (keys, values) or 1 (latent), tokens of a kernel block, heads, elements]."""
    cache: Any
    """The bits of its elements, indexed by kernel block."""
    numbers: Any
    """Type in which its elements are numbers, where they are kept as bytes."""


class Group(NamedTuple):
    """Layers of a KV-cache group, whose requests have one list of blocks, that have keys and values alike."""

    number: int
    """Number by which rows name it."""
    of: int
    """Number of the KV-cache group."""
    block_size: int
    layers: tuple[Layer, ...]

    @property
    def owners(self) -> list[tuple[bool, slice]]:
        """Whether it is the drafter's, and which tensors these are, of layers that follow each other."""
        kinds, done, out = len(self.layers[0].places), 0, []
        for drafter, layers in itertools.groupby(self.layers, lambda layer: layer.drafter):
            tensors = slice(done, done + kinds * sum(1 for _ in layers))
            out.append((drafter, tensors))
            done = tensors.stop
        return out

    def numbers(self, drafter: bool) -> int:
        """Return how many numbers its layers of the target or of the drafter keep of a token."""
        kinds, _, heads, size = self.layers[0].places.shape
        return sum(kinds * heads * size for layer in self.layers if layer.drafter == drafter)


class LayerWithState(NamedTuple):
    """A layer with recurrent state, of which a block holds one."""

    name: str
    drafter: bool
    tensors: tuple[Any, ...]
    """By kind of state: [blocks, heads, ...], or of a convolution [blocks, 1, ...]."""


class StateGroup(NamedTuple):
    """A KV-cache group whose requests have a state for each block that they keep."""

    number: int
    block_size: int
    in_columns: bool
    """Whether a request's state moves from block to block, and not all of it is in the first one."""
    layers: tuple[LayerWithState, ...]


class Block:
    """A block of the pool since a request took it."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        """Name (``_names``) of the tokens up to its end; None while they are not known."""
        self.digests: dict[int, Any] = {}
        """By number of the group: int64 [layers, 2 or 1, cells, heads], once a request that held it has ended or was
        preempted; of a state that is of whole blocks, int64 [parts], once it was computed."""


class DraftedStep(NamedTuple):
    """What the drafts of a step were sampled from, of all its requests."""

    positions: Any
    """int64 [requests]: that of the last token that the target has verified. Drafts follow the token behind it."""
    hidden: Sequence[Any]
    """[requests * drafts, ...] by call of the sampler: one for each draft of all requests, or one for all drafts,
    request by request."""
    tokens: Any
    """[requests, drafts]: the drafts."""


class DraftedSteps:
    """Steps that follow each other, which are sketched together: a step waits for each operation, however little it has
    to do."""

    def __init__(self) -> None:
        self._steps: list[DraftedStep] = []
        self._waiting = 0
        """Numbers of hidden states that are kept."""
        self._shapes: list[tuple[int, int, int, list[int]]] = []
        """Of each step: positions, requests, drafts of one, and those of it that each call of the sampler made."""
        self._told: tuple[Any, Any, Any] | None = None

    def add(self, step: DraftedStep) -> int:
        """Return the number of a step, with which ``of`` finds it."""
        self._steps.append(step)
        self._waiting += step.hidden[0].numel() * len(step.hidden)
        return len(self._steps) - 1

    @property
    def full(self) -> bool:
        return len(self._steps) >= _STEPS or self._waiting >= _HIDDEN

    def close(self) -> None:
        """Sketch the steps, after which their hidden states are not needed. Raises ValueError for other hidden states
        than those of their drafts."""
        import torch

        for step in self._steps:
            (requests, drafts), rows = step.tokens.shape, [hidden.shape[0] for hidden in step.hidden]
            if any(n % requests for n in rows):
                raise ValueError(f"expected hidden states of the drafts of {requests} requests, found {rows}")
            self._shapes.append((step.positions.shape[0], requests, drafts, [n // requests for n in rows]))
        hidden = torch.cat([rows.flatten(1) for step in self._steps for rows in step.hidden]).to(torch.float32)
        self._told = (
            torch.cat([step.positions for step in self._steps]),
            torch.cat([step.tokens.reshape(-1) for step in self._steps]),
            hidden @ _signs(hidden.shape[1], 17, hidden.device),
        )
        self._steps = []

    def of(self, found: Sequence[tuple[int, int]], since: int) -> tuple[list[int], list[list[int]], Any]:
        """Return positions, drafts and sketches, float32 [all drafts, SKETCH], of a request that has a row in each of
        some steps, of those that verified a token at position ``since`` or behind it. Waits for the device."""
        import torch

        assert self._told is not None
        positions, tokens, sketches = self._told[0].tolist(), self._told[1].tolist(), self._told[2]
        starts = [(0, 0, 0)]
        for count, requests, drafts, calls in self._shapes:
            position, token, sketch = starts[-1]
            starts.append((position + count, token + requests * drafts, sketch + requests * sum(calls)))
        of_steps: list[int] = []
        of_drafts: list[list[int]] = []
        of_sketches: list[int] = []
        for step, row in found:
            (_, requests, drafts, calls), (position, token, sketch) = self._shapes[step], starts[step]
            if positions[position + row] < since:
                continue
            rows: list[int] = []
            for each in calls:
                rows += range(sketch + row * each, sketch + (row + 1) * each)
                sketch += requests * each
            told = min(drafts, len(rows))
            of_steps.append(positions[position + row])
            of_drafts.append(tokens[token + row * drafts : token + row * drafts + told])
            of_sketches += rows[:told]
        return of_steps, of_drafts, sketches[torch.tensor(of_sketches, dtype=torch.int64, device=sketches.device)]


class WatchedRequest:
    """A request under way: its tokens and its blocks."""

    def __init__(self, tokens: Sequence[int], prompt: int, groups: int) -> None:
        self.tokens = tokens
        """Those of its prompt, and of its answer if it was preempted before; the scheduler of V2 may add to them."""
        self.given = len(tokens)
        """How many they were when it began."""
        self.prompt = prompt
        """Tokens of its prompt."""
        self.name = _name(tokens[:prompt])
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.held: list[list[Block]] = [[] for _ in range(groups)]
        """What ``blocks`` were when it took them."""
        self.states: dict[tuple[int, int], tuple[Any, Any]] = {}
        """By tokens and group: the digests and sketches of the state after so many of them."""
        self.drafts: list[tuple[DraftedSteps, int, int]] = []
        """The steps that drafted for it, with the number of each and its row in it."""
        self._names: dict[int, list[str]] = {}

    def names(self, size: int) -> list[str]:
        """Return the names (``_names``) of its blocks of a size, which are made once: it takes blocks in many steps."""
        if size not in self._names:
            self._names[size] = _names(self.tokens, size)
        return self._names[size]


class Witness:
    """Notes what the caches of one model runner hold."""

    def __init__(self, runner: Any, writer: Writer) -> None:
        """Describe the layers of ``runner``, whose caches exist."""
        self._writer = writer
        self.groups: list[Group] = []
        self.requests: dict[str, WatchedRequest] = {}
        self._pool: dict[int, Block] = {}
        """What each block is now. All groups share one pool."""
        self._kept: collections.OrderedDict[Block, None] = collections.OrderedDict()
        """Blocks with digests, the latest last."""
        self._drafted = DraftedSteps()
        self._hits_alone = _fills_by_nixl_alone(runner)
        unseen: dict[str, str] = {}
        drafts = _draft_layers(runner)
        groups = runner.kv_cache_config.kv_cache_groups
        self.sizes: list[int] = [group.kv_cache_spec.block_size for group in groups]
        """Tokens in a block of each group, also of those whose caches cannot be read."""
        self.states: list[StateGroup] = []
        divided = _divided(runner)
        for index, group in enumerate(groups):
            if divided is not None:
                unseen |= dict.fromkeys(group.layer_names, divided)
                continue
            mode = getattr(group.kv_cache_spec, "mamba_cache_mode", None)
            if mode is not None:
                states = tuple(_state_layer(runner, n, n in drafts, group.kv_cache_spec) for n in group.layer_names)
                self.states.append(StateGroup(index, group.kv_cache_spec.block_size, mode != "none", states))
                continue
            layers: dict[tuple[int, ...], list[Layer]] = collections.defaultdict(list)
            for name in group.layer_names:
                try:
                    layer = _layer(runner, name, name in drafts, group.kv_cache_spec.block_size)
                except Unseen as error:
                    unseen[name] = str(error)
                else:
                    layers[tuple(layer.places.shape[:3])].append(layer)
            for alike in layers.values():
                # A drafter may have other heads than its target.
                number = index if index not in [g.number for g in self.groups] else len(groups) + len(self.groups)
                self.groups.append(Group(number, index, group.kv_cache_spec.block_size, _sharing(alike)))
        described = {
            "witness": FORMAT,
            "rank": _rank()[0],
            "ranks": _rank()[1],
            "groups": [
                {
                    "group": g.number,
                    "block_size": g.block_size,
                    "layers": [[layer.name, layer.drafter, layer.heads] for layer in g.layers],
                    "firsts": [layer.first_head for layer in g.layers],
                    **({"kinds": ["latent"]} if len(g.layers[0].places) == 1 else {}),
                }
                for g in self.groups
            ],
            "states": [
                {"group": g.number, "layers": [[x.name, x.drafter, [t.shape[1] for t in x.tensors]] for x in g.layers]}
                for g in self.states
            ],
            "unseen": unseen,
            "drafts": _watch_drafter(runner, self),
        }
        writer.put(lambda: described)

    def take(self, id_: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        """Learn the blocks that a request has taken besides those that it had. Blocks of its first ``computed`` tokens
        stay what they are: another request has filled them."""
        request = self.requests[id_]
        for size, of_group, mine, held in zip(self.sizes, blocks, request.blocks, request.held, strict=False):
            names = request.names(size)
            for block in of_group:
                at = len(mine)
                if at >= computed // size or block not in self._pool:
                    self._pool[block] = Block(names[at] if at < len(names) else None)
                mine.append(block)
                held.append(self._pool[block])

    def unwritten(self, computed: dict[str, int], but: str) -> list[set[int]]:
        """Return, by group, the blocks that others than a request fill in this step, in whole or in part, in which the
        prefix cache finds them already. ``computed`` has the tokens of each scheduled request that have KV."""
        out: list[set[int]] = [set() for _ in self.sizes]
        for id_, count in computed.items():
            if id_ != but and id_ in self.requests:
                for group in self.groups:
                    out[group.of] |= set(self.requests[id_].blocks[group.of][count // group.block_size :])
        return out

    def forget(self, blocks: Sequence[Sequence[int]]) -> None:
        """Learn that another engine has filled blocks."""
        for block in (block for group in blocks for block in group):
            self._pool.pop(block, None)

    def state(self, id_: str, tokens: int, column: int) -> None:
        """Note the state of a request after its first ``tokens``, which is in the block of a column."""
        request = self.requests[id_]
        for group in self.states:
            if (tokens, group.number) not in request.states:
                at = column if group.in_columns else 0
                request.states[tokens, group.number] = noted = _state(group, request.blocks[group.number][at])
                # The prefix cache has the states that are of whole blocks.
                if tokens == (at + 1) * group.block_size and at < len(request.held[group.number]):
                    self._remember(request.held[group.number][at], group.number, noted[0])

    def _remember(self, block: Block, group: int, digests: Any) -> None:
        block.digests[group] = digests
        self._kept[block] = None
        self._kept.move_to_end(block)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)[0].digests.clear()

    def _found_states(
        self, request: WatchedRequest, tokens: int, received: Sequence[Sequence[int]] | None
    ) -> list[Any]:
        """Return the states that a request goes on from after its first ``tokens``: its group, they, whether another
        engine sent it, what the prefix cache had there, and whether that was of other tokens."""
        out = []
        for group in self.states:
            blocks, held = request.blocks[group.number], request.held[group.number]
            at = (tokens - 1) // group.block_size if group.in_columns else 0
            if at >= len(blocks) or blocks[at] == _NULL_BLOCK:
                continue
            kept, foreign, sent = None, False, blocks[at] in _of_group(received, group.number)
            if self._hits_alone and not sent and tokens == (at + 1) * group.block_size:
                names = request.names(group.block_size)
                kept = held[at].digests.get(group.number)
                foreign = held[at].name is not None and at < len(names) and held[at].name != names[at]
            out.append((group.number, tokens, *_state(group, blocks[at]), sent, kept, foreign))
        return out

    def begin(
        self,
        id_: str,
        computed: int,
        received: Sequence[Sequence[int]] | None = None,
        unwritten: Sequence[set[int]] = (),
        state_of: int | None = None,
    ) -> None:
        """Note what a request finds in its cache in the first ``computed`` tokens. ``received`` are those of its
        blocks that came from another engine, ``unwritten`` those that others compute in this step, by group. Its state
        is that after ``state_of`` tokens, if they are not as many."""
        request = self.requests[id_]
        row: dict[str, Any] = {"request": id_, "prompt": request.name, "moment": "begin"}
        filled = [_of_group(received, g.of) for g in self.groups]
        if received is not None:
            row["received"] = [
                [i for i, block in enumerate(request.blocks[g.of]) if block in mine]
                for g, mine in zip(self.groups, filled, strict=True)
            ]
        noted = []
        for group, mine in zip(self.groups, filled, strict=True):
            others = unwritten[group.of] if unwritten else set()
            blocks = [_NULL_BLOCK if block in others else block for block in request.blocks[group.of]]
            (found,) = _noted(group, blocks, (0, computed))
            if found is None:
                continue
            hits = blocks[: computed // group.block_size] if self._hits_alone else []
            kept = [i for i, block in enumerate(hits) if block != _NULL_BLOCK and block not in mine]
            noted.append((found, _kept(request, group, kept)))
        states = self._found_states(request, state_of or computed, received)
        self._writer.put(functools.partial(_row, row, noted, states))

    def end(self, id_: str, tokens: Sequence[int], noted: bool = True) -> None:
        """Learn that a request is over whose ``tokens`` have KV: remember its full blocks, and note what it has left
        unless it is to be resumed (not ``noted``)."""
        request = self.requests.pop(id_)
        behind = request.prompt // CELL
        prompts: list[tuple[GroupNote, None]] = []
        answers: list[tuple[GroupNote, None]] = []
        for group in self.groups:
            blocks = self._still_held(request, group.of)
            ranges = (0, request.prompt), (behind * CELL, len(tokens) if len(tokens) > request.prompt else 0)
            prompt, answer = _noted(group, blocks, *ranges)
            digests = [prompt.digests[:, :, :behind]] if prompt else []
            self._keep(group, blocks, tokens, [*digests, answer.digests] if answer else digests)
            prompts += [(prompt, None)] if prompt else []
            answers += [(answer, None)] if answer else []
        row = {"request": id_, "prompt": request.name}
        if request.drafts:
            if request.drafts[-1][0] is self._drafted:
                self._close_drafted()
            noted_drafts = {**row, "moment": "drafts", "groups": []}
            # What follows a chunk is computed, not drafted: engines throw away the drafts that they make there.
            since = request.given - 1
            self._writer.put(functools.partial(_drafts_row, noted_drafts, request.drafts, since))
        if noted:
            states = [(group, count, *noted, False, None, False) for (count, group), noted in request.states.items()]
            self._writer.put(functools.partial(_row, {**row, "moment": "end"}, prompts, states))
            if answers:
                self._writer.put(functools.partial(_row, {**row, "moment": "answer", "first": behind}, answers))

    def drafted(self, ids: Sequence[str], step: DraftedStep) -> None:
        """Note the drafts of a step, by the names of its requests."""
        steps, number = self._drafted, self._drafted.add(step)
        for row, id_ in enumerate(ids[: min(step.positions.shape[0], step.tokens.shape[0])]):
            if id_ in self.requests:
                self.requests[id_].drafts.append((steps, number, row))
        if steps.full:
            self._close_drafted()

    def _close_drafted(self) -> None:
        steps, self._drafted = self._drafted, DraftedSteps()
        steps.close()

    def _still_held(self, request: WatchedRequest, group: int) -> list[int]:
        """Return the blocks of a request with the null block for those that a window has left and another took."""
        blocks = zip(request.blocks[group], request.held[group], strict=True)
        return [block if self._pool.get(block) is held else _NULL_BLOCK for block, held in blocks]

    def _keep(self, group: Group, blocks: list[int], tokens: Sequence[int], digests: list[Any]) -> None:
        """Remember what the full blocks of a request hold, whose digests come in several parts."""
        import torch

        if not digests:
            return
        by_block = torch.cat(digests, 2).split(group.block_size // CELL, 2)
        for at, name in enumerate(_names(tokens, group.block_size)):
            if at < len(blocks) and blocks[at] != _NULL_BLOCK:
                block = self._pool[blocks[at]]
                block.name = name
                self._remember(block, group.number, by_block[at])


class GroupNote(NamedTuple):
    """What the layers of a group hold of some tokens."""

    group: int
    counted: bytearray
    """Whether each token counts, of whole cells."""
    digests: Any
    """int64 [layers, 2 or 1, cells, heads]"""
    sketches: Any
    """float16 [layers, 2 or 1, cells, SKETCH]"""
    marks: list[Any]
    """int64 [tokens]: those of the target, and of the drafter."""
    outlines: list[Any]
    """float16 [tokens, OUTLINE]: likewise."""


def _noted(group: Group, blocks: Sequence[int], *ranges: tuple[int, int]) -> list[GroupNote | None]:
    """Return what a request's blocks hold of ranges of tokens, each from a multiple of a cell up to an end. Blocks are
    read once for all of them."""
    ends = [min(len(blocks) * group.block_size, end) for _, end in ranges]
    wanted = [(start, _counted(group, blocks, start, end)) for (start, _), end in zip(ranges, ends, strict=True)]
    parts: list[list[Any]] = [[] for _ in ranges]
    spans = [(start, start + len(counted)) for start, counted in wanted if counted]
    for first, sums, rows in _read(group, blocks, spans) if spans else ():
        for (start, counted), mine in zip(wanted, parts, strict=True):
            at, end = max(start, first), min(start + len(counted), first + sums.shape[1])
            if at < end:
                here = slice(at - first, end - first)
                mine.append(_cells(group, sums[:, here], rows[:, here], counted[at - start : end - start]))
    return [_joined(group, c, mine) if mine else None for (_, c), mine in zip(wanted, parts, strict=True)]


def _counted(group: Group, blocks: Sequence[int], start: int, end: int) -> bytearray:
    """Return whether each token from ``start`` counts, up to the end of the cell that has the last one before
    ``end``."""
    counted = bytearray(-(-max(0, end - start) // CELL) * CELL)
    counted[: max(0, end - start)] = b"\1" * max(0, end - start)
    # A block that a window has left is the null block, whose content belongs to nobody.
    for at in range(start // group.block_size, -(-end // group.block_size)):
        if blocks[at] == _NULL_BLOCK:
            begin = max(0, at * group.block_size - start)
            behind = min(len(counted), (at + 1) * group.block_size - start)
            counted[begin:behind] = bytes(behind - begin)
    return counted


def _read(group: Group, blocks: Sequence[int], spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Any, Any]]:
    """Yield some tokens of spans, with what is between these: the number of the first one, the sums of all
    tensors int64 [tensors, tokens, heads], and their projections float32 [tensors, tokens, SKETCH]."""
    import torch

    # As the cache has them: blocks of the group may be several of the cache.
    size = group.layers[0].places.shape[1]
    each = group.block_size // size
    first, last = min(start for start, _ in spans) // size, -(-max(end for _, end in spans) // size)
    kept = [blocks[at // each] * each + at % each for at in range(first, min(last, len(blocks) * each))]
    # Parts begin with a cell.
    whole = math.lcm(size, CELL)
    most = min(_AT_ONCE, _room_for(group.layers[0]) // group.layers[0].places[:, 0].numel())
    step = max(1, most // whole) * whole // size
    for at in range(0, len(kept), step):
        some = torch.tensor(kept[at : at + step])
        parts = [_sums_and_projections(layers, some) for layers in _alike(group.layers, some.numel() * size)]
        sums, rows = (_cat(of_layers, 0) for of_layers in zip(*parts, strict=True))
        yield (first + at) * size, sums, rows


def _sums_and_projections(layers: Sequence[Layer], blocks: Any) -> tuple[Any, Any]:
    """Return what ``_read`` yields, of layers that are alike and some of their blocks."""
    import torch

    first, count = layers[0], len(layers) * len(blocks)
    kinds, size, heads, elements = first.places.shape
    device, of_block = first.cache.device, first.places.numel()
    blocks = blocks.to(device)
    found = _room("found", (len(layers), len(blocks), *first.cache.shape[1:]), first.cache.dtype, device)
    for layer, into in zip(layers, found, strict=True):
        torch.index_select(layer.cache, 0, blocks, out=into)
    raw = _room("raw", (count, of_block), first.cache.dtype, device)
    # Of integers, index_select takes five times as long on CPUs.
    torch.gather(found.view(count, of_block), 1, first.places.view(1, -1).expand(count, -1), out=raw)
    products = _room("products", (count * kinds * size, heads, elements), torch.int64, device)
    factors = _of_heads(_factors, first.first_head, heads, elements, 3, device).view(heads, elements)
    products.copy_(raw.view(count * kinds * size, heads, elements)).mul_(factors)
    numbers = raw.view(first.numbers).view(count * kinds * size, heads * elements)
    if numbers.dtype != torch.float32:
        numbers = _room("numbers", tuple(numbers.shape), torch.float32, device).copy_(numbers)
    rows = numbers @ _of_heads(_signs, first.first_head, heads, elements, 5, device)

    def by_tensor(of_tokens: Any) -> Any:
        by_block = of_tokens.view(len(layers), len(blocks), kinds, size, -1)
        return by_block.transpose(1, 2).reshape(len(layers) * kinds, len(blocks) * size, -1)

    return by_tensor(products.sum(-1)), by_tensor(rows)


def _cells(group: Group, sums: Any, rows: Any, counted: bytearray) -> tuple[Any, ...]:
    """Return the digests, sketches, marks and outlines of a ``GroupNote``, of tokens of whole cells."""
    import torch

    device, (count, tokens, _) = sums.device, sums.shape
    if not all(counted):
        others = torch.frombuffer(counted.translate(_OTHERS), dtype=torch.bool).to(device)[:, None]
        sums, rows = sums.masked_fill(others, 0), rows.masked_fill(others, 0)
    shape = (len(group.layers), -1, tokens // CELL, CELL)
    digests = (sums.view(*shape, sums.shape[2]) * _factors(CELL, 7, device)[:, None]).sum(3)
    sketches = (rows.view(*shape, SKETCH) * _signs(CELL, 9, device)).sum(3).to(torch.float16)
    shares = sums.sum(-1) * _factors(count, 11, device)[:, None]
    # Layers that are alike do not add up.
    lines = rows[..., :OUTLINE] * _signs(count, 19, device)[:, None, :OUTLINE]
    marks: dict[bool, Any] = {}
    outlines: dict[bool, Any] = {}
    for drafter, tensors in group.owners:
        mark, outline = shares[tensors].sum(0), lines[tensors].sum(0)
        marks[drafter] = marks[drafter] + mark if drafter in marks else mark
        outlines[drafter] = outlines[drafter] + outline if drafter in outlines else outline
    # As large as one number of the KV, for which half precision has room.
    scaled = {drafter: (o / group.numbers(drafter) ** 0.5).to(torch.float16) for drafter, o in outlines.items()}
    for owner in {False, True} - set(marks):
        marks[owner] = torch.zeros(tokens, dtype=torch.int64)
        scaled[owner] = torch.zeros((tokens, OUTLINE), dtype=torch.float16)
    return digests, sketches, marks[False], marks[True], scaled[False], scaled[True]


def _joined(group: Group, counted: bytearray, parts: Sequence[tuple[Any, ...]]) -> GroupNote:
    """Return the note of cells that were read in parts."""
    digests, sketches, *of_tokens = zip(*parts, strict=True)
    marks, outlines = [_cat(some, 0) for some in of_tokens[:2]], [_cat(some, 0) for some in of_tokens[2:]]
    return GroupNote(group.number, counted, _cat(digests, 2), _cat(sketches, 2), marks, outlines)


def _cat(tensors: Sequence[Any], dim: int) -> Any:
    import torch

    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _alike(layers: Sequence[Layer], tokens: int) -> Iterator[list[Layer]]:
    """Yield the layers of a group, those in a row that are alike together: a step waits for each operation, however
    little it has to do. Not more of them than there is room for, and at least one."""
    room = max(1, _room_for(layers[0]) // max(1, tokens * layers[0].places[:, 0].numel()))
    for _, group in itertools.groupby(layers, _kind):
        some = list(group)
        yield from (some[at : at + room] for at in range(0, len(some), room))


def _room_for(layer: Layer) -> int:
    """Return how many elements of layers like this one are read together."""
    return _ELEMENTS.get(layer.cache.device.type, _MOST_ELEMENTS)


def _kind(layer: Layer) -> tuple[Any, ...]:
    kept = layer.cache.dtype, layer.cache.device, layer.cache.shape[1:]
    return layer.first_head, layer.numbers, id(layer.places), *kept


def _sharing(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return layers, those with equal places with the same."""
    import torch

    known: list[Any] = []
    out = []
    for layer in layers:
        same = (p for p in known if p.device == layer.places.device and torch.equal(p, layer.places))
        if (places := next(same, None)) is None:
            known.append(places := layer.places)
        out.append(layer._replace(places=places))
    return tuple(out)


_rooms: dict[tuple[str, Any], Any] = {}


def _room(what: str, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Return a tensor without content. On CPUs, what was used before for the same: fresh pages of memory take longer
    than all that is done with them."""
    import torch

    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    room = _rooms.get((what, dtype))
    if room is None or len(room) < count:
        _rooms[what, dtype] = room = torch.empty(count, dtype=dtype)
    return room[:count].view(shape)


def _of_group(received: Sequence[Sequence[int]] | None, group: int) -> set[int]:
    """Return the blocks of a group that another engine has filled."""
    return set(received[group]) if received and group < len(received) else set()


def _state(group: StateGroup, block: int) -> tuple[Any, Any]:
    """Return digests, int64 [parts], and sketches, float32 [tensors, SKETCH], of the states in a block."""
    import torch

    digests, sketches = [], []
    for layer in group.layers:
        for tensor in layer.tensors:
            raw = tensor[block].reshape(tensor.shape[1], -1).contiguous()
            digests.append((_integers(raw) * _factors(raw.numel(), 13, raw.device).reshape(raw.shape)).sum(-1))
            sketches.append(raw.reshape(-1).to(torch.float32) @ _signs(raw.numel(), 15, raw.device))
    return torch.cat(digests), torch.stack(sketches)


def _fills_by_nixl_alone(runner: Any) -> bool:
    """Return whether blocks are filled by the engine and by NIXL alone, so that all others are prefix hits."""
    config = getattr(getattr(runner, "vllm_config", None), "kv_transfer_config", None)
    if config is None:
        return True
    extra = getattr(config, "kv_connector_extra_config", None) or {}
    several = config.kv_connector == "MultiConnector"
    names = [child["kv_connector"] for child in extra.get("connectors", ())] if several else [config.kv_connector]
    return all(str(name).startswith("Nixl") for name in names)


def _kept(request: WatchedRequest, group: Group, hits: Sequence[int]) -> dict[str, Any]:
    """Return what those of a request's blocks that the prefix cache found held when they were filled, and which of them
    were filled for other tokens."""
    names, held = request.names(group.block_size), request.held[group.of]
    known = [at for at in hits if group.number in held[at].digests]
    return {
        "blocks": known,
        "digests": [held[at].digests[group.number] for at in known],
        "foreign": [at for at in hits if held[at].name is not None and held[at].name != names[at]],
    }


def _row(
    row: dict[str, Any], noted: Sequence[tuple[GroupNote, dict[str, Any] | None]], states: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return a row with its tensors as text, of prefix hits with what their blocks held. Waits for the device."""
    import torch

    groups = []
    for found, kept in noted:
        group: dict[str, Any] = {
            "group": found.group,
            "counted": base64.b64encode(found.counted).decode(),
            "digests": _text(found.digests),
            "sketches": _text(found.sketches),
            # The upper half of each.
            "marks": [_text(m.view(torch.int32)[1::2]) for m in found.marks],
            # Of layers that a group does not have there is none.
            "outlines": [_text(o) if o.any() else "" for o in map(_numbers, found.outlines)],
        }
        if kept is not None:
            of_blocks = kept["digests"]
            group["kept"] = {**kept, "digests": _text(torch.cat(of_blocks, 2)) if of_blocks else ""}
        groups.append(group)
    of_states = [
        {
            "group": index,
            "tokens": tokens,
            "digests": _text(digests),
            "sketches": _text(sketches),
            "received": received,
            "kept": None if kept is None else _text(kept),
            "foreign": foreign,
        }
        for index, tokens, digests, sketches, received, kept, foreign in states
    ]
    return {**row, "groups": groups, **({"states": of_states} if of_states else {})}


def _drafts_row(row: dict[str, Any], drafts: Sequence[tuple[DraftedSteps, int, int]], since: int) -> dict[str, Any]:
    """Return a row with the drafts of a request, step by step, from that which verified its token at position
    ``since``. Waits for the device."""
    positions: list[int] = []
    tokens: list[list[int]] = []
    sketches = []
    for steps, some in itertools.groupby(drafts, lambda draft: draft[0]):
        found = steps.of([(number, at) for _, number, at in some], since)
        positions += found[0]
        tokens += found[1]
        sketches.append(found[2])
    return row | {"drafts": {"positions": positions, "tokens": tokens, "sketches": _text(_cat(sketches, 0))}}


def _text(numbers: Any) -> str:
    """Return the bytes of a tensor or an array, little-endian, in base 64."""
    return base64.b64encode(_numbers(numbers).tobytes()).decode()


def _numbers(tensor: Any) -> Any:
    """Return a tensor as an array, whose operations take a third as long. Waits for the device."""
    return tensor.cpu().numpy() if hasattr(tensor, "cpu") else tensor


class Unseen(Exception):
    """The content of a layer's cache cannot be told."""


def _rank() -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def _draft_layers(runner: Any) -> set[str]:
    for drafter in (getattr(runner, "drafter", None), getattr(runner, "speculator", None)):
        for names in ("_draft_attn_layer_names", "draft_attn_layer_names"):
            if found := getattr(drafter, names, None):
                return set(found)
    return set()


def _watch_drafter(runner: Any, witness: Witness) -> bool:
    """Watch what a runner's drafter samples its drafts from. Return whether there is a drafter that tells."""
    drafter: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    samples = next((name for name in ("_sample_draft_tokens", "sample_draft") if hasattr(drafter, name)), None)
    if samples is None or _drafts_in_a_graph(runner):
        return False
    propose, sample = drafter.propose, getattr(drafter, samples)
    parameters = tuple(inspect.signature(propose).parameters)
    hidden: list[Any] = []

    @functools.wraps(propose)
    def proposed(*args: Any, **kwargs: Any) -> Any:
        hidden.clear()
        drafts = propose(*args, **kwargs)
        _drafted(runner, witness, dict(zip(parameters, args, strict=False)) | kwargs, [*hidden], drafts)
        return drafts

    @functools.wraps(sample)
    def sampled(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        _sampled(hidden, hidden_states)
        return sample(hidden_states, *args, **kwargs)

    # Of this one alone: what an injected fault changes in its class is below them.
    drafter.propose = proposed
    setattr(drafter, samples, sampled)
    return True


def _drafts_in_a_graph(runner: Any) -> bool:
    """Return whether a graph samples drafts, which calls nothing when it is replayed: those of V2 on GPUs do."""
    return (
        hasattr(runner, "speculator")
        and str(getattr(runner, "device", "cpu")).startswith("cuda")
        and not runner.vllm_config.model_config.enforce_eager
    )


def _layer(runner: Any, name: str, drafter: bool, block_size: int) -> Layer:
    """Describe a layer. Raises Unseen when its cache is neither one of keys and values nor of a latent, or its backend
    does not say where it puts them."""
    module = runner.compilation_config.static_forward_context[name]
    cache = module.kv_cache
    if isinstance(cache, (list, tuple)):
        if len(cache) != 1:
            raise Unseen(f"its cache is {len(cache)} tensors")
        cache = cache[0]
    if not hasattr(getattr(module, "impl", None), "do_kv_cache_update"):
        raise Unseen(f"{type(module).__name__} does not tell where it keeps what")
    latent = cache.dim() == 3 and hasattr(module, "kv_lora_rank")
    if not latent and (cache.dim() != 4 or not hasattr(module, "num_kv_heads")):
        raise Unseen(f"{type(module).__name__} keeps neither keys and values by head nor a latent")
    blocks, tokens = getattr(runner.kv_cache_config, "num_blocks", None), cache.shape[1 if latent else 2]
    if blocks is not None and cache.shape[0] * tokens != blocks * block_size:
        had = f"{cache.shape[0] * tokens} tokens, where its group has blocks of {blocks * block_size}"
        raise Unseen(f"its cache has room for {had}")
    shape = (1, tokens, 1, module.kv_lora_rank + module.qk_rope_head_dim) if latent else None
    places = _places(module, cache, shape or (2, tokens, module.num_kv_heads, module.head_size))
    numbers = cache.dtype if cache.dtype.is_floating_point else _as_bytes(getattr(module, "kv_cache_dtype", None))
    # Each rank has the whole latent.
    first = 0 if latent else _first_head(runner, drafter, places.shape[2])
    return Layer(name, drafter, places.shape[2], first, places, _bits(cache), numbers)


def _divided(runner: Any) -> str | None:
    """Return why no process of an engine has all that it keeps of the heads of its rank; None if each has."""
    parallel = getattr(getattr(runner, "vllm_config", None), "parallel_config", None)
    if (stages := getattr(parallel, "pipeline_parallel_size", 1)) > 1:
        return f"{stages} stages of a pipeline share the layers"
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    if (ranks := math.prod(getattr(parallel, name, 1) for name in names)) > 1:
        return f"{ranks} ranks share the tokens of a context"
    return None


def _first_head(runner: Any, drafter: bool, heads: int) -> int:
    """Return the number of this rank's first head. Where there are fewer heads than ranks, or a drafter is not spread
    over the ranks, several have the same."""
    rank, ranks = _rank()
    if ranks == 1:
        return 0
    config = runner.vllm_config.speculative_config.draft_model_config if drafter else runner.vllm_config.model_config
    copies = max(1, heads * ranks // int(config.get_total_num_kv_heads()))
    return rank // copies * heads


def _as_bytes(named: Any) -> Any:
    """Return the type of elements that a cache keeps as bytes, by vLLM's name for it. Raises Unseen for others."""
    import torch

    known = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    if named not in known:
        raise Unseen(f"its cache is of {named}")
    return known[named]


def _state_layer(runner: Any, name: str, drafter: bool, spec: Any) -> LayerWithState:
    """Describe a layer with recurrent state."""
    return LayerWithState(
        name,
        drafter,
        tuple(
            _convolution(tensor, spec.num_speculative_blocks) if kind == 0 and tensor.dim() == 3 else tensor
            for kind, tensor in enumerate(runner.compilation_config.static_forward_context[name].kv_cache)
        ),
    )


def _convolution(tensor: Any, drafts: int) -> Any:
    """Return the state of a convolution as [blocks, 1, inputs, ...], without the room behind it that drafts take."""
    axis = _window_axis()
    # Engines that NIXL connects keep the inputs last, others first (``vllm/platforms/cpu.py``).
    return tensor.narrow(axis, 0, tensor.shape[axis] - drafts).movedim(axis, 1).unsqueeze(1)


def _window_axis() -> int:
    """Return the axis of [blocks, ...] along which the state of a convolution has its latest inputs."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return 2 if is_conv_state_dim_first() else 1


def _places(module: Any, cache: Any, shape: tuple[int, int, int, int]) -> Any:
    """Return where the backend puts each element of a block: int64 ``shape``, [2 (keys, values) or 1 (latent), tokens,
    heads, elements].

    The backend itself writes numbered ones into a block of its own, as many times as the numbers have digits that the
    cache's type tells apart.
    """
    import torch

    tokens, count = shape[1], math.prod(shape)
    if cache[0].numel() != count:
        what = "keys and values" if shape[0] == 2 else "a latent"
        raise Unseen(f"its blocks have {cache[0].numel()} elements where {what} would have {count}")
    numbers = torch.arange(count, device=cache.device).reshape(shape)
    slots = torch.arange(tokens, 2 * tokens, device=cache.device)

    def written(digits: Any) -> Any:
        # Quantised, powers of two stay so far apart that rounding and scales leave them apart.
        values = digits + 1 if cache.element_size() > 1 else 2.0**digits
        values = values.to(cache.dtype if cache.element_size() > 1 else getattr(module, "dtype", torch.bfloat16))
        scratch = torch.zeros((2, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
        if shape[0] == 2:
            module.impl.do_kv_cache_update(module, *values.contiguous(), scratch, slots)
        else:
            ranks = module.kv_lora_rank
            latent, rotated = values[0, :, 0, :ranks].contiguous(), values[0, :, :, ranks:].contiguous()
            kept = module.kv_cache_dtype, module._k_scale
            module.impl.do_kv_cache_update(latent, rotated, scratch, slots, *kept)
        return scratch[1].reshape(-1).to(torch.int64)

    base, scale = (128, 1) if cache.element_size() > 1 else (4, 1)
    # What stands where each digit was written; keys and values may have scales of their own.
    codes = torch.stack([written(torch.full_like(numbers, digit)) for digit in range(base)]) if base == 4 else None
    found = torch.zeros(count, dtype=torch.int64, device=cache.device)
    while scale < count:
        stored = written((numbers // scale) % base)
        found += (stored - 1 if codes is None else (codes == stored).to(torch.int64).argmax(0)) * scale
        scale *= base
    places = torch.argsort(found)
    if not torch.equal(found[places], torch.arange(count, device=cache.device)):
        raise Unseen("its backend does not write each element of a block once")
    return places.reshape(shape)


@functools.lru_cache(maxsize=256)
def _factors(count: int, seed: int, device: Any) -> Any:
    """Return odd factors of 64 bits, int64 [count], by SplitMix64 (Steele, Lea and Flood, 2014)."""
    import torch

    def shifted(z: Any, bits: int) -> Any:
        # Without the sign, as of an unsigned number.
        return (z >> bits) & (2 ** (64 - bits) - 1)

    z = (torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15)) + (seed << 32)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ shifted(z, 31)) | 1


def _signed(number: int) -> int:
    return number - 2**64


@functools.lru_cache(maxsize=256)
def _of_heads(make: Callable[[int, int, Any], Any], first: int, heads: int, size: int, seed: int, device: Any) -> Any:
    """Return the factors or signs of a rank's heads: those of each element are the same whatever rank has it."""
    return make((first + heads) * size, seed, device)[first * size :]


def _integers(raw: Any) -> Any:
    """Return the bits of elements as int64."""
    import torch

    return _bits(raw).to(torch.int64)


def _bits(raw: Any) -> Any:
    """Return elements as integers of their size."""
    import torch

    return raw.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.element_size()])


@functools.lru_cache(maxsize=256)
def _signs(count: int, seed: int, device: Any) -> Any:
    """Return random signs, float32 [count, SKETCH]."""
    import torch

    bits = (_factors(count, seed, device)[:, None] >> torch.arange(20, 20 + SKETCH, device=device)) & 1
    # Column by column, of which products take half as long.
    return (2 * bits - 1).to(torch.float32).T.contiguous().T


_witnesses: dict[int, Witness | None] = {}
_received: dict[str, Sequence[Sequence[int]]] = {}
"""Blocks by group that another engine has filled for a request which has not begun yet."""


def _of(runner: Any) -> Witness | None:
    """Return the witness of a runner whose caches exist; None before, and in an engine that it failed in."""
    if id(runner) not in _witnesses:
        if not getattr(runner, "kv_caches", None) or _writer is None:
            return None
        # One that fails is not tried again in each step.
        _witnesses[id(runner)] = None
        _witnesses[id(runner)] = Witness(runner, _writer)
    return _witnesses[id(runner)]


def _safely(work: Callable[..., None]) -> Callable[..., None]:
    """Make a function that never raises: an engine must not end because it is watched. The judge is told instead."""

    @functools.wraps(work)
    def safe(*args: Any) -> None:
        try:
            work(*args)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            if _writer is not None:
                _writer.put(lambda: {"error": words})

    return safe


@_safely
def _sampled(hidden: list[Any], hidden_states: Any) -> None:
    # The next one of a step, or the next step, writes into the same buffer.
    hidden.append(hidden_states.clone())


@_safely
def _drafted(runner: Any, witness: Witness, given: dict[str, Any], hidden: list[Any], drafts: Any) -> None:
    """Note the drafts of a step. ``given`` is what the drafter was, ``hidden`` what it sampled from: a row for each
    request and draft, in one call for each draft or in one for all."""
    if given.get("dummy_run") or not hidden:
        return
    ids, positions = _last_verified(runner, given)
    # The next step writes into the same buffers.
    witness.drafted(ids, DraftedStep(positions, hidden, drafts.clone()))


def _last_verified(runner: Any, given: dict[str, Any]) -> tuple[Sequence[str], Any]:
    """Return the names of a step's requests, and the position of the last token of each that the target has
    verified."""
    if "input_batch" in given:
        batch = given["input_batch"]
        last = batch.query_start_loc[1 : batch.num_reqs + 1] - 1 - given["num_rejected"][: batch.num_reqs]
        return batch.req_ids, batch.positions[last]
    last = given.get("token_indices_to_sample")
    if last is None:
        last = given["common_attn_metadata"].query_start_loc[1:] - 1
    # Those of three dimensions, of images, are alike for text.
    positions = given["target_positions"]
    return runner.input_batch.req_ids, (positions[0] if positions.dim() > 1 else positions)[last]


@_safely
def _ended(runner: Any, step: Any) -> None:
    preempted = set(getattr(step, "preempted_req_ids", None) or ())
    # In most steps, none has.
    if not (step.finished_req_ids or preempted) or (witness := _of(runner)) is None:
        return
    for id_ in [i for i in (*step.finished_req_ids, *preempted) if i in witness.requests]:
        if witness.states:
            # One that gave a single token ends before a step in which its state is seen.
            _note_state(runner, witness, id_, len(_computed(runner, id_, witness.requests[id_])))
        witness.end(id_, _computed(runner, id_, witness.requests[id_]), noted=id_ not in preempted)


def _note_state(runner: Any, witness: Witness, id_: str, tokens: int) -> None:
    """Note a request's state after its first ``tokens`` if they are of its prompt. What it is after those of an answer
    depends on drafts that were rejected."""
    if 0 < tokens <= witness.requests[id_].prompt:
        witness.state(id_, tokens, _column(runner, id_, (tokens - 1) // witness.states[0].block_size))


def _column(runner: Any, id_: str, otherwise: int) -> int:
    """Return the column of a request's block in which its state is: one further on where a step had room for drafts."""
    if hasattr(runner, "requests"):
        return int(getattr(runner, "mamba_state_idx", {}).get(id_, otherwise))
    columns = getattr(runner.model_state, "_mamba_state_idx_gpu", None)
    row = runner.req_states.req_id_to_index.get(id_)
    return otherwise if columns is None or row is None else int(columns[row])


def _computed(runner: Any, id_: str, request: WatchedRequest) -> Sequence[int]:
    """Return the tokens of a request that have KV: all but the last one of its answer."""
    tokens = _tokens_v1(runner, id_) if hasattr(runner, "requests") else _tokens_v2(runner, id_)
    if tokens is None:
        return request.tokens[: request.prompt]
    # Those of steps under way are negative.
    known = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
    return tokens[: max(min(known, len(tokens) - 1), min(request.prompt, known))]


def _tokens_v1(runner: Any, id_: str) -> list[int] | None:
    state = runner.requests.get(id_)
    return None if state is None else [*(state.prompt_token_ids or ()), *state.output_token_ids]


def _tokens_v2(runner: Any, id_: str) -> list[int] | None:
    states = runner.req_states
    row = states.req_id_to_index.get(id_)
    return None if row is None else states.all_token_ids.gpu[row, : int(states.total_len.gpu[row])].tolist()


@_safely
def _begun(runner: Any, step: Any) -> None:
    witness = _of(runner)
    if witness is None:
        return
    begun = []
    cached = step.scheduled_cached_reqs
    for new in step.scheduled_new_reqs:
        tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids or ()
        prompt = len(new.prompt_token_ids or ())
        witness.requests[new.req_id] = WatchedRequest(tokens, prompt, len(witness.sizes))
        begun.append((new.req_id, new.block_ids, new.num_computed_tokens))
    for id_, count, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        if witness.states and id_ in witness.requests and id_ not in cached.resumed_req_ids:
            _note_state(runner, witness, id_, count)
        if id_ in cached.resumed_req_ids:
            tokens = _tokens_v1(runner, id_) or ()
            prompt = runner.requests[id_].num_prompt_tokens
            witness.requests[id_] = WatchedRequest(tokens, prompt, len(witness.sizes))
            begun.append((id_, blocks or [], count))
        elif blocks is not None and id_ in witness.requests:
            witness.take(id_, blocks, 0)
    if not begun:
        return
    for id_, blocks, count in begun:
        witness.take(id_, blocks, count)
    computed = {id_: count for id_, _, count in begun}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for id_, _, count in begun:
        received = _received.pop(id_, None)
        if count:
            # D computes the last token of a prompt again, of which it has received the KV.
            last = received is not None and count + 1 == witness.requests[id_].prompt
            witness.begin(id_, count + last, received, witness.unwritten(computed, id_), state_of=count)


def _name(prompt: Sequence[int] | None) -> str:
    """Return a name of a prompt: of its token ids in decimal, the first 64 bits of SHA-256."""
    return hashlib.sha256(",".join(map(str, prompt or ())).encode()).hexdigest()[:16]


def _names(tokens: Sequence[int], size: int) -> list[str]:
    """Return names of the tokens up to the end of each full block."""
    digest, out = hashlib.sha256(), []
    for end in range(size, len(tokens) + 1, size):
        digest.update(",".join(map(str, tokens[end - size : end])).encode() + b",")
        out.append(digest.hexdigest()[:16])
    return out


def _watch_v1(module: ModuleType) -> None:
    original = module.GPUModelRunner._update_states

    @functools.wraps(original)
    def update_states(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        _ended(self, scheduler_output)
        result = original(self, scheduler_output, *args, **kwargs)
        _begun(self, scheduler_output)
        return result

    module.GPUModelRunner._update_states = update_states


def _watch_v2(module: ModuleType) -> None:
    finish, update = module.GPUModelRunner.finish_requests, module.GPUModelRunner.update_requests

    @functools.wraps(finish)
    def finish_requests(self: Any, scheduler_output: Any) -> Any:
        _ended(self, scheduler_output)
        return finish(self, scheduler_output)

    @functools.wraps(update)
    def update_requests(self: Any, scheduler_output: Any) -> Any:
        result = update(self, scheduler_output)
        _begun(self, scheduler_output)
        return result

    module.GPUModelRunner.finish_requests = finish_requests
    module.GPUModelRunner.update_requests = update_requests


def _watch_transfers(module: ModuleType) -> None:
    original = module.NixlBaseConnectorWorker.get_transfer_results

    @functools.wraps(original)
    def get_transfer_results(self: Any) -> Any:
        waiting = {r: [list(g) for g in meta.local_block_ids] for r, meta in self._recving_metadata.items()}
        for witness in filter(None, _witnesses.values()):
            for blocks in waiting.values():
                witness.forget(blocks)
        results = original(self)
        for request in results.finished_recving or ():
            if request in waiting and request not in (getattr(results, "failed_recving", None) or ()):
                _received[request] = waiting[request]
        return results

    module.NixlBaseConnectorWorker.get_transfer_results = get_transfer_results


class _WatchingFinder(importlib.abc.MetaPathFinder):
    """Watches modules right after they are executed: importing them all would cost the API server seconds."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        watch = self._waiting.pop(fullname, None)
        if watch is None:
            return None
        # Popped first, because the lookup below comes through here again and must find the real module.
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _safely(watch)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
