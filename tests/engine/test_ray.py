"""A real Ray cluster of two nodes on this machine: real engines on different nodes, and nodes that are killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.engines.command import EngineCommand
from harness.engines.environment import inspect_environment
from harness.engines.places import EngineHandle, Place
from harness.engines.ray.driver import RayExecutor, RayHandle
from harness.errors import EngineDiedError, EngineStartError
from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.profiles.cells import EngineGroup, Role, make_plan, select_cells
from harness.profiles.load import load_profile
from harness.reports.judge_run import assess
from harness.scheduling.model import Job, Placement
from harness.util.paths import REPOSITORY
from tests.support.real_engines import left_over, living, newest

pytestmark = pytest.mark.engine

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


class Nodes:
    """A cluster whose head has one CPU, as has every node that is added."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Its hooks for the end of a process are for a main thread.
        head = {**NODE, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self._added: dict[str, Any] = {}

    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> str:
        """Add a node and return its id."""
        node = self._cluster.add_node(**NODE)
        self._added[node.node_id] = node
        return str(node.node_id)

    def kill(self, node: str) -> None:
        """As a machine that goes away: nothing on it is told."""
        self._cluster.remove_node(self._added.pop(node), allow_graceful=False)

    def end(self) -> None:
        self._cluster.shutdown()


class _Manager(BaseManager):
    """The cluster's process."""


_Manager.register("Nodes", Nodes)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with _Manager(ctx=get_context("spawn")) as manager:
        made = manager.Nodes()  # type: ignore[attr-defined]
        try:
            yield made
        finally:
            made.end()


def wait_for(what, seconds: float, why: str):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.1)
    return found


# --- a small server in the place of vLLM -----------------------------------------------------------------------------

SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), http.server.BaseHTTPRequestHandler).serve_forever()
"""


_joined: list[RayExecutor] = []
"""In the driver's process: the executor that has joined the cluster."""


def _join(address: str) -> None:
    _joined.append(RayExecutor(address, "different", place_s=20).__enter__())


@pytest.fixture(scope="module")
def driver(nodes: Nodes) -> Iterator[ProcessPoolExecutor]:
    """A process for what joins the cluster, because Ray may end such a process (see ``supervision.apart``)."""
    with ProcessPoolExecutor(1, get_context("spawn"), _join, (nodes.address(),)) as pool:
        yield pool


def places(cell: str, **changes):
    (executor,) = _joined
    profile = load_profile("cpu")
    (group,) = make_plan(profile, select_cells(profile, [cell])).groups
    assert isinstance(group, EngineGroup)
    # Ray chooses the nodes itself.
    placement = Placement(Job(group.id, (), 0.0, 0.0), ())
    return executor.places(group, profile.model_copy(update=changes), inspect_environment(sys.executable), placement)


class Started(NamedTuple):
    place: Place
    handle: EngineHandle


def start(role: Role, place: Place, folder: Path) -> Started:
    (port,) = place.ports(1)
    argv = [sys.executable, "-c", SERVER, place.host, str(port)]
    handle = place.start(EngineCommand(role, port, None, argv, {}, place.host), folder / f"{role}.log")
    wait_for(lambda: "up" in handle.log_text(), 30, "the server does not start")
    return Started(place, handle)


@pytest.mark.exhaustive
def test_killed_node_is_named_and_the_rest_goes_on(nodes: Nodes, driver: ProcessPoolExecutor, tmp_path):
    driver.submit(check_killed_node, nodes, tmp_path).result()


