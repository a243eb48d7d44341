"""Engine layer without an engine: commands, parsing of answers and counters, ports, processes that are not vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

import psutil
import pytest

from harness.config import load_profile
from harness.engine.client import REMOTE_DECODE, parse_completion
from harness.engine.command import EngineCommand, build_command, full_environment
from harness.engine.counters import delta, parse_counters
from harness.engine.environment import EngineEnvironment, inspect_environment, need_nixl
from harness.engine.exchange import Ask, Exchange
from harness.engine.ports import claim, free_ports, require_free
from harness.engine.process import EngineProcess
from harness.errors import EngineDiedError, EngineStartError, EnvironmentFault, HandoffError
from harness.history import Leg

ENVIRONMENT = EngineEnvironment(
    executable="/env/bin/python", python="3.11", prefix="/env", vllm="0.32.0", vllm_build="cpu", torch="2", nixl="1",
    transformers="5",
)  # fmt: skip


def commands(kind: str) -> dict[str, EngineCommand]:
    profile = load_profile("cpu")
    method = next(m for m in profile.methods if m.kind == kind)
    return {
        role: build_command(profile, method, role, ENVIRONMENT, 1000, None if role == "single" else 1001)
        for role in ("single", "prefill", "decode")
    }


def option(command: EngineCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


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


def test_inherited_engine_settings_are_scrubbed(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("UCX_TLS", "rc")
    monkeypatch.setenv("KEPT", "yes")
    env = full_environment(commands("none")["decode"].env)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in env
    assert env["UCX_TLS"] == "tcp,sm,self"
    assert env["KEPT"] == "yes"


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
    assert leg.output_ids == (5, 1)
    assert leg.top_gaps == (3.0, None)
    assert leg.speculation is not None
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
# TYPE python_gc counter
python_gc_total 7.0
"""


def test_counters_are_summed_over_engines():
    assert parse_counters(METRICS) == {
        "drafts": 7.0,
        "prompt_tokens_external_kv_transfer": 33.0,
        "accepted_at_1": 2.0,
        "nixl_bytes": 98304.0,
    }


def test_delta_leaves_out_what_did_not_move():
    assert delta({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 5.0, "c": 2.0}) == {"b": 3.0, "c": 2.0}


def test_ports():
    assert len(set(free_ports(8))) == 8
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError, match=f"port {port}"):
            require_free([port])
        with pytest.raises(EngineStartError, match="--base-port"):
            claim([port, port + 1])


def test_engine_python_without_vllm(tmp_path):
    with pytest.raises(EnvironmentFault, match="could not be run"):
        inspect_environment(str(tmp_path / "nothing"))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="expected vllm to be installed there"):
        inspect_environment(str(bare))
    no_python = tmp_path / "cat"
    no_python.write_text("#!/bin/sh\necho hello\n")
    no_python.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="expected a Python interpreter"):
        inspect_environment(str(no_python))


def test_pairs_need_nixl():
    with pytest.raises(EnvironmentFault, match="nixl"):
        need_nixl(ENVIRONMENT.model_copy(update={"nixl": None}))


def process(tmp_path, code: str) -> EngineProcess:
    command = EngineCommand("single", 1, None, [sys.executable, "-c", code], {})
    return EngineProcess(command, tmp_path / "engine.log")


def test_died_engine_is_quoted(tmp_path):
    started = process(tmp_path, "print('about to fail'); raise SystemExit(3)")
    while started.alive():
        time.sleep(0.01)
    with pytest.raises(EngineDiedError, match="exit status 3") as caught:
        started.require_alive()
    assert "about to fail" in str(caught.value)
    started.stop(1)


def test_stop_ends_the_whole_family_even_when_it_ignores_term(tmp_path):
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'])\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    started = process(tmp_path, code)
    while "up" not in started.log_tail() or len(started.family()) < 2:
        time.sleep(0.02)
    pids = [p.pid for p in started.family()]
    started.stop(0.2)
    assert [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE] == []


def test_orphans_of_a_killed_engine_are_ended(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    started = process(tmp_path, code)
    while "up" not in started.log_tail() or len(started.family()) < 2:
        time.sleep(0.02)
    orphan = next(p for p in started.family() if p.pid != started.pid)
    os.kill(started.pid, signal.SIGKILL)
    while started.alive():
        time.sleep(0.01)
    started.stop(0.2)
    assert not psutil.pid_exists(orphan.pid) or orphan.status() == psutil.STATUS_ZOMBIE


# --- hand-offs -------------------------------------------------------------------------------------------------------


class FakeClient:
    """Answers at once and notes in which order it was asked."""

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role = role
        self.calls = calls
        self.last_snapshot: dict[str, float] = {}
        self.fails = False

    def complete(self, prompt, sampling, request_id, salt, parameters=None, count=True, **_):
        self.calls.append(f"{self.role} asked")
        if self.fails:
            raise HandoffError("expected an answer, found none")
        given = {"remote_block_ids": [[1]]} if parameters is REMOTE_DECODE else None
        counters = {"own": 1.0} if count else {}
        return Leg(role=self.role, request_id=request_id, kv_transfer_params=given, counters=counters)

    def counters_after(self, before, awaited):
        self.calls.append(f"{self.role} counted")
        return {"finished_requests": 1.0}


def fake_pair() -> tuple[Exchange, dict[str, FakeClient], list[str]]:
    calls: list[str] = []
    clients = {role: FakeClient(role, calls) for role in ("prefill", "decode")}
    return Exchange(clients, load_profile("cpu")), clients, calls


def test_nothing_is_asked_of_p_before_d_has_answered():
    exchange, _, calls = fake_pair()
    legs: list[Leg] = []
    exchange.send(Ask(True, [1, 2]), legs)
    assert calls == ["prefill asked", "decode asked", "prefill counted"]
    assert [leg.counters for leg in legs] == [{"finished_requests": 1.0}, {"own": 1.0}]
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


def test_router_that_loses_the_parameters_leaves_blocks_on_p():
    exchange, _, _ = fake_pair()
    exchange.drops_parameters = True
    exchange.send(Ask(True, [1, 2]), [])
    assert exchange.kept_by_p == 1
