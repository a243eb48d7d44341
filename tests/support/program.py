"""The program in a process of its own, without its seconds of imports: they are done once, in a server that forks."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from harness.util.paths import REPOSITORY

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.support.warm"])


class Ended(NamedTuple):
    """What a process came to."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Standard output and standard error."""
        return self.stdout + self.stderr


def run(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and words, which no traceback is among."""
    done = harness(*arguments, env=env)
    assert "Traceback" not in done.output, done.output
    return done.code, " ".join(done.output.split())


def harness(*arguments: str, env: Mapping[str, str] | None = None) -> Ended:
    """As ``python -m harness`` with these arguments and this environment; this process's own without one."""
    return _forked(_harness, arguments, env)


def inside(*arguments: str) -> tuple[int, str]:
    """As ``run``, in this process: for commands that import for seconds what the tests of them have imported."""
    from harness.cli.app import main

    said, code = io.StringIO(), 0
    with keeping_signals(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            with mock.patch.object(sys, "argv", ["harness", *arguments]):
                main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, " ".join(said.getvalue().split())


def script(path: Path, text: str) -> Path:
    """Write a program that can be started, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def keeping_signals() -> Iterator[None]:
    """Give this process its handlers of signals back, which the program replaces."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def pytest(*arguments: str) -> Ended:
    """As ``python -m pytest`` with these arguments."""
    # This process is a run of pytest itself.
    return _forked(_pytest, arguments, {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")})


def start_server() -> None:
    """Start the server now, which it would otherwise do at the first call, with that moment's environment."""
    forkserver.ensure_running()


def _forked(main: Callable[[], object], arguments: tuple[str, ...], env: Mapping[str, str] | None) -> Ended:
    inherited = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        child = _FORKS.Process(target=_main, args=(main, arguments, inherited, outputs))
        child.start()
        child.join()
        return Ended(child.exitcode, *(path.read_text(encoding="utf-8") for path in outputs))


def _main(main: Callable[[], object], arguments: tuple[str, ...], env: dict[str, str], outputs: list[Path]) -> None:
    for standard, path in enumerate(outputs, 1):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
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
