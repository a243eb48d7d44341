"""A run that was killed goes on with what is missing; everything that was recorded before stays, and counts once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import harness.commands.resume
import harness.engines.environment
import harness.judging.references
import harness.reports.judge_run
import harness.runner.groups
import harness.runner.record_cells
import harness.runner.recorder
import harness.runner.run
from harness.baselines.build import references_in
from harness.cli.app import app
from harness.commands.resume import prepare_resume, resume
from harness.commands.run import execute
from harness.errors import DataError, UsageError
from harness.history.checksum import seal_of
from harness.history.folder import History, load_history, write_run
from harness.history.identity import identity_in
from harness.history.layout import SECOND
from harness.history.records import COLD, RESCORE, Observation
from harness.history.verdict import Verdict
from harness.reports.judge_run import Outcome, assess, check
from harness.util.progress import Reporter
from harness.util.storage import LOCK, FolderLock
from harness.workload.prepare import prepare
from tests.support.builders import change_final, garbled, history, observation
from tests.support.engines import ENVIRONMENT
from tests.support.fake_answers import perform, score
from tests.support.fake_session import FakeSession, stand_in
from tests.support.reseal import reseal
from tests.support.run_files import all_lines, answers, scores

pytestmark = pytest.mark.computes

CELLS = ["single-none", "single-eagle3"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it is done."""


