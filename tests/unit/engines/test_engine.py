"""Engine layer without an engine: commands, parsing of answers and counters, ports, processes that are not vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from urllib.parse import parse_qs, urlsplit

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

import harness.engines.client
from harness.engines import log_facts
from harness.engines.client import Client, parse_completion
from harness.engines.command import EngineCommand
from harness.engines.counters import ALL, READ_ONLY, KvPool, delta, parse_counters, parse_kv_pool
from harness.engines.environment import need_build, need_nixl
from harness.engines.request import Ask, Exchange
from harness.engines.session import EngineGroupSession
from harness.errors import EnvironmentFault, HandoffError, ProfileError, RefusedError
from harness.history.records import Leg
from harness.profiles.load import load_profile
from harness.supervision.server import INHERITED, INHERITED_PREFIXES, full_environment
from tests.support.builders import extending, speculation, steps_for
from tests.support.engines import ENVIRONMENT, FakeClient, command_of, group_of, option


def commands(kind: str, profile_name: str = "cpu") -> dict[str, EngineCommand]:
    return {role: command_of(role, profile_name, kind) for role in ("single", "prefill", "decode")}


@pytest.mark.parametrize("kind", ["none", "eagle3", "dflash", "mtp"])
def test_commands_of_a_cell(kind):
    made = commands(kind)
    assert option(made["prefill"], "--model") == option(made["decode"], "--model")
    assert "--kv-transfer-config" not in made["single"].argv
    assert json.loads(option(made["decode"], "--kv-transfer-config"))["kv_connector"] == "NixlConnector"
    if kind == "none":
        assert "--speculative-config" not in made["single"].argv
    else:
        config = json.loads(option(made["decode"], "--speculative-config"))
        assert (config["method"], config["num_speculative_tokens"]) == (kind, 3)
        assert option(made["prefill"], "--speculative-config") == option(made["decode"], "--speculative-config")
    assert option(made["single"], "--host") == "127.0.0.1"


def test_cpu_engines_have_a_back_end_of_triton_where_no_other_kernels_do():
    """A V1 engine that found one would run Triton's kernels instead of vLLM's for CPUs, which are faster."""
    v1, v2 = commands("eagle3")["decode"], commands("eagle3", "cpu-v2")["decode"]
    assert v2.env["TRITON_INTERPRET"] == v2.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    asks = "import importlib.metadata as m; print(*m.entry_points().select(group='triton.backends', name='cpu'))"

    def back_ends(env: dict[str, str]) -> str:
        return subprocess.run([sys.executable, "-c", asks], env=env, capture_output=True, text=True, check=True).stdout

    assert "kv_harness_triton" in back_ends(v2.env)
    # What copies recurrent states with speculation is a kernel of Triton's in V1, too.
    plain, drafted = (commands(kind, "cpu-hybrid-mtp")["single"].env for kind in ("none", "hybrid-mtp"))
    assert "TRITON_INTERPRET" not in plain and "kv_harness_triton" in back_ends(drafted)
    assert "kv_harness_triton" not in back_ends(v1.env)


def test_only_what_engines_need_is_inherited(monkeypatch):
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "TORCHDYNAMO_DISABLE", "LD_PRELOAD", "MY_PAT", "DB_PWD", "COOKIE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UCX_TLS", "rc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("HF_HUB_CACHE", "/models")
    engine = commands("none")["decode"].env
    env = full_environment(engine)
    assert env["UCX_TLS"] == "tcp,sm,self"
    assert (env["PATH"], env["CUDA_VISIBLE_DEVICES"], env["HF_HUB_CACHE"]) == (os.environ["PATH"], "3", "/models")
    inherited = env.keys() - engine.keys()
    assert {n for n in inherited if n not in INHERITED} == {"CUDA_VISIBLE_DEVICES", "HF_HUB_CACHE"} | {
        n for n in os.environ if n.startswith(INHERITED_PREFIXES)
    } - engine.keys()


def answer(**changes) -> str:
    body = {
        "choices": [
            {
                "token_ids": [5, 1],
                "prompt_token_ids": [0, 2, 5, 1, 3],
                "finish_reason": "stop",
                "logprobs": {
                    "token_logprobs": [-0.1, -0.2],
                    "top_logprobs": [{"token_id:5": -0.1, "token_id:7": -3.1}, {"token_id:1": -0.2}],
                },
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        "metrics": {
            "speculative_decoding": {
                "num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 1,
                "per_step_accepted": [0, 1], "per_step_drafted": [3, 3],
            }
        },
    }  # fmt: skip
    return json.dumps({**body, **changes})


def test_answer_is_parsed():
    leg = parse_completion("decode", "r", 200, answer(), 0.5)
    assert leg.output_ids == (5, 1) and leg.top_gaps == (3.0, None)
    assert leg.runner_ups == (7, None) and leg.speculation is not None
    assert leg.speculation.per_step_accepted == (0, 1)


def test_answer_without_metrics_has_no_speculation():
    assert parse_completion("single", "r", 200, answer(metrics=None), 0.5).speculation is None


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (500, "boom"),
        (200, '{"error": {"message": "no"}}'),
        (200, "{"),
        (200, "[]"),
        (200, "null"),
        (200, answer(choices=[])),
        (200, answer(choices=[{}, {}])),
        (200, answer(choices=[{"token_ids": "abc"}])),
        (200, answer(metrics={"speculative_decoding": {}})),
        (200, "[" * 100000),
    ],
)
def test_other_answers_are_hand_off_errors(status, text):
    with pytest.raises(HandoffError, match="expected"):
        parse_completion("decode", "r", status, text, 0.5)


@pytest.mark.parametrize(("code", "error"), [(400, RefusedError), (500, HandoffError)])
def test_a_request_may_be_refused_in_its_stream(code, error):
    """vLLM 0.32.0 sends status 200 before it looks at the parameters."""
    text = f'data: {{"error": {{"message": "not supported", "code": {code}}}}}\n\ndata: [DONE]\n\n'
    with pytest.raises(error) as raised:
        parse_completion("single", "r", 200, text, 0.5, api="completion-stream")
    assert isinstance(raised.value, RefusedError) is (code == 400)
    assert getattr(raised.value, "status", None) in (400, None)


METRICS = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 3.0
vllm:spec_decode_num_drafts_total{engine="1"} 4.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 33.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 1.0
vllm:nixl_bytes_transferred_count{engine="0"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0"} 98304.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 5.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 6.0
vllm:iteration_tokens_total_count{engine="0"} 6.0
# TYPE python_gc counter
python_gc_total 7.0
"""


