"""What judging once said wrongly of faults that it had found, each with the history that brought it about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.judging.checks.drafting import acceptance_baseline
from harness.judging.checks.registry import judge
from harness.judging.checks.rescored import rescored
from harness.judging.diagnosis.diagnose import diagnose
from harness.judging.findings import CheckResult
from harness.judging.known_defects import apply_known
from harness.judging.references import baselines_for
from harness.judging.rounding import bounds
from harness.profiles.known_defects import Entry, KnownDefect, KnownDefects, load_known
from harness.profiles.load import load_profile
from harness.util.paths import REPOSITORY
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import (
    LENGTHS,
    change_final,
    flawless,
    garbled,
    history,
    known_entry,
    lookups,
    observation,
    rescoring,
    speculation,
    view,
    with_answers,
    with_profile,
    with_run,
)


def fewer(o):
    """The same answer, each of whose steps accepts one draft less, in twice as many steps."""
    steps = o.final.speculation.per_step_accepted
    return change_final(o, speculation=speculation(tuple(0 for _ in range(sum(n + 1 for n in steps)))))


def listed(**changes) -> KnownDefects:
    defect = KnownDefect.model_validate(known_entry(**changes))
    return KnownDefects(REPOSITORY / "known-defects.yaml", (Entry(defect, 1, 2),))


# --- 1: a class that changes, and "fixed?" ---------------------------------------------------------------------------

DRAFTS = {"classes": ["drafter-kv"], "cells": ["pd-eagle3"], "checks": ["acceptance-*"], "at_most": 4}


def run_of(observations):
    """A run on a day and with a version that the entry is for."""
    return with_run(history(observations), started="2026-03-02T00:00:00+00:00", versions={"vllm": "0.32.0"})


def broken_drafts(single: int | None):
    """A run whose pair drafts worse at 40 tokens, and whose single engine does at others, or at none."""
    worse = {("pd-eagle3", 40), ("single-eagle3", single)}
    return run_of([fewer(o) if (o.cell, len(o.sent_ids)) in worse else o for o in flawless()])


def test_a_single_engine_that_fails_elsewhere_does_not_unmask_what_is_known():
    for single in (None, 65):
        made = broken_drafts(single)
        judgement = apply_known(judge(made, lookups(LENGTHS)), listed(**DRAFTS), made)
        mine = [f for f in judgement.findings if f.cell == "pd-eagle3" and f.prompt_id == "p40"]
        assert mine and {f.known for f in mine} == {"wrong-tokens"}
        assert {f.damage for f in mine} == {"sampler" if single else "drafter-kv"}
        assert {f.taken_for for f in mine} == {"drafter-kv" if single else None}
        assert not any("if it is fixed" in n for n in judgement.notices)


def test_an_entry_whose_cell_fails_otherwise_is_not_called_fixed():
    made = run_of([garbled(o) if o.cell == "pd-eagle3" else o for o in flawless()])
    entry = {**DRAFTS, "checks": ["acceptance-*", "tokens-baseline"], "runs_on": True, "classes": ["sampler"]}
    judgement = apply_known(judge(made, lookups(LENGTHS)), listed(**entry), made)
    (notice,) = [n for n in judgement.notices if "covers nothing in" in n]
    assert "pd-eagle3, which fails otherwise than it says" in notice and "if it is fixed" not in " ".join(
        judgement.notices
    )
    fine = run_of(flawless())
    assert any("if it is fixed" in n for n in apply_known(judge(fine, lookups(LENGTHS)), listed(**entry), fine).notices)


# --- 2: a place read from a hit that was counted before its transfer failed ------------------------------------------


@pytest.mark.parametrize("failed", [0.0, 1.0])
def test_a_prompt_that_d_computed_by_itself_misses_no_blocks(failed):
    """D counts what it expects of a transfer as a hit, and then computes the prompt."""
    o = observation("pd-none", 117)
    counters = {"external_hits": 116.0, "prompt_tokens_local_compute": 117.0, "nixl_failed_transfers": failed}
    wrong = garbled(change_final(o, counters={k: v for k, v in counters.items() if v}))
    (cell,) = judge(history([wrong]), lookups([117])).cells
    text = cell.diagnosis.location.text
    assert "no byte moved" not in text and "are missing" not in text
    why = "after 1 failed transfer" if failed else "without a transfer"
    assert f"D computed all 117 prompt tokens by itself, {why}" in text


def test_a_hit_of_which_nothing_moved_still_misses_its_blocks():
    o = observation("pd-none", 117)
    wrong = garbled(change_final(o, counters={"external_hits": 116.0, "prompt_tokens_external_kv_transfer": 116.0}))
    (cell,) = judge(history([wrong]), lookups([117])).cells
    assert "no byte moved: all 4 blocks are missing" in cell.diagnosis.location.text


# --- 3: DRIFT against a recording of other engines -------------------------------------------------------------------


def test_engines_of_another_kind_than_recorded_have_not_drifted():
    """All engines of the run say otherwise than those of the other runner, whose record they are to be held against."""
    made = history([garbled(o).model_copy(update={"known_answer": None}) for o in flawless()])
    same = lookups(LENGTHS)
    across = {name: found._replace(across=("model_runner",)) for name, found in same.items()}
    drifted, held = ([f for f in judge(made, by).findings if f.check == "tokens-baseline"] for by in (same, across))
    assert {f.verdict for f in drifted} == {Verdict.DRIFT} and {f.damage for f in drifted} == {"engine-changed"}
    assert {f.verdict for f in held} == {Verdict.REGRESSION} and "engine-changed" not in {f.damage for f in held}
    assert {f.damage for f in held if f.cell.startswith("pd")} == {"sampler"}
    assert all("those that recorded it said otherwise" in f.message for f in held)


def test_drafts_of_another_runner_are_no_drift_and_no_improvement():
    made = history([fewer(o) if o.cell.endswith("-eagle3") else o for o in flawless()])
    across = {name: found._replace(across=("model_runner",)) for name, found in lookups(LENGTHS).items()}
    verdicts = [
        {f.verdict for f in judge(made, by).findings if f.check == "acceptance-baseline"}
        for by in (lookups(LENGTHS), across)
    ]
    assert verdicts == [{Verdict.DRIFT}, {Verdict.REGRESSION}]


@pytest.mark.parametrize(
    ("across", "dtype", "lost", "fails"),
    [
        # One draft of 30 steps, as DFlash with Triton's attention had on an H200: a near tie that is rounded otherwise.
        ("attention_backend", "bfloat16", 1, False),
        ("enforce_eager", "bfloat16", 1, False),
        # Lost KV is no rounding; numbers of 32 bits, and the same kernels, round no draft away.
        ("attention_backend", "bfloat16", 10, True),
        ("attention_backend", "float32", 1, True),
        ("model_runner", "bfloat16", 1, True),
        ("extra_args", "bfloat16", 1, True),
    ],
)
def test_kernels_that_round_otherwise_may_turn_a_draft(across, dtype, lost, fails):
    o = observation("single-eagle3", 65)
    steps = o.final.speculation.per_step_accepted
    fewer_accepted = (*(0 for _ in range(2 * lost)), *steps[lost:])
    changed = change_final(o, speculation=speculation(fewer_accepted))
    engine = {"device": "gpu", "dtype": dtype, "kv_buffer_device": "cuda"}
    made = history([changed])
    made = with_profile(made, engine=engine)
    by = {name: found._replace(across=(across,)) for name, found in lookups([65]).items()}
    found = [f for f in judge(made, by).findings if f.check == "acceptance-baseline"]
    assert {f.verdict for f in found} == ({Verdict.REGRESSION} if fails else set())


# --- 4: drafts that differ where rows move ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "concurrent", "single", "damage"),
    [
        (Verdict.PASS, 3, True, "sampler"),
        (Verdict.REGRESSION, 3, True, "drafter-kv"),
        (None, 3, True, "drafter-kv"),
        (Verdict.PASS, 1, True, "drafter-kv"),
        (Verdict.PASS, 3, False, "drafter-kv"),
    ],
)
def test_drafts_exchanged_between_rows_are_not_kv(kv, concurrent, single, damage):
    rows = []
    for cell in ("pd-eagle3", "single-eagle3"):
        crowd = [observation(cell, n, scenario="concurrent", concurrent=concurrent) for n in (40, 65)]
        rows += [observation(cell, n) for n in (40, 65)]
        rows += [fewer(o) for o in crowd] if single or cell == "pd-eagle3" else crowd
    cell = view(history(rows, scenarios=[]), "pd-eagle3", lookups([40, 65]), scenario="concurrent")
    noted = CheckResult(check="kv-computed", cell="pd-eagle3", verdict=kv or Verdict.PASS, judged=2)
    results = [acceptance_baseline(cell), *([noted] if kv is not None else [])]
    assert diagnose(cell, results).damage == damage


# --- 6: what a known defect of sampling looks like -------------------------------------------------------------------


def sampled(change):
    """The recorded run with the known defect, whose sampled answers with speculation a test changes."""
    recorded = load_history(RUNS / "known")
    mine = ("single-eagle3", "sampled")
    changed = with_answers(recorded, (change(o) if (o.cell, o.scenario) == mine else o for o in recorded.observations))
    shipped = load_known(REPOSITORY / "known-defects.yaml")
    return apply_known(judge(changed, baselines_for(changed, BASELINES)), shipped, changed)


def test_draws_that_the_engine_finds_impossible_are_the_known_defect():
    judgement = sampled(lambda o: o)
    assert judgement.verdict is Verdict.KNOWN


def test_an_engine_that_is_sure_of_wrong_tokens_has_another_defect():
    """So it is where the KV is wrong: it copies other tokens, and finds each of them right."""
    sure = sampled(lambda o: change_final(o, chosen_logprobs=tuple(-1e-4 for _ in o.final.chosen_logprobs)))
    assert sure.verdict is Verdict.REGRESSION
    assert not [f for f in sure.findings if f.known == "cpu-sampled-with-speculation"]


def attacked(change=lambda recorded, o: o):
    """A recorded run of real engines with answers that a test changes, judged with the references of its own."""
    recorded = load_history(RUNS.parent / "attacked")
    changed = with_answers(recorded, (change(recorded, o) for o in recorded.observations))
    references = baselines_for(changed, recorded.folder / "references" / "baselines")
    return apply_known(judge(changed, references), load_known(REPOSITORY / "known-defects.yaml"), changed)


def test_a_pair_gives_the_first_token_in_a_verify_step_too():
    """All four answers of the pair are wrong from token 0 on."""
    found = [f for f in attacked().findings if f.scenario == "sampled" and f.verdict is not Verdict.UNKNOWN]
    assert {f.cell for f in found} == {"pd-eagle3", "single-eagle3"}
    assert {f.known for f in found} == {"cpu-sampled-with-speculation"}
    assert {f.first_wrong for f in found if f.cell == "pd-eagle3"} >= {0}


def test_the_single_engine_may_go_wrong_before_the_pair_does():
    """Three tokens of the pair are right; the single engine has gone wrong by then."""

    def later(recorded, o):
        if (o.cell, o.scenario, o.form) != ("pd-eagle3", "sampled", "ids"):
            return o
        right = recorded.of("single-none", "ids", "sampled")
        outputs = (*right[o.key].final.output_ids[:3], *o.final.output_ids[3:])
        return change_final(o, output_ids=outputs, chosen_logprobs=(*[0.0] * 3, *o.final.chosen_logprobs[3:]))

    found = [f for f in attacked(later).findings if f.cell == "pd-eagle3" and f.check == "tokens-single"]
    assert [f.first_wrong for f in found if f.scenario == "sampled"] == [1] * 4
    assert {f.known for f in found} == {"cpu-sampled-with-speculation"}


def test_both_may_say_the_same_wrong_token_and_part_behind_it():
    """The pair repeats what the single engine says up to its first wrong token; then both say what is likely enough."""

    def behind(recorded, o):
        if o.scenario != "sampled" or o.form != "ids" or o.cell not in ("pd-eagle3", "single-eagle3"):
            return o
        twin = recorded.of("single-eagle3", "ids", "sampled")[o.key].final
        at = next(i for i, value in enumerate(twin.chosen_logprobs) if i and value < -10) + 1
        other = twin.output_ids[at] + (o.cell == "pd-eagle3")
        rest = o.final.output_ids[at + 1 :], o.final.chosen_logprobs[at + 1 :]
        return change_final(
            o,
            output_ids=(*twin.output_ids[:at], other, *rest[0]),
            chosen_logprobs=(*twin.chosen_logprobs[:at], -1.84, *rest[1]),
        )

    found = [f for f in attacked(behind).findings if f.cell == "pd-eagle3" and f.check == "tokens-single"]
    mine = [f for f in found if f.scenario == "sampled"]
    assert len(mine) == 4 and {f.known for f in mine} == {"cpu-sampled-with-speculation"}


def test_an_answer_that_is_wrong_from_its_first_token_on_has_another_defect():
    wrong = sampled(lambda o: change_final(o, output_ids=(o.final.output_ids[0] + 1, *o.final.output_ids[1:])))
    found = [f for f in wrong.findings if f.first_wrong == 0]
    assert found and not any(f.known for f in found) and wrong.verdict is Verdict.REGRESSION


# --- 7: wrong log-probs of prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("parted", "damage"), [(False, "sampler"), (True, "target-kv")])
def test_wrong_logprobs_of_prompts_are_no_kv_where_the_plain_engine_said_the_same(parted, damage):
    o, plain = observation("pd-none", 40), observation("single-none", 40)
    if parted:
        plain = garbled(plain)
    output = o.final.output_ids
    read = rescoring(o.prompt_id, o.sent_ids, output, gaps=(0.0, 9.0, *[0.0] * (len(output) - 2)))
    result = rescored(view(history([o, plain, read]), "pd-none", lookups([40])))
    (finding,) = result.findings
    assert finding.damage == damage and ("its log-probs of prompts are wrong" in finding.message) is not parted


# --- 8: bounds between engines of one run, and against the record of another machine ---------------------------------


def test_engines_of_one_run_may_be_held_closer_together_than_to_another_machines_record():
    judging = load_profile("cpu-hybrid").judging
    assert (judging.logprob_nats, judging.recorded_nats) == (0.35, 0.5)
    cell = view(history([observation("pd-none", 40), observation("single-none", 40)]), "pd-none", lookups([40]))
    found = bounds(replace(cell, judging=judging))
    assert (found.alone, found.beside, found.recorded) == (0.35, 0.35, 0.5)
    both = judging.model_copy(update={"recorded_nats": None})
    assert bounds(replace(cell, judging=both)).recorded == 0.35
