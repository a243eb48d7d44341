"""P computes enough other prompts to use its whole pool before D pulls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import LatePull
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.possible import unfilled
from harness.scenarios.proving import filled


class LatePullKind(Kind[LatePull]):
    needs = frozenset({"subject"})

    def stages(self, config: LatePull, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        between = tuple(
            Send(prompts[p], f"fill{i}", "b", "prefill", max_tokens=SHORT) for i, p in enumerate(config.fill)
        )
        return [
            [Stage((Send(prompts[p], "subject", "a", max_tokens=config.max_tokens, between=between),))]
            for p in config.prompts
        ]

    def impossible(self, config: LatePull, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        return unfilled(config.fill, profile, prompts)

    def gaps(self, config: LatePull, seen: Occurrence) -> Iterator[Gap]:
        return filled(seen.cell, seen.parts, "prefill")
