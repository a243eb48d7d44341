"""The exported file: what is in it, and what it says of fake engines. Real ones: tests/engine/test_repro.py."""

from __future__ import annotations

import ast
import base64
import json
import re
import shutil
import sys
import zlib
from pathlib import Path

import pytest

from harness.commands.export.case import Right, case_of, cold_script, engine_commands, injected, write_case
from harness.commands.export.finding import Smallest, issue_text
from harness.commands.repro import Goal
from harness.errors import UsageError
from harness.profiles.cells import select_cells
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.util.paths import REPOSITORY
from harness.workload.scripts import scripts
from tests.support.engines import ENVIRONMENT
from tests.support.exported import exported, exported_once, literal, named, rewritten, run
from tests.support.fake_server import Quiet, serving

__all__ = ["exported", "exported_once"]

SECRET = "hf_AbCdEfGhIjKlMnOpQrStUvWx"


def right() -> dict:
    expected = named("pd-eagle3").right["subject"]
    return {"tokens": list(expected.tokens), "accepted": [0, *expected.accepted]}


WARM = {"33": {"tokens": [1, 1]}}


def tried(file: Path, *options: str, **changes) -> tuple[int, str]:
    """What the file says with fake engines that answer rightly but for changes by role or with changes of its case."""
    usual = {**WARM, "62": right()}
    engines = {role: usual | changes.pop(role, {}) for role in ("prefill", "decode")}
    return run(rewritten(file, engines, **changes), *options)


def test_file_is_plain_python_without_this_machine_or_this_project(exported):
    text = exported.read_text()
    assert str(REPOSITORY) not in text and "/somewhere" not in text
    imported = {n.module or "" for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
    assert {m.split(".")[0] for m in imported} <= set(sys.stdlib_module_names) | {"__future__"}
    assert exported.stat().st_size < 8 * 2**20
    models = literal(text, "CASE")["models"]
    assert set(models) == {"target", "tokenizer", "drafter"}
    assert all(d in literal(text, "FILES") for m in models.values() for d in m["files"].values())


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({}, 0, "the defect is not there: answers are as expected"),
        ({"tokens": [9, 9, 9]}, 1, "the first wrong token is output 0"),
        ({"accepted": [0, 0, 0, 0]}, 1, "right tokens, different accepted drafts"),
        ({"gap": 8.9}, 1, "P and D, which computes the first token anew from P's KV, are 0.1 nats apart"),
        ({"echo": [1, 2]}, 1, "the engine saw other prompt tokens"),
        ({"unmoved": True}, 2, "no KV moved: nothing was tested"),
        ({"broken": True}, 2, "expected status 200 of the decode engine, found 500"),
    ],
)
def test_verdict_of_the_file(exported, change, code, words):
    found, output = tried(exported, decode={"62": right() | change})
    assert (found, words in output) == (code, True), output


def test_file_of_an_injected_fault_says_that_it_cannot_show_it(exported):
    found = "the defect is M4, which the harness injected, and the file does not have"
    code, output = tried(exported, injected=injected(("M4",)))
    assert injected(("M4",)) == found and (code, f"that says nothing: {found}" in output) == (0, True), output


@pytest.mark.parametrize(
    "raw",
    [
        '{"choices": [{"tok',
        "[]",
        "{}",
        '{"choices": []}',
        '{"choices": [3]}',
        '{"choices": [{"token_ids": 5}]}',
        '{"choices": [{"token_ids": ["x"]}]}',
        '{"choices": [{"token_ids": [9], "logprobs": 3}]}',
        "no HTTP at all",
    ],
)
def test_answer_of_another_shape_tells_nothing(exported, raw):
    """Python ends with 1 when it does not know what else to do, and 1 says that the defect is there."""
    code, output = tried(exported, decode={"62": {"tokens": [], "raw": raw}})
    assert (code, "cannot tell: " in output, "Traceback" in output) == (2, True, False), output


def test_engine_that_answers_strangers_is_not_asked(exported):
    code, output = tried(exported, decode={"open": True})
    assert (code, "expected the decode engine to refuse strangers" in output) == (2, True), output


def test_key_and_prompts_do_not_go_to_a_proxy(exported, monkeypatch):
    heard = []

    class Proxy(Quiet):
        def do_GET(self) -> None:
            heard.append(dict(self.headers))
            self.say(200, b"")

        do_POST = do_GET  # noqa: N815

    with serving(Proxy) as url:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        code, output = tried(exported)
    assert code == 0, output
    assert heard == []


