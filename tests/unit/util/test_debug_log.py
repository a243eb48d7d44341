"""The log for those who debug the harness: requests and progress, without secrets, to a terminal and a file."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from harness.engines.http import get
from harness.util.progress import Reporter
from tests.support.fake_server import fake_server
from tests.support.program import harness, inside


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    log = logging.getLogger("harness")
    before = log.handlers[:], log.level, log.propagate
    yield
    for handler in log.handlers[len(before[0]) :]:
        handler.close()
    log.handlers[:], log.level, log.propagate = before


def test_requests_and_progress_are_logged_without_secrets(tmp_path):
    path = tmp_path / "harness.log"
    assert inside("--log-file", str(path), "list", "profiles")[0] == 0
    with fake_server() as url:
        get(f"{url}/health", {}, 5.0)
    Reporter(1.0, Console(file=io.StringIO())).line("asked with Authorization: Bearer sk-0123456789abcdef0123456789")
    text = path.read_text()
    assert f"DEBUG MainThread harness.engines.http: GET {url}/health: 200 after" in text
    assert "INFO MainThread harness.util.progress: asked with" in text and "sk-0123456789abcdef" not in text


def test_the_log_goes_to_standard_error_only_when_asked_for():
    command = ("run", "-c", "single-none", "-s", "cold", "--single", "http://127.0.0.1:9")
    quiet, verbose = harness(*command), harness("-v", *command)
    assert quiet.stderr.count("\n") == 1 and "harness.engines.http" not in quiet.stderr
    assert "GET http://127.0.0.1:9/v1/models: ConnectError after" in verbose.stderr
    assert quiet.code == verbose.code == 64 and quiet.stdout == verbose.stdout == ""


def test_a_log_file_that_cannot_be_written_is_a_sentence(tmp_path):
    code, words = inside("--log-file", str(tmp_path / "none" / "x.log"), "list", "profiles")
    assert code == 64 and "cannot be written (No such file or directory); name a file in a folder" in words
