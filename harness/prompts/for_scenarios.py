"""Prompts of texts that scenarios name: longer than an engine step, with a common prefix, the turns of a conversation,
and three that share blocks behind different ones.

Their ids depend on the block size and the template alone, so that a profile can name them before they are built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from jinja2 import TemplateError

from harness.prompts.chat import Chat, Rendered, SizedText, pad
from harness.prompts.datasets import Text, Turn
from harness.prompts.model import PADDED, Layout, Prompt, make_prompt

_TALKS = 2
"""Conversations whose first turn and whole are prompts."""
_OPENINGS = (
    "You are the assistant of a bakery in a small harbour town.",
    "You work in the library of a school for nurses.",
    "You help the visitors of a museum of clocks and music boxes.",
    "You are a friendly guide for people who travel by train.",
)
"""Beginnings of system turns that differ from their first words on."""
_RULES = (
    " Answer in plain words, without foreign terms, and in at most five sentences. Say so when you do not know"
    " something, and never invent a number, a name or a date. If a question needs a calculation, show how it"
    " goes, step by step, so that somebody else can check it. Ask back when a question can be understood in more"
    " than one way. Do not repeat the question, do not praise it, and do not end with a summary. When somebody is"
    " in danger, say first what to do at once and whom to call. Recipes, lists and plans have one item a line;"
    " everything else is flowing text. Be kind to people who are angry, patient with those who ask twice, and"
    " honest with those who want to hear something else."
)
"""How all of these system turns go on."""
_JOINTS = (" … ", " ", "\n\n")
_TRIES = 12
"""How many texts are tried for a pair."""
_OTHERS = 20
"""How many other texts are tried behind the beginning of one."""


class _Lengths(NamedTuple):
    """Lengths in tokens of the prompts that are wanted, by block size and template."""

    long: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    """Length of a prompt, and how many of its blocks another one begins with, too."""


def _lengths(size: int, shortest: int, longer_than: int) -> _Lengths:
    base = (longer_than // size + 1) * size
    # The aligned length, the last one of a block, the first one, and two in the middle.
    long = (base, base + size - 1, base + size + 1, base + 2 * size + size // 2, base + 3 * size + size // 3)
    # As many blocks as hold the template's beginning and something of the text.
    least = shortest // size + 1
    ends = ((least + 2) * size - 1, (least + 3) * size + size // 3, (least + 4) * size)
    return _Lengths(long, tuple((tokens, least + n) for n, tokens in enumerate(ends)))


def scenario_prompts(
    chat: Chat, texts: Sequence[SizedText], layout: Layout, longer_than: int, dataset: str
) -> tuple[list[Prompt], tuple[str, ...]]:
    """Return the prompts, and those that cannot be made. ``texts`` that come first are used first."""
    maker = _Maker(chat, texts, layout, dataset)
    size = layout.block_size
    wanted = _lengths(size, chat.shortest, longer_than)
    for tokens in wanted.long:
        maker.fresh(f"long-{tokens:03d}", tokens)
    for tokens, shared in wanted.pairs:
        maker.pair(f"base-{tokens:03d}", f"fork-{tokens:03d}-{shared}", tokens, shared)
    waiting = wanted.long[-2]
    maker.fork(f"fork-long-{waiting:03d}-{wanted.pairs[0][1] + 1}", f"long-{waiting:03d}", wanted.pairs[0][1] + 1)
    maker.talks()
    maker.mixed()
    return maker.made, tuple(maker.lacking)


class _Maker:
    """Makes prompts one by one; each text is used once."""

    def __init__(self, chat: Chat, texts: Sequence[SizedText], layout: Layout, dataset: str) -> None:
        self._chat = chat
        self._left = list(texts)
        self._layout = layout
        self._dataset = dataset
        self._texts: dict[str, tuple[SizedText, Rendered]] = {}
        self.made: list[Prompt] = []
        self.lacking: list[str] = []

    def _keep(self, name: str, rendered: Rendered, origin: str) -> None:
        self.made.append(make_prompt(name, rendered.ids, rendered.text, self._layout, "scenario", origin))

    def _candidates(self, tokens: int, most: int | None = None) -> Iterator[SizedText]:
        """Yield the unused texts of one turn of at most ``tokens`` tokens: those with the least padding first, and of
        several within a block those that come first."""
        size = self._layout.block_size
        fitting = [t for t in self._left if t.tokens <= tokens and isinstance(t.text, str)]
        yield from sorted(fitting, key=lambda t: (tokens - t.tokens) // size)[:most]

    def fresh(self, name: str, tokens: int) -> None:
        """Make a prompt of exactly so many tokens from an unused text."""
        for text, rendered in self._rendered(tokens):
            self._use(name, text, rendered)
            return
        self.lacking.append(f"{name}: no text of at most {tokens} tokens is left")

    def _rendered(self, tokens: int) -> Iterator[tuple[SizedText, Rendered]]:
        """Yield unused texts with the prompts of exactly so many tokens that they make."""
        for text in self._candidates(tokens):
            rendered = pad(self._chat, text.text, tokens, self._layout.seed)
            if rendered is not None:
                yield text, rendered

    def _use(self, name: str, text: SizedText, rendered: Rendered) -> None:
        tokens = len(rendered.ids)
        self._left.remove(text)
        self._texts[name] = text, rendered
        self._keep(name, rendered, f"{self._dataset}, row {text.row}{PADDED}{tokens - text.tokens} tokens")

    def pair(self, name: str, fork: str, tokens: int, shared: int) -> None:
        """Make a prompt, and another one that has its first ``shared`` blocks and goes on with another text."""
        for text, rendered in islice(self._rendered(tokens), _TRIES):
            found = self._fork(text, rendered, shared)
            if found is not None:
                self._use(name, text, rendered)
                self._use_fork(fork, name, shared, found)
                return
        self.lacking.append(f"{name}, {fork}: no text of at most {tokens} tokens ends a word at {shared} blocks")

    def fork(self, name: str, subject: str, shared: int) -> None:
        """Make a prompt that has the first ``shared`` blocks of one that is there, and goes on with another text."""
        found = self._fork(*self._texts[subject], shared) if subject in self._texts else None
        if found is None:
            self.lacking.append(f"{name}: no text goes on behind the first {shared} blocks of {subject}")
        else:
            self._use_fork(name, subject, shared, found)

    def _use_fork(self, name: str, subject: str, shared: int, found: tuple[SizedText, Rendered]) -> None:
        other, rendered = found
        self._left.remove(other)
        self._keep(name, rendered, f"the first {shared} blocks of {subject}, then {self._dataset}, row {other.row}")

    def _fork(self, text: SizedText, rendered: Rendered, shared: int) -> tuple[SizedText, Rendered] | None:
        """Return another text, and the prompt of the first blocks of one and of it, which is a block and a half longer;
        None if the tokens do not come out so."""
        size = self._layout.block_size
        cut, end = shared * size, (shared + 1) * size + size // 2
        said = self._said_within(str(text.text), rendered, cut)
        # Behind the beginning there is room for a block and a half, with what the template adds at the end.
        room = self._chat.shortest + size
        for other in self._candidates(room, most=_OTHERS) if said is not None else ():
            for joint in _JOINTS if other != text else ():
                found = pad(self._chat, f"{said}{joint}{other.text}", end, self._layout.seed)
                if found is not None and found.ids[:cut] == rendered.ids[:cut] and found.ids[cut] != rendered.ids[cut]:
                    return other, found
        return None

    def _said_within(self, text: str, rendered: Rendered, tokens: int) -> str | None:
        """Return the beginning of a text that lies within the first tokens of its prompt, or None."""
        head = self._chat.text_of(rendered.ids[:tokens])
        start = rendered.text.find(text)
        if not rendered.text.startswith(head) or not 0 <= start < len(head):
            return None
        return rendered.text[start : len(head)].rstrip()

    def talks(self) -> None:
        """Make the first turn of some conversations, and all of each, which goes on from it with an answer."""
        found = [t for t in self._left if isinstance(t.text, tuple) and t.tokens <= self._layout.longest]
        for number, text in enumerate(sorted(found, key=lambda t: (-t.tokens, t.row))[:_TALKS], 1):
            turns: tuple[Turn, ...] = text.text if isinstance(text.text, tuple) else ()
            first = next(n for n, turn in enumerate(turns) if turn.role == "user") + 1
            self._left.remove(text)
            origin = f"{self._dataset}, row {text.row}"
            self._keep(f"talk-{number}-first", self._chat.render(turns[:first]), f"{origin}, its first turn")
            self._keep(f"talk-{number}-next", self._chat.render(turns), f"{origin}, all turns")
        if len(found) < _TALKS:
            self.lacking.append(f"talk-*: expected {_TALKS} unused conversations, found {len(found)}")

    def mixed(self) -> None:
        """Make ``first`` = A S T, ``second`` = B S U and ``bridge`` = B V, where A and B, which fill one block, and S,
        two or more, are a system turn."""
        made = self._mixed()
        if made is None:
            self.lacking.append(
                "mix-first, mix-bridge, mix-second: the chat template has no system turn that begins within its first "
                "block"
            )
            return
        for name, rendered in zip(("first", "bridge", "second"), made, strict=True):
            self._keep(f"mix-{name}", rendered, "blocks in common that are not a common prefix")

    def _mixed(self) -> tuple[Rendered, Rendered, Rendered] | None:
        size = self._layout.block_size
        short = sorted((t for t in self._left if isinstance(t.text, str)), key=lambda t: (t.tokens, t.row))
        asks = [t.text for t in short[:3]]
        if len(asks) < 3:
            return None
        rules = _RULES[: _sentence_end(_RULES, self._enough(size))]
        for one in _OPENINGS:
            for other in reversed(_OPENINGS):
                if one == other:
                    continue
                heads = [self._filling(opening, rules, size) for opening in (one, other)]
                if any(h is None for h in heads):
                    continue
                first, second = (self._ask(f"{h}{rules}", ask) for h, ask in zip(heads, asks, strict=False))
                bridge = self._ask(f"{heads[1]}", asks[2])
                if first and second and bridge and _are_mixed(first, bridge, second, size):
                    return first, bridge, second
        return None

    def _enough(self, size: int) -> int:
        """Return how many characters of the rules have two blocks of tokens, at least."""
        for end in range(4 * size, len(_RULES), size):
            if len(self._chat.tokens_of(_RULES[:end])) >= 2 * size:
                return end
        return len(_RULES)

    def _filling(self, opening: str, rules: str, size: int) -> str | None:
        """Return a beginning of a system turn after which the rules begin with a new block, or None."""
        for cut in (opening, opening.removesuffix(".")):
            for more in range(size):
                words = "".join(f" {w}" for w in self._chat.words[:more])
                head = f"{cut}{' Remember:' if words else ''}{words}"
                found = self._ask(head + rules, "Hello")
                if found is None:
                    return None
                if self._chat.text_of(found.ids[size:]).startswith(rules[:20]):
                    return head
        return None

    def _ask(self, system: str, ask: Text) -> Rendered | None:
        turns = (Turn("system", system), Turn("user", str(ask)))
        try:
            found = self._chat.render(turns)
        except TemplateError:
            return None
        return found if system in found.text else None


def _sentence_end(text: str, at_least: int) -> int:
    """Return where the sentence ends that reaches a position."""
    end = text.find(". ", at_least - 1)
    return len(text) if end < 0 else end + 1


def _are_mixed(first: Rendered, bridge: Rendered, second: Rendered, size: int) -> bool:
    """Return whether the second one has a block with the bridge, and the next two with the first one, in common."""
    apart = first.ids[:size] != second.ids[:size]
    same = first.ids[size : 3 * size] == second.ids[size : 3 * size] and len(first.ids) > 3 * size
    return apart and same and bridge.ids[:size] == second.ids[:size] and bridge.ids[size:][:1] != second.ids[size:][:1]
