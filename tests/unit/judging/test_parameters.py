"""Requests with parameters that say what the answer is: the plain engine of the run is the reference."""

from __future__ import annotations

import pytest

from harness.history.records import Failure, Sibling, Speculation
from harness.history.verdict import Verdict
from harness.judging.checks.drafting import acceptance_single
from harness.judging.checks.logprobs import logprobs_single
from harness.judging.checks.registry import CHECKS, judge_cell
from harness.judging.checks.responses import complete, finish_reason, response_invariants
from harness.judging.checks.texts import texts
from harness.judging.checks.tokens import tokens_reference
from tests.support.builders import change_final, history, lookups, observation, text_of, view, with_answers

SCENARIO = {"id": "parameters", "kind": "parameters", "prompts": ["p40"], "parameters": ["bad-words"]}
OTHER = (7, 8, 9, 7, 8, 9)
"""An answer that no baseline has."""
REFUSED = "single engine: expected status 200 for request abc, found 400: {min_p is not supported}"


def asked(cell: str, feature: str = "bad-words", fields: dict | None = None, part: str = "", **answer):
    """An observation of a request with a parameter; ``answer`` are fields of its final leg."""
    o = observation(
        cell, 40, scenario="parameters", part=part or feature, feature=feature, fields=fields or {}, max_tokens=None
    )
    output = answer.get("output_ids", OTHER)
    texts = {"text": text_of(output), "own_text": text_of(output)}
    figures = {"chosen_logprobs": (-0.7,) * len(output), "top_gaps": (9.0,) * len(output)}
    usual = {"output_ids": output, "finish_reason": "length", "usage_completion_tokens": len(output)}
    return change_final(o, **{**usual, **texts, **figures, "speculation": None, **answer})


def seen(*observations, cell: str = "single-eagle3"):
    made = history(list(observations), scenarios=[SCENARIO])
    return view(made, cell, lookups([40]), scenario="parameters")


def test_another_answer_than_the_baseline_is_right_where_the_plain_engine_gives_it_too():
    judged = judge_cell(seen(asked("single-eagle3"), asked("single-none")))
    names = {r.check for r in judged.results}
    assert names & {"tokens-baseline", "logprobs-baseline", "acceptance-baseline"} == set()
    assert next(r for r in judged.results if r.check == "tokens-reference").verdict is Verdict.PASS


def test_another_answer_than_the_plain_engines_is_a_regression():
    made = seen(asked("single-eagle3"), asked("single-none", output_ids=(7, 8, 9, 10, 11, 12)))
    result = tokens_reference(made)
    assert result.verdict is Verdict.REGRESSION and "output token 3" in result.findings[0].message
    assert result.findings[0].damage == "sampler", "it has read no KV but its own"


def drafted(cell: str, accepted: tuple[int, ...]):
    """An answer whose grammar leaves most steps without drafts, so that the counts do not tell which is padded."""
    drafts = Speculation(
        per_step_accepted=accepted,
        per_step_drafted=(3,) * len(accepted),
        num_steps=len(accepted),
        num_drafted=3 * len(accepted),
        num_accepted=sum(accepted),
    )
    return asked(cell, "regex", output_ids=tuple(range(7, 18)), speculation=drafts)


@pytest.mark.parametrize(
    ("pair", "single", "verdict"),
    [
        ((0, 0, 0, 1), (0, 0, 1), Verdict.PASS),
        ((0, 3), (3,), Verdict.PASS),
        ((0, 0, 1), (0, 0, 1), Verdict.PASS),
        ((0, 0, 1), (1, 0, 1), Verdict.REGRESSION),
        ((0, 0, 0, 1), (0, 1), Verdict.REGRESSION),
    ],
)
def test_a_first_step_without_accepted_drafts_is_left_out_where_it_may_be_padded(pair, single, verdict):
    """Of the single engine it is a step like any other."""
    made = seen(drafted("pd-eagle3", pair), drafted("single-eagle3", single), cell="pd-eagle3")
    assert acceptance_single(made).verdict is verdict


@pytest.mark.parametrize(
    ("single", "damage"), [(OTHER, "sampler"), ((7, 8, 9, 10, 11, 12), "target-kv"), (None, "target-kv")]
)
def test_kv_is_to_blame_where_the_single_engine_is_right(single, damage):
    plain = asked("single-none", output_ids=(7, 8, 9, 10, 11, 12))
    beside = [asked("single-eagle3", output_ids=single)] if single else []
    result = tokens_reference(seen(asked("pd-eagle3"), plain, *beside, cell="pd-eagle3"))
    assert [f.damage for f in result.findings] == [damage]


def test_an_answer_as_if_the_parameter_had_not_been_asked_for_is_told_as_that():
    """A router that hands on no bad words; the single engine was not asked. KV that gives the right words is right."""
    (row,) = (r for r in lookups([40])["none"].baseline.rows if r.prompt_id == "p40")
    known = row.output_ids[:6]
    plain = asked("single-none", output_ids=(7, 8, 9, 10, 11, 12))
    (finding,) = tokens_reference(seen(asked("pd-none", output_ids=known), plain, cell="pd-none")).findings
    assert finding.damage == "sampler"
    assert finding.message.endswith("; it is the answer to this prompt without bad-words")
    (other,) = tokens_reference(seen(asked("pd-none"), plain, cell="pd-none")).findings
    assert other.damage == "target-kv" and "without bad-words" not in other.message


