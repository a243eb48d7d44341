"""Engines on a Ray cluster, without a cluster: what is asked for, what a node is checked for, and what a loss becomes.

Ray's own exceptions are used, the cluster is not there; tests/engine/test_ray.py has a real one.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import exceptions

import harness
from harness.engines.command import EngineCommand
from harness.engines.executor import ExecutorChoice, LocalExecutor, make_executor
from harness.engines.inventory import Inventory, jobs_of
from harness.engines.ray import driver, node
from harness.engines.ray.driver import Actor, RayExecutor, RayHandle, RayPlace
from harness.engines.ray.node import EngineState, NodeRequirements, engine_environment, problems
from harness.errors import EngineDiedError, EngineStartError, EnvironmentFault, HandoffError, UsageError
from harness.profiles.engine_config import TensorParallel
from harness.profiles.load import load_profile
from harness.scheduling.model import Placement
from harness.scheduling.planning import planned
from harness.supervision.cores import Cores
from harness.workload.prepare import prepare
from tests.support.engines import ENVIRONMENT, group_of
from tests.support.program import run as cli

# --- what may be asked for -------------------------------------------------------------------------------------------


def test_local_is_the_default_and_puts_engines_where_the_plan_says():
    local = make_executor(ExecutorChoice())
    assert isinstance(local, LocalExecutor)
    profile = load_profile("cpu")
    inventory = local.inventory(profile)
    placement = placed_on(inventory, "pd-none")
    with local as executor, executor.places(group_of("pd-none"), profile, ENVIRONMENT, placement) as places:
        assert list(places) == ["decode", "prefill"]
        assert {p.host for p in places.values()} == {"127.0.0.1"}
        assert [p.devices for p in places.values()] == [
            tuple(inventory.names[d.id] for d in e.devices if d.id in inventory.names) for e in placement.engines
        ]
    assert local.lost() == {}
    assert (local.at_once, make_executor(ExecutorChoice(), base_port=3000).at_once) == (None, 1)


def placed_on(inventory: Inventory, cell: str) -> Placement:
    """Where the scheduler puts the engines of a cell."""
    prepared = prepare("cpu", [cell])
    jobs = jobs_of(prepared.plan, prepared.works, prepared.profile, inventory, rescore=False)
    (placement,) = planned(jobs, inventory.devices).start_next()
    return placement


@pytest.mark.parametrize(
    ("choice", "mutants", "port", "sentence"),
    [
        (ExecutorChoice("slurm"), [], None, "--executor 'slurm': there are local and ray"),
        (ExecutorChoice("local", ray_address="a:1"), [], None, "--ray-address needs --executor ray"),
        (ExecutorChoice("local", pair_nodes="same"), [], None, "--pair-nodes needs --executor ray"),
        (ExecutorChoice("ray"), ["M1"], None, "--mutant M1 exclude each other"),
        (ExecutorChoice("ray"), [], 3000, "--base-port exclude each other"),
        (ExecutorChoice("ray", pair_nodes="apart"), [], None, "--pair-nodes 'apart': there are same, different, any"),
        (ExecutorChoice("ray", ray_address="ray://a:1"), [], None, "on a node of the cluster"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(choice, mutants, port, sentence):
    with pytest.raises(UsageError, match=sentence):
        make_executor(choice, mutants, port)


def test_command_line_refuses_too():
    arguments = ["run", "--executor", "ray", "--mutant", "M1", "--cell", "single-none"]
    code, output = cli(*arguments)
    assert code == 64 and "faults are switched by files" in output


def test_missing_ray_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match=r"kv-acceptance-harness\[ray\]"):
        RayExecutor("127.0.0.1:1").__enter__()


# --- what a node is checked for --------------------------------------------------------------------------------------


def wanted(**changes) -> NodeRequirements:
    folder = str(load_profile("cpu").target)
    return NodeRequirements("cpu", 1, "unknown GPU", {"target": folder}, ENVIRONMENT.model_dump(mode="json"))._replace(
        **changes
    )


def test_node_with_the_same_environment_has_no_problem(monkeypatch):
    monkeypatch.setattr(node, "inspect_environment", lambda _: ENVIRONMENT)
    assert list(problems(wanted())) == []


def test_node_without_the_model_says_where_it_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(node, "inspect_environment", lambda _: ENVIRONMENT)
    (said,) = problems(wanted(folders={"drafter of eagle3": str(tmp_path)}))
    assert f"drafter of eagle3: expected a model folder with config.json at {tmp_path}, found none" in said


def test_node_with_another_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(node, "inspect_environment", lambda _: ENVIRONMENT.model_copy(update={"vllm": "0.31.0"}))
    (said,) = problems(wanted())
    assert "expected vllm 0.32.0 as on the machine of the harness, found 0.31.0" in said


def test_node_with_another_kind_of_gpu_is_refused(monkeypatch):
    """Baselines are found by the GPU of the driver's machine."""
    monkeypatch.setattr(node, "inspect_environment", lambda _: ENVIRONMENT)
    monkeypatch.setattr(node, "gpus", lambda: ["NVIDIA L4, 23034 MiB"])
    assert list(problems(wanted(device="gpu", gpu="NVIDIA L4"))) == []
    (said,) = problems(wanted(device="gpu", gpu="NVIDIA H200"))
    assert "expected NVIDIA H200" in said and "found NVIDIA L4" in said


