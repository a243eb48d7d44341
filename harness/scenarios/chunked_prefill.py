"""Prompts longer than the token budget of one engine step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import ChunkedPrefill
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Stage, one


class ChunkedPrefillKind(Kind[ChunkedPrefill]):
    needs = frozenset({"subject"})

    def stages(
        self, config: ChunkedPrefill, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]
    ) -> list[list[Stage]]:
        return [[one(prompts[p], "subject", "a", config.max_tokens)] for p in config.prompts]

    def impossible(self, config: ChunkedPrefill, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        budget = profile.engine.max_num_batched_tokens
        short = [p for p in config.prompts if budget is not None and prompts[p].tokens <= budget]
        if not short:
            return None
        return (
            f"expected prompts longer than engine.max_num_batched_tokens = {budget}, found {short[0]} of "
            f"{prompts[short[0]].tokens} tokens; lower the budget or name longer prompts"
        )

    def gaps(self, config: ChunkedPrefill, seen: Occurrence) -> Iterator[Gap]:
        cell, parts = seen.cell, seen.parts
        subject, role = parts["subject"], cell.prefilling
        engine, leg = cell.engine(role), subject.leg(role)
        budget = engine.step_tokens if engine else None
        if budget is None or leg is None:
            remedy = "; start the server with VLLM_SERVER_DEV_MODE=1" if engine and engine.attached else ""
            yield Gap(
                subject, f"expected the {role} engine to say how many tokens fit into one step, found no answer{remedy}"
            )
            return
        computed = int(leg.counters.get("prompt_tokens_local_compute", 0))
        if computed <= budget:
            yield Gap(
                subject,
                f"expected the {role} engine to compute more prompt tokens than the {budget} of one step, found "
                f"{computed}: the prompt was not prefilled in chunks",
            )
