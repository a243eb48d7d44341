"""Servers already running: what is asked of them, and which cells they can answer. A fake stands for the server."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.engines import readiness
from harness.engines.answers import Sampling
from harness.engines.api_key import ApiKey
from harness.engines.attached import AttachedExecutor, AttachedPlace, Front, Server, look_at, look_at_router
from harness.engines.command import build_command
from harness.engines.launcher import Launcher
from harness.engines.log_facts import LogFacts
from harness.engines.mutation import Mutation
from harness.engines.readiness import Readiness
from harness.engines.routers import Routers
from harness.engines.server_info import ServerInfo
from harness.errors import EngineDiedError, EngineStartError, UsageError
from harness.history.engine_interfaces import PAUSE, RESET_PREFIX_CACHE, SERVER_INFO
from harness.profiles.load import load_profile
from harness.workload.prepare import prepare
from tests.support.engines import ENVIRONMENT
from tests.support.fake_attached import TARGET, attached_server, told
from tests.support.fake_server import DRAFTS, SAID, Quiet, fake_server, serving

PROFILE = load_profile("cpu")


def known(role: str, version: str = "0.32.0", dev: bool = True, said: object = None) -> Server:
    info = ServerInfo(said or {}, {}, dev)
    surfaces = dict.fromkeys((PAUSE, RESET_PREFIX_CACHE, SERVER_INFO), dev)
    return Server(role, "http://10.0.0.7:8000", None, "mine", version, surfaces, info)


def test_a_server_says_its_model_its_version_and_what_it_offers():
    with fake_server() as url:
        found = look_at("single", f"{url}/", None)
    surfaces = dict.fromkeys((PAUSE, RESET_PREFIX_CACHE, SERVER_INFO), True)
    assert found == Server("single", url, None, "mine", "0.32.0", surfaces, ServerInfo(SAID, {}, True))
    assert found.info.facts == LogFacts(model_runner=None, attention_backend=None, step_tokens=184)


@pytest.mark.parametrize("server", [{"dev": False}, {"said": "model='mine', …"}, {"said": None}])
def test_a_server_that_does_not_say_its_settings_has_its_block_size_in_its_metrics(server):
    with fake_server(**server) as url:
        found = look_at("single", url, None)
    assert not found.surfaces[SERVER_INFO]
    cache = {"block_size": 16, "cache_dtype": "auto", "num_gpu_blocks": 99}
    assert found.info == ServerInfo({"cache_config": cache, "speculative_config": None}, {}, False)
    assert found.info.facts == LogFacts(None, None, None)


@pytest.mark.parametrize(
    ("section", "settings", "role", "words"),
    [
        ("cache_config", {"block_size": 16}, "decode", "engine.block_size 32, found 16"),
        ("model_config", {"dtype": "torch.bfloat16"}, "decode", "engine.dtype float32, found bfloat16"),
        ("model_config", {"enforce_eager": False}, "prefill", "engine.enforce_eager True, found False"),
        ("model_config", {"hf_overrides": {"top": 1}}, "decode", "engine.hf_overrides {}, found {'top': 1}"),
        ("parallel_config", {"tensor_parallel_size": 2}, "decode", "engine.tensor_parallel 1, found 2"),
        ("speculative_config", None, "decode", "num_speculative_tokens 3, found 0"),
        ("speculative_config", {"method": "dflash"} | DRAFTS, "decode", "method eagle3, found dflash"),
        (
            "kv_transfer_config",
            {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": 90}},
            "prefill",
            "engine.kv_lease_s 30, found 90",
        ),
    ],
)
def test_a_server_with_other_settings_than_the_profile_is_refused(section, settings, role, words):
    method = next(m for m in PROFILE.methods if m.kind == "eagle3")
    assert list(ServerInfo(SAID, {}, True).differences(PROFILE, method, role)) == []
    other = {**SAID, section: settings}
    assert list(ServerInfo(other, {}, True).differences(PROFILE, method, role)) == [words]
    pair = {r: known(r, said=other if r == role else SAID) for r in ("prefill", "decode")}
    with pytest.raises(UsageError, match=rf"--{role} http://10\.0\.0\.7:8000: expected the settings .* {words}; start"):
        AttachedExecutor(pair).require_fit(prepare("cpu", ["pd-eagle3"], ["cold"]).plan, PROFILE)


@pytest.mark.parametrize(("role", "k"), [("prefill", 1), ("decode", 3)])
def test_the_metrics_tell_how_many_tokens_a_server_drafts(role, k):
    """Without /server_info, too: it is not taken on trust."""
    with attached_server(role, dev=False, speculative_config__num_speculative_tokens=k) as url:
        info = look_at(role, url, None).info
    method = next(m for m in PROFILE.methods if m.kind == "eagle3")
    assert list(info.differences(PROFILE, method, role)) == (["num_speculative_tokens 3, found 1"] if k == 1 else [])
    assert info.say("model_config.model") == TARGET and info.say("model_config.max_model_len") == 416
    lacking = ["engine.dtype", "engine.enforce_eager", "engine.hf_overrides"]
    lease = ["engine.kv_lease_s"] if role == "prefill" else []
    more = ["engine.tensor_parallel", *lease, "method", "engine.max_num_batched_tokens"]
    assert info.untold(PROFILE, method, role) == [*lacking, *more]


def pair_with(**changes: object) -> AttachedExecutor:
    """P and D of EAGLE3 that differ from the profile cpu alike."""
    info = ServerInfo(told("decode", **changes), {}, True)
    return AttachedExecutor({r: known(r)._replace(info=info) for r in ("prefill", "decode")})


@pytest.mark.parametrize(
    ("changes", "scenarios", "words"),
    [
        ({"scheduler_config__max_num_batched_tokens": 1664}, ["cold"], None),
        ({"scheduler_config__max_num_batched_tokens": 1664}, ["cold", "prefix-hit"], None),
        (
            {"scheduler_config__max_num_batched_tokens": 1664},
            ["cold", "chunked-prefill"],
            "engine.max_num_batched_tokens 192 for chunked-prefill, found 1664",
        ),
        ({"scheduler_config__max_num_batched_tokens": 128}, ["cold"], "192 for cold, found 128"),
        ({"cache_config__enable_prefix_caching": False}, ["cold"], None),
        (
            {"cache_config__enable_prefix_caching": False},
            ["cold", "prefix-hit"],
            r"prefix caching for prefix-hit, found it off \(--no-enable-prefix-caching\)",
        ),
        ({"scheduler_config__max_num_seqs": 2}, ["cold"], None),
        ({"scheduler_config__max_num_seqs": 2}, ["concurrent"], "engine.max_num_seqs 4 for concurrent, found 2"),
        ({"model_config__max_model_len": 300}, ["cold"], r"max_model_len of at least 3\d\d, a prompt with its answer"),
        ({"model_config__max_model_len": 380}, ["cold"], None),
        ({"cache_config__cache_dtype": "fp8"}, ["cold"], "engine.kv_cache_dtype auto, found fp8"),
        ({"cache_config__cache_dtype": "float32"}, ["cold"], None),
    ],
)
def test_a_setting_counts_where_the_requests_need_it(changes, scenarios, words):
    prepared = prepare("cpu", ["pd-eagle3"], scenarios)
    executor = pair_with(**changes)
    if words is None:
        executor.require_fit(prepared.plan, PROFILE, prepared.works)
        return
    with pytest.raises(UsageError, match=words):
        executor.require_fit(prepared.plan, PROFILE, prepared.works)


def test_every_setting_of_every_server_that_differs_is_named_at_once():
    on_p = told("prefill", cache_config__block_size=16, speculative_config__num_speculative_tokens=1)
    on_d = told("decode", scheduler_config__max_num_batched_tokens=1664)
    servers = {r: known(r, said=said) for r, said in (("prefill", on_p), ("decode", on_d))}
    with pytest.raises(UsageError) as refused:
        AttachedExecutor(servers).require_fit(prepare("cpu", ["pd-eagle3"], []).plan, PROFILE)
    said = str(refused.value)
    assert (
        "--prefill http://10.0.0.7:8000: expected the settings of the profile: engine.block_size 32, found 16; " in said
    )
    assert "num_speculative_tokens 3, found 1\n--decode http://10.0.0.7:8000: expected" in said
    assert "engine.max_num_batched_tokens 192, found 1664; start the servers with them, or let `harness attach`" in said


def test_what_is_taken_on_trust_names_the_server():
    silent = known("prefill", dev=False, said={"cache_config": {"block_size": 32}})
    executor = AttachedExecutor({"prefill": silent, "decode": known("decode", said=told("decode"))})
    (sentence,) = executor.on_trust(prepare("cpu", ["pd-eagle3"], ["cold"]).plan, PROFILE)
    assert sentence.startswith("--prefill http://10.0.0.7:8000: taken on trust, since the server does not tell them: ")
    assert "engine.dtype" in sentence and "num_speculative_tokens" in sentence and "block_size" not in sentence


def test_settings_of_an_unexpected_shape_are_not_told():
    method = next(m for m in PROFILE.methods if m.kind == "eagle3")
    for shape in ({}, {"cache_config": 3, "model_config": []}, {name: None for name in SAID if "spec" not in name}):
        info = ServerInfo(shape, {"VLLM_USE_V2_MODEL_RUNNER": "?"}, True)
        assert list(info.differences(PROFILE, method, "decode")) == []
        assert info.facts == LogFacts(None, None, None)
    assert ServerInfo({}, {"VLLM_USE_V2_MODEL_RUNNER": True}, True).facts.model_runner == "V2"


def test_what_a_server_lacks_is_recorded_as_missing():
    with fake_server(dev=False) as url:
        executor = AttachedExecutor({"single": look_at("single", url, None)})
    environment = executor.environment(PROFILE)
    assert not environment.has(PAUSE) and environment.vllm == "0.32.0"
    assert (
        not AttachedExecutor({"prefill": known("prefill"), "decode": known("decode", dev=False)})
        .environment(PROFILE)
        .has(RESET_PREFIX_CACHE)
    )


def test_a_server_with_a_key_is_asked_with_it():
    with fake_server(key="k" * 20) as url:
        assert look_at("decode", url, ApiKey("k" * 20)).model == "mine"
        with pytest.raises(UsageError, match=r"lists its model at /v1/models.*\(--key-variable\)"):
            look_at("decode", url, None)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "10.0.0.7:8000",
        "nonsense",
        "http://x/v1",
        "http://x?a=b",
        "http://x:abc",
        "http://x:99999",
        "http://[::1",
    ],
)
def test_what_is_no_address_is_refused(url):
    remedy = "; leave out /v1$" if url.endswith("/v1") else ":8000$"
    with pytest.raises(UsageError, match=f"expected the address of a server.*{remedy}"):
        look_at("single", url, None)


def test_a_server_with_tls_is_asked_if_its_certificate_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with fake_server(tls=context) as url:
        with pytest.raises(UsageError, match=r"CERTIFICATE_VERIFY_FAILED.*; name the file .* in SSL_CERT_FILE"):
            look_at("single", url, None)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        monkeypatch.setattr("harness.engines.http.trusted", ssl.create_default_context)
        assert url.startswith("https://") and look_at("single", url, None).model == "mine"


@pytest.mark.parametrize(
    ("roles", "cells", "words"),
    [
        (["prefill", "decode"], ["pd-eagle3", "single-eagle3"], None),
        (["prefill", "decode", "single"], ["pd-eagle3", "single-none"], None),
        (["single"], ["single-none"], None),
        (["decode"], ["pd-eagle3"], "pd-eagle3 needs --prefill"),
        (["prefill", "decode"], ["pd-*"], "servers run one method, and the selected cells are of several \\(pd-"),
        (["prefill", "decode", "single"], ["pd-eagle3"], "--single can answer none of the selected cells"),
        (["prefill", "decode"], ["pd-eagle3", "pd-eagle3-router"], "pd-eagle3-router needs --router"),
    ],
)
def test_servers_answer_the_cells_of_their_method(roles, cells, words):
    executor = AttachedExecutor({role: known(role) for role in roles})
    plan = prepare("cpu", cells, ["cold"]).plan
    if words is None:
        executor.require_fit(plan, PROFILE)
        return
    with pytest.raises(UsageError, match=words):
        executor.require_fit(plan, PROFILE)


def test_cells_with_a_router_are_asked_through_the_one_that_runs(tmp_path: Path):
    pair = {"prefill": known("prefill"), "decode": known("decode")}
    with fake_server() as url:
        router = look_at_router(url, None, pair.values())
    assert router == Front(url, None, "mine")
    executor = AttachedExecutor(pair, router)
    plan = prepare("cpu", ["pd-eagle3*"], ["cold"]).plan
    executor.require_fit(plan, PROFILE)
    with pytest.raises(UsageError, match="--router can answer none of the selected cells"):
        executor.require_fit(prepare("cpu", ["pd-eagle3"], ["cold"]).plan, PROFILE)
    (group,) = plan.groups
    routers = Routers(group, tmp_path, ApiKey("k" * 20), 1.0, lambda _: None)
    routers.start({}, {True}, router)
    assert routers.clients[True].url == url and routers.clients[True].model == "mine"
    (record,) = routers.records()
    assert (record.role, record.argv, record.attached) == ("router", ("attached", url), True)
    assert routers.end() == []


@contextmanager
def fake_toy_proxy(status: int = 404) -> Iterator[str]:
    """Serve what the proxy of vLLM's NIXL tests does: completions alone, under whatever name D has for its model."""

    class FakeToyProxy(Quiet):
        def do_GET(self) -> None:
            self.say(status, b'{"detail": "Not Found"}')

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            choice = {"token_ids": [7], "prompt_token_ids": asked["prompt"], "finish_reason": "length"}
            self.say(200, json.dumps({"model": asked["model"], "choices": [choice]}).encode())

    with serving(FakeToyProxy) as url:
        yield url


