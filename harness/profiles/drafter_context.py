"""Drafters whose context is shorter than the target's, beyond which vLLM drafts nothing without saying so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from harness.profiles.kv_layout import config_in
from harness.profiles.methods import Method
from harness.profiles.model import Profile
from harness.profiles.model_reference import described_in


class ShortDrafter(NamedTuple):
    """A method whose drafter has a shorter context than the engines."""

    method: str
    tokens: int
    """Tokens of prompt and answer beyond which nothing is drafted."""
    by: str
    """What says so."""
    engine_tokens: int

    @property
    def words(self) -> str:
        return (
            f"{self.method}: model runner V1 drafts nothing in a step with a request of more than {self.tokens} "
            f"tokens ({self.by}; engine.max_model_len is {self.engine_tokens})"
        )


def short_drafters(profile: Profile) -> list[ShortDrafter]:
    """Return the methods whose drafters have a shorter context than the engines have, in vLLM 0.32.0's model runner V1.
    V2 takes the target's."""
    if profile.engine.model_runner == "V2":
        return []
    found = (_short(method, profile.engine.max_model_len) for method in profile.methods)
    return [short for short in found if short is not None]


def _short(method: Method, engine_tokens: int) -> ShortDrafter | None:
    if method.traits.drafter == "none":
        return None
    own = config_in(described_in(method.drafter)) if method.drafter is not None else {}
    limits = {
        "max_model_len of its speculative_config": method.given_config.get("max_model_len"),
        "max_position_embeddings of its config.json": _positions(own),
    }
    shortest = min(((n, by) for by, n in limits.items() if isinstance(n, int)), default=None)
    # As ``_input_fits_in_drafter``: what the longest request has, and the tokens that would be drafted.
    room = method.draft_tokens + method.traits.bonus_slot
    if shortest is None or shortest[0] >= engine_tokens:
        return None
    return ShortDrafter(method.kind, max(0, shortest[0] - room), f"{shortest[1]}, {shortest[0]}", engine_tokens)


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return the context of a model by its config; None where it does not tell, as with scaled positions."""
    text = config.get("text_config", config)
    scaled = isinstance(text, Mapping) and (text.get("rope_scaling") or _scaled(text.get("rope_parameters")))
    found = text.get("max_position_embeddings") if isinstance(text, Mapping) and not scaled else None
    return found if isinstance(found, int) else None


def _scaled(parameters: object) -> bool:
    return isinstance(parameters, Mapping) and "factor" in parameters
