"""Damage that ``benchmarks.blind_spots`` and ``benchmarks.noisy_nights`` put into D: loaded by vLLM as a plugin, told
by a file what to do. A variable adds noise to the logits of any engine.

The file holds a JSON object, empty for no damage: ``{"layer", "part", "block", "how"}`` for KV that arrived, with
``"token"`` and ``"head"`` in place of ``"block"`` for that of one token in one head, ``"state"`` and ``"head"`` for
one head of a recurrent state, ``{"zeroed"}`` for all KV of a request, one layer's or one block's of that; with
``"arrivals"``, only for the requests with these numbers since that was chosen,
``{"input", "how"}`` for wrong drafter input, in every step or with ``"first"`` in the first one after an arrival
alone, or ``{"input", "how", "module"}`` for what one of several modules of multi-token prediction is given. Beside it,
``.layers`` gets the names of the layers with a KV cache, the drafter's and those with recurrent state marked, and
``.done`` a line for each time that something was damaged.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

FILE = "KV_HARNESS_DAMAGE"
NOISE = "KV_HARNESS_NOISE"
"""Standard deviation of the noise of each logit, in nats."""
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
_LOGITS = "vllm.model_executor.layers.logits_processor"
_MODULES = "vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator"
_DRAFTERS: set[str] = set()
_GENERATOR: torch.Generator | None = None
_ARRIVED: Counter[str] = Counter()
"""Requests that arrived since a damage was chosen, by its text."""
_FRESH: set[str] = set()
"""A word while no step was drafted since a request arrived."""


def register() -> None:
    """Install the patches in an engine that is to be damaged. vLLM calls this in every process of an engine."""
    if not os.environ.get(FILE) and not os.environ.get(NOISE):
        return
    from harness.mutants.hooks import Patch, Switch, install_patches
    from harness.mutants.targets import ARRIVAL, on_arrival_of_groups

    noise = Patch("damage", _LOGITS, "LogitsProcessor.forward", ("self", "lm_head", "hidden_states"), _with_noise)
    patches = (
        Patch("damage", *ARRIVAL, on_arrival_of_groups(_damage_arrival)),
        Patch(
            "damage", _PROPOSER, "SpecDecodeBaseProposer.propose", ("self", "num_speculative_tokens"), _before_drafting
        ),
        Patch("damage", _PROPOSER, "SpecDecodeBaseProposer.load_model", ("self", "target_model"), _note_drafters),
        Patch("damage", _MODULES, "MultiModuleMTPSpeculator._run_model", ("self", "num_tokens"), _before_module),
        Patch("damage", _MODULES, "MultiModuleMTPSpeculator.load_model", ("self", "target_model"), _note_drafters),
    )
    chosen = (*(patches if os.environ.get(FILE) else ()), *([noise] if os.environ.get(NOISE) else ()))
    install_patches(chosen, Switch(frozenset({"damage"}), None, together=False))


def _with_noise(original: Any, _active: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    logits = original(self, *args, **kwargs)
    # A generator of the process alone, so that the engine's own draws stay as they are.
    global _GENERATOR
    if _GENERATOR is None:
        _GENERATOR = torch.Generator(device=logits.device)
        _GENERATOR.seed()
    moved = torch.randn(logits.shape, generator=_GENERATOR, device=logits.device, dtype=torch.float32)
    return logits + moved.to(logits.dtype) * float(os.environ[NOISE])


def _wanted() -> dict[str, str]:
    wanted: dict[str, str] = json.loads(Path(os.environ[FILE]).read_text(encoding="utf-8") or "{}")
    return wanted


def _note(suffix: str, text: str) -> None:
    with Path(os.environ[FILE] + suffix).open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def _note_drafters(original: Any, _active: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    _DRAFTERS.update(_drafting_layers(self))
    return result


def _drafting_layers(drafter: Any) -> set[str]:
    """Return the names of a drafter's layers with a KV cache, in either model runner."""
    return getattr(drafter, "draft_attn_layer_names", None) or drafter._draft_attn_layer_names


