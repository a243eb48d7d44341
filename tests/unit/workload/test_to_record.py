"""A baseline records what a run of its profile may send, and nothing else."""

from collections import Counter

import pytest

from harness.profiles.cells import select_cells
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.workload.cells import RECORDING, SECOND_STAGE, cell_work, to_record


def uses(tier, stages):
    profile = load_profile("smollm2-gpu")
    part = profile.model_copy(update={"judging": profile.judging.model_copy(update={"tier": tier, "stages": stages})})
    prompts = load_prompts(part.workload.prompts)
    (cell,) = select_cells(part, ["single-none"])
    kept = to_record(prompts, part)
    recorded = {i.prompt.id for i in cell_work(part, kept, cell, RECORDING).items}
    return part, prompts, cell, kept, recorded


@pytest.mark.parametrize(
    ("tier", "stages", "held_out"), [("auto", 2, 80), ("normal", 2, 80), ("normal", 1, 0), ("bitwise", 2, 0)]
)
def test_held_out_prompts_are_recorded_where_there_may_be_a_second_stage(tier, stages, held_out):
    part, prompts, cell, kept, recorded = uses(tier, stages)
    expected = {"cold": 80, "held-out": held_out, "scenario": 19}
    assert Counter(p.use for p in kept.prompts) == {use: n for use, n in expected.items() if n}
    assert recorded == {p.id for p in kept.prompts}
    run = cell_work(part, prompts, cell)
    assert {i.prompt.id for i in run.items} <= recorded
    if held_out:
        assert {i.prompt.id for i in cell_work(part, prompts, cell, SECOND_STAGE).items} <= recorded


def test_a_profile_with_fewer_prompts_per_stratum_records_fewer():
    part, prompts, _, kept, _ = uses("auto", 2)
    fewer = part.model_copy(update={"workload": part.workload.model_copy(update={"per_stratum": 2})})
    left = to_record(prompts, fewer)
    assert Counter(p.use for p in left.prompts) == {"cold": 8, "held-out": 8, "scenario": 19}
    assert {p.id for p in left.prompts} < {p.id for p in kept.prompts}
