"""Which tokens the layers of a model see, read from its config."""

from __future__ import annotations

import json

import pytest

from harness.profiles.kv_layout import FULL, config_in, recurrent, windows_of
from harness.prompts.lengths import published_blocks

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, (None,)),
        # Qwen2 names a window that it does not use.
        ({"sliding_window": 4096, "use_sliding_window": False}, (None,)),
        ({"layer_types": ["full_attention"], "sliding_window": 64}, (None,)),
        ({"layer_types": MIXED, "sliding_window": 64}, (None, 64)),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, (64,)),
        ({"text_config": {"layer_types": MIXED, "sliding_window": 64}}, (None, 64)),
        ({"layer_types": MIXED, "sliding_window": None}, (None,)),
        ({"layer_types": ["linear_attention", "full_attention"]}, (None,)),
        ({"layer_types": "full_attention"}, (None,)),
    ],
)
def test_kinds_of_attention(config, windows):
    assert windows_of(config) == windows


@pytest.mark.parametrize("text", [None, "[", "[]", "{}"])
def test_config_that_cannot_be_read_counts_as_full_attention(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    config = config_in(tmp_path)
    assert (windows_of(config), recurrent(config)) == (FULL, False)
    assert config_in(None) == {}


def test_config_of_a_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": MIXED, "sliding_window": 8}))
    assert windows_of(config_in(tmp_path)) == (None, 8)


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        (MIXED, False),
        (["chunked_attention", "full_attention"], False),
        (["linear_attention", "full_attention"], True),
        (["mamba", "full_attention"], True),
        (["conv"], True),
    ],
)
def test_layers_with_a_state(kinds, state):
    assert recurrent({"text_config": {"layer_types": kinds}}) is state


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (64, 2), (96, 3), (97, 3), (181, 3)])
def test_window_leaves_the_last_blocks(tokens, blocks):
    assert published_blocks(tokens, 32, 48) == blocks
