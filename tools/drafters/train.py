"""Training: the target's answers and streams in, the drafter with the lowest loss on held-out topics out."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.drafters.networks import DRAFTS, Batch, DFlash, Drafter, Eagle3
from tools.drafters.target import Target
from tools.drafters.texts import Conversation

Log = Callable[[str], None]


class Recipe(NamedTuple):
    """Everything but data and time that determines the weights; recorded with them."""

    seed: int = 1
    vocabulary: int = 8192
    """The most frequent words of the answers, which EAGLE3's head has."""
    loss_words: int = 6144
    """How many of them the loss of the others looks at."""
    other_words: int = 1024
    """Further words, drawn anew for each step, which a drafter with the target's whole head must not prefer."""
    peak_lr: float = 1e-3
    floor: float = 0.02
    """Share of the learning rate that is left in the end."""
    warmup_steps: int = 30
    flat: float = 0.3
    """Share of the time after which the learning rate falls."""
    weight_decay: float = 0.01
    batch_tokens: int = 1000
    dflash_anchors: int = 32
    """Anchors drawn from each answer: each costs DFlash a block of its own."""
    depths: tuple[float, float] = (0.4, 0.6)
    """Shares of the time after which drafts are unrolled 2 deep, and 3 deep."""
    later: float = 0.8
    """Weight of each draft relative to the one before."""
    hard: float = 0.5
    """Weight of the target's token; the rest is for its distribution."""
    validation_items: int = 40
    validation_pause: float = 90.0
    """Seconds of training between two looks at held-out topics."""


class Item(NamedTuple):
    """One answer with all that precedes it: tokens, and streams of all but the last."""

    ids: Tensor
    streams: Tensor
    start: int


def items(conversations: Sequence[Conversation], part: str) -> list[Item]:
    """Return the answers of a part that are long enough for a draft to be wrong."""
    return [
        Item(c.ids[:stop].long(), c.streams[: stop - 1], start)
        for c in conversations
        if c.part == part
        for start, stop in c.spans
        if stop - start > DRAFTS
    ]


def frequent(training: Sequence[Item], size: int, vocabulary: int) -> Tensor:
    """Return the ``size`` most frequent tokens of the answers, in ascending order."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for item in training:
        counts += torch.bincount(item.ids[item.start :], minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def coverage(some: Sequence[Item], words: Tensor) -> float:
    """Share of the answers' tokens that are among ``words``."""
    return float(torch.isin(torch.cat([i.ids[i.start :] for i in some]), words).float().mean())


def pack(some: Sequence[Item]) -> Batch:
    """Return a batch of answers, padded with zeros."""
    return Batch(
        nn.utils.rnn.pad_sequence([i.ids for i in some], batch_first=True),
        nn.utils.rnn.pad_sequence([F.pad(i.streams.float(), (0, 0, 0, 0, 0, 1)) for i in some], batch_first=True),
        torch.tensor([i.start for i in some]),
        torch.tensor([len(i.ids) for i in some]),
    )


def groups(lengths: Sequence[int], budget: int, rng: random.Random) -> list[list[int]]:
    """Return batches of about ``budget`` tokens, in random order, each of answers of like length."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] + rng.uniform(0, 30))
    out: list[list[int]] = [[]]
    for i in order:
        longest = max(lengths[j] for j in [*out[-1], i])
        if out[-1] and longest * (len(out[-1]) + 1) > budget:
            out.append([])
        out[-1].append(i)
    rng.shuffle(out)
    return out


def batches(training: Sequence[Item], budget: int, rng: random.Random) -> Iterator[Batch]:
    """Return endless batches; every answer is used once before any is used again."""
    lengths = [len(i.ids) for i in training]
    while True:
        for group in groups(lengths, budget, rng):
            yield pack([training[i] for i in group])


def every_anchor(batch: Batch) -> Tensor:
    """Return offsets [B, A] of all anchors: offset ``a`` is the position ``start - 1 + a``."""
    longest = int((batch.stop - batch.start).max()) - 1
    return torch.arange(longest).expand(len(batch.ids), -1)


def drawn_anchors(batch: Batch, count: int) -> Tensor:
    """Return offsets [B, count] of anchors drawn from each answer."""
    length = (batch.stop - batch.start - 1).float()
    return (torch.rand(len(batch.ids), count) * length[:, None]).long()


class Words(NamedTuple):
    """The tokens that a loss looks at, and the place of each token of the vocabulary among them, or -1."""

    ids: Tensor
    place: Tensor


def words_of(ids: Tensor, vocabulary: int) -> Words:
    place = torch.full((vocabulary,), -1)
    place[ids] = torch.arange(len(ids))
    return Words(ids, place)


def distillation(logits: Tensor, teacher: Tensor, label: Tensor, hard: float) -> Tensor:
    """Cross entropy with a mixture of the target's distribution and its token; -1 is a token without a place."""
    wanted = teacher.softmax(-1)
    known = (label >= 0).float()[:, None]
    wanted = wanted * (1 - hard * known)
    wanted.scatter_add_(1, label.clamp(min=0)[:, None], hard * known)
    return -(wanted * logits.log_softmax(-1)).sum(-1).mean()


