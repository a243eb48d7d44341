"""The target in plain torch: what vLLM computes for the same weights (``qwen2.py``), and what drafters read of it.

Symbols: B conversations, T tokens, h heads, d head size, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

KEPT = (2, 15, 28, 30)
"""Numbers of finished layers whose residual streams are kept: three that drafters read, and the last one."""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Rotary:
    """Rotary embedding, half-split ("neox") layout, with a table of angles."""

    def __init__(self, theta: float, head_dim: int, positions: int) -> None:
        speed = theta ** (-torch.arange(head_dim // 2, dtype=torch.float32) * 2 / head_dim)
        angle = torch.arange(positions, dtype=torch.float32)[:, None] * speed
        self._cos, self._sin = angle.cos(), angle.sin()

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x`` [B, h, T, d] by ``positions`` [T] or [B, T]."""
        cos, sin = self._cos[positions], self._sin[positions]
        if cos.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LayerWeights(NamedTuple):
    """Weights of one decoder layer, as the checkpoint names them."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Fused(NamedTuple):
    """The same with the matrices that read one input in one piece, for speed."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


_NAMES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class Target:
    """Weights in float32 and the shape of the target. Biases must be zero, and embeddings tied to the head."""

    def __init__(self, folder: Path, positions: int = 1024) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        stored = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        if any(bool(t.any()) for name, t in stored.items() if name.endswith(".bias")):
            raise ValueError(f"expected biases of zero in {folder}, found others: this trainer leaves them out")
        self.layer_count = int(self.config["num_hidden_layers"])
        self.hidden = int(self.config["hidden_size"])
        self.heads = int(self.config["num_attention_heads"])
        self.kv_heads = int(self.config["num_key_value_heads"])
        self.head_dim = int(self.config["head_dim"])
        self.vocab = int(self.config["vocab_size"])
        self.eps = float(self.config["rms_norm_eps"])
        self.embeddings = stored["model.embed_tokens.weight"]
        self.norm = stored["model.norm.weight"]
        self.layers = [
            LayerWeights(*(stored[f"model.layers.{i}.{name}.weight"] for name in _NAMES))
            for i in range(self.layer_count)
        ]
        self.rotary = Rotary(float(self.config["rope_theta"]), self.head_dim, positions)
        self._fused: list[Fused] = []

    def fused(self) -> list[Fused]:
        if not self._fused:
            self._fused = [
                Fused(w.input_norm, torch.cat((w.q, w.k, w.v)), w.o, w.post_norm, torch.cat((w.gate, w.up)), w.down)
                for w in self.layers
            ]
        return self._fused

    def final(self, stream: Tensor) -> Tensor:
        """Return the normed last stream, from which the head computes logits."""
        return norm(stream, self.norm, self.eps)

    def logits(self, stream: Tensor) -> Tensor:
        return F.linear(self.final(stream), self.embeddings)


class Cache:
    """Keys and values of ``rows`` conversations of up to ``length`` tokens each."""

    def __init__(self, target: Target, rows: int, length: int) -> None:
        shape = (rows, target.kv_heads, length, target.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(target.layer_count)]
        self.values = [torch.zeros(shape) for _ in range(target.layer_count)]

    def repeat_first(self, length: int) -> None:
        """Give every row the first ``length`` tokens of row 0."""
        for part in (*self.keys, *self.values):
            part[:, :, :length] = part[:1, :, :length].clone()


def prefill(target: Target, ids: Sequence[int], cache: Cache) -> Tensor:
    """Fill the beginning of the cache's row 0; return the kept streams [T, len(KEPT), H]."""
    length = len(ids)
    positions = torch.arange(length)
    group = target.heads // target.kv_heads
    x = target.embeddings[torch.tensor(ids)][None]
    kept = []
    for i, w in enumerate(target.fused()):
        q, k, v = _project(target, w, x)
        q, k = target.rotary(q, positions), target.rotary(k, positions)
        cache.keys[i][:1, :, :length], cache.values[i][:1, :, :length] = k, v
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = _finish(target, w, x, attended)
        if i + 1 in KEPT:
            kept.append(x[0])
    return torch.stack(kept, 1)


def _project(target: Target, w: Fused, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [B, heads, T, d] of ``x`` [B, T, H]."""
    heads, kv = target.heads, target.kv_heads
    y = F.linear(norm(x, w.input_norm, target.eps), w.qkv)
    y = y.unflatten(-1, (heads + 2 * kv, target.head_dim)).transpose(1, 2)
    return y[:, :heads], y[:, heads : heads + kv], y[:, heads + kv :]


def _finish(target: Target, w: Fused, x: Tensor, attended: Tensor) -> Tensor:
    x = x + F.linear(attended, w.o)
    gate, up = F.linear(norm(x, w.post_norm, target.eps), w.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w.down)


def decode(target: Target, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    """Take one token further in every row, each at its own position; return the kept streams [B, len(KEPT), H]."""
    rows = torch.arange(len(tokens))
    seen = int(positions.max()) + 1
    mask = (torch.arange(seen) <= positions[:, None])[:, None, None]
    x = target.embeddings[tokens][:, None]
    kept = []
    for i, w in enumerate(target.fused()):
        q, k, v = _project(target, w, x)
        q, k = target.rotary(q, positions[:, None]), target.rotary(k, positions[:, None])
        keys, values = cache.keys[i], cache.values[i]
        keys[rows, :, positions], values[rows, :, positions] = k[:, :, 0], v[:, :, 0]
        # The heads that share a key are the queries of one attention.
        q = q[:, :, 0].unflatten(1, (target.kv_heads, -1))
        attended = F.scaled_dot_product_attention(q, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask)
        x = _finish(target, w, x, attended.flatten(1)[:, None])
        if i + 1 in KEPT:
            kept.append(x[:, 0])
    return torch.stack(kept, 1)
