"""Planted secrets: none of them in anything that is written, shown or handed on."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

import harness.engines.environment
import harness.engines.router
import harness.reports.judge_run
import harness.runner.groups
import harness.runner.record_cells
import harness.runner.run
from harness import redact
from harness.commands.merge import MergeOptions, merge
from harness.commands.run import execute
from harness.engines.api_key import ApiKey
from harness.engines.client import parse_completion
from harness.engines.counters import KvPool
from harness.engines.router import Router
from harness.errors import EngineDiedError, EngineStartError, HandoffError
from harness.history.folder import load_history
from harness.reports.judge_run import judge_and_report
from harness.supervision.log import EngineLog
from harness.util.progress import Reporter
from harness.workload.prepare import prepare
from tests.support.builders import changed_profile, engine, observation
from tests.support.engines import ENVIRONMENT, session_of
from tests.support.run_files import answers

SCANNED = (
    *("aws.AWSKeyDetector", "azure_storage_key.AzureStorageKeyDetector", "gitlab_token.GitLabTokenDetector"),
    *("mailchimp.MailchimpDetector", "sendgrid.SendGridDetector", "slack.SlackDetector"),
    *("square_oauth.SquareOAuthDetector", "stripe.StripeDetector", "telegram_token.TelegramBotTokenDetector"),
)
"""The detectors of detect-secrets whose rules are ours."""
PATTERNED = {
    "hub": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "sk": "sk-proj-abcdefghijklmnop1234",
    "github": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "gitlab": "glpat-abcdefghijklmnop1234",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "google": "AIza" + "SyB1c2VkLWluLXRlc3RzLW9ubHk0MTIzNDU"[:35],
    "google access": "ya29.a0AfB_byC-abcdefghijklmnop",
    "npm": "npm_" + "aB3" * 12,
    "pypi": "pypi-AgEIcHlwaS5vcmc" + "aB3_-" * 15,
    "stripe": "sk_live_" + "aB3d" * 6,
    "sendgrid": "SG." + "a" * 22 + "." + "B" * 43,
    "slack": "xoxb-123456789012-123456789012-abcdefabcdef",
    "telegram": "123456789:AA" + "b" * 33,
    "mailchimp": "0123456789abcdef0123456789abcdef-us21",
}


@pytest.mark.parametrize("secret", PATTERNED.values(), ids=PATTERNED)
@pytest.mark.parametrize(
    "around", ["{}", "Error: '{}'", "https://hub/{}?x=1", '{{"a": "{}"}}', "x={} y", "x_{} y", "a%3D{}"]
)
def test_what_looks_like_a_secret_is_taken_out(secret, around):
    assert secret not in redact.text(around.format(secret))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer"),
        ("authorization: basic dXNlcjpwYXNzd29yZA==", "authorization: basic"),
        ("https://me:geheim77@example.org/simple", "https://<redacted>@example.org/simple"),
        ("https://geheim-and-long-token@example.org", "@example.org"),
        ("api_key=geheimgeheimgeheim", "api_key="),
        ('"token": "geheimgeheimgeheim"', '"token": "'),
        ("AWS_SECRET_ACCESS_KEY=geheim/geheim+geheim/geheimgeheimgeheim12", "AWS_SECRET_ACCESS_KEY="),
        ('{"SecretAccessKey": "geheim/geheim+geheim/geheimgeheimgeheim12"}', '"SecretAccessKey": "'),
        ("AccountKey=geheimgeheimgeheimgeheim==;EndpointSuffix=core", ";EndpointSuffix=core"),
        ("https://x.example.org/c?sv=2022&sig=geheim%2Fgeheim%2Bgeheimgeheim%3D&se=1", "&se=1"),
        ('{"auths": {"x": {"auth": "Z2VoZWltOmdlaGVpbQ=="}}}', '{"auth": "'),
        ("Set-Cookie: session=geheim; HttpOnly", "Set-Cookie:"),
        ("password=ge!heim", "password="),
        ("http://user:geheim@ge@heim!@example.org/x", "@example.org/x"),
    ],
)
def test_secrets_by_their_place_are_taken_out_and_the_rest_stays(text, kept):
    clean = redact.text(text)
    assert kept in clean
    assert not any(s in clean for s in ("geheim", "heim!", "abcdef123456", "dXNlcjpwYXNzd29yZA", "Z2VoZWlt"))


@pytest.mark.parametrize(
    "text",
    [
        "expected 32 tokens=192, found 31",
        "sha256:0f343b0931126a20f133d67c2b018a3b0f343b0931126a20f133d67c2b018a3b",
        "http://127.0.0.1:21103/v1/completions",
        "request 4bf92f3577b34da6a3ce929d0e0e4736",
        "pd-eagle3/tokens-baseline/copy-096-19",
        "--max-num-batched-tokens 192 --tokenizer /models/target",
        "{'VLLM_CPU_OMP_THREADS_BIND': '0'}",
        "user@example.org wrote",
        "special tokens: eos_token=<|im_end|>, pad_token_id=151643",
        "author: somebody-with-a-long-name",
        "PWD=/work/of/somebody",
        "Using key mask: 0123456789abcdef",
    ],
)
def test_ids_numbers_hashes_and_addresses_stay(text):
    assert redact.text(text) == text


def test_values_of_variables_with_telling_names_are_known(monkeypatch):
    monkeypatch.setenv("SOME_PASSWORD", "correct horse battery")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    monkeypatch.setenv("KEY_FILE", "/etc/key")
    monkeypatch.setenv("ORDINARY", "ordinary value")
    assert redact.text("<correct horse battery> abc /etc/key ordinary value") == (
        "<<redacted>> abc /etc/key ordinary value"
    )


def test_secrets_that_begin_like_paths_or_are_digits_are_known(monkeypatch, tmp_path):
    """One in 64 secrets in Base64 begins with a slash."""
    monkeypatch.setenv("DB_PASSWORD", "/aZ9+secret/of/Base64==")
    monkeypatch.setenv("MY_TOKEN", "84512397764512")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path))
    monkeypatch.setenv("TLS_KEY_FILE", "/not/there/yet")
    monkeypatch.setenv("KEY_COUNT", "1234567890")
    text = f"</aZ9+secret/of/Base64==> 84512397764512 {tmp_path} /not/there/yet 1234567890"
    assert redact.text(text) == f"<{redact.MARK}> {redact.MARK} {tmp_path} /not/there/yet 1234567890"
    assert redact.words(["--password", "/aZ9+secret"]) == ("--password", redact.MARK)
    assert redact.environment({"DB_PASSWORD": "/aZ9+x", "TLS_KEY_FILE": "/k"}) == {
        "DB_PASSWORD": redact.MARK,
        "TLS_KEY_FILE": "/k",
    }


def test_command_lines_lose_secrets_and_keep_the_rest():
    argv = [
        "harness",
        "run",
        "--api-key",
        "geheim",
        "--token=geheim",
        "--max-num-batched-tokens",
        "192",
        "--cell",
        "pd-*",
    ]
    assert redact.words(argv) == (
        *("harness", "run", "--api-key", redact.MARK, f"--token={redact.MARK}"),
        *("--max-num-batched-tokens", "192", "--cell", "pd-*"),
    )
    named = ("harness", "run", "--key-variable", "MY_KEY", "--key-variable=OTHER_KEY")
    assert redact.words(named) == named


def test_environments_keep_names():
    assert redact.environment({"VLLM_API_KEY": "geheimnis", "OMP_NUM_THREADS": "1", "URL": "http://a:b@c"}) == {
        "VLLM_API_KEY": redact.MARK,
        "OMP_NUM_THREADS": "1",
        "URL": f"http://{redact.MARK}@c",
    }


def test_parameters_of_a_hand_off_keep_their_shape():
    given = {"remote_block_ids": [[1, 2]], "remote_host": "127.0.0.1", "note": f"token {PATTERNED['hub']}", "n": None}
    assert redact.data(given) == {**given, "note": f"token {redact.MARK}"}


# --- where things are made -------------------------------------------------------------------------------------------


def test_errors_are_made_without_secrets():
    key = ApiKey()
    assert key.value not in str(EngineStartError(f"found {key.value} in it"))


def test_answers_that_echo_the_header_are_quoted_without_it():
    key = ApiKey()
    # Cut in the middle of the key, half of it would be left.
    for filling in range(0, 300, 7):
        for status, body in ((500, "x" * filling + key.headers["Authorization"]), (200, f'{{"error": "{key.value}"}}')):
            with pytest.raises(HandoffError) as caught:
                parse_completion("decode", "r", status, body, 0.1)
            assert key.value[:12] not in str(caught.value)


@pytest.mark.parametrize("reason", ["Stop!", "x" * 33, 3, ["stop"], "<script>", ""])
def test_finish_reasons_are_words(reason):
    body = {"choices": [{"token_ids": [1], "finish_reason": reason}]}
    with pytest.raises(HandoffError, match="finish_reason"):
        parse_completion("decode", "r", 200, json.dumps(body), 0.1)


@pytest.mark.parametrize("parameters", [[1], "x", {"a": "b" * 2**20}])
def test_parameters_of_a_hand_off_are_bounded(parameters):
    body = {"choices": [{"token_ids": [1]}], "kv_transfer_params": parameters}
    with pytest.raises(HandoffError, match="kv_transfer_params"):
        parse_completion("prefill", "r", 200, json.dumps(body), 0.1)


def test_logs_are_quoted_and_rewritten_without_secrets(tmp_path):
    key = ApiKey()
    path = tmp_path / "logs" / "pd-none.decode.log"
    path.parent.mkdir()
    before = b"first line\nValueError: Bearer " + key.value.encode() + b"\n\xff\xfe no UTF-8\r\nlast, without a newline"
    path.write_bytes(before)
    log = EngineLog(path)
    assert key.value not in log.log_tail() + log.root_error() + log.obituary("decode engine", 1)
    assert redact.logs(tmp_path) == 1
    assert path.read_bytes() == before.replace(key.value.encode(), b"<redacted>")
    assert redact.logs(tmp_path) == 0
    assert [p.name for p in path.parent.iterdir()] == [path.name]


HOSTILE = {
    "jwt": "eyJaaaaaaaa-",
    "jwt with dots": "eyJaaaaaaaa.a.",
    "bearer": "bearer   ",
    "address": "://a:",
    "token": "token= ",
    "sk": "sk-a",
}


@pytest.mark.parametrize("piece", HOSTILE.values(), ids=HOSTILE)
def test_text_made_to_take_long_takes_time_in_proportion(piece):
    """1 MiB of it: quadratic, the first one took hours, with every time limit of the harness held up."""
    text = piece * (2**20 // len(piece))
    begun = time.process_time()
    redact.text(text)
    with pytest.raises(HandoffError):
        parse_completion("decode", "r", 500, text, 0.1)
    assert time.process_time() - begun < 5


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXk\n" * 30 + "-----END OPENSSH PRIVATE KEY-----\n"


@pytest.mark.parametrize("before", [0, 1200, 1300, 1310])
def test_a_private_key_goes_as_a_whole_wherever_it_stands_in_a_log(tmp_path, before):
    log, line = tmp_path / "x.log", "(EngineCore_0 pid=1) Scheduled 192 tokens, token\n"
    log.write_text(line * before + KEY + line * 3)
    assert redact.file(log) is True
    assert log.read_text() == line * before + f"{redact.MARK}\n" + line * 3
    assert "b3Blb" not in redact.text(KEY[:200])


def test_web_tokens_behind_a_hyphen_are_taken_out():
    assert PATTERNED["jwt"] not in redact.text(f"x-{PATTERNED['jwt']}")


def test_half_a_secret_is_not_left_at_the_end_of_what_is_read_of_an_answer():
    key = ApiKey()
    for filling in range(2**16 - 60, 2**16, 3):
        for filled in (" " * filling, "\n" * (filling - 50) + "x" * 50):
            assert key.value[:8] not in redact.quoted(filled + key.value + " " * 99, 300)


def test_redaction_of_logs_takes_little_time(tmp_path):
    """Engines told to log everything write millions of lines; 80 us each were 13 minutes at the end of every engine."""
    log = tmp_path / "x.log"
    log.write_text("(EngineCore_0 pid=1) INFO 11-22 06:00:00 [core.py:1] Scheduled 192 tokens of 4 requests\n" * 50_000)
    begun = time.thread_time()
    assert redact.file(log) is False
    assert time.thread_time() - begun < 1.5


def test_a_secret_on_one_line_of_many_goes_and_the_other_lines_stay(tmp_path):
    log, line = tmp_path / "x.log", "(EngineCore_0 pid=1) Scheduled 192 tokens, token:\n"
    log.write_text(line * 3000 + PATTERNED["hub"] + "\n" + line * 3000)
    assert redact.file(log) is True
    assert log.read_text() == line * 3000 + redact.text(PATTERNED["hub"]) + "\n" + line * 3000


def test_logs_that_are_links_are_left_alone(tmp_path):
    (tmp_path / "theirs").write_text(PATTERNED["hub"])
    (tmp_path / "x.log").symlink_to(tmp_path / "theirs")
    assert redact.logs(tmp_path) == 0
    assert (tmp_path / "theirs").read_text() == PATTERNED["hub"]


class FakeHandle:
    """Stands for a started process that says its key in its log and on its command line."""

    pid, started = 1, 0.0

    def __init__(self, log: Path, key: ApiKey) -> None:
        self.log_path, self.key = log, key
        self.command = SimpleNamespace(argv=["engine", "--api-key", key.value, key.value], env=key.environment)
        log.write_text(f"first line\n{key.value}\n")

    def stop(self, _grace_s: float = 0.0) -> list[str]:
        # Engines write until they have ended.
        with self.log_path.open("a") as log:
            log.write(f"the last one: {self.key.value}\n")
        return []

    def log_text(self) -> str:
        return self.log_path.read_text()


def test_ended_engines_leave_no_key_in_logs_and_records(tmp_path, monkeypatch):
    session = session_of("single-none", tmp_path)
    session._launcher.processes = {"single": FakeHandle(tmp_path / "x.log", session.key)}
    session._launcher.places = {"single": SimpleNamespace(node=None, give_back=lambda: None)}
    session._launcher.clients = {"single": SimpleNamespace(last_snapshot={"prefix_hits": 0.0}, close=lambda: None)}
    monkeypatch.setattr(session, "_kv_pool", lambda _: KvPool())
    (record,) = session.records()
    assert session.key.value not in record.model_dump_json()
    assert record.argv == ("engine", "--api-key", redact.MARK, redact.MARK)
    session.stop()
    assert (tmp_path / "x.log").read_text() == f"first line\n{redact.MARK}\nthe last one: {redact.MARK}\n"


def test_ended_routers_leave_no_key_in_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(harness.engines.router, "launcher", lambda: ["router"])
    key = ApiKey()
    router = Router({"single": "http://127.0.0.1:1"}, 2, 3, tmp_path / "router.log", key)
    router._process = FakeHandle(tmp_path / "router.log", key)
    router.__exit__()
    assert (tmp_path / "router.log").read_text() == f"first line\n{redact.MARK}\nthe last one: {redact.MARK}\n"


# --- a whole run -----------------------------------------------------------------------------------------------------


class FakeLeakySession:
    """Stands for engines that say their secrets wherever they can; no process is started."""

    def __init__(self, group, profile, environment, log_folder, *_, **__) -> None:
        self.group, self.key, self.log = group, ApiKey(), log_folder / f"{group.id}.decode.log"
        self.ready_seconds, self.ended, self.kv_folder, self.notes = 0.0, False, log_folder.parent, None
        self.left: list[str] = []

    def __enter__(self):
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text(f"{self.key.headers} and {PATTERNED['hub']} and {PLANTED}\n")
        return self

    def __exit__(self, *_) -> None:
        redact.logs(self.log.parent)

    def stop(self) -> None:
        self.__exit__()

    end_engines = stop

    def switch(self, *_) -> None:
        pass

    def records(self):
        env = {**self.key.environment, "HF_TOKEN": PLANTED, "URL": f"https://me:{PLANTED}@example.org"}
        made = engine(self.group.id, "decode")
        return [made.model_copy(update={"env": redact.environment(env), "argv": redact.words(["--key", PLANTED])})]


PLANTED = "planted-in-the-environment"


def leaky_cell(session, work, recorder, _reporter):
    """Stands for sending a cell's requests; the answers echo the header."""
    said = session.key.headers["Authorization"]
    made = observation(work.cell.id, error=f"found {said}, {PLANTED}")
    legs = tuple(leg.model_copy(update={"kv_transfer_params": {"note": said, "n": 3}}) for leg in made.legs)
    recorder.append(made.model_copy(update={"legs": legs}))
    recorder.set_cell(work.cell.id, state="failed", reason=f"said {said} and {PATTERNED['github']}")
    raise EngineDiedError(f"{EngineLog(session.log).log_tail()} {said} https://a:{PLANTED}@b {PLANTED}")


