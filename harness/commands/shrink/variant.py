"""A case that can be shrunk: the requests of one run through a scenario, one of which is judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from harness.history.records import COLD
from harness.history.token_ids import common_prefix
from harness.profiles.scenarios import Api, tokens_asked
from harness.prompts.model import Prompt
from harness.scenarios.base import Script, Send, Stage


def _without_timing(send: Send) -> Send:
    """Return the request without its timing relative to others."""
    return send._replace(after_s=0.0, after=(), last=False)


class Variant(NamedTuple):
    """Stages of requests, and the one that is judged."""

    scenario: str
    stages: tuple[Stage, ...]
    part: str

    @property
    def script(self) -> Script:
        return Script(self.scenario, 0, self.stages)

    @property
    def subject(self) -> Send:
        return next(s for s in self.script.sends if s.part == self.part)

    @property
    def others(self) -> tuple[str, ...]:
        """Parts of all other requests, except those sent between the legs of another."""
        return tuple(s.part for s in self.script.sends if s.part != self.part)

    @property
    def requests(self) -> int:
        return self.script.requests

    def alone(self) -> Variant:
        """Return only the judged request, as a cold prompt."""
        send = _without_timing(self.subject)._replace(group="a", part="subject", between=())
        return Variant(COLD, (Stage((send,)),), "subject")

    def only(self, parts: Collection[str]) -> Variant:
        """Keep only the named other requests; a stage with one request left no longer holds engines."""
        stages = []
        for stage in self.stages:
            sends = tuple(s for s in stage.sends if s.part == self.part or s.part in parts)
            if len(sends) > 1:
                stages.append(Stage(sends, stage.hold))
            elif sends:
                stages.append(Stage((_without_timing(sends[0]),)))
        return self._replace(stages=tuple(stages))

    def with_ids(self, ids: Sequence[int]) -> Variant:
        """Replace the judged prompt, wherever it is sent."""
        old = self.subject.prompt
        new = prompt_of(old, ids)
        return self._changed(lambda s: _by_ids(s._replace(prompt=new)) if s.prompt.id == old.id else s)

    def with_answer(self, prompt_id: str, answer: tuple[int, ...]) -> Variant:
        """Return the same with the right answer to a prompt, which parameters and their numbers of tokens follow."""
        old = self.subject

        def known(send: Send) -> Send:
            if send.prompt.id != prompt_id:
                return send
            prompt = send.prompt.model_copy(update={"expected": answer})
            asked = tokens_asked(send.feature, len(answer)) if send.feature is not None else None
            limits = [n for n in (asked, send.max_tokens) if n is not None]
            return send._replace(prompt=prompt, max_tokens=min(limits, default=None))

        return self._changed(lambda s: known(s) if s.part != old.part or s.feature is not None else s)

    def asking(self, max_tokens: int) -> Variant:
        """Limit the output tokens of the judged request."""
        return self._changed(lambda s: s._replace(max_tokens=max_tokens) if s.part == self.part else s)

    def _changed(self, change: Callable[[Send], Send]) -> Variant:
        stages = tuple(stage._replace(sends=tuple(change(s) for s in stage.sends)) for stage in self.stages)
        return self._replace(stages=stages)


def _by_ids(send: Send) -> Send:
    """Return the request by ids, where its own text and messages are those of another prompt."""
    apis: dict[Api, Api] = {"text": "completion", "chat": "completion", "chat-stream": "completion-stream"}
    return send._replace(api=apis.get(send.api, send.api))


def prompt_of(old: Prompt, ids: Sequence[int]) -> Prompt:
    """Return a prompt with these ids, without text and known answer."""
    return old.model_copy(update={"ids": tuple(ids), "tokens": len(ids), "text": "", "expected": None})


class Frame(NamedTuple):
    """The common beginning and end of the prompts of a set, which come from the chat template.

    A prompt that continues another after its end, as the next turn of a chat does, has no end of the template.
    """

    head: int
    tail: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Frame:
        first = prompts[0].ids
        head = min(common_prefix(first, p.ids) for p in prompts)
        whole = {p.ids for p in prompts}
        ended = [p for p in prompts if not any(p.ids[:n] in whole for n in range(head, len(p.ids)))]
        tail = min(common_prefix(ended[0].ids[::-1], p.ids[::-1]) for p in ended)
        shortest = min(len(p.ids) for p in prompts)
        return cls(min(head, shortest), min(tail, max(0, shortest - head)))

    @property
    def least(self) -> int:
        """Tokens of the shortest valid prompt."""
        return self.head + self.tail + 1

    def cut(self, ids: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Shorten the prompt to ``tokens`` tokens by removing text before the template's end."""
        if tokens >= len(ids):
            return tuple(ids)
        return (*ids[: tokens - self.tail], *(ids[len(ids) - self.tail :] if self.tail else ()))

    def inner(self, ids: Sequence[int]) -> range:
        """Return the positions between the template's beginning and end."""
        return range(self.head, len(ids) - self.tail)