def test_a_node_without_devices_may_come_and_go():
    """Engines are on the others only."""
    executor = RayExecutor("10.0.0.3:6379")
    executor._ray = FakeCluster(False)
    found = executor.inventory(load_profile("gpu"))
    assert found.devices == () and executor._nodes == {} and executor.lost() == {}


def test_node_without_the_interpreter_is_refused():
    (said,) = problems(wanted())
    assert ENVIRONMENT.executable in said and "same environment at the same path" in said


def test_engine_gets_nothing_of_the_worker(monkeypatch):
    package = Path(harness.__file__).resolve().parents[1]
    monkeypatch.setenv("RAY_JOB_ID", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), "/theirs"]))
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    env = engine_environment({"CUDA_VISIBLE_DEVICES": "3"})
    assert not [k for k in env if k.startswith(("RAY_", "OMP_"))]
    assert (env["PYTHONPATH"], env["CUDA_HOME"], env["CUDA_VISIBLE_DEVICES"]) == ("/theirs", "/cuda", "3")
    assert engine_environment({"PYTHONPATH": "/armed"})["PYTHONPATH"] == "/armed:/theirs"


def test_no_core_is_given_twice(tmp_path):
    available = [str(c) for c in sorted(os.sched_getaffinity(0))]
    holders = [Cores(tmp_path) for _ in available]
    given = [holder.claim(1) for holder in holders]
    assert sorted(given) == sorted((c,) for c in available)
    late = Cores(tmp_path)
    assert late.claim(1) == ()
    holders[0].release()
    assert late.claim(1) == given[0]
    # What is not enough is not kept.
    late.release()
    assert late.claim(len(available) + 1) == ()
    assert Cores(tmp_path).claim(1) == given[0]


# --- what a loss becomes ---------------------------------------------------------------------------------------------


class FakeRay:
    """Answers of actors, and failures of Ray, in the order in which they are asked for."""

    exceptions = exceptions

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.killed = 0

    def get(self, reference, timeout):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self, actor, no_restart):
        self.killed += 1


class FakeActor:
    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *_: name)


def actor(*answers: object) -> Actor:
    return Actor(FakeRay(*answers), FakeActor(), "the decode engine of pd-none on node 10.0.0.3/ab")


@pytest.mark.parametrize(
    "failure",
    [
        exceptions.ActorDiedError(),
        exceptions.ActorUnavailableError("no connection", None),
        exceptions.NodeDiedError("gone"),
        exceptions.WorkerCrashedError(),
        exceptions.GetTimeoutError("too late"),
    ],
)
def test_actor_that_does_not_answer_is_a_lost_engine(failure):
    with pytest.raises(EngineDiedError, match=r"the decode engine of pd-none on node 10.0.0.3/ab is lost") as caught:
        actor(failure).call("state", 0)
    assert type(failure).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (EngineStartError("expected 2 free ports, found 1"), "ab: expected 2 free ports, found 1"),
        (PermissionError("no"), "ab: PermissionError: no"),
    ],
)
def test_call_that_fails_on_the_node_says_why_without_a_traceback(cause, words):
    with pytest.raises(EngineStartError, match=words) as caught:
        actor(exceptions.RayTaskError("state", "Traceback …", cause)).call("state", 0)
    assert "Traceback" not in str(caught.value)


