"""Log-probs: damage that leaves all tokens right fails, is located, and what is right stays green."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from harness.baselines.lookup import Lookup
from harness.history.folder import load_history
from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.checks.logprobs import has_reference, logprobs_baseline, logprobs_single, prompt_logprobs
from harness.judging.checks.registry import judge
from harness.judging.references import References, lookups_for
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import (
    LENGTHS,
    change_final,
    changed_rows,
    flawless,
    history,
    lookups,
    observation,
    view,
    with_answers,
)


def moved(o: Observation, gap: float = -4.0, chosen: float = 0.0, tokens: range | None = None) -> Observation:
    """The same answer, whose log-probs moved by this at some of its tokens."""
    final = o.final
    at = range(len(final.output_ids)) if tokens is None else tokens
    return change_final(
        o,
        top_gaps=tuple(g + gap * (i in at) for i, g in enumerate(final.top_gaps)),
        chosen_logprobs=tuple(c + chosen * (i in at) for i, c in enumerate(final.chosen_logprobs)),
    )


def verdicts(judgement, cell: str) -> dict[str, Verdict]:
    return {r.check: r.verdict for c in judgement.cells if c.cell == cell for r in c.results}


@pytest.mark.parametrize("change", [{"gap": -4.0}, {"gap": 0.0, "chosen": -4.0}])
def test_moved_logprobs_with_all_tokens_right_are_a_regression(change):
    made = [moved(o, **change) if o.cell == "pd-eagle3" else o for o in flawless()]
    judgement = judge(history(made), lookups(LENGTHS))
    found = verdicts(judgement, "pd-eagle3")
    assert found["tokens-reference"] is found["tokens-baseline"] is Verdict.PASS
    assert found["logprobs-single"] is Verdict.REGRESSION
    assert judgement.verdict is Verdict.REGRESSION
    assert verdicts(judgement, "single-eagle3")["logprobs-baseline"] is Verdict.PASS
    (diagnosis,) = [c.diagnosis for c in judgement.cells if c.cell == "pd-eagle3"]
    assert diagnosis.damage == "target-kv" and diagnosis.failed == len(LENGTHS)


def test_one_prompt_length_gives_a_law_and_log_probs_name_no_block():
    """Only the prompts of 65 tokens are damaged, and only where their second block is copied, which may be its
    neighbour's damage."""
    second = range(30, 61)
    made = [moved(o, tokens=second) if (o.cell, len(o.sent_ids)) == ("pd-eagle3", 65) else o for o in flawless()]
    judgement = judge(history(made), lookups(LENGTHS))
    (diagnosis,) = [c.diagnosis for c in judgement.cells if c.cell == "pd-eagle3"]
    assert diagnosis.location.blocks == () and diagnosis.location.position is None
    assert "those that copy block 1 moved most" in diagnosis.location.text
    assert "the damage is there or in what is copied just before or after" in diagnosis.location.text
    assert "65" in diagnosis.law.text
    (finding,) = [f for f in judgement.findings if f.check == "logprobs-single"]
    assert finding.evidence.logprob_position == 30 and "first at output token 30" in finding.message


def test_rounding_below_the_bound_passes_and_a_shared_batch_may_round_more():
    single = observation("single-eagle3", 40)
    for gap, concurrent, verdict in (
        (5e-6, 1, Verdict.PASS),
        (5e-5, 1, Verdict.REGRESSION),
        (5e-4, 3, Verdict.PASS),
        (5e-3, 3, Verdict.REGRESSION),
    ):
        o = moved(observation("pd-eagle3", 40, concurrent=concurrent), gap)
        cell = view(history([o, single]), "pd-eagle3")
        set_ = replace(cell, judging=cell.judging.model_copy(update={"logprob_nats": 1e-5}))
        assert logprobs_single(set_).verdict is verdict


def test_bound_is_a_setting():
    pair = history([moved(observation("pd-eagle3", 40), 0.5), observation("single-eagle3", 40)])
    cell = view(pair, "pd-eagle3")
    wide = replace(cell, judging=cell.judging.model_copy(update={"logprob_nats": 1.0}))
    assert logprobs_single(wide).verdict is Verdict.PASS


