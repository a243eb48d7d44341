"""Kill a harness and the owners of its process trees together: python -m benchmarks.killed_together [MOMENTS]

Each time `harness run --cell pd-eagle3`, with its real engines, is killed with SIGKILL at another moment of its first
25 seconds: imports, the start of the engines, the first requests. The exit code is 1 if a process, a segment of shared
memory, a ledger or a held claim is left ten seconds later.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from harness.supervision import orphans, procfs
from harness.util import file_lock
from harness.util.paths import REPOSITORY

_LONGEST_S = 25.0
_PATIENCE_S = 10.0


def _owners() -> list[procfs.Process]:
    if not procfs.folder_path().exists():
        return []
    ledgers = [orphans.read_ledger(path) for path in procfs.ledgers(procfs.folder_path())]
    return [ledger.warden for ledger in ledgers if isinstance(ledger, orphans.Ledger) and ledger.warden is not None]


def _left(processes: Collection[procfs.Process], before: Collection[procfs.Segment]) -> list[str]:
    """Describe what is left of a run."""
    folder = procfs.folder_path()
    files = sorted(folder.iterdir()) if folder.exists() else []
    return [
        *(f"process {p.pid}" for p in processes if procfs.lives(p)),
        *(f"segment {s.name}" for s in procfs.segments() - set(before)),
        *(p.name for p in files if p.name.startswith(("tree-", "s-")) or file_lock.held(p)),
    ]


def kill_at(moment_s: float, folder: Path) -> list[str]:
    """Start a run in a folder, kill it after ``moment_s``, and return what is left."""
    before = procfs.segments()
    command = [sys.executable, "-m", "harness", "run", "--cell", "pd-eagle3", "--scenario", "cold"]
    with (folder / "output").open("wb") as output:
        harness = subprocess.Popen(
            [*command, "--out", str(folder / "out")], cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT
        )
    time.sleep(moment_s)
    owners = _owners()
    table = procfs.processes()
    tree = procfs.below([harness.pid, *(p.pid for p in owners)], table) | {harness.pid}
    processes = [procfs.Process(pid, table[pid].start) for pid in tree if pid in table]
    # Stopped first, so that none of them notices the end of another one.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (harness.pid, *(p.pid for p in owners)):
            os.kill(pid, number)
    harness.wait()
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _left(processes, before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    took = _PATIENCE_S - (deadline - time.monotonic())
    found = ", ".join(left) or f"nothing left after {took:.1f} s"
    print(f"{moment_s:5.1f} s: {len(owners)} trees, {len(processes)} processes; {found}")
    return left


def main() -> None:
    moments = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    draw = random.Random(0)
    lost = 0
    for _ in range(moments):
        with tempfile.TemporaryDirectory(prefix="killed-", ignore_cleanup_errors=True) as name:
            os.environ["TMPDIR"] = name
            lost += bool(kill_at(draw.uniform(0.5, _LONGEST_S), Path(name)))
    print(f"{moments} moments, something left at {lost}")
    sys.exit(lost > 0)


if __name__ == "__main__":
    main()
