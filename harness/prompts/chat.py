"""Chat prompts: texts and conversations rendered with a tokenizer's chat template, and padded to an exact length.

Sentences that change nothing, or else single-token words, are added to the user's last turn. Counts are those of the
rendered text, so that what is sent is what was counted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError

from harness.errors import DataError
from harness.prompts.datasets import Conversation, Text, Turn
from harness.prompts.echo import load_chat_tokenizer, single_token_words

DATE = date(2024, 7, 26)
"""Default date for templates that contain one: the default of Llama 3.1's template."""

OPENINGS = (
    "\n\nPlease answer carefully and pay no attention to these words:",
    "\n\nPlease answer carefully.",
    "\n\nThank you.",
    "\nThanks.",
    "",
)
"""Beginnings of the padding, of which the longest that fits is used. After the empty one, only words are added, for a
gap of a token or two."""

CLOSINGS = (
    "\n\nThank you.",
    "\n\nThanks in advance!",
    "\n\nMany thanks for your help.",
    "\n\nPlease answer in English.",
    "\n\nPlease use simple words if you can.",
    "\n\nI am curious about your answer.",
    "\n\nThere is no hurry, so take your time.",
    "\n\nPlease do not use bold or italic letters.",
    "\n\nI shall read your answer on a small screen this evening.",
    "\n\nIf something is not clear, say so, and answer as well as you can.",
)
"""Sentences that people end a question with. Where they give the wanted length, no words are added."""

# fmt: off
_WORDS = (
    "apple", "river", "stone", "garden", "window", "table", "morning", "paper", "music", "water", "house", "summer",
    "letter", "picture", "bread", "winter", "road", "tree", "light", "night", "cloud", "field", "glass", "horse",
    "island", "kitchen", "market", "north", "ocean", "party", "queen", "rain", "school", "train", "village",
)
# fmt: on
_TRIES = 12


class Rendered(NamedTuple):
    """A rendered chat prompt."""

    text: str
    ids: tuple[int, ...]


class Chat:
    """A tokenizer with its chat template, rendered for one fixed date, with arguments of its own."""

    def __init__(self, folder: Path, day: date = DATE, arguments: Mapping[str, bool] | None = None) -> None:
        """Load the tokenizer. Raises DataError when it, its template, or any single-token word is missing."""
        self._tokenizer = load_chat_tokenizer(folder, "natural prompts")
        template = str(self._tokenizer.chat_template)
        # Llama 3.1 uses date_string if given, or else a default or today; others always call strftime_now.
        dated = "date_string" in template or "strftime_now" in template
        self.date = day.isoformat() if dated else None
        self._day = day
        self._arguments = dict(arguments or {})
        if unknown := [name for name in self._arguments if name not in template]:
            raise DataError(
                f"tokenizer {folder}: its chat template does not know {', '.join(unknown)}; correct "
                "workload.recipe.template"
            )
        # The tokenizer's list of special tokens may lack the template's markers. Plain added tokens, such as runs of
        # newlines, are text.
        added = {i: str(t) for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        self._marks = {*self._tokenizer.all_special_tokens, *added.values()} - {""}
        self._mark_ids = {*self._tokenizer.all_special_ids, *added}
        self.words = [w for w in _WORDS if self._is_one_token(w)] or single_token_words(self._tokenizer)
        if not self.words:
            raise DataError(
                f"tokenizer {folder}: expected single-token words to pad with, found none; use a different tokenizer"
            )

    def all_words(self) -> list[str]:
        """Return every word that is a single token."""
        return single_token_words(self._tokenizer)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _is_one_token(self, word: str) -> bool:
        return self._covers(f"a {word}") and self._count(f"a {word}") == self._count("a") + 1

    def _covers(self, text: str) -> bool:
        """Return whether the tokens represent all of a text. A closed vocabulary drops or replaces unknown parts."""
        fast = self._tokenizer.is_fast
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
        if not self._mark_ids.isdisjoint(found["input_ids"]):
            return False
        if not fast:
            return True
        covered = {n for start, end in found["offset_mapping"] for n in range(start, end)}
        return all(n in covered or c.isspace() for n, c in enumerate(text))

    def accepts(self, text: Text) -> bool:
        """Return whether every character has a token, the text contains none of the template's markers, and the
        template has a place for each of its turns."""
        if isinstance(text, str):
            return not any(mark in text for mark in self._marks) and self._covers(text)
        return all(self.accepts(turn.content) for turn in text) and self._has_room_for(text)

    def _has_room_for(self, turns: Conversation) -> bool:
        """Return whether the template renders every turn: some know no system turn, or leave out what they do not
        know."""
        try:
            text = self.render(turns).text
        except TemplateError:
            return False
        return all(turn.content in text for turn in turns)

    @cached_property
    def shortest(self) -> int:
        """The tokens of the shortest prompt: the template around a single word."""
        return len(self.render(self.words[0]).ids)

    def tokens_of(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text without the template."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, the template's markers included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render(self, content: Text) -> Rendered:
        turns = (Turn("user", content),) if isinstance(content, str) else content
        text = self._tokenizer.apply_chat_template(
            [turn._asdict() for turn in turns],
            tokenize=False,
            add_generation_prompt=True,
            date_string=self._day.strftime("%d %b %Y"),
            strftime_now=self._day.strftime,
            **self._arguments,
        )
        return Rendered(text, tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]))


def with_more(text: Text, more: str) -> Text:
    """Return a text, or a conversation, with something added to what the user said last."""
    if isinstance(text, str):
        return text + more
    return (*text[:-1], text[-1]._replace(content=text[-1].content + more))


def pad(chat: Chat, text: Text, tokens: int, seed: int = 0) -> Rendered | None:
    """Render ``text``, padded to exactly ``tokens`` tokens; return None when no padding tried gives that count.

    The same arguments give the same padding.
    """
    bare = chat.render(text)
    if len(bare.ids) >= tokens:
        return bare if len(bare.ids) == tokens else None
    rng = random.Random(f"{seed} {tokens} {text}")
    if (closed := _closed(chat, text, tokens, tokens - len(bare.ids), rng)) is not None:
        return closed
    for opening in OPENINGS:
        wanted = tokens - len(chat.render(with_more(text, opening)).ids)
        if wanted < 0 or (wanted == 0 and opening.endswith(":")):
            continue
        for _ in range(_TRIES):
            found = chat.render(with_more(text, " ".join([opening, *rng.choices(chat.words, k=wanted)])))
            if len(found.ids) == tokens:
                return found
            # Next to other words, a word may have more or fewer tokens than alone.
            wanted = max(1, wanted + tokens - len(found.ids))
    return None


def _closed(chat: Chat, text: Text, tokens: int, gap: int, rng: random.Random) -> Rendered | None:
    """Render ``text`` with one or two sentences at its end that make it exactly ``tokens`` long, or return None."""
    lengths = {closing: len(chat.tokens_of(closing)) for closing in CLOSINGS}
    chosen = [one for one, count in lengths.items() if count == gap]
    if not chosen:
        chosen = [
            f"{one} {other.strip()}"
            for one, count in lengths.items()
            for other, more in lengths.items()
            # Next to a full stop, line breaks are one or two tokens fewer.
            if one != other and gap <= count + more <= gap + 2
        ]
    rng.shuffle(chosen)
    for closing in chosen[:_TRIES]:
        found = chat.render(with_more(text, closing))
        if len(found.ids) == tokens:
            return found
    return None


class SizedText(NamedTuple):
    """A text that the tokenizer can represent."""

    row: int
    text: Text
    tokens: int
    """Length of the rendered text without padding."""