def test_plain_engine_stands_in_for_a_missing_single_engine_and_cold_answers_for_a_missing_scenario():
    plain = observation("single-none", 40)
    assert logprobs_single(view(history([moved(observation("pd-mtp", 40)), plain]), "pd-mtp")).verdict is (
        Verdict.REGRESSION
    )
    late = moved(observation("pd-none", 40, scenario="late-pull"))
    cell = view(history([late, plain], scenarios=[]), "pd-none", scenario="late-pull")
    assert has_reference(cell) and logprobs_single(cell).verdict is Verdict.REGRESSION
    other = view(history([late, observation("single-none", 32)]), "pd-none", scenario="late-pull")
    assert not has_reference(other)


def test_answers_with_other_tokens_are_left_to_the_checks_of_tokens():
    o = observation("pd-none", 40)
    output = o.final.output_ids
    parted = change_final(moved(o), output_ids=(*output[:5], 7, *output[6:]))
    made = history([parted, observation("single-none", 40)])
    assert logprobs_single(view(made, "pd-none")).verdict is Verdict.PASS
    assert judge(made, lookups([40])).verdict is Verdict.REGRESSION


@pytest.mark.parametrize("field", ["top_gaps", "chosen_logprobs"])
@pytest.mark.parametrize("cell", ["pd-none", "single-none"])
def test_missing_logprobs_are_unknown(cell, field):
    made = [observation("pd-none", 40), observation("single-none", 40)]
    made = [change_final(o, **{field: None}) if o.cell == cell else o for o in made]
    assert logprobs_single(view(history(made), "pd-none")).verdict is Verdict.UNKNOWN


def test_missing_answer_or_baseline_is_unknown():
    broken = [observation("pd-none", 40), observation("single-none", 40, error="broke")]
    assert logprobs_single(view(history(broken), "pd-none")).verdict is Verdict.UNKNOWN
    assert logprobs_baseline(view(history(broken), "pd-none")).verdict is Verdict.UNKNOWN
    assert logprobs_baseline(view(history(broken), "pd-none", lookups([32]))).verdict is Verdict.UNKNOWN


def test_smallest_distance_of_the_baseline_shows_what_every_engine_lost():
    judgement = judge(history([moved(o) for o in flawless()]), lookups(LENGTHS))
    assert {verdicts(judgement, c)["logprobs-baseline"] for c in ("pd-none", "single-none", "pd-mtp")} == {
        Verdict.DRIFT
    }
    assert verdicts(judgement, "pd-none")["logprobs-single"] is Verdict.PASS


def test_single_engine_alone_is_not_drift():
    made = [moved(o) if o.cell == "single-eagle3" else o for o in flawless()]
    judgement = judge(history(made), lookups(LENGTHS))
    assert verdicts(judgement, "single-eagle3")["logprobs-baseline"] is Verdict.REGRESSION


def with_gaps(gaps: tuple[float, ...]) -> dict[str, Lookup]:
    return {method: changed_rows(lookup, lambda _: {"gaps": gaps}) for method, lookup in lookups([40]).items()}


def test_baseline_that_has_every_distance_locates_the_change():
    o = observation("pd-eagle3", 40)
    gaps = o.final.top_gaps
    assert logprobs_baseline(view(history([o]), "pd-eagle3", with_gaps(gaps))).verdict is Verdict.PASS
    risen = view(history([moved(o, gap=2.0, tokens=range(7, 8))]), "pd-eagle3", with_gaps(gaps))
    (finding,) = logprobs_baseline(risen).findings
    assert finding.evidence.logprob_position == 7
    assert logprobs_baseline(replace(risen, baselines=lookups([40]))).verdict is Verdict.PASS


def test_logprobs_that_every_engine_moved_show_by_the_baseline_that_has_them():
    o = observation("pd-eagle3", 40)
    kept = {"gaps": o.final.top_gaps, "logprobs": o.final.chosen_logprobs}
    baselines = {method: changed_rows(lookup, lambda _: kept) for method, lookup in lookups([40]).items()}
    assert logprobs_baseline(view(history([o]), "pd-eagle3", baselines)).verdict is Verdict.PASS
    lower = view(history([moved(o, gap=0.0, chosen=-1.0)]), "pd-eagle3", baselines)
    assert logprobs_baseline(lower).verdict is Verdict.REGRESSION
    # By the distances of the two best alone, nothing moved.
    by_distance = logprobs_baseline(replace(lower, baselines=with_gaps(o.final.top_gaps)))
    assert by_distance.verdict is Verdict.PASS and by_distance.note.startswith("1 by the distances only")


