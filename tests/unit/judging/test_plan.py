"""The plan as evidence: what was to be sent is what was answered, once, and nothing else."""

from __future__ import annotations

import pytest

from harness.errors import DataError
from harness.history.folder import load_history
from harness.history.plan import contradictions, plan_key
from harness.history.verdict import Verdict
from harness.judging.checks import counters, responses
from harness.judging.checks.registry import judge
from harness.judging.references import References
from harness.profiles.load import load_profile
from harness.profiles.scenarios import Abandon
from harness.reports.judge_run import check
from harness.workload.expected import lacking
from harness.workload.prepare import prepare
from harness.workload.rows import planned_rows
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import (
    COUNTERS,
    change_final,
    engine,
    history,
    lookups,
    observation,
    view,
    with_answers,
    with_cells,
    with_run,
    written_run,
)

LENGTHS = [31, 32, 40]


def night(cell: str = "pd-eagle3"):
    return history([observation(cell, n, sequence=i) for i, n in enumerate(LENGTHS)])


def messages(result):
    return [f.message for f in result.findings]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 1}, "max_tokens 1 instead of None"),
        ({"route": "local"}, "route local instead of cell"),
        ({"temperature": 0.5}, "temperature 0.5 instead of 0.0"),
        ({"concurrent": 3}, "concurrent 3 instead of 1"),
        ({"abandon": Abandon(after_s=1)}, "abandon leg='decode' after_steps=None after_s=1.0 instead of None"),
        ({"sequence": 7}, "sequence 7 instead of 1"),
        ({"sent_ids": (7, 7, 7)}, "another prompt, source or known answer"),
        ({"known_answer": (9,)}, "another prompt, source or known answer"),
        ({"legs": ()}, "answers of no engine instead of prefill and decode"),
        (
            {"engine_roles": ("single",)},
            "expected an answer of the engines of this cell, decode, prefill, found one of",
        ),
    ],
)
def test_request_that_was_sent_otherwise_than_planned_is_unknown(change, words):
    made = night()
    first, second, third = made.observations
    result = responses.complete(view(with_answers(made, (first, second.model_copy(update=change), third)), "pd-eagle3"))
    assert result.verdict is Verdict.UNKNOWN
    assert any(words in m for m in messages(result)), messages(result)


def test_second_answer_never_stands_for_a_first():
    made = night()
    wrong = change_final(made.observations[0], output_ids=(9, 9))
    for answers in ((wrong, *made.observations), (*made.observations, wrong)):
        result = responses.complete(view(with_answers(made, answers), "pd-eagle3"))
        assert result.verdict is Verdict.UNKNOWN
        assert "expected one answer to this request, found 2" in messages(result)[0]


def test_missing_request_is_named_and_a_strange_one_does_not_replace_it():
    made = night()
    strange = made.observations[0].model_copy(update={"prompt_id": "p99"})
    result = responses.complete(view(with_answers(made, (strange, *made.observations[1:])), "pd-eagle3"))
    assert any("without an answer: p31" in m for m in messages(result))
    assert any("an answer to a request that the plan does not have" in m for m in messages(result))


def test_record_that_does_not_say_what_was_planned_is_unknown():
    assert responses.complete(view(with_cells(night(), plan=None), "pd-eagle3")).verdict is Verdict.UNKNOWN


def test_answers_of_a_cell_that_was_not_to_run_keep_the_run_from_passing():
    made = night("single-none")
    assert judge(made, lookups(LENGTHS)).verdict is Verdict.PASS
    strange = observation("single-eagle3", 40)
    judgement = judge(with_answers(made, (*made.observations, strange)), lookups(LENGTHS))
    assert judgement.verdict is Verdict.UNKNOWN
    assert any("single-eagle3: it has answers of cold" in n for n in judgement.notices)


def edited(folder, **changes):
    return written_run(folder, with_cells(night("single-none"), **changes.pop("cell", {})), **changes)


def test_record_that_contradicts_itself_is_refused(tmp_path):
    made = night("single-none")
    (rows,) = made.run.plans.values()
    for name, changes, words in (
        ("rows", {"plans": {made.run.cells[0].plan: rows[:1]}}, "to have this hash"),
        ("gone", {"plans": {}}, "expected its plan"),
        ("twice", {"plans": {plan_key((*rows, rows[0])): (*rows, rows[0])}}, "has a request twice"),
        ("count", {"cell": {"planned": 1}}, "as many requests of cold as its plan has, 3, found 1"),
        ("drafts", {"cell": {"draft_tokens": 3}, "identities": {"none": {"draft_tokens": 0}}}, "draft_tokens as in"),
        ("counted", {"cell": {"plan": "counted"}}, "expected its plan, found only counts"),
    ):
        with pytest.raises(DataError, match="contradicts itself") as caught:
            load_history(edited(tmp_path / name, **changes))
        assert words in str(caught.value)
    assert load_history(edited(tmp_path / "right")).run.cells[0].planned == 3