def test_a_proxy_that_lists_no_model_is_asked_by_the_name_that_p_and_d_have(tmp_path: Path):
    (group,) = prepare("cpu", ["pd-eagle3*"], ["cold"]).plan.groups
    said: list[str] = []
    with fake_toy_proxy() as url:
        router = look_at_router(url, None, [known("prefill"), known("decode")])
        assert router == Front(url, None, "mine", lists_model=False)
        routers = Routers(group, tmp_path, ApiKey("k" * 20), 5.0, said.append)
        routers.start({}, {True}, router)
        leg = routers.clients[True].complete([1, 2], Sampling(1, 0), "id", "salt", count=False)
        routers.end()
    assert (leg.role, leg.echoed_ids, leg.output_ids) == ("decode", (1, 2), (7,))
    assert "P's and D's name for it; only their counters show what the router does" in said[0]


def test_a_proxy_that_lists_no_model_needs_one_name_for_it():
    pair = [known("prefill"), known("decode")._replace(model="yours")]
    with fake_toy_proxy() as url, pytest.raises(UsageError, match=r"under one name, and they have mine and yours"):
        look_at_router(url, None, pair)


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_router_that_refuses_to_list_its_model_is_no_proxy(status):
    with fake_toy_proxy(status) as url, pytest.raises(UsageError, match=r"--router .*lists its model .* found "):
        look_at_router(url, None, [known("prefill")])


