"""A run folder that somebody made to do harm, through every command that takes one: a sentence, and nothing of the user
is changed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.util.paths import REPOSITORY
from tests.support.program import harness
from tests.support.reseal import reseal

RECORDED = REPOSITORY / "tests" / "golden" / "runs" / "plan-rows"
PRECIOUS = "precious\n"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e"

COMMANDS: dict[str, list[str]] = {
    "check": ["check", "{run}"],
    "report": ["report", "{run}"],
    "compare": ["report", "{good}", "--compare", "{run}"],
    "trend": ["trend", "{runs}"],
    "merge": ["merge", "{run}", "--out", "{out}"],
    "resume": ["run", "--resume", "{run}"],
    "repro": ["repro", "{run}", "finding"],
    "accept": ["baseline", "accept", "{run}", "--why", "a test"],
    "clean": ["clean", "--logs", "{runs}"],
}


def link(run: Path, victim: Path) -> None:
    (run / "cells" / "pd-eagle3" / "scores.jsonl").symlink_to(victim)


def lock(run: Path, victim: Path) -> None:
    (run / ".lock").symlink_to(victim)


def cell_folder(run: Path, victim: Path) -> None:
    shutil.rmtree(run / "cells" / "single-none")
    (run / "cells" / "single-none").symlink_to(victim.parent)


def report(run: Path, victim: Path) -> None:
    (run / "report.html").unlink(missing_ok=True)
    (run / "report.html").symlink_to(victim)


def fifo(run: Path, victim: Path) -> None:
    os.mkfifo(run / "observations.parquet")


def fifo_for_lines(run: Path, victim: Path) -> None:
    path = run / "cells" / "pd-eagle3" / "observations.jsonl"
    path.unlink()
    os.mkfifo(path)


def device(run: Path, victim: Path) -> None:
    path = run / "cells" / "pd-eagle3" / "observations.jsonl"
    path.unlink()
    path.symlink_to("/dev/zero")


def zeros(run: Path, victim: Path) -> None:
    """A hole of 400 MiB, as of a crash."""
    reseal(run, lambda r: r.update(finished=None))
    with (run / "cells" / "pd-eagle3" / "observations.jsonl").open("r+b") as stream:
        stream.truncate(stream.seek(0, os.SEEK_END) + 400 * 2**20)


def zeros_for_run(run: Path, victim: Path) -> None:
    with (run / "run.json").open("r+b") as stream:
        stream.truncate(400 * 2**20)


def escapes(run: Path, victim: Path) -> None:
    """In whatever text a record has for a person."""
    reseal(
        run,
        lambda r: [
            r.update(command=[ESCAPES], harness_version=ESCAPES, finished=None),
            r["versions"].update(vllm=ESCAPES),
            r["hardware"].update(processor=ESCAPES),
            [cell.update(state="failed", reason=ESCAPES) for cell in r["cells"]],
        ],
    )


DAMAGE: list[Callable[[Path, Path], None]] = [
    link, lock, cell_folder, report, fifo, fifo_for_lines, device, zeros, zeros_for_run, escapes
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
def test_every_command_says_a_sentence_and_changes_nothing_of_the_user(tmp_path, damage):
    for name, template in COMMANDS.items():
        here = tmp_path / name
        victim = here / "home" / "authorized_keys"
        victim.parent.mkdir(parents=True)
        victim.write_text(PRECIOUS)
        folder = here / "runs" / "20261124-000000-cpu-abcd"
        shutil.copytree(RECORDED, folder)
        shutil.copytree(RECORDED, here / "good")
        damage(folder, victim)
        places = {"run": folder, "runs": folder.parent, "good": here / "good", "out": here / "out"}
        command = [word.format(**places) for word in template]
        begun = time.monotonic()
        done = harness(*command)
        said = f"{name}: exit {done.code}\n{done.output}"
        assert "Traceback" not in said, said
        assert not {"\x1b", "\u202e", "\x07"} & set(said), said
        assert victim.read_text() == PRECIOUS, said
        assert sorted(p.name for p in victim.parent.iterdir()) == [victim.name], said
        assert done.code in ALLOWED[name], said
        assert time.monotonic() - begun < 30, said


ALLOWED = {
    **dict.fromkeys(("check", "merge", "resume", "repro", "accept"), (2, 64)),
    # These judge no run: what cannot be read is named, and the others count.
    **dict.fromkeys(("report", "compare", "trend", "clean"), (0, 2, 64)),
}