class Engines:
    """Fake engines of a run: what they were asked, when they are killed, and what they say wrong."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.kill_after: int | None = None
        """Answers to a cell."""
        self.in_cell = ""
        self.kill_rescoring = False
        self.wrong_in = ""

    def run_cell(self, _session: object, work, recorder, _reporter) -> None:
        if not work.requests:
            return
        self.asked.append(work.cell.id)
        count = 0

        def change(o: Observation) -> Observation:
            nonlocal count
            count += 1
            if self.in_cell == work.cell.id and count == self.kill_after:
                raise Killed
            return garbled(o, at=0) if o.cell == self.wrong_in and o.sequence == 2 else o

        perform(recorder, work, change)

    def rescore(self, _session: object, recorder, _reporter) -> None:
        if self.kill_rescoring:
            raise Killed
        score(recorder)


@pytest.fixture
def engines(monkeypatch) -> Engines:
    made = Engines()
    FakeSession.reset()
    FakeSession.ready_seconds = 1.0
    stand_in(monkeypatch)
    # One after the other, so that it is known what was asked before a run is killed.
    monkeypatch.setattr(harness.runner.groups, "all_at_once", lambda jobs, _devices: jobs)
    monkeypatch.setattr(harness.runner.record_cells, "run_cell", made.run_cell)
    monkeypatch.setattr(harness.runner.record_cells, "rescore", made.rescore)
    for place in (harness.runner.run, harness.commands.resume):
        monkeypatch.setattr(place, "engines_for", lambda *_: ENVIRONMENT)
    monkeypatch.setattr(harness.runner.groups.Runner, "_failed", _never)
    # How reports look is tested elsewhere, and costs a second each.
    monkeypatch.setattr(harness.reports.judge_run, "write_reports", lambda *_: None)
    return made


def _never(_self: object, group: object, reason: str) -> None:
    raise AssertionError(reason)


def start(out: Path, cells: list[str] | None = None) -> Outcome:
    with Reporter(0) as reporter:
        return execute(prepare("cpu", cells or CELLS, [COLD]), out, reporter)


def killed(out: Path, engines: Engines, cell: str = "single-none", after: int = 5, wrong_in: str = "") -> Path:
    engines.kill_after, engines.in_cell, engines.wrong_in = after, cell, wrong_in
    with pytest.raises(Killed):
        start(out)
    engines.kill_after, engines.wrong_in = None, ""
    engines.asked.clear()
    return next(p for p in out.iterdir() if p.is_dir() and not p.is_symlink())


@pytest.fixture
def folder(tmp_path: Path, engines: Engines) -> Path:
    """A run that was killed."""
    return killed(tmp_path, engines)


def go_on(folder: Path) -> Outcome:
    with Reporter(0) as reporter:
        return resume(prepare_resume(folder), reporter)


def test_run_of_the_fake_engines_passes(tmp_path, engines):
    outcome = start(tmp_path)
    assert outcome.summary.verdict is Verdict.PASS, outcome.summary.judgement.findings[:2]
    assert outcome.summary.written == outcome.folder
    carried = {p.name for p in (outcome.folder / "references").rglob("*.*")}
    assert {"none.json", "none.csv", "eagle3.json", "eagle3.csv", "known-defects.yaml"} <= carried


def test_killed_run_goes_on_and_passes(folder, engines):
    assert check(folder).summary.verdict is Verdict.UNKNOWN
    before = all_lines(folder)
    outcome = go_on(folder)
    assert engines.asked == ["single-none"]
    assert outcome.folder == folder
    assert outcome.summary.verdict is Verdict.PASS, outcome.summary.judgement.findings[:2]
    assert check(folder).summary.verdict is Verdict.PASS
    kept = load_history(folder)
    (entry,) = kept.run.resumed
    assert entry.cells == ("single-none",)
    assert (entry.set_aside, entry.files) == (4, ("superseded-1",))
    assert entry.hardware == kept.run.hardware
    assert any("4 earlier answers were set aside" in n for n in outcome.summary.judgement.notices)
    # Nothing that was recorded is lost, and each request counts once.
    assert set(before) <= {*all_lines(folder), *all_lines(folder / entry.files[0])}
    counted = Counter((o.cell, o.form, o.scenario, o.key) for o in kept.observations)
    assert max(counted.values()) == 1
    assert sum(o.scenario == RESCORE for o in kept.observations) > 0


def test_answers_that_were_set_aside_are_judged_whatever_the_record_says(folder, engines):
    outcome = go_on(folder)
    kept = next((folder / "superseded-1").rglob("observations.jsonl"))
    lines = kept.read_text().splitlines()
    wrong = json.loads(lines[0])
    wrong["legs"][-1]["output_ids"][0] += 1
    kept.write_text("\n".join([json.dumps(wrong), *lines[1:]]) + "\n")
    again = check(folder).summary
    assert outcome.summary.verdict is Verdict.PASS and again.verdict is Verdict.UNKNOWN
    assert "answers that were set aside when the run was resumed have" in again.judgement.notices[0]
    kept.write_text("\n".join(lines[1:]) + "\n")
    fewer = check(folder).summary
    assert (
        fewer.verdict is Verdict.UNKNOWN and "expected the 4 answers that were set aside" in fewer.judgement.notices[0]
    )


@pytest.mark.parametrize(("cell", "after"), [("single-none", 1), ("single-eagle3", 1), ("single-eagle3", 40)])
def test_killed_at_any_request_of_either_cell(tmp_path, engines, cell, after):
    folder = killed(tmp_path, engines, cell, after)
    answers(folder, cell).parent.mkdir(parents=True, exist_ok=True)
    with answers(folder, cell).open("a") as stream:
        stream.write('{"cell":"single-')
    assert assess(load_history(folder)).verdict is Verdict.UNKNOWN
    assert go_on(folder).summary.verdict is Verdict.PASS
    assert (folder / "superseded-1" / cell / "observations.jsonl").read_text().endswith('{"cell":"single-')


def test_killed_while_rescoring_asks_no_cell_again(tmp_path, engines):
    engines.kill_rescoring = True
    folder = killed(tmp_path, engines, "no cell")
    engines.kill_rescoring = False
    assert {c.state for c in load_history(folder).run.cells} == {"complete"}
    outcome = go_on(folder)
    assert engines.asked == []
    assert outcome.summary.verdict is Verdict.PASS, outcome.summary.judgement.findings[:2]


def test_killed_again_while_it_went_on(tmp_path, engines):
    folder = killed(tmp_path, engines, "single-eagle3", 9)
    engines.kill_after, engines.in_cell = 20, "single-none"
    with pytest.raises(Killed):
        go_on(folder)
    engines.kill_after = None
    engines.asked.clear()
    assert go_on(folder).summary.verdict is Verdict.PASS
    assert engines.asked == ["single-none"]
    assert [r.set_aside for r in load_history(folder).run.resumed] == [8, 19]


def test_regression_of_a_complete_cell_stays(tmp_path, engines):
    folder = killed(tmp_path, engines, wrong_in="single-eagle3")
    outcome = go_on(folder)
    assert engines.asked == ["single-none"]
    assert outcome.summary.verdict is Verdict.REGRESSION


def test_regression_in_what_is_set_aside_is_no_second_chance(tmp_path, engines):
    folder = killed(tmp_path, engines, "single-eagle3", 10, wrong_in="single-eagle3")
    outcome = go_on(folder)
    assert outcome.summary.verdict is Verdict.UNKNOWN
    (notice,) = (n for n in outcome.summary.judgement.notices if n.startswith("resumed"))
    assert "9 earlier answers were set aside" in notice
    assert "single-eagle3 tokens-baseline REGRESSION" in notice and "cannot pass" in notice
    assert check(folder).summary.verdict is Verdict.UNKNOWN


def test_regression_is_found_where_judging_a_foreign_run_would_read_no_baselines(tmp_path, engines, monkeypatch):
    folder = killed(tmp_path, engines, "single-eagle3", 10, wrong_in="single-eagle3")
    monkeypatch.setattr(harness.judging.references, "recorded", lambda _: None)
    assert go_on(folder).summary.verdict is Verdict.UNKNOWN
    assert "single-eagle3 tokens-baseline REGRESSION" in load_history(folder).run.resumed[0].found[0]


def test_what_re_scoring_found_is_not_re_scored_away(tmp_path, engines):
    folder = killed_while_rescoring(tmp_path, engines)
    assert assess(load_history(folder)).verdict is Verdict.REGRESSION
    outcome = go_on(folder)
    assert engines.asked == []
    assert outcome.summary.verdict is Verdict.UNKNOWN
    assert any("rescored REGRESSION" in f for f in load_history(folder).run.resumed[0].found)


def killed_while_rescoring(out: Path, engines: Engines) -> Path:
    """One output was scored, as wrong, when the run was killed."""
    engines.kill_rescoring = True
    folder = killed(out, engines, "no cell")
    engines.kill_rescoring = False
    first = next(
        o for o in load_history(start(out / "whole").folder).observations if o.scenario == RESCORE and o.final.rescored
    )
    bad = change_final(first, rescored=(5.0, *first.final.rescored[1:]))
    with scores(folder).open("w") as stream:
        stream.write(bad.model_dump_json() + "\n")
    engines.asked.clear()
    return folder


def test_link_that_moves_meanwhile_leads_nowhere_else(tmp_path, folder, engines):
    finished = start(tmp_path).folder
    before = (finished / "run.json").read_text()
    latest = tmp_path / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
    left = prepare_resume(latest)
    latest.unlink()
    latest.symlink_to(finished.name)
    outcome = resume(left, Reporter(0.0))
    assert outcome.folder == folder.resolve() and outcome.summary.verdict is Verdict.PASS
    assert (finished / "run.json").read_text() == before
    assert latest.resolve() == folder.resolve()


def test_answers_that_came_after_the_run_was_read_are_not_set_aside(folder, engines):
    left = prepare_resume(folder)
    with answers(folder, "single-none").open("a") as stream:
        stream.write(all_lines(folder)[-1] + "\n")
    with pytest.raises(UsageError, match="was changed by another process while it was read; try again"):
        resume(left, Reporter(0.0))


def test_bytes_that_are_no_text_in_the_command_can_be_read_again(tmp_path, engines, monkeypatch):
    monkeypatch.setattr(harness.runner.recorder.sys, "argv", ["harness", "run", "--out", "caf\udce9"])
    folder = killed(tmp_path, engines)
    assert go_on(folder).summary.verdict is Verdict.PASS
    assert load_history(folder).run.command[-1] == "caf\\udce9"


@pytest.mark.parametrize(
    ("make", "sentence"), [("killed", " to be complete, found "), ("asked twice", "resumed after wrong answers")]
)
def test_run_that_cannot_pass_is_no_reference(tmp_path, engines, make, sentence):
    folder = killed(tmp_path, engines, "single-eagle3", 10, wrong_in="single-eagle3")
    if make == "asked twice":
        go_on(folder)
    history = load_history(folder)
    identities = {m: identity_in(history, m) for m in ("none", "eagle3")}
    reasons = [lookup.reason for lookup in references_in(history, identities).values()]
    assert reasons
    assert all(sentence in r for r in reasons), reasons


@pytest.mark.parametrize(
    ("change", "places"),
    [
        (lambda r: r["profile"]["engine"].update(kv_lease_s=7), ["profile.engine.kv_lease_s: expected 7"]),
        (lambda r: r["profile"].update(baselines="/elsewhere"), ["profile.baselines: expected '/elsewhere'"]),
        (lambda r: r.update(prompts_sha256="0"), ["prompts: expected '0'"]),
        (lambda r: r["identities"]["none"].update(target_sha256="x"), ["identities.none.target_sha256: expected 'x'"]),
        (lambda r: r["versions"].update(vllm="0.31.0", nixl="0"), ["versions.vllm", "versions.nixl: expected '0'"]),
        (lambda r: r["hardware"].update(cores=999), ["hardware.cores: expected 999"]),
        (lambda r: r["cells"][0].update(planned=99), ["cold: expected 99"]),
        (lambda r: r.update(rescore=False), ["rescore: expected False, found True"]),
    ],
)
def test_other_conditions_are_refused_and_named(folder, engines, change, places):
    reseal(folder, change)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    with pytest.raises(UsageError, match="cannot be resumed, because something has changed") as caught:
        go_on(folder)
    assert all(place in str(caught.value) for place in places)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


def test_memory_may_vary(folder, engines):
    reseal(folder, lambda r: r["hardware"].update(memory_gib=1.0))
    assert go_on(folder).summary.verdict is Verdict.PASS


def test_finished_merged_and_other_folders_are_refused(tmp_path, engines):
    done = start(tmp_path / "done").folder
    with pytest.raises(UsageError, match="this run finished at"):
        prepare_resume(done)
    folder = killed(tmp_path / "killed", engines)
    with pytest.raises(UsageError, match="a repetition, a try or a copy"):
        prepare_resume(folder.rename(folder.with_name("other")))
    reseal(folder.with_name("other"), lambda r: r.update(merged={"parts": []}))
    with pytest.raises(UsageError, match="merged from parts"):
        prepare_resume(folder.with_name("other"))


def test_a_run_whose_profile_is_elsewhere_is_resumed_where_that_is(folder, engines):
    reseal(folder, lambda r: r["profile"].update(source="mine.yaml"))
    with pytest.raises(
        UsageError, match=r"recorded with profile mine\.yaml, which is not here; resume it in the folder"
    ):
        prepare_resume(folder)


def test_run_in_use_is_refused(folder, engines):
    with FolderLock(folder), pytest.raises(UsageError, match="is writing to this folder"):
        go_on(folder)


def test_a_link_in_the_place_of_the_lock_is_not_written_through(tmp_path, engines):
    folder = killed(tmp_path / "run", engines)
    precious = tmp_path / "precious"
    precious.write_text("a file of the user")
    (folder / LOCK).unlink(missing_ok=True)
    (folder / LOCK).symlink_to(precious)
    with pytest.raises(DataError, match="found a symbolic link; remove it"):
        go_on(folder)
    assert precious.read_text() == "a file of the user"


def test_options_that_the_run_says_are_refused(folder, engines):
    done = CliRunner().invoke(app, ["run", "--resume", str(folder), "--cell", "pd-*", "--profile", "cpu"])
    assert isinstance(done.exception, UsageError) and "--profile, --cell" in str(done.exception)
    done = CliRunner().invoke(app, ["run", "--resume", str(folder)])
    assert done.exit_code == 0, done.output
    assert "PASS" in done.output


def test_interrupted_run_is_opened_again(folder, engines):
    """Ctrl-C seals what there is; going on breaks the seal and makes a new one."""
    reseal(folder, lambda r: r.update(finished="2026-01-01T00:00:00+00:00", interrupted=True))
    assert load_history(folder).run.interrupted and go_on(folder).summary.verdict is Verdict.PASS
    assert json.loads((folder / "run.json").read_text())["seal"] == seal_of(folder).model_dump()


def test_logs_of_engines_that_are_started_again_are_kept(folder, engines):
    (folder / "logs").mkdir()
    (folder / "logs" / "single-none.single.log").write_text("first Bearer abcdefghijklmnop")
    (folder / "logs" / "single-eagle3.single.log").write_text("complete")
    go_on(folder)
    assert {p.name: p.read_text() for p in (folder / "logs").iterdir()} == {
        "single-none~1.single.log": "first Bearer <redacted>",
        "single-eagle3.single.log": "complete",
    }


def test_nothing_is_lost_when_it_is_killed_while_answers_are_moved_aside(folder, engines, monkeypatch):
    before = all_lines(folder)

    def fail(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(Killed):
            go_on(folder)
    assert all_lines(folder) == before and check(folder).summary.verdict is Verdict.UNKNOWN
    assert go_on(folder).summary.verdict is Verdict.PASS
    assert set(before) <= {*all_lines(folder), *all_lines(folder / "superseded-2")}


def test_complete_cell_without_its_answers_is_not_asked_again(folder, engines):
    answers(folder, "single-eagle3").unlink()
    with pytest.raises(UsageError, match=r"the answers of single-eagle3 are gone, .*; restore cells/"):
        prepare_resume(folder)


def test_killed_between_the_last_answer_and_the_end(tmp_path, engines):
    folder = start(tmp_path).folder
    reseal(folder, lambda r: r.update(finished=None))
    engines.asked.clear()
    assert assess(load_history(folder)).verdict is Verdict.UNKNOWN
    outcome = go_on(folder)
    assert engines.asked == []
    assert outcome.summary.verdict is Verdict.PASS
    assert load_history(folder).run.resumed[0].set_aside == 0


def test_answers_that_the_disk_lost_are_asked_for_again(folder, engines):
    """After a power cut ``run.json`` may say more than the lines have."""
    path = answers(folder, "single-eagle3")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    go_on(folder)
    assert sorted(engines.asked) == sorted(CELLS)


def test_second_stage_that_is_not_whole_is_put_away_and_run_again(tmp_path, engines, monkeypatch):
    folder = start(tmp_path).folder
    second = folder / SECOND
    second.mkdir()
    made = history([observation("single-none")], folder=second).run
    write_run(second, made.model_copy(update={"finished": None}))
    # A cell that failed in a run that finished is not tried again.
    reseal(folder, lambda r: r["cells"][1].update(state="failed", reason="engine died"))
    asked: list[Path] = []

    def again(_prepared: object, made: History, *_: object) -> None:
        asked.append(made.folder)

    monkeypatch.setattr(harness.commands.resume, "later_stages", again)
    engines.asked.clear()
    outcome = go_on(folder)
    assert asked == [folder]
    assert engines.asked == []
    assert not second.exists()
    assert (folder / f"{SECOND}.superseded-1" / "run.json").is_file()
    assert outcome.summary.verdict is Verdict.UNKNOWN
