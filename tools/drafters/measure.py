"""What an engine will count: the walk of greedy drafts along answers that are known already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.drafters.networks import DRAFTS, Batch, Drafter, Eagle3
from tools.drafters.target import Cache, Target, prefill
from tools.drafters.train import every_anchor


class Counts(NamedTuple):
    """An engine's counters: steps with drafts, and in how many of them each draft and all before it were accepted."""

    steps: int
    accepted: tuple[int, ...]

    def plus(self, other: Counts) -> Counts:
        return Counts(
            self.steps + other.steps, tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True))
        )

    def summary(self) -> dict[str, Any]:
        """Return the counts and, for each position, the share of the steps that accepted up to it."""
        rates = [round(a / max(1, self.steps), 4) for a in self.accepted]
        return {"steps": self.steps, "accepted": list(self.accepted), "acceptance": rates}


NOTHING = Counts(0, (0,) * DRAFTS)


def walk(agreeing: Sequence[int], length: int, drafts: int = DRAFTS) -> Counts:
    """Return the counts of one answer of ``length`` tokens.

    ``agreeing[a]`` drafts in a row are right behind token ``a`` of the answer. The first token comes with the prompt;
    each step then yields the accepted drafts and one more token. What lies behind the end of the answer is not counted.
    """
    known, steps, accepted = 1, 0, [0] * drafts
    while known < length:
        right = min(agreeing[known - 1], length - known)
        accepted = [count + (position < right) for position, count in enumerate(accepted)]
        steps, known = steps + 1, known + right + 1
    return Counts(steps, tuple(accepted))


@torch.no_grad()
def reading(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> Batch:
    """Return an answer with the streams that the target has while it writes it."""
    ids = torch.tensor([*prompt, *answer])
    streams = prefill(target, ids.tolist(), Cache(target, 1, len(ids)))
    return Batch(ids[None], streams[None], torch.tensor([len(prompt)]), torch.tensor([len(ids)]))


@torch.no_grad()
def agreement(drafter: Drafter, read: Batch) -> list[int]:
    """Return for each token of an answer but the last how many drafts in a row behind it are right."""
    ids, start = read.ids[0], int(read.start[0])
    outputs = drafter.drafts(read, start - 1 + every_anchor(read), DRAFTS)[0]
    best = F.linear(outputs, drafter.head()).argmax(-1)
    if isinstance(drafter, Eagle3):
        best = best + drafter.d2t[best]
    wanted = F.pad(ids, (0, DRAFTS), value=-1)[start + 1 :].unfold(0, DRAFTS, 1)[: len(best)]
    right: Tensor = (best == wanted).long().cumprod(-1).sum(-1)
    return [int(n) for n in right]


def count(
    drafters: Sequence[Drafter], target: Target, answers: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> list[Counts]:
    """Return the counts of each drafter on pairs of prompt and answer, as token ids."""
    totals = [NOTHING for _ in drafters]
    for prompt, answer in answers:
        if len(answer) > 1:
            read = reading(target, prompt, answer)
            walks = (walk(agreement(drafter, read), len(answer)) for drafter in drafters)
            totals = [total.plus(one) for total, one in zip(totals, walks, strict=True)]
    return totals
