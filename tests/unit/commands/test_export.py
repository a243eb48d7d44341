"""What is in an exported program, its archive and the text of an issue, and what is not exported."""

from __future__ import annotations

import json
import py_compile
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.commands.export import archive_of
from harness.commands.export.case import Right, case_of, cold_script, injected, server_commands, write_case
from harness.commands.export.finding import DefectSeen, Smallest, case_from, export, headline, issue_text, report_of
from harness.commands.repro import Goal, from_run
from harness.engines.client import REMOTE_DECODE
from harness.engines.flags import NO_FLAGS
from harness.errors import UsageError
from harness.judging.figures import KVDifference, KVOfLayers, KVPlace, StepsDifference
from harness.profiles.cells import select_cells
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.util.paths import REPOSITORY
from harness.workload.scripts import scripts
from tests.support.builders import finding
from tests.support.engines import ENVIRONMENT
from tests.support.exported import named, written

SECRET = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
RECORDED = REPOSITORY / "tests" / "golden" / "attacked"
KNOWN = "pd-eagle3/sampled/tokens-reference/copy-064-12#2.subject/ids"
CASES = [("pd-eagle3", "cold"), ("single-none", "cold"), ("pd-mtp", "pressure"), ("pd-eagle3", "concurrent"),
         ("pd-none", "late-pull"), ("single-dflash", "prefix-hit"), ("pd-eagle3", "sampled")]  # fmt: skip


@pytest.mark.parametrize(("cell", "scenario"), CASES)
def test_program_is_short_plain_python_of_no_machine(cell, scenario, tmp_path):
    file = written(named(cell, scenario=scenario), tmp_path)
    text = file.read_text()
    assert len(text.splitlines()) <= 220 and text.count("# [") == 0
    py_compile.compile(str(file), cfile=str(tmp_path / "x.pyc"), doraise=True)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,B", str(file)]
    assert subprocess.run(ruff, capture_output=True, text=True).stdout.startswith("All checks passed")
    assert str(REPOSITORY) not in text and "/somewhere" not in text and "harness" not in text
    for name in zipfile.ZipFile(archive_of(file)).namelist():
        assert name.startswith("repro-models/")


def test_finding_of_a_recorded_run_is_200_lines_and_an_issue_that_names_its_report(tmp_path, monkeypatch):
    prepared, target, _ = from_run(RECORDED, KNOWN, False, NO_FLAGS)
    file = tmp_path / "repro.py"
    monkeypatch.setattr("harness.commands.export.finding.engines_for", lambda *_: ENVIRONMENT)
    said = export(lambda env: case_from(prepared, target, env), prepared, (RECORDED, KNOWN), file, True, None)
    lines, issue = file.read_text().splitlines(), file.with_suffix(".md").read_text()
    reported = "already reported: https://github.com/vllm-project/vllm/issues/55005"
    title = "EAGLE3: wrong tokens after a P/D hand-off of a prompt of 64 tokens, at temperature 0.2"
    assert len(lines) <= 200 and lines[0] == f'"""{title}'
    assert issue.startswith(f"{reported}\n\n# {title}\n") and lines[1:3] == [reported, ""] and said == reported
    # What it says of other requests of the run names none of them.
    assert (
        re.search(r"\d of \d requests?: wrong KV of the target\.", issue)
        and "a single server without speculation has" in issue
        and "copy-0" not in issue
    )
    assert "trained to do one thing" in issue and "output token j is prompt token j + 2" in issue
    for command in server_commands(case_from(prepared, target, ENVIRONMENT), ENVIRONMENT, file)[1].values():
        assert command in issue and command in file.read_text()
        words = shlex.split(command.replace("\\\n", " "))
        at = words.index("vllm")
        assert words[at : at + 3] == ["vllm", "serve", "repro-models/target"] and all("=" in w for w in words[: at - 3])
        assert json.loads(words[words.index("--speculative-config") + 1])["model"] == "repro-models/drafter"


def test_a_long_path_of_the_checkout_makes_no_line_more(tmp_path):
    """As of the injected M4: tried often, in the program, and with the longest words on what was seen."""
    case = named("pd-eagle3", goal=Goal(0.5, "3 of 6 requests had it"))
    case = case._replace(mutants=("M4",), by_logprobs=False, reported="already reported: https://example.org/1")
    models = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 7, "it's models")
    models.parent.mkdir(parents=True)
    models.symlink_to(REPOSITORY / "models")
    (tmp_path / "near").mkdir()
    (tmp_path / "far").mkdir()

    def moved(folder: Path) -> Path:
        return models / folder.relative_to(REPOSITORY / "models")

    profile, method = case.profile, case.cell.method
    far = case._replace(
        profile=profile.model_copy(
            update={"target": moved(profile.target_folder), "tokenizer": moved(profile.tokenizer_folder)}
        ),
        cell=case.cell._replace(method=method.model_copy(update={"drafter": moved(method.drafter_path)})),
    )
    lines = written(far, tmp_path / "far").read_text().splitlines()
    assert lines == written(case, tmp_path / "near").read_text().splitlines() and len(lines) <= 195


