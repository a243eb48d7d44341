"""How the layers of a model see the tokens before them, which decides which KV blocks a hand-off has to move."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from harness.profiles.methods import Method, modules_of
from harness.profiles.model import Profile
from harness.profiles.model_reference import described_in
from harness.util import json_io
from harness.util.quiet_transformers import load_transformers

_MOST_BYTES = 4 * 2**20
_HINTS = re.compile(r"sliding_window|interval|pattern|mamba|ssm|linear_|attn_layer|block_type")
"""Keys from which some models' configurations derive the kinds of their layers."""
FULL: tuple[int | None, ...] = (None,)
"""Every layer sees all tokens before."""


def config_in(folder: Path | None) -> Mapping[str, Any]:
    """Return the ``config.json`` of the model in a folder; an empty one, which counts as full attention, if it cannot
    be read."""
    try:
        found = json_io.loads(json_io.read_text(folder / "config.json", _MOST_BYTES)) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def windows_of(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return of each kind of attention in a model's config how many tokens a query sees; None means all.

    Layers of a kind that is not attention (state spaces, convolutions) are left out. A model of which neither its
    config nor transformers names the kind of each layer counts as full attention, unless it is a DFlash drafter with
    ``use_swa``.
    """
    text, own = _text(config), config.get("dflash_config")
    layers = _layers(text)
    dflash = own if isinstance(own, dict) else {}
    if dflash.get("use_swa") and "sliding_attention" not in layers:
        layers = ["sliding_attention"]
    window = dflash.get("swa_window_size", text.get("sliding_window"))
    kinds: list[int | None] = [None] if "full_attention" in layers else []
    if "sliding_attention" in layers and isinstance(window, int):
        kinds.append(window)
    return tuple(kinds) or FULL


def layer_windows(config: Mapping[str, Any]) -> list[int | None] | None:
    """Return of each layer of a model how many tokens a query sees, None of one that sees all; nothing where the config
    does not tell it of all, or some are not attention of these two kinds."""
    text = _text(config)
    number, layers, window = text.get("num_hidden_layers"), _layers(text), text.get("sliding_window")
    if type(number) is not int or text.get("kv_lora_rank") or config.get("dflash_config"):
        return None
    if not layers:
        return [None] * number if windows_of(config) == FULL and not text.get("use_sliding_window") else None
    kinds = {"full_attention": None, "sliding_attention": window}
    if len(layers) != number or any(kind not in kinds for kind in layers):
        return None
    return None if "sliding_attention" in layers and type(window) is not int else [kinds[kind] for kind in layers]


def windows_in(target: Mapping[str, Any], method: Method, arguments: Collection[str]) -> tuple[int | None, ...]:
    """Return ``windows_of`` all layers whose KV engines with these arguments keep: those of the target and of a drafter
    with a file of its own. Without its manager of several KV-cache groups, vLLM keeps as much of layers with a window
    as of the others."""
    models = [target, *([config_in(described_in(method.drafter))] if method.drafter else [])]
    windows = {window for config in models for window in windows_of(config)}
    if None in windows and "--disable-hybrid-kv-cache-manager" in arguments:
        return FULL
    return tuple(sorted(windows, key=lambda window: window or 0))


def recurrent(config: Mapping[str, Any]) -> bool:
    """Return whether a model has layers with a state instead of attention, such as Qwen3.5's linear ones."""
    return any(kind.startswith("linear") or not kind.endswith("attention") for kind in map(str, _layers(_text(config))))


def linear_attention(config: Mapping[str, Any]) -> bool:
    """Return whether some of a model's layers are gated delta nets, whose kernels vLLM chooses by themselves."""
    return any(str(kind).startswith("linear") for kind in _layers(_text(config)))


def target_config(profile: Profile) -> Mapping[str, Any]:
    """Return the config of a profile's target, as engines read it."""
    return _overridden(config_in(described_in(profile.target)), profile.engine.hf_overrides)


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other values. As in vLLM, configs of a part, such as ``text_config``, keep what the
    overrides do not name; other mappings are replaced."""
    return {**config, **{key: _value(key, config.get(key), value) for key, value in overrides.items()}}


def _value(key: str, now: Any, value: Any) -> Any:
    is_part = key.endswith("_config") and key != "quantization_config"
    return _overridden(now, value) if is_part and isinstance(now, dict) and isinstance(value, dict) else value


def modules_in(profile: Profile, method: Method) -> int:
    """Return how many modules of multi-token prediction a method drafts with. Of those in the target, vLLM reads the
    number in its file: overrides are the target's own."""
    return modules_of(method, *(config_in(described_in(model)) for model in (profile.target, method.drafter)))


def kv_numbers(profile: Profile, method: Method) -> int | None:
    """Return how many numbers of a token's KV engines keep and hand over, over all layers of target and drafter: keys
    and values times heads times their size. None where that does not follow from the configs: of layers that see a
    window, a state or a compressed latent, and of drafters whose layers are not told."""
    target = target_config(profile)
    own = config_in(described_in(method.drafter)) if method.drafter is not None else {}
    models = [(target, None), *_drafting(target, own, method, modules_in(profile, method))]
    each = [_numbers(config, layers) for config, layers in models]
    return None if None in each else sum(n for n in each if n is not None)


def _drafting(
    target: Mapping[str, Any], own: Mapping[str, Any], method: Method, modules: int
) -> list[tuple[Mapping[str, Any], int | None]]:
    """Return the config, and how many layers of it draft, of a method that drafts with a model; None is all of them."""
    if method.traits.drafter == "none":
        return []
    if method.vllm_method.endswith("mtp"):
        return [(own or target, modules)]
    return [(own, None)]


def _numbers(config: Mapping[str, Any], layers: int | None) -> int | None:
    text = _text(config)
    if windows_of(config) != FULL or recurrent(config) or text.get("kv_lora_rank"):
        return None
    heads = text.get("num_key_value_heads", text.get("num_attention_heads"))
    size, width = text.get("head_dim"), text.get("hidden_size")
    if size is None and isinstance(width, int) and isinstance(text.get("num_attention_heads"), int):
        size = width // text["num_attention_heads"]
    known = (text.get("num_hidden_layers") if layers is None else layers, heads, size)
    return None if not all(type(n) is int and n > 0 for n in known) else 2 * math.prod(known)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config about text, with the kinds of layers that transformers derives where it names none
    (Gemma 3, Qwen3-Next, Nemotron-H)."""
    part = config.get("text_config")
    text = part if isinstance(part, dict) else config
    derived = "layer_types" not in text and any(value and _HINTS.search(key) for key, value in text.items())
    return _derived(text) if derived else text


def _derived(text: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        # Seconds to import, which most models do without.
        made = load_transformers().AutoConfig.for_model(**text)
    except Exception:
        # Classes of hundreds of models read a file of anybody's.
        return text
    keys = ("layer_types", "sliding_window")
    return {**text, **{key: getattr(made, key, None) for key in keys}}


def _layers(text: Mapping[str, Any]) -> list[Any]:
    layers = text.get("layer_types")
    return layers if isinstance(layers, list) else []
