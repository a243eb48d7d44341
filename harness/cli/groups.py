"""Groups of options: a parameter whose type is a NamedTuple of options stands for each of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with the options of its groups in the places of these groups, as typer reads signatures."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: t for n, t in hints.items() if isinstance(t, type) and hasattr(t, "_field_defaults")}
    if not groups:
        return command
    parameters: list[inspect.Parameter] = []
    for p in inspect.signature(command).parameters.values():
        kind = groups.get(p.name)
        own = get_type_hints(kind, include_extras=True) if kind is not None else {p.name: hints[p.name]}
        defaults = kind._field_defaults if kind is not None else {p.name: p.default}
        parameters += [
            inspect.Parameter(n, p.KEYWORD_ONLY, default=defaults.get(n, p.empty), annotation=own[n]) for n in own
        ]

    @functools.wraps(command)
    def called(**given: Any) -> Any:
        made = {name: kind(**{field: given.pop(field) for field in kind._fields}) for name, kind in groups.items()}
        return command(**given, **made)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called
