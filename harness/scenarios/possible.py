"""Conditions without which a state cannot occur, each as a sentence about what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.history.token_ids import common_prefix
from harness.profiles.kv_layout import recurrent, target_config, windows_of
from harness.profiles.model import Profile
from harness.profiles.scenarios import Pair
from harness.prompts.lengths import blocks, held_blocks
from harness.prompts.messages import messages_of
from harness.prompts.model import Prompt


def shared_blocks(a: Prompt, b: Prompt, block_size: int) -> int:
    """Return the number of whole blocks in the common prefix of two prompts."""
    return common_prefix(a.ids, b.ids) // block_size


def fewest_held(profile: Profile, tokens: int) -> int:
    """Return the fewest KV blocks that a prompt of so many tokens holds when it is computed, by the kinds of layers of
    the target."""
    target = target_config(profile)
    return held_blocks(tokens, profile.engine.block_size, windows_of(target), recurrent(target))


def demand(names: Sequence[str], profile: Profile, prompts: Mapping[str, Prompt], limit: int | None) -> int:
    """Return the number of KV blocks that the prompts and their outputs need together."""
    size = profile.engine.block_size
    most = limit or profile.workload.max_tokens
    return sum(blocks(prompts[n].tokens + min(most, prompts[n].tokens), size) for n in names)


def answered_briefly(names: Sequence[str], prompts: Mapping[str, Prompt], least: int) -> str | None:
    """Return why some prompts cannot be asked: their known answers are shorter than ``least`` tokens."""
    short = [p for p in names if len(prompts[p].expected or ()) < least]
    if not short:
        return None
    return (
        f"expected prompts with a known answer of at least {least} tokens, found "
        f"{len(prompts[short[0]].expected or ())} of {short[0]}; name a copy prompt that is longer"
    )


def unsaid(names: Sequence[str], profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
    """Return why the chat endpoint cannot be asked some prompts: no messages are rendered to them."""
    if not profile.tokenizer_folder.is_dir():
        return None
    lost = [p for p in names if not prompts[p].planned and messages_of(profile, prompts[p]) is None]
    if not lost:
        return None
    return (
        f"expected messages that the chat template of {profile.tokenizer_folder} renders to {lost[0]} on any day, "
        "found none; name a prompt of a few turns, or leave chat out"
    )


def too_many(together: int, profile: Profile) -> str | None:
    rows = min(profile.engine.of(role).max_num_seqs for role in ("prefill", "decode"))
    if together <= rows:
        return None
    return f"expected engine.max_num_seqs of at least {together}, found {rows}; raise it or send fewer prompts together"


def pool_of(wanted: str, pool: int) -> str:
    return f"expected a KV pool (engine.kv_blocks) of {wanted}, found {pool}; change the pool or the prompts"


def no_sharing(pairs: Sequence[Pair], prompts: Mapping[str, Prompt], size: int) -> str | None:
    for pair in pairs:
        if shared_blocks(prompts[pair.donor], prompts[pair.subject], size) < 1:
            return (
                f"donor {pair.donor} and subject {pair.subject} differ in their first block of {size} tokens; name "
                "prompts that share a prefix"
            )
    return None


def unfilled(fill: Sequence[str], profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
    """Return why prompts cannot use up a pool, or None."""
    pool = profile.engine.kv_blocks
    wanted = sum(blocks(prompts[n].tokens, profile.engine.block_size) for n in fill)
    if pool is None or wanted >= pool - 1:
        return None
    return pool_of(f"at most {wanted + 1} blocks, which its fill can use up", pool)
