"""An exported program, and how it runs against fake servers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from harness.commands.export.case import Case, write_case
from harness.commands.export.finding import case_from
from harness.commands.repro import Goal, from_names
from harness.supervision.ports import free_ports
from tests.support import fake_engine
from tests.support.engines import ENVIRONMENT

CERTAIN = Goal(1.0, "every request had it")
FAKE = str(Path(fake_engine.__file__))


def named(
    cell: str, prompt: str = "copy-062-10", scenario: str = "cold", goal: Goal = CERTAIN, profile: str = "cpu"
) -> Case:
    """Return the case of a prompt or scenario, as ``harness repro --cell`` finds it."""
    prepared, target, _ = from_names(profile, cell, prompt if scenario == "cold" else "", scenario)
    return case_from(prepared, target._replace(goal=goal), ENVIRONMENT)


def written(case: Case, folder: Path) -> Path:
    """Export a case and return the program."""
    write_case(case, ENVIRONMENT, folder / "repro.py")
    return folder / "repro.py"


def rewritten(file: Path, engines: dict[str, dict], program: str = FAKE) -> Path:
    """Put fake servers, by role, into the place of vLLM's; they count at once."""
    text, commands = file.read_text(), ""
    for role, said in engines.items():
        # A port that the kernel gives, and gets back, may be another connection's before the server binds it.
        (port,) = free_ports(1)
        models = f"{file.stem}-models/target {file.stem}-models/tokenizer"
        words = f"{sys.executable} {program} {role} --port {port} {shlex.quote(json.dumps(said))} {models}"
        commands += f'    "{role}": r"""\n{words}""",\n'
    text, count = re.subn(r"^SERVERS = \{\n.*?\n\}$", lambda _: f"SERVERS = {{\n{commands}}}", text, flags=re.M | re.S)
    assert count == 1 and ", 1.0\n" in text
    file.write_text(text.replace(", 1.0\n", ", 0.0\n"))
    return file


def run(file: Path, *arguments: str) -> tuple[int, str]:
    """In an isolated interpreter, which sees neither this project nor its folder."""
    command = [sys.executable, "-I", "-S", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr
