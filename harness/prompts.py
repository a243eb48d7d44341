"""Prompt sets: chat prompts as data, with token ids, stratum, hash and origin; never loose text.

File format (JSON lines): a header line, then one line per prompt. ``rows_sha256`` in the header covers all prompt
lines, so a damaged or hand-edited file is refused instead of quietly testing something else.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from harness.config import Strict, describe_validation_error
from harness.errors import DataError
from harness.files import read_json_lines, sha256_json, template_hash, tokenizer_hash, write_atomic
from harness.probe import spec
from harness.strata import Stratum, classify, target_lengths

FORMAT = "kv-acceptance-harness/prompts/1"


class PromptHeader(Strict):
    """First line of a prompt set: what the prompts were rendered with."""

    format: str
    origin: str
    tokenizer_sha256: str
    template_sha256: str
    block_size: int = Field(ge=2)
    lookahead: int = Field(ge=0)
    seed: int
    rows_sha256: str


class Prompt(Strict):
    """One chat prompt."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    stratum: Stratum
    """Stratum for the header's block size and lookahead; cells with other values classify anew."""
    tokens: int = Field(ge=1)
    ids: tuple[int, ...] = Field(min_length=1)
    text: str
    expected: tuple[int, ...] | None = None
    """Known right answer under greedy decoding, where the model's task defines one (probe models)."""
    sha256: str
    origin: str

    def stratum_for(self, block_size: int, lookahead: int) -> Stratum:
        return classify(self.tokens, block_size, lookahead)


class PromptSet(Strict):
    header: PromptHeader
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        return self.header.rows_sha256

    def check_tokenizer(self, folder: Path, source: Path) -> None:
        """Raise DataError when the prompts were rendered with another tokenizer or template."""
        for field, ours, theirs in (
            ("tokenizer", self.header.tokenizer_sha256, tokenizer_hash(folder)),
            ("chat template", self.header.template_sha256, template_hash(folder)),
        ):
            if ours != theirs:
                raise DataError(
                    f"prompt set {source}: rendered with another {field} than that of {folder} "
                    f"(expected {ours[:12]}…, found {theirs[:12]}…); rebuild it with `harness prompts build`"
                )


def prompt_digest(ids: list[int] | tuple[int, ...], text: str) -> str:
    return sha256_json({"ids": list(ids), "text": text})


def load_prompts(path: Path) -> PromptSet:
    """Load and verify a prompt set. Raises DataError on damage, duplicate ids, wrong strata or no prompts."""
    lines = list(read_json_lines(path, "prompt set"))
    if not lines:
        raise DataError(f"prompt set {path}: expected a header line and prompts, found an empty file")
    try:
        header = PromptHeader.model_validate(lines[0][1])
    except ValidationError as error:
        raise DataError(f"prompt set {path}, line 1 (header):\n{describe_validation_error(error)}") from error
    if header.format != FORMAT:
        raise DataError(f"prompt set {path}: expected format {FORMAT}, found {header.format!r}")
    prompts = []
    for number, raw in lines[1:]:
        try:
            prompt = Prompt.model_validate(raw)
        except ValidationError as error:
            raise DataError(f"prompt set {path}, line {number}:\n{describe_validation_error(error)}") from error
        _verify(prompt, header, f"prompt set {path}, line {number} ({prompt.id})")
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"prompt set {path}: expected prompts after the header, found none")
    if len({p.id for p in prompts}) != len(prompts):
        raise DataError(f"prompt set {path}: expected distinct ids, found one twice")
    if sha256_json([raw for _, raw in lines[1:]]) != header.rows_sha256:
        raise DataError(
            f"prompt set {path}: the prompts do not match the hash in the header, so lines were changed, lost or "
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
        raise DataError(f"{where}: says stratum {prompt.stratum}, but {prompt.tokens} tokens are {stratum}")


def build_probe_prompts(
    tokenizer_folder: Path, block_size: int, lookahead: int, max_blocks: int, seed: int
) -> PromptSet:
    """Render copy prompts with the tokenizer's own chat template so that every stratum is hit exactly.

    The token count is verified after rendering. Words are drawn without replacement, so every output token has one
    source position. Aligned lengths appear twice with different words: one prompt is not a sample.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    vocabulary = spec.vocabulary()
    rng = random.Random(seed)
    lengths = [t.tokens for t in target_lengths(block_size, lookahead, max_blocks, spec.PROMPT_OVERHEAD + 3)]
    lengths += [n for n in lengths if n % block_size == 0]
    prompts = []
    for number, length in enumerate(lengths):
        words = rng.sample(range(spec.FIRST_WORD, spec.VOCAB_SIZE), length - spec.PROMPT_OVERHEAD)
        message = [{"role": "user", "content": " ".join(vocabulary[w] for w in words)}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids != spec.render(words):
            raise DataError(
                f"the tokenizer of {tokenizer_folder} does not render probe prompts as specified (length {length})"
            )
        prompts.append(
            Prompt(
                id=f"copy-{length:03d}-{number:02d}",
                stratum=classify(length, block_size, lookahead),
                tokens=length,
                ids=tuple(ids),
                text=text,
                expected=tuple(spec.expected_output(ids)),
                sha256=prompt_digest(ids, text),
                origin=f"generated: {length - spec.PROMPT_OVERHEAD} distinct words, seed {seed}",
            )
        )
    header = PromptHeader(
        format=FORMAT,
        origin="copy task of the probe models, generated by `harness prompts build`",
        tokenizer_sha256=tokenizer_hash(tokenizer_folder),
        template_sha256=template_hash(tokenizer_folder),
        block_size=block_size,
        lookahead=lookahead,
        seed=seed,
        rows_sha256=sha256_json([_row(p) for p in prompts]),
    )
    return PromptSet(header=header, prompts=tuple(prompts))


def _row(prompt: Prompt) -> dict[str, Any]:
    return prompt.model_dump(mode="json")


def write_prompts(prompt_set: PromptSet, path: Path) -> None:
    rows = [prompt_set.header.model_dump(mode="json"), *map(_row, prompt_set.prompts)]
    write_atomic(path, "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows))
