"""Sampling at a temperature so low that the margins still force every token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import Sampled
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Send, Stage

_CHANCE = 1e-4
"""Largest accepted probability, over a whole request, that sampling picks a token other than the likeliest."""
_VOCABULARY = 300_000
"""Upper bound of the vocabulary size of any model in use."""


class SampledKind(Kind[Sampled]):
    needs = frozenset({"subject"})

    def stages(self, config: Sampled, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [
            [Stage((Send(prompts[p], "subject", "a", max_tokens=config.max_tokens, temperature=config.temperature),))]
            for p in config.prompts
        ]

    def impossible(self, config: Sampled, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        return None

    def gaps(self, config: Sampled, seen: Occurrence) -> Iterator[Gap]:
        """Prove that the temperature is above zero, and that the recorded margins force every token nevertheless.

        Any other token has at most the probability exp(-gap / T); the union bound is over vocabulary and output length.
        """
        subject = seen.parts["subject"]
        if subject.temperature <= 0:
            yield Gap(subject, "expected a temperature above zero, found greedy decoding: nothing was sampled")
            return
        margin = seen.margin(subject.prompt_id)
        if margin is None:
            yield Gap(
                subject, "expected this prompt's margins in the no-speculation baseline, found none: record it anew"
            )
            return
        chance = margin.tokens * _VOCABULARY * math.exp(-margin.nats / subject.temperature)
        if chance > _CHANCE:
            yield Gap(
                subject,
                f"expected margins that force every token at temperature {subject.temperature:g}, found a "
                f"smallest one of {margin.nats:.2f} nats, which leaves a chance of up to "
                f"{min(chance, 1.0):.2g} for another token: lower the temperature or choose another prompt",
            )
