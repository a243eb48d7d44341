"""Engines grow old by many short requests, and answer the prompts again that they answered when they were young."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import Aged
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Send, Stage, one


class AgedKind(Kind[Aged]):
    needs = frozenset({"young0", "old0"})

    def stages(self, config: Aged, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        asked, limit = [prompts[p] for p in config.prompts], config.max_tokens
        # One of them twice, which tells age from the second time.
        young = [one(prompt, f"young{n}", f"young{n}", limit) for n, prompt in enumerate([*asked, asked[0]])]
        old = [
            Stage((Send(prompt, f"old{n}", f"old{n}", max_tokens=limit, ageing=0 if n else config.requests),))
            for n, prompt in enumerate(asked)
        ]
        return [[*young, *old]]

    def impossible(self, config: Aged, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        return None

    def gaps(self, config: Aged, seen: Occurrence) -> Iterator[Gap]:
        """Prove that every engine answered the short requests, as its counters say."""
        first = seen.parts["old0"]
        for role in seen.cell.roles:
            engine = seen.cell.engine(role)
            finished = first.aged_by.get(engine.role if engine else role, 0)
            if finished < config.requests:
                yield Gap(
                    first,
                    f"expected the {role} engine to answer {config.requests} requests of one token before this prompt, "
                    f"found {finished} answered: the engines are as young as before",
                )
