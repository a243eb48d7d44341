"""Large runs: read cell by cell, judged and reported as if they were in memory."""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.load import STAGES, records, write, write_baselines
from benchmarks.memory import forget_peak, peak_mib
from harness.commands.merge.expected_run import MergeOptions
from harness.commands.merge.load import load_parts
from harness.commands.merge.write import write_scores
from harness.errors import DataError
from harness.history import index
from harness.history.folder import History, HistoryWriter, load_history, read_cells
from harness.history.index import RecordedCells, RecordedFile
from harness.history.layout import SECOND
from harness.history.parquet import write_parquet
from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging import shares
from harness.judging.checks import registry
from harness.judging.references import References
from harness.judging.shares import processes_for
from harness.profiles.load import load_profile
from harness.reports.judge_run import assess, check, judge_and_report, judged, judgement_json
from harness.util import allowance
from harness.util.byte_cache import ByteCache
from harness.util.forks import in_forks
from harness.util.paths import REPOSITORY
from tests.support.builders import change_final, garbled, history, observation, written_run
from tests.support.run_files import answers

CELLS = ("pd-eagle3", "single-eagle3", "pd-none", "single-none")
LENGTHS = (40, 63, 64, 65, 96, 117)


@functools.cache
def rows() -> list[Observation]:
    """Cells in turns, so that none of them is in one place of the file; some answers are wrong, one is asked twice."""
    out = []
    for number, tokens in enumerate(LENGTHS):
        for cell in CELLS:
            o = observation(cell, tokens, sequence=len(LENGTHS) - number)
            if cell == "pd-eagle3" and tokens in (64, 96):
                o = garbled(o, at=0)
            if cell == "single-eagle3" and tokens == 40:
                o = o.model_copy(update={"error": "the exchange broke"})
            out.append(o)
    out.append(observation("pd-none", 40, sequence=99))
    out.append(observation("pd-none", 65, form="text", sequence=100))
    return out


def recorded(folder: Path, observations: list[Observation], **changes: object) -> Path:
    """A run folder."""
    profile = {**load_profile("cpu").model_dump(mode="json"), "source": "cpu", "scenarios": []}
    made = history(observations).model_copy(update={"observations": tuple(observations)})
    return written_run(folder, made, profile=profile, **changes)


def both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[History, History]:
    """The run held in memory, and the same read as a large one."""
    held = load_history(folder)
    monkeypatch.setattr(index, "_CACHE", ByteCache(0))
    lazy = load_history(folder, in_memory=0)
    assert isinstance(held.observations, tuple)
    assert isinstance(lazy.observations, RecordedCells)
    return held, lazy


def test_a_large_run_has_the_same_observations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held, lazy = both(recorded(tmp_path / "run", rows()), monkeypatch)
    assert len(lazy.observations) == len(held.observations)
    assert list(lazy.observations) == list(held.observations)
    assert lazy.observations == held.observations
    for cell in (*CELLS, "no-such"):
        assert lazy.in_order(cell) == held.in_order(cell)
        for form in ("ids", "text"):
            assert list(lazy.of(cell, form).items()) == list(held.of(cell, form).items())
    assert list(lazy.of_scenario("cold")) == list(held.of_scenario("cold"))
    assert list(lazy.of_scenario("rescore")) == []


def test_a_large_run_is_judged_and_reported_to_the_byte_as_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = recorded(tmp_path / "run", rows())
    held, lazy = both(folder, monkeypatch)
    names = ("judgement.json", "report.html", "junit.xml", "summary.md")
    judge_and_report(held)
    before = {name: (folder / name).read_bytes() for name in names}
    assert b"REGRESSION" in before["judgement.json"]
    judge_and_report(lazy)
    assert {name: (folder / name).read_bytes() for name in names} == before


def test_cells_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "_CACHE", ByteCache(0))
    lazy = load_history(recorded(tmp_path / "run", rows()), in_memory=0)
    first = [weakref.ref(o) for o in lazy.in_order("pd-none")]
    assert first and all(r() is not None for r in first)
    assert lazy.in_order("pd-eagle3")
    gc.collect()
    assert all(r() is None for r in first), "only the cell that was asked for last is kept"


def cut_third_line(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:-20]
    path.write_bytes(b"\n".join(lines))


