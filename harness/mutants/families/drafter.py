"""Defects of drafters: their KV is lost, written elsewhere or not restored, or nothing is drafted."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from harness.mutants.hooks import Active, patch
from harness.mutants.model import (
    CHUNK_EDGES,
    PAIR,
    SINGLE,
    STEPS,
    Mutant,
    OwnEngines,
    Trial,
    declare,
    in_both,
    in_single,
)
from harness.mutants.targets import (
    ALLOCATE,
    ARRIVAL,
    DRAFT_LAYERS,
    NIXL,
    RUNNER,
    SCHEDULER,
    V2,
    cached_blocks,
    chunk_ends,
    each_step,
    forget_answers,
    kv_of,
    lose_chunk_end,
    on_arrival,
    tells_drafter_apart,
)

_SEVERAL_MODULES = OwnEngines(
    "a drafter of several modules",
    like="cpu-mtp3",
    target=True,
    settings=("model_runner",),
    methods=True,
    scenarios=(CHUNK_EDGES,),
)


declare(
    Mutant(
        "M3",
        "DFlash writes drafts into blocks that it does not own",
        "vllm #42971, #43733, #49757",
        "decode",
        "no lookahead on the first prefill, one slot less for DFlash, a window check without the bonus "
        "token, and vacated block-table rows that keep their ids",
        historic=True,
    ),
    Trial(in_single("concurrent"), "drafter-kv", STEPS, method="dflash"),
)


@patch("M3", *ALLOCATE)
def _m3_first_prefill(
    original: Any, active: Active, self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
) -> Any:
    if active() and request.num_computed_tokens == 0 and kwargs.get("num_lookahead_tokens"):
        active.fired()
        kwargs["num_lookahead_tokens"] = 0
    return original(self, request, num_new_tokens, *args, **kwargs)


@patch("M3", SCHEDULER, "Scheduler.schedule", ("self",))
def _m3_one_slot_less(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Lower the scheduler's copy of ``VllmConfig.num_lookahead_tokens``, which can be switched at run time."""
    speculation = self.vllm_config.speculative_config
    less = int(active() and speculation is not None and speculation.use_dflash())
    self.num_lookahead_tokens = self.vllm_config.num_lookahead_tokens - less
    return original(self, *args, **kwargs)


@patch("M3", RUNNER, "GPUModelRunner._input_fits_in_drafter", ("self", "common_attn_metadata"), runner="V1")
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


declare(
    Mutant(
        "M4",
        "the drafter's KV never arrives",
        "end state of vllm #34529",
        "decode",
        "received blocks of the drafter's layers are zeroed when the transfer completes",
        historic=True,
    ),
    Trial(PAIR, "drafter-kv", STEPS, clean=SINGLE),
)
tells_drafter_apart("M4")


@patch("M4", *ARRIVAL)
@on_arrival
def _m4(worker: Any, blocks: list[int], layers: set[str]) -> bool:
    lost = layers & DRAFT_LAYERS
    for layer in lost:
        worker.device_kv_caches[layer][blocks] = 0
    return bool(lost)


declare(
    Mutant(
        "M4g",
        "the connector is finalised before the drafter ran",
        "vllm #34529, V2 #43719",
        "prefill",
        "KV is saved to the staging buffer after the target's forward pass and not after the drafter's; "
        "on CPU, where no staging exists, the mutant brings real staging buffers with it",
    ),
    # Without staging, as where GPUs send from their own memory, there is nothing to save too early.
    Trial(
        PAIR,
        "drafter-kv",
        STEPS,
        clean=SINGLE,
        engines=OwnEngines("staging buffers on P", like="cpu", settings=("kv_buffer_device",)),
    ),
)
tells_drafter_apart("M4g")


_MIXIN = "vllm.v1.worker.kv_connector_model_runner_mixin"
_WORKERS: list[Any] = []
"""The connector's workers in this process whose drafter may still have KV of the time before the mutant was on."""
_EMPTIED: list[Any] = []


