"""Where engines run: what a place changes in a command, and what stays as it was without one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.engines import inventory as inventory_module
from harness.engines.command import EngineCommand, build_command
from harness.engines.executor import local_places, lone_places
from harness.engines.inventory import cpu_inventory, jobs_of, local_inventory
from harness.engines.places import LocalPlace, default_places
from harness.errors import EngineStartError
from harness.profiles.axes import merged
from harness.profiles.cells import make_plan, select_cells
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.scheduling.gpus import Gpu, visible_devices
from harness.scheduling.model import EnginePlace, Placement
from harness.supervision import gpus, procfs
from harness.supervision.ports import claim, free_ports, release, trouble
from harness.supervision.process import SupervisedEngine
from tests.support.engines import ENVIRONMENT, command_of, group_of, option, session_of

HOST = "127.0.0.9"
"""Not where engines listen unless they are told to, and an address of every Linux machine."""


def gpu_profile() -> Profile:
    cpu = load_profile("cpu")
    return cpu.model_copy(update={"engine": cpu.engine.model_copy(update={"device": "gpu"})})


def wide(profile: Profile, ranks: int) -> Profile:
    return Profile.model_validate(
        merged(profile.model_dump(), {"engine": {"tensor_parallel": {"decode": max(1, ranks)}}})
    )


def test_engine_binds_the_host_of_its_place_with_both_ports():
    command = command_of(host=HOST)
    assert option(command, "--host") == HOST and command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == HOST
    assert command.host == HOST


def test_loopback_is_the_default():
    command = command_of()
    assert option(command, "--host") == command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("devices", "bound", "ranks"), [((), "nobind", None), (("3",), "3", None), (("3", "5"), "3|5", "2")]
)
def test_cores_are_bound_one_per_rank(devices, bound, ranks):
    command = command_of(profile=wide(load_profile("cpu"), len(devices)), devices=devices)
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == bound
    assert "CUDA_VISIBLE_DEVICES" not in command.env
    assert ("--tensor-parallel-size" in command.argv) == (ranks is not None)
    if ranks is not None:
        assert option(command, "--tensor-parallel-size") == ranks


def test_gpus_are_the_only_ones_that_the_engine_sees():
    command = command_of(profile=wide(gpu_profile(), 2), devices=("2", "GPU-5e"))
    assert command.env["CUDA_VISIBLE_DEVICES"] == "2,GPU-5e"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.env
    assert option(command, "--tensor-parallel-size") == "2"
    assert "CUDA_VISIBLE_DEVICES" not in command_of(profile=gpu_profile()).env


def test_profile_can_still_set_variables():
    profile = load_profile("cpu")
    profile = profile.model_copy(update={"engine": profile.engine.model_copy(update={"env": {"UCX_NET_DEVICES": "e"}})})
    assert command_of(profile=profile, host=HOST).env["UCX_NET_DEVICES"] == "e"


def test_local_engines_have_consecutive_ports():
    base, *others = free_ports(4)
    release([base, *others])
    profile = load_profile("cpu")
    plan = make_plan(profile, select_cells(profile, ["pd-none"]))
    inventory = cpu_inventory(profile)
    (job,) = jobs_of(plan, [], profile, inventory, rescore=False)
    engines = tuple(EnginePlace(n.role, (d,)) for n, d in zip(job.engines, inventory.devices, strict=False))
    places = local_places(inventory, Placement(job, engines), base)
    assert list(places) == ["decode", "prefill"]
    assert [p.ports(2) for p in places.values()] == [[base, base + 1], [base + 2, base + 3]]


def test_local_engines_have_a_core_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Engines of another harness on this machine may have claimed cores.
    monkeypatch.setattr(procfs, "state_folder", lambda: tmp_path)
    places = default_places(group_of("pd-none").roles, load_profile("cpu").engine)
    cores = [str(c) for c in sorted(os.sched_getaffinity(0))]
    assert list(places) == ["decode", "prefill"]
    assert [p.devices for p in places.values()] == [tuple(cores[:1]), tuple(cores[1:2])]
    assert {p.host for p in places.values()} == {"127.0.0.1"}
    assert {p.devices for p in default_places(["decode", "prefill"], load_profile("gpu").engine).values()} == {()}


GPUS = tuple(Gpu(n, f"GPU-{n}", "H100", 80.0, 0.0, "580.1") for n in range(3))


@pytest.fixture
def unclaimed(monkeypatch, tmp_path):
    """GPUs that no other test has claimed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(gpus, "_HELD", {})


