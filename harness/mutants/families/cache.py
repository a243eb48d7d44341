"""Defects of the prefix cache: blocks that it should not return, or does not find."""

from __future__ import annotations

import copy
from typing import Any

from harness.mutants.hooks import Active, patch
from harness.mutants.model import (
    BOTH_FORMS,
    LOGPROBS,
    PAIR,
    SINGLE,
    TOKENS,
    WINDOWED,
    WITH_ADAPTERS,
    Mutant,
    OwnEngines,
    Trial,
    declare,
    in_both,
    in_single,
)
from harness.mutants.targets import (
    ALLOCATE,
    CACHED,
    DRAFT_LAYERS,
    NULL_BLOCK,
    cached_blocks,
    each_step,
    forget_answers,
    kv_of,
    tells_drafter_apart,
)

declare(
    Mutant(
        "M5a",
        "cached blocks remembered over a failed admission",
        "analogue of vllm #18955, #18957",
        "decode",
        "KVCacheManager.get_computed_blocks is memoised per request until allocate_slots succeeds",
        historic=True,
    ),
    Trial(in_both("pressure"), "target-kv", TOKENS),
)


_REMEMBERED: dict[str, Any] = {}


@patch("M5a", *CACHED)
def _m5a_remember(original: Any, active: Active, self: Any, request: Any, *args: Any) -> Any:
    if not active():
        return original(self, request, *args)
    if request.request_id in _REMEMBERED:
        active.fired()
    else:
        _REMEMBERED[request.request_id] = original(self, request, *args)
    return _REMEMBERED[request.request_id]