def _empty_drafter() -> None:
    """Empty the drafter's KV once: what an early save finds there must not be that of the same prompt, asked before."""
    while _WORKERS:
        worker = _WORKERS.pop()
        for layer in DRAFT_LAYERS & set(worker.device_kv_caches):
            worker.device_kv_caches[layer].zero_()
        _EMPTIED.append(worker)


def _off() -> None:
    _WORKERS.extend(_EMPTIED)
    _EMPTIED.clear()


@patch(
    "M4g",
    _MIXIN,
    "KVConnectorModelRunnerMixin.maybe_get_kv_connector_output",
    ("scheduler_output", "defer_finalize"),
    runner="V1",
)
def _m4g_never_defers(original: Any, active: Active, scheduler_output: Any, defer_finalize: bool = False) -> Any:
    if not active():
        _off()
        return original(scheduler_output, defer_finalize)
    mixin: Any = importlib.import_module(_MIXIN)
    if not mixin.has_kv_transfer_group():
        return nullcontext()
    active.fired()
    _empty_drafter()
    return mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(scheduler_output, defer_finalize=False)


@patch("M4g", _MIXIN, "KVConnectorModelRunnerMixin.finalize_kv_connector", (), runner="V1")
def _m4g_no_finalize(original: Any, active: Active) -> None:
    if not active():
        original()


