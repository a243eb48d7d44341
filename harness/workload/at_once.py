"""Cold prompts that are asked several at once: which of them go together, and what is asked first to prove that this
changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.history.records import COLD, Form
from harness.profiles.cells import Cell
from harness.profiles.model import Profile
from harness.profiles.scenarios import AT_ONCE
from harness.prompts.lengths import blocks
from harness.prompts.model import Prompt
from harness.scenarios.base import Script, Send, Stage

_STEP_TOKENS = 2048
"""Tokens of a step of an engine that is not told how many: vLLM's smallest default."""
_COUNTED_ALONE = 4
"""Prompts that are asked alone where nothing has to be proven: their transfers say how many bytes a block has."""


class Item(NamedTuple):
    """One cold request."""

    prompt: Prompt
    form: Form


class AtOnce(NamedTuple):
    """How the cold requests of a cell are divided, in their order."""

    alone: int
    """Requests at the beginning that are asked one by one."""
    crowds: tuple[int, ...]
    """Sizes of the crowds behind them. What is left after these is asked one by one, too."""
    proven: bool
    """Whether crowds are asked only if the first requests, asked together as well, get the same answers then."""


class ColdRound(NamedTuple):
    """Cold requests that are under way together, or would be if crowds change nothing."""

    number: int
    """From 1; 0 for a request that is to be asked alone."""
    items: tuple[Item, ...]


def rounds(items: Sequence[Item], at_once: AtOnce | None) -> list[ColdRound]:
    """Return the cold requests in the order in which they are asked."""
    if at_once is None:
        return [ColdRound(0, (item,)) for item in items]
    first, left = list(items[: at_once.alone]), list(items[at_once.alone :])
    found = [ColdRound(0, (item,)) for item in first]
    for number, size in enumerate(at_once.crowds, 1):
        if left:
            found.append(ColdRound(number, tuple(left[:size])))
        left = left[size:]
    return [*found, *(ColdRound(0, (item,)) for item in left)]


def proof(items: Sequence[Item], at_once: AtOnce | None) -> Script | None:
    """Return the script that asks the first requests once more, together; None if nothing is to be proven."""
    if at_once is None or not at_once.proven:
        return None
    first = [item for item in items[: at_once.alone] if item.form == "ids"]
    # Held, or quick answers would be over before the next request has come, and nothing would have gone together.
    return Script(AT_ONCE, 0, (_stage(first)._replace(hold="answering"),)) if len(first) > 1 else None


def crowd(asked: ColdRound) -> Script:
    """Return the script that asks a crowd."""
    return Script(COLD, 0, (_stage(asked.items),), first=asked.number)


def _stage(items: Sequence[Item]) -> Stage:
    sends = tuple(Send(item.prompt, f"r{n}", f"c{n}", form=item.form) for n, item in enumerate(items))
    return Stage(sends, p_in_turn=True)


class _Room(NamedTuple):
    """What requests must not exceed together, so that each is computed as it is alone."""

    requests: int
    tokens: int
    """Of a step: prompts that do not fit are cut into chunks, which changes what drafters see."""
    in_turn: bool
    """Whether the harness asks another engine for each prompt's KV, one prompt after the other."""
    pools: tuple[tuple[int, int | None], ...]
    """Block size and number of blocks of each engine: one that runs out of them preempts a request."""
    answer: int
    drafts: int
    lookahead: int

    @classmethod
    def of(cls, profile: Profile, cell: Cell) -> _Room:
        method = cell.method
        engines = [profile.engine.of(role) for role in ("prefill", "decode")]
        return cls(
            min(profile.workload.at_once, *(e.max_num_seqs for e in engines)),
            min(e.max_num_batched_tokens or _STEP_TOKENS for e in engines),
            cell.topology == "pd" and not cell.routed,
            tuple(dict.fromkeys((e.block_size, e.kv_blocks) for e in engines)),
            profile.workload.max_tokens,
            method.draft_tokens,
            method.lookahead,
        )

    def has(self, items: Sequence[Item]) -> bool:
        """Return whether these requests fit together."""
        if len(items) > self.requests:
            return False
        computed = sum(1 if self.in_turn else item.prompt.tokens for item in items)
        if computed + len(items) * (self.drafts + 1) > self.tokens:
            return False
        lengths = [item.prompt.tokens + self._answer(item.prompt) + self.lookahead for item in items]
        # One block of a pool stands for none.
        return all(pool is None or sum(blocks(n, size) for n in lengths) < pool for size, pool in self.pools)

    def _answer(self, prompt: Prompt) -> int:
        return min(self.answer, len(prompt.expected) + 1) if prompt.expected else self.answer


def arranged(items: Sequence[Item], profile: Profile, cell: Cell) -> tuple[list[Item], AtOnce | None]:
    """Divide cold requests into crowds of at most ``workload.at_once``; return them in their new order.

    In the tiers that compare answers one by one, the largest crowd is moved to the front, where it is asked one by one
    and then together. In the normal tier noise of crowds is part of what registered tests compare with.
    """
    room = _Room.of(profile, cell)
    if profile.judging.tier == "normal":
        first, crowds = list(items[:_COUNTED_ALONE]), _packed(items[_COUNTED_ALONE:], room)
    else:
        crowds = _packed(items, room)
        first = max(crowds, key=_by_ids, default=[])
        crowds = [c for c in crowds if c is not first]
    if all(len(c) < 2 for c in (first, *crowds)) or not crowds:
        return list(items), None
    divided = AtOnce(len(first), tuple(map(len, crowds)), profile.judging.tier != "normal")
    return [item for c in (first, *crowds) for item in c], divided


def _by_ids(items: Sequence[Item]) -> int:
    return sum(item.form == "ids" for item in items)


def _packed(items: Sequence[Item], room: _Room) -> list[list[Item]]:
    """Divide requests into crowds: each begins with the first that is left, and takes the next ones that fit."""
    left, crowds = list(items), list[list[Item]]()
    while left:
        chosen, others = left[:1], list[Item]()
        for item in left[1:]:
            (chosen if room.has([*chosen, item]) else others).append(item)
        crowds.append(chosen)
        left = others
    return crowds
