"""KV connectors of a pair as data: vLLM's ``kv_connector`` and ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.profiles.engine_args import keys_in, not_plain

MULTI = "MultiConnector"
_NIXL = "Nixl"
_PUSH = "NixlPushConnector"
_SET_OTHERWISE = {
    "kv_lease_duration": "set engine.kv_lease_s",
    "num_threads": "set engine.nixl_threads",
    "kv_role": "set engine.kv_roles",
    "kv_buffer_device": "set engine.kv_buffer_device",
    "engine_id": "vLLM chooses one for each engine",
}
"""Keys that come from other settings, with what to do instead."""


def named(connector: str | None, extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the connectors at work: those that a MultiConnector puts together, or the one."""
    if connector != MULTI:
        return (connector or "NixlConnector",)
    children = extra.get("connectors")
    return tuple(str(c.get("kv_connector")) for c in children or () if isinstance(c, Mapping))


def by_nixl(connector: str | None, extra: Mapping[str, Any]) -> bool:
    """Return whether NIXL is among the connectors, whose counters prove that KV moved."""
    return any(is_nixl(name) for name in named(connector, extra))


def is_nixl(name: str) -> bool:
    return name.startswith(_NIXL)


def pushes(connector: str | None, extra: Mapping[str, Any]) -> bool:
    return _PUSH in named(connector, extra)


def problems(connector: str | None, extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a profile may not have this connector."""
    key = "kv_connector_extra_config"
    own = [dict(extra)]
    if connector == MULTI:
        listed: Any = extra.get("connectors")
        for child in listed if isinstance(listed, list) and listed else [listed]:
            inner = child.get(key, {}) if isinstance(child, Mapping) else None
            if not isinstance(inner, Mapping) or not isinstance(child.get("kv_connector"), str):
                yield (
                    f"{key}: expected connectors with {MULTI}, a list of mappings with a kv_connector and, if any, a "
                    f"mapping {key}, found {child!r}"
                )
                return
            own += [dict(child), dict(inner)]
    if code := next((k for k in keys_in(extra) if k.endswith("module_path")), None):
        yield f"{key}: {code} is not allowed, since it names code to run and a profile is only data; remove it"
    for found in own:
        if taken := next((k for k in found if k in _SET_OTHERWISE), None):
            yield f"{key}: expected no {taken}, found {found[taken]!r}; {_SET_OTHERWISE[taken]}"
    if problem := not_plain(extra):
        yield f"{key}: {problem}"