def test_a_router_that_does_not_answer_is_refused():
    with fake_toy_proxy() as url:
        pass
    with pytest.raises(UsageError, match=r"--router .*found no connection .*; start it"):
        look_at_router(url, None, [known("prefill")])


def test_servers_of_different_versions_are_refused():
    with pytest.raises(
        UsageError, match=r"the servers run different versions of vLLM \(0\.32\.0, one that does not tell"
    ):
        AttachedExecutor({"prefill": known("prefill"), "decode": known("decode", "")}).environment(PROFILE)


def test_a_server_is_not_ended_and_noticed_when_it_is_gone(tmp_path: Path):
    command = build_command(PROFILE, PROFILE.methods[0], "single", ENVIRONMENT, 1, None)
    with fake_server() as url:
        engine = AttachedPlace(look_at("single", url, None)).start(command, tmp_path / "logs" / "single.log")
        assert engine.command.argv == ["attached", url] and engine.stop(1.0) == []
        engine.require_alive()
    with pytest.raises(EngineDiedError, match=r"expected .*/health to answer, found no connection"):
        engine.require_alive()


@contextmanager
def answering(models: bytes, health: int = 200, kind: str = "application/json") -> Iterator[str]:
    """Serve a list of models as it is, and a status of health; no other path."""

    class Answering(Quiet):
        def do_GET(self) -> None:
            status = {"/v1/models": 200, "/health": health}.get(self.path, 404)
            self.send_response(status)
            body = models if self.path == "/v1/models" else b""
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Answering) as url:
        yield url


