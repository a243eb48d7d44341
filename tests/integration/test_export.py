"""What an exported program says of fake servers, and that they end with it. Real ones: tests/engine/test_repro.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.commands.export import archive_of
from harness.commands.repro import Goal
from tests.support.exported import CERTAIN, named, rewritten, run, written
from tests.support.fake_server import Quiet, serving
from tests.support.supervised import gone, wait_for

HALF = Goal(0.5, "3 of 6 requests had it")


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Path:
    return written(named("pd-eagle3"), tmp_path_factory.mktemp("exported"))


@pytest.fixture
def exported(once, tmp_path) -> Path:
    """An exported program that a test may change, with its archive."""
    shutil.copy(archive_of(once), tmp_path)
    return Path(shutil.copy(once, tmp_path))


def right(**changes) -> dict:
    expected = named("pd-eagle3").right["subject"]
    return {"tokens": list(expected.tokens), "accepted": [0, *expected.accepted], **changes}


def tried(file: Path, **changes) -> tuple[int, str]:
    """What the program says with fake servers that answer rightly but for changes by role."""
    usual = {"33": {"tokens": [1, 1]}, "62": right()}
    return run(rewritten(file, {role: usual | changes.get(role, {}) for role in ("prefill", "decode")}))


@pytest.mark.parametrize(
    ("role", "change", "code", "words"),
    [
        ("decode", {}, 0, "the defect does not show (tries: 1; seen at a rate of 100 %"),
        ("decode", {"tokens": [9, 9, 9]}, 1, "the first wrong token is output 0"),
        ("decode", {"accepted": [0, 0, 0, 0]}, 1, "right tokens, different accepted drafts"),
        ("decode", {"gap": 8.9}, 1, "P and D, which computes the first token anew, are 0.1 nats apart"),
        ("decode", {"echo": [1, 2]}, 1, "the server saw other prompt tokens"),
        ("prefill", {"tokens": [9]}, 1, "the prefill server's own token is [9], not"),
        ("prefill", {"tokens": [9], "gap": 0.01}, 0, "does not show"),
        ("decode", {"unmoved": True}, 2, "no KV moved: nothing was tested"),
        ("decode", {"broken": True}, 2, "HTTPError 500"),
        ("prefill", {"no_parameters": True}, 2, "found none"),
        *(("decode", {"raw": raw}, 2, "cannot tell: ") for raw in (
            '{"choices": [{"tok', "[]", "{}", '{"choices": []}', '{"choices": [3]}', '{"choices": [{"token_ids": 5}]}',
            '{"choices": [{"token_ids": ["x"]}]}', '{"choices": [{"token_ids": [9], "logprobs": 3}]}', "no HTTP at all",
        )),
    ],
)  # fmt: skip
def test_verdict(exported, role, change, code, words):
    """Python ends with 1 when it does not know what else to do, and 1 says that the defect shows."""
    found, output = tried(exported, **{role: {"62": right(**change)}})
    assert (found, words in output, "Traceback" in output) == (code, True, False), output


def test_near_tie_is_no_defect(exported):
    other = [*right()["tokens"][:5], 9]
    code, output = tried(exported, decode={"62": right(tokens=other, gap=0.01)}, prefill={"62": right(gap=0.01)})
    assert (code, "no defect: the best two tokens of output 5" in output) == (0, True), output


@pytest.mark.parametrize(
    ("goal", "edit", "decode", "code", "words"),
    [
        (HALF, "", {}, 0, "tries: 5; seen at a rate of 50 % (3 of 6 requests had it)"),
        (HALF, "2", {}, 2, "2 tries without it do not exclude a rate of 50 % (3 of 6 requests had it): set TRIES to 5"),
        (HALF, "", {"wrong_at": 3}, 1, "try 3 of 5"),
        (Goal(1 / 300, "1 of 300"), "3", {}, 2, "set TRIES to 898"),
        # Blocks of 12 x 32 tokens are overwritten before each try but the first.
        (HALF, "", {"fills": 500}, 2, "HTTPError 500"),
        (CERTAIN, "", {"fills": 500}, 0, "does not show"),
    ],
)
def test_tries_exclude_the_rate_that_was_seen(tmp_path, goal, edit, decode, code, words):
    file = written(named("pd-eagle3", goal=goal), tmp_path)
    file.write_text(file.read_text().replace('min(CASE["tries"], 60)', edit or "CASE['tries']"))
    fills = {"384": {"tokens": [1], "broken": True}, "blocks": 28} if decode.pop("fills", 0) else {}
    found, output = tried(file, decode={"62": right(**decode), "salted": True, **fills}, prefill={"salted": True})
    assert (found, words in output) == (code, True), output


def test_concurrent_requests_are_queued_and_released_together(tmp_path):
    case = named("single-eagle3", scenario="concurrent")
    answers = {
        f"{len(s.prompt.ids)}:{s.prompt.ids[2]}": {"tokens": list(r.tokens), "accepted": list(r.accepted)}
        for s in case.sends
        for r in [case.right[s.part]]
    }
    code, output = run(rewritten(written(case, tmp_path), {"single": answers}))
    assert code == 0, output
    assert {line.split(":")[0] for line in output.splitlines() if "prompt tokens" in line} == set(case.right)


def test_key_and_prompts_do_not_go_to_a_proxy(exported, monkeypatch):
    heard = []

    class Proxy(Quiet):
        def do_GET(self) -> None:
            heard.append(self.path)
            self.say(200, b"")

        do_POST = do_GET  # noqa: N815

    with serving(Proxy) as url:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        assert tried(exported)[0] == 0 and heard == []


def test_what_cannot_be_tried_tells_nothing_and_says_why(exported, monkeypatch, tmp_path):
    code, output = run(exported, "--help")
    assert code == 2 and "repro.py takes no arguments, found --help; see its first lines" in output
    code, output = tried(exported, prefill={"die": True})
    assert code == 2 and "RuntimeError: no such device" in output
    archive = archive_of(exported)
    archive.write_bytes(archive.read_bytes()[:-1])
    code, output = run(exported)
    assert (code, "repro-models.zip with SHA-256" in output, "it is damaged" in output) == (2, True, True), output
    archive.unlink()
    code, output = run(exported)
    assert (code, "repro-models.zip" in output, "Traceback" in output) == (2, True, False), output
    monkeypatch.setattr("harness.commands.export.case.ARCHIVED_BYTES", 1000)
    (tmp_path / "large").mkdir()
    code, output = run(written(named("pd-eagle3"), tmp_path / "large"))
    assert code == 2 and "expected the model tokenizer in the folder repro-models/tokenizer beside this file" in output


LINGERING = """
import os, signal, subprocess, sys, time
worker = len(sys.argv) == 1
if worker:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    subprocess.Popen([sys.executable, __file__])
with open(__file__ + ".pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


@pytest.mark.parametrize("numbers", [["KILL"], ["TERM"], ["HUP"], ["INT", "INT", "TERM"]])
def test_servers_end_with_the_program_however_that_ends(exported, tmp_path, numbers):
    stand_in = tmp_path / "stand-in.py"
    stand_in.write_text(LINGERING)
    file = rewritten(exported, {"prefill": {}, "decode": {}}, str(stand_in))
    process = subprocess.Popen([sys.executable, "-I", "-S", str(file)], stdout=subprocess.PIPE, text=True)
    said = tmp_path / "stand-in.py.pids"
    pids = list(map(int, wait_for(lambda: said.exists() and (p := said.read_text().split())[3:] and p, 60)))
    try:
        for name in numbers:
            process.send_signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.05)
        output = process.communicate(timeout=90)[0]
        assert process.returncode == (-signal.SIGKILL if numbers == ["KILL"] else 2), output
        assert numbers == ["KILL"] or "cannot tell: KeyboardInterrupt" in output
        # After KILL nobody ends what a server leaves behind.
        wait_for(lambda: sum(gone([pid]) for pid in pids) >= (2 if numbers == ["KILL"] else 4), 30)
    finally:
        for pid in pids:
            if not gone([pid]):
                os.kill(pid, signal.SIGKILL)


def test_output_that_cannot_be_written_is_no_defect(exported):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-I", "-S", str(rewritten(exported, {"prefill": {}, "decode": {}}))]
        assert subprocess.run(command, stdout=full, stderr=full, timeout=60).returncode == 2
