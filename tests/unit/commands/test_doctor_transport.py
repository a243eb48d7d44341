"""What `doctor` says about moving KV, from the answers of a stand-in for the engines' Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.commands.doctor import transport
from harness.commands.doctor.transport import transport_items
from harness.engines.environment import EngineEnvironment
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from tests.support.builders import changed_profile
from tests.support.engines import ENVIRONMENT
from tests.support.program import script


def profile_with(tmp_path: Path, **engine: object) -> Profile:
    return load_profile(changed_profile(tmp_path, lambda raw: raw["engine"].update(engine)))


def gpu_profile(tmp_path: Path, **engine: object) -> Profile:
    return profile_with(tmp_path, **{"device": "gpu", "kv_buffer_device": "cuda", **engine})


def python(tmp_path: Path, answer: object = None, said: str = "", more: str = "") -> EngineEnvironment:
    """An engine interpreter that notes what it is asked, with which variables, and answers so."""
    lines = [
        "#!/bin/sh",
        f'echo "$@" > {tmp_path}/asked',
        f"env > {tmp_path}/variables",
        "echo 'NIXL INFO Backend UCX was instantiated'",
        *([f"cat <<'END'\n{json.dumps(answer)}\nEND"] if answer is not None else []),
        *([f"cat >&2 <<'END'\n{said}\nEND"] if said else []),
        more,
    ]
    program = script(tmp_path / "python", "\n".join(lines) + "\n")
    return ENVIRONMENT.model_copy(update={"executable": str(program), "nixl": "1.5.1"})


def test_what_moved_works_whatever_plugins_are_there(tmp_path):
    transfer, tls = transport_items(gpu_profile(tmp_path), python(tmp_path, {"moved": 65536}))
    assert (transfer.what, transfer.ok) == ("NIXL transfer", True)
    assert transfer.found == "UCX in GPU memory, between two processes: works"
    assert (tmp_path / "asked").read_text().split()[1:] == ["cuda", "UCX"]
    assert tls.ok and "not set by the profile" in tls.found


def test_it_is_asked_in_the_memory_and_with_the_variables_of_the_engines(tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "of-this-shell")
    monkeypatch.setenv("UCX_LOG_LEVEL", "of-this-shell")
    (transfer,) = transport_items(profile_with(tmp_path), python(tmp_path, {"moved": 65536}))
    assert transfer.found == "UCX in host memory, between two processes: works"
    assert (tmp_path / "asked").read_text().split()[1:] == ["cpu", "UCX"]
    variables = (tmp_path / "variables").read_text().splitlines()
    assert "UCX_TLS=tcp,sm,self" in variables and "UCX_NET_DEVICES=lo" in variables
    assert not any("of-this-shell" in line for line in variables)
    transport_items(gpu_profile(tmp_path, kv_buffer_device="cpu"), python(tmp_path, {"moved": 65536}))
    assert (tmp_path / "asked").read_text().split()[1:] == ["cpu", "UCX"]
    extra = {"kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}
    transport_items(gpu_profile(tmp_path, **extra), python(tmp_path, {"moved": 65536}))
    assert (tmp_path / "asked").read_text().split()[1:] == ["cuda", "LIBFABRIC"]


@pytest.mark.parametrize(
    ("answer", "said", "more", "words"),
    [
        (
            {"failed": "nixlBackendError: NIXL_ERR_BACKEND", "stage": "agent"},
            "[1.2] vm:1 ucp_context.c:1770 UCX  ERROR no usable transports/devices (asked ib)",
            "",
            "nixlBackendError: NIXL_ERR_BACKEND (agent); no usable transports/devices (asked ib)",
        ),
        (
            {"failed": "other bytes", "stage": "transfer"},
            "",
            "",
            "other bytes (transfer)",
        ),
        (None, "ImportError: libucp.so.0", "exit 1", "ended with exit code 1: ImportError: libucp.so.0"),
        (None, "", "exec sleep 30", "no answer within 1 s"),
    ],
)
def test_what_does_not_work_is_needed_with_the_reason(tmp_path, monkeypatch, answer, said, more, words):
    monkeypatch.setattr(transport, "_LIMIT_S", 1)
    transfer, _ = transport_items(gpu_profile(tmp_path), python(tmp_path, answer, said, more))
    assert not transfer.ok and transfer.needed and transfer.advice
    assert transfer.found == f"UCX in GPU memory, between two processes: {words}"


def test_a_nixl_with_other_calls_is_not_said_to_be_broken(tmp_path):
    answer = {"untried": "AttributeError: nixl_agent_config", "stage": "agent"}
    transfer, _ = transport_items(gpu_profile(tmp_path), python(tmp_path, answer))
    assert transfer.ok and not transfer.needed and "not tried, this NIXL has other calls" in transfer.found


def test_nothing_is_asked_without_pairs_or_without_nixl(tmp_path):
    engines = python(tmp_path, {"moved": 65536})
    without = engines.model_copy(update={"nixl": None})
    alone = load_profile(changed_profile(tmp_path, lambda raw: raw.update(topologies=["single"])))
    assert transport_items(gpu_profile(tmp_path), without) == transport_items(alone, engines) == []
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("tls", "lacking"),
    [
        ("all", ""),
        ("tcp,cuda", ""),
        ("cuda_copy,cuda_ipc,sm", ""),
        ("tcp,cuda_copy", "cuda_ipc"),
        ("tcp,sm,self", "cuda_copy, cuda_ipc"),
        ("^cuda_ipc", "cuda_ipc"),
        ("^tcp", ""),
    ],
)
def test_transports_that_the_profile_leaves_out_are_a_remark(tmp_path, monkeypatch, tls, lacking):
    monkeypatch.setenv("UCX_TLS", "tcp")
    engines = python(tmp_path, {"moved": 65536})
    _, item = transport_items(gpu_profile(tmp_path, env={"UCX_TLS": tls}), engines)
    assert item.ok is not bool(lacking) and not item.needed
    assert (f"leaves out {lacking}" in item.found) is bool(lacking)
    assert "UCX_TLS of this shell is not passed on" in item.found
    assert f"UCX_TLS={tls}" in (tmp_path / "variables").read_text().splitlines()


def test_every_setting_of_this_shell_that_engines_do_not_get_is_named(tmp_path, monkeypatch):
    for name in ("UCX_NET_DEVICES", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, "x")
    _, item = transport_items(gpu_profile(tmp_path), python(tmp_path, {"moved": 65536}))
    assert item.ok and "; NIXL_LOG_LEVEL, UCX_NET_DEVICES of this shell" in item.found
