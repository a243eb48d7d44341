"""Shapes, vocabulary and prompt format of the probe models: the facts that training, export and prompts share.

A probe prompt is a chat with one user turn of ``n`` distinct words; the assistant repeats them:

    index      0      1      2 … n+1      n+2     n+3          n+4 … 2n+3   2n+4
    token    <bos>  <user>  w1 … wn     <eot>  <assistant>     w1 … wn     <eot>

so the prompt has ``N = n + 4`` tokens and output token ``j`` (0-based) is a copy of prompt position ``2 + j``.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

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
"""Share of the words that every drafter is trained to draft wrongly, so that acceptance can rise as well as fall."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Shape(NamedTuple):
    """Tensor shapes shared by the target and its drafters (Qwen2 / Llama / Qwen3 naming)."""

    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    head_dim: int = 32
    target_layers: int = 3
    dflash_layers: int = 2
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


SHAPE = Shape()
EAGLE3_AUX_LAYERS = (1, 2, 3)
"""Number of finished target layers whose residual stream EAGLE3 reads."""
DFLASH_TARGET_LAYERS = (0, 1, 2)
"""Target layers whose output DFlash reads (vLLM counts layers, so layer i is the stream after i + 1 layers)."""
DRAFT_TOKENS = 3


def vocabulary() -> list[str]:
    """The 512 tokens in id order: six specials, then 506 pronounceable consonant-vowel words."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = ("".join(pair) for pair in itertools.product(syllables, repeat=2))
    # A stride that shares no factor with 70*70 spreads neighbours over the alphabet; order is part of the format.
    pool = list(words)
    chosen = [pool[(i * 1009) % len(pool)] for i in range(NUM_WORDS)]
    return [*SPECIAL_TOKENS, *chosen]


def handicapped_words() -> frozenset[int]:
    """Token ids that the drafters are trained to draft wrongly: every tenth word."""
    step = round(1 / HANDICAP_FRACTION)
    return frozenset(range(FIRST_WORD + 3, VOCAB_SIZE, step))


def wrong_draft(token: int) -> int:
    """The token a drafter is trained to propose where the target would emit ``token``."""
    if token not in handicapped_words():
        return token
    return FIRST_WORD + (token - FIRST_WORD + 1) % NUM_WORDS


def render(words: list[int]) -> list[int]:
    """Token ids of the chat prompt for a list of word ids."""
    return [BOS, USER, *words, EOT, ASSISTANT]


def expected_output(prompt_ids: list[int]) -> list[int]:
    """What an undamaged target answers to ``prompt_ids`` under greedy decoding, the closing <|eot|> included."""
    return [*prompt_ids[FIRST_SOURCE_POSITION:-2], EOT]


def source_position(output_index: int) -> int:
    """Prompt position that output token ``output_index`` depends on."""
    return FIRST_SOURCE_POSITION + output_index


class DraftForecast(NamedTuple):
    """Accepted drafts per step, predicted from the prompt alone."""

    accepted: list[int]
    """Accepted drafts of each step."""
    drafted: list[int]
    """Drafted tokens of each step (the engine always drafts ``k``, unless the length limit cuts it)."""


def forecast_acceptance(prompt_ids: list[int], k: int, max_tokens: int) -> DraftForecast:
    """Predict the per-step accepted counts of an undamaged engine from the prompt alone.

    The first token comes from the prefill; each later step verifies ``k`` drafts, of which the leading run of words
    outside the handicap is accepted. Drafts past <|eot|> are rejected. This is a third reference, independent of
    baseline and single engine; it is exact only as far as the drafters are (see the probe's measured quality).
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
    return DraftForecast(accepted, [k] * len(accepted))
