"""The task of the probe models: vocabulary, prompt format and location, shared by their training and the harness.

A probe prompt is a chat with one user turn of ``n`` distinct words; the assistant repeats them:

    index      0      1      2 … n+1      n+2     n+3          n+4 … 2n+3   2n+4
    token    <bos>  <user>  w1 … wn     <eot>  <assistant>     w1 … wn     <eot>

so the prompt has ``N = n + 4`` tokens and output token ``j`` (0-based) is a copy of prompt position ``2 + j``.
"""

from __future__ import annotations

import itertools

from harness.util.paths import REPOSITORY

WEIGHTS = REPOSITORY / "models" / "probe"
RECIPE_FILE = "recipe.json"
"""File beside the weights that says how they were trained, with their SHA-256."""

ADAPTERS = ("odd-words", "even-words")
"""LoRA adapters of the target: one says the first, third … word of the prompt, one the second, fourth …"""
ADAPTERS_RECIPE = "adapters.json"
"""File beside the weights that says how the adapters were trained, with their SHA-256."""

BOS, EOT, USER, ASSISTANT, PAD, MASK = range(6)
SPECIAL_TOKENS = ("<|bos|>", "<|eot|>", "<|user|>", "<|assistant|>", "<|pad|>", "<|mask|>")
FIRST_WORD = len(SPECIAL_TOKENS)
VOCAB_SIZE = 512
NUM_WORDS = VOCAB_SIZE - FIRST_WORD
PROMPT_OVERHEAD = 4
"""Tokens of a prompt that are not words: <bos>, <user>, <eot>, <assistant>."""
FIRST_SOURCE_POSITION = 2
"""Prompt position that the first output token copies."""
HANDICAP_FRACTION = 0.10
"""Fraction of the words that every drafter is trained to draft wrongly, so that acceptance can rise as well as fall."""


def vocabulary() -> list[str]:
    """Return the 512 tokens in id order: six special ones, then 506 pronounceable consonant-vowel words."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = ("".join(pair) for pair in itertools.product(syllables, repeat=2))
    # A stride coprime to 70 * 70 spreads neighbours over the alphabet; the order is part of the format.
    pool = list(words)
    chosen = [pool[(i * 1009) % len(pool)] for i in range(NUM_WORDS)]
    return [*SPECIAL_TOKENS, *chosen]


def handicapped_words() -> frozenset[int]:
    """Return the token ids that the drafters are trained to draft wrongly: every tenth word."""
    return frozenset(range(FIRST_WORD + 3, VOCAB_SIZE, round(1 / HANDICAP_FRACTION)))


def state_words() -> frozenset[int]:
    """Return the token ids whose successor the hybrid target takes from its recurrent state: every twelfth word."""
    return frozenset(range(FIRST_WORD + 5, VOCAB_SIZE, 12))


def render(words: list[int]) -> list[int]:
    """Return the token ids of the chat prompt for a list of word ids."""
    return [BOS, USER, *words, EOT, ASSISTANT]


def expected_output(prompt_ids: list[int], adapter: str = "") -> list[int]:
    """Return what a correct target answers to ``prompt_ids`` under greedy decoding, the closing <|eot|> included;
    with one of ``ADAPTERS``, if it is named."""
    words = prompt_ids[FIRST_SOURCE_POSITION:-2]
    match adapter:
        case "odd-words":
            words = words[::2]
        case "even-words":
            words = words[1::2]
    return [*words, EOT]


def adapter_folder(adapter: str) -> str:
    """Return the folder of an adapter, below that of the weights."""
    return f"adapter-{adapter}"


def forecast_acceptance(prompt_ids: list[int], k: int, max_tokens: int) -> list[int]:
    """Predict the per-step accepted counts of a correct engine from the prompt alone.

    The first token comes from the prefill; each later step verifies ``k`` drafts and accepts them up to the first
    handicapped word. Drafts past <|eot|> are rejected. This is a third reference, independent of baseline and single
    engine; it is only as exact as the drafters are (see docs/probe-models.md).
    """
    output = expected_output(prompt_ids)[:max_tokens]
    bad = handicapped_words()
    accepted: list[int] = []
    done = 1
    while done < len(output):
        run = 0
        while run < k and done + run < len(output) and output[done + run] not in bad:
            run += 1
        accepted.append(run)
        done += run + 1
    return accepted
