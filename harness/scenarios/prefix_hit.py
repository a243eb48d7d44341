"""A request finds the first blocks of its prompt in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import SentTo
from harness.profiles.model import Profile
from harness.profiles.scenarios import PrefixHit
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Send, Stage, one
from harness.scenarios.possible import no_sharing
from harness.scenarios.proving import judge_hit, leg_of


class PrefixHitKind(Kind[PrefixHit]):
    needs = frozenset({"donor", "subject"})

    def stages(self, config: PrefixHit, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        if isinstance(config.pairs, int):
            return [_ask(config, p, p) for p in chosen]
        return [_ask(config, prompts[pair.donor], prompts[pair.subject]) for pair in config.pairs]

    def impossible(self, config: PrefixHit, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        named = () if isinstance(config.pairs, int) else config.pairs
        return no_sharing(named, prompts, profile.engine.block_size)

    def gaps(self, config: PrefixHit, seen: Occurrence) -> Iterator[Gap]:
        cell, parts = seen.cell, seen.parts
        donor, subject = parts["donor"], parts["subject"]
        role = "prefill" if config.where == "prefill" else cell.answering
        wanted = cell.prefix_cache.expected_hit(donor, subject, role)
        if wanted.least == 0:
            yield Gap(
                subject, "expected a pair of prompts that gives a prefix hit with this method, found none; share more"
            )
            return
        why = f"its first blocks were computed for {donor.prompt_id}"
        yield from judge_hit(cell, subject, leg_of(cell, subject, role), wanted, why)


def _ask(config: PrefixHit, donor: Prompt, subject: Prompt) -> list[Stage]:
    route: SentTo = "local" if config.where == "decode" else "prefill"
    first = Stage((Send(donor, "donor", "a", route, max_tokens=SHORT),))
    return [first, one(subject, "subject", "a", config.max_tokens)]
