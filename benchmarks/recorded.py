"""Common code of the benchmarks that read recorded folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from harness.util.paths import REPOSITORY


def show_recorded(command: str, latest: str, show: Callable[[Path, Console], None]) -> None:
    """Show the folders given on the command line; without any, run ``harness COMMAND`` first and show its folder."""
    folders = [Path(a) for a in sys.argv[1:]]
    if not folders:
        subprocess.run([sys.executable, "-m", "harness", command], cwd=REPOSITORY, check=False)
        folders = [REPOSITORY / "reports" / latest]
    for folder in folders:
        show(folder, Console(width=120))
