"""Settings of engines in a profile: each has one place, and what vLLM cannot do is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import ProfileError
from harness.profiles.cells import make_plan, select_cells
from harness.profiles.engine_args import SETTINGS, SETTINGS_OF_VARIABLES, VARIABLES, setting_of
from harness.profiles.engine_config import BLOCK_MULTIPLES, EngineConfig
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from tests.support.builders import extending
from tests.support.engines import command_of

OF_THE_HARNESS = {
    "--enable-prompt-tokens-details",
    "--host",
    "--load-format",
    "--middleware",
    "--no-enable-log-requests",
    "--per-request-spec-decode-metrics",
    "--port",
    "--seed",
    "--served-model-name",
}
"""What engines are given whatever the profile says."""


def refused(folder: Path, **engine: object) -> str:
    with pytest.raises(ProfileError) as caught:
        load_profile(extending(folder, engine=engine))
    return str(caught.value)


@pytest.mark.parametrize(("argument", "setting"), SETTINGS.items())
def test_an_argument_that_a_setting_sets_is_refused_and_the_setting_named(tmp_path, argument, setting):
    words = refused(tmp_path, extra_args=[f"{argument}=1"])
    assert f"engine.extra_args: expected no argument that a setting of the profile sets, found '{argument}=1'" in words
    assert words.endswith(f"; use {setting}")


@pytest.mark.parametrize(
    ("engine", "setting"),
    [
        ({"extra_args": ["--block_size", "16"]}, "engine.block_size"),
        ({"extra_args": ["--no-enforce-eager"]}, "engine.enforce_eager"),
        ({"prefill": {"extra_args": ["--block-size=64"]}}, "engine.prefill.block_size"),
        ({"prefill": {"extra_args": ["--enforce-eager"]}}, "engine.enforce_eager"),
    ],
)
def test_spellings_and_p_are_no_way_around_it(tmp_path, engine, setting):
    assert refused(tmp_path, **engine).endswith(f"; use {setting}")


@pytest.mark.parametrize(("variable", "setting"), SETTINGS_OF_VARIABLES.items())
def test_a_variable_that_a_setting_sets_is_refused_and_the_setting_named(tmp_path, variable, setting):
    assert variable not in VARIABLES
    words = refused(tmp_path, env={variable: "1"})
    assert words.endswith(f"expected no variable that a setting of the profile sets, found {variable}; use {setting}")


def test_settings_that_are_named_exist():
    for setting in (*SETTINGS.values(), *SETTINGS_OF_VARIABLES.values()):
        section, _, name = setting.partition(".")
        assert (
            name in EngineConfig.model_fields
            if section == "engine"
            else section.split()[0]
            in {
                *Profile.model_fields,
                "trust_remote_code",
            }
        )


@pytest.mark.parametrize("name", ["cpu", "gpu", "cpu-lora", "cpu-hybrid-kept", "cpu-unlike-p"])
def test_every_argument_of_an_engine_is_set_by_the_harness_or_a_setting(name):
    profile = load_profile(name)
    for part in profile.parts:
        for group in make_plan(profile, select_cells(profile, [])).groups:
            for role in group.roles:
                argv = command_of(role, part, group.method.kind).argv
                # Those of the profile are allowed by another list.
                own = {a.partition("=")[0] for a in (*part.engine.extra_args, *part.engine.of(role).extra_args)}
                given = {a for a in argv if a.startswith("--")} - OF_THE_HARNESS
                assert [a for a in given if setting_of(a) is None and a.partition("=")[0] not in own] == []


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"block_size": 48}, "engine.block_size: expected a multiple of 32, as vLLM's attention on cpu wants"),
        ({"block_size": 48}, "found 48; give 32 or 64"),
        ({"block_size": 8}, "found 8; give 32"),
        ({"prefill": {"block_size": 48}}, "engine.prefill: block_size: expected a multiple of 32, as vLLM's attention"),
    ],
)
def test_blocks_that_vllm_has_no_attention_for_are_refused_as_such(tmp_path, engine, words):
    said = refused(tmp_path, **engine)
    assert words in said and len(said.splitlines()) == 2


@pytest.mark.parametrize(("device", "size"), [("cpu", 16), ("cpu", 96), ("gpu", 16), ("gpu", 48), ("gpu", 544)])
def test_blocks_of_mla_and_of_hybrid_models_are_taken(device, size):
    assert EngineConfig(device=device, block_size=size).block_size == size
    assert all(EngineConfig(device=d, block_size=s).block_size == s for d, s in BLOCK_MULTIPLES.items())