@pytest.mark.usefixtures("unclaimed")
@pytest.mark.parametrize(
    ("cell", "count", "devices", "said"),
    [
        ("pd-eagle3", 2, {"decode": ("0",), "prefill": ("1",)}, "link: NVLink (NV18)"),
        ("pd-eagle3", 1, {"decode": ("0",), "prefill": ("0",)}, "1 GPU are too few for P and D of pd-eagle3"),
        ("single-eagle3", 2, {"single": ("0",)}, "single on GPU 0"),
        ("pd-eagle3", 0, {"decode": (), "prefill": ()}, ""),
    ],
)
def test_engines_that_are_no_runs_are_placed_on_gpus_as_those_of_a_run(monkeypatch, cell, count, devices, said):
    """`baseline record`, `repro`, `up`, `selftest`, `aa` and `soak` start one group at a time."""
    monkeypatch.setattr(inventory_module, "visible_here", lambda node: visible_devices(None, GPUS[:count], node))
    monkeypatch.setattr(inventory_module, "query_links", lambda: {frozenset((0, 1)): "NVLink (NV18)"})
    told: list[str] = []
    found = lone_places(group_of(cell, "gpu"), load_profile("gpu"), told.append)
    assert {role: place.devices for role, place in found.items()} == devices
    assert said in " ".join(told)


