"""Profiles with many scenarios hit prefix caches at the lengths that matter; plans name those that no prompt has."""

from __future__ import annotations

import pytest

from harness.commands.plan_data import missed_lengths
from harness.workload.hit_edges import HitEdge, hit_edges_of, missed_hits
from harness.workload.prepare import prepare


def missed(profile: str, scenarios: list[str] | None = None, cells: list[str] | None = None) -> list[HitEdge]:
    prepared = prepare(profile, cells or [], scenarios or [], planned=True, fetch=False)
    return [edge for work in prepared.works for edge in missed_hits(prepared.profile.part(work.cell.variant), work)]


@pytest.mark.parametrize(
    ("profile", "lacking"),
    [
        ("cpu-full", set()),
        ("cpu-layouts", set()),
        # What engines leave out of their caches, or to D, makes the cached beginnings of these prompts shorter. Of a
        # prompt of whole blocks P has the state behind it, which is a block too far, and no other.
        ("cpu-hybrid", {("pd-none", "prefill", "beginning", 31), ("pd-none", "prefill", "prompt", 0)}),
        (
            "cpu-mtp3",
            {
                ("pd-mtp3", "prefill", "beginning", 31),
                ("pd-mtp3", "decode", "beginning", 31),
                ("single-mtp3", "single", "beginning", 31),
            },
        ),
    ],
)
def test_caches_are_hit_at_the_lengths_that_matter(profile, lacking):
    prepared = prepare(profile, [], planned=True, fetch=False)
    found = {
        (work.cell.id, edge.role, edge.of, number)
        for work in prepared.works
        for edge in missed_hits(prepared.profile, work)
        for number in edge.numbers
    }
    assert found == lacking


@pytest.mark.parametrize(
    ("profile", "cell", "edges"),
    [
        ("cpu", "single-none", [("single", "beginning", {31, 0, 1}), ("single", "prompt", {31, 0, 1})]),
        # D has nothing to fetch of prompts of one token more than whole blocks, of which P leaves one.
        (
            "cpu-hybrid",
            "pd-none",
            [
                ("prefill", "beginning", {31, 0, 1}),
                ("prefill", "prompt", {31, 0, 1}),
                ("decode", "beginning", {31, 0, 1}),
                ("decode", "prompt", {31, 0, 1, 2}),
            ],
        ),
        # The window of 48 of the token behind a hit of 64 begins with token 17, behind one of 96 with token 49.
        (
            "cpu-layouts",
            "single-none",
            [("single", "beginning", {31, 0, 1}), ("single", "prompt", {31, 0, 1}), ("single", "hit", {64, 96})],
        ),
    ],
)
def test_the_edges_of_hits(profile, cell, edges):
    prepared = prepare(profile, [cell], planned=True, fetch=False)
    (work,) = prepared.works
    assert [(e.role, e.of, set(e.numbers)) for e in hit_edges_of(prepared.profile, work.cell)] == edges


def test_engines_that_nothing_is_to_hit_lack_nothing():
    assert missed("cpu", ["cold"]) == []
    # The same prompt again, when its blocks are others'.
    assert missed("cpu", ["refill"]) == []


def test_a_plan_names_what_it_lacks_by_engine():
    everything = missed_lengths(prepare("cpu", ["pd-none", "single-none"], ["prefix-hit", "prefix-hit-on-p"]))
    found = {at: cells for at, cells in everything.items() if "prefix hit" in at}
    first = (
        "no prefix hit on the first N tokens of a prompt has N mod 32 in {1, 31}, where they are whole blocks, one "
        "token less or one more"
    )
    assert found[first] == ["pd-none (P, D)", "single-none"]
    assert len(found) == 2
