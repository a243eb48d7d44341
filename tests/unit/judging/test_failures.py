"""Requests at which an engine fails are findings where another one answers them; mistaken hand-offs are answered or
refused."""

from __future__ import annotations

import pytest

from harness.history.records import Failure, Observation, SecondTry
from harness.history.verdict import Verdict
from harness.judging.checks import failures, mistakes, responses, transfer
from harness.judging.checks.registry import judge_cell
from harness.profiles.scenarios import Abandon
from tests.support.builders import change_final, history, lookups, observation, view, with_prefill

SAID = Failure(role="decode", status=500, words="Grammar error")
ENDED = Failure(role="decode", status=500, words="RuntimeError: max()", ended=1)
AGAIN = SecondTry(failure=SAID, error="status 500")


def failing(cell: str = "pd-eagle3", failure: Failure = SAID, second: SecondTry | None = AGAIN, **more) -> Observation:
    """An observation whose engine failed at the request after P had answered."""
    o = observation(cell, error="status 500: Grammar error", failure=failure, second_try=second, **more)
    return o.model_copy(update={"legs": o.legs[:1] if cell.startswith("pd") else ()})


def judged(*observations: Observation):
    return judge_cell(view(history(list(observations)), "pd-eagle3", lookups([40])))


def results_of(verdict):
    return {r.check: r for r in verdict.results}


@pytest.mark.parametrize("other", ["single-none", "single-eagle3", "pd-none"])
def test_a_failure_that_comes_again_is_a_regression_where_another_cell_answers(other):
    verdict = judged(failing(), observation(other))
    (finding,) = results_of(verdict)[failures.NAME].findings
    assert (finding.verdict, finding.damage, finding.evidence.answered_by) == (Verdict.REGRESSION, "no-answer", other)
    assert "Grammar error" in finding.message and f"which {other} of this run gives" in finding.message
    assert verdict.verdict is Verdict.REGRESSION and verdict.diagnosis.damage == "no-answer"
    # It is not told a second time as something that the machine may have done.
    assert not [f for f in results_of(verdict)["complete"].findings if "exchange broke" in f.message]


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        (failing(second=None), "it was not sent again"),
        (failing(second=SecondTry(error="it could not be sent again: no room")), "no room"),
        (failing(second=SecondTry()), "it was answered"),
        (failing(second=SecondTry(failure=Failure(role="decode", status=503, words=""), error="503")), "503"),
        (failing(failure=Failure(role="decode", status=503, words="busy"), second=None), "exchange broke"),
        (failing(failure=Failure(role="decode", status=400, words="refused"), second=None), "exchange broke"),
        (failing(failure=ENDED.model_copy(update={"ended": -9}), second=None), "exchange broke"),
        (failing(failure=ENDED.model_copy(update={"words": ""}), second=None), "exchange broke"),
    ],
)
def test_what_the_machine_may_have_done_is_unknown(failed, words):
    verdict = judged(failed, observation("single-none"))
    broken = [f for f in results_of(verdict)["complete"].findings if words in f.message]
    assert broken and verdict.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "other",
    [
        None,
        observation("single-none", 41),
        observation("single-none", max_tokens=7),
        observation("single-none", feature="grammar"),
        observation("single-none", error="it broke, too"),
    ],
)
def test_a_failure_is_unknown_where_nobody_answered_the_same_request(other):
    verdict = judged(failing(), *([other] if other else []))
    (finding,) = (f for f in results_of(verdict)["complete"].findings if "exchange broke" in f.message)
    assert verdict.verdict is Verdict.UNKNOWN and "run single-none too" in finding.message


def test_an_engine_that_ends_twice_is_a_regression_with_what_it_logged():
    verdict = judged(failing(failure=ENDED, second=SecondTry(failure=ENDED, error="gone")), observation("single-none"))
    (finding,) = results_of(verdict)[failures.NAME].findings
    assert finding.verdict is Verdict.REGRESSION and finding.evidence.exit_code == 1
    assert "ended with exit status 1: RuntimeError: max()" in finding.message


def test_other_words_the_second_time_are_quoted_too():
    other = SAID.model_copy(update={"words": "another error"})
    verdict = judged(failing(second=SecondTry(failure=other, error="500")), observation("single-none"))
    assert "another error" in results_of(verdict)[failures.NAME].findings[0].message


def test_a_run_without_failures_has_no_such_check():
    assert not failures.has_failures(view(history([observation("pd-eagle3")]), "pd-eagle3"))
    refused = failing(failure=Failure(role="decode", status=400, words="no"), second=None)
    assert not failures.has_failures(view(history([refused]), "pd-eagle3"))


def test_leases_of_hand_offs_that_were_sent_again_end_twice():
    def after(ended: float):
        return with_prefill(observation("pd-eagle3", 41, sequence=1), counters={"nixl_expired": ended})

    def early(*made):
        result = transfer.transfer(view(history(list(made)), "pd-eagle3"))
        return [f for f in result.findings if "leases that expired" in f.message]

    assert not early(failing(), after(2.0)) and early(failing(), after(3.0))
    assert early(failing(second=None), after(2.0))


