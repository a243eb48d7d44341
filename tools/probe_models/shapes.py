"""Shapes of the probe models, shared by networks, training and export."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Tensor shapes shared by the target and its drafters (Qwen2 / Llama / Qwen3 naming)."""

    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    head_dim: int = 32
    target_layers: int = 3
    dflash_layers: int = 2
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


class Layout(NamedTuple):
    """What distinguishes one target from another: how its KV is laid out. Everything else is in ``Shape``."""

    kv_heads: int
    windows: tuple[int | None, ...]
    """For each layer, how many tokens a query sees, its own included; None means all. vLLM keeps a KV-cache group for
    each kind."""
    bias: bool
    """Whether queries, keys and values have biases (Qwen2) or not (Llama)."""


class Hybrid(NamedTuple):
    """Layers and heads of the target with recurrent state, and of its drafter.

    vLLM's CPU kernels take states of 64 x 64 and 128 x 128 alone, and a block of 32 tokens has the bytes of a state
    only if attention has this many numbers a token.
    """

    layers: tuple[str, ...] = ("linear_attention", "full_attention", "linear_attention")
    heads: int = 4
    head_dim: int = 64
    rotary: int = 16
    """Numbers of a head that are rotated by the position: the share that transformers takes if nothing else is said."""
    state_dim: int = 64
    drafter_intermediate: int = 32
    """Width of each expert of the MTP drafter, as trained."""


SHAPE = Shape()
HYBRID = Hybrid()
PLAIN = Layout(SHAPE.heads, (None,) * SHAPE.target_layers, True)
"""The target of all drafters: one group of full attention."""
WINDOWED = Layout(2, (48, None, 48), False)
"""Grouped-query attention and sliding windows that end inside a block, so that KV is in several groups, and blocks
that left the window are neither kept nor handed over."""
EAGLE3_AUX_LAYERS = (1, 2, 3)
"""Number of finished target layers whose residual stream EAGLE3 reads."""
DFLASH_TARGET_LAYERS = (0, 1, 2)
"""Target layers whose output DFlash reads (vLLM counts layers, so layer i is the stream after i + 1 layers)."""
DRAFT_TOKENS = 3
MTP_MODULES = DRAFT_TOKENS
"""Modules of the MTP drafter that has several: one for each draft."""