def test_first_part_of_an_output_may_lack_the_smallest_distance():
    o = observation("pd-eagle3", 40)
    short = change_final(
        o, output_ids=o.final.output_ids[:4], top_gaps=(12.0,) * 4, chosen_logprobs=(0.0,) * 4
    ).model_copy(update={"max_tokens": 4})
    assert logprobs_baseline(view(history([short]), "pd-eagle3", lookups([40]))).verdict is Verdict.PASS
    below = change_final(short, top_gaps=(5.0,) * 4)
    assert logprobs_baseline(view(history([below]), "pd-eagle3", lookups([40]))).verdict is Verdict.REGRESSION


@pytest.mark.parametrize("run", ["pass", "resumed", "M4", "M3"])
def test_recorded_logprobs_of_right_targets_stay_green(run):
    """Engines agreed bit for bit, also with a drafter that is damaged."""
    made = load_history(RUNS / run)
    judgement = judge(made, lookups_for(made, References(baselines=BASELINES)))
    found = {r.check: r.verdict for c in judgement.cells for r in c.results if r.check.startswith("logprobs")}
    assert found and set(found.values()) == {Verdict.PASS}


def test_recorded_answers_whose_logprobs_are_moved_fail():
    made = load_history(RUNS / "M4")
    rng = random.Random(3)
    changed = (moved(o, rng.uniform(-8, -0.1)) if o.cell == "pd-eagle3" else o for o in made.observations)
    result = logprobs_single(view(with_answers(made, changed), "pd-eagle3"))
    assert result.verdict is Verdict.REGRESSION and len(result.findings) == 5


def test_the_form_in_which_a_prompt_was_sent_does_not_matter():
    """Cells behind a router are sent other prompts as text than the single engine."""
    made = flawless()
    text = [o.model_copy(update={"form": "text"}) for o in made if o.cell == "pd-eagle3"][:1]
    assert logprobs_single(view(history([*made, *text]), "pd-eagle3")).verdict is Verdict.PASS
    wrong = [moved(o) for o in text]
    assert logprobs_single(view(history([*made, *wrong]), "pd-eagle3")).verdict is Verdict.REGRESSION


def asked_for_prompt(cell: str, values: list[float | None]) -> Observation:
    o = observation(cell, 40, scenario="features", part="prompt-logprobs", feature="prompt-logprobs", route="local")
    return change_final(o, prompt_logprobs=tuple(values))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([-1.0] * 39, None),
        ([-1.0] * 38, "expected 39 log-probs of the prompt, one for each token but the first, found 38"),
        ([-1.0] * 38 + [None], "found 1 of 39 that are none"),
        ([-1.0] * 20 + [-2.0] + [-1.5] * 18, "found 19 of 39 that differ, most at prompt token 21, by 1 nats"),
    ],
)
def test_logprobs_of_a_prompt_are_those_of_the_plain_engine(found, words):
    made = history([asked_for_prompt("single-none", [-1.0] * 39), asked_for_prompt("single-eagle3", found)])
    result = prompt_logprobs(view(made, "single-eagle3", scenario="features"))
    assert result.verdict is (Verdict.PASS if words is None else Verdict.REGRESSION)
    assert all(words in f.message for f in result.findings)


def test_logprobs_of_a_prompt_need_those_of_the_plain_engine_where_it_was_asked():
    asked = change_final(asked_for_prompt("single-none", []), prompt_logprobs=None)
    made = history([asked, asked_for_prompt("single-eagle3", [-1.0] * 39)])
    result = prompt_logprobs(view(made, "single-eagle3", scenario="features"))
    assert result.verdict is Verdict.UNKNOWN and "from single-none to compare with" in result.findings[0].message
    alone = history([asked_for_prompt("single-eagle3", [-1.0] * 39)])
    assert prompt_logprobs(view(alone, "single-eagle3", scenario="features")).verdict is Verdict.PASS


def test_a_grammar_moves_the_distances_to_what_it_does_not_admit():
    o = observation("single-none", 40, scenario="features", part="grammar", feature="grammar")
    made = history([moved(o)])
    assert logprobs_baseline(view(made, "single-none", lookups([40]), scenario="features")).findings == ()
