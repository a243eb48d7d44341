"""Two vLLMs: what only the second one does is its own, and what cannot be told stays unknown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from harness.commands.ab import Side, conclusion, record_both, with_references
from harness.errors import EngineStartError, UsageError
from harness.history.folder import load_history, write_run
from harness.history.verdict import Verdict
from harness.judging.references import References
from harness.reports.across_runs import print_comparison, render_comparison
from harness.reports.compare import compare_runs
from harness.reports.judge_run import Outcome, assess
from harness.runner.options import RunOptions
from harness.util.progress import Reporter
from tests.support.builders import flawless, garbled, history, identity, written_run
from tests.support.engines import ENVIRONMENT
from tests.support.fake_server import SAID, fake_server
from tests.support.program import inside


def broken(cell: str, tokens: int):
    return [garbled(o, at=0) if (o.cell, len(o.sent_ids)) == (cell, tokens) else o for o in flawless()]


def recorded(folder, observations):
    identities = {m: identity(m).model_dump(mode="json") for m in ("none", "eagle3", "dflash", "mtp")}
    return written_run(folder, history(observations), run_id=folder.name, identities=identities)


@pytest.mark.parametrize(
    ("base", "head", "verdict", "words"),
    [
        (flawless(), flawless(), Verdict.PASS, "no finding that base does not have"),
        (flawless(), broken("pd-none", 40), Verdict.REGRESSION, "first pd-none/tokens-reference/p40"),
        # What base does wrong, too, head did not break.
        (broken("pd-none", 40), broken("pd-none", 40), Verdict.PASS, "no finding"),
        (broken("pd-none", 40), broken("pd-none", 65), Verdict.REGRESSION, "p65"),
    ],
)
def test_only_what_head_alone_does_is_its_own(tmp_path, base, head, verdict, words):
    first, second = (recorded(tmp_path / name, made) for name, made in (("a", base), ("b", head)))
    found, why = conclusion(compare_runs(first, second, References(against=first)))
    assert (found, words in why) == (verdict, True), why


def test_what_both_do_wrong_hides_nothing_that_is_missing(tmp_path):
    wrong = broken("pd-none", 40)
    lost = [
        o.model_copy(update={"error": "the connection was reset", "legs": ()})
        if (o.cell, len(o.sent_ids)) == ("pd-none", 65)
        else o
        for o in wrong
    ]
    first, second = (recorded(tmp_path / name, made) for name, made in (("a", wrong), ("b", lost)))
    verdict, why = conclusion(compare_runs(first, second, References(against=first)))
    assert verdict is Verdict.UNKNOWN and "pd-none of second: the exchange broke: the connection was reset" in why, why


@pytest.mark.parametrize("change", [{"interrupted": True}, {"finished": None}, {"mutants": ("M1",)}])
def test_a_head_that_cannot_pass_does_not_pass_here(tmp_path, change):
    first = recorded(tmp_path / "a", flawless())
    found = load_history(recorded(tmp_path / "b", flawless()))
    write_run(found.folder, found.run.model_copy(update=change))
    verdict, why = conclusion(compare_runs(first, found.folder, References(against=first)))
    assert verdict is Verdict.UNKNOWN and "second as a whole: " in why, why


def test_more_of_the_same_in_one_place_is_head_s_own(tmp_path):
    """Each engine of a pair may keep blocks, and nothing but the words tells which one did."""

    def keeping(folder, *roles):
        made = load_history(recorded(folder, flawless()))
        cells = tuple(
            c.model_copy(update={"emptied_s": {**(c.emptied_s or {}), **dict.fromkeys(roles)}})
            if c.cell == "pd-none"
            else c
            for c in made.run.cells
        )
        write_run(folder, made.run.model_copy(update={"cells": cells}))
        return folder

    first, second = keeping(tmp_path / "a", "prefill"), keeping(tmp_path / "b", "prefill", "decode")
    verdict, why = conclusion(compare_runs(first, second, References(against=first)))
    assert verdict is Verdict.REGRESSION and "pd-none/pool-returned" in why, why
    same = compare_runs(first, keeping(tmp_path / "c", "prefill"), References(against=first))
    assert conclusion(same)[0] is Verdict.PASS


def unasked(folder: Path, reason: str) -> Path:
    made = history([], cells=["pd-none", "single-none"])
    cells = tuple(c.model_copy(update={"state": "failed", "reason": reason}) for c in made.run.cells)
    return written_run(folder, made, run_id=folder.name, cells=cells)


def test_the_cause_ends_the_last_line(tmp_path):
    reason = "expected the decode engine of pd-none to be ready within 85 s, found it ended; last lines of its log: …"
    first, second = recorded(tmp_path / "base", flawless()), unasked(tmp_path / "head", reason)
    comparison = compare_runs(first, second, References(against=first))._replace(names=("base", "head"))
    verdict, why = conclusion(comparison)
    assert verdict is Verdict.UNKNOWN
    assert why.endswith("expected the decode engine of pd-none to be ready within 85 s, found it ended"), why
    out = io.StringIO()
    print_comparison(comparison, Console(file=out, width=160))
    assert "not compared" in out.getvalue() and "0 of 0" not in out.getvalue()
    assert "no tokens to compare" in comparison.sentence and "not compared" in render_comparison(comparison)


def test_a_wrong_argument_of_head_costs_one_start_of_an_engine(tmp_path, monkeypatch):
    """Head comes first, and base is not asked when head answers nothing."""
    asked: list[str] = []

    def execute(prepared, out, reporter, options):
        asked.append(out.name)
        assert options.must_start
        folder = unasked(out, "unrecognized arguments: --no-such")
        return Outcome(folder, assess(load_history(folder)))

    monkeypatch.setattr("harness.commands.ab.execute", execute)
    prepared = with_references("cpu", ["pd-none"], ["cold"])
    sides = (Side("base", prepared, "main", RunOptions()), Side("head", prepared, "branch", RunOptions()))
    words = "head gave no answers to compare: unrecognized arguments: --no-such; correct that"
    with pytest.raises(EngineStartError, match=words):
        record_both(prepared.profile, sides, tmp_path, Reporter(1.0))
    assert asked == ["head"]


def test_the_page_says_what_ran_on_both_sides(tmp_path):
    flags = ("--engine-arg=--my-flag",)
    base = written_run(tmp_path / "base", history(flawless()), run_id="base")
    versions = {"vllm": "0.33.0", "vllm_build": "g0123abc"}
    head = written_run(tmp_path / "new", history(flawless()), run_id="new", engine_flags=flags, versions=versions)
    comparison = compare_runs(base, head)._replace(names=("base", "head"))
    stated = {name: values for name, *values in comparison.rows}
    assert stated["engine flags"] == ["none", "--engine-arg=--my-flag"]
    assert stated["vLLM"][1] == "0.33.0+g0123abc" and "vllm" not in stated
    page = render_comparison(comparison)
    assert "0.33.0+g0123abc" in page and "--my-flag" in page and '<th scope="col">head</th>' in page


def test_single_cells_are_asked_too_and_cold_for_every_prompt():
    prepared = with_references("cpu", ["pd-eagle3"], ["prefix-hit"])
    assert {c.id for c in prepared.plan.cells} == {"pd-eagle3", "single-eagle3", "single-none"}
    works = {w.cell.id: w for w in prepared.works}
    used = {s.prompt.id for script in works["pd-eagle3"].scripts for s in script.sends}
    assert not works["pd-eagle3"].items
    for cell in ("single-eagle3", "single-none"):
        assert {item.prompt.id for item in works[cell].items} == used


def test_two_equal_vllms_are_refused():
    assert "base and head are the same vLLM: give another --head" in inside("ab")[1]
    assert "base and head are the same vLLM, 0.32.0: give" in inside("ab", "--base", "0.32.0", "--head", "0.32.0")[1]


def test_head_cannot_be_a_server():
    code, words = inside("ab", "--base", "0.30.0", "--head", "http://127.0.0.1:1")
    assert code == 64 and words.startswith("harness: --head http://127.0.0.1:1 is the address of a server")


def test_base_may_be_a_server_that_runs_already(tmp_path, monkeypatch):
    """A fake stands for the server; what would be recorded on each side is looked at."""

    def stopped(profile, sides, out, reporter):
        base, head = sides
        assert [c.id for c in base.prepared.plan.cells] == ["single-none"]
        assert {c.id for c in head.prepared.plan.cells} == {"pd-none", "single-none"}
        assert [w.cell.id for w in base.prepared.works] == ["single-none"]
        assert base.options.executor.servers["single"].key.value == "k" * 20
        assert (base.where, head.options.executor) == (url, None)
        raise UsageError("stopped")

    monkeypatch.setenv("MY_KEY", "k" * 20)
    monkeypatch.setattr("harness.commands.ab.engines_for", lambda *_: ENVIRONMENT)
    monkeypatch.setattr("harness.commands.ab.record_both", stopped)
    with fake_server(key="k" * 20, said={**SAID, "speculative_config": None}) as url:
        given = ("ab", "--base", url, "--key-variable", "MY_KEY", "--out", str(tmp_path))
        code, words = inside(*given, "-c", "pd-none")
        assert code == 64 and words.endswith("harness: stopped"), words
        code, words = inside(*given, "-c", "pd-eagle3")
        assert (
            code == 64
            and "one server can answer for cells without speculation alone" in words
            and "not for single-eagle3;" in words
        )
    with fake_server(key="k" * 20) as url:
        code, words = inside(*given[:2], url, *given[3:], "-c", "pd-none")
        assert code == 64 and f"--base {url}: expected the settings" in words and "_tokens 0, found 3" in words
    code, words = inside("ab", "--base", "http://127.0.0.1:1", "-c", "pd-none")
    assert code == 64 and "--base http://127.0.0.1:1: expected a server" in words and "--single" not in words
    code, words = inside("ab", "--base", "http://127.0.0.1:1", "--key-variable", "NO_SUCH", "-c", "pd-none")
    assert code == 64 and "--key-variable NO_SUCH: this variable is not set" in words


@pytest.mark.parametrize("option", ["--model", "--key-variable"])
@pytest.mark.parametrize("command", [["ab", "--base", "0.33.0"], ["run"], ["baseline", "record"]])
def test_what_is_said_of_servers_needs_one(command, option):
    # Without such a cell nothing starts, whatever is asked first.
    code, words = inside(*command, option, "PATH", "-c", "no-such-cell")
    assert code == 64 and f"{option} is for servers that run already; name them" in words
