"""Base of all config and record models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Immutable, no unknown keys, and no number that is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