OTHER = """
import sys
from harness.supervision import gpus
print(gpus.claim(sys.argv[1:]), flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("unclaimed")
def test_gpus_of_another_harness_are_left_to_it(monkeypatch):
    monkeypatch.setattr(inventory_module, "visible_here", lambda node: visible_devices(None, GPUS, node))
    monkeypatch.setattr(inventory_module, "query_links", dict)

    def other(*uuids: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OTHER, *uuids]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert started.stdout.readline() == "[]\n"
        return started

    profile = load_profile("gpu")
    first = other("GPU-0")
    found = local_inventory(profile)
    assert [d.gpu.uuid for d in found.gpus] == ["GPU-1", "GPU-2"] and len(found.devices) == 2
    assert "1 of 3 GPUs are left to another harness" in found.notes[-1]
    # Asked again, this process has what it has.
    assert [d.gpu.uuid for d in local_inventory(profile).gpus] == ["GPU-1", "GPU-2"]
    first.communicate()
    assert not list(procfs.state_folder().glob("gpu-GPU-0"))
    monkeypatch.setattr(gpus, "_HELD", {})
    monkeypatch.setenv("TMPDIR", tempfile.mkdtemp(dir=os.environ["TMPDIR"]))
    every = other("GPU-0", "GPU-1", "GPU-2")
    with pytest.raises(EngineStartError, match="found 3 GPUs in use by other harness runs; give each"):
        local_inventory(profile)
    every.kill()
    every.communicate()
    assert len(local_inventory(profile).gpus) == 3


@pytest.mark.usefixtures("unclaimed")
def test_a_pair_that_fits_on_no_gpu_is_not_started(monkeypatch):
    monkeypatch.setattr(inventory_module, "visible_here", lambda node: visible_devices(None, GPUS[:2], node))
    monkeypatch.setattr(inventory_module, "query_links", dict)
    wide = {"engine": {"tensor_parallel": {"prefill": 4, "decode": 1}}}
    profile = Profile.model_validate(merged(load_profile("gpu").model_dump(), wide))
    with pytest.raises(EngineStartError, match=r"pd-none: expected .* 4 × .* for prefill"):
        lone_places(group_of("pd-none", profile), profile, lambda _: None)


def test_every_engine_gets_the_tensor_parallel_size_of_its_role_or_none_is_started():
    """Not the number of devices that happen to be named: a baseline would be of other engines than its name says."""
    engine = {"tensor_parallel": {"prefill": 2, "decode": 1}}
    profile = Profile.model_validate(merged(load_profile("gpu").model_dump(), {"engine": engine}))

    def sizes(role: str, devices: tuple[str, ...]) -> str | None:
        argv = build_command(profile, profile.methods[0], role, ENVIRONMENT, 1, None, devices).argv
        return argv[argv.index("--tensor-parallel-size") + 1] if "--tensor-parallel-size" in argv else None

    assert (sizes("prefill", ()), sizes("prefill", ("0", "1"))) == ("2", "2")
    assert (sizes("decode", ()), sizes("decode", ("3",))) == (None, None)
    with pytest.raises(EngineStartError, match=r"expected 2 devices for the prefill engine .* found 1: 0"):
        sizes("prefill", ("0",))


def test_ports_are_given_out_once_by_a_process():
    """An engine listens minutes after it was told its port, and until then the port looks free."""
    first, second = free_ports(40), free_ports(40)
    assert len({*first, *second}) == 80


def test_ports_are_looked_for_on_the_address_of_the_place():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert trouble(port) == ""
        with pytest.raises(EngineStartError, match=f"{HOST}.*{port}.*--base-port"):
            claim([port], HOST)
    assert len(set(LocalPlace(host=HOST).ports(3))) == 3


def test_process_says_where_it_listens(tmp_path):
    for host, url in ((HOST, f"http://{HOST}:1"), ("fd00::2", "http://[fd00::2]:1")):
        command = EngineCommand("single", 1, None, [sys.executable, "-c", ""], {}, host)
        started = SupervisedEngine(command, tmp_path / "engine.log", dict(os.environ))
        assert started.url == url
        started.stop(1)


# --- a session with places -------------------------------------------------------------------------------------------


class FarPlace:
    """A place that starts nothing and remembers what it was told to start."""

    host = HOST
    devices = ("7",)
    node = "10.0.0.3/ab"

    def __init__(self, *ports: int) -> None:
        self._ports = list(ports)
        self.started: list[EngineCommand] = []

    def ports(self, count: int) -> list[int]:
        return [self._ports.pop(0) for _ in range(count)]

    def give_back(self) -> None:
        pass

    def start(self, command: EngineCommand, log_path: Path) -> SimpleNamespace:
        self.started.append(command)
        return SimpleNamespace(
            command=command,
            url=f"http://{command.host}:{command.port}",
            pid=41,
            started=0.0,
            log_path=log_path,
            stop=lambda _: None,
        )


class ReadyClient:
    """An engine that says that it is healthy."""

    model = "target"

    def get(self, path: str) -> SimpleNamespace:
        return SimpleNamespace(status_code=200, json=lambda: {"data": [{"id": "target"}]})

    def close(self) -> None:
        pass


def test_session_starts_engines_at_their_places_and_asks_the_side_channel_there(tmp_path, monkeypatch):
    with socket.socket() as side_channel:
        side_channel.bind((HOST, 0))
        side_channel.listen()
        open_port, closed_port = side_channel.getsockname()[1], free_ports(1, HOST)[0]
        places = {"decode": FarPlace(7000, open_port), "prefill": FarPlace(7002, closed_port)}
        session = session_of("pd-none", tmp_path, places=places)
        enough = EngineStartError("far enough")
        monkeypatch.setattr(session._readiness, "wait", lambda *_: (_ for _ in ()).throw(enough))
        with pytest.raises(EngineStartError, match="far enough"), session:
            pass
        for role, place in places.items():
            (command,) = place.started
            assert (command.role, command.host, command.env["VLLM_CPU_OMP_THREADS_BIND"]) == (role, HOST, "7")
            session._launcher.processes[role] = place.start(command, tmp_path)
            session._launcher.clients[role] = ReadyClient()
        assert session.url("prefill") == f"http://{HOST}:7002"
        assert session._readiness.lacks("decode") == ""
        assert session._readiness.lacks("prefill") == f"no answer from its NIXL side channel, port {closed_port}"
