"""Connectors as data: what vLLM is given, and what is refused."""

from __future__ import annotations

import json

import pytest

from harness.errors import ProfileError
from harness.profiles.load import load_profile
from tests.support.builders import extending
from tests.support.engines import command_of, option

OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1024}}
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}, OFFLOADING]},
}
KEY = "kv_connector_extra_config"


def written(tmp_path, **engine) -> str:
    return extending(tmp_path, routes=["client"], exclude=[], engine=engine)


def given_to_vllm(source: str, role: str) -> dict:
    return json.loads(option(command_of(role, source), "--kv-transfer-config"))


def test_nixl_is_given_what_it_was(tmp_path):
    assert given_to_vllm(written(tmp_path), "decode") == given_to_vllm("cpu", "decode")
    more = given_to_vllm(written(tmp_path, kv_connector_extra_config={"backends": ["UCX"]}), "decode")
    assert more[KEY] == {"backends": ["UCX"], "kv_lease_duration": 30, "num_threads": 0}


def test_several_connectors_have_the_roles_of_the_engine(tmp_path):
    source = written(tmp_path, kv_roles="split", kv_lease_s=9, **MULTI)
    found = given_to_vllm(source, "prefill")
    assert (found["kv_connector"], found["kv_role"]) == ("MultiConnector", "kv_producer")
    nixl, offloading = found[KEY]["connectors"]
    assert (nixl["kv_role"], nixl[KEY]) == ("kv_producer", {"kv_lease_duration": 9, "num_threads": 0})
    assert (offloading["kv_role"], offloading[KEY]) == ("kv_producer", {"cpu_bytes_to_use": 1024})
    assert load_profile(source).engine.by_nixl


def test_a_p_that_writes_may_be_one_of_several(tmp_path):
    both = {"connectors": [{"kv_connector": "NixlPushConnector"}, OFFLOADING]}
    assert load_profile(written(tmp_path, kv_connector="MultiConnector", **{KEY: both})).engine.pushes
    assert not load_profile(written(tmp_path, **MULTI)).engine.pushes


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"kv_connector": "../x"}, "expected text of the form"),
        ({"kv_connector": "MultiConnector"}, "expected connectors with MultiConnector, a list of mappings"),
        ({"kv_connector": "MultiConnector", KEY: {"connectors": []}}, "expected connectors with MultiConnector"),
        ({"kv_connector": "MultiConnector", KEY: {"connectors": [{}]}}, "expected connectors with MultiConnector"),
        ({"kv_connector": "X", KEY: {"kv_connector_module_path": "a.b"}}, "since it names code to run"),
        ({"kv_connector": "X", KEY: {"tiers": [{"spec_module_path": "a.b"}]}}, "since it names code to run"),
        ({KEY: {"kv_lease_duration": 5}}, "expected no kv_lease_duration, found 5; set engine.kv_lease_s"),
        ({"kv_connector": "X", KEY: {"path": "/etc/x"}}, "neither paths nor code, found '/etc/x'"),
        ({"kv_transfer": "push", "kv_connector": "X"}, "kv_connector and kv_transfer: push exclude each other"),
    ],
)
def test_connectors_that_make_no_sense_are_refused(tmp_path, engine, words):
    with pytest.raises(ProfileError, match=words):
        load_profile(written(tmp_path, **engine))


def test_a_router_hands_off_by_nixl_only(tmp_path):
    assert not load_profile(written(tmp_path, kv_connector="MooncakeConnector")).engine.by_nixl
    with pytest.raises(ProfileError, match="expected client alone with engine"):
        load_profile(extending(tmp_path, engine={"kv_connector": "X"}))
