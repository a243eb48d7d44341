"""What a server that ran already cannot be blamed for is UNKNOWN, and what it can be blamed for is not."""

from __future__ import annotations

import pytest

from harness.history.records import ATTACHED
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge_cell
from tests.support.builders import change_final, engine, history, lookups, observation, speculation, view

CELL = "pd-eagle3"
LENGTHS = [31, 32, 40]


def judged(change, attached: bool = True):
    """Judge a cell whose first answer is changed, and how it was counted."""
    argv = (ATTACHED, "http://127.0.0.1:1") if attached else ()
    engines = tuple(engine(CELL, r).model_copy(update={"argv": argv}) for r in ("prefill", "decode"))
    first, *rest = (observation(CELL, n, sequence=i) for i, n in enumerate(LENGTHS))
    made = history([change(first), *rest], engines=engines)
    return [f for r in judge_cell(view(made, CELL, lookups(LENGTHS))).results for f in r.findings]


def wrong(o, **counters):
    final = o.final
    assert final is not None
    return change_final(o, output_ids=(9, *final.output_ids[1:]), counters={**final.counters, **counters})


@pytest.mark.parametrize(
    ("counted", "attached", "verdict"),
    [
        ({"finished_requests": 2.0}, True, Verdict.UNKNOWN),
        ({}, True, Verdict.REGRESSION),
        # Nobody else reaches an engine that the harness started.
        ({"finished_requests": 2.0}, False, Verdict.REGRESSION),
    ],
)
def test_wrong_answer_where_others_used_the_server_says_nothing(counted, attached, verdict):
    findings = judged(lambda o: wrong(o, **counted), attached)
    (tokens,) = [f for f in findings if f.check == "tokens-baseline" and f.prompt_id == "p31"]
    assert tokens.verdict is verdict
    assert ("1 request of other clients" in tokens.message) == (verdict is Verdict.UNKNOWN)


@pytest.mark.parametrize("drafts", [1, 3])
def test_server_that_drafts_another_number_of_tokens_is_not_comparable(drafts):
    def change(o):
        final = o.final
        counters = {**final.counters, "drafts": 900.0, "draft_tokens": 900.0 * drafts}
        return change_final(o, speculation=speculation([0] * final.speculation.num_steps), counters=counters)

    findings = [f for f in judged(change) if f.check == "acceptance-baseline" and f.prompt_id == "p31"]
    assert [f.verdict for f in findings] == [Verdict.UNKNOWN if drafts == 1 else Verdict.REGRESSION]
    assert ("num_speculative_tokens: 1" in findings[0].message) == (drafts == 1)