# --- mistaken hand-offs -----------------------------------------------------------------------------------------------


KIND = {"id": "mistakes", "kind": "hand-off-mistakes", "prompts": ["p40"], "mistakes": ["used-twice"]}


def mistaken(mistake: str = "used-twice", **changes) -> Observation:
    more = {"scenario": "mistakes", "part": "again", "route": "reference", "mistake": mistake}
    o = observation("pd-none", abandon=Abandon(after_s=3.0), known_answer=observation("pd-none").final.output_ids)
    return o.model_copy(update={**more, "legs": o.legs[1:], **changes})


def of_mistake(o: Observation):
    ordinary = observation("pd-none", scenario="mistakes", part="after", sequence=1)
    return mistakes.mistaken_hand_offs(view(history([o, ordinary], scenarios=[KIND]), "pd-none", scenario="mistakes"))


def test_a_right_answer_to_a_mistaken_hand_off_passes():
    assert of_mistake(mistaken()).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("used-late", "after P had used its blocks for other prompts"),
        ("lost tp_size", "P's parameter tp_size got lost"),
    ],
)
def test_other_tokens_are_a_regression_that_says_what_was_done_and_what_came(mistake, words):
    (finding,) = of_mistake(change_final(mistaken(mistake), output_ids=(9, 9))).findings
    assert (finding.verdict, finding.damage, finding.evidence.position) == (Verdict.REGRESSION, "target-kv", 0)
    assert words in finding.message and "status 200 and other tokens" in finding.message


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_refusal_passes_and_is_counted(status):
    refusal = Failure(role="decode", status=status, words="no such blocks")
    result = of_mistake(mistaken(legs=(), error=f"status {status}", failure=refusal))
    assert (result.verdict, result.note) == (Verdict.PASS, "1 of 1 mistaken hand-off refused")


def test_an_engine_that_a_mistake_ends_is_a_regression():
    ended = Failure(role="decode", words="KeyError: 'remote_host'", ended=0)
    (finding,) = of_mistake(mistaken("lost remote_host", legs=(), error="gone", failure=ended)).findings
    assert (finding.verdict, finding.damage) == (Verdict.REGRESSION, "no-answer")
    assert "no answer within 3 s, and at its end that the decode engine ended" in finding.message


def test_no_answer_at_all_is_a_regression_where_d_has_not_begun_and_unknown_otherwise():
    def given_up(**counted: float):
        return of_mistake(mistaken(legs=(), shared_counters={"decode": counted}))

    assert given_up(external_hits=30.0).verdict is Verdict.REGRESSION
    assert given_up(generation_tokens=3.0).verdict is Verdict.UNKNOWN
    assert of_mistake(mistaken(legs=())).verdict is Verdict.UNKNOWN


def test_a_broken_exchange_and_an_end_by_a_signal_are_unknown():
    assert of_mistake(mistaken(legs=(), error="no connection")).verdict is Verdict.UNKNOWN
    killed = Failure(role="decode", words="", ended=-9)
    assert of_mistake(mistaken(legs=(), error="gone", failure=killed)).verdict is Verdict.UNKNOWN


def test_without_a_right_answer_nothing_was_tested():
    assert of_mistake(mistaken(known_answer=None, prompt_id="p999")).verdict is Verdict.UNKNOWN
    cold = observation("pd-none", sequence=2)
    made = history([mistaken(known_answer=None), cold], scenarios=[KIND])
    assert mistakes.mistaken_hand_offs(view(made, "pd-none", scenario="mistakes")).verdict is Verdict.PASS


def test_other_checks_leave_mistaken_hand_offs_alone():
    output = mistaken().final.output_ids
    wrong = change_final(mistaken(), output_ids=(9, *output[1:]))
    broken = mistaken(part="other", legs=(), error="status 400", failure=Failure(role="decode", status=400, words=""))
    ordinary = observation("pd-none", scenario="mistakes", part="after", sequence=1)
    cell = view(history([wrong, broken, ordinary], scenarios=[KIND]), "pd-none", lookups([40]), scenario="mistakes")
    assert responses.complete(cell).verdict is Verdict.PASS
    failed = {r.check for r in judge_cell(cell).results if r.findings}
    assert failed == {mistakes.NAME}


def test_p_may_say_what_it_was_asked_for():
    o = mistaken("more-tokens", route="cell", legs=observation("pd-none").legs)
    o = with_prefill(o, output_ids=(1, 2, 3), usage_completion_tokens=3, top_gaps=None, chosen_logprobs=None)
    ordinary = observation("pd-none", scenario="mistakes", part="after", sequence=1)
    cell = view(history([o, ordinary], scenarios=[KIND]), "pd-none", scenario="mistakes")
    assert responses.response_invariants(cell).verdict is Verdict.PASS
