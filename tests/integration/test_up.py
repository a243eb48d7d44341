"""The address in front of a cell, without engines: the router's command, what a proof says, and bad requests."""

from __future__ import annotations

import re

import pytest

from harness.commands.serve import Address, Proof, asking, prepare_cell
from harness.engines import router, router_program
from harness.engines.api_key import ApiKey
from harness.errors import EnvironmentFault, UsageError
from tests.support.program import script

KEY = ApiKey()
URLS = {"decode": "http://127.0.0.1:1", "prefill": "http://127.0.0.1:2"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    (tmp_path / router.PROGRAM).write_text("")
    monkeypatch.setattr(router_program.sysconfig, "get_path", lambda _: str(tmp_path))


def test_router_of_a_pair_speaks_nixl_and_never_retries(installed):
    argv = router.router_command(URLS, 3, 4, KEY).argv
    assert "--vllm-pd-disaggregation" in argv and argv[argv.index("--kv-connector") + 1] == "nixl"
    assert argv[argv.index("--prefill") + 1] == URLS["prefill"]
    assert argv[argv.index("--decode") + 1] == URLS["decode"] and "--disable-retries" in argv
    assert argv[argv.index("--host") + 1] == "127.0.0.1"


def test_router_of_a_single_engine(installed):
    argv = router.router_command({"single": "http://127.0.0.1:1"}, 3, 4, KEY).argv
    assert argv[argv.index("--worker-urls") + 1 :] == ["http://127.0.0.1:1"]
    assert "--vllm-pd-disaggregation" not in argv


def test_environment_without_the_router_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(router_program.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(EnvironmentFault, match=r"expected vllm-router at .* install it with pip install"):
        router.router_command(URLS, 3, 4, KEY)


def test_router_that_ends_at_once_is_an_error_with_its_log(tmp_path, monkeypatch):
    program = script(tmp_path / router.PROGRAM, "#!/bin/sh\necho no such flag >&2\nexit 3\n")
    monkeypatch.setattr(router, "launcher", lambda: [str(program)])
    with (
        pytest.raises(Exception, match=r"the router .* exit status 3(.|\n)*no such flag"),
        router.Router(URLS, 3, 4, tmp_path / "router.log", KEY),
    ):
        pass


@pytest.mark.parametrize(
    ("proof", "words", "good"),
    [
        (Proof(True, True, 4096), "4,096 bytes of KV moved", True),
        (Proof(True, True, 0), "UNKNOWN: .* no KV moved", False),
        (Proof(True, False, 4096), "WRONG tokens", False),
        (Proof(True, None, 4096), "cannot be checked", True),
        (Proof(True, True, None), "gave right tokens", True),
        (Proof(False, None, None, "ConnectError: refused"), "UNKNOWN: .* refused", False),
    ],
)
def test_proof_says_what_one_request_showed(proof, words, good):
    assert re.search(words, proof.sentence)
    assert proof.good is good


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (
            "pd-eagle3",
            [
                "--cell",
                "pd-eagle3",
                "--cell",
                "pd-eagle3-router",
                "--decode",
                URLS["decode"],
                "--prefill",
                URLS["prefill"],
                "--router",
                "http://127.0.0.1:3",
            ],
        ),
        ("single-none", ["--cell", "single-none", "--single", "http://127.0.0.1:1"]),
    ],
)
def test_the_command_that_asks_these_engines(cell, options):
    engines = URLS if cell.startswith("pd") else {"single": "http://127.0.0.1:1"}
    address = Address("http://127.0.0.1:3", engines, Proof(True, True, None), "", "")
    wanted = ["harness", "run", "--profile", "cpu", *options, "--key-variable", "OPENAI_API_KEY"]
    assert asking(prepare_cell("cpu", cell), "cpu", address) == wanted


def test_one_cell_at_a_time():
    assert [c.id for c in prepare_cell("cpu", "pd-eagle3").plan.cells] == ["pd-eagle3"]
    with pytest.raises(UsageError, match="expected one cell, found"):
        prepare_cell("cpu", "pd-*")
