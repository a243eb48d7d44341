"""Settings that an engine did not take over: what was to be tested was not, whatever the answers were."""

from __future__ import annotations

import json

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks import settings
from harness.judging.checks.registry import judge
from tests.support.builders import engine, history, lookups, observation, view, with_profile


def asked(told, **engine_settings):
    given = {"kv_blocks": "--num-gpu-blocks-override", "attention_backend": "--attention-backend"}
    options = tuple(
        word for name, value in engine_settings.items() if name in given for word in (given[name], str(value))
    )
    engines = tuple(
        found.model_copy(update={**told, "argv": (*found.argv, *options)})
        for found in (engine("pd-none", role) for role in ("prefill", "decode"))
    )
    return with_profile(history([observation("pd-none", 40)], engines=engines), engine=engine_settings)


@pytest.mark.parametrize(
    ("told", "wanted", "words"),
    [
        ({"model_runner": "V2", "kv_blocks": 28}, {"model_runner": "V2", "kv_blocks": 28}, None),
        # What nobody asked for may be anything.
        ({"model_runner": "V1", "kv_blocks": 4096, "attention_backend": "FLASH_ATTN"}, {}, None),
        (
            {"model_runner": "V1"},
            {"model_runner": "V2"},
            "expected the decode engine to run with engine.model_runner: V2",
        ),
        ({"kv_blocks": 32}, {"kv_blocks": 28}, "engine.kv_blocks: 28, found 32"),
        ({"attention_backend": None}, {"attention_backend": "FLASH_ATTN"}, "found that it does not say"),
    ],
)
def test_what_was_asked_for_and_not_given_is_unknown(told, wanted, words):
    result = settings.engine_as_asked(view(asked(told, **wanted), "pd-none"))
    assert result.verdict is (Verdict.PASS if words is None else Verdict.UNKNOWN)
    if words is not None:
        assert words in result.findings[0].message and len(result.findings) == 2


@pytest.mark.parametrize(
    ("started", "right"),
    [
        ("/cache/eagle3-35dfbb422eb73ea3", True),
        ("/elsewhere/models/eagle3", True),
        ("/cache/eagle3-of-another-kind", False),
        ("/cache/mtp-4e58deb5eab26489", False),
    ],
)
def test_an_expanded_folder_is_the_one_at_rest_that_a_profile_with_axes_names(started, right):
    told = {"model": started, "num_speculative_tokens": 3}
    d = engine("pd-eagle3", "decode").model_copy(update={"argv": ["vllm", "--speculative-config", json.dumps(told)]})
    methods = [{"kind": "eagle3", "drafter": "/checkout/models/eagle3", "num_speculative_tokens": 3}]
    made = with_profile(history([observation("pd-eagle3")], engines=(d,)), methods=methods)
    found = settings.engine_as_asked(view(made, "pd-eagle3")).findings
    assert (not [f for f in found if "the drafter" in f.message]) is right


def test_right_answers_of_another_engine_do_not_pass():
    (cell,) = judge(asked({"model_runner": "V1"}, model_runner="V2"), lookups([40])).cells
    assert cell.verdict is Verdict.UNKNOWN
    assert [r.check for r in cell.results if r.verdict is not Verdict.PASS] == ["engine-as-asked"]


@pytest.mark.parametrize(
    ("tier", "scenario", "applies"),
    [
        ("auto", {"kind": "prefix-hit", "where": "decode", "pairs": [{"donor": "p40", "subject": "p40"}]}, True),
        # Registered tests judge prompts that are drawn by number.
        ("auto", {"kind": "prefix-hit", "where": "decode", "pairs": 2}, False),
        ("normal", {"kind": "prefix-hit", "where": "decode", "pairs": [{"donor": "p40", "subject": "p40"}]}, False),
    ],
)
def test_a_state_that_only_equal_runs_can_judge_is_unknown_where_engines_do_not_repeat(tier, scenario, applies):
    made = history([observation("single-none", scenario="hit")], scenarios=[{"id": "hit", **scenario}])
    made = with_profile(made, judging={"tier": tier})
    cell = view(made, "single-none", scenario="hit")
    assert settings.needs_repeats(cell) is applies
    assert settings.needs_repeats(view(made, "single-none")) is False
    result = settings.engines_repeat(cell)
    assert result.verdict is Verdict.UNKNOWN and "bit for bit, by which hit is judged" in result.findings[0].message