def test_a_damaged_line_is_named(tmp_path: Path):
    folder = recorded(tmp_path / "run", rows())
    cut_third_line(answers(folder, "pd-eagle3"))
    with pytest.raises(DataError):
        load_history(folder, in_memory=0)
    with pytest.raises(DataError, match=r"pd-eagle3/observations\.jsonl, line 3"):
        read_cells(folder)


def unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    """A large run that is left to whoever reads it first."""
    monkeypatch.setattr(index, "_CACHE", ByteCache(0))
    return load_history(folder, in_memory=0, unread=True)


def test_an_unread_run_is_judged_as_one_that_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = recorded(tmp_path / "run", rows())
    held, later = load_history(folder), unread(folder, monkeypatch)
    assert judged(later) == judged(held)
    assert later.observations == held.observations


def test_each_line_of_an_unread_run_is_parsed_once_to_judge_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = recorded(tmp_path / "run", rows())
    parse, parsed = RecordedFile._parse, []
    monkeypatch.setattr(RecordedFile, "_parse", lambda *given: parsed.append(given[1]) or parse(*given))
    judged(load_history(folder, in_memory=0, unread=True))
    assert len(parsed) == len(set(parsed)) == len(rows())


@pytest.mark.parametrize("shared", [1, 0])
def test_a_run_is_judged_in_several_processes_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int):
    """By variant and by cell."""
    monkeypatch.setattr(shares, "_FEW", shared)
    run = records(12)
    write(tmp_path / "whole", run, 60)
    write_baselines(tmp_path / "baselines", run, 60)
    references = References(baselines=tmp_path / "baselines")
    alone, together = unread(tmp_path / "whole", monkeypatch), unread(tmp_path / "whole", monkeypatch)
    one = assess(alone, references)
    assert one.judgement.verdict is Verdict.REGRESSION
    here, read = os.getpid(), RecordedFile._first_pass
    read_here: list[Path] = []

    def watched(file: RecordedFile) -> Iterator[Observation]:
        if os.getpid() == here:
            read_here.append(file.path)
        return read(file)

    monkeypatch.setattr(RecordedFile, "_first_pass", watched)
    two = assess(together, references, 2)
    assert not read_here, "a process has read it"
    assert judgement_json(two) == judgement_json(one)
    assert together.observations.seen == alone.observations.seen
    assert together.learned == alone.learned


GOLDEN = REPOSITORY / "tests" / "golden" / "runs"


@pytest.mark.parametrize("name", ["merged", "normal-tier", "resumed", "real-model"])
def test_runs_of_real_engines_are_judged_in_several_processes_as_in_one(name: str, monkeypatch: pytest.MonkeyPatch):
    references = References(baselines=GOLDEN.parent / "baselines")
    one, two = (
        judgement_json(assess(unread(GOLDEN / name, monkeypatch), references, processes)) for processes in (1, 2)
    )
    assert two == one
    assert any(c["results"] for c in one["cells"])


def test_what_several_processes_left_unread_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = unfinished(tmp_path / "run")
    cut_third_line(answers(folder, "pd-eagle3"))
    with pytest.raises(DataError) as one:
        assess(unread(folder, monkeypatch))
    with pytest.raises(DataError, match=r"pd-eagle3/observations\.jsonl, line 3") as two:
        assess(unread(folder, monkeypatch), processes=2)
    assert str(two.value) == str(one.value)


def test_an_exchange_that_two_processes_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = unfinished(tmp_path / "run")
    twice = answers(folder, "pd-none").read_bytes().splitlines(keepends=True)[0]
    with answers(folder, "pd-eagle3").open("ab") as stream:
        stream.write(twice.replace(b'"cell":"pd-none"', b'"cell":"pd-eagle3"'))
    with pytest.raises(DataError, match="each exchange with an engine"):
        assess(unread(folder, monkeypatch), processes=2)


def test_a_crash_of_judging_itself_is_raised_as_from_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = recorded(tmp_path / "run", rows())

    def crashes(*_: object) -> None:
        raise DataError("pd-none: no such thing")

    monkeypatch.setattr(registry, "listed", crashes)
    for processes in (1, 2):
        with pytest.raises(DataError) as raised:
            assess(unread(folder, monkeypatch), processes=processes)
        assert str(raised.value) == "pd-none: no such thing"