def listing(*names: str) -> bytes:
    return json.dumps({"data": [{"id": name} for name in names]}).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"data": []}', "found an empty list; give the address"),
        (b'{"object": "list"}', "found JSON without a list of models"),
        (b'[{"id": "mine"}]', "found JSON without a list of models"),
        (b'{"data": [{"name": "mine"}]}', "found a list without names of models"),
        (b"<html><h1>Welcome to nginx!</h1>", "found an HTML page"),
        (b"pong", "found an answer that is not JSON"),
    ],
)
def test_what_lists_no_model_is_refused_in_plain_words(body, words):
    with answering(body) as url, pytest.raises(UsageError, match=f"lists its model at /v1/models, {words}") as refused:
        look_at("single", url, None)
    assert "Error" not in str(refused.value)


def test_of_several_models_the_one_that_is_named_is_asked():
    with answering(listing("base", "sql-lora")) as url:
        with pytest.raises(UsageError, match=r"lists 2 models \(base, sql-lora\); say which one to ask with --model"):
            look_at("single", url, None)
        assert look_at("single", url, None, "sql-lora").model == "sql-lora"
        assert look_at_router(url, None, [], "base").model == "base"
        with pytest.raises(UsageError, match=r"--model other: the server at --single .* it lists base, sql-lora"):
            look_at("single", url, None, "other")
    with answering(listing("mine", "mine")) as url:
        assert look_at("single", url, None).model == "mine"


