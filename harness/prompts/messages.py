"""Rendered chat prompts taken apart into messages, which a server renders again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from harness.profiles.model import Profile
from harness.prompts.chat import DATE
from harness.prompts.datasets import Conversation, Turn
from harness.prompts.model import Prompt

_MOST_ANSWERS = 4
"""Answers in a conversation that is taken apart."""
_DATED = "date_string"
"""The argument by which templates are told a date."""


class Messages(NamedTuple):
    """A prompt as a chat endpoint takes it."""

    turns: Conversation
    arguments: dict[str, Any]
    """Arguments for the chat template."""


def messages_of(profile: Profile, prompt: Prompt) -> Messages | None:
    """Return the messages that the profile's chat template renders to exactly the text of a prompt; None if none are
    found, or there is no template that says the same on any day."""
    recipe = profile.workload.recipe
    arguments = tuple(sorted((recipe.template if recipe is not None else {}).items()))
    try:
        rendering = _rendering(profile.tokenizer_folder, arguments)
        turns = next(rendering.candidates(prompt.text), None) if rendering is not None else None
    except (OSError, ValueError, TemplateError):
        return None
    return Messages(turns, dict(rendering.arguments)) if rendering is not None and turns is not None else None


class _Rendering:
    """A chat template as ``transformers`` and vLLM apply it, with arguments."""

    def __init__(self, template: Template, tokens: dict[str, str], arguments: dict[str, Any]) -> None:
        self._template = template
        self._tokens = tokens
        self.arguments = arguments

    def render(self, turns: Sequence[Turn]) -> str:
        messages = [turn._asdict() for turn in turns]
        return self._template.render(
            messages=messages, add_generation_prompt=True, **{**self._tokens, **self.arguments}
        )

    def candidates(self, text: str) -> Iterator[Conversation]:
        """Yield the conversations that are rendered to a text, those of most turns and of no system turn first."""
        for answers in range(_MOST_ANSWERS, -1, -1):
            said = ("user", *("assistant", "user") * answers)
            for roles in (said, ("system", *said)):
                turns = self._taken_apart(roles, text)
                if turns is not None and self.render(turns) == text:
                    yield turns

    def _taken_apart(self, roles: Sequence[str], text: str) -> Conversation | None:
        """Return the turns between what the template puts around them, or None."""
        marks = [f"turn{number}kvharness" for number in range(len(roles))]
        try:
            around = self.render([Turn(role, mark) for role, mark in zip(roles, marks, strict=True)])
        except TemplateError:
            # Not every template has a place for every turn.
            return None
        pattern = re.escape(around)
        for mark in marks:
            pattern = pattern.replace(mark, "(.*?)", 1)
        found = re.fullmatch(pattern, text, re.DOTALL)
        if found is None or len(found.groups()) != len(roles):
            return None
        return tuple(Turn(role, said) for role, said in zip(roles, found.groups(), strict=True))


@cache
def _rendering(folder: Path, arguments: tuple[tuple[str, bool], ...]) -> _Rendering | None:
    """Return the template of a tokenizer's folder; None if it has none, or one that asks for the day of today."""
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.is_file() else {}
    own = folder / "chat_template.jinja"
    source = own.read_text(encoding="utf-8") if own.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        source = next((t.get("template") for t in source if t.get("name") == "default"), None)
    if not isinstance(source, str) or ("strftime_now" in source and _DATED not in source):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = DATE.strftime
    environment.filters["tojson"] = _to_json
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items() if value}
    told: dict[str, Any] = {**dict(arguments), **({_DATED: DATE.strftime("%d %b %Y")} if _DATED in source else {})}
    return _Rendering(environment.from_string(source), tokens, told)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    """As in ``transformers``: HTML's characters are kept."""
    return json.dumps(value, ensure_ascii=False, **options)
