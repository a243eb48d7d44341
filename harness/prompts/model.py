"""Prompt sets: chat prompts as data with token ids, stratum, hash and origin.

File format (JSON lines): a header line, then one line per prompt. ``rows_sha256`` in the header covers all prompt
lines, so a damaged or hand-edited file is refused instead of silently testing something else.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from harness.errors import DataError, UsageError
from harness.profiles.model import PromptRecipe
from harness.prompts import probe_task
from harness.prompts.lengths import Stratum, classify, target_lengths
from harness.util.files import read_json_lines, sha256_json, template_hash, tokenizer_hash, write_atomic
from harness.util.invalid_data import refused_as
from harness.util.names import SafeName
from harness.util.quiet_transformers import load_transformers
from harness.util.strict import Strict

FORMAT = "kv-acceptance-harness/prompts/1"
_BEGINNING = 500
"""Characters of a file that say whether it is a prompt set."""
_SHORTEST = 24
"""Assumed length in tokens of the shortest chat prompt: a template and a few words."""
_SHORTEST_ECHO = 60
"""The same of a prompt that asks to repeat words."""
PADDED = ", padded by "
"""Separates, in the origin of a natural prompt, the text from what was added to it."""
_PLANNED = "planned, not built"
Use = Literal["cold", "scenario", "held-out"]
"""Who sends a prompt: every run, cold; scenarios only; a second stage only."""


class TextSource(Strict):
    """The origin of texts: a dataset on the hub at a commit, or a file."""

    dataset: str
    """Organisation and name on the hub, or the name of the file."""
    config: str | None = None
    split: str | None = None
    column: str
    revision: str | None = None
    """The commit of the dataset, or the SHA-256 of the file."""


class PromptHeader(Strict):
    """The first line of a prompt set: what the prompts were rendered with."""

    format: str
    origin: str
    tokenizer_sha256: str
    template_sha256: str
    block_size: int = Field(ge=2)
    lookahead: int = Field(ge=0)
    seed: int
    rows_sha256: str
    block_sizes: tuple[int, ...] | None = None
    """Block sizes whose strata the set covers, if several; stored strata refer to ``block_size``."""
    lookaheads: tuple[int, ...] | None = None
    """Lookaheads whose strata the set covers, if several; stored strata refer to ``lookahead``."""
    source: TextSource | None = None
    """Origin of the texts of natural prompts."""
    date: str | None = None
    """The date (YYYY-MM-DD) for which a chat template that contains one was rendered."""
    template: dict[str, bool] | None = None
    """Arguments that the chat template was given, if any."""


class Prompt(Strict):
    """One chat prompt."""

    id: SafeName
    stratum: Stratum
    """Stratum for the header's block size and lookahead; cells with different values classify again."""
    tokens: int = Field(ge=1)
    ids: tuple[int, ...] = Field(min_length=1)
    text: str
    expected: tuple[int, ...] | None = None
    """Correct output under greedy decoding, if the model's task defines one (probe models)."""
    sha256: str
    origin: str
    use: Use = "cold"
    """Who sends it: every cell, only the scenarios that name it, or only a second stage."""

    @property
    def planned(self) -> bool:
        """Whether it stands for a prompt that has not been built."""
        return self.origin.startswith(_PLANNED)

    @property
    def source(self) -> str | None:
        """The text that the prompt was made of, if others may be padded copies of it, too: their answers need not be
        independent."""
        text, padded, _ = self.origin.partition(PADDED)
        return text if padded else None

    def stratum_for(self, block_size: int, lookahead: int) -> Stratum:
        return classify(self.tokens, block_size, lookahead)


class PromptSet(Strict):
    """A verified set of prompts with its header."""

    header: PromptHeader
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        return self.header.rows_sha256

    @property
    def cold(self) -> tuple[Prompt, ...]:
        return tuple(p for p in self.prompts if p.use == "cold")

    @property
    def held_out(self) -> tuple[Prompt, ...]:
        """The prompts that only a second stage sends."""
        return tuple(p for p in self.prompts if p.use == "held-out")

    def check_tokenizer(self, folder: Path, source: Path) -> None:
        """Raise DataError when the prompts were rendered with a different tokenizer or template, or there is none."""
        if not folder.is_dir():
            raise DataError(
                f"tokenizer {folder}: there is no such folder, and prompt set {source} needs it; restore it (a "
                "recorded run needs its models where they were), or record again"
            )
        for field, ours, theirs in (
            ("tokenizer", self.header.tokenizer_sha256, tokenizer_hash(folder)),
            ("chat template", self.header.template_sha256, template_hash(folder)),
        ):
            if ours != theirs:
                raise DataError(
                    f"prompt set {source}: rendered with a different {field} than that of {folder} "
                    f"(expected {ours[:12]}…, found {theirs[:12]}…); rebuild it with `harness prompts build`"
                )