def losses(
    drafter: Drafter, target: Target, batch: Batch, offsets: Tensor, words: Words, depth: int, hard: float
) -> list[Tensor]:
    """Return the mean loss of each of ``depth`` drafts behind the anchors at ``offsets`` [B, A]."""
    last = batch.ids.shape[1] - 1
    anchors = (batch.start[:, None] - 1 + offsets).clamp(max=last - 1)
    outputs = drafter.drafts(batch, anchors, depth)
    head = drafter.head() if isinstance(drafter, Eagle3) else target.embeddings[words.ids]
    teacher_head = target.embeddings[words.ids]
    out = []
    for step in range(depth):
        goal = batch.start[:, None] + 1 + offsets + step
        row, column = (goal < batch.stop[:, None]).nonzero(as_tuple=True)
        at = goal[row, column]
        with torch.no_grad():
            teacher = F.linear(target.final(batch.streams[row, at - 1, -1]), teacher_head)
        logits = F.linear(outputs[row, column, step], head)
        out.append(distillation(logits, teacher, words.place[batch.ids[row, at]], hard))
    return out


@dataclass
class Training:
    """A drafter under training: its best weights so far, and what was seen on the way."""

    drafter: Drafter
    target: Target
    recipe: Recipe
    words: Words
    best: dict[str, Tensor] = field(default_factory=dict)
    best_loss: float = math.inf
    steps: int = 0
    entered_at: int = 0
    """Steps of an earlier training from whose weights this one goes on."""
    curve: list[dict[str, Any]] = field(default_factory=list)

    def loss_words(self) -> Words:
        """Return the words of this step's loss."""
        if isinstance(self.drafter, Eagle3):
            return self.words
        drawn = torch.randint(self.target.vocab, (self.recipe.other_words,))
        return words_of(torch.cat((self.words.ids, drawn)).unique(), self.target.vocab)

    def step(self, batch: Batch, progress: float, optimizer: torch.optim.Optimizer) -> float:
        recipe = self.recipe
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_lr * lr_factor(recipe, self.steps - self.entered_at, progress)
        if isinstance(self.drafter, DFlash):
            offsets, depth = drawn_anchors(batch, recipe.dflash_anchors), DRAFTS
        else:
            offsets, depth = every_anchor(batch), 1 + sum(progress >= share for share in recipe.depths)
        parts = losses(self.drafter, self.target, batch, offsets, self.loss_words(), depth, recipe.hard)
        weights = [recipe.later**i for i in range(depth)]
        loss = sum((w * part for w, part in zip(weights, parts, strict=True)), torch.zeros(())) / sum(weights)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        optimizer.step()
        self.steps += 1
        return float(parts[0].detach())

    @torch.no_grad()
    def look(self, validation: Sequence[Item], seconds: float, train_loss: float, log: Log) -> bool:
        """Measure the loss on held-out topics; keep the weights and return True if it is the lowest so far."""
        sums, count = [0.0] * DRAFTS, 0
        for i in range(0, len(validation), 4):
            batch = pack(validation[i : i + 4])
            parts = losses(self.drafter, self.target, batch, every_anchor(batch), self.words, DRAFTS, self.recipe.hard)
            size = int((batch.stop - batch.start).sum())
            sums, count = [a + float(b) * size for a, b in zip(sums, parts, strict=True)], count + size
        means = [round(s / count, 4) for s in sums]
        loss = sum(self.recipe.later**i * m for i, m in enumerate(means))
        self.curve.append(
            {"step": self.steps, "seconds": round(seconds), "train": round(train_loss, 4), "held_out": means}
        )
        mark = " *" if loss < self.best_loss else ""
        log(f"{self.steps} steps, {seconds:.0f} s, train {train_loss:.3f}, held out {means}{mark}")
        if loss >= self.best_loss:
            return False
        self.best_loss, self.best = loss, {k: v.clone() for k, v in self.drafter.state_dict().items()}
        return True


def lr_factor(recipe: Recipe, step: int, progress: float) -> float:
    """Return the learning-rate factor: linear warm-up, flat, then a cosine down to the floor."""
    rise = min(1.0, (step + 1) / recipe.warmup_steps)
    if progress < recipe.flat:
        return rise
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - recipe.flat) / (1 - recipe.flat))))
    return rise * (recipe.floor + (1 - recipe.floor) * fall)


def optimizer_of(drafter: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW, which lets only matrices decay."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    others = [p for p in drafter.parameters() if p.dim() <= 1]
    decay = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(decay, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=True)


def train(
    training: Training,
    data: Sequence[Item],
    validation: Sequence[Item],
    seconds: float,
    save: Callable[[], None],
    log: Log,
    entry: float = 0.0,
) -> None:
    """Train for this many seconds, the looks at held-out topics included; ``save`` is called whenever one was the best.

    The schedule follows the clock, not the steps, so that a slower machine ends in time, with weaker weights. It is
    entered at the share ``entry``.
    """
    recipe = training.recipe
    optimizer = optimizer_of(training.drafter, recipe)
    feed = batches(data, recipe.batch_tokens, random.Random(recipe.seed + training.steps))
    begun = looked = time.monotonic()
    smooth = math.nan
    if training.entered_at:
        training.look(validation, 0.0, smooth, log)
    while (gone := time.monotonic() - begun) < seconds:
        loss = training.step(next(feed), entry + (1 - entry) * gone / seconds, optimizer)
        smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
        if training.steps in (1, 5, 20, 50):
            log(f"{training.steps} steps, {time.monotonic() - begun:.1f} s, train {loss:.3f}")
        if time.monotonic() - looked > recipe.validation_pause:
            if training.look(validation, time.monotonic() - begun, smooth, log):
                save()
            looked = time.monotonic()
    if training.look(validation, time.monotonic() - begun, smooth, log):
        save()