def handle(tmp_path, monkeypatch, *answers: object) -> RayHandle:
    monkeypatch.setattr(driver, "_WATCH_S", 3600)
    command = EngineCommand("decode", 7000, 7001, ["engine"], {}, "10.0.0.3")
    return RayHandle(actor(41, *answers), command, tmp_path / "logs" / "decode.log")


def test_log_is_fetched_in_pieces(tmp_path, monkeypatch):
    looks = [
        EngineState(None, b"one\n", True),
        EngineState(None, b"two\n", False),
        EngineState(None, b"three\n", False),
    ]
    engine = handle(tmp_path, monkeypatch, *looks, EngineState(None, b"", False))
    assert engine.alive()
    assert (tmp_path / "logs" / "decode.log").read_text() == "one\ntwo\n"
    assert engine.log_text() == "one\ntwo\nthree\n"
    assert (engine.pid, engine.url) == (41, "http://10.0.0.3:7000")


def test_lost_node_leaves_the_log_and_a_reason_with_its_end(tmp_path, monkeypatch):
    engine = handle(tmp_path, monkeypatch, EngineState(None, b"loading\n", False), exceptions.ActorDiedError())
    assert engine.alive() and not engine.alive()
    with pytest.raises(EngineDiedError, match=r"(?s)on node 10.0.0.3/ab is lost.*\| loading"):
        engine.require_alive()
    assert "whose end was not confirmed" in engine.stop(1)[0]
    assert (tmp_path / "logs" / "decode.log").read_text() == "loading\n"


def test_engine_that_ended_on_its_node_is_quoted_with_all_it_wrote(tmp_path, monkeypatch):
    engine = handle(tmp_path, monkeypatch, EngineState(1, b"RuntimeError: no ", True), EngineState(1, b"room\n", False))
    with pytest.raises(EngineDiedError, match=r"pid 41\) ended by itself with exit status 1 .*no room"):
        engine.require_alive()


# --- placement groups ------------------------------------------------------------------------------------------------


