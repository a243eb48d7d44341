"""P set up unlike D: ``engine.prefill``."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from harness.errors import ProfileError
from harness.judging.checks import transfer
from harness.judging.checks.counters import counters_agree
from harness.judging.checks.settings import engine_as_asked
from harness.profiles.availability import reason_for, references_of
from harness.profiles.engine_config import EngineConfig
from harness.profiles.load import load_profile, read_profile
from harness.profiles.methods import engine_config
from harness.profiles.recorded_profile import RecordedEngine
from harness.scenarios.possible import too_many
from tests.support.builders import changed_profile, engine, history, observation, view, with_prefill, with_profile

UNLIKE = {"block_size": 64, "max_num_seqs": 2, "extra_args": ["--no-enable-prefix-caching"]}


def test_p_has_its_own_settings_and_all_others_the_profiles():
    engine = EngineConfig.model_validate({"device": "cpu", "kv_blocks": 28, "prefill": UNLIKE})
    assert engine.of("decode") is engine and engine.of("single") is engine
    mine = engine.of("prefill")
    assert (mine.block_size, mine.max_num_seqs, mine.kv_blocks) == (64, 2, 28)
    assert mine.extra_args == ("--no-enable-prefix-caching",)
    assert engine.largest_block == 64


def test_a_record_says_the_same():
    engine = EngineConfig.model_validate({"device": "cpu", "prefill": UNLIKE})
    recorded = RecordedEngine(engine.model_dump())
    assert [recorded.of(role).asked("block_size") for role in ("prefill", "decode", "single")] == [64, 32, 32]
    assert recorded.of("prefill").asked("attention_backend") is None
    assert RecordedEngine({"block_size": 16}).of("prefill").asked("block_size") == 16


@pytest.mark.parametrize(
    "given", [{"extra_args": ["--load-plugins", "x"]}, {"extra_args": ["--data-parallel-size", "2"]}]
)
def test_what_no_profile_may_pass_is_refused_on_p_too(given):
    with pytest.raises(ValidationError):
        EngineConfig.model_validate({"device": "cpu", "prefill": given})


def test_requests_sent_together_need_rows_on_both():
    profile = load_profile("cpu")
    assert too_many(4, profile) is None
    fewer = profile.engine.model_copy(
        update={"prefill": EngineConfig.model_validate({"device": "cpu", "prefill": UNLIKE}).prefill}
    )
    assert "found 2" in (too_many(4, profile.model_copy(update={"engine": fewer})) or "")


def test_a_p_that_runs_as_d_does_was_not_what_was_asked():
    made = with_profile(history([observation("pd-none")]), engine={"block_size": 32, "prefill": {"block_size": 64}})
    result = engine_as_asked(view(made, "pd-none"))
    told = [f.message for f in result.findings if "64" in f.message]
    assert told and all("prefill engine" in message for message in told)


@pytest.mark.parametrize(("published", "wrong"), [(2, False), (3, True)], ids=["its own blocks", "as many as D has"])
def test_blocks_that_p_publishes_are_of_its_own_size(published, wrong):
    o = observation("pd-none", 65)
    params = {**(o.legs[0].kv_transfer_params or {}), "remote_block_ids": [list(range(1, published + 1))]}
    made = history([with_prefill(o, kv_transfer_params=params)])
    cell = view(with_profile(made, engine={"block_size": 32, "prefill": {"block_size": 64}}), "pd-none")
    found = [f for f in transfer.transfer(cell).findings if "publish ceil(65 / 64) = 2 blocks" in f.message]
    assert bool(found) is wrong


@pytest.mark.parametrize(("queries", "right"), [(0.0, True), (65.0, False)])
def test_a_p_without_a_prefix_cache_looks_nothing_up(queries, right):
    o = observation("pd-none", 65)
    told = {"finished_requests": 1.0, "prefix_queries": queries}
    made = history([with_prefill(o, counters=told)])
    engine = {"block_size": 32, "prefill": {"extra_args": ["--no-enable-prefix-caching"]}}
    cell = view(with_profile(made, engine=engine), "pd-none")
    wrong = [f for f in counters_agree(cell).findings if "prefix_queries" in f.message and "prefill" in f.message]
    assert not wrong if right else wrong
    assert cell.prefix_cache.expected_hit(o, o, "prefill") == (0, 0)
    assert cell.prefix_cache.expected_hit(o, o, "decode").least == 64


def on_p(**changes):
    """The method that P is started with where the profile's EAGLE3 has these settings."""
    given = {"kind": "eagle3", "drafter": "models/probe/eagle3", "num_speculative_tokens": 3, **changes}
    profile = load_profile("cpu")
    raw = profile.model_dump(mode="json") | {"methods": [{"kind": "none"}, given]}
    return type(profile).model_validate(raw).methods[1].on_prefill


