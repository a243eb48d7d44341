"""The program in a process of its own, without its 3 s of imports: they are done once, in a server that forks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

from harness.util.paths import REPOSITORY

_FORKS = multiprocessing.get_context("forkserver")
# Nothing that reads the environment when it is imported, as huggingface_hub does.
_FORKS.set_forkserver_preload(["harness.cli.app", "harness.commands.run"])


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
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        child = _FORKS.Process(target=_main, args=(arguments, dict(os.environ if env is None else env), output.name))
        child.start()
        child.join()
        return Ended(child.exitcode, output.read())


def _main(arguments: tuple[str, ...], env: dict[str, str], path: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(handle, standard)
    os.close(handle)
    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["harness", *arguments]
    from harness.cli.app import main

    main()
