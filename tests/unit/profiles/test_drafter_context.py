"""Drafters whose context is shorter than the engines'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.commands.doctor.examine import _drafter_items
from harness.profiles.drafter_context import short_drafters
from harness.profiles.load import load_profile
from harness.profiles.model import Profile


def with_drafter(tmp_path: Path, config: dict, runner: str | None = None, kind: str = "eagle3", **method) -> Profile:
    (tmp_path / "config.json").write_text(json.dumps(config))
    profile = load_profile("cpu")
    raw = json.loads(profile.model_dump_json())
    raw["methods"] = [{"kind": kind, "drafter": str(tmp_path), "num_speculative_tokens": 3, **method}]
    raw["engine"]["model_runner"] = runner
    return Profile.model_validate(raw)


def test_a_shorter_drafter_is_named_with_the_length_at_which_it_ends(tmp_path):
    profile = with_drafter(tmp_path, {"max_position_embeddings": 128})
    (short,) = short_drafters(profile)
    assert (short.method, short.tokens, short.engine_tokens) == ("eagle3", 125, 416)
    (item,) = _drafter_items(profile)
    assert not item.ok and not item.needed and "more than 125 tokens" in item.found


def test_a_drafter_that_drafts_a_bonus_slot_ends_a_token_earlier(tmp_path):
    (short,) = short_drafters(with_drafter(tmp_path, {"max_position_embeddings": 128}, kind="dflash"))
    assert short.tokens == 124


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 416},
        {},
        {"max_position_embeddings": 128, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    ids=["as long", "not told", "scaled"],
)
def test_a_drafter_that_is_long_enough_or_does_not_tell_is_not_named(tmp_path, config):
    assert short_drafters(with_drafter(tmp_path, config)) == []


def test_runner_v2_takes_the_targets_context(tmp_path):
    assert short_drafters(with_drafter(tmp_path, {"max_position_embeddings": 128}, runner="V2")) == []


def test_a_context_that_the_profile_sets_counts_too(tmp_path):
    given = {"method": "eagle3", "max_model_len": 200}
    profile = with_drafter(tmp_path, {"max_position_embeddings": 1024}, kind="mine", speculative_config=given)
    (short,) = short_drafters(profile)
    assert short.tokens == 197 and "max_model_len of its speculative_config, 200" in short.by


def test_no_shipped_profile_has_one():
    assert short_drafters(load_profile("cpu")) == []


def test_ps_own_drafter_is_named_where_it_ends_before_ds(tmp_path):
    """D then has no KV of the drafter for what is longer."""
    long = {"max_position_embeddings": 1024}
    (short,) = short_drafters(with_drafter(tmp_path, long, prefill_speculative_config={"max_model_len": 64}))
    assert (short.method, short.tokens) == ("eagle3 on P", 61)
    # The same on both is said once.
    assert [s.method for s in short_drafters(with_drafter(tmp_path, {"max_position_embeddings": 128}))] == ["eagle3"]