def prompt_digest(ids: Sequence[int], text: str) -> str:
    return sha256_json({"ids": list(ids), "text": text})


def make_prompt(
    name: str,
    ids: Sequence[int],
    text: str,
    layout: Layout,
    use: Use,
    origin: str,
    expected: Sequence[int] | None = None,
) -> Prompt:
    """Return a prompt with its length, stratum and hash."""
    return Prompt(
        id=name,
        stratum=classify(len(ids), layout.block_size, layout.lookahead),
        tokens=len(ids),
        ids=tuple(ids),
        text=text,
        expected=None if expected is None else tuple(expected),
        sha256=prompt_digest(ids, text),
        origin=origin,
        use=use,
    )


def load_prompts(path: Path) -> PromptSet:
    """Load and verify a prompt set. Raises DataError for damage, duplicate ids, wrong strata or an empty set."""
    lines = list(read_json_lines(path, "prompt set"))
    if not lines:
        raise DataError(f"prompt set {path}: expected a header line and prompts, found an empty file")
    with refused_as(DataError, f"prompt set {path}, line 1 (header)"):
        header = PromptHeader.model_validate(lines[0][1])
    if header.format != FORMAT:
        raise DataError(f"prompt set {path}: expected format {FORMAT}, found {header.format!r}")
    prompts = []
    for number, raw in lines[1:]:
        with refused_as(DataError, f"prompt set {path}, line {number}"):
            prompt = Prompt.model_validate(raw)
        _verify(prompt, header, f"prompt set {path}, line {number} ({prompt.id})")
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"prompt set {path}: expected prompts after the header, found none")
    if len({p.id for p in prompts}) != len(prompts):
        raise DataError(f"prompt set {path}: an id stands there twice; rebuild the set with `harness prompts build`")
    if sha256_json([raw for _, raw in lines[1:]]) != header.rows_sha256:
        raise DataError(
            f"prompt set {path}: expected the prompts that the hash in the header covers, found lines changed, lost or "
            "reordered; restore the file from version control or rebuild it with `harness prompts build`"
        )
    return PromptSet(header=header, prompts=tuple(prompts))


def _verify(prompt: Prompt, header: PromptHeader, where: str) -> None:
    if prompt.tokens != len(prompt.ids):
        raise DataError(f"{where}: expected {prompt.tokens} token ids, found {len(prompt.ids)}")
    if prompt.sha256 != prompt_digest(prompt.ids, prompt.text):
        raise DataError(f"{where}: its hash does not match its ids and text; restore the file or rebuild it")
    stratum = prompt.stratum_for(header.block_size, header.lookahead)
    if stratum is not prompt.stratum:
        raise DataError(
            f"{where}: expected stratum {stratum} for {prompt.tokens} tokens, found {prompt.stratum}; rebuild the set"
        )


class SizedStratum(NamedTuple):
    """A stratum for one block size and one lookahead."""

    block_size: int
    lookahead: int
    stratum: Stratum


