"""The plugin for engines that fork, in processes of its own, with a fake vLLM of a CPU platform and a registry."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from harness.engines.api_key import GUARD_FOLDER

FAKE_PLATFORM = """
import os

class CpuPlatform:
    @classmethod
    def check_and_update_config(cls, vllm_config):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        vllm_config.append(cls.__name__)
"""
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
CHECK = (
    "import kv_harness_fork, os; from vllm.platforms.cpu import CpuPlatform; kv_harness_fork.register(); seen = [];"
    "CpuPlatform.check_and_update_config(seen); print(os.environ['VLLM_WORKER_MULTIPROC_METHOD'], *seen)"
)


def run_python(code: str, *paths: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PATH": "/usr/bin", "PYTHONPATH": ":".join([str(GUARD_FOLDER), *paths]), **env},
    )
    return done.stdout.strip()


@pytest.fixture
def fake_vllm(tmp_path) -> str:
    package = tmp_path / "vllm" / "platforms"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "cpu.py").write_text(FAKE_PLATFORM)
    return str(tmp_path)


def test_vllm_finds_the_plugin_on_the_path_of_engines():
    (found,) = [
        point
        for distribution in importlib.metadata.distributions(path=[str(GUARD_FOLDER)])
        for point in distribution.entry_points
        if point.group == "vllm.general_plugins"
    ]
    assert found.value == "kv_harness_fork:register"


@pytest.mark.parametrize(("asked", "used"), [("fork", "fork"), ("spawn", "spawn"), ("", "spawn")])
def test_the_environment_decides(fake_vllm, asked, used):
    assert run_python(CHECK, fake_vllm, VLLM_WORKER_MULTIPROC_METHOD=asked, **ON_CPU) == f"{used} CpuPlatform"


def test_the_platform_of_other_engines_is_left_alone(fake_vllm):
    assert run_python(CHECK, fake_vllm, VLLM_WORKER_MULTIPROC_METHOD="fork") == "spawn CpuPlatform"


@pytest.fixture
def fake_registry(fake_vllm) -> str:
    registry = Path(fake_vllm, "vllm", "model_executor", "models")
    registry.mkdir(parents=True)
    for folder in (registry, registry.parent):
        (folder / "__init__.py").touch()
    (registry / "registry.py").write_text("def _run_in_subprocess(inspect):\n    raise RuntimeError\n")
    return fake_vllm


INSPECT = """
import kv_harness_fork, os
kv_harness_fork.register()
import vllm.model_executor.models.registry as found
def fail():
    raise ValueError("unknown activation")
try:
    print(found._run_in_subprocess(os.getpid) == os.getpid())
    found._run_in_subprocess(fail)
except (RuntimeError, ValueError) as error:
    print(error)
try:
    found._run_in_subprocess(lambda: os._exit(1) if kv_harness_fork.CPU_VARIABLE not in os.environ else None)
except RuntimeError as error:
    print(error)
"""


def test_models_are_inspected_without_another_process_on_cpu(fake_registry):
    found = run_python(INSPECT, fake_registry, VLLM_WORKER_MULTIPROC_METHOD="fork", **ON_CPU)
    assert found.splitlines() == ["True", "unknown activation"]


def test_models_are_inspected_in_a_forked_process_elsewhere(fake_registry):
    found = run_python(INSPECT, fake_registry, VLLM_WORKER_MULTIPROC_METHOD="fork")
    failed = "a model could not be inspected: "
    assert found.splitlines() == ["False", f"{failed}ValueError: unknown activation", f"{failed}its process ended"]


def test_a_version_without_the_platform_starts_as_it_decides(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    code = "import kv_harness_fork; kv_harness_fork.register(); print('started')"
    assert run_python(code, str(tmp_path), VLLM_WORKER_MULTIPROC_METHOD="fork", **ON_CPU) == "started"


def test_a_forked_process_does_not_keep_the_port_of_its_parent():
    code = """
import kv_harness_fork, os, socket
listener = socket.create_server(("127.0.0.1", 0))
address = listener.getsockname()
ours, theirs = socket.socketpair()
os.register_at_fork(after_in_child=kv_harness_fork.drop_listening_sockets)
if os.fork() == 0:
    theirs.send(b"forked")
    theirs.recv(1)
    listener.close()
    os._exit(0)
print(ours.recv(6).decode())
socket.create_connection(address).close()
listener.close()
try:
    socket.create_connection(address, timeout=5).close()
    print("reached")
except ConnectionRefusedError:
    print("refused")
ours.send(b"x")
print(os.wait()[1])
"""
    assert run_python(code).split() == ["forked", "refused", "0"]
