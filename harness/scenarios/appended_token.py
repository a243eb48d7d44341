"""D's prompt is P's and the token that P answered with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import AppendedToken
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.possible import shared_blocks
from harness.scenarios.proving import computed_before


class AppendedTokenKind(Kind[AppendedToken]):
    needs = frozenset({"donor", "subject"})

    def needed(self, config: AppendedToken) -> frozenset[str]:
        return self.needs - (frozenset() if config.donor else {"donor"})

    def stages(
        self, config: AppendedToken, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]
    ) -> list[list[Stage]]:
        return [_of(config, prompts, p) for p in config.prompts]

    def impossible(self, config: AppendedToken, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        """Return why D's last token would not be P's answer, or why D has nothing cached, or None."""
        drops_block = any(method.traits.drops_block for method in profile.methods)
        for name in config.prompts:
            if not any(_continues(prompts[name], p) for p in prompts.values()):
                return (
                    f"expected the last token of {name} to be the answer to those before it, which a copy or "
                    "echo prompt tells, found none that does; name a prompt that continues one"
                )
            if config.donor is not None:
                shared = shared_blocks(prompts[config.donor], prompts[name], profile.engine.block_size)
                if shared <= drops_block:
                    return (
                        f"expected the donor {config.donor} to have {1 + drops_block} whole blocks in common with "
                        f"{name}, found {shared}; name another one"
                    )
        return None

    def gaps(self, config: AppendedToken, seen: Occurrence) -> Iterator[Gap]:
        """Prove that D had blocks of the earlier prompt cached; what P and D were asked, the echoed prompts prove."""
        cell, parts = seen.cell, seen.parts
        if config.donor is None:
            return iter(())
        return computed_before(cell, parts["donor"], parts["subject"], cell.answering)


def _of(config: AppendedToken, prompts: Mapping[str, Prompt], name: str) -> list[Stage]:
    subject = Stage((Send(prompts[name], "subject", "a", max_tokens=config.max_tokens, appended=True),))
    if config.donor is None:
        return [subject]
    return [Stage((Send(prompts[config.donor], "donor", "a", "local", max_tokens=SHORT),)), subject]


def _continues(turn: Prompt, prompt: Prompt) -> bool:
    """Return whether the one prompt is the other with the beginning of its known answer."""
    return turn.tokens > prompt.tokens and (*prompt.ids, *(prompt.expected or ()))[: turn.tokens] == turn.ids