def test_planted_secrets_are_in_no_file_of_a_run_nor_in_what_is_made_of_it(tmp_path, monkeypatch, capsys):
    keys: list[str] = []
    remember = redact.remember
    monkeypatch.setattr(redact, "remember", lambda secret: (keys.append(secret), remember(secret)))
    monkeypatch.setattr(harness.runner.groups, "EngineGroupSession", FakeLeakySession)
    monkeypatch.setattr(harness.runner.record_cells, "run_cell", leaky_cell)
    monkeypatch.setattr(harness.runner.record_cells, "rescore", lambda *_: None)
    monkeypatch.setattr(harness.engines.environment, "inspect_environment", lambda *_: ENVIRONMENT)
    monkeypatch.setattr(harness.engines.environment, "need_nixl", lambda *_: None)
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.setattr(sys, "argv", ["harness", "run", "--ray-address", f"http://me:{PLANTED}@head", PATTERNED["sk"]])
    profile = changed_profile(tmp_path, lambda r: r.update(description=f"with {PATTERNED['aws']} and {PLANTED}"))
    prepared = prepare(profile, ["pd-none", "single-none"], ["cold"])
    with Reporter(1.0) as reporter:
        folder = execute(prepared, tmp_path / "out", reporter).folder
    merge([folder], tmp_path / "merged", MergeOptions(keep_going=True))
    judge_and_report(load_history(tmp_path / "merged"))
    assert {"run.json", "cells", "report.html", "junit.xml", "summary.md", "judgement.json"} <= {
        p.name for p in folder.iterdir()
    }
    assert keys
    secrets = {PLANTED, *PATTERNED.values(), *keys}
    for path in [p for where in ("out", "merged") for p in (tmp_path / where).rglob("*") if p.is_file()]:
        data = path.read_bytes().decode("utf-8", errors="replace")
        assert not [s for s in secrets if s in data], path
    (parquet,) = folder.glob("*.parquet")
    assert not [s for s in secrets if s in str(pandas.read_parquet(parquet).to_dict())]
    said = capsys.readouterr()
    assert not [s for s in secrets if s in said.out + said.err]
    # What was not secret is still there.
    assert '"n":3' in answers(folder, "pd-none").read_text()
    assert redact.MARK in (folder / "run.json").read_text()


def test_tokens_of_services_are_those_that_the_scanner_knows():
    """The scanner is no dependency of the program; a new version of it shows here what it has learnt."""

    def shape(pattern: re.Pattern[str]) -> tuple[str, bool]:
        text = pattern.pattern.removeprefix("(?i)")
        return text.replace("\\'", "'").replace('\\"', '"'), bool(pattern.flags & re.IGNORECASE)

    theirs = set()
    for name in SCANNED:
        module, _, detector = name.partition(".")
        found = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), detector)
        theirs |= {shape(pattern) for pattern in found.denylist}
    assert {shape(rule.pattern) for rule in redact._TOKENS} == theirs
