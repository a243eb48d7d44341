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
from pathlib import Path
from typing import NamedTuple

from harness.errors import DataError
from harness.profiles.model import PromptRecipe, ScenarioPrompts
from harness.prompts.chat import DATE, Chat, Rendered, SizedText, pad
from harness.prompts.datasets import Text, Texts
from harness.prompts.echo import echo_prompts
from harness.prompts.for_scenarios import scenario_prompts
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

_REFUSED = "with characters that have no token, or a marker of the template"


class Built(NamedTuple):
    """A set of natural prompts and what became of the other texts."""

    prompts: PromptSet
    dropped: dict[str, int]
    """Number of unused texts, by reason."""
    shortest: int
    """Tokens of the shortest prompt that the chat template allows."""
    lacking: tuple[str, ...] = ()
    """Prompts for scenarios that could not be made, with the reason."""


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
            dropped[_REFUSED] += 1
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
        raise DataError(_unusable(texts, dropped, longest))
    lacking: tuple[str, ...] = ()
    if scenarios is not None:
        # Texts that no cold prompt is made of come first.
        pool = [*too_long, *(t for t in usable if t not in taken), *(t for t in usable if t in taken)]
        more, lacking = scenario_prompts(chat, pool, layout, scenarios.longer_than, texts.source.dataset)
        prompts += more
    what = "conversations" if any(not isinstance(text, str) for _, text in texts.rows) else "first turns"
    origin = f"{what} of {texts.source.dataset}, padded by `harness prompts build`"
    prompt_set = make_prompt_set(prompts, tokenizer_folder, origin, layout, texts.source, chat.date, template)
    return Built(prompt_set, {reason: n for reason, n in dropped.items() if n}, chat.shortest, lacking)


def _unusable(texts: Texts, dropped: Mapping[str, int], longest: int) -> str:
    """Return why no prompt can be made of texts, with the number of those left out for each reason."""
    reasons = {reason: n for reason, n in dropped.items() if n}
    left_out = "; ".join(f"{n} {reason}" for reason, n in reasons.items()) or "there is none"
    remedy = (
        "give texts in the language of the tokenizer, or the tokenizer of this model"
        if max(reasons, key=reasons.__getitem__, default="") == _REFUSED
        else "give other texts, larger blocks or more blocks"
    )
    return (
        f"{texts.source.dataset}: expected texts that fit into {longest} tokens with the chat template, found none "
        f"among {len(texts.rows)}: {left_out}; {remedy}"
    )


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