def test_log_probs_are_left_out_where_answers_show_it():
    kv = finding("pd-eagle3").model_copy(update={"check": "kv-computed", "evidence": KV})
    steps = StepsDifference(
        step=1, positions=(0,), common_steps=2, found=(0,), expected=(3,), found_mean=0.0, expected_mean=3.0,
        found_rates=(0.0,), expected_rates=(1.0,), padded_first_step=False, raw=(0, 0),
    )  # fmt: skip
    last = steps.model_copy(update={"last_alone": True})
    shown = {beside: finding("pd-eagle3").model_copy(update={"evidence": beside}) for beside in (steps, last)}
    assert [DefectSeen(kv, beside=(f,)).in_answers for f in shown.values()] == [True, False]
    assert not DefectSeen(kv).in_answers and DefectSeen(shown[steps]).in_answers


def test_blocks_are_kept_as_the_harness_asks_for_it(tmp_path):
    text = written(named("pd-none"), tmp_path).read_text()
    keep = [line for line in text.splitlines() if line.startswith("KEEP")]
    found: dict = {}
    exec("\n".join(keep), found)
    assert found["KEEP"] == REMOTE_DECODE


def test_injected_fault_is_said(tmp_path):
    words = "that says nothing: the defect is M4, which the harness injected, and the file does not have"
    assert injected(("M4",)) in words
    assert words in written(named("single-none")._replace(mutants=("M4",)), tmp_path).read_text().replace("\n    ", " ")


def test_only_files_of_the_model_travel(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(load_profile("cpu").target_folder, folder)
    for name in ("client_secret.json", "token.txt", "notes.txt", "modeling_x.py"):
        (folder / name).write_text(SECRET)
    case = named("single-none")
    case = case._replace(profile=case.profile.model_copy(update={"target": folder}))
    archive = zipfile.ZipFile(archive_of(written(case, tmp_path)))
    names = archive.namelist()
    assert {f"repro-models/target/{n}" for n in ("config.json", "model.safetensors")} <= set(names)
    assert "repro-models/tokenizer/tokenizer.json" in names
    assert all(SECRET.encode() not in archive.read(name) for name in names)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": SECRET}))
    with pytest.raises(UsageError, match=r"config\.json has what looks like a secret"):
        write_case(case, ENVIRONMENT, tmp_path / "other.py")
    assert not (tmp_path / "other.py").exists()


def test_requests_that_a_program_cannot_send_are_refused():
    profile = load_profile("cpu")
    (cell,) = select_cells(profile, ["pd-none"])
    known = {p.id: p for p in load_prompts(profile.workload.prompts).prompts}
    for name in ("recovery", "abandoned", "features", "appended-token"):
        (scenario,) = (s for s in profile.scenarios if s.id == name)
        script = scripts(scenario, known, "pd")[0]
        with pytest.raises(UsageError, match=f"{name} gives requests up"):
            case_of("x", profile, cell, script, {"subject": Right((1,), None)})


def test_models_in_place_are_named_from_the_folder_of_the_program(tmp_path):
    folder = REPOSITORY / "found"
    case = named("pd-mtp3", profile="cpu-mtp3")._replace(in_place=True)
    variables, commands = server_commands(case, ENVIRONMENT, folder / "show.py")
    assert " ../models/probe/target " in commands["decode"] and "../models/probe/mtp3" in commands["decode"]
    assert "PYTHONPATH=../harness/engines/interpreter" in variables
    file = tmp_path / "case.py"
    write_case(case, ENVIRONMENT, file)
    assert not archive_of(file).exists() and "zipfile" not in file.read_text()
    found: dict = {}
    exec(re.search(r"^CASE = .*?\n\n", file.read_text(), re.MULTILINE | re.DOTALL)[0], found)
    assert all((tmp_path / place).is_dir() for place in found["CASE"]["models"])
    issue = issue_text(case, ENVIRONMENT, file, DefectSeen(), {})
    assert "`case.py` needs the models in the folders below, vLLM" in issue and "zip" not in issue


@pytest.mark.parametrize(
    ("cell", "profile", "compared"),
    [("pd-eagle3", "cpu", True), ("pd-mtp3", "cpu-mtp3", False), ("pd-none", "cpu-hybrid", False)],
)
def test_own_token_of_p_is_compared_where_it_has_the_whole_prompt(cell, profile, compared, tmp_path):
    text = written(named(cell, profile=profile), tmp_path).read_text()
    assert ("the prefill server's own token" in text) == compared


def test_cells_behind_a_router_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"pd-eagle3-router has a router.*--cell pd-eagle3 --prompt copy-062-10$"):
        write_case(named("pd-eagle3-router"), ENVIRONMENT, tmp_path / "x.py")


