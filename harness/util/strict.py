"""The base class of all profile and record models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

_SHOWN = 300


class Strict(BaseModel):
    """A frozen model that rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def shortened(text: str) -> str:
    """Return the beginning of a text, short enough to be quoted in a sentence."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def describe_validation_error(error: ValidationError) -> str:
    """Return one line per problem: where it is, what was expected and what was found."""
    lines = []
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"]) or "(top level)"
        found = item.get("input")
        text = item["msg"]
        if item["type"] == "extra_forbidden":
            text = "unknown key; remove it or check its spelling"
        elif not isinstance(found, (dict, list)):
            text += f", found {shortened(repr(found))}"
        lines.append(f"  {where}: {text}")
    return "\n".join(lines)
