"""Two prompts share blocks but not what precedes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import SharedBlock
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Stage, one
from harness.scenarios.possible import shared_blocks
from harness.scenarios.proving import computed_before, judge_hit, leg_of


class SharedBlockKind(Kind[SharedBlock]):
    needs = frozenset({"donor", "again", "bridge", "subject"})

    def stages(self, config: SharedBlock, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        order = (("donor", config.first), ("again", config.first), ("bridge", config.bridge))
        limit = config.max_tokens
        return [
            [
                *(one(prompts[p], part, "a", SHORT if part == "again" else limit) for part, p in order),
                one(prompts[config.second], "subject", "a", limit),
            ]
        ]

    def impossible(self, config: SharedBlock, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        size = profile.engine.block_size
        first, bridge, second = (prompts[p] for p in (config.first, config.bridge, config.second))
        if shared_blocks(first, second, size) or shared_blocks(bridge, second, size) < 1:
            return "expected `second` to share its first block with `bridge` and not with `first`"
        if first.ids[size : 2 * size] != second.ids[size : 2 * size]:
            return "expected `first` and `second` to have the same tokens in their second block"
        return None

    def gaps(self, config: SharedBlock, seen: Occurrence) -> Iterator[Gap]:
        cell, parts = seen.cell, seen.parts
        donor, again, bridge, subject = (parts[p] for p in ("donor", "again", "bridge", "subject"))
        for role in cell.roles:
            yield from computed_before(cell, donor, again, role)
            wanted = cell.prefix_cache.expected_hit(bridge, subject, role)
            yield from judge_hit(
                cell,
                subject,
                leg_of(cell, subject, role),
                wanted,
                f"it has only the start of {bridge.prompt_id} in common",
            )
