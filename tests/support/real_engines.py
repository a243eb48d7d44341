"""The command line with real engines, and the processes that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.history.folder import History, load_history
from harness.util.paths import REPOSITORY


class Done(NamedTuple):
    """A finished command."""

    code: int
    output: str
    folder: Path | None

    @property
    def history(self) -> History:
        assert self.folder is not None, self.output
        return load_history(self.folder)


def newest(out: Path) -> Path | None:
    link = out / "latest"
    return link.resolve() if link.exists() else next((p for p in out.glob("*-*") if p.is_dir()), None)


def harness(*arguments: str, out: Path | None = None, timeout: float = 1800) -> Done:
    command = [sys.executable, "-m", "harness", *arguments]
    if out is not None:
        command += ["--out", str(out)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=REPOSITORY,
        check=False,
    )
    return Done(done.returncode, done.stdout, newest(out) if out else None)


def left_over(run_folder: Path) -> list[str]:
    """Command lines of live processes in the sessions of the engines that a run started."""
    record = json.loads((run_folder / "run.json").read_text())
    sessions = {e["pid"] for e in record["engines"]}
    return living(sessions)


def living(sessions: set[int]) -> list[str]:
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(" ".join(process.cmdline()))
        except (ProcessLookupError, psutil.Error):
            continue
    return alive
