"""Conversations written by the target, with its streams: rows in step, each at its own position, refilled when done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from harness.errors import DataError
from tools.drafters.questions import Question
from tools.drafters.target import KEPT, Cache, Target, decode, prefill

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the chat template puts before the first question."""
_CHUNK = 48
"""Conversations in a file: what is lost at most if the writer is stopped."""


class Limits(NamedTuple):
    """How long conversations may become, in tokens."""

    total: int = 448
    answer: int = 160
    first_answer: int = 90
    """If a second question follows."""
    rows: int = 160
    sampled_share: float = 0.2
    """Share of the conversations whose answers are sampled, not greedy."""
    temperature: float = 0.7
    seed: int = 1


class Prompts:
    """The chat template as tokens, piece by piece; the pieces join at special tokens, so they equal the whole."""

    def __init__(self, tokenizer_file: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.prefix = self._ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        end = self.tokenizer.token_to_id("<|im_end|>")
        if end is None:
            raise DataError(f"{tokenizer_file}: expected a token <|im_end|>, found none; name the target's tokenizer")
        self.end: int = end

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def first(self, question: str) -> list[int]:
        """Return the tokens from the system prompt to the beginning of the answer."""
        return [*self.prefix, *self._ids(f"{question}<|im_end|>\n<|im_start|>assistant\n")]

    def next(self, question: str) -> list[int]:
        """Return what follows the end token of an answer: the next question."""
        return self._ids(f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


@dataclass
class Row:
    """One conversation under way: ``fed`` of its tokens are in the cache; ``spans`` are its finished answers."""

    question: Question
    part: str
    sampled: bool
    ids: list[int]
    fed: int
    start: int
    turn: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)

    def add(self, token: int, prompts: Prompts, limits: Limits) -> bool:
        """Take a token of the answer; return whether the conversation has ended."""
        self.ids.append(token)
        more = self.turn + 1 < len(self.question.turns)
        if token != prompts.end and len(self.ids) - self.start < (limits.first_answer if more else limits.answer):
            return False
        self.spans.append((self.start, len(self.ids)))
        if not more:
            return True
        self.turn += 1
        self.ids += [] if token == prompts.end else [prompts.end]
        self.ids += prompts.next(self.question.turns[self.turn])
        self.start = len(self.ids)
        return self.start + limits.answer > limits.total


class Conversation(NamedTuple):
    """A finished one: tokens, answers as spans, and streams [T, len(KEPT), H] of all tokens but the last."""

    part: str
    kind: str
    topic: str
    turns: tuple[str, ...]
    ids: Tensor
    spans: tuple[tuple[int, int], ...]
    streams: Tensor


class Writer:
    """Asks the target ``asked`` questions, ``limits.rows`` at a time."""

    def __init__(self, target: Target, prompts: Prompts, asked: Iterator[tuple[str, Question]], limits: Limits) -> None:
        self._target, self._prompts, self._asked, self._limits = target, prompts, asked, limits
        self._random = torch.Generator().manual_seed(limits.seed)
        self._cache = Cache(target, limits.rows, limits.total)
        self._streams = torch.zeros(limits.rows, limits.total, len(KEPT), target.hidden, dtype=torch.bfloat16)
        self._streams[:, : len(prompts.prefix)] = prefill(target, prompts.prefix, self._cache).to(torch.bfloat16)
        self._cache.repeat_first(len(prompts.prefix))
        self._rows: list[Row | None] = [self._new() for _ in range(limits.rows)]

    def _new(self) -> Row | None:
        for part, question in self._asked:
            ids = self._prompts.first(question.turns[0])
            if len(ids) + self._limits.answer <= self._limits.total:
                drawn = float(torch.rand((), generator=self._random))
                sampled = part == "train" and drawn < self._limits.sampled_share
                return Row(question, part, sampled, ids, len(self._prompts.prefix), len(ids))
        return None

    def step(self) -> list[Conversation]:
        """Take every row one token further; return the conversations that ended."""
        busy = [i for i, row in enumerate(self._rows) if row]
        if not busy:
            raise StopIteration
        rows = [row or next(r for r in self._rows if r) for row in self._rows]
        tokens = torch.tensor([row.ids[row.fed] for row in rows])
        positions = torch.tensor([row.fed for row in rows])
        streams = decode(self._target, tokens, positions, self._cache)
        self._streams[torch.arange(len(rows)), positions] = streams.to(torch.bfloat16)
        for i in busy:
            rows[i].fed += 1
        waiting = [i for i in busy if rows[i].fed == len(rows[i].ids)]
        ended = []
        for i, token in zip(
            waiting, self._choose(streams[waiting, -1], [rows[j].sampled for j in waiting]), strict=True
        ):
            if rows[i].add(token, self._prompts, self._limits):
                ended.append(self._finish(i, rows[i]))
                self._rows[i] = self._new()
        return ended

    def _choose(self, last: Tensor, sampled: Sequence[bool]) -> list[int]:
        """Return the next token of each row: the most likely one, or one drawn from the 40 most likely."""
        if not len(last):
            return []
        logits = self._target.logits(last)
        chosen = logits.argmax(-1)
        which = torch.tensor(sampled)
        if which.any():
            top, ids = logits[which].topk(40, -1)
            drawn = torch.multinomial((top / self._limits.temperature).softmax(-1), 1, generator=self._random)
            chosen[which] = ids.gather(1, drawn).squeeze(1)
        return [int(token) for token in chosen]

    def _finish(self, i: int, row: Row) -> Conversation:
        length = row.spans[-1][1]
        return Conversation(
            row.part,
            row.question.kind,
            row.question.topic,
            row.question.turns[: len(row.spans)],
            torch.tensor(row.ids[:length], dtype=torch.int32),
            tuple(row.spans),
            self._streams[i, : length - 1].clone(),
        )


def write(writer: Writer, out: Path, name: str, seconds: float, log: Callable[[str], None]) -> None:
    """Write conversations to files ``name``-N.pt below ``out`` until the questions or the time are used up."""
    out.mkdir(parents=True, exist_ok=True)
    begun, tokens, files = time.monotonic(), 0, 0
    ready: list[Conversation] = []
    while time.monotonic() - begun < seconds:
        try:
            ended = writer.step()
        except StopIteration:
            break
        ready += ended
        tokens += sum(stop - start for c in ended for start, stop in c.spans)
        if len(ready) >= _CHUNK:
            _save(out / f"{name}-{files:04d}.pt", ready)
            files, ready = files + 1, []
            log(f"{name}: {files} files, {tokens} answer tokens in {time.monotonic() - begun:.0f} s")
    if ready:
        _save(out / f"{name}-{files:04d}.pt", ready)
    log(f"{name}: done, {tokens} answer tokens in {time.monotonic() - begun:.0f} s")


def _save(file: Path, conversations: list[Conversation]) -> None:
    """Write a file under another name first, so that a reader never finds half of one."""
    partial = file.with_suffix(".partial")
    torch.save([c._asdict() for c in conversations], partial)
    partial.rename(file)


def read(folder: Path) -> list[Conversation]:
    """Return all conversations of a folder of such files."""
    out: list[Conversation] = []
    for file in sorted(folder.glob("*.pt")):
        out += [Conversation(**stored) for stored in torch.load(file, weights_only=True)]
    return out
