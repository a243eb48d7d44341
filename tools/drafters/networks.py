"""The drafters in torch: each computes what vLLM 0.32.0 computes for the same weights.

``Eagle3`` is ``llama_eagle3.py``, ``MTP`` is ``mimo_mtp.py``, ``DFlash`` is ``qwen3_dflash.py``; modules are named as
in their checkpoints. All begin as copies of the target's last layers.

Symbols: B conversations, T tokens, A anchors, S draft slots, h heads, g heads that share a key, d head size, H hidden
size. An *anchor* ``i`` is the last position whose streams are known; token ``i+1`` is known too, and draft ``p``
(0-based) predicts token ``i+2+p``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.drafters.target import KEPT, LayerWeights, Rotary, Target, norm

AUX = KEPT[:3]
"""Numbers of finished target layers whose streams EAGLE3 and DFlash read."""
DRAFTS = 3
DFLASH_LAYERS = 2
MASK_TOKEN = 4
"""A token of the vocabulary that no text contains (``<repo_name>``): what DFlash reads where a draft shall be."""


class Batch(NamedTuple):
    """Conversations, padded at the end: tokens [B, T], the streams behind them [B, T, len(KEPT), H], and the answer of
    each, from ``start`` [B] up to ``stop`` [B]."""

    ids: Tensor
    streams: Tensor
    start: Tensor
    stop: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self._eps)


def linear(weight: Tensor, bias: bool = False) -> nn.Linear:
    """Return a linear layer that begins with this weight, and with a bias of zero."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
    made.weight = nn.Parameter(weight.clone())
    if bias:
        nn.init.zeros_(made.bias)
    return made


