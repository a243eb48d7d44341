"""Prompts taken apart into the messages that a server renders to them."""

from __future__ import annotations

import json

import pytest

from harness.profiles.load import load_profile
from harness.prompts.messages import messages_of
from harness.prompts.model import load_prompts

PROFILE = load_profile("cpu")
PROMPTS = {p.id: p for p in load_prompts(PROFILE.workload.prompts).prompts}
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(tmp_path, source: str, **settings):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **settings}))
    return PROFILE.model_copy(update={"tokenizer": tmp_path})


def said(profile, text: str):
    found = messages_of(profile, PROMPTS["copy-007-00"].model_copy(update={"text": text}))
    return found and [tuple(turn) for turn in found.turns]


def test_a_prompt_of_a_probe_is_one_turn():
    found = messages_of(PROFILE, PROMPTS["copy-007-00"])
    assert found is not None and found.arguments == {}
    assert [tuple(turn) for turn in found.turns] == [("user", "zola vaza tuvo")]


def test_a_prompt_that_ends_within_its_answer_has_no_messages():
    assert messages_of(PROFILE, PROMPTS["turn-161"]) is None


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("<user>a</>\n<assistant>", [("user", "a")]),
        ("<system>s</>\n<user>a</>\n<assistant>", [("system", "s"), ("user", "a")]),
        (
            "<user>a</>\n<assistant>b\nc</>\n<user>d</>\n<assistant>",
            [("user", "a"), ("assistant", "b\nc"), ("user", "d")],
        ),
        ("<user>a</>\n", None),
        ("a", None),
    ],
)
def test_conversations_are_found_turn_by_turn(tmp_path, text, turns):
    assert said(with_template(tmp_path, CHATML), text) == turns


def test_a_template_is_told_the_date_of_the_prompts(tmp_path):
    profile = with_template(tmp_path, "{{ bos_token }}{{ date_string }}" + CHATML, bos_token={"content": "<s>"})
    text = "<s>26 Jul 2024<user>a</>\n<assistant>"
    found = messages_of(profile, PROMPTS["copy-007-00"].model_copy(update={"text": text}))
    assert found is not None and found.arguments == {"date_string": "26 Jul 2024"}


@pytest.mark.parametrize(
    "source",
    ["{{ strftime_now('%d %b %Y') }}" + CHATML, "{{ raise_exception('no') }}", "{% broken", ""],
    ids=["of today", "that refuses", "damaged", "none"],
)
def test_templates_that_cannot_say_it_again_have_no_messages(tmp_path, source):
    assert said(with_template(tmp_path, source), "<user>a</>\n<assistant>") is None
