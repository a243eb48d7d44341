"""Prompt sets, baselines, histories and profiles as files: round trips, and every kind of damage has its sentence."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from harness.errors import DataError, NotARunError, ProfileError, UsageError
from harness.history.folder import load_history
from harness.history.index import LONGEST_LINE
from harness.history.layout import SECOND
from harness.profiles.cells import Cell, make_plan, select_cells
from harness.profiles.load import load_profile
from harness.prompts import probe_task
from harness.prompts.model import Layout, build_probe_prompts, load_prompts, write_prompts
from harness.prompts.probe_task import WEIGHTS
from harness.reports.judge_run import judge_and_report
from harness.util.files import ends_of, write_atomic
from harness.util.paths import REPOSITORY
from harness.workload.cells import cell_work
from harness.workload.prepare import prepare
from tests.support.builders import changed_profile, history, observation, recorded
from tests.support.reseal import reseal
from tests.support.run_files import answers

PROMPTS = REPOSITORY / "prompts" / "probe.jsonl"


# --- prompts --------------------------------------------------------------------------------------------------------


def test_shipped_prompts_hit_every_stratum_for_every_method():
    prompts = load_prompts(PROMPTS)
    assert len(prompts.prompts) >= 40
    for lookahead in (3, 4):
        found = {(p.stratum_for(32, lookahead), p.tokens // 32) for p in prompts.prompts}
        for count in range(1, 5):
            assert {("aligned", count), ("lookahead", count), ("first", count), ("middle", count)} <= found
        assert any(s == "sub-block" for s, _ in found)
    assert {p.tokens % 32 for p in prompts.prompts} >= {0, 29, 30, 31, 1}
    assert max(p.tokens for p in prompts.prompts) >= 160


def test_shipped_prompts_are_what_the_recipe_renders():
    assert build_probe_prompts(WEIGHTS / "tokenizer", Layout()) == load_prompts(PROMPTS)


def test_set_with_prompts_for_a_second_stage(tmp_path):
    built = build_probe_prompts(WEIGHTS / "tokenizer", Layout(per_length=2, held_out=True))
    assert {p.ids for p in built.held_out}.isdisjoint(p.ids for p in built.cold)
    assert [p.tokens for p in built.held_out] == [p.tokens for p in built.cold]
    assert len(built.cold) == 2 * len(load_prompts(PROMPTS).cold)
    write_prompts(built, tmp_path / "twice.jsonl")
    assert load_prompts(tmp_path / "twice.jsonl") == built


def test_every_output_token_has_one_source_position():
    prompts = load_prompts(PROMPTS).prompts
    ending = prompts[0].ids[-2:]
    # But of next turns that go on otherwise than the answer before, to which only the plain engine knows one.
    asked = [p for p in prompts if not p.id.startswith("next-")]
    for prompt in asked:
        assert prompt.expected is not None
        words = prompt.expected[:-1]
        assert len(set(words)) == len(words)
        end = next(i for i in range(1, prompt.tokens) if prompt.ids[i - 1 : i + 1] == ending) + 1
        source = probe_task.FIRST_SOURCE_POSITION + prompt.tokens - end
        assert prompt.ids[source : end - 2] == words


def edit(path: Path, change) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda ls: ls.clear(), "empty file"),
        (lambda ls: ls.__delitem__(slice(1, None)), "expected prompts"),
        (lambda ls: ls.pop(5), "changed, lost or reordered"),
        (lambda ls: ls.insert(3, dict(ls[3])), "an id stands there twice"),
        (lambda ls: ls[2]["ids"].append(7), "token ids, found"),
        (lambda ls: ls[2]["ids"].__setitem__(3, 99), "hash does not match"),
        (lambda ls: ls[2].update(stratum="middle"), "expected stratum"),
        (lambda ls: ls[2].update(surprise=1), "unknown key"),
        (lambda ls: ls[0].update(format="other/9"), "expected format"),
        (lambda ls: ls[0].pop("seed"), "seed"),
    ],
)
def test_damaged_prompts_are_refused(tmp_path, damage, sentence):
    path = tmp_path / "p.jsonl"
    write_prompts(load_prompts(PROMPTS), path)
    edit(path, damage)
    with pytest.raises(DataError, match=sentence):
        load_prompts(path)


@pytest.mark.parametrize("text", ["{", "[1]\n", "\xff\xfe", "[" * 100000])
def test_text_that_is_no_prompt_set_is_refused(tmp_path, text):
    path = tmp_path / "p.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="prompt set"):
        load_prompts(path)


def test_other_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="rendered with a different tokenizer"):
        load_prompts(PROMPTS).check_tokenizer(tmp_path, PROMPTS)
    with pytest.raises(DataError, match="needs it; restore it"):
        load_prompts(PROMPTS).check_tokenizer(tmp_path / "moved", PROMPTS)


def test_workload_sends_text_of_every_stratum():
    profile = load_profile("cpu")
    items = cell_work(profile, load_prompts(PROMPTS), Cell("pd", profile.methods[1])).items
    text = [i.prompt for i in items if i.form == "text"]
    assert len(text) == 6
    assert len({p.id for p in text}) == 6
    assert len({p.stratum for p in text}) == 5
    assert len(items) == len(load_prompts(PROMPTS).cold) + 6


# --- history --------------------------------------------------------------------------------------------------------


def test_history_round_trip(tmp_path):
    h = recorded(tmp_path).model_copy(update={"own": False})
    assert load_history(tmp_path).model_copy(update={"sha256": None}) == h


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"schema_version": 6}'])
def test_damaged_run_file_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DataError):
        load_history(tmp_path)


def test_damaged_observation_names_the_line(tmp_path):
    recorded(tmp_path)
    path = answers(tmp_path, "pd-eagle3")
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"form":"ids"', '"form":"morse"')
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"jsonl: .*changed or damaged .3 lines"):
        load_history(tmp_path)
    reseal(tmp_path, lambda r: r.update(finished=None))
    with pytest.raises(DataError, match="line 2"):
        load_history(tmp_path)


def test_other_folders_are_no_runs(tmp_path):
    with pytest.raises(NotARunError, match="a folder without it"):
        load_history(tmp_path)
    with pytest.raises(NotARunError, match="found a file"):
        load_history(Path(__file__))
    with pytest.raises(NotARunError, match="no such folder"):
        load_history(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(DataError, match="expected an object, found an empty list"):
        load_history(tmp_path)


# --- profiles and plans ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.update(colour="red"), "colour: unknown key"),
        (lambda r: r["engine"].update(blok_size=3), "blok_size: unknown key"),
        (lambda r: r["methods"].append({"kind": "medusa"}), "medusa"),
        (lambda r: r["methods"].append({"kind": "none"}), "expected each name once"),
        (lambda r: r["methods"].clear(), "methods"),
        (lambda r: r.update(topologies=["ring"]), "topologies"),
        (lambda r: r.update(target="/nowhere/model"), "/nowhere/model"),
        (lambda r: r["methods"][1].update(drafter="/nowhere/drafter"), "/nowhere/drafter"),
        (lambda r: r["workload"].update(prompts="/nowhere/p.jsonl"), "/nowhere/p.jsonl"),
        (lambda r: r["methods"][1].update(num_speculative_tokens=0), "num_speculative_tokens"),
        (lambda r: r["engine"].update(block_size=16) or r["methods"][1].update(num_speculative_tokens=16), "lookahead"),
        (lambda r: r.update(format=2), "format"),
        (lambda r: r.update(name="../../etc"), "name"),
    ],
)
def test_bad_profiles_are_refused_in_words(tmp_path, change, sentence):
    with pytest.raises(ProfileError, match=sentence):
        load_profile(changed_profile(tmp_path, change))


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "!!python/object/apply:os.system ['true']", ""])
def test_text_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError):
        load_profile(str(path))


def test_unknown_profile_names_the_shipped_ones():
    with pytest.raises(ProfileError, match="shipped profiles: cpu, "):
        load_profile("mine")


def test_plan_shares_engines_and_starts_none_twice():
    prepared = prepare("cpu", [])
    assert len(prepared.plan.cells) == 12 and prepared.plan.engines == 8
    assert [g.id for g in prepared.plan.groups] == ["pd-eagle3", "pd-dflash", "pd-mtp", "pd-none"]
    alone = make_plan(prepared.profile.model_copy(update={"share_engines": False}), prepared.plan.cells)
    assert alone.engines == 12


def test_cell_patterns():
    profile = load_profile("cpu")
    assert [c.id for c in select_cells(profile, ["pd-eagle3"])] == ["pd-eagle3"]
    assert len(select_cells(profile, ["single-*", "*-mtp"])) == 5
    with pytest.raises(UsageError, match="pd-medusa"):
        select_cells(profile, ["pd-*", "pd-medusa"])


def test_outputs_must_fit_the_model_length(tmp_path):
    path = changed_profile(tmp_path, lambda r: r["engine"].update(max_model_len=256))
    with pytest.raises(UsageError, match="max_model_len"):
        prepare(path, [])


def test_ends_of_a_file_are_read_and_nothing_that_is_waited_for(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(b"first\n" + b"x" * 5000 + b"\nlast \xff\n")
    assert ends_of(log, 10_000) == "first\n" + "x" * 5000 + "\nlast \ufffd\n"
    assert ends_of(log, 20).startswith("first\nxx") and ends_of(log, 20).endswith("x\nlast \ufffd\n")
    assert len(ends_of(log, 20)) < 60
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(log)
    for other in ("pipe", "link", "."):
        with pytest.raises(OSError):
            ends_of(tmp_path / other, 20)


def test_logs_that_cannot_be_read_cost_no_verdict(tmp_path, monkeypatch):
    h = history([observation("pd-none", 40, error="broke")], folder=tmp_path)
    (tmp_path / "logs" / "pd-none.prefill.log").mkdir(parents=True)
    os.mkfifo(tmp_path / "logs" / "pd-none.decode.log")
    summary = judge_and_report(h)
    assert not summary.unwritten
    assert (tmp_path / "report.html").read_text().count("it is not a regular file") == 2
    monkeypatch.setattr("harness.reports.judge_run.write_reports", lambda *_: 1 / 0)
    broken = judge_and_report(h)
    assert broken.verdict is summary.verdict and "ZeroDivisionError" in broken.unwritten
    assert broken.exit_code == 2
    assert "Traceback" in (tmp_path / "report-error.txt").read_text()


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ('"sequence":0', '"sequence":"0"'),
        ('"sequence":0', '"sequence":0.0'),
        ('"sequence":0', '"sequence":false'),
        ('"form":"ids"', '"form":"text","form":"ids"'),
    ],
)
def test_lines_are_read_as_they_are_written(tmp_path, written, changed):
    recorded(tmp_path)
    path = answers(tmp_path, "pd-eagle3")
    text = path.read_text()
    assert written in text
    path.write_text(text.replace(written, changed, 1))
    reseal(tmp_path, lambda r: r.update(finished=None))
    with pytest.raises(DataError, match="line 1: expected an observation, found damaged data"):
        load_history(tmp_path)


def test_hole_at_the_end_of_a_file_is_no_line_that_fills_the_memory(tmp_path):
    made = recorded(tmp_path)
    reseal(tmp_path, lambda r: r.update(finished=None))
    with answers(tmp_path, "pd-eagle3").open("r+b") as stream:
        stream.truncate(stream.seek(0, os.SEEK_END) + 3 * LONGEST_LINE)
    tracemalloc.start()
    loaded = load_history(tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loaded.observations == made.observations and loaded.torn_line
    assert most < 2.5 * LONGEST_LINE


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_who_may_read_a_file_is_up_to_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "run.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == mode


def test_second_stage_of_another_run_is_named(tmp_path):
    recorded(tmp_path)
    assert not [n for n in judge_and_report(load_history(tmp_path)).judgement.notices if SECOND in n]
    recorded(tmp_path / SECOND)
    (notice,) = [n for n in judge_and_report(load_history(tmp_path)).judgement.notices if SECOND in n]
    assert "second-stage is not used: it is no finished stage of this run" in notice
