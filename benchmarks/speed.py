"""Measure the times that docs/evidence/performance.md promises: python -m benchmarks.speed [LINE …] [--out FOLDER]

Lines: matrix (whole time, first verdict, start of a pair, own time), quick, load (quick beside two busy processes, with
the same verdict), selftest, tests, and alone (each cell of the matrix with servers of its own that start as vLLM starts
them, one after the other, against all of them together). Without any, all of them. Run it on a quiet machine; the exit
code is 1 if something takes longer than it should.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from harness.history.folder import load_history
from harness.history.records import RunRecord
from harness.util.paths import REPOSITORY

_HARNESS = [sys.executable, "-m", "harness"]
_AS_VLLM_STARTS = [sys.executable, "-m", "benchmarks.as_vllm_starts"]
_VERDICTS = (0, 1, 2)


class Line(NamedTuple):
    """One line of the table; a larger figure than ``wanted`` is too slow."""

    what: str
    found: float
    wanted: float
    unit: str = "s"
    note: str = ""


class Ended(NamedTuple):
    """A finished command."""

    code: int
    seconds: float
    said: list[tuple[float, str]]
    """The lines that it printed, each with the seconds since it was started."""

    def first(self, words: str) -> float:
        """Return when the first line with these words was printed; infinite if there is none."""
        return next((at for at, line in self.said if words in line), float("inf"))


def run(*command: str) -> Ended:
    """Run a command and print what it prints."""
    started = time.monotonic()
    said = []
    with subprocess.Popen(
        command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append((time.monotonic() - started, line))
            print("   ", line, end="")
    return Ended(process.returncode, time.monotonic() - started, said)


def _recorded(out: Path) -> RunRecord:
    return load_history((out / "latest").resolve()).run


def matrix(out: Path) -> list[Line]:
    ended = run(*_HARNESS, "run", "--out", str(out))
    record = _recorded(out)
    note = f"exit {ended.code}, {sum(c.planned + sum(c.scenarios.values()) for c in record.cells)} requests"
    starts = [c.start_seconds for c in record.cells if c.start_seconds]
    own = 100 * record.seconds["own"] / record.seconds["total"]
    return [
        Line("matrix", ended.seconds, 600, note=note),
        Line("first verdict", ended.first(" so far"), 180),
        Line("start of a pair", max(starts), 25, note=f"later ones {min(starts):.0f} s"),
        Line("own time", own, 4, "%"),
    ]


def quick(out: Path) -> list[Line]:
    ended = run(*_HARNESS, "run", "--quick", "--out", str(out))
    return [Line("--quick", ended.seconds, 240, note=f"exit {ended.code}")]


def load(out: Path) -> list[Line]:
    """The quick matrix beside two busy processes, against the quiet one."""
    quiet = run(*_HARNESS, "run", "--quick", "--out", str(out))
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(2)]
    try:
        ended = run(*_HARNESS, "run", "--quick", "--out", str(out))
    finally:
        for process in busy:
            process.kill()
    note = f"exit {quiet.code} in {quiet.seconds:.0f} s alone, {ended.code} in {ended.seconds:.0f} s"
    ratio = ended.seconds / quiet.seconds if ended.code == quiet.code else float("inf")
    return [Line("--quick beside two busy processes", ratio, 2.5, "x", note)]


def selftest(out: Path) -> list[Line]:
    ended = run(*_HARNESS, "selftest", "--out", str(out))
    return [Line("self-test", ended.seconds, 300, note=f"exit {ended.code}")]


def tests(_: Path) -> list[Line]:
    fast = run("./run_tests.sh", "fast")
    whole = run("./run_tests.sh")
    return [
        Line("./run_tests.sh fast", fast.seconds, 180, note=f"exit {fast.code}"),
        Line("./run_tests.sh", whole.seconds, 720, note=f"exit {whole.code}"),
    ]


def alone(out: Path) -> list[Line]:
    """Each cell with servers of its own, as a script that starts and ends them for each configuration."""
    together = run(*_HARNESS, "run", "--out", str(out / "together"))
    cells = [c.cell for c in _recorded(out / "together").cells]
    seconds = 0.0
    for cell in cells:
        ended = run(*_AS_VLLM_STARTS, "run", "--cell", cell, "--out", str(out / cell))
        if ended.code not in _VERDICTS:
            raise SystemExit(f"{cell}: expected a verdict, found exit code {ended.code}; see {out / cell}")
        seconds += ended.seconds
    note = f"{together.seconds:.0f} s against {seconds:.0f} s for {len(cells)} cells one by one"
    return [Line("share of the time of cells one by one", together.seconds / seconds, 1 / 3, "x", note)]


LINES: dict[str, Callable[[Path], list[Line]]] = {
    "matrix": matrix,
    "quick": quick,
    "load": load,
    "selftest": selftest,
    "tests": tests,
    "alone": alone,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("lines", nargs="*", choices=[[], *LINES], metavar="LINE", help=", ".join(LINES))
    parser.add_argument("--out", type=Path, help="folder for the runs; a temporary one without it")
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="speed-"))
    table = Table("what", "found", "wanted", "")
    slow = False
    for name in given.lines or LINES:
        folder = out / name
        folder.mkdir(parents=True)
        for line in LINES[name](folder):
            slow |= line.found > line.wanted
            wanted = f"{line.wanted:.3g} {line.unit}"
            table.add_row(line.what, f"{line.found:.3g} {line.unit}", f"at most {wanted}", line.note)
    Console(width=120).print(table)
    sys.exit(slow)


if __name__ == "__main__":
    main()
