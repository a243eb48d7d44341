"""How many KV blocks vLLM wants before it starts: the numbers are what engines said, on CPUs and on one H200."""

from __future__ import annotations

import pytest

from harness.profiles.kv_pool import least_blocks, too_small_pool
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.workload.prepare import prepare


def with_engine(profile: Profile, **settings: object) -> Profile:
    return profile.model_copy(update={"engine": profile.engine.model_copy(update=settings)})


def needed(profile: Profile, kind: str) -> int | None:
    return least_blocks(profile, next(m for m in profile.methods if m.kind == kind), "single")


def test_steps_that_overlap_hold_the_blocks_of_two():
    """An H200 refused 35 blocks for 416 tokens of the plain engine, and said that they are enough for 320."""
    gpu = load_profile("gpu-layouts")
    assert needed(gpu, "none") == 42 and gpu.engine.kv_blocks == 42
    assert needed(with_engine(gpu, max_model_len=320), "none") == 33
    assert needed(with_engine(gpu, max_model_len=321), "none") == 36
    assert needed(with_engine(gpu, extra_args=("--no-async-scheduling",)), "none") == 32


def test_a_drafter_with_full_attention_makes_fewer_groups():
    assert needed(load_profile("gpu-layouts"), "windowed-eagle3") == 28


def test_engines_on_cpus_take_a_step_at_a_time():
    assert needed(load_profile("cpu-layouts"), "none") == 32


def test_full_attention_needs_a_request_and_the_null_block():
    assert needed(load_profile("smollm2"), "none") == 15 == load_profile("smollm2").engine.kv_blocks
    whole = with_engine(load_profile("gpu-layouts"), extra_args=("--disable-hybrid-kv-cache-manager",))
    assert needed(whole, "none") == 14


@pytest.mark.parametrize(
    ("profile", "kind"),
    [("cpu-hybrid", "none"), ("cpu", "dflash"), ("cpu-multi", "none")],
)
def test_what_does_not_follow_from_the_configs_is_not_told(profile, kind):
    assert needed(load_profile(profile), kind) is None


def test_a_pool_that_is_too_small_is_told_with_its_numbers():
    small = with_engine(load_profile("gpu-layouts"), kv_blocks=35)
    none, eagle3 = small.methods
    reason = too_small_pool(small, none, "prefill")
    assert reason is not None and "at least 42 for the prefill engine (none)" in reason and "found 35" in reason
    assert "two steps of which may be under way" in reason
    assert too_small_pool(small, eagle3, "prefill") is None


def test_a_cell_whose_engines_would_not_start_is_told_before_any_does(tmp_path):
    source = tmp_path / "small.yaml"
    source.write_text("format: 1\nname: small\nextends: gpu-layouts\nengine: {kv_blocks: 35, max_num_seqs: 4}\n")
    source.write_text(source.read_text() + "without_scenarios: [pressure, refill, late-pull, given-back]\n")
    planned, prepared = prepare(str(source), (), planned=True), prepare(str(source), ())
    assert planned.lacking == prepared.lacking
    assert set(prepared.lacking) == {"pd-none", "single-none"}
    assert "expected engine.kv_blocks of at least 42" in prepared.lacking["pd-none"]
    assert prepare(str(source), (), running=True).lacking == {}
