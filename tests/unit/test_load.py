"""Large runs: read cell by cell, judged and reported as if they were in memory."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.load import records, write
from harness import history_index
from harness.config import REPOSITORY, load_profile
from harness.errors import DataError
from harness.history import History, HistoryWriter, Observation, _parse, load_history, write_parquet, write_run
from harness.history_index import HeldCells, RecordedLines
from harness.merge.together import Together
from harness.operations import judge_and_report
from tests.unit.builders import change_final, history, observation

CELLS = ("pd-eagle3", "single-eagle3", "pd-none", "single-none")
LENGTHS = (40, 63, 64, 65, 96, 117)


def rows() -> list[Observation]:
    """Cells in turns, so that none of them is in one place of the file; some answers are wrong, one is asked twice."""
    out = []
    for number, tokens in enumerate(LENGTHS):
        for cell in CELLS:
            o = observation(cell, tokens, sequence=len(LENGTHS) - number)
            if cell == "pd-eagle3" and tokens in (64, 96):
                assert o.final is not None and o.final.output_ids is not None
                o = change_final(o, output_ids=(9, *o.final.output_ids[1:]))
            if cell == "single-eagle3" and tokens == 40:
                o = o.model_copy(update={"error": "the exchange broke"})
            out.append(o)
    out.append(observation("pd-none", 40, sequence=99))
    out.append(observation("pd-none", 65, form="text", sequence=100))
    return out


def recorded(folder: Path, observations: list[Observation], **changes: object) -> Path:
    """A run folder."""
    with HistoryWriter(folder) as writer:
        for o in observations:
            writer.append(o)
    profile = {**load_profile("cpu").model_dump(mode="json"), "source": "cpu", "scenarios": []}
    write_run(folder, history(observations).run.model_copy(update={"profile": profile, **changes}))
    return folder


def both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[History, History]:
    """The run held in memory, and the same read as a large one."""
    held = load_history(folder)
    monkeypatch.setattr(history_index, "CACHED", 0)
    lazy = load_history(folder, in_memory=0)
    assert isinstance(held.observations, tuple)
    assert isinstance(lazy.observations, RecordedLines)
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
    monkeypatch.setattr(history_index, "CACHED", 0)
    lazy = load_history(recorded(tmp_path / "run", rows()), in_memory=0)
    first = [weakref.ref(o) for o in lazy.in_order("pd-none")]
    assert first and all(r() is not None for r in first)
    assert lazy.in_order("pd-eagle3")
    gc.collect()
    assert all(r() is None for r in first), "only the cell that was asked for last is kept"


def test_a_damaged_line_is_named(tmp_path: Path):
    folder = recorded(tmp_path / "run", rows())
    path = folder / "observations.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[5] = lines[5][:-20]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError):
        load_history(folder, in_memory=0)
    with pytest.raises(DataError, match="line 6"):
        RecordedLines(path, _parse)


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    path = tmp_path / "observations.jsonl"
    text = "".join(o.model_dump_json() + "\n" for o in rows())
    path.write_text(text + '{"cell": "pd-')
    torn = RecordedLines(path, _parse)
    assert torn.torn and len(torn) == len(rows())
    path.write_text(text)
    assert not RecordedLines(path, _parse).torn


def test_a_file_that_changes_while_it_is_judged_is_not_judged_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = recorded(tmp_path / "run", rows())
    _, lazy = both(folder, monkeypatch)
    lazy.in_order("pd-none")
    with (folder / "observations.jsonl").open("a") as stream:
        stream.write("\n")
    with pytest.raises(DataError, match="changed meanwhile"):
        lazy.in_order("single-none")


def test_parts_are_put_together_as_if_they_were_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    everything = rows()
    first = [o for o in everything if o.cell.startswith("pd")]
    second = [o for o in everything if o.cell.startswith("single")]
    parts = [both(recorded(tmp_path / str(i), part), monkeypatch) for i, part in enumerate((first, second))]
    chosen = {c: int(c.startswith("single")) for c in CELLS}
    scores = [observation("single-none", 40, scenario="rescore", part="x", sequence=7)]
    held, lazy = (Together([p[i] for p in parts], chosen, scores) for i in (0, 1))
    assert list(held) == list(lazy) == [*first, *second, *scores]
    assert len(lazy) == len(everything) + 1 and lazy
    assert list(lazy.of_scenario("rescore")) == scores
    for cell in CELLS:
        assert lazy.of_cell(cell) == held.of_cell(cell) == HeldCells([*first, *second, *scores]).of_cell(cell)
    assert not Together([], {}, [])


def test_parquet_is_written_in_groups_and_holds_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.history._GROUP", 4)
    write_parquet(tmp_path, iter(rows()))
    table = pd.read_parquet(tmp_path / "observations.parquet")
    assert [json.loads(r) for r in table["record"]] == [json.loads(o.model_dump_json()) for o in rows()]
    assert table["error"].isna().sum() == len(rows()) - 1
    assert list(table["output_ids"][0]) == list(rows()[0].legs[-1].output_ids or ())


def test_memory_does_not_grow_with_the_run(tmp_path: Path):
    """In memory, ten times the cells take 400 MiB more."""
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from harness.checks.registry import judge
        from harness.history import load_history
        judge(load_history(Path(sys.argv[1]), in_memory=0), {})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """)
    peaks = []
    for cells in (8, 80):
        folder = tmp_path / str(cells)
        write(folder, records(cells), 300)
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder)], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout) / 1024)
    size = (tmp_path / "80" / "observations.jsonl").stat().st_size / 2**20
    assert size > 60
    assert peaks[1] - peaks[0] < 150, f"{peaks} MiB for {size:.0f} MiB of lines"