class FakeCluster(FakeRay):
    """A cluster that has room or not, and remembers what was asked of it."""

    def __init__(self, room: bool, *answers: object) -> None:
        super().__init__(*answers)
        self.room = room
        self.asked: list[tuple[list[dict[str, float]], str]] = []
        self.options: list[dict] = []
        self.removed = 0
        self.util = SimpleNamespace(placement_group=self._group, remove_placement_group=self._remove)

    def _group(self, bundles, strategy):
        self.asked.append((bundles, strategy))
        return SimpleNamespace(wait=lambda _: self.room)

    def _remove(self, _):
        self.removed += 1

    def nodes(self):
        dead = {"Alive": False, "NodeID": "cd", "NodeManagerAddress": "10.0.0.4", "Resources": {"CPU": 4.0}}
        live = {"Alive": True, "NodeID": "ab", "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 2.0, "GPU": 4.0}}
        return [live, dead] if self.room else [live | {"Resources": {"CPU": 1.0}}, dead]

    def remote(self, kind):
        def options(**given):
            self.options.append(given)
            return SimpleNamespace(remote=lambda _: FakeActor())

        return SimpleNamespace(options=options)


def placed(cluster: FakeCluster, cell: str = "pd-none", device: str = "cpu", ranks: int = 1, **options):
    executor = RayExecutor("10.0.0.3:6379", place_s=0.1, **options)
    executor._ray = cluster
    profile = load_profile("cpu")
    parallel = TensorParallel(prefill=ranks, decode=ranks)
    engine = profile.engine.model_copy(update={"device": device, "tensor_parallel": parallel})
    profile = profile.model_copy(update={"engine": engine})
    # Ray decides where; what the plan counted with is not looked at.
    return executor.places(group_of(cell), profile, ENVIRONMENT, None)


OFFER = node.Offered("10.0.0.3/ab", "10.0.0.3", ("0",))


@pytest.mark.parametrize(
    ("options", "cell", "device", "bundles", "strategy"),
    [
        ({}, "pd-none", "cpu", [{"CPU": 1.0}] * 2, "PACK"),
        ({"pair_nodes": "same"}, "pd-none", "cpu", [{"CPU": 1.0}] * 2, "STRICT_PACK"),
        ({"pair_nodes": "different", "ranks": 2}, "pd-none", "gpu", [{"GPU": 2.0}] * 2, "STRICT_SPREAD"),
        ({"pair_nodes": "same"}, "pd-none", "gpu", [{"GPU": 0.4}] * 2, "STRICT_PACK"),
        ({"pair_nodes": "different"}, "single-none", "cpu", [{"CPU": 1.0}], "PACK"),
    ],
)
def test_placement_group_of_a_group_of_engines(options, cell, device, bundles, strategy):
    cluster = FakeCluster(True, OFFER)
    with placed(cluster, cell, device, **options) as places:
        assert cluster.asked == [(bundles, strategy)]
        assert [(p.host, p.devices, p.node) for p in places.values()] == [("10.0.0.3", ("0",), "10.0.0.3/ab")] * len(
            bundles
        )
    given = cluster.options[0]
    assert (given["num_cpus"], given["num_gpus"]) == ((1, 0) if device == "cpu" else (0, bundles[0]["GPU"]))
    assert (cluster.removed, cluster.killed) == (1, len(bundles))


def test_cluster_without_room_is_unknown_and_says_what_it_has():
    cluster = FakeCluster(False, OFFER)
    sentence = r"expected 1 and 1 CPU for pd-none on 2 different nodes .* 1 nodes alive: 10.0.0.3 \(1 CPU\)"
    with pytest.raises(EngineStartError, match=sentence), placed(cluster, pair_nodes="different"):
        pass
    assert cluster.removed == 1


def test_inventory_is_that_of_living_nodes_and_lost_ones_are_told():
    executor = RayExecutor("10.0.0.3:6379")
    cluster = FakeCluster(True)
    executor._ray = cluster
    cpu = executor.inventory(load_profile("cpu"))
    assert [(d.id, d.node) for d in cpu.devices] == [("ab/CPU-0", "ab"), ("ab/CPU-1", "ab")]
    assert not cpu.shared
    gpu = executor.inventory(load_profile("gpu"))
    assert len(gpu.devices) == 4
    profile = load_profile("gpu")
    # Shares of one GPU cannot be told to be of different ones.
    assert gpu.need(profile, "decode").gib == 1.0
    together = profile.model_copy(update={"engine": profile.engine.model_copy(update={"placement": "together"})})
    assert gpu.need(together, "decode").gib == 0.06
    assert executor.lost() == {}
    cluster.nodes = lambda: []
    assert "node 10.0.0.3 is dead" in executor.lost()["ab"]


def test_node_that_is_not_fit_is_named_and_given_back():
    cluster = FakeCluster(True, OFFER._replace(problem="target: expected a model folder"))
    with pytest.raises(EngineStartError, match=r"on node 10.0.0.3/ab: target: expected"), placed(cluster):
        pass
    assert (cluster.removed, cluster.killed) == (1, 2)


def test_failure_that_a_lost_node_caused_is_told_as_that():
    cluster = FakeCluster(True, OFFER)
    with pytest.raises(EngineDiedError, match="node is gone"), placed(cluster) as places:
        place = places["decode"]
        assert isinstance(place, RayPlace)
        place.handle = SimpleNamespace(lost=EngineDiedError("the node is gone"))
        raise HandoffError("expected metrics, found ConnectError")
    assert cluster.removed == 1


def test_failures_of_living_engines_stay_what_they_are():
    with pytest.raises(HandoffError, match="ConnectError"), placed(FakeCluster(True, OFFER)) as places:
        assert {p.handle for p in places.values()} == {None}
        raise HandoffError("expected metrics, found ConnectError")


def test_address_without_a_cluster_is_said_at_once():
    with pytest.raises(EnvironmentFault, match=r"--ray-address 127.0.0.1:1: .* nothing answers there"):
        RayExecutor("127.0.0.1:1").__enter__()


def test_cluster_that_cannot_be_joined_is_said(monkeypatch):
    def refuse(**_):
        raise RuntimeError("Version mismatch")

    monkeypatch.setattr(ray, "init", refuse)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(EnvironmentFault, match=rf"--ray-address {address}: expected a Ray cluster .* mismatch"):
            RayExecutor(address).__enter__()
