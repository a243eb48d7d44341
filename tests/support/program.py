"""The program in a process of its own, without its seconds of imports: they are done once, in a server that forks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from typing import NamedTuple

from harness.util.paths import REPOSITORY

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.support.warm"])


class Ended(NamedTuple):
    """What a process came to."""

    code: int
    output: str
    """Standard output and standard error."""


def run(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and words, which no traceback is among."""
    done = harness(*arguments, env=env)
    assert "Traceback" not in done.output, done.output
    return done.code, " ".join(done.output.split())


def harness(*arguments: str, env: Mapping[str, str] | None = None) -> Ended:
    """As ``python -m harness`` with these arguments and this environment; this process's own without one."""
    return _forked(_harness, arguments, env)


def pytest(*arguments: str) -> Ended:
    """As ``python -m pytest`` with these arguments."""
    # This process is a run of pytest itself.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return _forked(_pytest, arguments, env)


def start_server() -> None:
    """Start the server now, which it would otherwise do at the first call, with that moment's environment."""
    forkserver.ensure_running()


def _forked(main: Callable[[], object], arguments: tuple[str, ...], env: Mapping[str, str] | None) -> Ended:
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        inherited = dict(os.environ if env is None else env)
        child = _FORKS.Process(target=_main, args=(main, arguments, inherited, output.name))
        child.start()
        child.join()
        return Ended(child.exitcode, output.read())


def _main(main: Callable[[], object], arguments: tuple[str, ...], env: dict[str, str], path: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(handle, standard)
    os.close(handle)
    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["program", *arguments]
    main()


def _harness() -> None:
    from harness.cli.app import main

    sys.argv[0] = "harness"
    main()


def _pytest() -> None:
    from pytest import console_main

    sys.exit(console_main())
