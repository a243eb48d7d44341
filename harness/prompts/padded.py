"""Natural prompts: questions that people asked, padded to lengths on and around block boundaries.

A text, or a conversation, is rendered with the tokenizer's chat template. If no stratum needs its length, sentences
that change nothing, or else single-token words, are added to the user's last turn until one does. Counts are those of
the rendered text, so that what is sent is what was counted.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError

from harness.errors import DataError
from harness.profiles.model import PromptRecipe, ScenarioPrompts
from harness.prompts.datasets import Conversation, Text, Texts, Turn
from harness.prompts.echo import echo_prompts, load_chat_tokenizer, single_token_words
from harness.prompts.lengths import Stratum
from harness.prompts.model import (
    PADDED,
    Layout,
    Prompt,
    PromptSet,
    SizedStratum,
    Use,
    filling,
    make_prompt,
    make_prompt_set,
)
from harness.util.files import sha256_bytes

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
                f"tokenizer {folder}: expected a chat template that knows {', '.join(unknown)}, found one that does "
                "not; correct workload.recipe.template"
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


class Built(NamedTuple):
    """A set of natural prompts and what became of the other texts."""

    prompts: PromptSet
    dropped: dict[str, int]
    """Number of unused texts, by reason."""
    shortest: int
    """Tokens of the shortest prompt that the chat template allows."""
    lacking: tuple[str, ...] = ()
    """Prompts for scenarios that could not be made, with the reason."""


class SizedText(NamedTuple):
    """A text that the tokenizer can represent."""

    row: int
    text: Text
    tokens: int
    """Length of the rendered text without padding."""


def build_from_recipe(tokenizer_folder: Path, texts: Texts, recipe: PromptRecipe) -> Built:
    """Build the prompts that a profile's recipe asks for. Raises DataError when they cannot be made."""
    layout = Layout.of_recipe(recipe)
    if recipe.per_stratum is not None:
        more = recipe.plain, recipe.echo, recipe.scenarios
        return build_natural_prompts(tokenizer_folder, texts, layout, recipe.per_stratum, DATE, recipe.template, *more)
    return build_plain_prompts(tokenizer_folder, texts, layout, recipe.texts or len(texts.rows), recipe.template)


def build_plain_prompts(
    tokenizer_folder: Path, texts: Texts, layout: Layout, count: int, template: Mapping[str, bool]
) -> Built:
    """Build a cold prompt of each text as it is, in an order by the layout's seed, up to ``count``. Raises DataError
    when there are fewer texts that the tokenizer can represent."""
    chat = Chat(tokenizer_folder, arguments=template)
    usable = [SizedText(row, text, len(chat.render(text).ids)) for row, text in texts.rows if chat.accepts(text)]
    if len(usable) < count:
        raise DataError(
            f"{texts.source.dataset}: expected {count} texts without marks of the chat template, found {len(usable)} "
            "(workload.recipe.texts); give another data set or a smaller number"
        )
    random.Random(layout.seed).shuffle(usable)
    prompts = [_prompt(t, chat.render(t.text), "cold", texts.source.dataset, layout) for t in usable[:count]]
    origin = f"first turns of {texts.source.dataset} as they are, by `harness prompts build`"
    prompt_set = make_prompt_set(prompts, tokenizer_folder, origin, layout, texts.source, chat.date, template)
    unused = {"not needed": len(usable) - count, "contains a marker of the template": len(texts.rows) - len(usable)}
    return Built(prompt_set, {reason: n for reason, n in unused.items() if n}, chat.shortest)


