"""What answers to requests with parameters have besides one output: an echo, more answers, tables of likely tokens."""

from __future__ import annotations

import json

import pytest

from harness.engines.client import parse_completion
from harness.errors import HandoffError, RefusedError


def choice(ids, logprobs=None, prompt=(1, 2), **more):
    tokens = {"token_ids": list(ids), "prompt_token_ids": list(prompt), "finish_reason": "length", "text": "t"}
    return {**tokens, **({"logprobs": logprobs} if logprobs else {}), **more}


def parsed(*choices):
    body = json.dumps({"choices": choices, "usage": {}})
    return parse_completion("single", "r", 200, body, 0.1, answers=len(choices))


def said(values, tops=2):
    table = [{f"token_id:{i}": -float(i) for i in range(tops)} for _ in values]
    return {"token_logprobs": values, "top_logprobs": table}


def test_log_probs_of_an_echoed_prompt_are_not_those_of_the_output():
    leg = parsed(choice([7, 8], said([None, -3.0, -0.5, -0.25])))
    assert leg.chosen_logprobs == (-0.5, -0.25) and len(leg.top_gaps) == 2


def test_each_further_answer_is_a_sibling():
    leg = parsed(choice([7]), choice([8, 9], stop_reason=9, finish_reason="stop"))
    assert leg.output_ids == (7,)
    assert [(s.output_ids, s.finish_reason, s.stop_reason, s.text) for s in leg.siblings] == [((8, 9), "stop", 9, "t")]


@pytest.mark.parametrize(("tops", "told"), [(2, None), (3, None), (4, ({0: 0.0, 1: -1.0, 2: -2.0, 3: -3.0},))])
def test_tables_are_kept_where_they_were_asked_for(tops, told):
    assert parsed(choice([7], said([-0.5], tops))).top_logprobs == told


@pytest.mark.parametrize(("status", "refused"), [(400, True), (500, False)])
def test_a_refusal_is_told_from_a_failure(status, refused):
    with pytest.raises(HandoffError) as error:
        parse_completion("single", "r", status, "{}", 0.1)
    assert isinstance(error.value, RefusedError) == refused
