"""Re-scoring and sampled prompts, on hand-made records."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from harness.engines.client import parse_completion
from harness.errors import HandoffError
from harness.history.records import RESCORE, Observation, Preferred
from harness.history.token_ids import output_key
from harness.history.verdict import Verdict
from harness.judging.checks import preconditions, rescored
from harness.judging.checks.registry import judge
from harness.workload.outputs import Outputs
from tests.support.builders import (
    change_final,
    changed_rows,
    garbled,
    history,
    lookup,
    lookups,
    observation,
    rescoring,
    view,
    with_answers,
    with_run,
)

LENGTHS = [31, 40, 65]
CELLS = ["pd-eagle3", "single-eagle3", "single-none"]


def score(o: Observation, gaps: tuple[float, ...] | None = None, error: str | None = None) -> Observation:
    changes = {"legs": (), "error": error} if error else {}
    return rescoring(o.prompt_id, o.sent_ids, o.final.output_ids, gaps, **changes)


def made(change=lambda o: o, gaps=None, scored=LENGTHS, error=None):
    observations = [change(observation(c, n)) for c in CELLS for n in LENGTHS]
    distinct = {}
    for o in observations:
        if len(o.sent_ids) in scored:
            distinct.setdefault((o.prompt_id, output_key(o.final.output_ids)), score(o, gaps and gaps(o), error))
    return with_run(history([*observations, *distinct.values()], CELLS), rescore=True)


def result(h, cell="pd-eagle3"):
    return rescored.rescored(view(h, cell, lookups(LENGTHS)))


def test_output_that_the_plain_engine_prefers_passes():
    h = made()
    assert sum(o.scenario == RESCORE for o in h.observations) == len(LENGTHS)
    assert result(h).verdict is Verdict.PASS and judge(h, lookups(LENGTHS)).verdict is Verdict.PASS


def test_wrong_output_is_found_where_it_begins():
    def gaps(o):
        return tuple(5.0 if i == 7 and o.prompt_id == "p40" else 0.0 for i in range(len(o.final.output_ids)))

    found = result(made(gaps=gaps))
    assert found.verdict is Verdict.REGRESSION
    (finding,) = found.findings
    # The plain engine had said the same: what reads the answer is wrong, and not the KV of the pair.
    assert (finding.prompt_id, finding.damage, finding.evidence.position) == ("p40", "sampler", 7)
    assert result(made(gaps=gaps), "single-none").findings[0].damage == "sampler"


def test_near_tie_is_benign():
    close = made(gaps=lambda o: (0.01,) * len(o.final.output_ids))
    cell = view(close, "pd-eagle3", lookups(LENGTHS))
    found = rescored.rescored(replace(cell, judging=cell.judging.model_copy(update={"near_tie_nats": 0.02})))
    assert found.verdict is Verdict.PASS and "near ties" in found.note
    # Where nothing is set, what rounding was measured to move: nothing was, here.
    assert rescored.rescored(cell).verdict is Verdict.REGRESSION


def test_output_that_was_not_scored_is_unknown():
    assert result(made(scored=[31])).verdict is Verdict.UNKNOWN
    broken = result(made(error="engine answered 500"))
    assert broken.verdict is Verdict.UNKNOWN and "engine answered 500" in broken.findings[0].message


def test_other_output_needs_a_score_of_its_own():
    h = made()
    wrong = [garbled(o, at=0) if o.cell == "pd-eagle3" else o for o in h.observations]
    assert result(with_answers(h, wrong)).verdict is Verdict.UNKNOWN


def test_check_applies_only_where_the_run_was_asked_to():
    names = {r.check for c in judge(with_run(made(), rescore=False), lookups(LENGTHS)).cells for r in c.results}
    assert "rescored" not in names


def test_each_distinct_output_is_scored_once():
    outputs = Outputs()
    for cell in CELLS:
        outputs.add(observation(cell, 40))
    outputs.add(change_final(observation("pd-eagle3", 40), output_ids=(9, 9)))
    outputs.add(observation("pd-eagle3", 40, error="broke"))
    outputs.add(observation("pd-eagle3", 40, scenario="refill"))
    outputs.add(observation("pd-eagle3", 65, form="text"))
    assert outputs.count("") == 2
    everything = Outputs(normal=True)
    everything.add(observation("pd-eagle3", 40, scenario="refill"))
    assert everything.count("") == 1


def body(tables, ids=(1, 2, 3, 4)):
    choice = {"prompt_token_ids": list(ids), "token_ids": [5], "finish_reason": "length", "prompt_logprobs": tables}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}})


def test_gap_of_each_prompt_token_is_read_from_the_answer():
    tables = [
        None,
        {"2": {"logprob": -0.5}},
        {"3": {"logprob": -0.1}},
        {"4": {"logprob": -3.0}, "9": {"logprob": -0.25}},
    ]
    assert parse_completion("single", "r", 200, body(tables), 0.1, rescore_from=2).rescored == (0.0, 2.75)
    asked = parse_completion("single", "r", 200, body(tables), 0.1)
    assert (asked.rescored, asked.prompt_logprobs) == (None, (-0.5, -0.1, -3.0))


def test_rank_and_best_token_are_kept_of_each_token_that_is_not_the_best():
    """The engine names the best token and the one that was read; the best one may be that."""
    tables = [
        None,
        {"2": {"logprob": -0.5, "rank": 1}},
        {"3": {"logprob": -0.1, "rank": 1}},
        {"4": {"logprob": -3.0, "rank": 5}, "9": {"logprob": -0.25, "rank": 1}},
    ]
    read = parse_completion("single", "r", 200, body(tables), 0.1, rescore_from=2)
    assert read.rescored_preferred == (Preferred(at=1, rank=5, best=9),)
    right = parse_completion("single", "r", 200, body(tables[:3], ids=(1, 2, 3)), 0.1, rescore_from=1)
    assert right.rescored_preferred == ()
    assert parse_completion("single", "r", 200, body(tables), 0.1).rescored_preferred is None


def test_an_engine_that_tells_no_ranks_is_read_all_the_same():
    tables = [None, {"2": {"logprob": -0.5}, "7": {"logprob": -0.25}}]
    read = parse_completion("single", "r", 200, body(tables, ids=(1, 2)), 0.1, rescore_from=1)
    assert read.rescored == (0.25,) and read.rescored_preferred is None


def test_a_logprob_of_the_prompt_that_is_no_number_is_recorded_as_none():
    tables = [None, {"2": {"logprob": math.nan}}, {"3": {"logprob": -0.1}}, {"4": {"logprob": -math.inf}}]
    assert parse_completion("single", "r", 200, body(tables), 0.1).prompt_logprobs == (None, -0.1, None)


@pytest.mark.parametrize(
    "tables", [None, [], [None, None], [None, {}, {}, {}], [None, {"2": {}}, {"9": {"logprob": 0}}, {}]]
)
def test_answer_without_prompt_logprobs_is_an_error(tables):
    with pytest.raises(HandoffError, match="expected a completion"):
        parse_completion("single", "r", 200, body(tables), 0.1, rescore_from=2)


# --- sampled ---------------------------------------------------------------------------------------------------------

SAMPLED = {"id": "sampled", "kind": "sampled", "prompts": ["p40"], "temperature": 0.2}


@pytest.mark.parametrize(
    ("temperature", "gap", "verdict"),
    [
        (0.2, 9.0, Verdict.PASS),
        (0.0, 9.0, Verdict.UNKNOWN),
        (0.2, 1.0, Verdict.UNKNOWN),
        (2.0, 9.0, Verdict.UNKNOWN),
        (0.2, None, Verdict.UNKNOWN),
    ],
)
def test_sampling_is_judged_only_where_margins_force_every_token(temperature, gap, verdict):
    o = observation("single-none", 40, scenario="sampled", temperature=temperature)
    h = history([o], scenarios=[SAMPLED])
    recorded = changed_rows(lookup([40]), lambda _: {"min_top_gap": gap})
    assert preconditions.state_occurred(view(h, "single-none", {"none": recorded}, "sampled")).verdict is verdict