class Layout(NamedTuple):
    """Which prompts a set contains."""

    block_size: int = 32
    """KV block size that the strata refer to."""
    lookahead: int = 4
    """Largest lookahead of the methods (DFlash: k + 1)."""
    max_blocks: int = 5
    """Largest number of whole blocks in a cold prompt."""
    seed: int = 7
    """Seed for the choice of words."""
    per_length: int = 1
    """How many times each length occurs, with different words each time."""
    held_out: bool = False
    """Whether there are as many prompts again for a second stage."""
    more_sizes: tuple[int, ...] = ()
    """Further block sizes whose strata are covered."""
    more_lookaheads: tuple[int, ...] = ()
    """Smaller lookaheads whose strata are covered."""
    padding: int | None = None
    """Most tokens that a text is padded by; None: fewer than the largest block has."""

    @property
    def longest(self) -> int:
        """The most tokens of a cold prompt."""
        return (self.max_blocks + 1) * max(self.block_sizes) - 1

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return (self.block_size, *self.more_sizes)

    @property
    def lookaheads(self) -> tuple[int, ...]:
        """The largest first."""
        return (self.lookahead, *self.more_lookaheads)

    @classmethod
    def of_recipe(cls, recipe: PromptRecipe) -> Layout:
        """Return the layout that a recipe asks for, held-out prompts included."""
        size, *sizes = recipe.block_sizes
        lookahead, *lookaheads = sorted(set(recipe.lookaheads), reverse=True)
        more = tuple(sizes), tuple(n for n in lookaheads if n > 1)
        return cls(size, lookahead, recipe.max_blocks, recipe.seed, 1, recipe.padded, *more, recipe.padding)

    def strata_of(self, tokens: int) -> list[SizedStratum]:
        """Return every stratum that a prompt of ``tokens`` tokens counts for.

        Smaller lookaheads add only their lookahead stratum: their other strata equal or contain those of the largest.
        """
        found = []
        for size in self.block_sizes:
            found.append(SizedStratum(size, self.lookahead, classify(tokens, size, self.lookahead)))
            for lookahead in self.more_lookaheads:
                if (stratum := classify(tokens, size, lookahead)) is Stratum.LOOKAHEAD:
                    found.append(SizedStratum(size, lookahead, stratum))
        return found

    def lengths(self, minimum: int) -> list[int]:
        """Return the length in tokens of each cold prompt, at least ``minimum``.

        Aligned lengths appear twice, with different words: one prompt is not a sample.
        """
        wanted = {
            t.tokens for b in self.block_sizes for t in target_lengths(b, self.lookahead, self.max_blocks, minimum)
        }
        once = sorted(wanted)
        return self.per_length * (once + [n for n in once if any(n % b == 0 for b in self.block_sizes)])