@patch("M5a", *ALLOCATE)
def _m5a_forget(
    original: Any, active: Active, self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    blocks = original(self, request, num_new_tokens, *args, **kwargs)
    if blocks is not None:
        _REMEMBERED.pop(request.request_id, None)
    return blocks


declare(
    Mutant(
        "M5b",
        "an evicted block stays in the prefix cache",
        "analogue of vllm #18955",
        "decode",
        "BlockPool._remove_cached_block_hashes resets the hash and leaves the map entry",
        historic=True,
    ),
    Trial(in_both("refill"), "target-kv", (*TOKENS, "state-occurred")),
)


@patch("M5b", "vllm.v1.core.block_pool", "BlockPool._remove_cached_block_hashes", ("self", "block"))
def _m5b(original: Any, active: Active, self: Any, block: Any) -> Any:
    if not active():
        return original(self, block)
    hashes = [block.block_hash] if block.block_hash is not None else []
    hashes += self.cached_block_hashes_by_block.pop(block.block_id, ())
    if hashes:
        active.fired()
        block.reset_hash()
    return hashes


declare(
    Mutant(
        "N53",
        "a window gives a block back that it still sees",
        "class of vllm #47728",
        "decode",
        "while an answer is decoded, SlidingWindowManager gives back one block more than the window has left, and the "
        "request keeps reading it",
    ),
    # The block keeps what it holds until another request takes it: who has the engine to himself is answered right.
    Trial(
        in_both("given-back"),
        "target-kv",
        (*TOKENS, *LOGPROBS),
        clean=(*PAIR, *SINGLE),
        method="none",
        engines=WINDOWED,
    ),
)


@patch(
    "N53",
    "vllm.v1.core.single_type_kv_cache_manager",
    "SingleTypeKVCacheManager.remove_skipped_blocks",
    ("self", "request_id", "processed_computed_tokens", "num_prompt_tokens"),
)
def _n53(original: Any, active: Active, self: Any, request_id: str, tokens: int, prompt: int | None = None) -> Any:
    if active() and type(self).__name__ == "SlidingWindowManager" and prompt is not None and tokens > prompt:
        active.fired()
        # Beyond what the caller takes for computed, so that the window ends a block later.
        tokens += self.block_size
    return original(self, request_id, tokens, prompt)


declare(
    Mutant(
        "M7",
        "block hashes ignore what came before",
        "prefix-cache collision",
        "both",
        "kv_cache_utils.hash_block_tokens ignores the parent hash",
    ),
    Trial(in_both("shared-block"), "target-kv", (*TOKENS, "state-occurred")),
)


@patch("M7", "vllm.v1.core.kv_cache_utils", "hash_block_tokens", ("hash_function", "parent_block_hash"))
def _m7(original: Any, active: Active, hash_function: Any, parent_block_hash: Any, *args: Any, **kwargs: Any) -> Any:
    if active() and parent_block_hash:
        active.fired()
        parent_block_hash = None
    return original(hash_function, parent_block_hash, *args, **kwargs)


declare(
    Mutant(
        "N5",
        "a cached block belongs to another prompt",
        "vllm #56734, #44409",
        "decode",
        "the second block of a prefix hit is overwritten in the target's layers by the first one",
    ),
    Trial(in_both("prefix-hit"), "target-kv", TOKENS, clean=SINGLE),
)
tells_drafter_apart("N5")


@each_step("N5")
def _n5(active: Active, runner: Any, scheduler_output: Any) -> None:
    for blocks, layers in cached_blocks(runner, scheduler_output):
        if len(blocks) > 1:
            for layer in layers - DRAFT_LAYERS:
                active.fired()
                cache = kv_of(runner, layer)
                cache[blocks[1]] = cache[blocks[0]]


declare(
    Mutant(
        "N8",
        "an answer's blocks do not keep their KV",
        "class of vllm #53912",
        "decode",
        "when a request ends, the target's KV of the blocks with its output tokens, which stay in the "
        "prefix cache, is zeroed",
    ),
    Trial(in_single("continuation"), "target-kv", TOKENS, clean=SINGLE),
)
tells_drafter_apart("N8")


@each_step("N8")
def _n8(active: Active, runner: Any, scheduler_output: Any) -> None:
    forget_answers(active, runner, scheduler_output, drafter=False)


declare(
    Mutant(
        "N10",
        "a prefix hit on blocks that are not written yet",
        "class of vllm #41838, #42359",
        "decode",
        "a request that finds blocks which another one computes in the same step reads the null block instead",
    ),
    Trial(in_single("same-step"), "target-kv", TOKENS, clean=SINGLE),
)


@each_step("N10")
def _n10(active: Active, runner: Any, scheduler_output: Any) -> None:
    new, size = scheduler_output.scheduled_new_reqs, runner.cache_config.block_size
    unwritten = {b for r in new for group in r.block_ids for b in list(group)[r.num_computed_tokens // size :]}
    for request in new:
        whole = request.num_computed_tokens // size
        if any(b in unwritten for group in request.block_ids for b in list(group)[:whole]):
            active.fired()
            request.block_ids = tuple(
                [NULL_BLOCK if i < whole and b in unwritten else b for i, b in enumerate(group)]
                for group in request.block_ids
            )


declare(
    Mutant(
        "N13",
        "speculation finds nothing in the prefix cache",
        "vllm #54360, #57032",
        "both",
        "KVCacheManager.get_computed_blocks finds no block on an engine with a drafter",
    ),
    # A plain engine of the same run shows that it is a regression; the self-test's have the drafter alone.
    Trial(in_single("prefix-hit"), "nothing-tested", ("state-occurred",), clean=SINGLE, unknown=True),
)


@patch("N13", *CACHED)
def _n13(original: Any, active: Active, self: Any, request: Any, *args: Any) -> Any:
    blocks, tokens, *more = original(self, request, *args)
    if not active() or not self.use_eagle or not tokens:
        return blocks, tokens, *more
    active.fired()
    return self.empty_kv_cache_blocks, 0, *(0 for _ in more)


declare(
    Mutant(
        "N24",
        "the prefix cache ignores salts",
        "tenants that share a prefix cache although they must not",
        "both",
        "generate_block_hash_extra_keys leaves out the request's cache_salt",
    ),
    Trial(SINGLE, "target-kv", ("cold-stays-cold",), forms=BOTH_FORMS),
)


_HASHED = ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", ("request", "start_token_idx"))


def _hashes_without(mutant: str, attribute: str) -> None:
    """Declare the patch by which block hashes leave out what a request has there."""

    @patch(mutant, *_HASHED)
    def hashed(original: Any, active: Active, request: Any, *args: Any, **kwargs: Any) -> Any:
        if active() and getattr(request, attribute):
            active.fired()
            request = copy.copy(request)
            setattr(request, attribute, None)
        return original(request, *args, **kwargs)


_hashes_without("N24", "cache_salt")

declare(
    Mutant(
        "N59",
        "the prefix cache ignores LoRA adapters",
        "class of vllm #3264: blocks of one adapter given to another",
        "both",
        "generate_block_hash_extra_keys leaves out the request's adapter",
    ),
    Trial(in_both("adapters"), "target-kv", ("state-occurred",), engines=WITH_ADAPTERS, long=True),
)


_hashes_without("N59", "lora_request")

declare(
    Mutant(
        "N60",
        "the prefix cache knows adapters by their names, as salts",
        "block hashes before adapters' paths and the kinds of keys were part of them",
        "both",
        "generate_block_hash_extra_keys takes the adapter's name without its path, and neither tells it from a salt",
    ),
    Trial(in_both("adapters"), "target-kv", ("state-occurred",), engines=WITH_ADAPTERS, long=True),
)


@patch("N60", *_HASHED)
def _n60(original: Any, active: Active, request: Any, *args: Any, **kwargs: Any) -> Any:
    keys, *more = original(request, *args, **kwargs)
    if active() and keys is not None and request.lora_request:
        active.fired()
    # What hashes keys takes any tuple.
    return (tuple(key[1] for key in keys) if active() and keys is not None else keys, *more)


declare(
    Mutant(
        "N62",
        "an evicted block is not told",
        "KV events by which routers choose an engine",
        "both",
        "BlockPool._emit_block_removed_events tells of no removal",
    ),
    Trial(
        in_both("refill"),
        "kv-events",
        ("kv-events",),
        engines=OwnEngines("KV events", like="cpu-events", settings=("kv_events",)),
        long=True,
    ),
)


@patch("N62", "vllm.v1.core.block_pool", "BlockPool._emit_block_removed_events", ("self", "block_hashes"))
def _n62(original: Any, active: Active, self: Any, block_hashes: Any) -> Any:
    if not active() or not block_hashes:
        return original(self, block_hashes)
    active.fired()
    return None
