"""The patches of every mutant, written for the module layout of vLLM 0.32.0 and both of its model runners.

Each decorated function is called in place of the original, which it gets before the arguments together with ``active``;
with the mutant switched off the original runs unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from harness.mutants.hooks import Active, Change, patch

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_MANAGER = "vllm.v1.core.kv_cache_manager"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu"
"""Package of model runner V2."""
_BLOCK_IDS = (
    _MANAGER,
    "KVCacheManager.get_block_ids_for_computed_tokens",
    ("self", "request_id", "num_computed_tokens"),
)
_ALLOCATE = (_MANAGER, "KVCacheManager.allocate_slots", ("self", "request", "num_new_tokens"))
_CACHED = (_MANAGER, "KVCacheManager.get_computed_blocks", ("self", "request"))
_FREE = (_SCHEDULER, "Scheduler._free_request_blocks", ("self", "request"))
_FINISHED = (
    f"{_NIXL}.pull_scheduler",
    "NixlPullConnectorScheduler.request_finished",
    ("self", "request", "block_ids"),
)
_READ = (f"{_NIXL}.pull_worker", "NixlPullConnectorWorker._read_blocks", ("self", "read_spec", "dst_engine_id"))

DRAFT_LAYERS: set[str] = set()
"""Names of the drafter's attention layers in this process, noted when the drafter is loaded."""


# --- M1, M1c, M1d: lookahead blocks in the hand-off ------------------------------------------------------------------


@patch("M1", *_BLOCK_IDS)
def _m1(original: Any, active: Active, self: Any, request_id: str, num_computed_tokens: int) -> Any:
    if not active():
        return original(self, request_id, num_computed_tokens)
    active.fired()
    return self.get_block_ids(request_id)


_STEPS: dict[str, int] = {}