def beside(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix that reads two inputs side by side."""
    return torch.cat((left, right), 1)


def faint(like: Tensor, std: float = 0.01) -> Tensor:
    return torch.randn_like(like) * std


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` [B, A] of ``x`` [B, T, H]."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class Attention(nn.Module):
    """Projections of grouped-query attention; ``wide`` ones read embedding and hidden state side by side (EAGLE3)."""

    def __init__(self, target: Target, w: LayerWeights, wide: bool, bias: bool, qk_norm: bool) -> None:
        super().__init__()
        q, k, v = ((beside(faint(m), m) if wide else m) for m in (w.q, w.k, w.v))
        self.q_proj, self.k_proj, self.v_proj = linear(q, bias), linear(k, bias), linear(v, bias)
        self.o_proj = linear(w.o)
        # Sharp from the start: two norms of weight 1 would make attention nearly flat.
        sharp = torch.full((target.head_dim,), 2.0)
        self.q_norm: nn.Module = RMSNorm(sharp, target.eps) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(sharp, target.eps) if qk_norm else nn.Identity()
        self._rotary: Rotary = target.rotary
        self._head_dim = target.head_dim

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._rotary(self.q_norm(self._heads(self.q_proj(x))), positions)

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._rotary(self.k_norm(self._heads(self.k_proj(x))), positions)

    def values(self, x: Tensor) -> Tensor:
        return self._heads(self.v_proj(x))


class GatedMLP(nn.Module):
    def __init__(self, w: LayerWeights) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(w.gate), linear(w.up), linear(w.down)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer (Llama; Qwen2 with ``bias``, Qwen3 with ``qk_norm``)."""

    def __init__(
        self, target: Target, w: LayerWeights, wide: bool = False, bias: bool = False, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(torch.ones(target.hidden) if wide else w.input_norm, target.eps)
        self.post_attention_layernorm = RMSNorm(w.post_norm, target.eps)
        self.self_attn = Attention(target, w, wide, bias, qk_norm)
        self.mlp = GatedMLP(w)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """``attended`` is what attention gathered, before its output projection."""
        x = residual + self.self_attn.o_proj(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Context(NamedTuple):
    """Keys and values [B, h, T, d] of all positions, seen by a query up to ``last`` [B, A]."""

    keys: Tensor
    values: Tensor
    last: Tensor


def attend(q: Tensor, context: Context, own_k: Tensor | None, own_v: Tensor | None) -> Tensor:
    """Attend from ``q`` [B, h, A, S, d] to the context and to the own keys [B, h, A, U, d] of each anchor.

    Keys have fewer heads than queries. Returns [B, A, S, h*d].
    """
    kv, slots, tokens = context.keys.shape[1], q.shape[3], context.keys.shape[2]
    q = q.unflatten(1, (kv, -1)) * q.shape[-1] ** -0.5
    group, anchors = q.shape[2], q.shape[3]
    scores = (q.flatten(2, 4) @ context.keys.transpose(-1, -2)).unflatten(2, (group, anchors, slots))
    hidden = torch.arange(tokens) > context.last[:, :, None]
    scores = scores.masked_fill(hidden[:, None, None, :, None], float("-inf"))
    if own_k is not None:
        scores = torch.cat((scores, torch.einsum("bkgasd,bkaud->bkgasu", q, own_k)), -1)
    weights = scores.softmax(-1)
    out = (weights[..., :tokens].flatten(2, 4) @ context.values).unflatten(2, (group, anchors, slots))
    if own_v is not None:
        out = out + torch.einsum("bkgasu,bkaud->bkgasd", weights[..., tokens:], own_v)
    return out.flatten(1, 2).permute(0, 2, 3, 1, 4).flatten(-2)


class Chain(NamedTuple):
    """What distinguishes the drafters that draft token by token, from their own last state."""

    attention: Attention
    joined: Callable[[Tensor, Tensor], Tensor]
    """Embedding and hidden state -> input of the layer."""
    normed: Callable[[Tensor], Tensor]
    """Input of the layer -> input of its projections."""
    finish: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Hidden state, input of the layer and attention -> next hidden state and the output for the head."""
    blind_start: bool = False
    """Whether position 0 reads no embedding, as vLLM's MTP layers do."""


def chained(chain: Chain, embeddings: Tensor, batch: Batch, first: Tensor, anchors: Tensor, count: int) -> Tensor:
    """Return outputs [B, A, count, H] of teacher-forced drafts; ``first`` [B, T-1, H] is the state the target gives.

    Position ``i`` of the layer holds the target's state there and the embedding of token ``i+1``.
    """
    attention, last_index = chain.attention, batch.ids.shape[1] - 1
    embedded = embeddings[batch.ids[:, 1:]]
    if chain.blind_start:
        embedded[:, 0] = 0
    whole = chain.joined(embedded, first)
    positions = torch.arange(last_index)
    normed = chain.normed(whole)
    context = Context(attention.keys(normed, positions), attention.values(normed), anchors)
    hidden, x = take(first, anchors), take(whole, anchors)
    own_k: list[Tensor] = []
    own_v: list[Tensor] = []
    outputs = []
    for step in range(count):
        at = anchors + step
        if step:
            token = batch.ids.gather(1, (at + 1).clamp(max=last_index))
            x = chain.joined(embeddings[token], hidden)
            own_k.append(attention.keys(chain.normed(x), at))
            own_v.append(attention.values(chain.normed(x)))
        q = attention.queries(chain.normed(x), at).unsqueeze(3)
        seen = (torch.stack(own_k, 3), torch.stack(own_v, 3)) if step else (None, None)
        attended = attend(q, context, *seen).squeeze(2)
        hidden, out = chain.finish(hidden, x, attended)
        outputs.append(out)
    return torch.stack(outputs, 2)


class WideLayer(DecoderLayer):
    """EAGLE3's layer: it norms embedding (``input_layernorm``) and hidden state (``hidden_norm``) apart."""

    def __init__(self, target: Target, w: LayerWeights) -> None:
        super().__init__(target, w, wide=True)
        self.hidden_norm = RMSNorm(w.input_norm, target.eps)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)


class Eagle3(nn.Module):
    """EAGLE3: fuses three streams with the next token; feeds back its state; has a head of its own for fewer words."""

    def __init__(self, target: Target, vocabulary: Tensor) -> None:
        super().__init__()
        eye = torch.eye(target.hidden)
        self.fc = linear(torch.cat((faint(eye), faint(eye), eye), 1))
        self.midlayer = WideLayer(target, target.layers[-1])
        self.norm = RMSNorm(target.norm, target.eps)
        self.lm_head = linear(target.embeddings[vocabulary])
        self.register_buffer("d2t", vocabulary - torch.arange(len(vocabulary)))
        self._embeddings = target.embeddings

    def _finish(self, hidden: Tensor, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        out = self.midlayer.finish(hidden, attended)
        return out, self.norm(out)

    def drafts(self, batch: Batch, anchors: Tensor, count: int) -> Tensor:
        first = self.fc(batch.streams[:, :-1, : len(AUX)].flatten(2))
        chain = Chain(self.midlayer.self_attn, self.midlayer.joined, lambda x: x, self._finish)
        return chained(chain, self._embeddings, batch, first, anchors, count)

    def head(self) -> Tensor:
        weight: Tensor = self.lm_head.weight
        return weight


def tokens_of(d2t: Tensor) -> Tensor:
    """Return the token of each row of EAGLE3's head, ascending, from vLLM's offsets."""
    return d2t + torch.arange(len(d2t))


class MTP(DecoderLayer):
    """One MTP layer of MiMo: reads the target's normed last stream, later its own output, and the next token."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, target.layers[-1], bias=True)
        ones, eye = torch.ones(target.hidden), torch.eye(target.hidden)
        self.token_layernorm, self.hidden_layernorm = RMSNorm(ones, target.eps), RMSNorm(ones, target.eps)
        self.final_layernorm = RMSNorm(target.norm, target.eps)
        self.input_proj = linear(beside(eye, faint(eye, 0.02)))
        self._target = target

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        out: Tensor = self.input_proj(torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), -1))
        return out

    def _finish(self, hidden: Tensor, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        out = self.final_layernorm(self.finish(x, attended))
        return out, out

    def drafts(self, batch: Batch, anchors: Tensor, count: int) -> Tensor:
        first = self._target.final(batch.streams[:, :-1, -1])
        chain = Chain(self.self_attn, self._joined, self.input_layernorm, self._finish, True)
        return chained(chain, self._target.embeddings, batch, first, anchors, count)

    def head(self) -> Tensor:
        return self._target.embeddings


class DFlash(nn.Module):
    """DFlash: all drafts at once, from mask tokens that see the context and each other."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        eye = torch.eye(target.hidden)
        self.fc = linear(torch.cat((faint(eye), faint(eye), eye), 1))
        self.hidden_norm = RMSNorm(torch.ones(target.hidden), target.eps)
        self.norm = RMSNorm(target.norm, target.eps)
        self.layers = nn.ModuleList(DecoderLayer(target, w, qk_norm=True) for w in target.layers[-DFLASH_LAYERS:])
        self._embeddings = target.embeddings

    def drafts(self, batch: Batch, anchors: Tensor, count: int) -> Tensor:
        """Return outputs [B, A, count, H]; the block always has as many slots as in the engine."""
        context = self.hidden_norm(self.fc(batch.streams[:, :, : len(AUX)].flatten(2)))
        known = batch.ids.gather(1, (anchors + 1).clamp(max=batch.ids.shape[1] - 1))
        slots = torch.full((*anchors.shape, DRAFTS + 1), MASK_TOKEN)
        slots[..., 0] = known
        at = anchors.unsqueeze(-1) + 1 + torch.arange(DRAFTS + 1)
        x = self._embeddings[slots]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            # Nobody reads the known token's slot behind the last layer.
            x = self._layer(layer, context, x, at, anchors, 1 if i == DFLASH_LAYERS - 1 else 0)
        return self.norm(x)[:, :, :count]

    def _layer(self, layer: DecoderLayer, context: Tensor, x: Tensor, at: Tensor, last: Tensor, skip: int) -> Tensor:
        attention, shape = layer.self_attn, at.shape[1:]
        positions = torch.arange(context.shape[1])
        normed = layer.input_layernorm(x)
        flat = normed.flatten(1, 2)
        own_k = attention.keys(flat, at.flatten(1)).unflatten(2, shape)
        own_v = attention.values(flat).unflatten(2, shape)
        asking = normed[:, :, skip:]
        q = attention.queries(asking.flatten(1, 2), at[:, :, skip:].flatten(1)).unflatten(2, asking.shape[1:3])
        seen = Context(attention.keys(context, positions), attention.values(context), last)
        return layer.finish(x[:, :, skip:], attend(q, seen, own_k, own_v))

    def head(self) -> Tensor:
        return self._embeddings


Drafter = Eagle3 | MTP | DFlash
