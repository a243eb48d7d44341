"""Defects of layers with recurrent state."""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.mutants.hooks import Active, patch
from harness.mutants.model import (
    PAIR,
    RECURRENT,
    SINGLE,
    TOKENS,
    Mutant,
    OwnEngines,
    Trial,
    declare,
    in_pair,
    in_single,
)
from harness.mutants.targets import NULL_BLOCK, RUNNER, V2, blocks_of, chunk_ends, each_step

declare(
    Mutant(
        "N27",
        "the recurrent state never arrives",
        "class of vllm #34529, #43719, in layers with recurrent state",
        "decode",
        "D zeroes the state of each hand-off, and keeps the KV of attention",
    ),
    # Of a target with recurrent state, likewise. A hit on D that gets a state from P does not continue from its own.
    Trial(PAIR, "target-kv", TOKENS, clean=SINGLE, method="none", prompts="some", long=True, engines=RECURRENT),
)


def _states(runner: Any) -> list[tuple[int, Any]]:
    """Return the tensors of recurrent state, convolutions included, each with the index of its KV-cache group."""
    return [
        (index, tensor)
        for index, group in enumerate(runner.kv_cache_config.kv_cache_groups)
        if hasattr(group.kv_cache_spec, "mamba_cache_mode")
        for layer in group.layer_names
        for tensor in runner.compilation_config.static_forward_context[layer].kv_cache
    ]


@each_step("N27")
def _n27(active: Active, runner: Any, scheduler_output: Any) -> None:
    for request in scheduler_output.scheduled_new_reqs:
        # What remains to be computed of a request with a state from P is one token.
        if request.num_computed_tokens and scheduler_output.num_scheduled_tokens[request.req_id] == 1:
            for group, tensor in _states(runner):
                active.fired()
                tensor[list(request.block_ids[group])] = 0


declare(
    Mutant(
        "N28",
        "a prefix hit restores the state of a placeholder",
        "class of vllm #53912, #43559, in layers with recurrent state",
        "decode",
        "the state that a hit continues from is replaced by that of the null block, which stands for those before",
    ),
    Trial(in_single("prefix-hit"), "target-kv", TOKENS, clean=SINGLE, method="none", long=True, engines=RECURRENT),
)


@each_step("N28")
def _n28(active: Active, runner: Any, scheduler_output: Any) -> None:
    for request in scheduler_output.scheduled_new_reqs:
        whole = request.num_computed_tokens // runner.cache_config.block_size
        own = scheduler_output.num_scheduled_tokens[request.req_id] > 1
        for group, tensor in _states(runner) if whole and own else ():
            active.fired()
            tensor[request.block_ids[group][whole - 1]] = tensor[NULL_BLOCK]


declare(
    Mutant(
        "N30",
        "placeholders of drafts are taken for tokens of the prompt",
        "class of vllm #55178",
        "decode",
        "the last token of a prompt, padded with placeholders for drafts, runs as a part of the prompt, "
        "so that the recurrent state takes them in",
    ),
    # Of the same target with its drafter: D computes the last token of a prompt from a state of P's, with placeholders
    # behind it where they fit into the block. A known defect shows where they do not.
    Trial(
        PAIR,
        "target-kv",
        TOKENS,
        clean=SINGLE,
        method="hybrid-mtp",
        prompts="roomy",
        long=True,
        engines=OwnEngines(
            "a target with recurrent state and its drafter",
            like="cpu-hybrid-mtp",
            target=True,
            settings=("dtype",),
            methods=True,
            max_tokens=True,
        ),
    ),
)


@patch("N30", RUNNER, "GPUModelRunner._build_attention_metadata", ("self", "num_tokens", "num_reqs"), runner="V1")
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
    f"{V2}.model_states.mamba_hybrid",
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


declare(
    Mutant(
        "N63",
        "a chunk of one token leaves the state of the chunk before it",
        "class of vllm #53912, in layers with recurrent state",
        "prefill",
        "where one token of a prompt that P computes is behind its last whole block, its state stays that of the block",
    ),
    # A prompt has two tokens past a block then, of which P leaves the last one to D.
    Trial(
        in_pair("residues"),
        "target-kv",
        ("kv-computed", *TOKENS),
        clean=(*PAIR, *SINGLE, *in_single("residues")),
        method="none",
        long=True,
        engines=RECURRENT,
    ),
)


@patch("N63", f"{V2}.model_runner", "GPUModelRunner.execute_model", ("self", "scheduler_output"), runner="V2")
@patch("N63", RUNNER, "GPUModelRunner.execute_model", ("self", "scheduler_output"), runner="V1")
def _n63(original: Any, active: Active, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    ends = chunk_ends(self, scheduler_output) if active() else []
    result = original(self, scheduler_output, *args, **kwargs)
    for id_, computed, left in ends:
        at, past = divmod(computed, self.cache_config.block_size)
        if left == 1 and not past:
            active.fired()
            for group, tensor in _states(self):
                blocks = blocks_of(self, id_, group)
                tensor[int(blocks[at])] = tensor[int(blocks[at - 1])]
    return result