def test_a_cell_without_the_plain_engine_has_nothing_to_be_compared_with():
    judged = judge_cell(seen(asked("single-eagle3")))
    state = next(r for r in judged.results if r.check == "state-occurred")
    assert state.verdict is Verdict.UNKNOWN and "single-none" in state.findings[0].message


def test_baselines_are_looked_up_for_what_they_have():
    applies = {c.name: c.applies for c in CHECKS}
    cold = view(history([observation("single-eagle3")]), "single-eagle3", lookups([40]))
    assert applies["tokens-baseline"](cold) and not applies["tokens-baseline"](seen(asked("single-eagle3")))


@pytest.mark.parametrize(
    ("feature", "text", "right"),
    [
        ("json", '{"kind": "task", "clear": true}', True),
        ("tool", '{"kind": "task", "clear": true}', True),
        ("json", '{"kind": "task", "clear": tru', False),
        ("json", '{"kind": "chat", "clear": true}', False),
        ("json", '{"kind": "task", "clear": 1}', False),
        ("tool", '{"kind": "task"}', False),
        ("json", "[]", False),
        ("choice", "It is a task.", True),
        ("choice", "It is a task", False),
        ("date", "2024-02-30", True),
        ("date", "2024-02-300", False),
    ],
)
def test_an_answer_is_one_that_its_grammar_admits(feature, text, right):
    ended = asked("single-none", feature, own_text=text, text=text, finish_reason="stop")
    result = response_invariants(seen(ended, cell="single-none"))
    assert (
        any(
            "was asked for" in f.message or "expected one of" in f.message or "of the form" in f.message
            for f in result.findings
        )
        is not right
    )
    # An answer that its limit cut is not whole.
    cut = asked("single-none", feature, own_text=text)
    assert response_invariants(seen(cut, cell="single-none")).verdict is Verdict.PASS


def test_the_arguments_of_a_tool_are_a_part_of_the_text():
    own = '<tool_call>{"name": "answer", "arguments": {"kind": "task"}}</tool_call>'
    for text, verdict in (('{"kind": "task"}', Verdict.PASS), ('{"kind": "other"}', Verdict.REGRESSION)):
        made = seen(asked("single-none", "tool", own_text=own, text=text), cell="single-none")
        assert texts(made).verdict is verdict
    as_json = seen(asked("single-none", "json", own_text=own, text='{"kind": "task"}'), cell="single-none")
    assert texts(as_json).verdict is Verdict.REGRESSION


def test_no_drafts_are_asked_of_answers_that_all_have_grammars():
    applies = {c.name: c.applies for c in CHECKS}["drafts-happened"]
    assert not applies(seen(asked("single-eagle3", "json")))
    assert applies(seen(asked("single-eagle3", "json"), asked("single-eagle3", "bad-words")))
    assert not applies(seen(asked("single-none", "bad-words"), cell="single-none"))


@pytest.mark.parametrize(
    ("fields", "answer", "words"),
    [
        ({"stop_token_ids": [9]}, {"output_ids": (7, 8, 9)}, "the reason length"),
        ({"stop_token_ids": [8]}, {"output_ids": (7, 8, 9), "finish_reason": "stop"}, "3 tokens"),
        ({"allowed_token_ids": [7, 8]}, {"output_ids": (7, 8, 9)}, "allowed tokens alone"),
        ({"ignore_eos": True}, {"finish_reason": "stop"}, "ends at the end token, which it was to ignore"),
        ({"bad_words": ["w8"]}, {}, "the answer has the bad word 'w8'"),
        ({"n": 3}, {}, "3 answers"),
        ({"logprobs": 4}, {"top_logprobs": ({7: -0.7},) * 6}, "4 likeliest"),
        ({"logprobs": 4}, {}, "4 likeliest"),
    ],
)
def test_an_answer_shows_by_itself_that_a_parameter_was_ignored(fields, answer, words):
    result = response_invariants(seen(asked("single-eagle3", fields=fields, **answer)))
    assert result.verdict is Verdict.REGRESSION
    assert any(words in f.message and f.damage == "sampler" for f in result.findings)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"stop_token_ids": [9]}, {"output_ids": (7, 8, 9), "finish_reason": "stop"}),
        ({"allowed_token_ids": [7, 8, 9]}, {}),
        ({"ignore_eos": True, "bad_words": ["w10"]}, {}),
        ({"logprobs": 4}, {"top_logprobs": ({7: -0.7, 1: -3.0, 2: -4.0, 3: -5.0},) * 6}),
        ({"n": 2}, {"siblings": (Sibling(output_ids=(7, 8)),), "usage_completion_tokens": 8}),
    ],
)
def test_an_answer_as_asked_is_consistent(fields, answer):
    assert response_invariants(seen(asked("single-eagle3", fields=fields, **answer))).verdict is Verdict.PASS


