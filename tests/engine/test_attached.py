"""The tutorial on servers that run already, as it is written: started by hand, read, asked, judged with their KV."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.engines.api_key import GUARD_FOLDER
from harness.engines.command import START_METHOD
from harness.history.folder import load_history
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.checks.kv import HANDED_OVER
from harness.judging.checks.registry import judge
from harness.judging.references import baselines_for
from harness.supervision.ports import free_ports
from harness.util.paths import REPOSITORY
from tests.support.real_engines import living, newest

pytestmark = pytest.mark.engine

# Prompts of every stratum, and no more: nobody waits for the others in a test.
FEW = "workload: {per_stratum: 2, text_prompts: 1}"
LIMIT_S = 420
ENDED_S = 20.0


def tutorial() -> str:
    """The commands of the page, from the environment to the end of the servers."""
    page = (REPOSITORY / "docs/tutorials.md").read_text(encoding="utf-8")
    section = page.partition("## Servers already running")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None and block[1].startswith("source .venv/bin/activate\n")
    return block[1].partition("\n")[2]


def typed_in(folder: Path) -> str:
    """The same for a folder that is no checkout, with this Python, free ports, few prompts and a place for what is
    recorded. Engines are forked from their servers, which have imported what they need."""
    text = tutorial().replace("/tmp/noted", str(folder / "noted"))
    assert 'PYTHONPATH="$(python -c' in text
    text = text.replace('PYTHONPATH="$(python -c', f'PYTHONPATH="{GUARD_FOLDER}:$(python -c')
    for port, free in zip(("8000", "8100", "8200", "5600", "5700"), free_ports(5), strict=True):
        text = re.sub(rf"\b{port}\b", str(free), text)
    text = text.replace("harness run -p", f"echo '{FEW}' >> pair.yaml\nharness run --out {folder / 'out'} -p")
    function = f'harness() {{ PYTHONPATH={REPOSITORY} python -m harness "$@"; }}\n'
    return f"set -e\n{function}{text}wait\n"


def test_servers_that_are_started_as_the_tutorial_says_are_read_asked_and_judged(tmp_path: Path):
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "KV_HARNESS"))}
    env = inherited | {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(REPOSITORY)}
    env[START_METHOD] = "fork"
    env["PATH"] = f"{sys.prefix}/bin:{env.get('PATH', '')}"
    log = tmp_path / "log"
    with log.open("w") as out:
        shell = subprocess.Popen(
            ["bash", "-c", typed_in(tmp_path)],
            **{"cwd": tmp_path, "env": env, "stdout": out, "stderr": out, "start_new_session": True},
        )
        try:
            shell.wait(LIMIT_S)
            # Python's own trackers of resources end a moment after the servers.
            end = time.monotonic() + ENDED_S
            while (left := living({shell.pid})) and time.monotonic() < end:
                time.sleep(0.2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    said = log.read_text(errors="replace")
    # It waited for the servers, which ended by SIGTERM.
    assert shell.returncode == 0, said[-6000:]
    assert left == [], "the last line of the tutorial ends the servers"
    assert "written: pair.yaml; next: harness run -p pair.yaml" in said and "taken on trust: that the weights" in said
    folder = newest(tmp_path / "out")
    assert folder is not None
    history = load_history(folder)
    judgement = judge(history, baselines_for(history))
    assert {c.cell for c in history.run.cells} == {"pd-eagle3", "pd-eagle3-router", "single-eagle3"}
    assert all(engine.attached for engine in history.run.engines)
    assert judgement.verdict is Verdict.PASS
    over = judgement.result("pd-eagle3", HANDED_OVER)
    cold = [o for o in history.in_order("pd-eagle3") if o.scenario == COLD]
    assert over.verdict is Verdict.PASS and over.judged == len(cold) >= 10