def test_p_drafts_with_its_own_drafter_number_and_configuration():
    assert engine_config(on_p(prefill_num_speculative_tokens=0)) is None
    assert engine_config(on_p(prefill_drafter="models/other", prefill_num_speculative_tokens=1)) == {
        "method": "eagle3",
        "model": "models/other",
        "num_speculative_tokens": 1,
    }
    assert engine_config(on_p(prefill_speculative_config={"max_model_len": 64})) == {
        "method": "eagle3",
        "model": "models/probe/eagle3",
        "num_speculative_tokens": 3,
        "max_model_len": 64,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"prefill_num_speculative_tokens": 0, "prefill_drafter": "models/other"},
            "expected at least 1 with prefill_dr",
        ),
        ({"prefill_speculative_config": {"method": "custom_class"}}, "runs code"),
        ({"prefill_speculative_config": {"model": "models/other"}}, "expected no model"),
        (
            {"kind": "ngram", "drafter": None, "speculative_config": {}, "prefill_drafter": "models/other"},
            "drafts without a model",
        ),
    ],
)
def test_what_p_cannot_have_is_refused(given, words):
    with pytest.raises(ValidationError, match=words):
        on_p(**given)


def test_ps_own_drafter_is_looked_for_and_looked_up_like_ds(tmp_path):
    def other(where: str) -> str:
        return changed_profile(tmp_path, lambda raw: raw["methods"][1].update(prefill_drafter=where))

    with pytest.raises(ProfileError, match=r"drafter of eagle3 on P: expected a model folder"):
        load_profile(other(str(tmp_path / "nowhere")))
    assert set(references_of(read_profile(other("someone/other-drafter")))) == {"eagle3 on P"}
    assert "found no complete snapshot" in (reason_for(load_profile(other("someone/other-drafter")), "eagle3") or "")


@pytest.mark.parametrize(
    ("asked", "started", "right"),
    [
        ({"prefill_num_speculative_tokens": 0}, None, True),
        ({"prefill_num_speculative_tokens": 0}, {"model": "/m/eagle3", "num_speculative_tokens": 3}, False),
        ({"prefill_drafter": "/m/other"}, {"model": "/m/other", "num_speculative_tokens": 3}, True),
        ({"prefill_drafter": "/m/other"}, {"model": "/m/eagle3", "num_speculative_tokens": 3}, False),
    ],
)
def test_a_p_with_another_drafter_than_asked_is_seen(asked, started, right):
    methods = [{"kind": "eagle3", "drafter": "/m/eagle3", "num_speculative_tokens": 3, **asked}]
    argv = ["vllm"] if started is None else ["vllm", "--speculative-config", json.dumps(started)]
    p = engine("pd-eagle3", "prefill").model_copy(update={"argv": argv})
    made = with_profile(history([observation("pd-eagle3")], engines=(p,)), methods=methods)
    result = engine_as_asked(view(made, "pd-eagle3"))
    assert (not [f for f in result.findings if "--speculative-config" in f.message]) is right
