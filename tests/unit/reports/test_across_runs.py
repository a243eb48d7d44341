"""Two runs side by side, and many nights: what came and went, and drifts that no single night shows."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from harness.errors import UsageError
from harness.history.engine_interfaces import RESET_PREFIX_CACHE
from harness.history.folder import load_history, write_run
from harness.history.verdict import Verdict
from harness.judging.references import References
from harness.reports.across_runs import print_comparison, print_trend, render_comparison, render_trend
from harness.reports.cause_words import sentence_of
from harness.reports.compare import compare_runs
from harness.reports.trend import limit_for, load_trend, trend_of
from harness.reports.trend_model import TrendRun, WrongAlone
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import change_final, garbled, history, observation, speculation, written_run
from tests.support.pages import Page, printed

LENGTHS = (32, 64, 96)


def recorded(folder: Path, cells=("pd-eagle3", "single-none"), change=lambda o: o, **run) -> Path:
    """A run in a folder of its own."""
    made = history([change(observation(c, n, sequence=i)) for c in cells for i, n in enumerate(LENGTHS)])
    return written_run(folder, made, **{"run_id": folder.name, **run})


def slower(o):
    """The same tokens with fewer accepted drafts."""
    if o.cell != "pd-eagle3":
        return o
    return change_final(o, speculation=speculation((0, *(0, 1) * (len(o.final.output_ids) // 3))))


def test_equal_runs_have_nothing_to_say(tmp_path):
    a, b = recorded(tmp_path / "a"), recorded(tmp_path / "b")
    found = compare_runs(a, b)
    assert found.sentence.startswith("The same verdicts; the same tokens; the same acceptance")
    assert compare_runs(a, a).sentence == "Both are the same record, so that nothing can differ"
    assert not found.new and not found.gone
    assert all(c.equal == c.common == len(LENGTHS) for c in found.cells)


def test_what_differs_between_two_runs_is_named(tmp_path):
    a = recorded(tmp_path / "a", versions={"vllm": "0.32.0"})
    b = recorded(
        tmp_path / "b",
        cells=("pd-eagle3", "pd-none"),
        change=lambda o: garbled(o) if o.prompt_id == "p96" else slower(o),
        versions={"vllm": "0.33.0"},
    )
    found = compare_runs(a, b)
    pairs = {c.cell: c for c in found.cells}
    assert (pairs["pd-eagle3"].common, pairs["pd-eagle3"].equal) == (3, 2)
    assert pairs["pd-eagle3"].positions[0].effect < 0 and pairs["single-none"].verdicts[1] is None
    assert pairs["pd-none"].verdicts[0] is None
    # Three prompts are too few for a difference to count, which is not "no change".
    assert "too few common prompts to tell whether acceptance changed by 5 points (pd-eagle3: 3)" in found.sentence
    assert all(-1 <= d.low <= d.high <= 1 for c in found.cells for d in c.positions)
    assert ("vllm", "0.32.0", "0.33.0") in found.differing
    assert "1 prompt with different tokens" in found.sentence
    html = render_comparison(found)
    Page(html).require_inert()
    assert "0.33.0" in html
    assert "2 of 3" in printed(print_comparison, found)


def test_that_nothing_changed_is_said_only_where_it_would_have_shown(tmp_path):
    def answered(folder, rejects: int):
        """Of 90 prompts, so many have one draft less."""
        less = speculation((2, 3, 3, 3))
        observations = [observation("pd-eagle3", 20 + n, accepted=(3, 3, 3, 3), sequence=n) for n in range(90)]
        made = [change_final(o, speculation=less) if o.sequence < rejects else o for o in observations]
        return written_run(folder, history(made), run_id=folder.name)

    a, b = answered(tmp_path / "a", 0), answered(tmp_path / "b", 1)
    assert "; no significant change of acceptance; " in compare_runs(a, b).sentence
    cells = compare_runs(a, b).cells
    (few,) = compare_runs(RUNS / "M1", RUNS / "M4", References(baselines=BASELINES)).cells[:1]
    assert not cells[0].could_hide(0.05) and few.could_hide(0.05)
    assert "; elsewhere no significant change; " in compare_runs(a, b)._replace(cells=(*cells, few)).sentence
    assert few.positions[0].low == -1


def test_settings_are_shown_without_the_brackets_of_python():
    """The page showed ``[]``, ``None`` and ``{'VLLM_USE_FLASHINFER_SAMPLER': '0'}``."""
    found = compare_runs(RUNS / "M4", RUNS / "gpu", References(baselines=BASELINES))
    rows = {name: sides for name, *sides in found.differing}
    assert rows["gpus"] == ["none", "NVIDIA H200, 143771 MiB"]
    assert rows["engine.env"] == ["none", "VLLM_USE_FLASHINFER_SAMPLER=0"]
    assert not any(mark in side for sides in rows.values() for side in sides for mark in ("[", "{", "None"))
    # In whatever order a profile has them.
    assert "engine.tensor_parallel" not in rows


def test_a_cause_of_many_findings_is_one_card_and_one_line():
    found = compare_runs(RUNS / "plan-rows", RUNS / "M4", References(baselines=BASELINES))
    (new,) = found.new
    assert (new.damage, new.count, found.gone) == ("drafter-kv", 10, ())
    html = render_comparison(found)
    assert sum(t == "article" for t, _ in Page(html).elements) == 1
    assert new.command in html and sentence_of(new) in html
    lines = printed(print_comparison, found, 400).splitlines()
    assert [line for line in lines if line.startswith("new: ")] == [f"new: ✘ REGRESSION {sentence_of(new)} ×10"]
    assert found.sentence.endswith(f"1 new cause, 0 resolved; new: {sentence_of(new)}")
    # They share no prompt: that nothing changed is not known.
    assert "no tokens to compare; no acceptance to compare" in found.sentence
    back = compare_runs(RUNS / "M4", RUNS / "plan-rows", References(baselines=BASELINES))
    assert ([c.damage for c in back.gone], back.new) == (["drafter-kv"], ())


def test_pages_say_times_as_people_read_them(tmp_path):
    for day in (27, 28):
        recorded(tmp_path / f"run{day}", started=f"2026-11-{day}T02:42:10+00:00")
    html = render_comparison(compare_runs(tmp_path / "run27", tmp_path / "run28"))
    html += render_trend(load_trend(tmp_path), tmp_path / "trend.html")
    assert html.count("2026-11-28 02:42 UTC") > 3
    assert "+00:00" not in html


def test_runs_without_a_common_cell_are_refused(tmp_path):
    a, b = recorded(tmp_path / "a", cells=("single-none",)), recorded(tmp_path / "b", cells=("pd-none",))
    with pytest.raises(UsageError, match="expected runs with a cell in common"):
        compare_runs(a, b)


# --- many nights -----------------------------------------------------------------------------------------------------


def test_limit_grows_with_the_time_between_notices():
    # Tables of the two-sided CUSUM with k = 0.5: h = 4 gives 168 nights, h = 5 gives 465.
    assert limit_for(168) == pytest.approx(4.0, abs=0.06)
    assert limit_for(465) == pytest.approx(5.0, abs=0.06)


def test_folder_of_runs_becomes_a_page(tmp_path):
    for i in range(3):
        recorded(tmp_path / f"run{i}", started=f"2026-01-0{i + 1}T00:00:00+00:00")
    recorded(tmp_path / "armed", mutants=("M1",), started="2026-01-09T00:00:00+00:00")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    shutil.copytree(tmp_path / "run1", tmp_path / "run1-again")
    shutil.copytree(tmp_path / "run2" / "cells", tmp_path / "torn" / "cells")
    # Of a shrunk case there is nothing to say: it was never a run.
    shutil.copytree(tmp_path / "run2" / "cells", tmp_path / "shrunk" / "cells")
    (tmp_path / "shrunk" / "shrink.json").write_text("{}")
    trend = load_trend(tmp_path)
    assert [n.run_id for n in trend.runs] == ["run0", "run1", "run2"]
    assert [line.partition(": ")[0] for line in trend.left_out] == ["armed", "broken", "run1-again", "torn"]
    assert "run1-again: the same record as run1, which counts once" in trend.left_out
    page = Page(render_trend(trend, tmp_path / "trend.html"))
    page.require_inert()
    assert [a["data-chart"] for _, a in page.elements if "data-chart" in a] == ["trend-eagle3"]
    assert "3 runs" in printed(print_trend, trend)


def test_verdicts_are_shown_on_a_narrow_terminal(tmp_path):
    for i in range(2):
        recorded(tmp_path / f"2026010{i + 1}-021700-cpu-quick-ba31", started=f"2026-01-0{i + 1}T00:00:00+00:00")
    shown = io.StringIO()
    print_trend(load_trend(tmp_path), Console(file=shown, width=40))
    assert shown.getvalue().count("? UNKNOWN") == 2 and "ba31" in shown.getvalue()


def test_wrong_answers_are_added_up_over_the_runs_of_a_version(tmp_path):
    """A defect that spoils one P/D answer in two of three runs of the new version, and none of the old one. Without a
    baseline, nothing says whether the single engine is right, so that it is not counted."""

    def spoil(o):
        return garbled(o) if (o.cell, o.prompt_id) == ("pd-none", "p64") else o

    cells = ("pd-none", "single-none")
    nights = [("0.31.0", False), ("0.31.0", False), ("0.32.0", True), ("0.32.0", False), ("0.32.0", True)]
    for i, (version, wrong) in enumerate(nights):
        change = spoil if wrong else (lambda o: o)
        started = f"2026-01-0{i + 1}T00:00:00+00:00"
        recorded(tmp_path / f"run{i}", cells, change, started=started, versions={"vllm": version})
    trend = load_trend(tmp_path)
    found = {(a.engines.vllm, a.what): a for a in trend.wrong_answers}
    assert list(found) == [("0.31.0", "P/D"), ("0.32.0", "P/D"), ("0.32.0", "pd-none")]
    new = found["0.32.0", "P/D"]
    assert (new.runs, new.wrong, new.checked) == (3, 2, 9)
    assert new.interval == pytest.approx((0.02814, 0.60009), abs=1e-4)
    assert found["0.31.0", "P/D"].interval == pytest.approx((0, 1 - 0.025 ** (1 / 6)))
    Page(render_trend(trend, tmp_path / "trend.html")).require_inert()
    assert "vLLM 0.32.0 on CPU, P/D: 2 wrong of 9 answers in 3 runs (2.8 to 60 % with 95 % confidence)" in printed(
        print_trend, trend
    )


def test_wrong_answers_of_a_cpu_are_not_added_to_those_of_a_gpu(tmp_path):
    for name in ("known", "gpu", "resumed"):
        shutil.copytree(RUNS / name, tmp_path / name)
    trend = load_trend(tmp_path)
    found = {(a.engines.hardware, a.what): (a.runs, a.wrong) for a in trend.wrong_answers}
    assert found["CPU", "single-eagle3"] == (1, 4) and found["NVIDIA H200", "single engine"][1] == 0
    assert "NVIDIA H200" in render_trend(trend, tmp_path / "trend.html")
    alone = WrongAlone(True, 1e-3)
    runs = [
        TrendRun(f"n{i}", str(i), Path("n"), Verdict.PASS, {}, {}, {}, "0", alone=alone, hardware=where)
        for i, where in enumerate(("CPU", "NVIDIA H200"))
    ]
    assert [(row.engines.hardware, row.runs) for row in trend_of(runs, 365).intermittent] == [
        ("CPU", 1),
        ("NVIDIA H200", 1),
    ]


def test_part_of_a_merged_run_counts_once(tmp_path):
    for name in ("known", "merged", "pass", "resumed"):
        shutil.copytree(RUNS / name, tmp_path / name)
    trend = load_trend(tmp_path)
    assert "known: a part of merged, which counts once" in trend.left_out
    assert "resumed: a part of merged, which counts once" in trend.left_out
    (row,) = (a for a in trend.wrong_answers if a.what == "single-eagle3")
    assert (row.runs, row.wrong) == (1, 4)
    # Merged again, with a part less: of both, the one with more parts counts.
    again = tmp_path / "a-merged-again"
    merged = load_history(RUNS / "merged")
    assert merged.run.merged is not None
    parts = merged.run.merged.model_copy(update={"parts": merged.run.merged.parts[:1]})
    shutil.copytree(RUNS / "merged", again)
    write_run(again, merged.run.model_copy(update={"merged": parts, "lacking": {RESET_PREFIX_CACHE: "an old record"}}))
    trend = load_trend(tmp_path)
    assert "a-merged-again: it has a part of merged, which counts once" in trend.left_out
    assert {n.folder.name for n in trend.runs} == {"merged", "pass"}


def test_runs_of_which_only_parts_are_left_are_too_few(tmp_path):
    for name in ("known", "merged"):
        shutil.copytree(RUNS / name, tmp_path / name)
    with pytest.raises(UsageError, match=r"found 1 \(known: a part of merged, which counts once\)"):
        load_trend(tmp_path)


def test_tests_that_were_suspect_more_than_once_are_named():
    runs = [
        TrendRun(f"n{i}", str(i), Path("n"), Verdict.SUSPECT, {}, {}, {}, "0", suspects=suspects)
        for i, suspects in enumerate((("pd-eagle3 survival",), (), ("pd-eagle3 survival", "pd-mtp first-step")))
    ]
    found = trend_of(runs, 365)
    assert found.suspects == (("pd-eagle3 survival", 2),)
    assert "pd-eagle3 survival: SUSPECT in 2 runs" in printed(print_trend, found)
    assert "pd-eagle3 survival" in render_trend(found, Path("trend.html"))


def test_folder_without_two_runs_is_refused(tmp_path):
    recorded(tmp_path / "only")
    with pytest.raises(UsageError, match="at least two recorded runs, found 1"):
        load_trend(tmp_path)
    with pytest.raises(UsageError, match="expected a folder"):
        load_trend(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a run; name the folder above"):
        load_trend(tmp_path / "only")


def with_wrong(nights: int, of: int) -> list[TrendRun]:
    return [
        TrendRun(f"n{i}", str(i), Path("n"), Verdict.PASS, {}, {}, {}, "0", alone=WrongAlone(i < nights, 1e-3))
        for i in range(of)
    ]


@pytest.mark.parametrize(("nights", "of", "certain"), [(1, 1, False), (1, 30, False), (2, 9, True), (2, 30, False)])
def test_nights_with_an_answer_that_is_wrong_by_itself_are_added_up(nights, of, certain):
    found = trend_of(with_wrong(nights, of), 365)
    (row,) = found.intermittent
    assert (row.found, row.runs, row.certain) == (nights, of, certain)
    assert f"{nights} of {of} run" in printed(print_trend, found)
    page = render_trend(found, Path("trend.html"))
    assert ("an intermittent defect" in page) is certain


def test_nights_of_right_answers_add_up_to_nothing():
    assert trend_of(with_wrong(0, 30), 365).intermittent == ()
    before = [TrendRun(f"n{i}", str(i), Path("n"), Verdict.PASS, {}, {}, {}, "0") for i in range(2)]
    assert trend_of(before, 365).intermittent == ()