def test_a_server_without_health_is_refused_at_once():
    begun = time.monotonic()
    with (
        answering(listing("mine"), health=404) as url,
        pytest.raises(UsageError, match=rf"--single {url}: expected vLLM's path /health, found status 404"),
    ):
        look_at("single", url, None)
    assert time.monotonic() - begun < 5


def test_a_server_that_is_never_healthy_is_given_up_after_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readiness, "READY_S", 0.6)
    monkeypatch.setattr(readiness, "_QUIET_S", 0.1)
    said: list[str] = []
    (group,) = prepare("cpu", ["single-none"], ["cold"]).plan.groups
    with answering(listing("mine"), health=429) as url:
        launcher = Launcher(group, PROFILE, tmp_path, tmp_path, ApiKey("k" * 20), said.append)
        command = build_command(PROFILE, PROFILE.methods[0], "single", ENVIRONMENT, 1, None)
        launcher.places = {"single": AttachedPlace(look_at("single", url, None))}
        launcher._start_engine(command)
        waiting = Readiness(group, PROFILE, launcher, Mutation(), said.append)
        begun = time.monotonic()
        with pytest.raises(
            EngineStartError, match=rf"single server {url} to be ready .* found status 429 from /health"
        ):
            waiting.wait(begun + 85, lambda _: None, ("single",))
        launcher.disconnect()
    assert time.monotonic() - begun < 20
    assert said[-1] == "single-none: waiting for the single engine: status 429 from /health"
