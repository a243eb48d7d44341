"""A writer of observations that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.history.folder import load_history, write_run
from tests.support.builders import history, observation

_WRITER = """
import sys
from pathlib import Path
from harness.history.folder import HistoryWriter
from tests.support.builders import observation
with HistoryWriter(Path(sys.argv[1])) as writer:
    for number in range(1_000_000):
        writer.append(observation("single-none", 40, sequence=number))
        print(number, flush=True)
"""


def test_killed_writer_loses_nothing_that_was_appended(tmp_path):
    """SIGKILL at moments of chance: every observation whose ``append`` returned is there, whole."""
    for after in (3, 57, 211, 400):
        folder = tmp_path / str(after)
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
        ) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                if int(line) == after:
                    os.kill(writer.pid, signal.SIGKILL)
                    break
            said = [after, *(int(line) for line in writer.stdout if line.endswith("\n"))]
        write_run(folder, history([observation("single-none")]).run.model_copy(update={"finished": None}))
        kept = [o.sequence for o in load_history(folder).observations]
        assert kept[: said[-1] + 1] == list(range(said[-1] + 1)) and len(kept) <= said[-1] + 2
