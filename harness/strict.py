"""Base of all config and record models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Immutable, and no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