def check_killed_node(nodes: Nodes, tmp_path: Path) -> None:
    node = nodes.add()
    lost = ""
    with pytest.raises(EngineDiedError) as caught, places("pd-none") as given:
        started = {role: start(role, place, tmp_path) for role, place in given.items()}
        sessions = {s.handle.pid for s in started.values()}
        assert len({s.place.node for s in started.values()}) == 2
        # Both nodes are one machine here, and must not give away a core twice.
        assert len({s.place.devices for s in started.values()}) == min(2, len(os.sched_getaffinity(0)))
        lost = next(r for r, s in started.items() if node.startswith(str(s.place.node).partition("/")[2]))
        nodes.kill(node)
        wait_for(lambda: not started[lost].handle.alive(), 60, "the loss is not noticed")
        wait_for(lambda: len(living(sessions)) == 1, 30, "the engine of the lost node is still there")
        (other,) = [s.handle for r, s in started.items() if r != lost]
        assert isinstance(other, RayHandle) and other.alive()
        other.stop(5)
        assert living(sessions) == []
        assert "up" in (tmp_path / f"{lost}.log").read_text()
        started[lost].handle.require_alive()
    assert f"the {lost} engine of pd-none on node " in str(caught.value)
    assert "| up" in str(caught.value)

    with (
        pytest.raises(
            EngineStartError, match=r"expected 1 and 1 CPU for pd-none on 2 different nodes .* 1 nodes alive"
        ),
        places("pd-none"),
    ):
        pass
    with places("single-none") as given:
        assert start("single", given["single"], tmp_path).handle.alive()


def test_engines_end_with_their_places(driver: ProcessPoolExecutor, tmp_path):
    driver.submit(check_engines_end, tmp_path).result()


def check_engines_end(tmp_path: Path) -> None:
    with places("single-none") as given:
        pid = start("single", given["single"], tmp_path).handle.pid
        assert len(living({pid})) == 1
    wait_for(lambda: not living({pid}), 30, "the engine is still there")


def test_node_without_the_model_is_refused(driver: ProcessPoolExecutor, tmp_path):
    driver.submit(check_missing_model, tmp_path).result()


def check_missing_model(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineStartError, match=rf"on node \S+: target: expected a model folder .* at {tmp_path}"),
        places("single-none", target=tmp_path),
    ):
        pass


# --- real engines ----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_pair_on_two_nodes_passes_and_what_a_killed_node_leaves_is_unknown(nodes: Nodes, small_profile: str, tmp_path):
    """Three engines: the pair's first cell passes, its node is killed during the second, and the plain engine passes on
    the node that is left."""
    node = nodes.add()
    command = [sys.executable, "-m", "harness", "run", "--executor", "ray", "--ray-address", nodes.address()]
    command += ["--pair-nodes", "different", "--scenario", "cold", "--out", str(tmp_path), "--profile", small_profile]
    command += ["--cell", "pd-eagle3*", "--cell", "single-none"]
    with (tmp_path / "output").open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY)
    said = (tmp_path / "output").read_text
    try:
        first = re.compile(r"pd-eagle3: \d+ requests")
        wait_for(lambda: first.search(said()) or running.poll() is not None, 600, "the cell does not end")
        assert running.poll() is None, said()
        nodes.kill(node)
        assert running.wait(600) == 2, said()
    finally:
        running.kill()
    folder = newest(tmp_path)
    assert folder is not None
    history = load_history(folder)
    assert assess(history).judgement.by_cell() == {
        "pd-eagle3": Verdict.PASS,
        "pd-eagle3-router": Verdict.UNKNOWN,
        "single-none": Verdict.PASS,
    }
    pair = [e for e in history.run.engines if e.role in ("prefill", "decode")]
    assert len({e.node for e in pair}) == 2
    assert {e.argv[e.argv.index("--host") + 1] for e in pair} == {str(e.node).partition("/")[0] for e in pair}
    assert all(o.leg("decode").counters["nixl_bytes"] > 0 for o in history.of("pd-eagle3").values())
    (broken,) = [c for c in history.run.cells if c.cell == "pd-eagle3-router"]
    lost = next(e for e in pair if node.startswith(str(e.node).partition("/")[2]))
    assert f"the {lost.role} engine of pd-eagle3 on node {lost.node} is lost" in str(broken.reason)
    assert str(lost.node) in said()
    assert "Traceback" not in said()
    assert "state-dump" not in said()
    for engine in history.run.engines:
        assert (folder / "logs" / engine.log).read_text()
    assert left_over(folder) == []