def test_counters_are_summed_over_engines():
    assert parse_counters(METRICS) == {
        "drafts": 7.0,
        "prompt_tokens_external_kv_transfer": 33.0,
        "accepted_at_1": 2.0,
        "nixl_bytes": 98304.0,
        "engine_steps": 6.0,
        "engine_steps_le_8": 5.0,
    }


@pytest.mark.parametrize(
    ("labels", "pool"),
    [
        ('block_size="16",effective_attention_block_size="544",num_gpu_blocks="99"', KvPool(99, 544)),
        ('effective_attention_block_size="None",num_gpu_blocks="0"', KvPool(None, None)),
        ('num_gpu_blocks="99"', KvPool(99, None)),
    ],
)
def test_pool_and_size_of_its_blocks(labels, pool):
    assert parse_kv_pool(f"vllm:cache_config_info{{{labels}}} 1.0\n") == pool
    assert parse_kv_pool("") == KvPool()


def test_the_wait_for_counters_is_short_after_one_in_vain(monkeypatch):
    client = Client("decode", "http://127.0.0.1:1", 1.0)
    now, texts = [0.0], iter(["vllm:nixl_bytes_transferred_sum 5.0\n"])
    monkeypatch.setattr(harness.engines.client.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(harness.engines.client.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(client, "_metrics", lambda _: "vllm:prompt_tokens_total 1.0\n")

    def waited() -> float:
        begun = now[0]
        client.counters_after({}, {"nixl_bytes": 1})
        return now[0] - begun

    assert [round(waited(), 1) for _ in range(3)] == [3.0, 0.5, 0.5]
    monkeypatch.setattr(client, "_metrics", lambda _: next(texts))
    assert waited() == 0.0
    monkeypatch.setattr(client, "_metrics", lambda _: "vllm:prompt_tokens_total 1.0\n")
    assert round(waited(), 1) == 3.0
    client.close()


class FakeMetrics:
    """Metrics as vLLM mounts them, by a server that leaves out what is not asked for, or by one that refuses to."""

    def __init__(self, chooses: bool) -> None:
        self._chooses = chooses
        self._all = CollectorRegistry()
        Gauge("vllm:kv_cache_usage_perc", "not read", registry=self._all)
        steps = Histogram("vllm:iteration_tokens_total", "of a step", ["engine"], buckets=(1, 8), registry=self._all)
        steps.labels("0").observe(5)
        self.moved = Histogram("vllm:nixl_bytes_transferred", "of a hand-off", ["engine"], registry=self._all)
        self.paths: list[str] = []

    def answer(self, path: str) -> str:
        self.paths.append(path)
        names = parse_qs(urlsplit(path).query).get("name[]")
        if names and not self._chooses:
            raise HandoffError("expected metrics, found 404")
        return generate_latest(self._all.restricted_registry(names) if names else self._all).decode()


@pytest.mark.parametrize("chooses", [True, False])
def test_an_engine_that_can_is_asked_only_for_the_counters_that_are_read(chooses, monkeypatch):
    client, metrics = Client("decode", "http://127.0.0.1:1", 1.0), FakeMetrics(chooses)
    monkeypatch.setattr(client, "_metrics", metrics.answer)
    first = client.snapshot()
    assert first == {"engine_steps": 1.0, "engine_steps_le_1": 0.0, "engine_steps_le_8": 1.0}
    # A counter with labels appears with its first event.
    metrics.moved.labels("0").observe(7)
    assert client.snapshot() == {**first, "nixl_bytes": 7.0}
    assert metrics.paths == [ALL, READ_ONLY, READ_ONLY if chooses else ALL]
    client.close()


def test_delta_leaves_out_what_did_not_move():
    assert delta({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 5.0, "c": 2.0}) == {"b": 3.0, "c": 2.0}


def test_pairs_need_nixl():
    with pytest.raises(EnvironmentFault, match="nixl"):
        need_nixl(ENVIRONMENT.model_copy(update={"nixl": None}))


@pytest.mark.parametrize("vision", ["0.28.0", "0.28.0+cu130"])
def test_torchvision_for_cuda_is_refused_beside_a_torch_for_cpus(vision):
    """Installing the extra `cpu` with pip brings one, which ends every engine when vLLM imports it."""
    beside = ENVIRONMENT.model_copy(update={"torch": "2.13.0+cpu", "torchvision": vision})
    with pytest.raises(EnvironmentFault, match=r"found 0\.28\.0.*pip uninstall -y torchvision"):
        need_build(beside, "cpu")
    for right in (None, "0.28.0+cpu"):
        need_build(beside.model_copy(update={"torchvision": right}), "cpu")
    need_build(beside.model_copy(update={"torch": "2.13.0"}), "cpu")


# --- hand-offs -------------------------------------------------------------------------------------------------------


def fake_pair() -> tuple[Exchange, dict[str, FakeClient], list[str]]:
    calls: list[str] = []
    clients = {role: FakeClient(role, calls) for role in ("prefill", "decode")}
    return Exchange(clients, load_profile("cpu")), clients, calls


def test_nothing_is_asked_of_p_before_d_has_answered():
    exchange, _, calls = fake_pair()
    legs: list[Leg] = []
    exchange.send(Ask(True, [1, 2]), legs)
    assert calls[:2] == ["prefill asked", "decode asked"]
    assert sorted(calls[2:]) == ["decode counted", "prefill counted"]
    assert [leg.counters for leg in legs] == [{"finished_requests": 1.0}] * 2
    assert exchange.kept_by_p == 0


def test_counters_of_p_are_kept_when_d_fails():
    exchange, clients, _ = fake_pair()
    clients["decode"].fails = True
    legs: list[Leg] = []
    with pytest.raises(HandoffError):
        exchange.send(Ask(True, [1, 2]), legs)
    assert [leg.counters for leg in legs] == [{"finished_requests": 1.0}]
    assert exchange.kept_by_p == 1


def test_d_is_not_asked_when_half_of_the_lease_is_over(monkeypatch):
    exchange, _, calls = fake_pair()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow() -> None:
        now[0] += 15.1

    with pytest.raises(HandoffError, match=r"within 15 s of P's answer .* found 15.1 s gone of the 30 s"):
        exchange.send(Ask(True, [1, 2], between=slow), [])
    assert calls == ["prefill asked"]
    assert exchange.kept_by_p == 1


def test_p_is_not_asked_for_the_token_that_it_answers_with():
    exchange, clients, _ = fake_pair()
    exchange.send(Ask(True, [1, 2, 3], appended=True), [])
    assert [clients[role].asked[0][0] for role in ("prefill", "decode")] == [[1, 2], [1, 2, 3]]


def test_d_is_told_of_an_engine_that_no_longer_is_at_ps_address():
    exchange, clients, calls = fake_pair()
    former = {"do_remote_prefill": True, "remote_engine_id": "before", "remote_port": 5}
    exchange.send(Ask(False, [1, 2], alone="decode", former=former), [])
    ((_, params),) = clients["decode"].asked
    assert params.pop("remote_engine_id") != "before"
    assert params == {"do_remote_prefill": True, "remote_port": 5}
    assert calls == ["decode asked"]


def test_p_is_told_where_it_finds_the_answer_before():
    exchange, clients, _ = fake_pair()
    kept = {"do_remote_decode": True, "remote_block_ids": [[1, 2]]}
    exchange.send(Ask(True, [1, 2, 3], read_back=kept), [])
    assert [clients["prefill"].asked[0][1], "do_remote_decode" in clients["decode"].asked[0][1]] == [kept, False]


# --- logs ------------------------------------------------------------------------------------------------------------


def test_runner_and_backend_are_the_used_ones_and_unknown_ones_are_named_as_such():
    log = "Model Runner V2 requires Triton; using the V1 model runner instead.\nUsing FLASH_ATTN backend.\n"
    assert (log_facts.model_runner(log), log_facts.attention_backend(log)) == ("V1", "FLASH_ATTN")
    assert log_facts.model_runner("Using V2 Model Runner") == "V2"
    # As CUDA's platform logs its own choice (vllm/platforms/cuda.py).
    chosen = "Using FLASHINFER attention backend out of potential backends: ['FLASHINFER', 'TRITON_ATTN']."
    assert log_facts.attention_backend(chosen) == "FLASHINFER"
    assert log_facts.attention_backend("attention backend(s) ['TRITON_ATTN']") == "TRITON_ATTN"
    assert (log_facts.model_runner(""), log_facts.attention_backend("")) == ("V1", None)


def test_token_budget_is_the_smallest_that_the_engine_logs():
    log = "Chunked prefill is enabled with max_num_batched_tokens=2048\nmax_num_scheduled_tokens is set to 2040\n"
    assert log_facts.step_tokens(log) == 2040 and log_facts.step_tokens("") is None


@pytest.mark.parametrize(("profile", "kept"), [("cpu-layouts-kept", "32"), ("cpu-hybrid-kept", "32"), ("cpu", None)])
def test_how_much_the_prefix_cache_keeps_of_windows_and_states(profile, kept):
    argv = command_of("decode", profile, "none").argv
    flag = "--prefix-cache-retention-interval"
    assert (argv[argv.index(flag) + 1] if flag in argv else None) == kept


def test_engines_serve_the_adapters_of_the_profile():
    for command in commands("eagle3", "cpu-lora").values():
        words = command.argv[command.argv.index("--lora-modules") + 1 :][:2]
        assert [word.partition("=")[0] for word in words] == ["odd-words", "even-words"]
        assert option(command, "--max-lora-rank") == "8" and option(command, "--max-loras") == "2"
        assert command.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    plain = command_of("single", "cpu")
    assert "--enable-lora" not in plain.argv and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in plain.env


def test_a_folder_that_is_no_adapter_is_refused(tmp_path):
    """Nor one with pickled weights, which may run code."""
    source = extending(tmp_path, engine={"adapters": {"mine": str(tmp_path)}})
    with pytest.raises(ProfileError, match="expected a LoRA adapter with adapter_config"):
        load_profile(source)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.bin").write_text("pickled")
    with pytest.raises(ProfileError, match="expected a LoRA adapter with adapter_model"):
        load_profile(source)


@pytest.mark.parametrize(
    ("profile", "cell", "tokens", "near"),
    [
        ("cpu", "single-eagle3", 415, False),
        ("cpu", "single-eagle3", 416, True),
        # Runner V1 on an H200: 222 tokens and an answer of 192, whose last step had no drafts.
        ("gpu", "single-eagle3", 414, True),
        ("gpu", "single-eagle3", 411, True),
        ("gpu", "single-eagle3", 410, False),
    ],
)
def test_steps_near_the_end_of_the_context_may_have_no_drafts(profile, cell, tokens, near, tmp_path):
    session = EngineGroupSession(group_of(cell), load_profile(profile), ENVIRONMENT, tmp_path)
    leg = Leg(
        role="single",
        request_id="r",
        usage_prompt_tokens=tokens - 192,
        output_ids=(7,) * 192,
        speculation=speculation(steps_for(192)),
    )
    found = session._described(leg).speculation
    assert found is not None and found.at_limit is near