def test_only_large_runs_are_judged_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = recorded(tmp_path / "run", rows())
    monkeypatch.setattr(shares, "may_fork", lambda: True)
    monkeypatch.setattr(allowance, "cores", lambda: [0, 1, 4])
    monkeypatch.setattr(allowance, "memory_gib", lambda: 64.0)
    assert processes_for(unread(folder, monkeypatch)) == 1
    monkeypatch.setattr(shares, "CACHED", 0)
    assert processes_for(load_history(folder)) == 1
    assert processes_for(unread(folder, monkeypatch)) == 3
    monkeypatch.setattr(allowance, "cores", lambda: list(range(64)))
    assert processes_for(unread(folder, monkeypatch)) == 8
    monkeypatch.setattr(allowance, "memory_gib", lambda: 0.5)
    assert processes_for(unread(folder, monkeypatch)) == 2
    monkeypatch.setattr(allowance, "memory_gib", lambda: 0.1)
    assert processes_for(unread(folder, monkeypatch)) == 1
    monkeypatch.setattr(allowance, "memory_gib", lambda: 64.0)
    monkeypatch.setattr(shares, "may_fork", lambda: False)
    assert processes_for(unread(folder, monkeypatch)) == 1


def test_check_asks_how_many_processes_there_are_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = recorded(tmp_path / "run", rows())
    asked: list[int] = []
    monkeypatch.setattr("harness.reports.judge_run.processes_for", lambda _: 2)
    monkeypatch.setattr(shares, "in_forks", lambda *given: asked.append(given[2]) or in_forks(*given))
    check(folder)
    check(folder, into=tmp_path / "out")
    assert asked == [2, 2]


def unfinished(folder: Path) -> Path:
    """Such a run has no seal, which would tell that its lines are damaged before one of them is parsed."""
    return recorded(folder, rows(), finished=None)


def test_a_damaged_line_of_an_unread_run_is_named_by_whoever_judges_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = unfinished(tmp_path / "run")
    cut_third_line(answers(folder, "pd-eagle3"))
    later = unread(folder, monkeypatch)
    with pytest.raises(DataError, match=r"pd-eagle3/observations\.jsonl, line 3"):
        judged(later)
    with pytest.raises(DataError, match=r"pd-eagle3/observations\.jsonl, line 3"):
        check(folder)


def test_an_exchange_that_stands_twice_in_an_unread_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = unfinished(tmp_path / "run")
    path = answers(folder, "pd-none")
    path.write_bytes(path.read_bytes() * 2)
    later = unread(folder, monkeypatch)
    with pytest.raises(DataError, match="each exchange with an engine"):
        judged(later)


def test_a_torn_line_of_an_unread_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = unfinished(tmp_path / "run")
    with answers(folder, "pd-eagle3").open("a") as stream:
        stream.write('{"cell": "pd-')
    assert load_history(folder).torn_line and unread(folder, monkeypatch).torn_line
    assert "cut off while being written" in "".join(judged(unread(folder, monkeypatch)).notices)


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    folder = recorded(tmp_path / "run", rows())
    whole = read_cells(folder)
    before = list(whole)
    with answers(folder, "pd-eagle3").open("a") as stream:
        stream.write('{"cell": "pd-')
    torn = read_cells(folder)
    assert torn.torn and not whole.torn
    assert list(torn) == before


def test_a_file_that_changes_while_it_is_judged_is_not_judged_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = recorded(tmp_path / "run", rows())
    _, lazy = both(folder, monkeypatch)
    lazy.in_order("pd-none")
    with answers(folder, "single-none").open("a") as stream:
        stream.write("\n")
    with pytest.raises(DataError, match="was changed while it was read"):
        lazy.in_order("single-none")


@functools.cache
def scored(tokens: int, answered: bool = True) -> Observation:
    """A re-scored output of the plain engine."""
    o = observation("single-none", tokens, scenario="rescore", part="x", sequence=900 + tokens)
    return change_final(o, rescored=(0.0,)) if answered else o.model_copy(update={"error": "the exchange broke"})


def test_of_each_output_the_first_score_with_figures_counts(tmp_path: Path):
    # The first part scored one output in vain, the second one well; a copy of the first changes nothing.
    first = [*rows(), scored(40, answered=False), scored(63)]
    second = [*rows(), scored(40), scored(63, answered=False), scored(64, answered=False)]
    folders = [recorded(tmp_path / str(i), part) for i, part in enumerate((first, second, first, second))]
    write_scores(tmp_path / "merged", [load_history(folder, in_memory=0) for folder in folders])
    written = [(o.prompt_id, o.error is None, o.sequence) for o in read_cells(tmp_path / "merged")]
    assert written == [("p40", False, 0), ("p63", True, 1), ("p40", True, 2), ("p64", False, 3)]


