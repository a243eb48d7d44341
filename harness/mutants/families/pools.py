"""Defects of the block pool around requests that were given up."""

from __future__ import annotations

from typing import Any

from harness.mutants.hooks import Active, patch
from harness.mutants.model import SINGLE, TOKENS, Mutant, Trial, declare, in_single
from harness.mutants.targets import (
    DRAFT_LAYERS,
    FREE_BLOCKS,
    MANAGER,
    each_step,
    kv_of,
    layers_by_group,
    tells_drafter_apart,
)

declare(
    Mutant(
        "N11",
        "a request that was given up keeps a block",
        "class of vllm #46283, #58222",
        "decode",
        "the last KV block of an aborted request is never given back to the pool",
    ),
    Trial(SINGLE, "blocks-kept", ("pool-returned",), beside=in_single("abandoned")),
)


_KEPT: list[Any] = []


@patch("N11", *FREE_BLOCKS)
def _n11(original: Any, active: Active, self: Any, request: Any) -> Any:
    if active() and request.status.name == "FINISHED_ABORTED":
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0][-1:]
        if blocks:
            active.fired()
            self.kv_cache_manager.block_pool.touch(blocks)
            _KEPT.extend(blocks)
    return original(self, request)


@patch("N11", MANAGER, "KVCacheManager.reset_prefix_cache", ("self",))
def _n11_give_back(original: Any, active: Active, self: Any) -> Any:
    """Give the blocks back once the mutant is off, so that the same engines can be used for others."""
    if not active() and _KEPT:
        self.block_pool.free_blocks(_KEPT)
        _KEPT.clear()
    return original(self)


declare(
    Mutant(
        "N15",
        "blocks of a request that was given up are written later",
        "class of vllm #48633, sglang #35049",
        "decode",
        "the target's KV in blocks of an aborted request is zeroed once another request has filled them",
    ),
    Trial(in_single("abandoned"), "target-kv", TOKENS, beside=SINGLE),
)
tells_drafter_apart("N15")


_FREED: set[int] = set()
"""Blocks of aborted requests that nobody has taken yet."""


_TAKEN: list[tuple[list[int], set[str]]] = []
"""Blocks among them that a request of this step fills, with the layers of their KV-cache group."""


@patch("N15", *FREE_BLOCKS)
def _n15(original: Any, active: Active, self: Any, request: Any) -> Any:
    if active() and request.status.name == "FINISHED_ABORTED":
        for group in self.kv_cache_manager.get_block_ids(request.request_id):
            _FREED.update(group)
    return original(self, request)


@each_step("N15")
def _n15_late(active: Active, runner: Any, scheduler_output: Any) -> None:
    for blocks, layers in _TAKEN:
        active.fired()
        for layer in layers - DRAFT_LAYERS:
            kv_of(runner, layer)[blocks] = 0
    _TAKEN.clear()
    for request in scheduler_output.scheduled_new_reqs:
        for group, layers in zip(request.block_ids, layers_by_group(runner), strict=True):
            if taken := _FREED.intersection(group):
                _TAKEN.append((sorted(taken), layers))
                _FREED.difference_update(taken)
