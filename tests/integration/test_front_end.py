"""The pytest front end: which items it offers, and what -k leaves of them. Nothing is started."""

from __future__ import annotations

from tests.support.program import pytest


def collect(*arguments: str) -> tuple[int, list[str]]:
    done = pytest("--collect-only", "-q", *arguments)
    return done.code, done.output.splitlines()


def test_whole_matrix_is_offered_check_by_check():
    code, lines = collect("--profile", "cpu")
    items = {tuple(line.split("::")[1:]) for line in lines if "::" in line}
    assert code == 0
    methods = ("none", "eagle3", "dflash", "mtp")
    routed = {f"pd-{m}-router" for m in methods}
    direct = {f"{t}-{m}" for t in ("pd", "single") for m in methods}
    assert {cell for cell, _ in items if "@" not in cell} == direct | routed
    assert ("pd-mtp-router@concurrent", "state-occurred") in items
    assert not any(cell == "pd-mtp-router@late-pull" for cell, _ in items)
    assert ("pd-mtp@late-pull", "state-occurred") in items
    assert not any(cell == "single-mtp@late-pull" for cell, _ in items)
    assert ("pd-eagle3", "acceptance-single") in items
    assert ("single-none", "tokens-reference") not in items
    assert not any("tests/" in line for line in lines if "::" in line)


def test_selecting_a_cell_drops_the_checks_against_cells_that_are_not_run():
    code, lines = collect("--profile", "cpu", "-k", "pd and eagle3")
    items = {tuple(line.split("::")[1:]) for line in lines if "::" in line}
    assert code == 0
    assert {cell.partition("@")[0] for cell, _ in items} == {"pd-eagle3", "pd-eagle3-router"}
    names = {check for _, check in items}
    assert {"transfer", "tokens-baseline", "acceptance-baseline"} <= names
    assert not names & {"tokens-reference", "acceptance-single"}


def test_unknown_profile_is_a_usage_error_in_words():
    code, lines = collect("--profile", "nowhere")
    assert code == 4
    assert any("expected a shipped profile" in line for line in lines)