def _damage_arrival(worker: Any, groups: list[list[int]]) -> bool:
    """Damage a block of a request that arrived, and return whether one was: ``groups`` has its blocks in each KV-cache
    group."""
    if not Path(os.environ[FILE] + ".layers").exists():
        for name in worker.device_kv_caches:
            state = "-state" if _has_state(worker, name) else ""
            _note(".layers", f"{name} {'drafter' if name in _DRAFTERS else 'target'}{state}")
    _FRESH.add("arrived")
    wanted = _wanted()
    if "layer" not in wanted and "zeroed" not in wanted:
        return False
    if "arrivals" in wanted:
        _ARRIVED[chosen := json.dumps(wanted)] += 1
        if str(_ARRIVED[chosen] - 1) not in wanted["arrivals"].split(","):
            return False
    if "zeroed" in wanted:
        _zero_arrival(worker, groups, wanted["zeroed"])
        _note(".done", "request")
        return True
    if "token" in wanted:
        _damage_token(worker, groups, wanted)
        _note(".done", "token")
        return True
    if "state" in wanted:
        _damage_state(worker, groups, wanted)
        _note(".done", "state")
        return True
    # Block 0 stands for those that a window has left, which are not handed over.
    group = [b for b in groups[worker.kv_cache_config.transfer_group_index_by_layer[wanted["layer"]]] if b]
    at = {"first": 0, "middle": len(group) // 2, "last": len(group) - 1}[wanted["block"]]
    if _has_state(worker, wanted["layer"]):
        layer = worker.vllm_config.compilation_config.static_forward_context[wanted["layer"]]
        layer.kv_cache[wanted["part"] == "state"][group[at]] = 0
    else:
        _damage_block(worker.device_kv_caches[wanted["layer"]], group, at, wanted["part"], wanted["how"])
    _note(".done", "block")
    return True


def _zero_arrival(worker: Any, groups: list[list[int]], what: str) -> None:
    """Zero the KV of a request that arrived: in all layers, in one ``layer``, or in one ``block`` of it."""
    names = [name for name in worker.device_kv_caches if name not in _DRAFTERS]
    for name in names if what == "all" else names[len(names) // 2 :][:1]:
        blocks = [b for b in groups[worker.kv_cache_config.transfer_group_index_by_layer[name]] if b]
        for at in [len(blocks) // 2] if what == "block" else range(len(blocks)):
            for part in "KV":
                _damage_block(worker.device_kv_caches[name], blocks, at, part, "zero")


def _has_state(worker: Any, layer: str) -> bool:
    """Return whether a layer has recurrent state, a convolution and the state itself, in place of keys and values."""
    return hasattr(worker._layer_specs[layer], "mamba_cache_mode")


def _damage_block(cache: Any, group: list[int], at: int, part: str, how: str) -> None:
    """Damage keys or values of a block. vLLM's CPU backend keeps a block as (heads, tokens of K then of V, size)."""
    _, heads, tokens, _ = cache.size()
    halves = cache.view(cache.size(0), heads, tokens * 2, -1).chunk(2, dim=2)
    chosen = halves[0 if part == "K" else 1]
    if how == "zero":
        chosen[group[at]] = 0
    elif how == "flip":
        chosen[group[at]] = chosen[group[at]].flip(1).clone()
    else:
        chosen[group[at]] = chosen[group[at - 1]].clone()


def _damage_token(worker: Any, groups: list[list[int]], wanted: dict[str, str]) -> None:
    """Damage keys or values of one token in one head: all zero, one bit of one, or those of the token before."""
    from harness.engines.witness import kv_harness_witness

    module = worker.vllm_config.compilation_config.static_forward_context[wanted["layer"]]
    cache = module.kv_cache[0] if isinstance(module.kv_cache, (list, tuple)) else module.kv_cache
    shape = 2, cache.shape[2], module.num_kv_heads, module.head_size
    places = kv_harness_witness._places(module, cache, shape)["KV".index(wanted["part"])]
    group = groups[worker.kv_cache_config.transfer_group_index_by_layer[wanted["layer"]]]
    block, at = divmod(int(wanted["token"]), places.shape[0])
    page, mine = cache[group[block]].view(-1), places[at, int(wanted["head"])]
    if wanted["how"] == "zero":
        page[mine] = 0
    elif wanted["how"] == "bit":
        numbers = page.view({2: torch.int16, 4: torch.int32}[page.element_size()])
        numbers[mine[0]] ^= 1
    else:
        page[mine] = page[places[at - 1, int(wanted["head"])]].clone()


def _damage_state(worker: Any, groups: list[list[int]], wanted: dict[str, str]) -> None:
    """Damage one head of a recurrent state that arrived, or its convolution: all zero, or one bit of one number."""
    module = worker.vllm_config.compilation_config.static_forward_context[wanted["layer"]]
    blocks = groups[worker.kv_cache_config.transfer_group_index_by_layer[wanted["layer"]]]
    mine = module.kv_cache[wanted["part"] == "state"][[b for b in blocks if b][-1]]
    mine = mine[int(wanted["head"])] if wanted["part"] == "state" else mine
    if wanted["how"] == "zero":
        mine.zero_()
    else:
        numbers = mine.view({2: torch.int16, 4: torch.int32}[mine.element_size()])
        numbers[(0,) * numbers.dim()] ^= 1


def _before_drafting(original: Any, _active: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    wanted, first = _wanted(), bool(_FRESH)
    _FRESH.clear()
    if "input" not in wanted or ("first" in wanted and not first):
        return original(self, *args, **kwargs)
    given = inspect.signature(original).bind(self, *args, **kwargs)
    _damage_input(self, given.arguments, wanted["input"], wanted["how"])
    _note(".done", "input")
    return original(*given.args, **given.kwargs)


def _before_module(original: Any, _active: Any, self: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
    wanted = _wanted()
    if "module" not in wanted or int(wanted["module"]) != kwargs["spec_module_idx"]:
        return original(self, num_tokens, *args, **kwargs)
    buffers = {
        "hidden states": self.hidden_states,
        "token ids": self.input_buffers.input_ids,
        "positions": self.input_buffers.positions,
    }
    _note(".done", "input")
    if wanted["input"] not in buffers:
        _zero_kv(self, [sorted(self.draft_attn_layer_names)[kwargs["spec_module_idx"]]])
        return original(self, num_tokens, *args, **kwargs)
    given = buffers[wanted["input"]][:num_tokens]
    right = given.clone()
    given.copy_(_changed(right, wanted["how"]))
    result = original(self, num_tokens, *args, **kwargs)
    given.copy_(right)
    return result


def _damage_input(proposer: Any, given: dict[str, Any], name: str, how: str) -> None:
    if name == "own KV":
        _zero_kv(proposer, _drafting_layers(proposer))
    else:
        given[name] = _changed(given[name], how)


def _zero_kv(drafter: Any, layers: Iterable[str]) -> None:
    context = drafter.vllm_config.compilation_config.static_forward_context
    for layer in layers:
        cache = context[layer].kv_cache
        (cache[0] if isinstance(cache, (list, tuple)) else cache).zero_()


def _changed(value: Any, how: str) -> Any:
    """Return a damaged copy of a tensor of which each row belongs to a token."""
    if how == "zero":
        return value.new_zeros(value.shape)
    if how == "row before":
        return value.roll(1, 0)
    if how == "another":
        # A neighbour in the vocabulary; there is none below the first token.
        return (value - 1).clamp(min=0)
    return value + 1
