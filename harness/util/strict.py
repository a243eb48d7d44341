"""The base class of all profile and record models."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.util import json_io

_SHOWN = 300
_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """A frozen model that rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def part_of(path: Path, kind: type[_Model]) -> _Model | None:
    """Return what a model reads of a JSON file; None when there is no such file, or it is damaged."""
    try:
        return kind.model_validate(json_io.loads(json_io.read_text(path, 256 * json_io.MIB)))
    except (OSError, ValueError):
        return None


def shortened(text: str) -> str:
    """Return the beginning of a text, short enough to be quoted in a sentence."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


_KINDS = {list: "a list", type(None): "nothing"}


def describe_validation_error(error: ValidationError) -> str:
    """Return one line per problem: where it is, what was expected and what was found."""
    lines = []
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"]) or "(top level)"
        found = item.get("input")
        text = item["msg"]
        if item["type"] == "extra_forbidden":
            text = "unknown key; remove it or check its spelling"
        elif item["type"] in ("model_type", "dict_type"):
            text = f"expected keys with values, found {_KINDS.get(type(found), shortened(repr(found)))}"
        elif not isinstance(found, (dict, list)):
            text += f", found {shortened(repr(found))}"
        lines.append(f"  {where}: {text}")
    return "\n".join(lines)
