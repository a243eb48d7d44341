"""Two requests with a common prefix are admitted in one engine step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import Pair, SameStep
from harness.prompts.model import Prompt
from harness.scenarios.base import ORDER_S, Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.possible import no_sharing, too_many
from harness.scenarios.proving import larger_steps, stage_counters


class SameStepKind(Kind[SameStep]):
    needs = frozenset({"donor", "subject"})

    def stages(self, config: SameStep, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [[_together(prompts, pair, config.max_tokens)] for pair in config.pairs]

    def impossible(self, config: SameStep, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        return no_sharing(config.pairs, prompts, profile.engine.block_size) or too_many(2, profile)

    def gaps(self, config: SameStep, seen: Occurrence) -> Iterator[Gap]:
        """Prove that both were prefilled in one step, in which the second found the first one's blocks.

        The step must have more tokens than the longer of the two, and the hits are of the second: nothing else has the
        salt.
        """
        cell, parts = seen.cell, seen.parts
        donor, subject, role = parts["donor"], parts["subject"], cell.prefilling
        counters = stage_counters(cell, donor, role)
        wanted = cell.prefix_cache.expected_hit(donor, subject, role, answered=False)
        hits = int(counters.get("prefix_hits", 0))
        if wanted.least == 0 or not wanted.least <= hits <= wanted.most:
            yield Gap(
                subject,
                f"expected the {role} engine to take {wanted.least} tokens from its prefix cache (computed for "
                f"{donor.prompt_id} in the same step), found {hits}",
                impossible=hits > wanted.most,
                hit_blocks=hits // cell.record.block_size,
            )
        floor = max(len(donor.sent_ids), len(subject.sent_ids))
        bound, found = larger_steps(cell, role, counters, floor)
        if not found:
            yield Gap(
                subject,
                f"expected one step of the {role} engine with more than {bound or floor} tokens, found none: the two "
                "prompts were not prefilled together",
            )


def _together(prompts: Mapping[str, Prompt], pair: Pair, limit: int | None) -> Stage:
    first = Send(prompts[pair.donor], "donor", "a", max_tokens=limit)
    second = Send(prompts[pair.subject], "subject", "a", max_tokens=limit, after_s=ORDER_S)
    return Stage((first, second), hold="first")
