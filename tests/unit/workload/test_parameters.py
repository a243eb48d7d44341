"""Request parameters that say what the answer is: their fields, their lengths, and where they are sent."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from harness.profiles.load import load_profile
from harness.profiles.scenarios import SAMPLED, WITHOUT, Parameter, TraceRequest
from harness.prompts.model import load_prompts
from harness.workload.features import feature_fields, for_prefill
from harness.workload.scripts import scripts

FULL = load_profile("cpu-full")
KNOWN = {p.id: p for p in load_prompts(FULL.workload.prompts).prompts}
NAMES = get_args(Parameter)


def text_of(ids):
    return "".join(f"w{i}." for i in ids)


def test_the_full_profile_asks_every_parameter():
    asked = [p for s in FULL.scenarios if s.kind == "parameters" for p in s.parameters]
    assert sorted(asked) == sorted(NAMES)


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
    sends = {s.feature: s for c in FULL.scenarios if c.kind == "parameters" for s in scripts(c, KNOWN, "pd")[0].sends}
    answered = len(KNOWN["copy-030-03"].expected)
    assert [sends[f"cap-{n}"].max_tokens for n in range(1, 6)] == [1, 2, 3, 4, 5]
    assert sends["ignore-eos"].max_tokens > answered
    assert sends["stop-before-cap"].max_tokens == sends["stop-at-cap"].max_tokens + 1 == answered // 2 + 2
    assert {f for f, s in sends.items() if s.temperature} == SAMPLED
    assert {f for f, s in sends.items() if s.route == "local"} == {"echo"}


def test_p_gives_one_answer():
    assert for_prefill({"n": 3, "seed": 1, "min_tokens": 4}) == {"seed": 1}


@pytest.mark.parametrize("more", [{"max_tokens": 3}, {"abandon": {"after_steps": 2}}])
def test_a_request_of_a_trace_has_a_parameter_or_another_end(more):
    with pytest.raises(ValidationError, match="feature excludes abandon"):
        TraceRequest.model_validate({"prompt": "p", "feature": "bad-words", **more})
