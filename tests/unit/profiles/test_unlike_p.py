"""P set up unlike D: ``engine.prefill``."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.judging.checks import transfer
from harness.judging.checks.counters import counters_agree
from harness.judging.checks.settings import engine_as_asked
from harness.profiles.engine_config import EngineConfig
from harness.profiles.load import load_profile
from harness.profiles.recorded_profile import RecordedEngine
from harness.scenarios.possible import too_many
from tests.support.builders import history, observation, view, with_prefill, with_profile

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