def test_only_files_of_the_model_travel(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(load_profile("cpu").target_folder, folder)
    for name in ("client_secret.json", "token.txt", "notes.txt", "modeling_x.py"):
        (folder / name).write_text(SECRET)
    case = named("single-none")
    profile = case.profile.model_copy(update={"target": folder})
    file = tmp_path / "repro.py"
    write_case(case._replace(profile=profile), ENVIRONMENT, file)
    carried = {name for m in literal(file.read_text(), "CASE")["models"].values() for name in m["files"]}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= carried
    for packed in literal(file.read_text(), "FILES").values():
        assert SECRET.encode() not in zlib.decompress(base64.b85decode("".join(packed.split())))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": SECRET}))
    with pytest.raises(UsageError, match=r"looks like one in .*config\.json"):
        write_case(case._replace(profile=profile), ENVIRONMENT, tmp_path / "other.py")
    assert not (tmp_path / "other.py").exists()


HALF = Goal(0.5, "3 of 6 requests had it")


@pytest.mark.parametrize(
    ("wrong_at", "options", "code", "words"),
    [
        (None, (), 0, "quiet tries: 5; seen at a rate of 50 % (3 of 6 requests had it)"),
        (None, ("--tries", "2"), 2, "found 2, which exclude a rate above 77.6 %: use --tries 5"),
        (None, ("--tries", "6"), 0, "quiet tries: 6"),
        (3, (), 1, "try 3 of 5"),
        (3, ("--tries", "2"), 2, "use --tries 5"),
        (None, ("--tries", "0"), 2, "expected at least 1, found 0"),
    ],
)
def test_tries_until_the_rate_that_was_seen_is_excluded(tmp_path, wrong_at, options, code, words):
    """Exit codes mean what they mean for ``harness repro``."""
    file = tmp_path / "repro.py"
    write_case(named("pd-eagle3", goal=HALF), ENVIRONMENT, file)
    decode = {"62": right() | ({"wrong_at": wrong_at} if wrong_at else {}), "salted": True}
    found, output = tried(file, *options, prefill={"salted": True}, decode=decode)
    assert (found, words in output) == (code, True), output
    assert "try 4" not in output or wrong_at is None


def test_more_tries_than_60_are_made_only_when_asked_for(tmp_path):
    file = tmp_path / "repro.py"
    write_case(named("single-eagle3", goal=Goal(1 / 300, "1 of 300 requests had it")), ENVIRONMENT, file)
    code, output = run(rewritten(file, {"single": {**WARM, "62": right()}}))
    assert code == 2, output
    assert "found 60, which exclude a rate above 4.87 %: use --tries 898" in output


@pytest.mark.parametrize(("tries", "filled", "code"), [(3, {}, 0), (1, {"broken": True}, 0), (2, {"broken": True}, 2)])
def test_blocks_of_one_try_are_overwritten_before_the_next(exported, tries, filled, code):
    """With prompts of 12 blocks, the longest that a request may have."""
    decode = {"384": {"tokens": [1], **filled}, "blocks": 28, "salted": True}
    found, output = tried(exported, "--tries", str(tries), decode=decode)
    assert found == code, output


def test_near_tie_is_no_defect(exported):
    other = right()
    other["tokens"][5] += 1
    code, output = tried(exported, prefill={"62": {**right(), "gap": 0.01}}, decode={"62": {**other, "gap": 0.01}})
    assert code == 0, output
    assert "0.010 nats apart: no defect" in output


@pytest.mark.parametrize(("gap", "code"), [(2.0, 1), (0.01, 0)])
def test_token_of_p_must_be_the_first_one(exported, gap, code):
    found, output = tried(exported, prefill={"62": {"tokens": [9], "gap": gap}})
    assert (found, "the prefill engine's own token is 9, not" in output) == (code, bool(code)), output


def test_requests_that_a_file_cannot_send_are_refused():
    profile = load_profile("cpu")
    (cell,) = select_cells(profile, ["pd-none"])
    known = {p.id: p for p in load_prompts(profile.workload.prompts).prompts}
    for name in ("recovery", "abandoned", "features", "appended-token"):
        (scenario,) = (s for s in profile.scenarios if s.id == name)
        script = scripts(scenario, known, "pd")[0]
        with pytest.raises(UsageError, match=f"sent whole and answered, found {name}"):
            case_of("x", profile, cell, script, {"subject": Right((1,), None)})


def test_prefill_without_parameters_tells_nothing(exported):
    code, output = tried(exported, prefill={"62": right() | {"no_parameters": True}})
    assert (code, "found none" in output) == (2, True), output


def test_engine_that_does_not_start_tells_nothing_and_says_why(exported):
    code, output = tried(exported, prefill={"die": True})
    assert code == 2 and "expected the prefill engine to start" in output
    assert "RuntimeError: no such device" in output


def test_concurrent_requests_are_queued_and_released_together(tmp_path):
    file = tmp_path / "together.py"
    case = named("single-eagle3", scenario="concurrent")
    write_case(case, ENVIRONMENT, file)
    answers = {
        f"{len(s.prompt.ids)}:{s.prompt.ids[2]}": {"tokens": list(right.tokens), "accepted": list(right.accepted)}
        for stage in case.stages
        for s in stage.sends
        for right in [case.right[s.part]]
    }
    code, output = run(rewritten(file, {"single": {**WARM, **answers}}))
    assert code == 0, output
    assert {line.split(":")[0] for line in output.splitlines() if ": prompt of" in line} == set(case.right)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", "single:A=1"], "expected ROLE:NAME=VALUE with a role of decode, prefill"),
        (["--env", "decode:A"], "expected ROLE:NAME=VALUE"),
        (["--model", "nothing=/x"], "expected NAME=PATH with a name of target, tokenizer, drafter"),
    ],
)
def test_bad_arguments_are_refused_in_words(exported, arguments, words):
    code, output = run(exported, *arguments)
    assert (code, words in output) == (2, True), output


