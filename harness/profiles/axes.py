"""Axes of a profile: settings that are varied, and the plain profile of each combination."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

Overrides = dict[str, Any]
"""The settings of a profile that an axis value changes."""
VARIABLE = frozenset(
    {"target", "tokenizer", "topologies", "methods", "routes", "engine", "workload", "scenarios", "expected"}
)
"""Keys of a profile that the values of an axis may set."""
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
MODEL_KEYS = frozenset({"target", "tokenizer", "drafter", "prefill_drafter"})
"""Keys of a profile whose values are models: a path, or a name on the hub."""
PATH_KEYS = MODEL_KEYS | {"prompts", "baselines", "known_defects"}
"""Keys of a profile whose values are paths."""


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``: mappings are merged key by key; everything else is replaced.

    Models are replaced too: half of one name and half of another make no model.
    """
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and key not in MODEL_KEYS:
            out[key] = merged(old, value)
        else:
            out[key] = value
    return out


def leaves(value: Mapping[str, Any], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the paths of the settings in a mapping."""
    out: set[tuple[str, ...]] = set()
    for key, inner in value.items():
        deep = isinstance(inner, Mapping) and key not in MODEL_KEYS
        out |= leaves(inner, (*above, str(key))) if deep else {(*above, str(key))}
    return out


def check_axes(axes: Mapping[str, Any]) -> None:
    """Raise ValueError, with a sentence for the user, when axes cannot be expanded."""
    seen: dict[str, str] = {}
    for axis, values in axes.items():
        if not isinstance(values, Mapping) or not values:
            raise ValueError(f"axis {axis}: expected values by name, each with what it changes, found {values!r}")
        for name, changes in values.items():
            if not isinstance(name, str) or not _VALUE.fullmatch(name):
                raise ValueError(
                    f"axis {axis}: expected names of letters, digits, '-' and '_', in quotes where YAML would read a "
                    f"number, found {name!r}"
                )
            if not isinstance(changes, Mapping) or set(changes) - VARIABLE:
                raise ValueError(
                    f"axis {axis}, value {name}: expected settings among {', '.join(sorted(VARIABLE))}, found "
                    f"{changes!r}"
                )
            if name in seen:
                raise ValueError(f"axis {axis}: expected unique names, found {name}, which axis {seen[name]} has too")
            seen[name] = axis
        first = next(iter(values))
        for name, changes in values.items():
            missing = leaves(values[first]) - leaves(changes)
            if missing:
                what = ", ".join(".".join(path) for path in sorted(missing))
                raise ValueError(f"axis {axis}, value {name}: expected it to set {what}, as the default {first} does")


def variants(axes: Mapping[str, Mapping[str, Any]], combine: str) -> list[str]:
    """Return the names of all combinations; for each value of the first axis, the one with all defaults comes first."""
    first, *others = [list(values) for values in axes.values()]
    out = []
    for lead in first:
        for chosen in product(*others):
            changed = [v for v, values in zip(chosen, others, strict=True) if v != values[0]]
            if combine == "product" or len(changed) <= 1:
                out.append(".".join([lead, *changed]))
    return sorted(out, key=lambda v: (first.index(v.split(".")[0]), v.count(".")))


def part_of(data: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """Return a profile as data with the settings of one variant and without axes; a plain profile is unchanged."""
    axes: Mapping[str, Mapping[str, Any]] = data.get("axes") or {}
    if not variant or not axes:
        return dict(data)
    named = variant.split(".")
    out: dict[str, Any] = {**data, "axes": {}, "variant": variant}
    for values in axes.values():
        out = merged(out, next((values[n] for n in named if n in values), {}))
    return out
