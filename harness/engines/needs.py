"""What the requests of a group of engines need of the engines' settings, beyond those that all requests need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.history.records import COLD
from harness.scenarios.base import Script
from harness.workload.cells import CellWork


class Needs(NamedTuple):
    """What the requests need, each with the scenarios that need it."""

    prompts: dict[str, int]
    """The longest prompt of each scenario, or the prompts that it sends at once together: what one step must hold for
    prompts to be prefilled whole."""
    context: int
    """Tokens of the longest prompt with its answer."""
    together: tuple[str, ...]
    """Scenarios with several requests under way at the same time."""
    sharing: tuple[str, ...]
    """Scenarios whose requests may find blocks of others in the prefix cache."""

    @classmethod
    def of(cls, works: Iterable[CellWork], max_tokens: int) -> Needs:
        """Return what these requests need; ``max_tokens`` is the length of an answer that says none of its own."""
        works = list(works)
        cold = [item.prompt.tokens for work in works for item in work.items]
        found = cls.of_scripts([script for work in works for script in work.scripts], max_tokens)
        if not cold:
            return found
        return found._replace(
            prompts={COLD: max(cold), **found.prompts}, context=max(found.context, max(cold) + max_tokens)
        )

    @classmethod
    def of_scripts(cls, played: Iterable[Script], max_tokens: int) -> Needs:
        """Return what the requests of these scripts need."""
        prompts: dict[str, int] = {}
        context = 0
        sharing: list[str] = []
        crowded: list[str] = []
        for script in played:
            groups = [send.group for send in script.sends]
            if len(set(groups)) < len(groups):
                sharing.append(script.scenario)
            for stage in script.stages:
                together = sum(send.prompt.tokens for send in stage.sends)
                prompts[script.scenario] = max(prompts.get(script.scenario, 0), together)
                crowded += [script.scenario] if len(stage.sends) > 1 else []
                for send in stage.sends:
                    context = max(context, send.prompt.tokens + (send.max_tokens or max_tokens))
        return cls(prompts, context, tuple(dict.fromkeys(crowded)), tuple(dict.fromkeys(sharing)))

    def of_more_than(self, step: int) -> list[str]:
        """Return the scenarios whose prompts do not fit one step of so many tokens."""
        return [scenario for scenario, tokens in self.prompts.items() if tokens > step]