def test_scores_of_parts_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "_CACHE", ByteCache(0))
    part = load_history(recorded(tmp_path / "run", [*rows(), *(scored(t) for t in LENGTHS)]), in_memory=0)
    seen = []
    append = HistoryWriter.append

    def watched(writer: HistoryWriter, o: Observation) -> None:
        seen.append(weakref.ref(o))
        append(writer, o)

    monkeypatch.setattr(HistoryWriter, "append", watched)
    write_scores(tmp_path / "merged", [part])
    gc.collect()
    assert len(seen) == len(LENGTHS)
    assert all(r() is None for r in seen)


def test_a_second_stage_of_a_part_is_not_held_either(tmp_path: Path):
    folder = recorded(tmp_path / "run", rows(), identities={"none": {}})
    recorded(folder / SECOND, rows(), identities={"none": {}})
    (part,), problems = load_parts([folder], MergeOptions())
    assert not problems and part.stages.second is not None
    assert isinstance(part.stages.second.observations, RecordedCells)


def test_parquet_is_written_in_groups_and_holds_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.history.parquet._GROUP", 4)
    write_parquet(tmp_path, iter(rows()))
    table = pd.read_parquet(tmp_path / "observations.parquet")
    assert [json.loads(r) for r in table["record"]] == [json.loads(o.model_dump_json()) for o in rows()]
    assert table["error"].isna().sum() == len(rows()) - 1
    assert list(table["output_ids"][0]) == list(rows()[0].legs[-1].output_ids or ())


def _peaks(tmp_path: Path, in_memory: int) -> dict[str, float]:
    """MiB that judging, reporting and merging five times the cells take more, with small caches."""
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from benchmarks.load import STAGES
        from benchmarks.memory import peak_mib
        from harness.history import index as history_index
        from harness.baselines import index as baseline_index
        from harness.util.byte_cache import ByteCache
        history_index.IN_MEMORY = int(sys.argv[3])
        history_index._CACHE, baseline_index._CACHE = ByteCache(1 << 20), ByteCache(0, 2)
        STAGES[sys.argv[1]](Path(sys.argv[2]))
        print(peak_mib())
    """)
    grown: dict[str, float] = {}
    for cells, sign in ((8, -1), (40, 1)):
        for stage in STAGES:
            done = subprocess.run(
                [sys.executable, "-c", script, stage, str(tmp_path / str(cells)), str(in_memory)],
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            grown[stage] = grown.get(stage, 0.0) + sign * float(done.stdout.split()[-1])
    return grown


@pytest.mark.parametrize(("prompts", "limit"), [(60, 18), pytest.param(150, 45, marks=pytest.mark.exhaustive)])
def test_memory_does_not_grow_with_the_run(tmp_path: Path, prompts: int, limit: float):
    """Held in memory, five times the cells take 41 to 50 MiB more with 60 prompts, and 44 to 116 with 150."""
    for cells in (8, 40):
        run = records(cells)
        write(tmp_path / str(cells) / "whole", run, prompts)
        for name, part in (("first", run.cells[: cells // 2]), ("second", run.cells[cells // 2 :])):
            engines = tuple(e for e in run.engines if e.group in {c.group for c in part})
            own = run.model_copy(update={"cells": part, "engines": engines})
            write(tmp_path / str(cells) / name, own, prompts)
        write_baselines(tmp_path / str(cells) / "baselines", run, prompts)
    grown = _peaks(tmp_path, 0)
    assert max(grown.values()) < limit, f"{grown} MiB"


def test_the_peak_is_this_process_own(tmp_path: Path):
    """Of ``ru_maxrss`` a child inherits its parent's, through exec: nothing that it measures could fail then."""
    script = textwrap.dedent("""
        import subprocess, sys
        held = b"x" * (300 << 20)
        subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
    """)
    child = (
        "import resource; from benchmarks.memory import *; print(peak_mib(), resource.getrusage(0).ru_maxrss / 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, child], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    mine, inherited = map(float, done.stdout.split())
    assert mine < 100 < 300 < inherited


def test_a_peak_can_be_forgotten():
    held = b"x" * (200 << 20)
    before = peak_mib()
    del held
    forget_peak()
    assert peak_mib() < before - 150
