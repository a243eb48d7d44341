"""The program in a process of its own, without its 3 s of imports: they are done once, in a server that forks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from harness.config import REPOSITORY

_FORKS = multiprocessing.get_context("forkserver")
# Nothing that reads the environment when it is imported, as huggingface_hub does.
_FORKS.set_forkserver_preload(["harness.cli", "harness.operations", "rich.console"])


class Ended(NamedTuple):
    """What a process came to."""

    code: int
    output: str
    """Standard output and standard error."""


def harness(*arguments: str, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY) -> Ended:
    """As ``python -m harness`` with these arguments and this environment; this process's own without one."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        path = f"/proc/{os.getpid()}/fd/{output.fileno()}"
        child = _FORKS.Process(target=_main, args=(arguments, dict(os.environ if env is None else env), str(cwd), path))
        child.start()
        child.join()
        output.seek(0)
        return Ended(child.exitcode or 0, output.read())


def _main(arguments: tuple[str, ...], env: dict[str, str], cwd: str, path: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(handle, standard)
    os.close(handle)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["harness", *arguments]
    from harness.cli import main

    main()
