"""Cold prompts that are asked several at once: which go together, and what is planned for them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.history.identity import identity_of
from harness.profiles.cells import all_cells
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.profiles.scenarios import AT_ONCE
from harness.prompts.lengths import blocks
from harness.prompts.model import load_prompts
from harness.workload.at_once import AtOnce, Item, arranged, rounds
from harness.workload.cells import RECORDING, CellWork, Choice, cell_work, choose_scenarios, in_other_crowds
from harness.workload.prepare import prepare
from harness.workload.rows import planned_rows
from tests.support.builders import extending

CPU = load_profile("cpu")
PROMPTS = load_prompts(CPU.workload.prompts)
CELLS = {c.id: c for c in all_cells(CPU)}


def profile(at_once: int = 8, tier: str = "bitwise", **engine: object) -> Profile:
    workload = CPU.workload.model_copy(update={"at_once": at_once})
    judging = CPU.judging.model_copy(update={"tier": tier})
    changed = CPU.engine.model_copy(update=engine)
    return CPU.model_copy(update={"workload": workload, "judging": judging, "engine": changed})


COLD_ONLY = Choice(scenarios=("cold",))
ROOMY = {"kv_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 4096}


def work(made: Profile, cell: str = "pd-eagle3", choice: Choice = COLD_ONLY) -> CellWork:
    return cell_work(made, PROMPTS, CELLS[cell], choice)


def test_by_default_cold_prompts_are_asked_one_by_one():
    found = work(CPU)
    assert found.at_once is None
    assert {len(r.items) for r in found.rounds} == {1}
    assert AT_ONCE not in found.planned


def test_the_first_crowd_is_asked_alone_and_once_more_together():
    found = work(profile(8, **ROOMY))
    assert found.at_once is not None and found.at_once.alone == 8
    assert found.planned == {AT_ONCE: 8}
    assert found.proof is not None
    assert [s.prompt.id for s in found.proof.sends] == [i.prompt.id for i in found.items[:8]]
    assert [len(r.items) for r in found.rounds] == [1] * 8 + [8] * 5
    assert found.requests == len(found.items) + 8


def test_the_same_requests_are_sent_whatever_goes_together():
    alone, together = work(CPU), work(profile(8, **ROOMY))
    assert Counter(alone.items) == Counter(together.items)


@pytest.mark.parametrize("cell", ["pd-eagle3", "single-eagle3", "pd-eagle3-router", "single-none"])
@pytest.mark.parametrize("at_once", [2, 4, 8, 32])
def test_a_crowd_leaves_each_request_computed_as_it_is_alone(cell, at_once):
    made = profile(at_once)
    found = work(made, cell)
    in_turn = cell == "pd-eagle3"
    for asked in found.rounds:
        if len(asked.items) == 1:
            continue
        prompts = [i.prompt for i in asked.items]
        # A row for each, no prompt in chunks, and no preemption.
        assert len(prompts) <= min(at_once, made.engine.max_num_seqs)
        tokens = sum((1 if in_turn else p.tokens) + found.cell.method.draft_tokens + 1 for p in prompts)
        assert tokens <= made.engine.max_num_batched_tokens
        wanted = [p.tokens + len(p.expected) + found.cell.method.lookahead for p in prompts]
        assert sum(blocks(n, made.engine.block_size) for n in wanted) < made.engine.kv_blocks


def test_p_computes_each_prompt_alone_so_that_more_go_together_behind_it():
    handed, alone = work(profile(4), "pd-eagle3"), work(profile(4), "single-eagle3")
    assert len(handed.rounds) < len(alone.rounds)
    assert handed.proof is not None and all(stage.p_in_turn for stage in handed.proof.stages)


def test_in_the_normal_tier_nothing_has_to_be_proven():
    found = work(profile(8, "normal", **ROOMY))
    assert found.proof is None and AT_ONCE not in found.planned
    # Some are alone, by whose transfers the bytes of a block are known.
    assert [len(r.items) for r in found.rounds][:6] == [1, 1, 1, 1, 8, 8]


def test_baselines_are_recorded_one_by_one_for_answers_that_are_compared_one_by_one():
    assert work(profile(8, **ROOMY), "single-eagle3", RECORDING).at_once is None
    assert work(profile(8, "normal", **ROOMY), "single-eagle3", RECORDING).at_once is not None


def test_a_repetition_asks_the_same_in_other_crowds_where_their_noise_is_measured():
    made = profile(8, "normal", **ROOMY)
    found = work(made, "single-eagle3", RECORDING)
    again = in_other_crowds(found, made, 2)
    assert Counter(again.items) == Counter(found.items) and again.items != found.items
    crowds = [{frozenset(i.prompt.id for i in r.items) for r in w.rounds if len(r.items) > 1} for w in (found, again)]
    assert len(crowds[0]) > 3 and not crowds[0] & crowds[1]
    proven = work(profile(8, **ROOMY))
    assert in_other_crowds(proven, made, 2) == proven


def test_a_baseline_of_the_normal_tier_belongs_to_crowds_of_its_size():
    def told(made: Profile) -> dict:
        return identity_of(made, CELLS["single-eagle3"].method, "p").model_dump(mode="json")

    assert told(profile(8, "normal"))["at_once"] == 8
    assert "at_once" not in told(profile(1, "normal")) and "at_once" not in told(profile(8))


def test_one_prompt_is_asked_alone():
    found = work(profile(8, **ROOMY), choice=Choice(scenarios=("cold",), prompts=("copy-096-19",), texts=0))
    assert found.at_once is None and found.requests == 1


def test_the_proof_can_be_asked_for_by_itself():
    found = work(profile(8, **ROOMY), choice=Choice(scenarios=(AT_ONCE,)))
    assert found.items == () and [s.scenario for s in found.scripts] == [AT_ONCE]
    assert found.requests == 8


def test_the_plan_has_every_request_in_the_order_of_sending():
    found = work(profile(8, **ROOMY))
    rows = planned_rows(found, 192)
    assert [r.sequence for r in rows] == list(range(found.requests))
    assert [r.concurrent for r in rows] == [1] * 8 + [8] * 48
    assert [r.scenario for r in rows] == ["cold"] * 8 + [AT_ONCE] * 8 + ["cold"] * 40
    assert [r.stage for r in rows if r.scenario == "cold"][8:] == [n for n in range(1, 6) for _ in range(8)]
    assert len({r.place for r in rows}) == len(rows)


@given(
    st.integers(0, 40),
    st.builds(AtOnce, st.integers(0, 20), st.lists(st.integers(1, 9), max_size=8).map(tuple), st.booleans()),
)
def test_rounds_are_the_requests_in_their_order(count, at_once):
    items = [Item(p, "ids") for p in PROMPTS.prompts[:count]]
    asked = rounds(items, at_once)
    assert [i for r in asked for i in r.items] == items
    assert all(r.number > 0 for r in asked if len(r.items) > 1)


@given(st.integers(2, 40), st.integers(20, 400), st.integers(64, 5000))
def test_arranging_loses_nothing(at_once, pool, budget):
    items = [Item(p, "ids") for p in PROMPTS.cold]
    made = profile(at_once, kv_blocks=pool, max_num_batched_tokens=budget, max_num_seqs=16)
    found, divided = arranged(items, made, CELLS["single-dflash"])
    assert Counter(found) == Counter(items)
    assert divided is None or divided.alone + sum(divided.crowds) == len(items)


def test_the_scenario_is_known_where_it_is_asked(tmp_path):
    source = extending(tmp_path, workload={"at_once": 4})
    assert choose_scenarios(load_profile(source), [AT_ONCE]).scenarios == {AT_ONCE}
    with pytest.raises(UsageError):
        choose_scenarios(CPU, [AT_ONCE])
    (made,) = prepare(source, ["pd-eagle3"], ["cold", AT_ONCE]).works
    assert made.planned == {AT_ONCE: 4}


def test_the_name_is_reserved(tmp_path):
    scenario = {"id": AT_ONCE, "kind": "refill", "prompts": ["copy-117-22"], "fill": ["long-222"]}
    with pytest.raises(Exception, match="at-once"):
        load_profile(extending(tmp_path, scenarios=[scenario]))


def test_crowds_make_a_run_shorter_by_plan(tmp_path):
    one = prepare("cpu", ["*-eagle3"], ["cold"])
    four = prepare(extending(tmp_path, workload={"at_once": 4}), ["*-eagle3"], ["cold"])
    assert four.expected_s - four.starts_s < 0.9 * (one.expected_s - one.starts_s)
