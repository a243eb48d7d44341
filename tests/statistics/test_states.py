"""States of real models: the scenarios of the nightly profile, recorded with nothing wrong and with answers damaged in
one state alone."""

from __future__ import annotations

from harness.history.verdict import Verdict
from harness.judging.checks.registry import TEST_NAMES, judge
from harness.judging.findings import Judgement
from harness.profiles.model import Judging
from harness.workload.prepare import prepare
from tests.support.nightly import Defect, Nights, Noise

STATES = ("*+*.tight",)
EAGLE = "pd-eagle3+llama31-8b.tight"


def failed(judgement: Judgement) -> set[tuple[str, str, str]]:
    """The registered tests that failed: cell, scenario and name."""
    return {
        (f.cell, f.scenario, f.check)
        for f in judgement.findings
        if f.check in TEST_NAMES and f.verdict is Verdict.REGRESSION
    }


def test_right_engines_pass_in_every_state():
    """Although P/D takes the other token at every second near tie, and single engines never do."""
    noise = Noise(parting=0.0, pd_parting=0.5)
    simulated = Nights(prepare("nightly", STATES, planned=True), noise, permutations=1000).night(3)
    judgement = judge(simulated.night, simulated.baselines)
    assert judgement.verdict is Verdict.PASS, [f"{f.id}: {f.message}" for f in judgement.findings][:3]
    seen = {c.scenario: {r.check for r in c.results} for c in judgement.cells if c.cell == EAGLE}
    assert list(seen) == ["cold", "prefix-hit", "prefix-hit-on-p", "concurrent", "pressure"]
    assert {"survival", "rescored", "acceptance-cold", "acceptance-single", "first-step", "pooled"} <= seen["pressure"]
    # A single engine has no P of its own.
    assert "acceptance-single" not in seen["prefix-hit-on-p"] and "acceptance-baseline" not in seen["pressure"]


def test_what_a_state_damages_fails_in_that_state_alone():
    """In one night, each in a state of its own: one answer in 25 is wrong in every cell; half of them in a single cell;
    a tenth of the steps loses its drafts in both topologies alike; and as much as other chunks may change."""
    defects = (
        Defect(share=1 / 25, cells="", scenario="pressure"),
        Defect(share=0.5, cells=EAGLE, scenario="prefix-hit-on-p"),
        *(Defect(drafts=0.1, cells=f"{t}-eagle3+llama31-8b", scenario="prefix-hit") for t in ("pd", "single")),
        Defect(drafts=0.025, cells="single-eagle3+qwen3-8b", scenario="concurrent"),
    )
    # What fails in one stage, at the level that the first of two has, has failed.
    judging = {"permutations": 1000, "stages": 1, "family_alpha": 2 * Judging(tier="normal").stage_alpha}
    simulated = Nights(prepare("nightly", STATES, planned=True), **judging).night(1, *defects)
    found = failed(judge(simulated.night, simulated.baselines))
    assert {scenario for _, scenario, _ in found} == {"pressure", "prefix-hit-on-p", "prefix-hit"}
    assert ("single-none+qwen3-8b.tight", "pressure", "pooled") in found
    assert {(EAGLE, "prefix-hit-on-p", check) for check in ("survival", "rescored", "pooled")} <= found
    assert {cell for cell, scenario, _ in found if scenario == "prefix-hit-on-p"} == {EAGLE}
    lost = {(cell, check) for cell, scenario, check in found if scenario == "prefix-hit"}
    assert lost == {(f"{t}-eagle3+llama31-8b.tight", "acceptance-cold") for t in ("pd", "single")}
