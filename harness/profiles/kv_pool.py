"""How many KV blocks vLLM wants in the pool of an engine before it starts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from harness.profiles.engine_config import EngineConfig
from harness.profiles.kv_layout import config_in, layer_windows, recurrent, target_config
from harness.profiles.methods import Method
from harness.profiles.model import Profile
from harness.profiles.model_reference import described_in

_STEPS_OVERLAP = {"none", "eagle", "eagle3", "mtp", "ngram_gpu", "draft_model", "dspark", "dflash"}
"""Methods with which vLLM schedules a step while the one before it runs, where the platform can."""
_HEADS = ("num_key_value_heads", "head_dim")


def too_small_pool(part: Profile, method: Method, role: str) -> str | None:
    """Return why an engine would end at its start for lack of KV blocks; None also where that is not known."""
    engine = part.engine.of(role)
    needed = least_blocks(part, method, role)
    if engine.kv_blocks is None or needed is None or engine.kv_blocks >= needed:
        return None
    overlapping = ", two steps of which may be under way" if _in_flight(engine, method) == 2 else ""
    return (
        f"expected engine.kv_blocks of at least {needed} for the {role} engine ({method.kind}), which vLLM wants for "
        f"the null block and one request of engine.max_model_len = {engine.max_model_len} tokens in steps of "
        f"{engine.max_num_batched_tokens} tokens{overlapping}, found {engine.kv_blocks}; raise it, or lower one of the "
        "others"
    )


def least_blocks(part: Profile, method: Method, role: str) -> int | None:
    """Return the fewest blocks of a pool with which vLLM 0.32.0 starts an engine (``get_kv_cache_configs`` and
    ``SlidingWindowSpec.max_admission_blocks_per_request``); None where that does not follow from the configs.

    Layers that see everything hold all blocks of a request, those with a window the blocks of the window and of all
    steps that are under way, each KV-cache group for itself.
    """
    engine, windows = part.engine.of(role), _layers(part, method)
    step = engine.max_num_batched_tokens
    if windows is None or step is None or engine.devices_of(role) != 1 or not _known_connector(engine):
        return None
    size, longest = engine.block_size, engine.max_model_len
    if "--disable-hybrid-kv-cache-manager" in engine.extra_args:
        windows = [None] if None in windows else windows
    total = 0
    for window, groups in _groups(Counter(windows)).items():
        if window is None:
            total += groups * math.ceil(longest / size)
        else:
            held = min(window - 1 + _in_flight(engine, method) * step, longest)
            total += groups * (math.ceil(held / size) + 1)
    # The null block is no request's.
    return total + 1


def _in_flight(engine: EngineConfig, method: Method) -> int:
    """Return how many steps of an engine may be under way at once."""
    if engine.device == "cpu" or "--no-async-scheduling" in engine.extra_args:
        return 1
    told = "mtp" if method.vllm_method.endswith("_mtp") else method.vllm_method
    return 2 if told in _STEPS_OVERLAP else 1


def _known_connector(engine: EngineConfig) -> bool:
    """Return whether engines keep KV-cache groups apart: not all connectors can."""
    return engine.kv_connector in (None, "NixlConnector")


def _layers(part: Profile, method: Method) -> list[int | None] | None:
    """Return the window of each layer whose KV engines keep, None of one that sees everything; nothing where that is
    not known: of layers of unlike sizes, with a state, or of drafters that are part of the target."""
    target = target_config(part)
    if method.traits.drafter == "none" and method.drafter is None:
        models = [target]
    elif method.drafter is not None:
        models = [target, config_in(described_in(method.drafter))]
    else:
        return None
    each = [layer_windows(config) for config in models]
    alike = len({tuple(config.get(key) for key in _HEADS) for config in models}) == 1
    if not alike or any(found is None for found in each) or any(recurrent(config) for config in models):
        return None
    return [window for found in each for window in found or ()]


def _groups(layers: Mapping[int | None, int]) -> dict[int | None, int]:
    """Return how many KV-cache groups vLLM makes of the layers of each kind: all of as many layers, the fewest of any
    kind, or the most if these are hardly more (``_get_kv_cache_groups_uniform_page_size``)."""
    fewest, most = min(layers.values()), max(layers.values())
    size = most if most < 1.5 * fewest else fewest
    return {window: math.ceil(number / size) for window, number in layers.items()}
