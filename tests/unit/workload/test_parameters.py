"""Request parameters that say what the answer is: their fields, their lengths, and where they are sent."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from harness.profiles.load import load_profile
from harness.profiles.scenarios import OF_TEXT, SAMPLED, WITHOUT, Parameter, Parameters, TraceRequest
from harness.prompts.model import load_prompts
from harness.workload.features import feature_fields, for_prefill
from harness.workload.scripts import scripts

FULL = load_profile("cpu-full")
KNOWN = {p.id: p for p in load_prompts(FULL.workload.prompts).prompts}
NAMES = get_args(Parameter)


def text_of(ids):
    return "".join(f"w{i}." for i in ids)


def test_shipped_profiles_ask_every_parameter():
    chat = load_profile("smollm2-quick")
    alone = [s for profile in (FULL, chat) for s in profile.scenarios if s.kind == "parameters" and not s.by_router]
    asked = [p for s in alone for p in s.parameters]
    # A tool needs servers with a parser for it, which have baselines of their own. A speculative CPU engine ends at
    # top-k with runner V1, and any with V2, whose kernel Triton's interpreter cannot run.
    assert sorted([*asked, "tool", "top-k"]) == sorted(NAMES)


def test_what_is_drawn_is_asked_of_a_runner_that_draws_right():
    (second,) = (s for s in load_profile("cpu-v2").scenarios if s.id == "parameters-sampled")
    assert {"seed", "seed-again", "siblings"} <= set(second.parameters) <= SAMPLED


def test_a_tool_is_called_at_the_chat_endpoint():
    config = Parameters(id="tools", kind="parameters", prompts=("p",), parameters=("json", "tool"))
    (script,) = scripts(config, {"p": KNOWN["copy-062-10"]}, "pd")
    assert [(s.feature, s.api, s.max_tokens) for s in script.sends] == [
        ("json", "completion", 64),
        ("tool", "chat", 64),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_fields_of_its_own(name):
    known = list(range(10, 37))
    fields = feature_fields(name, known, text_of)
    assert bool(fields) != name.startswith("cap-")
    others = [n for n in NAMES if n != name and feature_fields(n, known, text_of) == fields]
    assert others == [] or {name, *others} <= {*(f"cap-{i}" for i in range(1, 6)), "seed", "seed-again"} | {
        "stop-at-cap",
        "stop-before-cap",
    }
    if name in WITHOUT:
        assert feature_fields(WITHOUT[name], known, text_of).items() < fields.items()


def test_each_is_sent_with_its_own_length_and_temperature():
    alone = [c for c in FULL.scenarios if c.kind == "parameters" and not c.by_router]
    sends = {s.feature: s for c in alone for s in scripts(c, KNOWN, "pd")[0].sends}
    answered = len(KNOWN["copy-030-03"].expected)
    assert [sends[f"cap-{n}"].max_tokens for n in range(1, 6)] == [1, 2, 3, 4, 5]
    assert sends["ignore-eos"].max_tokens > answered
    assert sends["stop-before-cap"].max_tokens == sends["stop-at-cap"].max_tokens + 1 == answered // 2 + 2
    assert {f for f, s in sends.items() if s.temperature} == SAMPLED - {"top-k"}
    assert {f for f, s in sends.items() if s.route == "local"} == {"echo"}


def test_parameters_are_asked_where_rows_move():
    """In crowds, of which each has another parameter for each request; in chunks; preempted; and by a router."""
    full = {s.id: s for s in FULL.scenarios}
    states = {"in-a-crowd": "batched", "in-chunks": "chunked", "preempted": "preempted"}
    proves = {f"parameters-{name}": state for name, state in states.items()}
    for name, state in proves.items():
        trace = full[name]
        assert {state, "changed"} == set(trace.proves) and trace.held and trace.by_plain_alone, name
    crowd = full["parameters-in-a-crowd"]
    assert all(len({r.feature for r in stage}) == FULL.engine.max_num_seqs for stage in crowd.stages)
    # A grammar of the whole answer changes nothing of it, and needs no other answer to compare with.
    asked = {r.feature for name in proves for r in full[name].requests} - {None, "grammar"}
    # Of caps one; these are asked of D alone, or refused where an engine drafts.
    left = {"echo", "logit-bias", *(f"cap-{n}" for n in (1, 2, 3, 5))}
    assert asked | left == set(NAMES) - SAMPLED - OF_TEXT
    assert full["parameters-by-router"].routed and not full["parameters"].routed


def test_p_gives_one_answer():
    assert for_prefill({"n": 3, "seed": 1, "min_tokens": 4}) == {"seed": 1}


@pytest.mark.parametrize("more", [{"max_tokens": 3}, {"abandon": {"after_steps": 2}}])
def test_a_request_of_a_trace_has_a_parameter_or_another_end(more):
    with pytest.raises(ValidationError, match="feature excludes abandon"):
        TraceRequest.model_validate({"prompt": "p", "feature": "bad-words", **more})
