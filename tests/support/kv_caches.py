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

    def __init__(self, way: str, otherwise: str = "") -> None:
        self.way = way
        self.types = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
        self.otherwise = otherwise

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        if cache.dtype == torch.uint8:
            # Quantised, by a scale for keys and one for values.
            assert key.dtype == layer.dtype
            kept = self.types[self.otherwise or layer.kv_cache_dtype]
            key, value = (x.div(by).to(kept).view(torch.uint8) for x, by in ((key, 0.5), (value, 3.0)))
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

    def __init__(
        self,
        kv: torch.Tensor,
        block_size: int,
        way: str = "side by side",
        draft: bool = True,
        kept: str | None = None,
    ) -> None:
        """Keep the numbers in their own type, or as bytes of the type that vLLM calls ``kept``."""
        names = LAYERS if draft else LAYERS[:2]
        tokens = kv.shape[2]
        self.blocks = list(range(-(-tokens // block_size), 0, -1))
        self.of_groups = [self.blocks]
        self.requests: dict[str, Any] = {}
        self.drafter = SimpleNamespace(_draft_attn_layer_names={LAYERS[2]})
        self.kv_caches = [True]
        self.layers: dict[str, Any] = {}
        backend = StandInBackend(way)
        for i, name in enumerate(names):
            cache = torch.randn((len(self.blocks) + 1, kv.shape[3], block_size, 2 * SIZE)).to(kv.dtype)
            if kept is not None:
                cache = torch.randint(0, 99, cache.shape, dtype=torch.uint8)
            self.layers[name] = layer = SimpleNamespace(
                kv_cache=cache,
                impl=backend,
                num_kv_heads=kv.shape[3],
                head_size=SIZE,
                dtype=kv.dtype,
                kv_cache_dtype=kept,
            )
            slots = torch.tensor([self.blocks[t // block_size] * block_size + t % block_size for t in range(tokens)])
            backend.do_kv_cache_update(layer, kv[i, 0], kv[i, 1], cache, slots)
        self.compilation_config = SimpleNamespace(static_forward_context=self.layers)
        spec = SimpleNamespace(block_size=block_size)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)]
        )


RANK, ROTATED = 12, 4
"""Elements of a latent, and of the part of a key that is rotated by its position beside it."""


class LatentBackend:
    """Writes latents into a cache of shape [blocks, tokens, elements], as back ends of vLLM do."""

    def do_kv_cache_update(self, latent: Any, rotated: Any, cache: Any, slots: Any, kept: str, scale: Any) -> None:
        assert latent.shape[1:] == (RANK,) and rotated.shape[1:] == (1, ROTATED)
        whole = torch.cat([latent, rotated[:, 0]], -1)
        if cache.dtype == torch.uint8:
            whole = whole.div(scale).to({"fp8": torch.float8_e4m3fn}[kept]).view(torch.uint8)
        cache.view(-1, cache.shape[2])[slots, : whole.shape[1]] = whole


class LatentRunner:
    """A model runner whose layers keep a latent of each token, the last one a drafter's that keeps keys and values."""

    def __init__(
        self,
        kv: torch.Tensor,
        block_size: int,
        kept: str = "auto",
        width: int = RANK + ROTATED,
        draft: bool = True,
    ) -> None:
        """Keep the first elements of ``kv`` ([layers, 2, tokens, heads, elements]) as latents, of a layer that is not a
        drafter's. ``width`` is that of the cache."""
        beside = StandInRunner(kv, block_size, draft=draft)
        self.blocks, self.of_groups, self.requests = beside.blocks, beside.of_groups, beside.requests
        self.drafter, self.kv_caches = beside.drafter, beside.kv_caches
        self.layers = beside.layers
        tokens = kv.shape[2]
        slots = torch.tensor([self.blocks[t // block_size] * block_size + t % block_size for t in range(tokens)])
        for i, name in enumerate(LAYERS[:2]):
            latents = kv[i].movedim(0, 1).reshape(tokens, -1)[:, : RANK + ROTATED]
            # What no request holds is not zero.
            cache = torch.randn((len(self.blocks) + 1, block_size, width)).to(kv.dtype)
            if kept != "auto":
                cache = torch.randint(0, 99, cache.shape, dtype=torch.uint8)
            self.layers[name] = SimpleNamespace(
                kv_cache=cache,
                impl=LatentBackend(),
                kv_lora_rank=RANK,
                qk_rope_head_dim=ROTATED,
                kv_cache_dtype=kept,
                _k_scale=torch.tensor(0.5),
            )
            given = latents[:, :RANK], latents[:, None, RANK:], cache, slots, kept, torch.tensor(0.5)
            self.layers[name].impl.do_kv_cache_update(*given)
        self.compilation_config = beside.compilation_config
        spec = SimpleNamespace(block_size=block_size)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=list(self.layers), kv_cache_spec=spec)],
            num_blocks=len(self.blocks) + 1,
        )


STATEFUL = ("model.layers.2.mixer", "model.layers.3.mixer")
STATE_HEADS = 2


class StatefulRunner(StandInRunner):
    """A model runner that has layers with recurrent state, too: a convolution and a state of two heads in each."""

    def __init__(
        self,
        kv: torch.Tensor,
        states: dict[int, torch.Tensor],
        drafts: int = 0,
        mode: str = "align",
        window_axis: int = 2,
    ) -> None:
        """Let the request have ``states`` ([layers, numbers of one layer]) after so many tokens, in the blocks in which
        these tokens end. ``drafts`` is the room behind a convolution for their states, along ``window_axis``."""
        super().__init__(kv, 32, draft=False)
        # All groups share one pool.
        self.of_groups.append([block + len(self.blocks) for block in self.blocks])
        size = 2 * len(self.blocks) + 1
        # What is behind the window of a convolution belongs to nobody.
        self._axis = window_axis
        shape = (size, 4, 3 + drafts) if window_axis == 2 else (size, 3 + drafts, 4)
        self.tensors = {name: (torch.randn(shape), torch.randn(size, 2, 5, 5)) for name in STATEFUL}
        for tokens, state in states.items():
            self.put(tokens, state)
        for name in STATEFUL:
            self.layers[name] = SimpleNamespace(kv_cache=self.tensors[name])
        spec = SimpleNamespace(block_size=32, mamba_cache_mode=mode, num_speculative_blocks=drafts)
        groups = self.kv_cache_config.kv_cache_groups
        groups.append(SimpleNamespace(layer_names=list(STATEFUL), kv_cache_spec=spec))

    def put(self, tokens: int, state: torch.Tensor) -> None:
        block = self.of_groups[1][(tokens - 1) // 32]
        for numbers, name in zip(state, STATEFUL, strict=True):
            convolution, recurrent = self.tensors[name]
            convolution[block].movedim(self._axis - 1, 1)[:, :3] = numbers[:12].reshape(4, 3)
            recurrent[block] = numbers[12:].reshape(2, 5, 5)


def state_of(seed: int) -> torch.Tensor:
    """Return the states of the stateful layers: [layers, 12 numbers of a convolution and 25 of each head]."""
    return torch.randn((len(STATEFUL), 62), generator=torch.Generator().manual_seed(seed))


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
    latent: bool = False,
) -> None:
    """Write the notes of a request whose prompt has so many tokens; ``received`` are indices of blocks."""
    runner = (LatentRunner if latent else StandInRunner)(kv, block_size, draft=draft)
    witness = plugin.Witness(runner, writer)
    for moment in moments:
        take_note(witness, runner, request, moment, tokens, received, answer)


def take_note(
    witness: plugin.Witness,
    runner: StandInRunner | LatentRunner,
    request: str,
    moment: str,
    prompt: int | Sequence[int],
    received: Sequence[int] | None = None,
    answer: int | Sequence[int] = 0,
    states: Sequence[int] = (),
) -> None:
    """Let a request begin that finds its whole prompt, or end; prompt and answer are tokens, or how many. Its states
    are noted after so many tokens."""
    ids = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    said = list(range(answer)) if isinstance(answer, int) else list(answer)
    name = f"cmpl-{request}-0-0a1b2c3d"
    witness.requests[name] = plugin.WatchedRequest(ids, len(ids), len(witness.sizes))
    witness.take(name, runner.of_groups, len(ids) if moment == "begin" else 0)
    if moment == "begin":
        given = None if received is None else [[blocks[i] for i in received] for blocks in runner.of_groups]
        witness.begin(name, len(ids), given)
    else:
        for tokens in states:
            witness.state(name, tokens, (tokens - 1) // 32)
        witness.end(name, [*ids, *said])