def test_the_end_counts_although_the_cold_answer_ended_otherwise():
    plain = asked("single-none", finish_reason="stop", stop_reason=9)
    assert finish_reason(seen(asked("single-eagle3"), plain)).verdict is Verdict.REGRESSION
    same = asked("single-eagle3", finish_reason="stop", stop_reason=9)
    assert finish_reason(seen(same, plain, observation("single-none"))).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("cell", "feature", "status", "verdict"),
    [
        ("single-eagle3", "min-p", 400, Verdict.PASS),
        ("single-eagle3", "bad-words", 400, Verdict.UNKNOWN),
        ("single-none", "min-p", 400, Verdict.UNKNOWN),
        ("single-eagle3", "min-p", 503, Verdict.UNKNOWN),
    ],
)
def test_a_refusal_is_right_where_vllm_does_not_do_it_with_a_drafter(cell, feature, status, verdict):
    answered = asked(cell, feature)
    made = history([answered], scenarios=[SCENARIO])
    failure = Failure(role=answered.legs[-1].role, status=status, words="min_p is not supported")
    error = REFUSED.replace("400", str(status))
    refused = answered.model_copy(update={"legs": (), "error": error, "failure": failure})
    result = complete(view(with_answers(made, [refused]), cell, lookups([40]), scenario="parameters"))
    assert result.verdict is verdict
    assert ("refused by the engine" in result.note) == (verdict is Verdict.PASS)


def test_each_sibling_is_compared():
    siblings = (Sibling(output_ids=(1, 2)), Sibling(output_ids=(3, 4)))
    ours = asked("pd-none", "siblings", siblings=siblings)
    plain = asked("single-none", "siblings", siblings=siblings)
    assert tokens_reference(seen(ours, plain, cell="pd-none")).verdict is Verdict.PASS
    for wrong in ((siblings[0], Sibling(output_ids=(3, 5))), siblings[:1]):
        result = tokens_reference(seen(change_final(ours, siblings=wrong), plain, cell="pd-none"))
        assert result.verdict is Verdict.REGRESSION and "answer 3" in result.findings[0].message


def test_a_seed_with_a_drafter_is_held_against_itself():
    plain = [asked("single-none", part) for part in ("seed", "seed-again")]
    drawn = [asked("single-eagle3", part, output_ids=(5, 5, 5)) for part in ("seed", "seed-again")]
    assert tokens_reference(seen(*drawn, *plain)).verdict is Verdict.PASS
    other = asked("single-eagle3", "seed-again", output_ids=(5, 5, 6))
    result = tokens_reference(seen(drawn[0], other, *plain))
    assert result.verdict is Verdict.REGRESSION and "same seed" in result.findings[0].message
    without = [asked("single-none", "seed", output_ids=(5, 5, 5)), plain[1]]
    assert tokens_reference(seen(asked("pd-none", "seed"), without[0], cell="pd-none")).verdict is Verdict.REGRESSION


def tables(*said: float) -> tuple[dict[int, float], ...]:
    return (dict(zip((1, 2, 3, 4), said, strict=True)),) * 6


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (tables(-0.7, -3.0, -4.0, -5.0), Verdict.PASS),
        (tables(-0.7, -3.0, -4.5, -5.0), Verdict.REGRESSION),
        (({1: -0.7, 2: -3.0, 3: -4.0, 9: -5.0},) * 6, Verdict.PASS),
        (({1: -0.7, 2: -3.0, 9: -4.0, 4: -5.0},) * 6, Verdict.REGRESSION),
    ],
)
def test_tables_of_likely_tokens_are_compared(ours, verdict):
    plain = asked("single-none", "logprobs-20", {"logprobs": 4}, top_logprobs=tables(-0.7, -3.0, -4.0, -5.0))
    made = seen(asked("single-eagle3", "logprobs-20", {"logprobs": 4}, top_logprobs=ours), plain)
    assert logprobs_single(made).verdict is verdict


@pytest.mark.parametrize(("logprobs", "verdict"), [(0, Verdict.PASS), (1, Verdict.PASS), (2, Verdict.UNKNOWN)])
def test_distances_are_missing_where_they_were_not_asked_for(logprobs, verdict):
    said = [asked(c, fields={"logprobs": logprobs}, top_gaps=(None,) * 6) for c in ("single-eagle3", "single-none")]
    assert logprobs_single(seen(*said)).verdict is verdict


def test_a_stop_string_that_is_kept_belongs_to_the_text():
    fields = {"stop": ["w9"], "include_stop_str_in_output": True}
    answer = {"output_ids": (7, 8, 9), "finish_reason": "stop", "stop_reason": "w9", "own_text": "w7 w8 w9"}
    kept = asked("single-eagle3", "include-stop", fields, **answer, text="w7 w8 w9")
    assert texts(seen(kept)).verdict is Verdict.PASS
    assert texts(seen(change_final(kept, text="w7 w8 "))).verdict is Verdict.REGRESSION
