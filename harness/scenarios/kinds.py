"""The kinds of scenarios by name, each declared in a module of this package."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, get_args

from harness import scenarios
from harness.profiles.scenarios import Scenario
from harness.scenarios.base import Kind

for _module in pkgutil.iter_modules(scenarios.__path__, f"{scenarios.__name__}."):
    importlib.import_module(_module.name)


def _name_of(kind: type[Kind[Any]]) -> str:
    """Return the ``kind`` that profiles name, which the type of the kind's configuration has."""
    (config,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    (name,) = get_args(config.model_fields["kind"].annotation)
    return str(name)


# A class that lacks what every kind has cannot be made, so that nothing starts.
KINDS: dict[str, Kind[Any]] = {_name_of(kind): kind() for kind in Kind.__subclasses__()}
"""By the ``kind`` that a profile names."""


def kind_of(scenario: Scenario) -> Kind[Any]:
    return KINDS[scenario.kind]
