"""Each shipped profile hands over prompts at the lengths that matter to its layers and methods."""

from __future__ import annotations

import pytest

from harness.profiles.load import load_profile, shipped_profile_names
from harness.workload.cells import cell_work
from harness.workload.edges import edges_of, missed
from harness.workload.prepare import prepare

KEPT = {"cpu-layouts-kept", "cpu-hybrid-kept", "cpu-hybrid-mtp"}
"""The first two have the prefix-cache states alone; the profiles that they extend have the lengths. The last one leaves
out lengths at which a known defect shows."""
PROBES = [
    name
    for name in shipped_profile_names()
    if load_profile(name).workload.prompts.name == "probe.jsonl" and name not in KEPT
]
NATURAL = {"nightly", "nightly-invariant", "smollm2", "smollm2-full", "smollm2-gpu", "smollm2-gpu-crowds"}
"""Their sets have strata of natural prompts, which do not have every residue."""


def found(profile: str):
    prepared = prepare(profile, [], planned=True, fetch=False)
    return {w.cell.id: missed(prepared.profile.part(w.cell.variant), w) for w in prepared.works}


@pytest.mark.parametrize("profile", PROBES)
def test_every_profile_with_copy_prompts_hands_over_all_lengths_that_matter(profile):
    assert {cell: edges for cell, edges in found(profile).items() if edges} == {}


def test_profiles_with_natural_prompts_say_what_they_lack():
    lacking = {p for p in NATURAL if any(found(p).values())}
    assert lacking == NATURAL


@pytest.mark.parametrize("profile", ["cpu-full", "cpu-hybrid", "cpu-layouts"])
def test_every_residue_of_a_block_is_handed_over(profile):
    prepared = prepare(profile, [], planned=True, fetch=False)
    for work in prepared.works:
        if work.cell.topology != "pd" or work.cell.routed:
            continue
        alone = [s.stages for s in work.scripts if s.scenario in ("residues", "window-edge")]
        prompts = [i.prompt for i in work.items] + [stage.sends[0].prompt for stages in alone for stage in stages]
        assert {p.tokens % 32 for p in prompts if p.tokens > 32} == set(range(32)), work.cell.id


@pytest.mark.parametrize(
    ("profile", "cell", "residues"),
    [
        ("cpu", "pd-none", [{31, 0, 1}]),
        ("cpu", "pd-eagle3", [{31, 0, 1}, {0, 30, 31}]),
        ("cpu", "pd-dflash", [{31, 0, 1}, {0, 29, 30, 31}]),
        ("cpu", "single-eagle3", []),
        # P leaves one token of recurrent state, and two of three modules.
        ("cpu-hybrid", "pd-none", [{0, 1, 2}]),
        ("cpu-mtp3", "pd-mtp3", [{1, 2, 3}, {0, 30, 31}]),
        ("cpu-mtp3", "pd-none", [{31, 0, 1}]),
        # The window of 48 tokens of the token behind a prompt of 175 begins with token 128.
        ("cpu-layouts", "pd-none", [{31, 0, 1}, {14, 15, 16}]),
    ],
)
def test_the_edges_of_a_cell(profile, cell, residues):
    prepared = prepare(profile, [cell])
    (work,) = prepared.works
    assert [set(e.residues) for e in edges_of(prepared.profile, work.cell)] == residues


def test_what_is_cached_or_given_up_is_not_handed_over():
    """A next turn has its blocks on both sides already, and a mistaken hand-off is judged by nothing else."""
    prepared = prepare("cpu", ["pd-none"], ["continuation", "hand-off-mistakes", "late-pull"])
    (work,) = prepared.works
    (edge,) = missed(prepared.profile, work)
    assert edge.residues == {31, 0, 1}
    cold = cell_work(prepared.profile, prepared.prompts, work.cell)
    assert missed(prepared.profile, cold) == []