def planned_prompts(recipe: PromptRecipe) -> PromptSet:
    """Return placeholders for the prompts that a recipe will produce: as many, as long and in the same strata.

    They serve plans alone and are never sent to an engine.
    """
    layout = Layout.of_recipe(recipe)
    lengths = layout.lengths(_SHORTEST)
    if not recipe.padded:
        # Nobody knows the lengths of texts as they are.
        asis = (lengths[n % len(lengths)] for n in range(recipe.texts or 0))
        return _planned(recipe, [_placeholder(f"planned-cold-{n}", t, "cold", layout, n) for n, t in enumerate(asis)])
    padded = filling(layout, recipe.per_stratum or 0, _SHORTEST)
    plain = [lengths[n % len(lengths)] for n in range(recipe.plain)]
    prompts: list[Prompt] = []
    uses: tuple[Use, ...] = ("cold", "held-out")
    for use in uses:
        for n, tokens in enumerate((*padded, *plain)):
            # As when prompts are built: every text of a half is used once before any is used again.
            row = n % (recipe.texts // 2) if recipe.texts else n
            prompts.append(_placeholder(f"planned-{use}-{len(prompts)}", tokens, use, layout, row))
        for n, tokens in enumerate(filling(layout, recipe.echo, _SHORTEST_ECHO)):
            name, origin = f"planned-echo-{use}-{n}", f"{_PLANNED}: words to repeat"
            prompts.append(make_prompt(name, (0,) * tokens, "", layout, use, origin))
    return _planned(recipe, prompts)


def filling(layout: Layout, per_stratum: int, minimum: int) -> list[int]:
    """Return lengths in tokens, of at least ``minimum``, that give every stratum ``per_stratum`` prompts: strata with
    the fewest lengths first, since the others fill up on the way."""
    by_stratum: dict[SizedStratum, list[int]] = {}
    for size in layout.block_sizes:
        for target in target_lengths(size, layout.lookahead, layout.max_blocks, minimum):
            for key in layout.strata_of(target.tokens):
                by_stratum.setdefault(key, []).append(target.tokens)
    count: Counter[SizedStratum] = Counter()
    out: list[int] = []
    for key, lengths in sorted(by_stratum.items(), key=lambda entry: len(entry[1])):
        for n in range(per_stratum - count[key]):
            out.append(lengths[n % len(lengths)])
            count.update(layout.strata_of(out[-1]))
    return out


def _planned(recipe: PromptRecipe, prompts: Sequence[Prompt]) -> PromptSet:
    layout = Layout.of_recipe(recipe)
    header = PromptHeader(
        format=FORMAT,
        origin=f"{_PLANNED}: {recipe.source}",
        tokenizer_sha256="",
        template_sha256="",
        block_size=layout.block_size,
        lookahead=layout.lookahead,
        seed=recipe.seed,
        rows_sha256="planned",
    )
    return PromptSet(header=header, prompts=tuple(prompts))


def _placeholder(name: str, tokens: int, use: Use, layout: Layout, row: int) -> Prompt:
    return make_prompt(name, (0,) * tokens, "", layout, use, f"{_PLANNED}: {use} text {row}{PADDED}0 tokens")


def build_probe_prompts(tokenizer_folder: Path, layout: Layout) -> PromptSet:
    """Build copy prompts for the probe models whose lengths hit every stratum exactly.

    They are rendered with the tokenizer's own chat template, and the token count is verified. Words are drawn without
    replacement, so every output token has a single source position.
    """
    maker = _ProbeMaker(tokenizer_folder, layout)
    lengths = layout.lengths(probe_task.PROMPT_OVERHEAD + 3)
    prompts = [maker.fresh(f"copy-{length:03d}-{number:02d}", length, "cold") for number, length in enumerate(lengths)]
    prompts += _scenario_prompts(maker, {p.tokens: p for p in reversed(prompts)}, layout.block_size)
    if layout.held_out:
        prompts += [
            maker.fresh(f"held-{length:03d}-{number:02d}", length, "held-out") for number, length in enumerate(lengths)
        ]
    origin = "copy task of the probe models, generated by `harness prompts build`"
    return make_prompt_set(prompts, tokenizer_folder, origin, layout)


def make_prompt_set(
    prompts: Sequence[Prompt],
    tokenizer_folder: Path,
    origin: str,
    layout: Layout,
    source: TextSource | None = None,
    date: str | None = None,
    template: Mapping[str, bool] | None = None,
) -> PromptSet:
    """Return a prompt set with the matching header."""
    header = PromptHeader(
        format=FORMAT,
        origin=origin,
        tokenizer_sha256=tokenizer_hash(tokenizer_folder),
        template_sha256=template_hash(tokenizer_folder),
        block_size=layout.block_size,
        lookahead=layout.lookahead,
        seed=layout.seed,
        rows_sha256=sha256_json([prompt_row(p) for p in prompts]),
        block_sizes=layout.block_sizes if layout.more_sizes else None,
        lookaheads=layout.lookaheads if layout.more_lookaheads else None,
        source=source,
        date=date,
        template=dict(template) if template else None,
    )
    return PromptSet(header=header, prompts=tuple(prompts))


class _ProbeMaker:
    """Renders probe prompts from word ids and verifies that the tokenizer returns the intended ids."""

    def __init__(self, tokenizer_folder: Path, layout: Layout) -> None:
        self._tokenizer = load_transformers().AutoTokenizer.from_pretrained(str(tokenizer_folder))
        self._folder = tokenizer_folder
        self._vocabulary = probe_task.vocabulary()
        self._rng = random.Random(layout.seed)
        self._layout = layout

    def words(self, count: int, without: Collection[int] = ()) -> list[int]:
        """Draw distinct word ids outside ``without``, so that every output token has a single source position."""
        known = [w for w in range(probe_task.FIRST_WORD, probe_task.VOCAB_SIZE) if w not in without]
        if count > len(known):
            raise UsageError(
                f"a prompt needs {count} distinct words, and the probe models know {len(known)}; use a smaller "
                "--block-size or --max-blocks"
            )
        return self._rng.sample(known, count)

    def fresh(self, name: str, length: int, use: Use) -> Prompt:
        """Make a prompt of ``length`` tokens with newly drawn words."""
        count = length - probe_task.PROMPT_OVERHEAD
        return self.make(name, self.words(count), use, f"generated: {count} distinct words, seed {self._layout.seed}")

    def extend(self, name: str, start: Sequence[int], length: int, origin: str) -> Prompt:
        """Make a scenario prompt of ``length`` tokens whose words begin with ``start``."""
        more = self.words(length - probe_task.PROMPT_OVERHEAD - len(start), set(start))
        return self.make(name, [*start, *more], "scenario", origin)

    def continue_(self, turn: Prompt, tokens: int) -> Prompt:
        """Make the scenario prompt of ``turn`` and the first ``tokens`` tokens of its answer, which continues it."""
        answer = turn.expected or ()
        ids = [*turn.ids, *answer[:tokens]]
        text = turn.text + " " + " ".join(self._vocabulary[w] for w in answer[:tokens])
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != ids or tokens >= len(answer):
            raise DataError(f"the tokenizer of {self._folder} gives other tokens for the continuation of {turn.id}")
        origin = f"{turn.id} and the first {tokens} tokens of its answer"
        return make_prompt(f"turn-{len(ids)}", ids, text, self._layout, "scenario", origin, answer[tokens:])

    def go_on(self, turn: Prompt, tokens: int, words: Sequence[int]) -> Prompt:
        """Make the scenario prompt of a turn, an answer that ended after ``tokens`` tokens, and other words, of which
        the first comes again at the end. Nobody knows the right answer but the plain engine."""
        ids = [*turn.ids, *(turn.expected or ())[:tokens], *words, words[0]]
        text = turn.text + " " + " ".join(self._vocabulary[w] for w in ids[turn.tokens :])
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise DataError(f"the tokenizer of {self._folder} gives other tokens for the turn after {turn.id}")
        origin = f"{turn.id}, the first {tokens} tokens of its answer, and other words"
        return make_prompt(f"next-{len(ids)}", ids, text, self._layout, "scenario", origin)

    def make(self, name: str, words: Sequence[int], use: Use, origin: str) -> Prompt:
        message = [{"role": "user", "content": " ".join(self._vocabulary[w] for w in words)}]
        text = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids != probe_task.render(list(words)):
            raise DataError(f"the tokenizer of {self._folder} does not render probe prompts as specified ({name})")
        return make_prompt(name, ids, text, self._layout, use, origin, probe_task.expected_output(ids))


def _words_of(prompt: Prompt, tokens: int) -> list[int]:
    """Return the word ids among the first ``tokens`` tokens of a probe prompt."""
    return list(prompt.ids[probe_task.FIRST_SOURCE_POSITION : tokens])


def _scenario_prompts(maker: _ProbeMaker, cold: Mapping[int, Prompt], block_size: int) -> list[Prompt]:
    """Make the prompts that scenarios need: longer than one engine step, forks of cold ones, shared middle blocks."""
    out = [maker.fresh(f"long-{n}", n, "scenario") for n in (7 * block_size - d for d in (2, 1, 0, 14))]
    for subject_length, shared in ((3 * block_size - 1, 2), (4 * block_size + block_size // 3, 3)):
        subject = cold.get(subject_length)
        if subject is not None:
            out.append(
                maker.extend(
                    f"fork-{subject.tokens:03d}-{shared}",
                    _words_of(subject, shared * block_size),
                    shared * block_size + block_size // 2,
                    f"the first {shared} blocks of {subject.id}, then other words",
                )
            )
    donor = cold.get(3 * block_size + 2 * block_size // 3)
    if donor is not None:
        # From the first token past a block to its last: two blocks contain tokens of the answer.
        lengths = range(5 * block_size + 1, 6 * block_size + 1)
        out += [maker.continue_(donor, tokens - donor.tokens) for tokens in lengths]
    long = out[3]
    out.append(
        maker.extend(
            f"fork-{long.id}-3",
            _words_of(long, 3 * block_size),
            3 * block_size + 6,
            f"the first 3 blocks of {long.id}, then other words",
        )
    )
    out += _mixed(maker, block_size)
    if donor is not None:
        others = maker.words(10, donor.ids)
        # More than a block of the answer, and ends of it at which the last step had accepted more drafts.
        out += [maker.go_on(donor, block_size + past, others) for past in (12, 15)]
    return out


def _mixed(maker: _ProbeMaker, block_size: int) -> list[Prompt]:
    """Make ``first`` = A S T, ``second`` = B S U and ``bridge`` = B V, where A and B fill one block and S two."""
    head = block_size - probe_task.FIRST_SOURCE_POSITION
    tail = block_size // 2
    words = maker.words(2 * head + 2 * block_size + 2 * tail)
    a, b = words[:head], words[head : 2 * head]
    s = words[2 * head : 2 * head + 2 * block_size]
    t, u = words[-2 * tail : -tail], words[-tail:]
    origin = "blocks in common that are not a common prefix"
    return [
        maker.make("mix-first", [*a, *s, *t], "scenario", origin),
        maker.make("mix-second", [*b, *s, *u], "scenario", origin),
        maker.extend("mix-bridge", b, 2 * block_size + 7, "the first block of mix-second, then other words"),
    ]


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as a row of the file."""
    return prompt.model_dump(mode="json")


def is_prompt_set(path: Path) -> bool:
    """Return whether a file begins as a prompt set does."""
    try:
        with path.open(encoding="utf-8") as lines:
            return FORMAT.rpartition("/")[0] in lines.readline(_BEGINNING)
    except (OSError, UnicodeDecodeError):
        return False


def write_prompts(prompt_set: PromptSet, path: Path) -> None:
    rows = [prompt_set.header.model_dump(mode="json", exclude_none=True), *map(prompt_row, prompt_set.prompts)]
    write_atomic(path, "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows))
