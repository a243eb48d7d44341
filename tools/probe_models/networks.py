"""Torch implementations of the vLLM architectures as which the probes are served.

They contain only what training needs; each module computes what vLLM computes for the same weights, as defined in
vLLM 0.32.0 ``qwen2.py`` (target), ``llama_eagle3.py``, ``qwen3_dflash.py``, ``mimo_mtp.py``, ``qwen3_next_mtp.py`` and
``exaone_moe_mtp.py`` (drafters).

Symbols: B batch, T tokens, A anchors, S draft slots, h heads, d head size, H hidden size, V vocabulary.
An *anchor* ``i`` is the last position whose target hidden state is known; token ``i+1`` (the bonus token) is known
too, and draft ``p`` (0-based) predicts token ``i+2+p``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.prompts.probe_task import MASK, VOCAB_SIZE
from tools.probe_models.shapes import DFLASH_TARGET_LAYERS, EAGLE3_AUX_LAYERS, HYBRID, MTP_MODULES, PLAIN, SHAPE, Layout

H, HEADS, HEAD_DIM = SHAPE.hidden, SHAPE.heads, SHAPE.head_dim


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, init: float = 1.0, trainable: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), init), requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, SHAPE.norm_eps)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding, half-split ("neox") layout. ``x`` [B, h, T, d]; ``positions`` [T] or [B, T]."""
    half = x.shape[-1] // 2
    freq = SHAPE.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions.float().unsqueeze(-1) * freq
    if angle.dim() == 3:
        angle = angle.unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def linear(inputs: int, outputs: int, bias: bool = False, std: float = 0.06) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Attention(nn.Module):
    """Multi-head projections; the callers decide which keys each query may see.

    Of each head's numbers the first ``rotary`` are rotated by the position; None means all.
    """

    def __init__(
        self,
        inputs: int,
        bias: bool = False,
        qk_norm: bool = False,
        kv_heads: int = HEADS,
        head_dim: int = HEAD_DIM,
        rotary: int | None = None,
    ) -> None:
        super().__init__()
        width = HEADS * head_dim
        self._head_dim = head_dim
        self._rotary = rotary or head_dim
        self.q_proj = linear(inputs, width, bias)
        self.k_proj = linear(inputs, kv_heads * head_dim, bias)
        self.v_proj = linear(inputs, kv_heads * head_dim, bias)
        self.o_proj = linear(width, H)
        # Sharp from the start (2.0): copying needs a single key, and a flat start is slow to train.
        self.q_norm: nn.Module = RMSNorm(head_dim, 2.0) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(head_dim, 2.0) if qk_norm else nn.Identity()

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.cat((rotate(x[..., : self._rotary], positions), x[..., self._rotary :]), dim=-1)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._rotate(self.q_norm(self._split(self.q_proj(x))), positions)

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._rotate(self.k_norm(self._split(self.k_proj(x))), positions)

    def values(self, x: Tensor) -> Tensor:
        return self._split(self.v_proj(x))

    def merge(self, heads: Tensor) -> Tensor:
        merged: Tensor = self.o_proj(heads.transpose(1, 2).flatten(-2))
        return merged

    def causal(self, x: Tensor, positions: Tensor, window: int | None = None) -> Tensor:
        """Attend to all tokens before, or only to the ``window`` last ones, a query's own included."""
        q, k, v = self.queries(x, positions), self.keys(x, positions), self.values(x)
        shared = k.shape[1] < q.shape[1]
        if window is None:
            return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared))
        back = positions.unsqueeze(-1) - positions
        seen = (back >= 0) & (back < window)
        return self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=shared))


