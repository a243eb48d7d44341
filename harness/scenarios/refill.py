"""A prompt, then enough others to evict all of its blocks, then the prompt again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.observed.prefix_cache import Hit
from harness.profiles.model import Profile
from harness.profiles.scenarios import Refill
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Stage, one
from harness.scenarios.possible import unfilled
from harness.scenarios.proving import filled, judge_hit, leg_of


class RefillKind(Kind[Refill]):
    needs = frozenset({"subject"})

    def stages(self, config: Refill, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        fill = [one(prompts[p], f"fill{i}", "b", SHORT) for i, p in enumerate(config.fill)]
        limit = config.max_tokens
        return [
            [one(prompts[p], "before", "a", limit), *fill, one(prompts[p], "subject", "a", limit)]
            for p in config.prompts
        ]

    def impossible(self, config: Refill, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        return unfilled(config.fill, profile, prompts)

    def gaps(self, config: Refill, seen: Occurrence) -> Iterator[Gap]:
        cell, parts = seen.cell, seen.parts
        subject = parts["subject"]
        for role in cell.roles:
            yield from filled(cell, parts, role)
            leg = leg_of(cell, subject, role)
            yield from judge_hit(cell, subject, leg, Hit(0, 0), "all of its blocks were given to others since")
