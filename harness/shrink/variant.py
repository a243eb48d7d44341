"""A case that can be made smaller: the requests of one run through a scenario, one of which is judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from harness.history import COLD
from harness.prompts import Prompt
from harness.scenarios.script import Script, Send, Stage
from harness.sequences import common_prefix


def _waiting_for_nobody(send: Send) -> Send:
    """The request without its place among others."""
    return send._replace(after_s=0.0, after=(), last=False)


class Variant(NamedTuple):
    """Stages of requests, and which of them is judged."""

    scenario: str
    stages: tuple[Stage, ...]
    part: str

    @property
    def script(self) -> Script:
        return Script(self.scenario, 0, self.stages)

    @property
    def subject(self) -> Send:
        return next(s for stage in self.stages for s in stage.sends if s.part == self.part)

    @property
    def others(self) -> tuple[str, ...]:
        """Parts of all other requests, without those between the legs of one."""
        return tuple(s.part for stage in self.stages for s in stage.sends if s.part != self.part)

    @property
    def requests(self) -> int:
        return self.script.requests

    def alone(self) -> Variant:
        """The judged request as a prompt that no engine has seen."""
        send = _waiting_for_nobody(self.subject)._replace(group="a", part="subject", between=())
        return Variant(COLD, (Stage((send,)),), "subject")

    def only(self, parts: Collection[str]) -> Variant:
        """Without the other requests that are not named; a stage with one request left holds nobody."""
        stages = []
        for stage in self.stages:
            sends = tuple(s for s in stage.sends if s.part == self.part or s.part in parts)
            if len(sends) > 1:
                stages.append(Stage(sends, stage.hold))
            elif sends:
                stages.append(Stage((_waiting_for_nobody(sends[0]),)))
        return self._replace(stages=tuple(stages))

    def with_ids(self, ids: Sequence[int]) -> Variant:
        """Another prompt in the place of the judged one, wherever that is sent."""
        old = self.subject.prompt
        new = prompt_of(old, ids)
        return self._changed(lambda s: s._replace(prompt=new) if s.prompt.id == old.id else s)

    def asking(self, max_tokens: int) -> Variant:
        """The judged request with so many output tokens."""
        return self._changed(lambda s: s._replace(max_tokens=max_tokens) if s.part == self.part else s)

    def _changed(self, change: Callable[[Send], Send]) -> Variant:
        stages = tuple(stage._replace(sends=tuple(change(s) for s in stage.sends)) for stage in self.stages)
        return self._replace(stages=stages)


def prompt_of(old: Prompt, ids: Sequence[int]) -> Prompt:
    """A prompt of other ids; it has no text and no known answer."""
    return old.model_copy(update={"ids": tuple(ids), "tokens": len(ids), "text": "", "expected": None})


class Frame(NamedTuple):
    """What all prompts of a set begin and end with: the chat template's part."""

    head: int
    tail: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Frame:
        first = prompts[0].ids
        head = min(common_prefix(first, p.ids) for p in prompts)
        tail = min(common_prefix(first[::-1], p.ids[::-1]) for p in prompts)
        shortest = min(len(p.ids) for p in prompts)
        return cls(min(head, shortest), min(tail, max(0, shortest - head)))

    @property
    def least(self) -> int:
        """Tokens of the shortest prompt that is one."""
        return self.head + self.tail + 1

    def cut(self, ids: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The prompt, shortened to so many tokens: its end is left out, the template's part is kept."""
        if tokens >= len(ids):
            return tuple(ids)
        return (*ids[: tokens - self.tail], *(ids[len(ids) - self.tail :] if self.tail else ()))

    def inner(self, ids: Sequence[int]) -> range:
        """Positions between the template's parts."""
        return range(self.head, len(ids) - self.tail)
