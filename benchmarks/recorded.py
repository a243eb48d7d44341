"""What the benchmarks of recorded folders have in common."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from harness.config import REPOSITORY


def show_recorded(command: str, latest: str, show: Callable[[Path, Console], None]) -> None:
    """Show the folders of the command line; without any, run ``harness COMMAND`` first and show what it wrote."""
    folders = [Path(a) for a in sys.argv[1:]]
    if not folders:
        subprocess.run([sys.executable, "-m", "harness", command], cwd=REPOSITORY, check=False)
        folders = [REPOSITORY / "reports" / latest]
    for folder in folders:
        show(folder, Console(width=120))
