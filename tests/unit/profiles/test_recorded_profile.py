"""A recorded profile says what the run was asked for, whichever version recorded it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.profiles import recorded_profile
from harness.profiles.engine_config import EngineConfig
from harness.profiles.load import load_profile
from harness.profiles.model import Judging, Profile
from harness.profiles.recorded_profile import RecordedProfile


@pytest.mark.parametrize(
    "defaults, schema", [(recorded_profile.ENGINE_DEFAULTS, EngineConfig), (recorded_profile.JUDGING_DEFAULTS, Judging)]
)
def test_defaults_are_those_of_the_schema(defaults, schema):
    """One that changes in the schema needs a rule for the records that were made before, such as BEFORE_ROUNDING."""
    assert {name: schema.model_fields[name].default for name in defaults} == defaults
    assert Profile.model_fields["witness"].default == recorded_profile.WITNESS_DEFAULT


def _but_what_is_fetched(profile: Profile) -> dict:
    """The profile without why the model of a package is not on this machine."""
    dumped = profile.model_dump(mode="json")
    if isinstance(dumped["target"], dict):
        dumped["target"].pop("reason", None)
    return dumped


@pytest.mark.parametrize("name", ["cpu", "cpu-v2", "cpu-layouts", "smollm2", "gpu"])
def test_what_is_recorded_reads_as_the_profile_itself(name):
    profile = load_profile(name)
    for part in profile.written_parts:
        recorded = RecordedProfile({**profile.model_dump(mode="json"), "source": "x.yaml"}).part(part.variant)
        ours, engine = recorded.engine, part.engine
        assert (recorded.name, recorded.source, recorded.file) == (part.name, "x.yaml", "x.yaml")
        assert recorded.witness == part.witness
        assert (recorded.tier, recorded.max_tokens) == (part.judging.tier, part.workload.max_tokens)
        assert recorded.judging == part.judging and recorded.near_tie_nats == part.judging.near_tie_nats
        assert (ours.dtype, ours.placement, ours.kv_lease_s) == (engine.dtype, engine.placement, engine.kv_lease_s)
        assert (ours.by_nixl, ours.context_tokens) == (engine.by_nixl, engine.max_model_len)
        assert ours.on_gpu == (engine.device == "gpu")
        assert [recorded.scenario(s.id) for s in part.scenarios] == list(part.scenarios)
        assert all(recorded.traits(m.kind) == m.traits for m in part.methods)
    again = RecordedProfile({**profile.model_dump(mode="json"), "source": "x"}).as_profile()
    assert _but_what_is_fetched(again) == _but_what_is_fetched(profile)


def test_an_older_record_has_the_bounds_of_its_time():
    old = RecordedProfile({"name": "old", "judging": {"tier": "bitwise"}})
    assert (old.judging.logprob_nats, old.near_tie_nats) == (1e-5, 0.02)
    now = RecordedProfile({"name": "new", "judging": {"logprob_nats": None, "near_tie_nats": None}})
    assert (now.judging.logprob_nats, now.near_tie_nats) == (None, None)


def test_a_damaged_record_is_no_reason_to_fail_where_nothing_is_needed():
    bare = RecordedProfile({"name": "x", "engine": 3, "methods": "none", "sources": [1]})
    assert (bare.source, bare.models, bare.engine.context_tokens, bare.max_tokens) == ("x", {}, None, None)
    assert bare.scenario("refill") is None and bare.method("mtp") == {}
    with pytest.raises(ValidationError):
        _ = RecordedProfile({"name": "x", "judging": {"tier": "odd"}}).judging