def test_damaged_model_in_the_file_is_refused(exported):
    text = exported.read_text()
    first, second = list(literal(text, "FILES"))[:2]
    line = '    "{}": """\n'.format
    swapped = text.replace(line(first), line("x")).replace(line(second), line(first)).replace(line("x"), line(second))
    for damaged in (swapped, text.replace(line(first), line("gone"))):
        exported.write_text(damaged)
        code, output = run(exported)
        assert (code, "found another: this file is damaged" in output) == (2, True), output


def test_large_models_are_named_and_not_carried(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.commands.export.case.EMBEDDED_BYTES", 1000)
    file = tmp_path / "repro.py"
    write_case(named("pd-eagle3"), ENVIRONMENT, file)
    assert literal(file.read_text(), "FILES") == {}
    code, output = run(file)
    assert code == 2 and "expected --model target=PATH: target is not part of this file" in output


def test_cells_behind_a_router_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"found pd-eagle3-router.*--cell pd-eagle3 --prompt copy-062-10$"):
        write_case(named("pd-eagle3-router"), ENVIRONMENT, tmp_path / "x.py")


def test_title_that_looks_like_a_part_of_the_file_stays_a_title(tmp_path):
    file = tmp_path / "repro.py"
    title = "FILES: dict[str, str] = {}\n''' GUARD: str = \"\"\nSTAGES: list[dict[str, Any]] = []"
    write_case(named("pd-eagle3")._replace(title=title), ENVIRONMENT, file)
    text = file.read_text()
    assert literal(text, "CASE")["title"] == title
    assert literal(text, "FILES") and literal(text, "STAGES") and "KeyGuard" in literal(text, "GUARD")


def test_prompt_without_a_right_answer_is_refused():
    profile = load_profile("cpu")
    (cell,) = select_cells(profile, ["single-none"])
    prompt = load_prompts(profile.workload.prompts).prompts[0]
    with pytest.raises(UsageError, match="expected a right answer to compare with, found none"):
        case_of("x", profile, cell, cold_script(prompt), {})
    known = case_of("x", profile, cell, cold_script(prompt), {"subject": Right((1,), None)})
    assert known.right["subject"].tokens == (1,)


def test_commands_are_those_of_the_cell():
    commands = engine_commands(named("pd-dflash"), ENVIRONMENT)
    assert set(commands) == {"decode", "prefill"}
    for argv in commands.values():
        assert argv[argv.index("--port") + 1] == "$port"
        assert json.loads(argv[argv.index("--speculative-config") + 1])["model"] == "$drafter"
        assert json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_connector"] == "NixlConnector"


def test_issue_names_environment_command_and_tokens():
    smallest = Smallest("fails if and only if N mod 32 = 0", (7, 8, 9))
    text = issue_text(named("pd-eagle3"), ENVIRONMENT, "repro.py", None, None, smallest)
    assert "and gave:\n\n```\n7 8 9\n```" in text and "python repro.py" in text
    assert "vLLM 0.32.0" in text and "fails if and only if N mod 32 = 0" in text
    assert "Armed" not in text
    armed = issue_text(named("pd-eagle3")._replace(mutants=("M1",)), ENVIRONMENT, "repro.py", None, None)
    assert "**Injected faults: M1. The defect is deliberate; not for upstream.**" in armed
    assert not re.search(r"/(tmp|work|home|root)/", text)
    assert str(REPOSITORY) not in text