def test_run_of_fewer_requests_does_not_pass_for_its_profile():
    prepared = prepare("cpu-quick", ["single-*"])
    rows = {w.cell.id: planned_rows(w, 192) for w in prepared.works}
    made = night("single-none").run
    cells = tuple(
        made.cells[0].model_copy(
            update={"cell": w.cell.id, "plan": plan_key(rows[w.cell.id]), "draft_tokens": w.cell.method.draft_tokens}
        )
        for w in prepared.works
    )
    run = made.model_copy(
        update={
            "cells": cells,
            "plans": {plan_key(of): of for of in rows.values()},
            "profile": load_profile("cpu-quick").model_dump(mode="json"),
            "rescore": True,
        }
    )
    found = lacking(run, "cpu-quick")
    assert found and all(words.startswith("pd-") and "no such cell" in words for words in found)
    fewer = {key: of[1:] for key, of in run.plans.items()}
    assert any(
        "single-none: expected the plan" in w for w in lacking(run.model_copy(update={"plans": fewer}), "cpu-quick")
    )
    softer = {**run.profile, "judging": {**run.profile["judging"], "near_tie_nats": 9.0}}
    assert any("judging.near_tie_nats" in w for w in lacking(run.model_copy(update={"profile": softer}), "cpu-quick"))
    assert list(contradictions(run.model_copy(update={"plans": fewer})))
    scenarios = run.profile["scenarios"]
    other = [{**s, "rounds": 99} if s["id"] == "concurrent" else s for s in scenarios if s["id"] != "prefix-hit"]
    other = {**run.profile, "scenarios": other}
    assert lacking(run.model_copy(update={"profile": other}), "cpu-quick")[:2] == [
        "scenarios.prefix-hit: expected one, found none",
        "scenarios.concurrent.rounds: expected 3, found 99",
    ]
    turned = {**run.profile, "scenarios": scenarios[::-1]}
    assert "scenarios: expected the order" in lacking(run.model_copy(update={"profile": turned}), "cpu-quick")[0]
    # What nobody looked at, and drafts that P does not make.
    unseen = {**run.profile, "witness": "off"}
    assert "witness: expected 'kv', found 'off'" in lacking(run.model_copy(update={"profile": unseen}), "cpu-quick")
    methods = [{**m, "prefill_num_speculative_tokens": 1} if m["kind"] == "mtp" else m for m in run.profile["methods"]]
    other = {**run.profile, "methods": methods}
    assert "methods.mtp.prefill_num_speculative_tokens: expected none, found 1" in lacking(
        run.model_copy(update={"profile": other}), "cpu-quick"
    )


def test_a_run_without_the_whole_plan_says_so_once_and_first():
    summary = check(RUNS / "pass", References(BASELINES, expect="cpu-quick")).summary
    assert summary.verdict is Verdict.UNKNOWN
    assert summary.sentence.startswith("expected the whole plan of profile cpu-quick, found ")
    assert summary.sentence == f"{summary.judgement.notices[0]}."


# --- counters --------------------------------------------------------------------------------------------------------


def test_counter_that_nobody_counts_is_unknown_and_named():
    roles = ("prefill", "decode")
    for names, words in (
        (tuple(set(COUNTERS) - {"nixl_expired"}), "nixl_expired"),
        (None, "does not say what it counts"),
    ):
        made = with_run(night(), engines=tuple(engine("pd-eagle3", role, names=names) for role in roles))
        result = counters.counters_offered(view(made, "pd-eagle3"))
        assert result.verdict is Verdict.UNKNOWN
        assert any(words in m for m in messages(result))
    assert counters.counters_offered(view(night(), "pd-eagle3")).verdict is Verdict.PASS


def test_version_that_is_known_to_lack_a_counter_is_not_blamed():
    names = tuple(n for n in COUNTERS if not n.startswith("prompt_tokens_"))
    engines = tuple(engine("pd-eagle3", role, names=names) for role in ("prefill", "decode"))
    made = with_run(night(), engines=engines, lacking={"prompt tokens by source": "…"})
    assert counters.counters_offered(view(made, "pd-eagle3")).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("finished_requests", 2.0),
        ("prompt_tokens", 1.0),
        ("generation_tokens", 0.0),
        ("prompt_tokens_local_compute", 5.0),
        ("prefix_hits", 32.0),
        ("accepted_tokens", 1.0),
        ("drafts", 9.0),
        ("accepted_at_0", 0.0),
        ("nixl_transfers", 2.0),
        ("engine_steps", 0.0),
        ("engine_steps_le_8", 99.0),
    ],
)
def test_counter_that_is_not_the_answers_is_unknown(name, value):
    made = night()
    first, *others = made.observations
    changed = change_final(first, counters={**first.final.counters, name: value})
    result = counters.counters_agree(view(with_answers(made, (changed, *others)), "pd-eagle3"))
    assert result.verdict is Verdict.UNKNOWN
    assert {f.prompt_id for f in result.findings} == {"p31"}
    assert counters.counters_agree(view(made, "pd-eagle3")).verdict is Verdict.PASS


def test_answer_without_counters_is_unknown():
    made = night()
    changed = change_final(made.observations[0], counters={})
    result = counters.counters_agree(view(with_answers(made, (changed, *made.observations[1:])), "pd-eagle3"))
    assert messages(result) == ["expected counters of the decode engine for this request, found none"]


def test_request_after_one_that_broke_is_not_blamed_for_what_both_moved():
    made = night()
    broke = made.observations[0].model_copy(update={"error": "cut"})
    after = made.observations[1]
    after = change_final(after, counters={**after.final.counters, "nixl_transfers": 2.0})
    result = counters.counters_agree(view(with_answers(made, (broke, after, made.observations[2])), "pd-eagle3"))
    assert result.verdict is Verdict.PASS
