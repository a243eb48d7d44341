"""Defects of the hand-off from P to D: wrong blocks, blocks that are freed early, KV that does not arrive."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from harness.mutants.hooks import Active, Change, patch
from harness.mutants.model import (
    LOGPROBS,
    PAIR,
    RECURRENT,
    SINGLE,
    TOKENS,
    WINDOWED,
    WITH_ADAPTERS,
    Borrowed,
    Mutant,
    OwnEngines,
    Trial,
    declare,
    in_pair,
    in_single,
)
from harness.mutants.targets import (
    ALLOCATE,
    ARRIVAL,
    BATCH,
    BLOCK_IDS,
    DRAFT_LAYERS,
    FINISHED,
    NIXL,
    READ,
    SCHEDULER,
    V2,
    each_step,
    kv_of,
    layers_by_group,
    lose_token,
    on_arrival,
    tells_drafter_apart,
)

_RESTARTED_P = OwnEngines(
    "a P that is restarted, and reads from D",
    like="cpu-back",
    settings=("kv_connector_extra_config",),
    pool=True,
    # Each prompt is a restart.
    scenarios=(Borrowed("cpu-full", "restarted-p", ("copy-117-22",)), Borrowed("cpu-back", "read-back")),
)


declare(
    Mutant(
        "M1",
        "P publishes its lookahead blocks",
        "vllm #43807, #43996; fixed by #46694",
        "prefill",
        "KVCacheManager.get_block_ids_for_computed_tokens returns all block ids of the request",
        historic=True,
    ),
    Trial(PAIR, "target-kv", TOKENS, prompts="short", spills_only=True, needs_drafts=True),
)


@patch("M1", *BLOCK_IDS)
def _m1(original: Any, active: Active, self: Any, request_id: str, num_computed_tokens: int) -> Any:
    if not active():
        return original(self, request_id, num_computed_tokens)
    active.fired()
    return self.get_block_ids(request_id)


declare(
    Mutant(
        "M1c",
        "P publishes its lookahead blocks after a prefill in chunks",
        "vllm #43807 as it was in 0.21 to 0.22.1",
        "prefill",
        "as M1, for requests whose prompt was computed in more than one step",
    ),
    Trial(in_pair("chunked-prefill"), "target-kv", TOKENS, clean=PAIR, needs_drafts=True),
)


_STEPS: dict[str, int] = {}


@patch("M1c", *ALLOCATE)
def _m1c_count(
    original: Any, active: Active, self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    if active():
        _STEPS[request.request_id] = _STEPS.get(request.request_id, 0) + 1
    return original(self, request, num_new_tokens, *args, **kwargs)


@patch("M1c", *BLOCK_IDS)
def _m1c(original: Any, active: Active, self: Any, request_id: str, num_computed_tokens: int) -> Any:
    if not active() or _STEPS.pop(request_id, 0) < 2:
        return original(self, request_id, num_computed_tokens)
    active.fired()
    return self.get_block_ids(request_id)


declare(
    Mutant(
        "M1d",
        "D pairs its uncached suffix with P's first blocks",
        "the other half of vllm #43807",
        "decode",
        "NixlBaseConnectorWorker._apply_prefix_caching keeps the front instead of the suffix",
    ),
    Trial(in_pair("prefix-hit"), "target-kv", TOKENS, clean=PAIR),
)


_APPLY_PREFIX = (
    f"{NIXL}.base_worker",
    "NixlBaseConnectorWorker._apply_prefix_caching",
    ("self", "decode_block_ids", "prefill_block_ids"),
)


@patch("M1d", *_APPLY_PREFIX)
@patch("N26", *_APPLY_PREFIX)
def _m1d(
    original: Any, active: Active, self: Any, decode_block_ids: Any, prefill_block_ids: Any, *args: Any, **kwargs: Any
) -> Any:
    if active():
        pairs = list(zip(decode_block_ids, prefill_block_ids, strict=True))
        if any(len(mine) < len(theirs) for mine, theirs in pairs):
            active.fired()
        prefill_block_ids = [list(theirs)[: len(mine)] for mine, theirs in pairs]
    return original(self, decode_block_ids, prefill_block_ids, *args, **kwargs)


declare(
    Mutant(
        "M6",
        "P frees blocks before D has read them",
        "class of vllm #45357",
        "prefill",
        "NixlPullConnectorScheduler.request_finished answers that the blocks may be freed",
    ),
    Trial(in_pair("late-pull"), "target-kv", TOKENS),
)


@patch("M6", *FINISHED)
def _m6(original: Any, active: Active, self: Any, request: Any, block_ids: Any) -> Any:
    keep, params = original(self, request, block_ids)
    if not active() or not keep:
        return keep, params
    active.fired()
    self._reqs_need_send.pop(request.request_id, None)
    # As for an aborted prefill; otherwise P crashes on D's notification about a request that it has forgotten.
    self._reqs_not_processed.add(request.request_id)
    return False, params


declare(
    Mutant(
        "N1",
        "P's lease ends before D reads",
        "lease expiry of the NIXL connector",
        "prefill",
        "the lease of a finished prefill ends at once",
    ),
    Trial(in_pair("late-pull"), "target-kv", (*TOKENS, "transfer")),
)


@patch("N1", *FINISHED)
def _n1(original: Any, active: Active, self: Any, request: Any, block_ids: Any) -> Any:
    keep, params = original(self, request, block_ids)
    if active() and keep:
        active.fired()
        self._reqs_need_send[request.request_id] = time.perf_counter()
    return keep, params


declare(
    Mutant(
        "N2",
        "blocks are zeroed after the transfer",
        "vllm #48481",
        "decode",
        "the second received block of the target's layers is zeroed when the transfer completes",
    ),
    Trial(PAIR, "target-kv", TOKENS, clean=SINGLE),
)
tells_drafter_apart("N2")


@patch("N2", *ARRIVAL)
@on_arrival
def _n2(worker: Any, blocks: list[int], layers: set[str]) -> bool:
    lost = layers - DRAFT_LAYERS if len(blocks) > 1 else set()
    for layer in lost:
        worker.device_kv_caches[layer][blocks[1]] = 0
    return bool(lost)


declare(
    Mutant(
        "N3",
        "a failed receive is answered with 200",
        "vllm #52234",
        "decode",
        "D reads nothing and reports the transfer as done",
    ),
    Trial(PAIR, "target-kv", (*TOKENS, "transfer")),
)


def _of_nothing(read_spec: Any) -> Any:
    """Return what D is to read from P, without any block."""
    nothing: dict[str, Any] = {
        name: [[] for _ in getattr(read_spec, name)] for name in ("local_block_ids", "remote_block_ids")
    }
    return dataclasses.replace(read_spec, **nothing)


@patch("N3", *READ)
def _n3(original: Any, active: Active, self: Any, read_spec: Any, dst_engine_id: str, *args: Any, **kwargs: Any) -> Any:
    if active():
        active.fired()
        read_spec = _of_nothing(read_spec)
    return original(self, read_spec, dst_engine_id, *args, **kwargs)


declare(
    Mutant(
        "N7",
        "the last layer's KV never arrives",
        "a layer that the transfer does not register",
        "decode",
        "the received KV of the target's last layer is zeroed when the transfer completes; all tokens stay right",
    ),
    Trial(PAIR, "target-kv", LOGPROBS, clean=SINGLE),
)
tells_drafter_apart("N7")


def _depth(layer: str) -> int:
    """Return the number of a layer from its name, as in ``model.layers.2.self_attn.attn``."""
    return next((int(part) for part in layer.split(".") if part.isdigit()), -1)


@patch("N7", *ARRIVAL)
@on_arrival
def _n7(worker: Any, blocks: list[int], layers: set[str]) -> bool:
    last = max(set(worker.device_kv_caches) - DRAFT_LAYERS, key=_depth)
    if last in layers:
        worker.device_kv_caches[last][blocks] = 0
    return last in layers


declare(
    Mutant(
        "N12",
        "a request whose transfer failed is not computed again",
        "class of vllm #49250",
        "decode",
        "after a failed load, D takes the tokens that were not fetched for computed and goes on from there",
    ),
    Trial(in_pair("recovery"), "target-kv", TOKENS, clean=PAIR),
)


def _keeping_count(requests: Iterable[Any], active: Active, lower: Callable[[], Any]) -> Any:
    """Call ``lower``, which lowers how many tokens of the requests count as computed, and put the numbers back."""
    before = {request.request_id: (request, request.num_computed_tokens) for request in requests}
    result = lower()
    for request, count in before.values():
        if request.num_computed_tokens != count:
            active.fired()
            request.num_computed_tokens = count
    return result


@patch("N12", SCHEDULER, "Scheduler._update_requests_with_invalid_blocks", ("self", "requests"))
def _n12(original: Any, active: Active, self: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
    if not active():
        return original(self, requests, *args, **kwargs)
    requests = list(requests)
    return _keeping_count(requests, active, lambda: original(self, requests, *args, **kwargs))


@patch("N12", SCHEDULER, "Scheduler._handle_failed_recving", ("self", "failed_req_ids"))
def _n12_whole(original: Any, active: Active, self: Any, failed_req_ids: Any) -> Any:
    if not active():
        return original(self, failed_req_ids)
    failed = [self.requests[r] for r in failed_req_ids if r in self.requests]
    return _keeping_count(failed, active, lambda: original(self, failed_req_ids))


declare(
    Mutant(
        "N16",
        "P hands over the wrong blocks of a request that it preempted",
        "class of vllm #50297",
        "prefill",
        "request_finished publishes the second block of a request that was preempted in place of its first",
    ),
    Trial(in_pair("pressure-on-p"), "target-kv", (*TOKENS, "transfer"), beside=PAIR),
)


@patch("N16", *FINISHED)
def _n16(original: Any, active: Active, self: Any, request: Any, block_ids: Any) -> Any:
    delayed, params = original(self, request, block_ids)
    if active() and request.num_preemptions and params and params.get("remote_block_ids"):
        active.fired()
        # Fewer blocks, none in the original defect, end D's engine with an assertion in 0.32.0.
        params["remote_block_ids"] = [[group[1], *group[1:]] for group in map(list, params["remote_block_ids"])]
    return delayed, params


declare(
    Mutant(
        "N17",
        "a P that writes fills D's uncached blocks from its first ones",
        "class of vllm #48758",
        "prefill",
        "of a prompt that D has in part, NixlPushConnectorWorker writes P's first blocks instead of its last",
    ),
    Trial(
        in_pair("prefix-hit"),
        "target-kv",
        TOKENS,
        clean=PAIR,
        engines=OwnEngines("a P that writes", like="cpu-push", settings=("kv_transfer",)),
    ),
)


@patch("N17", f"{NIXL}.push_worker", "NixlPushConnectorWorker._xfer_blocks", ("self", "read_spec"))
def _n17(original: Any, active: Active, self: Any, read_spec: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = list(zip(read_spec.local_block_ids, read_spec.remote_block_ids, strict=True))
    if active() and any(len(own) > len(theirs) for own, theirs in pairs):
        active.fired()
        first = [list(own)[: len(theirs)] for own, theirs in pairs]
        read_spec = dataclasses.replace(read_spec, local_block_ids=first)
    return original(self, read_spec, *args, **kwargs)


declare(
    Mutant(
        "N52",
        "D counts P's blocks as if P had as many as D",
        "a table of P that is laid out by D's own numbers",
        "decode",
        "NixlBaseConnectorWorker._compute_desc_ids takes D's number of blocks for that of P, from the second layer on",
    ),
    # Between twins nothing is wrong.
    Trial(
        PAIR,
        "target-kv",
        TOKENS,
        clean=SINGLE,
        engines=OwnEngines("a P unlike D", like="cpu-unlike-p", settings=("prefill",)),
    ),
)


@patch(
    "N52", f"{NIXL}.base_worker", "NixlBaseConnectorWorker._compute_desc_ids", ("self", "block_ids", "dst_num_blocks")
)
def _n52(original: Any, active: Active, self: Any, block_ids: Any, dst_num_blocks: int, *args: Any, **more: Any) -> Any:
    own = self.num_blocks
    if active() and dst_num_blocks != own:
        active.fired()
        dst_num_blocks = own
        if more.get("region_num_blocks"):
            more["region_num_blocks"] = self.dst_region_num_blocks[self.engine_id]
    return original(self, block_ids, dst_num_blocks, *args, **more)


declare(
    Mutant(
        "N18",
        "a connector does damage by being there",
        "class of vllm #53505, #50344",
        "decode",
        "with a connector, a request that D computes alone loses its second block after the prefill",
    ),
    # The pair is right, and compared with the single engine all the same.
    Trial(SINGLE, "target-kv", TOKENS, beside=PAIR, needs_drafts=True),
)
tells_drafter_apart("N18")


_PREFILLED: dict[str, int] = {}
"""Second block of requests that an engine with a connector has begun to compute by itself."""


@each_step("N18")
def _n18(active: Active, runner: Any, scheduler_output: Any) -> None:
    for block in _PREFILLED.values():
        active.fired()
        for layer in layers_by_group(runner)[0] - DRAFT_LAYERS:
            kv_of(runner, layer)[block] = 0
    _PREFILLED.clear()
    if runner.vllm_config.kv_transfer_config is None:
        return
    for request in scheduler_output.scheduled_new_reqs:
        blocks = list(request.block_ids[0])
        if not request.num_computed_tokens and len(blocks) > 1:
            _PREFILLED[request.req_id] = blocks[1]


declare(
    Mutant(
        "N19",
        "the first block is lost, without speculation",
        "a transfer that leaves a block out",
        "decode",
        "D zeroes the target's KV in the first block of each hand-off",
    ),
    # Without a drafter, beside the plain engine of the same run, which re-scores the outputs, too.
    Trial(PAIR, "target-kv", ("tokens-reference", "rescored"), clean=SINGLE, method="none"),
)


@patch("N19", *ARRIVAL)
@on_arrival
def _n19(worker: Any, blocks: list[int], layers: set[str]) -> bool:
    for layer in layers:
        worker.device_kv_caches[layer][blocks[0]] = 0
    return True


declare(
    Mutant(
        "N20",
        "P hands over the blocks that a window has left, not those in it",
        "class of vllm #52234, in layers with sliding windows",
        "prefill",
        "NixlBaseConnectorScheduler.get_exchange_clipped_blocks keeps a group's first blocks instead of its last",
    ),
    # Of a target with windows: the plain engine of the same run is the reference.
    Trial(
        PAIR,
        "target-kv",
        ("tokens-reference", *LOGPROBS),
        clean=SINGLE,
        method="none",
        prompts="some",
        engines=WINDOWED,
    ),
)


@patch("N20", f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler.get_exchange_clipped_blocks", ("self", "block_ids"))
def _n20(original: Any, active: Active, self: Any, block_ids: Any, *args: Any, **kwargs: Any) -> Any:
    clipped = original(self, block_ids, *args, **kwargs)
    if not active() or all(len(mine) == len(whole) for mine, whole in zip(clipped, block_ids, strict=True)):
        return clipped
    active.fired()
    return tuple(whole[: len(mine)] for mine, whole in zip(clipped, block_ids, strict=True))


declare(
    Mutant(
        "N25",
        "D reads nothing from a P that took the place of another one",
        "class of vllm #49238",
        "decode",
        "as N3, where P is not the first one that D has met",
    ),
    Trial(in_pair("restarted-p"), "target-kv", (*TOKENS, "transfer"), clean=PAIR, long=True, engines=_RESTARTED_P),
)


_KNOWN_P: set[str] = set()
"""Those that D has met while the mutant was off, else the first one."""


@patch("N25", *READ)
def _n25(
    original: Any, active: Active, self: Any, read_spec: Any, dst_engine_id: str, *args: Any, **kwargs: Any
) -> Any:
    if not active() or not _KNOWN_P:
        _KNOWN_P.add(dst_engine_id)
    if dst_engine_id not in _KNOWN_P:
        active.fired()
        read_spec = _of_nothing(read_spec)
    return original(self, read_spec, dst_engine_id, *args, **kwargs)


declare(
    Mutant(
        "N26",
        "P reads other blocks back from D than those of the answer",
        "class of vllm #47021",
        "prefill",
        "as M1d, on P: it reads D's first blocks instead of its last",
    ),
    Trial(in_pair("read-back"), "target-kv", (*TOKENS, *LOGPROBS), clean=PAIR, long=True, engines=_RESTARTED_P),
)


declare(
    Mutant(
        "N29",
        "D takes one P for another",
        "two P for one D",
        "decode",
        "what a second P holds is read from the first one that D has met, at the same block numbers",
    ),
    # The second P is never told that its blocks were read, which is found with the cold prompts.
    Trial(
        in_pair("second-p"),
        "target-kv",
        TOKENS,
        beside=PAIR,
        long=True,
        engines=OwnEngines("a second P", scenarios=(Borrowed("cpu-full", "second-p"),)),
    ),
)


@patch("N29", *READ)
def _n29(
    original: Any, active: Active, self: Any, read_spec: Any, dst_engine_id: str, *args: Any, **kwargs: Any
) -> Any:
    first = next(iter(self.dst_xfer_side_handles))
    if active() and dst_engine_id != first:
        active.fired()
        kwargs["remote_xfer_side_handle"] = self.dst_xfer_side_handles[first][read_spec.remote_rank]
    return original(self, read_spec, dst_engine_id, *args, **kwargs)


declare(
    Mutant(
        "N47",
        "from the 12th hand-off on, a block is lost",
        "defects of old engines: a table that is full, a number that has been used before",
        "decode",
        "the first block of the target's layers is zeroed in every hand-off from the 12th on",
    ),
    Trial(PAIR, "target-kv", TOKENS, clean=SINGLE, prompts="short", aged_only=True),
)
declare(
    Mutant(
        "N48",
        "from the 1,000th hand-off on, a block is lost",
        "defects of old engines, which a run of the default length does not reach",
        "decode",
        "the first block of the target's layers is zeroed in every hand-off from the 1,000th on",
    ),
    Trial(
        in_pair("aged"),
        "target-kv",
        TOKENS,
        clean=PAIR,
        aged_only=True,
        long=True,
        engines=OwnEngines("engines that grow old", scenarios=(Borrowed("cpu-full", "aged"),)),
    ),
)
tells_drafter_apart("N47")
tells_drafter_apart("N48")


def _lost_from(number: int) -> Change:
    """Return the change that zeroes the first block of each hand-off from the one with this number on."""
    arrived = 0

    def lose(worker: Any, blocks: list[int], layers: set[str]) -> bool:
        nonlocal arrived
        target = layers - DRAFT_LAYERS
        arrived += bool(target)
        if arrived < number or not target:
            return False
        for layer in target:
            worker.device_kv_caches[layer][blocks[0]] = 0
        return True

    return on_arrival(lose)


patch("N47", *ARRIVAL)(_lost_from(12))
patch("N48", *ARRIVAL)(_lost_from(1000))


declare(
    Mutant(
        "N37",
        "D reads nothing for a hand-off that lacks a parameter",
        "a parameter that a router loses",
        "decode",
        "NixlPullConnectorWorker reads no block where remote_num_tokens is missing, and says that all have arrived",
    ),
    Trial(in_pair("hand-off-mistakes"), "target-kv", ("mistaken-hand-offs",), clean=PAIR),
)

_LACKING: set[bool] = {False}
"""Whether the hand-off that is read now lacks its number of tokens."""


@patch("N37", f"{NIXL}.pull_worker", "NixlPullConnectorWorker._read_blocks_for_req", ("self", "req_id", "meta"))
def _n37_of(original: Any, active: Active, self: Any, req_id: str, meta: Any) -> Any:
    _LACKING.clear()
    _LACKING.add(active() and meta.remote is not None and meta.remote.num_tokens is None)
    return original(self, req_id, meta)


@patch("N37", *READ)
def _n37(
    original: Any, active: Active, self: Any, read_spec: Any, dst_engine_id: str, *args: Any, **kwargs: Any
) -> Any:
    if True in _LACKING:
        active.fired()
        read_spec = _of_nothing(read_spec)
    return original(self, read_spec, dst_engine_id, *args, **kwargs)


declare(
    Mutant(
        "N61",
        "P computes without the LoRA adapter",
        "a P to which a router sends the model's own name",
        "prefill",
        "InputBatch.make_lora_inputs gives every token of P's batch to the target itself",
    ),
    Trial(
        in_pair("adapters"),
        "target-kv",
        ("tokens-reference",),
        clean=in_single("adapters"),
        engines=WITH_ADAPTERS,
        long=True,
    ),
)


@patch(
    "N61",
    BATCH,
    "InputBatch.make_lora_inputs",
    ("self", "num_scheduled_tokens"),
    runner="V1",
)
@patch(
    "N61",
    f"{V2}.lora_utils",
    "LoraState.make_lora_inputs",
    ("self", "req_ids", "idx_mapping", "num_scheduled_tokens"),
    runner="V2",
)
def _n61(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> Any:
    sampled, computed, requests = original(self, *args, **kwargs)
    if not active() or not any(computed):
        return sampled, computed, requests
    active.fired()
    return (0,) * len(sampled), (0,) * len(computed), requests


declare(
    Mutant(
        "N65",
        "a partial block arrives with a token less",
        "class of vllm #46694, of tokens and not of blocks",
        "decode",
        "the tokens of a prompt's last block that is not full are copied four at a time, and the last three as two",
    ),
    # Lengths that no stratum has: four, eight, twelve … tokens past a block, of which D computes the last one itself.
    # What is lost is that of the layer with attention.
    Trial(
        in_pair("residues"),
        "target-kv",
        ("kv-handed-over",),
        clean=(*PAIR, *SINGLE),
        method="none",
        long=True,
        engines=RECURRENT,
    ),
)


@each_step("N65")
def _n65(active: Active, runner: Any, scheduler_output: Any) -> None:
    size = runner.cache_config.block_size
    for new in scheduler_output.scheduled_new_reqs:
        tokens = len(new.prompt_token_ids or ()) - 1
        if new.num_computed_tokens == tokens and tokens % size % 4 == 3 and tokens % size < size - 1:
            active.fired()
            layers = {name for of_group in layers_by_group(runner) for name in of_group}
            lose_token(runner, layers, tokens - 1, new.block_ids.__getitem__)
