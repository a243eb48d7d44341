"""KV caches of stand-in engines, and the notes that the plugin takes of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.engines.witness import kv_harness_witness as plugin
from harness.history.layout import WITNESS

HEADS, SIZE = 3, 8
PROMPT = 83
"""Five cells and three tokens."""
LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "draft.layers.0.attn")


class StandInBackend:
    """Writes keys and values into a cache of shape [blocks, heads, tokens, 2 * elements] as back ends of vLLM do."""

    def __init__(self, way: str) -> None:
        self.way = way

    def do_kv_cache_update(self, _layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        tokens, size = cache.shape[2], cache.shape[3] // 2
        block, at = slots // tokens, slots % tokens
        if self.way == "side by side":
            cache[block, :, at, :size], cache[block, :, at, size:] = key, value
        elif self.way == "keys transposed":
            pages = cache.view(*cache.shape[:2], 2, -1)
            pages[:, :, 0].view(*cache.shape[:2], size, tokens)[block, :, :, at] = key
            pages[:, :, 1].view(*cache.shape[:2], tokens, size)[block, :, at] = value
        else:
            cache[block, :, at, :size] = key


@contextlib.contextmanager
def as_in_an_engine() -> Iterator[None]:
    """Let the plugin be the only rank, with one thread: several wait for each other, long beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plugin, "_rank", lambda: (0, 1))
            yield
    finally:
        torch.set_num_threads(threads)


def kv_of(seed: int, tokens: int = 2 * PROMPT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return keys and values: [layers, 2, tokens, heads, elements]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((len(LAYERS), 2, tokens, HEADS, SIZE), generator=generator).to(dtype)


class StandInRunner:
    """A model runner whose caches hold given keys and values of one request."""

    def __init__(self, kv: torch.Tensor, block_size: int, way: str = "side by side", draft: bool = True) -> None:
        names = LAYERS if draft else LAYERS[:2]
        tokens = kv.shape[2]
        self.blocks = list(range(-(-tokens // block_size), 0, -1))
        self.requests: dict[str, Any] = {}
        self.drafter = SimpleNamespace(_draft_attn_layer_names={LAYERS[2]})
        self.kv_caches = [True]
        self.layers: dict[str, Any] = {}
        backend = StandInBackend(way)
        for i, name in enumerate(names):
            cache = torch.randn((len(self.blocks) + 1, HEADS, block_size, 2 * SIZE)).to(kv.dtype)
            self.layers[name] = SimpleNamespace(kv_cache=cache, impl=backend, num_kv_heads=HEADS, head_size=SIZE)
            slots = torch.tensor([self.blocks[t // block_size] * block_size + t % block_size for t in range(tokens)])
            backend.do_kv_cache_update(None, kv[i, 0], kv[i, 1], cache, slots)
        self.compilation_config = SimpleNamespace(static_forward_context=self.layers)
        spec = SimpleNamespace(block_size=block_size)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)]
        )


class AtOnce(plugin.Writer):
    """Writes into the file of a role without a thread."""

    def __init__(self, folder: Path, role: str, group: str = "pd-eagle3") -> None:
        self.path = folder / WITNESS / f"{group}.{role}.1.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def put(self, row: Any) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(row()) + "\n")


def write_notes(
    writer: AtOnce,
    kv: torch.Tensor,
    request: str,
    tokens: int,
    received: Sequence[int] | None = None,
    moments: Sequence[str] = ("end",),
    draft: bool = True,
    block_size: int = 32,
    answer: int = 0,
) -> None:
    """Write the notes of a request whose prompt has so many tokens; ``received`` are indices of blocks."""
    runner = StandInRunner(kv, block_size, draft=draft)
    witness = plugin.Witness(runner, writer)
    for moment in moments:
        take_note(witness, runner, request, moment, tokens, received, answer)


def take_note(
    witness: plugin.Witness,
    runner: StandInRunner,
    request: str,
    moment: str,
    prompt: int | Sequence[int],
    received: Sequence[int] | None = None,
    answer: int | Sequence[int] = 0,
) -> None:
    """Let a request begin that finds its whole prompt, or end; prompt and answer are tokens, or how many."""
    ids = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    said = list(range(answer)) if isinstance(answer, int) else list(answer)
    name = f"cmpl-{request}-0-0a1b2c3d"
    witness.requests[name] = plugin.WatchedRequest(ids, len(ids), 1)
    witness.take(name, [runner.blocks], len(ids) if moment == "begin" else 0)
    if moment == "begin":
        given = None if received is None else [[runner.blocks[i] for i in received]]
        witness.begin(name, len(ids), given)
    else:
        witness.end(name, [*ids, *said])
