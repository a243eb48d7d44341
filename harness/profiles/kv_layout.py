"""How the layers of a model see the tokens before them, which decides which KV blocks a hand-off has to move."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.util import json_io

_MOST_BYTES = 4 * 2**20
FULL: tuple[int | None, ...] = (None,)
"""Every layer sees all tokens before."""


def windows_in(folder: Path) -> tuple[int | None, ...]:
    """Return of each kind of attention of the model in a folder how many tokens a query sees; None means all.

    A model whose ``config.json`` cannot be read, or does not name the kind of each layer, counts as full attention.
    """
    try:
        config = json_io.loads(json_io.read_text(folder / "config.json", _MOST_BYTES))
    except (OSError, ValueError):
        return FULL
    return windows_of(config) if isinstance(config, dict) else FULL


def windows_of(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return of each kind of attention in a model's config how many tokens a query sees; None means all.

    Layers of a kind that is not attention (state spaces, convolutions) are left out.
    """
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    layers, window = config.get("layer_types"), config.get("sliding_window")
    if not isinstance(layers, list):
        return FULL
    kinds: list[int | None] = [None] if "full_attention" in layers else []
    if "sliding_attention" in layers and isinstance(window, int):
        kinds.append(window)
    return tuple(kinds) or FULL
