"""Which tokens the layers of a model see, read from its config."""

from __future__ import annotations

import json
import sys
from datetime import date

import pytest

from harness.errors import ProfileError
from harness.history.identity import identity_of
from harness.profiles.kv_layout import FULL, config_in, modules_in, recurrent, target_config, windows_in, windows_of
from harness.profiles.load import load_profile
from harness.prompts.lengths import published_blocks
from tests.support.builders import extending
from tests.support.engines import command_of, option

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
        # Drafters of DFlash name their window in a part of their own.
        ({"dflash_config": {"use_swa": True, "swa_window_size": 32}}, (32,)),
        ({"layer_types": ["full_attention"], "sliding_window": 64, "dflash_config": {"use_swa": True}}, (64,)),
        ({"layer_types": MIXED, "dflash_config": {"use_swa": False, "swa_window_size": 32}}, (None, 32)),
        ({"layer_types": MIXED, "sliding_window": 64, "dflash_config": 3}, (None, 64)),
    ],
)
def test_kinds_of_attention(config, windows):
    assert windows_of(config) == windows


GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 512, "sliding_window_pattern": 6}
QWEN_NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4}


@pytest.mark.parametrize(
    ("config", "windows", "state"),
    [
        (GEMMA, (None, 512), False),
        ({"model_type": "gemma3", "text_config": GEMMA}, (None, 512), False),
        (QWEN_NEXT, (None,), True),
        ({"model_type": "nemotron_h", "num_hidden_layers": 3, "hybrid_override_pattern": "M*-"}, (None,), True),
        # Qwen2 names a window that it does not use, and Mistral's class has no kinds of layers.
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, (None,), False),
        ({"model_type": "mistral", "sliding_window": 4096}, (None,), False),
        ({"model_type": "nobody's", "sliding_window": 4096}, (None,), False),
        (GEMMA | {"num_hidden_layers": "many"}, (None,), False),
        ({"sliding_window": 4096}, (None,), False),
    ],
)
def test_kinds_that_a_config_leaves_to_its_class(config, windows, state):
    assert (windows_of(config), recurrent(config)) == (windows, state)


def test_without_transformers_a_config_says_what_it_says(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert (windows_of(GEMMA), recurrent(QWEN_NEXT)) == (FULL, False)


WINDOWED = {"layer_types": ["sliding_attention"], "sliding_window": 64}


@pytest.mark.parametrize(
    ("target", "drafter", "arguments", "windows"),
    [
        ({"layer_types": MIXED, "sliding_window": 48}, WINDOWED, (), (None, 48, 64)),
        ({}, WINDOWED, (), (None, 64)),
        (WINDOWED, {}, (), (None, 64)),
        (WINDOWED, None, (), (64,)),
        ({}, WINDOWED, ("--disable-hybrid-kv-cache-manager",), (None,)),
        # vLLM keeps one group of layers that all have this window.
        (WINDOWED, None, ("--disable-hybrid-kv-cache-manager",), (64,)),
    ],
)
def test_windows_of_target_and_drafter(tmp_path, target, drafter, arguments, windows):
    method = next(m for m in load_profile("cpu").methods if m.kind == "eagle3")
    for name, config in (("target", target), ("drafter", drafter)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config or {}))
    method = method.model_copy(update={"drafter": tmp_path / "drafter" if drafter is not None else None})
    assert windows_in(config_in(tmp_path / "target"), method, arguments) == windows


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
        # Dense models of a hybrid family, such as Granite 4.0's.
        (["attention"], False),
    ],
)
def test_layers_with_a_state(kinds, state):
    assert recurrent({"text_config": {"layer_types": kinds}}) is state


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (64, 2), (96, 3), (97, 3), (181, 3)])
def test_window_leaves_the_last_blocks(tokens, blocks):
    assert published_blocks(tokens, 32, 48) == blocks


# --- a config with other values --------------------------------------------------------------------------------------

OVERRIDES = {"layer_types": ["full_attention", "linear_attention"], "rope_parameters": {"rope_type": "yarn"}}


def test_engines_are_told_of_values_that_the_config_does_not_have(tmp_path):
    source = extending(tmp_path, engine={"hf_overrides": OVERRIDES})
    for role in ("single", "prefill", "decode"):
        assert json.loads(option(command_of(role, source), "--hf-overrides")) == OVERRIDES
    assert "--hf-overrides" not in command_of("single", "cpu").argv
    assert recurrent(target_config(load_profile(source))) and not recurrent(target_config(load_profile("cpu")))


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"text_config": {"rope_theta": 1.0}}, (None, 64)),
        ({"text_config": {"sliding_window": 32}}, (None, 32)),
        ({"text_config": 3}, (None,)),
    ],
)
def test_a_part_of_a_config_keeps_what_is_not_overridden(tmp_path, overrides, windows):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"layer_types": MIXED, "sliding_window": 64}}))
    profile = load_profile("cpu")
    engine = profile.engine.model_copy(update={"hf_overrides": overrides})
    found = target_config(profile.model_copy(update={"target": tmp_path, "engine": engine}))
    assert windows_of(found) == windows


def test_modules_in_the_target_are_those_of_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 3}))
    profile = load_profile("cpu")
    engine = profile.engine.model_copy(update={"hf_overrides": {"num_nextn_predict_layers": 1}})
    method = next(m for m in profile.methods if m.kind == "mtp").model_copy(update={"drafter": None})
    assert modules_in(profile.model_copy(update={"target": tmp_path, "engine": engine}), method) == 3


def test_they_are_part_of_an_identity_which_is_as_before_without_them(tmp_path):
    plain, other = (load_profile(s) for s in ("cpu", extending(tmp_path, engine={"hf_overrides": OVERRIDES})))
    found = [identity_of(p, p.methods[0], "p").model_dump() for p in (plain, other)]
    assert found[1] == found[0] | {"hf_overrides": OVERRIDES}
    assert "hf_overrides" not in found[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is not allowed, since it names code or a file"),
        ({"text_config": [{"auto_map": {"AutoModel": "x.Y"}}]}, "auto_map is not allowed"),
        ({"quantization_config_file": "x.json"}, "quantization_config_file is not allowed"),
        ({"some": date(2026, 1, 1)}, "neither paths nor code, found '2026-01-01'"),
        ({"some": ["/etc/passwd"]}, "neither paths nor code, found '/etc/passwd'"),
        (["x"], "expected keys with values, found a list"),
    ],
)
def test_values_that_are_no_data_are_refused(tmp_path, overrides, words):
    with pytest.raises(ProfileError, match="hf_overrides") as refused:
        load_profile(extending(tmp_path, engine={"hf_overrides": overrides}))
    assert words in str(refused.value)


def test_the_target_is_given_what_its_drafter_of_several_modules_reads_there():
    profile = load_profile("cpu-mtp3")
    (method,) = (m for m in profile.methods if m.kind == "mtp3")
    own = config_in(method.drafter_path)
    assert profile.engine.hf_overrides == {key: own[key] for key in profile.engine.hf_overrides}
    assert modules_in(profile, method) == 3
