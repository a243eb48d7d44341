"""The base class of all profile and record models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from harness.util import json_io

_SHOWN = 300
_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """A frozen model that rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy without the cached properties, which may be other ones after an update."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


def part_of(path: Path, kind: type[_Model]) -> _Model | None:
    """Return what a model reads of a JSON file; None when there is no such file, or it is damaged."""
    try:
        return kind.model_validate(json_io.loads(json_io.read_text(path, 256 * json_io.MIB)))
    except (OSError, ValueError):
        return None


def shortened(text: str) -> str:
    """Return the beginning of a text, short enough to be quoted in a sentence."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
