"""What of vLLM the mutants patch, by the module layout of vLLM 0.32.0 and both of its model runners."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from harness.mutants.hooks import Active, Change, patch

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
MANAGER = "vllm.v1.core.kv_cache_manager"
SCHEDULER = "vllm.v1.core.sched.scheduler"
RUNNER = "vllm.v1.worker.gpu_model_runner"
BATCH = "vllm.v1.worker.gpu_input_batch"
"""Rows of a step, of model runner V1."""
V2 = "vllm.v1.worker.gpu"
"""Package of model runner V2."""
BLOCK_IDS = (
    MANAGER,
    "KVCacheManager.get_block_ids_for_computed_tokens",
    ("self", "request_id", "num_computed_tokens"),
)
ALLOCATE = (MANAGER, "KVCacheManager.allocate_slots", ("self", "request", "num_new_tokens"))
CACHED = (MANAGER, "KVCacheManager.get_computed_blocks", ("self", "request"))
FREE_BLOCKS = (SCHEDULER, "Scheduler._free_request_blocks", ("self", "request"))
FINISHED = (
    f"{NIXL}.pull_scheduler",
    "NixlPullConnectorScheduler.request_finished",
    ("self", "request", "block_ids"),
)
READ = (f"{NIXL}.pull_worker", "NixlPullConnectorWorker._read_blocks", ("self", "read_spec", "dst_engine_id"))
_V1_DRAFTER = ("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer.load_model")
_V2_DRAFTER = (f"{V2}.spec_decode.speculator", "DraftModelSpeculator.load_model")
ARRIVAL = (f"{NIXL}.base_worker", "NixlBaseConnectorWorker.get_transfer_results", ("self",))

NULL_BLOCK = 0

DRAFT_LAYERS: set[str] = set()
"""Names of the drafter's attention layers in this process, noted when the drafter is loaded."""


def _note_draft_layers(original: Any, _active: Active, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    v1 = hasattr(self, "_draft_attn_layer_names")
    DRAFT_LAYERS.update(self._draft_attn_layer_names if v1 else self.draft_attn_layer_names)
    return result


def tells_drafter_apart(mutant: str) -> None:
    """Declare the patches that note the drafter's layers in ``DRAFT_LAYERS``, for a mutant that needs them."""
    patch(mutant, *_V1_DRAFTER, ("self", "target_model"), runner="V1")(_note_draft_layers)
    patch(mutant, *_V2_DRAFTER, ("self", "target_model"), runner="V2")(_note_draft_layers)


def _received(worker: Any) -> dict[str, list[list[int]]]:
    """Return, per request, the physical block ids per KV-cache group that its transfer writes."""
    return {r: [list(g) for g in m.local_physical_block_ids] for r, m in worker._recving_metadata.items()}


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


def layers_by_group(runner: Any) -> list[set[str]]:
    """Return the names of the layers of each KV-cache group."""
    return [set(group.layer_names) for group in runner.kv_cache_config.kv_cache_groups]


def kv_of(runner: Any, layer: str) -> Any:
    """Return the KV cache of a layer, indexed by block."""
    cache = runner.compilation_config.static_forward_context[layer].kv_cache
    return cache[0] if isinstance(cache, (list, tuple)) else cache


def each_step(mutant: str) -> Callable[[Callable[[Active, Any, Any], None]], None]:
    """Declare a patch of what each runner does first with a step of the scheduler: with the mutant on, the decorated
    function does damage to the runner or the step before it."""

    def declare(damage: Callable[[Active, Any, Any], None]) -> None:
        def begin(original: Any, active: Active, self: Any, scheduler_output: Any) -> Any:
            if active():
                damage(active, self, scheduler_output)
            return original(self, scheduler_output)

        step = ("self", "scheduler_output")
        patch(mutant, RUNNER, "GPUModelRunner._update_states", step, runner="V1")(begin)
        patch(mutant, f"{V2}.model_runner", "GPUModelRunner.finish_requests", step, runner="V2")(begin)

    return declare


def cached_blocks(runner: Any, scheduler_output: Any) -> list[tuple[list[int], set[str]]]:
    """Return, per new request and KV-cache group, the ids of blocks that the request reuses instead of computing, and
    the group's layers."""
    size = runner.cache_config.block_size
    out = []
    for request in scheduler_output.scheduled_new_reqs:
        if whole := request.num_computed_tokens // size:
            mine = (list(group)[:whole] for group in request.block_ids)
            out += list(zip(mine, layers_by_group(runner), strict=True))
    return out


def answered_blocks(runner: Any, request: str) -> list[tuple[list[int], set[str]]]:
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
    return list(zip((group[first:] for group in groups), layers_by_group(runner), strict=True))


def forget_answers(active: Active, runner: Any, scheduler_output: Any, drafter: bool) -> None:
    """Zero, in the layers of the target or the drafter, the blocks with tokens of the answers that have just ended,
    which stay in the prefix cache."""
    for request in scheduler_output.finished_req_ids:
        for blocks, layers in answered_blocks(runner, request):
            for layer in layers & DRAFT_LAYERS if drafter else layers - DRAFT_LAYERS:
                active.fired()
                kv_of(runner, layer)[blocks] = 0


def blocks_of(runner: Any, request: str, group: int) -> Any:
    """Return the blocks of a request that the runner knows in a KV-cache group."""
    if hasattr(runner, "requests"):
        return runner.requests[request].block_ids[group]
    row = runner.req_states.req_id_to_index[request]
    return runner.block_tables.block_tables[group].gpu[row]


def prompt_tokens(runner: Any, request: str) -> int:
    """Return how many tokens the prompt of a request has that the runner knows."""
    if hasattr(runner, "requests"):
        return int(runner.requests[request].num_prompt_tokens)
    return int(runner.req_states.prompt_len.np[runner.req_states.req_id_to_index[request]])


def lose_token(runner: Any, layers: Collection[str], position: int, blocks: Callable[[int], Any]) -> None:
    """Write zeros over the keys and values of one token in some layers, by their own backends. ``blocks`` returns those
    of the request in a KV-cache group."""
    import torch

    for group, of_group in enumerate(runner.kv_cache_config.kv_cache_groups):
        size = of_group.kv_cache_spec.block_size
        for name in sorted(set(of_group.layer_names) & set(layers)):
            module, cache = runner.compilation_config.static_forward_context[name], kv_of(runner, name)
            # Layers with recurrent state keep nothing by token.
            if not hasattr(module, "num_kv_heads"):
                continue
            slot = int(blocks(group)[position // size]) * size + position % size
            zeros = torch.zeros((1, module.num_kv_heads, module.head_size), dtype=cache.dtype, device=cache.device)
            slots = torch.tensor([slot], dtype=torch.int64, device=cache.device)
            module.impl.do_kv_cache_update(module, zeros, zeros, cache, slots)


def chunk_ends(runner: Any, scheduler_output: Any) -> list[tuple[str, int, int]]:
    """Return the requests of which a step computes another chunk of the prompt: how many tokens they have computed, and
    how many are left."""
    cached = scheduler_output.scheduled_cached_reqs
    known = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    ends = [(id_, count, prompt_tokens(runner, id_) - count) for id_, count in known]
    return [(id_, count, left) for id_, count, left in ends if left > 0]


def lose_chunk_end(runner: Any, request: str, computed: int, layers: Collection[str]) -> None:
    """Zero the KV of the last token that a request has computed in some layers."""
    lose_token(runner, layers, computed - 1, lambda group: blocks_of(runner, request, group))