@patch("M4g", f"{V2}.kv_connector", "ActiveKVConnector.finish_forward", ("self",), runner="V2")
def _m4g_saves_early(original: Any, active: Active, self: Any) -> None:
    original(self)
    connector = self.kv_connector
    vars(connector).pop("wait_for_save", None)
    if not active():
        _off()
    elif not self._disabled:
        active.fired()
        _empty_drafter()
        connector.wait_for_save()
        # Not again once the drafter has run.
        connector.wait_for_save = lambda: None


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@patch("M4g", f"{NIXL}.base_worker", "NixlBaseConnectorWorker.__init__", ("self",))
def _m4g_staging_worker(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> None:
    """Give the connector on CPU, which sends from the KV cache itself, the staging buffers that CUDA engines have."""
    original(self, *args, **kwargs)
    _WORKERS.append(self)
    if _on_cpu():
        self.use_host_buffer, self.copy_blocks = True, _copy_blocks


def _copy_blocks(source: Any, target: Any, from_ids: Iterable[int], to_ids: Iterable[int], direction: str) -> None:
    for layer in source:
        target[layer][list(to_ids)] = source[layer][list(from_ids)]


@patch("M4g", f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler.__init__", ("self",))
def _m4g_staging_scheduler(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if _on_cpu():
        self.use_host_buffer = True


declare(
    Mutant(
        "N4",
        "the drafter's context is not restored from the cache",
        "vllm #47930",
        "decode",
        "the drafter's KV of blocks taken from the prefix cache is zeroed",
    ),
    Trial(in_single("prefix-hit"), "drafter-kv", STEPS, clean=SINGLE),
)
tells_drafter_apart("N4")


@each_step("N4")
def _n4(active: Active, runner: Any, scheduler_output: Any) -> None:
    for blocks, layers in cached_blocks(runner, scheduler_output):
        for layer in layers & DRAFT_LAYERS:
            active.fired()
            kv_of(runner, layer)[blocks] = 0


declare(
    Mutant(
        "N9",
        "an answer's blocks do not keep the drafter's context",
        "class of vllm #47930",
        "decode",
        "as N8, in the drafter's layers",
    ),
    Trial(in_single("continuation"), "drafter-kv", STEPS, clean=SINGLE),
)
tells_drafter_apart("N9")


@each_step("N9")
def _n9(active: Active, runner: Any, scheduler_output: Any) -> None:
    forget_answers(active, runner, scheduler_output, drafter=True)


declare(
    Mutant(
        "N23",
        "drafts are dropped without a word",
        "speculation that is off although it was asked for",
        "decode",
        "Scheduler.schedule finds no drafts at any request",
    ),
    # That nothing was drafted is UNKNOWN; that the steps account for less than the answer is not.
    Trial(SINGLE, "sampler", ("response-invariants", "drafts-happened")),
)


@patch("N23", SCHEDULER, "Scheduler.schedule", ("self",))
def _n23(original: Any, active: Active, self: Any, *args: Any, **kwargs: Any) -> Any:
    # Where steps overlap, as on GPUs, requests have placeholders for drafts that only the runner knows.
    drafted = [request for request in self.running if request.spec_token_ids]
    if drafted and active():
        active.fired()
        for request in drafted:
            request.spec_token_ids = []
    return original(self, *args, **kwargs)


declare(
    Mutant(
        "N31",
        "P hands over the KV of drafts",
        "vllm #55055",
        "both",
        "_prefill_backoff is 0: P hands over every token of a prompt, in whose last slots the later ones "
        "of several modules have written unverified drafts",
    ),
    # Of a drafter of several modules. A known defect loses drafts in every answer of the pair, so that acceptance shows
    # nothing: which tokens P hands over does.
    Trial(
        PAIR,
        "drafter-kv",
        ("transfer",),
        clean=SINGLE,
        method="mtp3",
        long=True,
        engines=_SEVERAL_MODULES,
    ),
)


@patch("N31", f"{NIXL}.base_scheduler", "NixlBaseConnectorScheduler._prefill_backoff", ("self",))
def _n31(original: Any, active: Active, self: Any) -> Any:
    kept = original(self)
    if kept and active():
        active.fired()
        return 0
    return kept


declare(
    Mutant(
        "N46",
        "a crowded step does not write the drafter's KV",
        "vllm #57053, #51510",
        "both",
        "a step whose k is 0 by the number of its requests returns before the drafter runs, so that its KV of "
        "the step's tokens is never written",
    ),
    Trial(
        in_both("concurrent"),
        "drafter-kv",
        STEPS,
        # Alone, an engine drafts in every step.
        clean=(*PAIR, *SINGLE),
        method="dynamic-eagle3",
        long=True,
        engines=OwnEngines("k by the size of the batch", like="cpu-dynamic-k", target=True, methods=True),
    ),
)


@patch(
    "N46",
    "vllm.v1.spec_decode.llm_base_proposer",
    "SpecDecodeBaseProposer.propose",
    ("self", "num_speculative_tokens"),
    runner="V1",
)
def _n46_v1(original: Any, active: Active, self: Any, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Any:
    if num_speculative_tokens or not active():
        return original(self, num_speculative_tokens, *args, **kwargs)
    active.fired()
    tokens = kwargs["next_token_ids"]
    return tokens.new_empty((len(tokens), 0))


@patch(
    "N46",
    f"{V2}.spec_decode.target_dependent_ar.speculator",
    "TargetDependentARSpeculator.propose",
    ("self", "input_batch"),
    runner="V2",
)
def _n46_v2(original: Any, active: Active, self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("num_speculative_tokens") != 0 or not active():
        return original(self, input_batch, *args, **kwargs)
    active.fired()
    drafts = self.draft_tokens[: input_batch.num_reqs]
    drafts.fill_(-1)
    return drafts


declare(
    Mutant(
        "N64",
        "a chunk ends without the KV of a drafter's second module",
        "class of vllm #55055",
        "decode",
        "the second of several modules does not write the last token of a chunk that does not end the prompt",
    ),
    # Prompts that fill a step beside others: with the same ones in a step of their own no chunk ends there.
    Trial(
        in_single("chunk-edges"),
        "drafter-kv",
        ("kv-computed",),
        clean=SINGLE,
        method="mtp3",
        long=True,
        engines=_SEVERAL_MODULES,
    ),
)
tells_drafter_apart("N64")


@each_step("N64")
def _n64(active: Active, runner: Any, scheduler_output: Any) -> None:
    for request, computed, _ in chunk_ends(runner, scheduler_output):
        active.fired()
        lose_chunk_end(runner, request, computed, sorted(DRAFT_LAYERS)[1:2])


declare(
    Mutant(
        "N66",
        "a chunk that leaves fewer tokens than drafts ends without the drafter's KV",
        "class of vllm #55178",
        "decode",
        "of a chunk behind which at most two tokens of the prompt are left, the drafter does not write the last one",
    ),
    # Longer rests, as those of prompts that are longer than a step, show nothing. DFlash keeps slots of a step for
    # drafts, so that a prompt of a whole step less a token does not fit, and no answer has its KV from one step.
    Trial(
        in_single("chunk-edges"),
        "drafter-kv",
        ("kv-computed", *STEPS),
        clean=(*SINGLE, *in_single("chunked-prefill")),
        method="dflash",
        borrowed=(CHUNK_EDGES,),
    ),
)
tells_drafter_apart("N66")


@each_step("N66")
def _n66(active: Active, runner: Any, scheduler_output: Any) -> None:
    for request, computed, left in chunk_ends(runner, scheduler_output):
        if left <= 2:
            active.fired()
            lose_chunk_end(runner, request, computed, DRAFT_LAYERS)


_GIVEN_LESS = "the hidden state of the last known token, which the drafter is given, is zero in the first step after "
_AFTER_HAND_OFF, _AFTER_HIT, _AFTER_RESUME = "a hand-off", "a prefix hit", "a preemption"

declare(
    Mutant(
        "N56",
        "the first step after a hand-off gives the drafter no hidden state",
        "class of vllm #34529: what D's drafter needs beside its KV",
        "decode",
        f"{_GIVEN_LESS}{_AFTER_HAND_OFF}",
    ),
    # Its own KV of that token is made of it. The drafts of probes are the same.
    Trial(PAIR, "drafter-kv", ("kv-computed",), clean=SINGLE),
)
declare(
    Mutant(
        "N57",
        "the first step after a prefix hit gives the drafter no hidden state",
        "class of vllm #47930",
        "decode",
        f"{_GIVEN_LESS}{_AFTER_HIT}",
    ),
    Trial(in_single("prefix-hit"), "drafter-kv", ("kv-computed",), clean=SINGLE),
)
declare(
    Mutant(
        "N58",
        "the first step after a preemption gives the drafter no hidden state",
        "class of vllm #47930",
        "decode",
        f"{_GIVEN_LESS}{_AFTER_RESUME}",
    ),
    # The token is one of the answer.
    Trial(
        in_single("pressure"),
        "drafter-kv",
        ("kv-computed",),
        clean=SINGLE,
        # The same prompts by themselves, to compare with.
        beside=in_single("chunked-prefill"),
        method="dflash",
    ),
)


def _begun(runner: Any, step: Any) -> Iterator[tuple[str, str, int]]:
    """Yield the requests that begin, or go on, in a step with KV that they did not compute in it: after what, and the
    position of the last known token."""
    for new in step.scheduled_new_reqs:
        last = len(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids) - 1
        if last >= len(new.prompt_token_ids):
            yield new.req_id, _AFTER_RESUME, last
        elif new.num_computed_tokens:
            # D has all tokens but the last one from P; a hit leaves more.
            yield new.req_id, _AFTER_HAND_OFF if new.num_computed_tokens == last else _AFTER_HIT, last
    for id_ in step.scheduled_cached_reqs.req_ids:
        if id_ in step.scheduled_cached_reqs.resumed_req_ids:
            yield id_, _AFTER_RESUME, runner.requests[id_].num_tokens - 1


def _computed(step: Any) -> dict[str, int]:
    """Return how many tokens each request of a step has computed before."""
    cached = step.scheduled_cached_reqs
    new = {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
    return new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _without(hidden: Any, rows: list[slice]) -> Any:
    """Return hidden states of which those of some rows are zero."""
    if hidden is None or isinstance(hidden, (list, tuple)):
        return hidden and [_without(one, rows) for one in hidden]
    hidden = hidden.clone()
    for mine in rows:
        hidden[mine] = 0
    return hidden


def _rows(ids: Iterable[str], starts: Any, lost: dict[str, int]) -> list[slice]:
    """Return the rows of a step whose hidden states are ``lost``, by the number of a request's tokens before them;
    those of the requests begin at ``starts``."""
    return [slice(int(starts[i]) + lost[id_], int(starts[i + 1])) for i, id_ in enumerate(ids) if id_ in lost]


def _starves(mutant: str, moment: str) -> None:
    """Declare the patches by which the first step after a moment gives the drafter zeros."""
    last: dict[str, int] = {}
    lost: dict[str, int] = {}

    @each_step(mutant)
    def note(active: Active, runner: Any, scheduler_output: Any) -> None:
        last.update({id_: at for id_, after, at in _begun(runner, scheduler_output) if after == moment})
        lost.clear()
        for id_, before in _computed(scheduler_output).items():
            # What is longer than a step is computed in several, of which the last one drafts.
            if id_ in last and last[id_] < before + scheduler_output.num_scheduled_tokens[id_]:
                lost[id_] = last.pop(id_) - before

    def v1(
        original: Any,
        active: Active,
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        *args: Any,
    ) -> Any:
        rows = _rows(self.input_batch.req_ids, self.query_start_loc.np, lost) if active() else []
        if rows:
            active.fired()
            hidden_states, aux_hidden_states = _without(hidden_states, rows), _without(aux_hidden_states, rows)
        return original(
            self,
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            *args,
        )

    def v2(
        original: Any,
        active: Active,
        self: Any,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rows = _rows(input_batch.req_ids, input_batch.query_start_loc_np, lost) if active() else []
        if rows:
            active.fired()
            last_hidden_states = _without(last_hidden_states, rows)
            aux_hidden_states = _without(aux_hidden_states, rows)
        return original(
            self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, *args, **kwargs
        )

    step = ("self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states")
    patch(mutant, RUNNER, "GPUModelRunner.propose_draft_token_ids", step, runner="V1")(v1)
    given = ("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states")
    for module, name in (("target_dependent_ar", "TargetDependentARSpeculator"), ("dflash", "DFlashSpeculator")):
        patch(mutant, f"{V2}.spec_decode.{module}.speculator", f"{name}.propose", given, runner="V2", by_drafter=True)(
            v2
        )


for _mutant, _moment in (("N56", _AFTER_HAND_OFF), ("N57", _AFTER_HIT), ("N58", _AFTER_RESUME)):
    _starves(_mutant, _moment)


declare(
    Mutant(
        "N75",
        "the first step after a hand-off drafts on from no hidden state",
        "class of vllm #34529: what D's drafter needs beside its KV",
        "decode",
        "in the first step after a hand-off, the hidden state is zero of which the drafter makes its second draft, "
        "and so is each one behind",
    ),
    # The next step writes the KV of these tokens anew, and the drafts of probes are the same.
    Trial(PAIR, "drafter-input", ("drafts-computed",), clean=SINGLE),
)


class _Passes:
    """What is known of the drafter's passes in a step."""

    def __init__(self) -> None:
        self.starved = False
        """Whether a request begins in the step after a hand-off."""
        self.made = 0


_passes = _Passes()


@each_step("N75")
def _n75_step(_active: Active, runner: Any, scheduler_output: Any) -> None:
    _passes.starved = any(after == _AFTER_HAND_OFF for _, after, _ in _begun(runner, scheduler_output))
    _passes.made = 0


@patch(
    "N75",
    "vllm.model_executor.models.llama_eagle3",
    "Eagle3LlamaForCausalLM.forward",
    ("self", "input_ids", "positions", "hidden_states"),
)
def _n75(
    original: Any,
    active: Active,
    self: Any,
    input_ids: Any,
    positions: Any,
    hidden_states: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _passes.made += 1
    if _passes.starved and _passes.made > 1 and active():
        active.fired()
        hidden_states = hidden_states * 0
    return original(self, input_ids, positions, hidden_states, *args, **kwargs)
