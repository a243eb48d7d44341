"""The lanes: what is marked ``exhaustive`` runs with ``--exhaustive`` only, and how many were left out is said.

An exhaustive test repeats, with more or larger samples or with real engines, what a quicker one shows in every run.
Under pytest-xdist, files that wait and files that compute come in turns.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair: a busy one must not turn a right property red.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# pytest-xdist tells its workers the width of a terminal, which they do not have.
os.environ.pop("COLUMNS", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of matrix products that wait for a core spin on another one: a test took ten times as long beside others.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_WAITING = ("browser", "faults", "integration")
"""Folders whose tests wait for processes and for time to pass, but for those that are marked ``computes``."""
_LEFT_OUT = pytest.StashKey[int]()
_SENT = "exhaustive_left_out"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests that are marked exhaustive, too")


def in_turns(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files that wait and files that compute by turns, each in its order: workers that all wait leave the cores idle,
    and workers that all compute wait for each other."""
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    waiting = [tests for tests in files if _waits(tests[0])]
    computing = [tests for tests in files if not _waits(tests[0])]
    turns = itertools.zip_longest(computing, waiting, fillvalue=())
    return [item for turn in turns for tests in turn for item in tests]


def _waits(item: pytest.Item) -> bool:
    return not set(_WAITING).isdisjoint(item.path.parts) and item.get_closest_marker("computes") is None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = in_turns(items)
    marked = [i for i in items if i.get_closest_marker("exhaustive")]
    if not marked or config.getoption("--exhaustive"):
        return
    items[:] = [i for i in items if i not in set(marked)]
    config.hook.pytest_deselected(items=marked)
    config.stash[_LEFT_OUT] = len(marked)
    # A worker of pytest-xdist tells the process that prints.
    if hasattr(config, "workeroutput"):
        config.workeroutput[_SENT] = len(marked)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What a worker has collected stays to its end: looking through it for garbage again and again, and through each
    run that a test judges, was a tenth of the time."""
    if hasattr(session.config, "workerinput"):
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Every worker of pytest-xdist collects everything."""
    output = getattr(node, "workeroutput", {})
    if _SENT in output:
        node.config.stash[_LEFT_OUT] = output[_SENT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(
            f"{count} exhaustive tests were left out: ./run_tests.sh release, or pytest --exhaustive, runs them",
            yellow=True,
        )