def build_natural_prompts(
    tokenizer_folder: Path,
    texts: Texts,
    layout: Layout,
    per_stratum: int,
    day: date = DATE,
    template: Mapping[str, bool] | None = None,
    plain: int = 0,
    echo: int = 0,
    scenarios: ScenarioPrompts | None = None,
) -> Built:
    """Build ``per_stratum`` prompts for every stratum of every block size of the layout, as far as the texts suffice,
    ``plain`` ones of texts as they are, ``echo`` ones for every stratum that ask to repeat words, and those that
    scenarios name.

    With ``held_out`` the texts are split into two disjoint halves of similar lengths. Within a half, each text is used
    once before any is used again, at a different length. Padding is less than the largest block, unless the layout
    allows more. Raises DataError when no prompt can be made.
    """
    chat = Chat(tokenizer_folder, day, template)
    longest = layout.longest
    dropped: Counter[str] = Counter()
    usable: list[SizedText] = []
    too_long: list[SizedText] = []
    for row, text in texts.rows:
        if not chat.accepts(text):
            dropped["contains characters without a token, or a marker of the template"] += 1
            continue
        sized = SizedText(row, text, len(chat.render(text).ids))
        (too_long if sized.tokens > longest else usable).append(sized)
    prompts: list[Prompt] = []
    taken: set[SizedText] = set()
    for use, half in _halves(usable, layout).items():
        filler = _Filler(chat, half, layout)
        made = filler.fill(per_stratum)
        bare = {t for t, r in made if len(r.ids) == t.tokens}
        as_is = [t for t in half if t not in bare]
        made += [(t, chat.render(t.text)) for t in as_is[:: max(1, len(as_is) // max(1, plain))][:plain]]
        prompts += [_prompt(t, r, use, texts.source.dataset, layout) for t, r in made]
        used = {t for t, _ in made}
        taken |= used
        dropped["cannot be padded to a wanted length"] += sum(t not in used and t in filler.failed for t in half)
        dropped["not needed"] += sum(t not in used and t not in filler.failed for t in half)
    if echo:
        prompts += echo_prompts(chat.render, chat.all_words(), lambda least: filling(layout, echo, least), layout)
    dropped[f"longer than {longest} tokens"] = len(too_long)
    if not any(p.use == "cold" for p in prompts):
        raise DataError(
            f"{texts.source.dataset}: expected texts that fit into {longest} tokens with the chat template, found "
            "none; give different texts, larger blocks or more blocks"
        )
    lacking: tuple[str, ...] = ()
    if scenarios is not None:
        from harness.prompts.for_scenarios import scenario_prompts

        # Texts that no cold prompt is made of come first.
        pool = [*too_long, *(t for t in usable if t not in taken), *(t for t in usable if t in taken)]
        more, lacking = scenario_prompts(chat, pool, layout, scenarios.longer_than, texts.source.dataset)
        prompts += more
    what = "conversations" if any(not isinstance(text, str) for _, text in texts.rows) else "first turns"
    origin = f"{what} of {texts.source.dataset}, padded by `harness prompts build --kind natural`"
    prompt_set = make_prompt_set(prompts, tokenizer_folder, origin, layout, texts.source, chat.date, template)
    return Built(prompt_set, {reason: n for reason, n in dropped.items() if n}, chat.shortest, lacking)


def _halves(texts: Sequence[SizedText], layout: Layout) -> dict[Use, list[SizedText]]:
    """Return the texts by use; of two texts of similar length, one goes to each half."""
    rng = random.Random(layout.seed)
    order = sorted(texts, key=lambda t: (t.tokens, sha256_bytes(_said(t.text).encode())))
    if not layout.held_out:
        return {"cold": order}
    halves: dict[Use, list[SizedText]] = {"cold": [], "held-out": []}
    for start in range(0, len(order), 2):
        pair = order[start : start + 2]
        rng.shuffle(pair)
        for half, text in zip(halves.values(), pair, strict=False):
            half.append(text)
    return halves


def _said(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(turn.content for turn in text)


class _Filler:
    """Chooses texts and lengths for one half until each stratum has its prompts."""

    def __init__(self, chat: Chat, texts: Sequence[SizedText], layout: Layout) -> None:
        self._chat = chat
        self._layout = layout
        self.failed: set[SizedText] = set()
        self._uses: Counter[SizedText] = Counter()
        self._blocks: Counter[tuple[SizedStratum, int]] = Counter()
        self._count: Counter[SizedStratum] = Counter()
        self._left: dict[SizedStratum, set[tuple[SizedText, int]]] = defaultdict(set)
        most = layout.padding if layout.padding is not None else max(layout.block_sizes) - 1
        for text in texts:
            for tokens in range(text.tokens, min(text.tokens + most, layout.longest) + 1):
                for key in layout.strata_of(tokens):
                    self._left[key].add((text, tokens))

    def fill(self, per_stratum: int) -> list[tuple[SizedText, Rendered]]:
        """Make up to ``per_stratum`` prompts per stratum, one per round, strata with the fewest candidates first."""
        made: list[tuple[SizedText, Rendered]] = []
        order = sorted(self._left, key=lambda k: (len(self._left[k]), -k.block_size, k.lookahead, k.stratum))
        for wanted in range(1, per_stratum + 1):
            for key in order:
                if self._count[key] < wanted and (found := self._one(key)) is not None:
                    made.append(found)
        return made

    def _one(self, key: SizedStratum) -> tuple[SizedText, Rendered] | None:
        """Return the next prompt of a stratum, or None when no candidate is left."""
        while self._left[key]:
            text, tokens = min(self._left[key], key=lambda c: self._cost(key, *c))
            for other in self._layout.strata_of(tokens):
                self._left[other].discard((text, tokens))
            rendered = pad(self._chat, text.text, tokens, self._layout.seed)
            if rendered is None:
                self.failed.add(text)
                continue
            self._uses[text] += 1
            for other in self._layout.strata_of(tokens):
                self._count[other] += 1
                self._blocks[other, tokens // other.block_size] += 1
            return text, rendered
        return None

    def _cost(self, key: SizedStratum, text: SizedText, tokens: int) -> tuple[int, int, int, int]:
        """Return the sort key of a candidate: unused texts first, then rare block counts, then the least padding."""
        return self._uses[text], self._blocks[key, tokens // key.block_size], tokens - text.tokens, text.row


def _prompt(text: SizedText, rendered: Rendered, use: Use, dataset: str, layout: Layout) -> Prompt:
    """Return the prompt of a text, named after its length and the text's row, which another choice does not change."""
    tokens = len(rendered.ids)
    name = f"{'natural' if use == 'cold' else 'held'}-{tokens:03d}-{text.row:03d}"
    origin = f"{dataset}, row {text.row}{PADDED}{tokens - text.tokens} tokens"
    return make_prompt(name, rendered.ids, rendered.text, layout, use, origin)


class Coverage(NamedTuple):
    """How many prompts of a set belong to one stratum."""

    key: SizedStratum
    cold: int
    held_out: int
    blocks: tuple[int, ...]
    """Numbers of whole blocks that occur among them."""


def coverage(prompts: PromptSet) -> list[Coverage]:
    """Return a row per block size and stratum of a set, empty strata included.

    Lookaheads other than the largest have a row for their lookahead stratum alone.
    """
    header = prompts.header
    layout = Layout(header.block_size, header.lookahead)._replace(
        more_sizes=(header.block_sizes or (header.block_size,))[1:],
        more_lookaheads=(header.lookaheads or (header.lookahead,))[1:],
    )
    by_key: dict[SizedStratum, list[Prompt]] = {}
    for size in layout.block_sizes:
        for stratum in Stratum:
            for lookahead in layout.lookaheads if stratum is Stratum.LOOKAHEAD else (layout.lookahead,):
                by_key[SizedStratum(size, lookahead, stratum)] = []
    for prompt in (*prompts.cold, *prompts.held_out):
        for key in layout.strata_of(prompt.tokens):
            by_key[key].append(prompt)
    out = []
    for key, mine in by_key.items():
        cold = sum(p.use == "cold" for p in mine)
        numbers = tuple(sorted({p.tokens // key.block_size for p in mine}))
        # With a lookahead of 0 or 1, no length belongs to the lookahead stratum.
        if key.stratum is not Stratum.LOOKAHEAD or key.lookahead > 1:
            out.append(Coverage(key, cold, len(mine) - cold, numbers))
    return out