@patch("M1c", *_ALLOCATE)
def _m1c_count(
    original: Any, active: Active, self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    if active():
        _STEPS[request.request_id] = _STEPS.get(request.request_id, 0) + 1
    return original(self, request, num_new_tokens, *args, **kwargs)


@patch("M1c", *_BLOCK_IDS)
def _m1c(original: Any, active: Active, self: Any, request_id: str, num_computed_tokens: int) -> Any:
    if not active() or _STEPS.pop(request_id, 0) < 2:
        return original(self, request_id, num_computed_tokens)
    active.fired()
    return self.get_block_ids(request_id)


_APPLY_PREFIX = (
    f"{_NIXL}.base_worker",
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


# --- M2: a second BOS ------------------------------------------------------------------------------------------------


@patch(
    "M2",
    "vllm.entrypoints.openai.completion.protocol",
    "CompletionRequest.build_tok_params",
    ("self", "model_config"),
)
def _m2(original: Any, active: Active, self: Any, model_config: Any) -> Any:
    if active():
        active.fired()
        self.add_special_tokens = True
    return original(self, model_config)


# --- M3: drafts written outside of the request's own blocks ----------------------------------------------------------


@patch("M3", *_ALLOCATE)
def _m3_first_prefill(
    original: Any, active: Active, self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    if active() and request.num_computed_tokens == 0 and kwargs.get("num_lookahead_tokens"):
        active.fired()
        kwargs["num_lookahead_tokens"] = 0
    return original(self, request, num_new_tokens, *args, **kwargs)


@patch("M3", _SCHEDULER, "Scheduler.schedule", ("self",))
def _m3_one_slot_less(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Lower the scheduler's copy of ``VllmConfig.num_lookahead_tokens``, which can be switched at run time."""
    speculation = self.vllm_config.speculative_config
    less = int(active() and speculation is not None and speculation.use_dflash())
    self.num_lookahead_tokens = self.vllm_config.num_lookahead_tokens - less
    return original(self, *args, **kwargs)


@patch("M3", _RUNNER, "GPUModelRunner._input_fits_in_drafter", ("self", "common_attn_metadata"), runner="V1")
def _m3_window(original: Any, active: Active, self: Any, common_attn_metadata: Any) -> bool:
    if not active():
        return bool(original(self, common_attn_metadata))
    return common_attn_metadata is not None and bool(
        common_attn_metadata.max_seq_len + self.num_spec_tokens <= self.effective_drafter_max_model_len
    )


@patch("M3", "vllm.v1.worker.block_table", "BlockTable.move_row", ("self", "src", "tgt"), runner="V1")
def _m3_stale_row(original: Any, active: Active, self: Any, src: int, tgt: int) -> None:
    if not active():
        original(self, src, tgt)
        return
    count = self.num_blocks_per_row[src]
    table = self.block_table.np
    table[tgt, :count] = table[src, :count]
    self.num_blocks_per_row[tgt] = count


# --- M4, M4g: the drafter's KV is not handed over --------------------------------------------------------------------


def _note_draft_layers(original: Any, _active: Active, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    v1 = hasattr(self, "_draft_attn_layer_names")
    DRAFT_LAYERS.update(self._draft_attn_layer_names if v1 else self.draft_attn_layer_names)
    return result


_V1_DRAFTER = ("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer.load_model")
_V2_DRAFTER = (f"{_V2}.spec_decode.speculator", "DraftModelSpeculator.load_model")
for _mutant in ("M4", "N2", "N4", "N5", "N7", "N8", "N9"):
    patch(_mutant, *_V1_DRAFTER, ("self", "target_model"), runner="V1")(_note_draft_layers)
    patch(_mutant, *_V2_DRAFTER, ("self", "target_model"), runner="V2")(_note_draft_layers)


def _received(worker: Any) -> dict[str, list[list[int]]]:
    """Return, per request, the physical block ids per KV-cache group that its transfer writes."""
    return {r: [list(g) for g in m.local_physical_block_ids] for r, m in worker._recving_metadata.items()}


ARRIVAL = (f"{_NIXL}.base_worker", "NixlBaseConnectorWorker.get_transfer_results", ("self",))


def on_arrival(damage: Callable[[Any, list[int], set[str]], bool]) -> Change:
    """Return the change of ``ARRIVAL`` that calls ``damage(worker, block ids, layers)`` for each KV-cache group that
    arrived, with the names of its layers: what other layers have in these blocks belongs to others. ``damage`` returns
    whether it damaged anything."""

    def damage_all(worker: Any, groups: list[list[int]]) -> bool:
        layers = [set(group.layer_names) for group in worker.kv_cache_config.transfer_groups]
        # ``any`` would leave out the groups behind the first one that is damaged.
        return sum(damage(worker, *of_group) for of_group in zip(groups, layers, strict=True)) > 0

    return on_arrival_of_groups(damage_all)


def on_arrival_of_groups(damage: Callable[[Any, list[list[int]]], bool]) -> Change:
    """Return the change of ``ARRIVAL`` that calls ``damage`` once for each request that arrived, with its block ids in
    all KV-cache groups."""

    def get_transfer_results(original: Any, active: Active, self: Any) -> Any:
        pending = _received(self) if active() else {}
        results = original(self)
        for request in results.finished_recving or ():
            if request in pending and damage(self, pending[request]):
                active.fired()
        return results

    return get_transfer_results


@patch("M4", *ARRIVAL)
@on_arrival
def _m4(worker: Any, blocks: list[int], layers: set[str]) -> bool:
    lost = layers & DRAFT_LAYERS
    for layer in lost:
        worker.device_kv_caches[layer][blocks] = 0
    return bool(lost)


_MIXIN = "vllm.v1.worker.kv_connector_model_runner_mixin"


@patch(
    "M4g",
    _MIXIN,
    "KVConnectorModelRunnerMixin.maybe_get_kv_connector_output",
    ("scheduler_output", "defer_finalize"),
    runner="V1",
)
def _m4g_never_defers(original: Any, active: Active, scheduler_output: Any, defer_finalize: bool = False) -> Any:
    if not active():
        return original(scheduler_output, defer_finalize)
    mixin: Any = importlib.import_module(_MIXIN)
    if not mixin.has_kv_transfer_group():
        return nullcontext()
    active.fired()
    return mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(scheduler_output, defer_finalize=False)


@patch("M4g", _MIXIN, "KVConnectorModelRunnerMixin.finalize_kv_connector", (), runner="V1")
def _m4g_no_finalize(original: Any, active: Active) -> None:
    if not active():
        original()


@patch("M4g", f"{_V2}.kv_connector", "ActiveKVConnector.finish_forward", ("self",), runner="V2")
def _m4g_saves_early(original: Any, active: Active, self: Any) -> None:
    original(self)
    connector = self.kv_connector
    vars(connector).pop("wait_for_save", None)
    if active() and not self._disabled:
        active.fired()
        connector.wait_for_save()
        # Not again once the drafter has run.
        connector.wait_for_save = lambda: None


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@patch("M4g", f"{_NIXL}.base_worker", "NixlBaseConnectorWorker.__init__", ("self",))
def _m4g_staging_worker(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> None:
    """Give the connector on CPU, which sends from the KV cache itself, the staging buffers that CUDA engines have."""
    original(self, *args, **kwargs)
    if _on_cpu():
        self.use_host_buffer, self.copy_blocks = True, _copy_blocks


def _copy_blocks(source: Any, target: Any, from_ids: Iterable[int], to_ids: Iterable[int], direction: str) -> None:
    for layer in source:
        target[layer][list(to_ids)] = source[layer][list(from_ids)]


@patch("M4g", f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler.__init__", ("self",))
def _m4g_staging_scheduler(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if _on_cpu():
        self.use_host_buffer = True


# --- M5a, M5b, M7: the prefix cache ----------------------------------------------------------------------------------

_REMEMBERED: dict[str, Any] = {}


@patch("M5a", *_CACHED)
def _m5a_remember(original: Any, active: Active, self: Any, request: Any, *args: Any) -> Any:
    if not active():
        return original(self, request, *args)
    if request.request_id in _REMEMBERED:
        active.fired()
    else:
        _REMEMBERED[request.request_id] = original(self, request, *args)
    return _REMEMBERED[request.request_id]


@patch("M5a", *_ALLOCATE)
def _m5a_forget(
    original: Any, active: Active, self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    blocks = original(self, request, num_new_tokens, *args, **kwargs)
    if blocks is not None:
        _REMEMBERED.pop(request.request_id, None)
    return blocks


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


@patch("M7", "vllm.v1.core.kv_cache_utils", "hash_block_tokens", ("hash_function", "parent_block_hash"))
def _m7(original: Any, active: Active, hash_function: Any, parent_block_hash: Any, *args: Any, **kwargs: Any) -> Any:
    if active() and parent_block_hash:
        active.fired()
        parent_block_hash = None
    return original(hash_function, parent_block_hash, *args, **kwargs)


# --- M6, N1: P does not keep its blocks for D ------------------------------------------------------------------------


@patch("M6", *_FINISHED)
def _m6(original: Any, active: Active, self: Any, request: Any, block_ids: Any) -> Any:
    keep, params = original(self, request, block_ids)
    if not active() or not keep:
        return keep, params
    active.fired()
    self._reqs_need_send.pop(request.request_id, None)
    # As for an aborted prefill; otherwise P crashes on D's notification about a request that it has forgotten.
    self._reqs_not_processed.add(request.request_id)
    return False, params


@patch("N1", *_FINISHED)
def _n1(original: Any, active: Active, self: Any, request: Any, block_ids: Any) -> Any:
    keep, params = original(self, request, block_ids)
    if active() and keep:
        active.fired()
        self._reqs_need_send[request.request_id] = time.perf_counter()
    return keep, params


# --- M8, M11: drafting and verification ------------------------------------------------------------------------------


@patch("M8", _RUNNER, "GPUModelRunner.take_draft_token_ids", ("self",), runner="V1")
def _m8(original: Any, active: Active, self: Any) -> Any:
    drafts = original(self)
    if drafts is not None and active():
        active.fired()
        drafts.draft_token_ids = [list(ids)[::-1] for ids in drafts.draft_token_ids]
    return drafts


@patch("M8", f"{_V2}.model_runner", "GPUModelRunner.sample_tokens", ("self", "grammar_output"), runner="V2")
def _m8_on_device(original: Any, active: Active, self: Any, grammar_output: Any) -> Any:
    """Reverse the drafts where V2 keeps them until the next step verifies them."""
    step = self.execute_model_state
    output = original(self, grammar_output)
    if step is not None and self.speculator is not None and active():
        active.fired()
        rows, drafts = step.input_batch.idx_mapping, self.req_states.draft_tokens
        drafts[rows] = drafts[rows].flip(1)
    return output


class _Wrong:
    """Counts wrong drafts, so that one in a hundred, starting with the first, can be accepted."""

    seen = 0

    @classmethod
    def take(cls) -> bool:
        cls.seen += 1
        return cls.seen % 100 == 1


@patch(
    "M11",
    "vllm.v1.sample.rejection_sampler",
    "RejectionSampler.forward",
    ("self", "metadata", "draft_probs", "logits"),
    runner="V1",
)
def _m11(
    original: Any, active: Active, self: Any, metadata: Any, draft_probs: Any, logits: Any, *args: Any, **kwargs: Any
) -> Any:
    if not active():
        _Wrong.seen = 0
        return original(self, metadata, draft_probs, logits, *args, **kwargs)
    rows = metadata.target_logits_indices.tolist()
    drafts = metadata.draft_token_ids.tolist()
    first = 0
    for count in metadata.num_draft_tokens:
        span = range(first, first + count)
        first += count
        _accept_wrong(logits, [rows[i] for i in span], drafts[first - count : first], active)
    return original(self, metadata, draft_probs, logits, *args, **kwargs)


def _accept_wrong(logits: Any, rows: list[int], drafts: list[int], active: Active) -> None:
    """Make the first wrong draft of a request right, if it is its turn: ``logits[rows]`` verify ``drafts``."""
    right = logits[rows].argmax(dim=-1).tolist()
    wrong = next((i for i, draft in enumerate(drafts) if draft != right[i]), None)
    if wrong is not None and drafts[wrong] >= 0 and _Wrong.take():
        active.fired()
        row = logits[rows[wrong]]
        row[drafts[wrong]] = row.max() + 20


@patch(
    "M11",
    f"{_V2}.spec_decode.rejection_sampler",
    "RejectionSampler.__call__",
    ("self", "logits", "input_batch"),
    runner="V2",
)
def _m11_v2(original: Any, active: Active, self: Any, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
    if active():
        tokens = input_batch.input_ids[input_batch.logits_indices].tolist()
        ends = input_batch.cu_num_logits_np.tolist()
        for first, end in itertools.pairwise(ends):
            _accept_wrong(logits, list(range(first, end - 1)), tokens[first + 1 : end], active)
    else:
        _Wrong.seen = 0
    return original(self, logits, input_batch, *args, **kwargs)


# --- N2 to N5, N7: what arrives is damaged, or does not arrive --------------------------------------------------------


@patch("N2", *ARRIVAL)
@on_arrival
def _n2(worker: Any, blocks: list[int], layers: set[str]) -> bool:
    lost = layers - DRAFT_LAYERS if len(blocks) > 1 else set()
    for layer in lost:
        worker.device_kv_caches[layer][blocks[1]] = 0
    return bool(lost)


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


def _of_nothing(read_spec: Any) -> Any:
    """Return what D is to read from P, without any block."""
    nothing: dict[str, Any] = {
        name: [[] for _ in getattr(read_spec, name)] for name in ("local_block_ids", "remote_block_ids")
    }
    return dataclasses.replace(read_spec, **nothing)


@patch("N3", *_READ)
def _n3(original: Any, active: Active, self: Any, read_spec: Any, dst_engine_id: str, *args: Any, **kwargs: Any) -> Any:
    if active():
        active.fired()
        read_spec = _of_nothing(read_spec)
    return original(self, read_spec, dst_engine_id, *args, **kwargs)


def _layers(runner: Any) -> list[set[str]]:
    """Return the names of the layers of each KV-cache group."""
    return [set(group.layer_names) for group in runner.kv_cache_config.kv_cache_groups]


def _cached_blocks(runner: Any, scheduler_output: Any) -> list[tuple[list[int], set[str]]]:
    """Return, per new request and KV-cache group, the ids of blocks that the request reuses instead of computing, and
    the group's layers."""
    size = runner.cache_config.block_size
    out = []
    for request in scheduler_output.scheduled_new_reqs:
        if whole := request.num_computed_tokens // size:
            mine = (list(group)[:whole] for group in request.block_ids)
            out += list(zip(mine, _layers(runner), strict=True))
    return out


def _kv_cache(runner: Any, layer: str) -> Any:
    cache = runner.compilation_config.static_forward_context[layer].kv_cache
    return cache[0] if isinstance(cache, (list, tuple)) else cache


def _each_step(mutant: str) -> Callable[[Callable[[Active, Any, Any], None]], None]:
    """Declare a patch of what each runner does first with a step of the scheduler: with the mutant on, the decorated
    function does damage to the runner or the step before it."""

    def declare(damage: Callable[[Active, Any, Any], None]) -> None:
        def begin(original: Any, active: Active, self: Any, scheduler_output: Any) -> Any:
            if active():
                damage(active, self, scheduler_output)
            return original(self, scheduler_output)

        step = ("self", "scheduler_output")
        patch(mutant, _RUNNER, "GPUModelRunner._update_states", step, runner="V1")(begin)
        patch(mutant, f"{_V2}.model_runner", "GPUModelRunner.finish_requests", step, runner="V2")(begin)

    return declare


@_each_step("N4")
def _n4(active: Active, runner: Any, scheduler_output: Any) -> None:
    for blocks, layers in _cached_blocks(runner, scheduler_output):
        for layer in layers & DRAFT_LAYERS:
            active.fired()
            _kv_cache(runner, layer)[blocks] = 0


@_each_step("N5")
def _n5(active: Active, runner: Any, scheduler_output: Any) -> None:
    for blocks, layers in _cached_blocks(runner, scheduler_output):
        if len(blocks) > 1:
            for layer in layers - DRAFT_LAYERS:
                active.fired()
                cache = _kv_cache(runner, layer)
                cache[blocks[1]] = cache[blocks[0]]


# --- N8 to N10: blocks that an answer filled, or that are still to be filled ------------------------------------------


def _answered_blocks(runner: Any, request: str) -> list[tuple[list[int], set[str]]]:
    """Return, per KV-cache group, the blocks with tokens of the answer of a request that the runner knows, and the
    group's layers; none of another request."""
    if hasattr(runner, "requests"):
        state = runner.requests.get(request)
        if state is None:
            return []
        groups, prompt_tokens = [list(group) for group in state.block_ids], state.num_prompt_tokens
    else:
        row = runner.req_states.req_id_to_index.get(request)
        if row is None:
            return []
        tables, counts = runner.block_tables.block_tables, runner.block_tables.num_blocks.np
        groups = [table.gpu[row, : counts[group, row]].tolist() for group, table in enumerate(tables)]
        prompt_tokens = int(runner.req_states.prompt_len.np[row])
    first = prompt_tokens // runner.cache_config.block_size
    return list(zip((group[first:] for group in groups), _layers(runner), strict=True))


def _forget_answers(active: Active, runner: Any, scheduler_output: Any, drafter: bool) -> None:
    """Zero, in the layers of the target or the drafter, the blocks with tokens of the answers that have just ended,
    which stay in the prefix cache."""
    for request in scheduler_output.finished_req_ids:
        for blocks, layers in _answered_blocks(runner, request):
            for layer in layers & DRAFT_LAYERS if drafter else layers - DRAFT_LAYERS:
                active.fired()
                _kv_cache(runner, layer)[blocks] = 0


@_each_step("N8")
def _n8(active: Active, runner: Any, scheduler_output: Any) -> None:
    _forget_answers(active, runner, scheduler_output, drafter=False)


@_each_step("N9")
def _n9(active: Active, runner: Any, scheduler_output: Any) -> None:
    _forget_answers(active, runner, scheduler_output, drafter=True)


_NULL_BLOCK = 0


@_each_step("N10")
def _n10(active: Active, runner: Any, scheduler_output: Any) -> None:
    new, size = scheduler_output.scheduled_new_reqs, runner.cache_config.block_size
    unwritten = {b for r in new for group in r.block_ids for b in list(group)[r.num_computed_tokens // size :]}
    for request in new:
        whole = request.num_computed_tokens // size
        if any(b in unwritten for group in request.block_ids for b in list(group)[:whole]):
            active.fired()
            request.block_ids = tuple(
                [_NULL_BLOCK if i < whole and b in unwritten else b for i, b in enumerate(group)]
                for group in request.block_ids
            )


# --- N11: blocks of a request that was given up ----------------------------------------------------------------------

_KEPT: list[Any] = []


@patch("N11", *_FREE)
def _n11(original: Any, active: Active, self: Any, request: Any) -> Any:
    if active() and request.status.name == "FINISHED_ABORTED":
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0][-1:]
        if blocks:
            active.fired()
            self.kv_cache_manager.block_pool.touch(blocks)
            _KEPT.extend(blocks)
    return original(self, request)


@patch("N11", _MANAGER, "KVCacheManager.reset_prefix_cache", ("self",))
def _n11_give_back(original: Any, active: Active, self: Any) -> Any:
    """Give the blocks back once the mutant is off, so that the same engines can be used for others."""
    if not active() and _KEPT:
        self.block_pool.free_blocks(_KEPT)
        _KEPT.clear()
    return original(self)


# --- N12: a failed load is not rolled back ---------------------------------------------------------------------------


def _keeping_count(requests: Iterable[Any], active: Active, lower: Callable[[], Any]) -> Any:
    """Call ``lower``, which lowers how many tokens of the requests count as computed, and put the numbers back."""
    before = {request.request_id: (request, request.num_computed_tokens) for request in requests}
    result = lower()
    for request, count in before.values():
        if request.num_computed_tokens != count:
            active.fired()
            request.num_computed_tokens = count
    return result


@patch("N12", _SCHEDULER, "Scheduler._update_requests_with_invalid_blocks", ("self", "requests"))
def _n12(original: Any, active: Active, self: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
    if not active():
        return original(self, requests, *args, **kwargs)
    requests = list(requests)
    return _keeping_count(requests, active, lambda: original(self, requests, *args, **kwargs))


@patch("N12", _SCHEDULER, "Scheduler._handle_failed_recving", ("self", "failed_req_ids"))
def _n12_whole(original: Any, active: Active, self: Any, failed_req_ids: Any) -> Any:
    if not active():
        return original(self, failed_req_ids)
    failed = [self.requests[r] for r in failed_req_ids if r in self.requests]
    return _keeping_count(failed, active, lambda: original(self, failed_req_ids))


# --- N13: speculation finds nothing in the prefix cache --------------------------------------------------------------


@patch("N13", *_CACHED)
def _n13(original: Any, active: Active, self: Any, request: Any, *args: Any) -> Any:
    blocks, tokens, *more = original(self, request, *args)
    if not active() or not self.use_eagle or not tokens:
        return blocks, tokens, *more
    active.fired()
    return self.empty_kv_cache_blocks, 0, *(0 for _ in more)


# --- N14: a grammar on the wrong rows --------------------------------------------------------------------------------


def _each_after_its_own(rows: Any, active: Active) -> Any:
    """Return bitmasks each in the row after its own, with the mutant on and where there are several."""
    if not active() or len(rows) < 2:
        return rows
    active.fired()
    return rows[[-1, *range(len(rows) - 1)]]


@patch(
    "N14",
    _RUNNER,
    "apply_grammar_bitmask",
    ("scheduler_output", "grammar_output", "input_batch", "logits"),
    runner="V1",
)
def _n14(original: Any, active: Active, scheduler_output: Any, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
    if grammar_output.grammar_bitmask is not (rows := _each_after_its_own(grammar_output.grammar_bitmask, active)):
        grammar_output = copy.copy(grammar_output)
        grammar_output.grammar_bitmask = rows
    return original(scheduler_output, grammar_output, *args, **kwargs)


@patch(
    "N14",
    f"{_V2}.structured_outputs",
    "StructuredOutputsWorker.apply_grammar_bitmask",
    ("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),
    runner="V2",
)
def _n14_v2(
    original: Any, active: Active, self: Any, logits: Any, input_batch: Any, grammar_req_ids: Any, rows: Any
) -> Any:
    return original(self, logits, input_batch, grammar_req_ids, _each_after_its_own(rows, active))


# --- N15: a late write into blocks of a request that was given up ----------------------------------------------------

_FREED: set[int] = set()
"""Blocks of aborted requests that nobody has taken yet."""
_TAKEN: list[tuple[list[int], set[str]]] = []
"""Blocks among them that a request of this step fills, with the layers of their KV-cache group."""


@patch("N15", *_FREE)
def _n15(original: Any, active: Active, self: Any, request: Any) -> Any:
    if active() and request.status.name == "FINISHED_ABORTED":
        for group in self.kv_cache_manager.get_block_ids(request.request_id):
            _FREED.update(group)
    return original(self, request)


@_each_step("N15")
def _n15_late(active: Active, runner: Any, scheduler_output: Any) -> None:
    for blocks, layers in _TAKEN:
        active.fired()
        for layer in layers - DRAFT_LAYERS:
            _kv_cache(runner, layer)[blocks] = 0
    _TAKEN.clear()
    for request in scheduler_output.scheduled_new_reqs:
        for group, layers in zip(request.block_ids, _layers(runner), strict=True):
            if taken := _FREED.intersection(group):
                _TAKEN.append((sorted(taken), layers))
                _FREED.difference_update(taken)


# --- N16: a preempted request is handed over otherwise ---------------------------------------------------------------


@patch("N16", *_FINISHED)
def _n16(original: Any, active: Active, self: Any, request: Any, block_ids: Any) -> Any:
    delayed, params = original(self, request, block_ids)
    if active() and request.num_preemptions and params and params.get("remote_block_ids"):
        active.fired()
        # Fewer blocks, none in the original defect, end D's engine with an assertion in 0.32.0.
        params["remote_block_ids"] = [[group[1], *group[1:]] for group in map(list, params["remote_block_ids"])]
    return delayed, params


# --- N17: a partial hit on D, and P writes ---------------------------------------------------------------------------


@patch("N17", f"{_NIXL}.push_worker", "NixlPushConnectorWorker._xfer_blocks", ("self", "read_spec"))
def _n17(original: Any, active: Active, self: Any, read_spec: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = list(zip(read_spec.local_block_ids, read_spec.remote_block_ids, strict=True))
    if active() and any(len(own) > len(theirs) for own, theirs in pairs):
        active.fired()
        first = [list(own)[: len(theirs)] for own, theirs in pairs]
        read_spec = dataclasses.replace(read_spec, local_block_ids=first)
    return original(self, read_spec, *args, **kwargs)


# --- N18: a connector that nobody uses -------------------------------------------------------------------------------

_PREFILLED: dict[str, int] = {}
"""Second block of requests that an engine with a connector has begun to compute by itself."""


@_each_step("N18")
def _n18(active: Active, runner: Any, scheduler_output: Any) -> None:
    for block in _PREFILLED.values():
        active.fired()
        for layer in _layers(runner)[0] - DRAFT_LAYERS:
            _kv_cache(runner, layer)[block] = 0
    _PREFILLED.clear()
    if runner.vllm_config.kv_transfer_config is None:
        return
    for request in scheduler_output.scheduled_new_reqs:
        blocks = list(request.block_ids[0])
        if not request.num_computed_tokens and len(blocks) > 1:
            _PREFILLED[request.req_id] = blocks[1]


# --- N19: a block that is left out -----------------------------------------------------------------------------------


@patch("N19", *ARRIVAL)
@on_arrival
def _n19(worker: Any, blocks: list[int], layers: set[str]) -> bool:
    for layer in layers:
        worker.device_kv_caches[layer][blocks[0]] = 0
    return True


# --- N20: layers with a window ---------------------------------------------------------------------------------------


@patch(
    "N20", f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler.get_exchange_clipped_blocks", ("self", "block_ids")
)
def _n20(original: Any, active: Active, self: Any, block_ids: Any, *args: Any, **kwargs: Any) -> Any:
    clipped = original(self, block_ids, *args, **kwargs)
    if not active() or all(len(mine) == len(whole) for mine, whole in zip(clipped, block_ids, strict=True)):
        return clipped
    active.fired()
    return tuple(whole[: len(mine)] for mine, whole in zip(clipped, block_ids, strict=True))


# --- N21: how an answer ends ----------------------------------------------------------------------------------------


@patch("N21", "vllm.v1.request", "Request.get_finished_reason", ("self",))
def _n21(original: Any, active: Active, self: Any) -> Any:
    reason = original(self)
    if active() and self.kv_transfer_params and reason is not None and reason.name == "STOP":
        active.fired()
        return type(reason).LENGTH
    return reason


# --- N22: text is tokenized otherwise --------------------------------------------------------------------------------


@patch("N22", "vllm.renderers.base", "BaseRenderer._tokenize_prompt", ("self", "prompt", "params"))
def _n22(original: Any, active: Active, self: Any, prompt: Any, params: Any) -> Any:
    tokens = original(self, prompt, params)
    if active():
        active.fired()
        del tokens["prompt_token_ids"][3]
    return tokens


# --- N23: nothing is drafted -----------------------------------------------------------------------------------------


@patch("N23", _SCHEDULER, "Scheduler.update_draft_token_ids", ("self", "draft_token_ids"))
def _n23(original: Any, active: Active, self: Any, draft_token_ids: Any) -> Any:
    if active():
        active.fired()
        none: list[list[int]] = [[] for _ in draft_token_ids.req_ids]
        draft_token_ids = dataclasses.replace(draft_token_ids, draft_token_ids=none)
    return original(self, draft_token_ids)


# --- N24: a cache for everybody --------------------------------------------------------------------------------------


@patch("N24", "vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", ("request", "start_token_idx"))
def _n24(original: Any, active: Active, request: Any, *args: Any, **kwargs: Any) -> Any:
    if active() and request.cache_salt:
        active.fired()
        request = copy.copy(request)
        request.cache_salt = None
    return original(request, *args, **kwargs)


# --- N25: another P at the address of a dead one ---------------------------------------------------------------------

_KNOWN_P: set[str] = set()
"""Those that D has met while the mutant was off, else the first one."""


@patch("N25", *_READ)
def _n25(
    original: Any, active: Active, self: Any, read_spec: Any, dst_engine_id: str, *args: Any, **kwargs: Any
) -> Any:
    if not active() or not _KNOWN_P:
        _KNOWN_P.add(dst_engine_id)
    if dst_engine_id not in _KNOWN_P:
        active.fired()
        read_spec = _of_nothing(read_spec)
    return original(self, read_spec, dst_engine_id, *args, **kwargs)


# --- N29: one of several P --------------------------------------------------------------------------------------------


@patch("N29", *_READ)
def _n29(
    original: Any, active: Active, self: Any, read_spec: Any, dst_engine_id: str, *args: Any, **kwargs: Any
) -> Any:
    first = next(iter(self.dst_xfer_side_handles))
    if active() and dst_engine_id != first:
        active.fired()
        kwargs["remote_xfer_side_handle"] = self.dst_xfer_side_handles[first][read_spec.remote_rank]
    return original(self, read_spec, dst_engine_id, *args, **kwargs)


# --- N27, N28: recurrent state ---------------------------------------------------------------------------------------


def _states(runner: Any) -> list[tuple[int, Any]]:
    """Return the tensors of recurrent state, convolutions included, each with the index of its KV-cache group."""
    return [
        (index, tensor)
        for index, group in enumerate(runner.kv_cache_config.kv_cache_groups)
        if hasattr(group.kv_cache_spec, "mamba_cache_mode")
        for layer in group.layer_names
        for tensor in runner.compilation_config.static_forward_context[layer].kv_cache
    ]


@_each_step("N27")
def _n27(active: Active, runner: Any, scheduler_output: Any) -> None:
    for request in scheduler_output.scheduled_new_reqs:
        # What remains to be computed of a request with a state from P is one token.
        if request.num_computed_tokens and scheduler_output.num_scheduled_tokens[request.req_id] == 1:
            for group, tensor in _states(runner):
                active.fired()
                tensor[list(request.block_ids[group])] = 0


@_each_step("N28")
def _n28(active: Active, runner: Any, scheduler_output: Any) -> None:
    for request in scheduler_output.scheduled_new_reqs:
        whole = request.num_computed_tokens // runner.cache_config.block_size
        own = scheduler_output.num_scheduled_tokens[request.req_id] > 1
        for group, tensor in _states(runner) if whole and own else ():
            active.fired()
            tensor[request.block_ids[group][whole - 1]] = tensor[_NULL_BLOCK]


# --- N30: placeholders of drafts --------------------------------------------------------------------------------------


@patch("N30", _RUNNER, "GPUModelRunner._build_attention_metadata", ("self", "num_tokens", "num_reqs"), runner="V1")
def _n30(original: Any, active: Active, self: Any, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
    batch, drafts = self.input_batch, self.num_decode_draft_tokens
    tails = batch.num_computed_tokens_cpu[:num_reqs] < batch.num_prompt_tokens[:num_reqs]
    tails &= drafts.np[:num_reqs] > 0
    if active() and kwargs.get("use_spec_decode") and tails.any():
        active.fired()
        drafts.np[:num_reqs][tails] = -1
        drafts.copy_to_gpu()
    return original(self, num_tokens, num_reqs, *args, **kwargs)


@patch(
    "N30",
    f"{_V2}.model_states.mamba_hybrid",
    "MambaHybridModelState.prepare_attn",
    ("self", "input_batch", "cudagraph_mode"),
    runner="V2",
)
def _n30_by_row(original: Any, active: Active, self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
    tails = input_batch.prefill_runs_as_decode_np
    if active() and tails is not None and tails.any():
        active.fired()
        input_batch = dataclasses.replace(input_batch, prefill_runs_as_decode_np=None)
    return original(self, input_batch, *args, **kwargs)


# --- N31: modules that look ahead -------------------------------------------------------------------------------------


@patch("N31", f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler._prefill_backoff", ("self",))
def _n31(original: Any, active: Active, self: Any) -> Any:
    kept = original(self)
    if kept and active():
        active.fired()
        return 0
    return kept