class GatedMLP(nn.Module):
    def __init__(self, intermediate: int = SHAPE.intermediate) -> None:
        super().__init__()
        self.gate_proj = linear(H, intermediate)
        self.up_proj = linear(H, intermediate)
        self.down_proj = linear(intermediate, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer (Llama; Qwen2 with ``bias``, Qwen3 with ``qk_norm``)."""

    def __init__(self, bias: bool = False, qk_norm: bool = False, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(H)
        self.post_attention_layernorm = RMSNorm(H)
        self.self_attn = Attention(H, bias=bias, qk_norm=qk_norm, kv_heads=kv_heads)
        self.mlp: nn.Module = GatedMLP()

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Target(nn.Module):
    """Qwen2 or Llama decoder with tied embeddings and a final norm whose weight stays 1.

    The frozen norm lets one MTP drafter fit both a post-norm (Qwen2) and a pre-norm (MiMo) hidden state, because
    norm(norm(x)) = norm(x) then.
    """

    def __init__(self, layout: Layout = PLAIN) -> None:
        super().__init__()
        self.windows = layout.windows
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, H)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(
            DecoderLayer(bias=layout.bias, kv_heads=layout.kv_heads) for _ in range(SHAPE.target_layers)
        )
        self.norm = RMSNorm(H, trainable=False)

    def streams(self, ids: Tensor) -> list[Tensor]:
        """Residual stream [B, T, H] before the first layer and after each layer."""
        positions = torch.arange(ids.shape[1])
        x = self.embed_tokens(ids)
        out = [x]
        for layer, window in zip(self.layers, self.windows, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.finish(x, layer.self_attn.causal(layer.input_layernorm(x), positions, window))
            out.append(x)
        return out

    def logits(self, stream: Tensor) -> Tensor:
        return F.linear(self.norm(stream), self.embed_tokens.weight)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` [B, A] of ``x`` [B, T, H]."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class AttentionMap:
    """Collects attention weights for supervision; one entry [B, h, Q, T + S] per attention call."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []


def _shared_by(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [B, h, ...] of grouped-query attention for each head of the queries that shares them."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def attend(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    last: Tensor,
    own: tuple[Tensor, Tensor] | None,
    record: AttentionMap,
) -> Tensor:
    """Compute attention of draft queries over the shared context and their own draft slots.

    ``q`` [B, h, Q, d]; ``context`` keys and values [B, h, T, d], visible up to position ``last`` [B, Q];
    ``own`` keys and values [B, h, Q, S, d], private to each query, all visible. Keys and values may have fewer heads,
    each of which several heads of the queries share.
    """
    k, v = (_shared_by(x, q.shape[1]) for x in context)
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bhqd,bhtd->bhqt", q, k)
    hidden = torch.arange(k.shape[2]) > last.unsqueeze(-1)
    scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
    if own is not None:
        own_k, own_v = (_shared_by(x, q.shape[1]) for x in own)
        scores = torch.cat((scores, torch.einsum("bhqd,bhqsd->bhqs", q, own_k)), dim=-1)
    weights = (scores * scale).softmax(-1)
    record.weights.append(weights)
    tokens = k.shape[2]
    out = weights[..., :tokens] @ v
    if own is not None:
        out = out + torch.einsum("bhqs,bhqsd->bhqd", weights[..., tokens:], own_v)
    return out


class Eagle3(nn.Module):
    """EAGLE3 drafter: fuses three target streams with the next token; feeds back its pre-norm state."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.fc = linear(len(EAGLE3_AUX_LAYERS) * H, H, std=0.05)
        self.input_layernorm = RMSNorm(H)
        self.hidden_norm = RMSNorm(H)
        self.post_attention_layernorm = RMSNorm(H)
        self.self_attn = Attention(2 * H, kv_heads=kv_heads)
        self.mlp = GatedMLP()
        self.norm = RMSNorm(H)
        self.lm_head = linear(H, VOCAB_SIZE)

    def _join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def drafts(
        self,
        target: Target,
        streams: Sequence[Tensor],
        ids: Tensor,
        anchors: Tensor,
        k: int,
        record: AttentionMap,
    ) -> Tensor:
        """Logits [B, A, k, V] of ``k`` teacher-forced drafts behind each anchor."""
        last_index = ids.shape[1] - 1
        fused = self.fc(torch.cat([streams[i] for i in EAGLE3_AUX_LAYERS], dim=-1))[:, :-1]
        joined = self._join(target.embed_tokens(ids[:, 1:]), fused)
        positions = torch.arange(last_index)
        attn = self.self_attn
        context = (attn.keys(joined, positions), attn.values(joined))
        hidden, query = take(fused, anchors), take(joined, anchors)
        own_k: list[Tensor] = []
        own_v: list[Tensor] = []
        out = []
        for step in range(k):
            at = anchors + step
            if step:
                token = ids.gather(1, (at + 1).clamp(max=last_index))
                query = self._join(target.embed_tokens(token), hidden)
                own_k.append(attn.keys(query, at))
                own_v.append(attn.values(query))
            own = (torch.stack(own_k, 3), torch.stack(own_v, 3)) if own_k else None
            x = hidden + attn.merge(attend(attn.queries(query, at), context, anchors, own, record))
            hidden = x + self.mlp(self.post_attention_layernorm(x))
            out.append(self.lm_head(self.norm(hidden)))
        return torch.stack(out, dim=2)


class ReadTarget(Protocol):
    """What an MTP drafter reads of a target."""

    @property
    def embed_tokens(self) -> nn.Embedding: ...

    @property
    def norm(self) -> nn.Module:
        """What makes of the last stream the hidden state that vLLM hands to the drafter."""


class _MTPDrafter(nn.Module):
    """One layer of multi-token prediction: (hidden, embedding) in, post-norm output fed back."""

    first_embedded = 0
    """The first position of which the layer sees the embedding."""

    def _join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        raise NotImplementedError

    def _parts(self) -> tuple[DecoderLayer, nn.Module]:
        """Return the layer, and the norm behind it."""
        raise NotImplementedError

    def drafts(
        self,
        target: ReadTarget,
        streams: Sequence[Tensor],
        ids: Tensor,
        anchors: Tensor,
        k: int,
        record: AttentionMap,
    ) -> Tensor:
        """Logits [B, A, k, V] of ``k`` teacher-forced drafts behind each anchor."""
        last_index = ids.shape[1] - 1
        positions = torch.arange(last_index)
        embedded = target.embed_tokens(ids[:, 1:]) * (positions >= self.first_embedded).float().unsqueeze(-1)
        joined = self._join(target.norm(streams[-1])[:, :-1], embedded)
        block, norm = self._parts()
        attn = block.self_attn
        normed = block.input_layernorm(joined)
        context = (attn.keys(normed, positions), attn.values(normed))
        x = take(joined, anchors)
        hidden = x
        own_k: list[Tensor] = []
        own_v: list[Tensor] = []
        out = []
        for step in range(k):
            at = anchors + step
            if step:
                token = ids.gather(1, (at + 1).clamp(max=last_index))
                x = self._join(hidden, target.embed_tokens(token))
            query = block.input_layernorm(x)
            if step:
                own_k.append(attn.keys(query, at))
                own_v.append(attn.values(query))
            own = (torch.stack(own_k, 3), torch.stack(own_v, 3)) if own_k else None
            attended = attn.merge(attend(attn.queries(query, at), context, anchors, own, record))
            hidden = norm(block.finish(x, attended))
            out.append(F.linear(hidden, target.embed_tokens.weight))
        return torch.stack(out, dim=2)


class MTP(_MTPDrafter):
    """MiMo's layer of multi-token prediction."""

    # vLLM zeroes the embedding at position 0 (mimo_mtp.py).
    first_embedded = 1

    def __init__(self) -> None:
        super().__init__()
        self.token_layernorm = RMSNorm(H)
        self.hidden_layernorm = RMSNorm(H)
        self.input_proj = linear(2 * H, H)
        self.mtp_block = DecoderLayer(bias=True)
        self.final_layernorm = RMSNorm(H)

    def _join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        out: Tensor = self.input_proj(
            torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), dim=-1)
        )
        return out

    def _parts(self) -> tuple[DecoderLayer, nn.Module]:
        return self.mtp_block, self.final_layernorm


