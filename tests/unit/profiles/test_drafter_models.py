"""A drafter as target and the target as its own drafter are refused; whole models may draft for themselves."""

from __future__ import annotations

import json

import pytest

from harness.errors import ProfileError
from harness.profiles.load import load_profile
from harness.util.paths import REPOSITORY
from tests.support.builders import extending

TARGET = str(REPOSITORY / "models" / "probe" / "target")


@pytest.mark.parametrize("key", ["drafter", "prefill_drafter"])
def test_the_target_cannot_be_its_own_eagle3_drafter(tmp_path, key):
    drafters = {"drafter": str(REPOSITORY / "models" / "probe" / "eagle3"), key: TARGET}
    path = extending(tmp_path, methods=[{"kind": "none"}, {"kind": "eagle3", **drafters}])
    with pytest.raises(ProfileError, match=r"drafter of eagle3: expected a model .*, found the target itself"):
        load_profile(path)


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "draft_model", "drafter": TARGET, "num_speculative_tokens": 3, "speculative_config": {}},
        {"kind": "mtp", "drafter": TARGET},
        {"kind": "mtp"},
    ],
)
def test_a_whole_model_and_layers_of_the_target_may_draft(tmp_path, method):
    path = extending(tmp_path, methods=[{"kind": "none"}, method])
    assert load_profile(path).methods[1].kind == method["kind"]


@pytest.mark.parametrize(
    ("architecture", "drafts"),
    [
        ("LlamaForCausalLMEagle3", True),
        ("EagleLlamaForCausalLM", True),
        ("Eagle3Qwen2_5vlForCausalLM", True),
        ("PeagleLlamaForCausalLM", True),
        ("DFlashDraftModel", True),
        ("Qwen3DSparkModel", True),
        ("DeepSeekMTPModel", True),
        ("Qwen3NextMTP", True),
        ("MedusaModel", True),
        ("MLPSpeculatorPreTrainedModel", True),
        # A target, whatever its name is.
        ("Eagle2_5_VLForConditionalGeneration", False),
        ("MiMoForCausalLM", False),
        ("LlamaForCausalLM", False),
    ],
)
def test_the_target_is_no_drafter(tmp_path, architecture, drafts):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    path = extending(tmp_path, target="./model")
    if not drafts:
        assert load_profile(path).target == tmp_path / "model"
        return
    with pytest.raises(ProfileError, match=f"which can only draft .{architecture} in its config.json"):
        load_profile(path)