def test_title_that_looks_like_code_stays_a_title(tmp_path):
    title = 'CASE: dict[str, Any] = {}\n""" STAGES \\ # [end]\nSTAGES: list[dict[str, Any]] = []'
    file = written(named("pd-eagle3")._replace(title=title), tmp_path)
    py_compile.compile(str(file), cfile=str(tmp_path / "x.pyc"), doraise=True)
    assert "\nSTAGES = [{" in file.read_text() and "\nCASE = {'model'" in file.read_text()


def test_prompt_without_a_right_answer_is_refused():
    profile = load_profile("cpu")
    (cell,) = select_cells(profile, ["single-none"])
    prompt = load_prompts(profile.workload.prompts).prompts[0]
    with pytest.raises(UsageError, match="the right answer to this prompt is not known"):
        case_of("x", profile, cell, cold_script(prompt), {})


@pytest.mark.parametrize(
    ("cell", "law", "title"),
    [
        ("pd-eagle3", "fails if N mod 32 = 30", "EAGLE3: wrong tokens after a P/D hand-off of a prompt that ends "
         "2 tokens before a block boundary"),
        ("single-none", "", "vLLM: wrong tokens on a single server for a prompt of 62 tokens"),
    ],
)  # fmt: skip
def test_title_says_what_a_user_sees(cell, law, title):
    assert headline(named(cell), DefectSeen(smallest=Smallest(law, (9,)))) == title


@pytest.mark.parametrize(
    ("known", "first"),
    [
        ("reference-used-late", "already reported: https://example.org/1"),
        ("lost-source", "known (lost-source), and reported by nobody yet; the nearest thread: https://example.org/1"),
        ("of-another-list", "already reported: https://example.org/1"),
    ],
)
def test_an_issue_says_whether_its_defect_is_reported(tmp_path, known, first):
    found = finding("pd-eagle3").model_copy(update={"known": known, "link": "https://example.org/1"})
    case = named("pd-eagle3")
    case = case._replace(reported=report_of(case, found))
    text = issue_text(case, ENVIRONMENT, tmp_path / "repro.py", DefectSeen(finding=found), {})
    assert text.splitlines()[0] == first and first in written(case, tmp_path).read_text().splitlines()


KV = KVDifference(
    role="decode",
    places=(KVPlace(layer="layer.1", kind="keys", heads=(0,), first_token=0, zeros=False, found_at=None),),
    differing=1,
    tokens=(40,),
    prompt_tokens=65,
    by_layer=(KVOfLayers(layers=("layer.1",), keys=(1,), values=(), zeros=False),),
)


def test_what_only_the_kv_itself_shows_is_not_exported(tmp_path, monkeypatch):
    """A program sees answers alone, so it would say that the defect does not show."""
    prepared, target, _ = from_run(RECORDED, KNOWN, False, NO_FLAGS)
    seen = DefectSeen(finding("pd-eagle3").model_copy(update={"check": "kv-computed", "evidence": KV}))
    monkeypatch.setattr("harness.commands.export.finding.engines_for", lambda *_: ENVIRONMENT)
    monkeypatch.setattr("harness.commands.export.finding._looked_up", lambda *_: seen)
    with pytest.raises(UsageError, match="about KV alone: the answer is right"):
        export(lambda env: case_from(prepared, target, env), prepared, (RECORDED, KNOWN), tmp_path / "x.py", True, None)
    assert not list(tmp_path.iterdir())
    assert not seen._replace(beside=(finding("pd-eagle3"),)).only_in_kv


def test_an_issue_about_something_else_says_that_tokens_are_right(tmp_path):
    other = finding("pd-eagle3", check="prefill-token")
    for beside, words in (((), "gives the right tokens:"), ((finding("pd-eagle3"),), "must give:")):
        seen = DefectSeen(other, beside=beside)
        assert words in issue_text(named("pd-eagle3"), ENVIRONMENT, tmp_path / "repro.py", seen, {})


def test_issue_names_environment_command_and_tokens(tmp_path):
    case, seen = named("pd-eagle3"), DefectSeen(smallest=Smallest("fails if and only if N mod 32 = 0", (7, 8, 9)))
    text = issue_text(case, ENVIRONMENT, tmp_path / "repro.py", seen, {"processor": "a_b", "cores": 2})
    assert "and gave:\n\n```\n7 8 9\n```" in text and "python repro.py" in text and "`repro-models.zip`" in text
    assert "vLLM 0.32.0" in text and "fails if and only if N mod 32 = 0" in text and "already reported" not in text
    assert str(tmp_path) not in text and str(REPOSITORY) not in text
    armed = issue_text(case._replace(mutants=("M1",)), ENVIRONMENT, tmp_path / "repro.py", seen, {})
    assert "**Injected faults: M1. The defect is deliberate; not for upstream.**" in armed