class Experts(nn.Module):
    """Two experts, of which each token takes both, so that no rounding decides which."""

    def __init__(self, intermediate: int) -> None:
        super().__init__()
        self.gate = linear(H, 2)
        self.experts = nn.ModuleList(GatedMLP(intermediate) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (both * self.gate(x).softmax(-1).unsqueeze(-2)).sum(-1)


class _JoinedByFc(nn.Module):
    """What the later architectures of multi-token prediction join hidden state and embedding by, under their names."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(H)
        self.pre_fc_norm_hidden = RMSNorm(H)
        self.fc = linear(2 * H, H)

    def _join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1))
        return out


class HybridMTP(_JoinedByFc, _MTPDrafter):
    """Qwen3-Next's layer of multi-token prediction, without a gate behind its attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = DecoderLayer()
        layer.self_attn = Attention(H, qk_norm=True, head_dim=HYBRID.head_dim, rotary=HYBRID.rotary)
        layer.mlp = Experts(HYBRID.drafter_intermediate)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(H)

    def _parts(self) -> tuple[DecoderLayer, nn.Module]:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer, self.norm


class ModulesMTP(_JoinedByFc):
    """EXAONE-MoE's multi-token prediction: a module for each draft, with a layer of its own and everything else shared.

    Module ``m`` is at the same positions as the one before, reads its output there, and sees one token more: at
    position ``i`` it has token ``i+1+m`` and drafts token ``i+2+m``. So the KV of all modules but the first at the last
    positions is that of drafts until these are verified.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(qk_norm=True) for _ in range(MTP_MODULES))
        self.norm = RMSNorm(H)

    def drafts(
        self,
        target: ReadTarget,
        streams: Sequence[Tensor],
        ids: Tensor,
        anchors: Tensor,
        k: int,
        record: AttentionMap,
    ) -> Tensor:
        """Logits [B, A, k, V] of one teacher-forced draft of each of the first ``k`` modules behind each anchor."""
        hidden = target.norm(streams[-1])
        out = []
        for module, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            embedded, hidden = target.embed_tokens(ids[:, 1 + module :]), hidden[:, :-1]
            joined = self._join(hidden, embedded)
            positions = torch.arange(joined.shape[1])
            normed, attn = layer.input_layernorm(joined), layer.self_attn
            # Past the end of the text there is nothing to draft, and no label.
            at = anchors.clamp(max=len(positions) - 1)
            query = attn.queries(take(normed, at), at)
            context = (attn.keys(normed, positions), attn.values(normed))
            # The next module needs the output at every position; fused attention does not tell the weights.
            attend(query, context, at, None, record)
            hidden = self.norm(layer.finish(joined, attn.causal(normed, positions)))
            out.append(F.linear(take(hidden, at), target.embed_tokens.weight))
        return torch.stack(out[:k], dim=2)


class DFlash(nn.Module):
    """DFlash drafter: one bidirectional pass over the bonus token and ``k`` mask slots."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear(len(DFLASH_TARGET_LAYERS) * H, H, std=0.05)
        self.hidden_norm = RMSNorm(H)
        self.layers = nn.ModuleList(DecoderLayer(qk_norm=True) for _ in range(SHAPE.dflash_layers))
        self.norm = RMSNorm(H)

    def drafts(
        self,
        target: Target,
        streams: Sequence[Tensor],
        ids: Tensor,
        anchors: Tensor,
        k: int,
        record: AttentionMap,
    ) -> Tensor:
        """Logits [B, A, k, V] of ``k`` drafts behind each anchor, all in one pass."""
        batch, count = anchors.shape
        slots = k + 1
        context_in = self.hidden_norm(self.fc(torch.cat([streams[i + 1] for i in DFLASH_TARGET_LAYERS], dim=-1)))
        positions = torch.arange(ids.shape[1])
        slot_ids = torch.full((batch, count, slots), MASK)
        slot_ids[..., 0] = ids.gather(1, (anchors + 1).clamp(max=ids.shape[1] - 1))
        x = target.embed_tokens(slot_ids).flatten(1, 2)
        slot_pos = (anchors.unsqueeze(-1) + 1 + torch.arange(slots)).flatten(1)
        last = anchors.repeat_interleave(slots, 1)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            attn = layer.self_attn
            context = (attn.keys(context_in, positions), attn.values(context_in))
            normed = layer.input_layernorm(x)
            own = (
                self._shared(attn.keys(normed, slot_pos), slots),
                self._shared(attn.values(normed), slots),
            )
            x = layer.finish(x, attn.merge(attend(attn.queries(normed, slot_pos), context, last, own, record)))
        logits = F.linear(self.norm(x), target.embed_tokens.weight)
        return logits.unflatten(1, (count, slots))[:, :, 1:]

    @staticmethod
    def _shared(x: Tensor, slots: int) -> Tensor:
        """[B, h, A*S, d] → [B, h, A*S, S, d]: every slot sees all slots of its anchor."""
        grouped = x.unflatten(2, (-1, slots))
        return grouped.repeat_interleave(slots, dim=2)
