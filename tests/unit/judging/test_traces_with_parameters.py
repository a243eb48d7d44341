"""Requests of a trace that have parameters, or are asked otherwise: judged beside others as alone, within what a crowd
may change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks import counters, logprobs
from harness.judging.checks.apis import cached_tokens, offers_cached_tokens
from harness.judging.checks.drafting import acceptance_single, drafts_happened
from harness.judging.checks.registry import judge_cell
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.runner.play import Player
from harness.scenarios.base import Send
from tests.support.builders import change_final, history, lookups, observation, speculation, view

PROFILE = load_profile("cpu")
PROMPT = next(p for p in load_prompts(PROFILE.workload.prompts).prompts if p.id == "copy-062-10")
ALONE = {"id": "trace", "kind": "trace", "stages": [[{"prompt": "p40"}]]}
CROWD = {**ALONE, "stages": [[{"prompt": "p40"}, {"prompt": "p40"}]]}


def asked(cell: str, steps=(1, 1, 2), **changes):
    o = observation(cell, 40, scenario="trace", part="r0-0", feature="bad-words", **changes)
    return change_final(o, speculation=speculation((0, *steps) if cell.startswith("pd") else steps))


@pytest.mark.parametrize(
    ("trace", "steps", "verdict"),
    [
        (ALONE, (1, 1, 2), Verdict.PASS),
        (ALONE, (1, 2, 1), Verdict.REGRESSION),
        (CROWD, (1, 2, 1), Verdict.PASS),
        (CROWD, (1, 1, 1, 1), Verdict.PASS),
        (CROWD, (0, 0, 0, 0, 0, 0), Verdict.REGRESSION),
    ],
)
def test_drafts_of_a_parameter_are_compared_within_what_a_crowd_may_change(trace, steps, verdict):
    together = {"concurrent": 2} if trace is CROWD else {}
    made = [asked("pd-eagle3", steps, **together), asked("single-eagle3", **together)]
    cell = view(history(made, scenarios=[trace]), "pd-eagle3", lookups([40]), scenario="trace")
    assert acceptance_single(cell).verdict is verdict


@pytest.mark.parametrize(("concurrent", "verdict"), [(2, Verdict.PASS), (1, Verdict.UNKNOWN)])
def test_nothing_tells_the_drafts_of_an_answer_that_a_string_ended_in_a_crowd(concurrent, verdict):
    other = observation("single-eagle3", 40, scenario="trace", part="r0-1")
    stopped = observation("single-eagle3", 40, scenario="trace", part="r0-0", concurrent=concurrent)
    stopped = change_final(stopped, stop_reason="wx", speculation=None, counters={})
    cell = view(history([stopped, other], scenarios=[CROWD]), "single-eagle3", lookups([40]), scenario="trace")
    assert drafts_happened(cell).verdict is verdict


def test_a_request_of_a_trace_has_no_twin_that_its_answer_has_to_be():
    o = observation("single-none", 40, scenario="trace", part="r0-0", api="chat")
    found = judge_cell(view(history([o], scenarios=[ALONE]), "single-none", lookups([40]), scenario="trace"))
    assert "same-answer" not in {r.check for r in found.results}


def test_any_answer_of_a_crowd_may_have_steps_behind_its_string():
    texts = ("wx", None), (None, "wx"), (None, None)
    for reasons in texts:
        crowd = [
            change_final(
                observation("single-eagle3", 40, scenario="trace", part=f"r0-{i}", sequence=i, concurrent=2),
                stop_reason=reason,
            )
            for i, reason in enumerate(reasons)
        ]
        after = observation("single-eagle3", 40, scenario="trace", part="r1-0", stage=1, sequence=2)
        cell = view(history([*crowd, after], scenarios=[CROWD]), "single-eagle3", scenario="trace")
        assert len(counters._behind_text(cell)) == any(reasons)


def test_of_several_answers_to_a_request_usage_tells_one_number_of_cached_tokens():
    for several, verdict in ((3, None), (1, Verdict.REGRESSION)):
        o = observation("single-none", 40, scenario="trace", part="r0-0", fields={"n": several})
        counted = {"prompt_tokens_local_cache_hit": 64.0}
        cell = view(
            history([change_final(o, counters=counted, cached_tokens=32)], scenarios=[ALONE]),
            "single-none",
            scenario="trace",
        )
        found = cached_tokens(cell).findings if offers_cached_tokens(cell) else []
        assert [f.verdict for f in found] == ([verdict] if verdict else [])


def test_a_request_for_several_answers_is_no_reference():
    several = observation("single-none", 40, scenario="trace", part="r0-0", fields={"n": 3})
    one = observation("single-none", 40, scenario="trace", part="r1-0", stage=1, sequence=1)
    made = history([several, one], scenarios=[ALONE])
    assert [o.part for o in made.first_answers("single-none").values()] == ["r1-0"]


@pytest.mark.parametrize(
    ("changes", "compared"),
    [({}, True), ({"feature": "grammar"}, False), ({"feature": "bad-words"}, False), ({"mistake": "used-late"}, False)],
)
def test_a_trace_without_anything_to_compare_is_not_compared(changes, compared):
    cold = observation("single-none", 40)
    o = observation("single-none", 40, scenario="trace", part="r0-0", sequence=1, **changes)
    cell = view(history([cold, o], scenarios=[ALONE]), "single-none", lookups([40]), scenario="trace")
    assert logprobs.has_reference(cell) is compared


@pytest.mark.parametrize(("api", "sent"), [("completion", list(PROMPT.ids)), ("text", PROMPT.text)])
def test_a_prompt_is_sent_as_its_ids_or_its_text(api, sent):
    player = Player.__new__(Player)
    player._session = SimpleNamespace(profile=PROFILE)
    assert player._payload(Send(PROMPT, "r0-0", "a", api=api)) == sent
