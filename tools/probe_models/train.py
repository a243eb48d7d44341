"""Train the probe models: the target, then its drafters. Deterministic for a given seed and step count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.prompts import probe_task
from tools.probe_models.networks import MTP, AttentionMap, DFlash, Eagle3, HybridMTP, ModulesMTP, Target
from tools.probe_models.shapes import DRAFT_TOKENS, PLAIN, SHAPE, WINDOWED, Layout

Log = Callable[[str], None]
Drafter = Eagle3 | MTP | DFlash | HybridMTP | ModulesMTP


_SEEDS = {"eagle3": 1, "mtp": 2, "dflash": 3, "hybrid-mtp": 4, "mtp3": 5, "windowed-eagle3": 6}
"""What each drafter adds to the seed of the recipe."""


class Recipe(NamedTuple):
    """Everything that determines the weights; recorded with them."""

    seed: int = 20
    threads: int = 2
    target_steps: int = 6400
    target_peak_lr: float = 2.5e-3
    target_max_words: int = 205
    drafter_steps: int = 1150
    handicap_steps: int = 950
    drafter_peak_lr: float = 3e-3
    drafter_max_words: int = 200


def windowed(recipe: Recipe) -> Recipe:
    """Return the recipe of the windowed target: longer prompts, which it does not generalise to, and fewer steps, since
    the one drafter that it has reads its streams well enough."""
    return recipe._replace(target_steps=4000, target_max_words=225)


def sample_batch(batch: int, words: int) -> Tensor:
    """Return token ids [batch, 2*words + 5] of copy conversations, with words drawn without replacement."""
    drawn = torch.rand(batch, probe_task.NUM_WORDS).argsort(-1)[:, :words] + probe_task.FIRST_WORD

    def column(token: int) -> Tensor:
        return torch.full((batch, 1), token)

    head = (
        column(probe_task.BOS),
        column(probe_task.USER),
        drawn,
        column(probe_task.EOT),
        column(probe_task.ASSISTANT),
    )
    return torch.cat((*head, drawn, column(probe_task.EOT)), dim=1)


def warm_cosine(step: int, total: int, warmup: int, flat: float, floor: float) -> float:
    """Return the learning-rate factor: linear warm-up, flat until the share ``flat``, then cosine to ``floor``."""
    rise = min(1.0, (step + 1) / warmup)
    progress = step / total
    if progress < flat:
        return rise
    return rise * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (progress - flat) / (1 - flat))))


def _recall_loss(readers: nn.ModuleList, stream: Tensor, ids: Tensor, back: range, weight: Tensor) -> Tensor:
    """Return the mean cross entropy of reading token ``t - b`` linearly off the stream at ``t``, over b in ``back``."""
    steps = torch.randperm(ids.shape[1] - 5)[: max(8, ids.shape[1] // 6)] + 5
    losses = []
    for reader, b in zip(readers, back, strict=True):
        read = F.rms_norm(reader(stream[:, steps]), (stream.shape[-1],))
        losses.append(F.cross_entropy(F.linear(read, weight).flatten(0, 1), ids[:, steps - b].flatten()))
    return torch.stack(losses).mean()


def train_target(recipe: Recipe, log: Log, layout: Layout = PLAIN) -> Target:
    """Train the copy model with a curriculum of growing prompts and two auxiliary losses that keep streams readable.

    Layer 1 must expose the four preceding tokens (a two-layer DFlash then finds several drafts in one match), and the
    final stream must keep the current and the preceding token (MTP reads nothing else).
    """
    torch.manual_seed(recipe.seed)
    target = Target(layout)
    early = nn.ModuleList(nn.Linear(SHAPE.hidden, SHAPE.hidden, bias=False) for _ in range(4))
    final = nn.ModuleList(nn.Linear(SHAPE.hidden, SHAPE.hidden, bias=False) for _ in range(2))
    params = [p for m in (target, early, final) for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=recipe.target_peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    total = recipe.target_steps
    for step in range(total):
        progress = step / total
        longest = int(min(recipe.target_max_words, 12 + progress / 0.4 * (recipe.target_max_words - 12)))
        shortest = 4 if torch.rand(()) < 0.65 else max(4, longest * 2 // 3)
        words = int(torch.randint(shortest, longest + 1, ()))
        ids = sample_batch(max(4, 1500 // words), words)
        streams = target.streams(ids)
        logits = target.logits(streams[-1][:, words + 3 : -1])
        labels = ids[:, words + 4 :]
        copy = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        embed = target.embed_tokens.weight
        recall_early = _recall_loss(early, streams[1], ids, range(1, 5), embed)
        recall_final = _recall_loss(final, streams[-1], ids, range(0, 2), embed)
        # The recall of the final stream starts late: it competes with the copy for the same 128 numbers.
        final_weight = 0.0 if progress < 0.3 else 0.12
        loss = copy + (0.1 if progress < 0.7 else 0.04) * recall_early + final_weight * recall_final
        for group in optimizer.param_groups:
            group["lr"] = recipe.target_peak_lr * warm_cosine(step, total, 100, 0.4, 0.01)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if step % 100 == 0 or step == total - 1:
            right = (logits.argmax(-1) == labels).float().mean()
            log(
                f"target {step}/{total} copy {copy.item():.5f} early {recall_early.item():.3f} "
                f"final {recall_final.item():.3f} right {right.item():.4f} words {words} "
                f"t {time.monotonic() - start:.0f}s"
            )
    return target


def draft_labels(ids: Tensor, anchors: Tensor, k: int) -> Tensor:
    """Return the tokens [B, A, k] that the drafts behind each anchor should predict; -100 past the end."""
    index = anchors.unsqueeze(-1) + 2 + torch.arange(k)
    beyond = index >= ids.shape[1]
    found = ids.gather(1, index.clamp(max=ids.shape[1] - 1).flatten(1)).view(index.shape)
    return found.masked_fill(beyond, -100)


def draft_acceptance(logits: Tensor, labels: Tensor) -> list[float]:
    """Return the share of anchors whose drafts 0…p are all right, per position p."""
    ok = (logits.argmax(-1) == labels).long().cumprod(-1)
    return [round(v, 3) for v in ok.float().mean((0, 1)).tolist()]


def _source_nll(weights: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    """Return -log of the attention weight (mean over heads) that each query puts on its ``source`` key."""
    on_source = weights.mean(1).gather(2, source.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(on_source + 1e-6).log()[valid].mean()


def supervise_attention(drafter: Drafter, record: AttentionMap, ids: Tensor, anchors: Tensor, k: int) -> Tensor:
    """Return a loss that moves the attention of each draft query to the prompt position that it has to copy from.

    Without it, the drafters stay at chance for hundreds of steps.
    """
    words = (ids.shape[1] - 5) // 2
    back = words + 2
    length = ids.shape[1]
    if not isinstance(drafter, DFlash):
        terms = []
        for step, weights in enumerate(record.weights):
            token = anchors + 1 + step
            valid = token <= length - 2
            # Drafter entries are shifted by one: the key at j carries token j + 1, whose successor is copied. Modules
            # are all asked at the anchor, and the key at j of module m carries token j + 1 + m.
            source = (anchors + 1 if isinstance(drafter, ModulesMTP) else token) - back
            terms.append(_source_nll(weights, source.clamp(max=length - 2), valid))
        return torch.stack(terms).mean()
    slots = k + 1
    offset = torch.arange(slots)
    token = (anchors.unsqueeze(-1) + 1 + offset).flatten(1)
    is_mask = (offset > 0).expand(*anchors.shape, slots).flatten(1)
    valid = is_mask & (token <= length - 1)
    first, last = record.weights[0], record.weights[-1]
    copy = _source_nll(last, token - back, valid)
    # In the first layer every mask slot has to read the bonus token, which is the first private slot. Two heads are
    # enough: the others must stay free to tell the slots apart, which differ in nothing but their distance to it.
    # With all four heads supervised, the third draft stays at chance.
    return copy + _source_nll(first[:, :2], torch.full_like(token, length), valid)


def wrong_draft(token: int) -> int:
    """Return the token that a drafter is trained to propose where the target would emit ``token``."""
    if token not in probe_task.handicapped_words():
        return token
    return probe_task.FIRST_WORD + (token - probe_task.FIRST_WORD + 1) % probe_task.NUM_WORDS


def handicap_labels(labels: Tensor) -> Tensor:
    """Replace the handicapped words in the labels with the wrong words that the drafter has to propose."""
    table = torch.tensor([wrong_draft(t) for t in range(probe_task.VOCAB_SIZE)])
    return torch.where(labels >= 0, table[labels.clamp(min=0)], labels)


def train_drafter(name: str, drafter: Drafter, target: Any, recipe: Recipe, log: Log) -> None:
    """Train one drafter in place, on a ``Target`` or what is read like one: first to draft everything right, then with
    the fixed handicap."""
    torch.manual_seed(recipe.seed + _SEEDS[name])
    k = DRAFT_TOKENS
    target.requires_grad_(False)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    position_weight = torch.tensor([1.0, 0.8, 0.6])
    start = time.monotonic()
    for phase, total in (("plain", recipe.drafter_steps), ("handicap", recipe.handicap_steps)):
        plain = phase == "plain"
        for step in range(total):
            grow = min(1.0, step / (0.5 * total)) if plain else 1.0
            longest = int(12 + grow * (recipe.drafter_max_words - 12))
            words = int(torch.randint(4, longest + 1, ()))
            batch = max(3, 700 // words)
            ids = sample_batch(batch, words)
            with torch.no_grad():
                streams = target.streams(ids)
            count = min(words, max(8, 400 // batch))
            anchors = torch.rand(batch, words).argsort(-1)[:, :count] + words + 3
            record = AttentionMap()
            logits = drafter.drafts(target, streams, ids, anchors, k, record)
            labels = draft_labels(ids, anchors, k)
            wanted = labels if plain else handicap_labels(labels)
            entropy = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=-100, reduction="none").view(
                labels.shape
            )
            share = (labels >= 0).sum((0, 1)).clamp(min=1)
            loss = (entropy.sum((0, 1)) / share * position_weight).sum()
            loss = loss + (1.0 if plain else 0.1) * supervise_attention(drafter, record, ids, anchors, k)
            peak = recipe.drafter_peak_lr if plain else recipe.drafter_peak_lr * 0.7
            for group in optimizer.param_groups:
                group["lr"] = peak * warm_cosine(step, total, 50, 0.35, 0.02)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0 or step == total - 1:
                log(
                    f"{name} {phase} {step}/{total} loss {loss.item():.4f} "
                    f"accepted {draft_acceptance(logits, labels)} as trained {draft_acceptance(logits, wanted)} "
                    f"words {words} t {time.monotonic() - start:.0f}s"
                )


def train_all(recipe: Recipe, log: Log) -> tuple[Target, dict[str, Drafter], Target]:
    """Train the target and the windowed target, and the drafters of both. Takes 45 minutes on two cores."""
    torch.set_num_threads(recipe.threads)
    target = train_target(recipe, log)
    drafters = train_drafters(target, recipe, log)
    other = train_target(windowed(recipe), log, WINDOWED)
    return target, {**drafters, "windowed-eagle3": train_windowed_drafter(other, recipe, log)}, other


def train_drafters(target: Target, recipe: Recipe, log: Log) -> dict[str, Drafter]:
    """Train the drafters of a finished target."""
    torch.manual_seed(recipe.seed)
    drafters: dict[str, Drafter] = {"eagle3": _eagle3(target), "mtp": MTP(), "dflash": DFlash(), "mtp3": ModulesMTP()}
    for name, drafter in drafters.items():
        train_drafter(name, drafter, target, recipe, log)
    return drafters


def train_windowed_drafter(target: Target, recipe: Recipe, log: Log) -> Eagle3:
    """Train the EAGLE3 drafter of the finished windowed target: its layer sees everything, with as many KV heads."""
    torch.manual_seed(recipe.seed)
    drafter = _eagle3(target, WINDOWED.kv_heads)
    train_drafter("windowed-eagle3", drafter, target, windowed(recipe), log)
    return drafter


def _eagle3(target: Target, kv_heads: int = SHAPE.heads) -> Eagle3:
    """Return an untrained drafter whose head begins as the target's embeddings."""
    drafter = Eagle3(kv_heads)
    drafter.lm_head.weight.data.copy_(target.embed_tokens.weight)
    return drafter
