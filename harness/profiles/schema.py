"""Profiles as text: a profile with all that it inherits, and the JSON schema for editors."""

from __future__ import annotations

import json
from typing import Any

import yaml

from harness.profiles.load import SHIPPED_PROFILES, read_profile
from harness.profiles.model import Profile

SCHEMA_FILE = SHIPPED_PROFILES / "profile.schema.json"
_RECORDED = ("sources", "variant")
"""Keys that runs record and profiles must not have."""
_SECTIONS = ("EngineConfig", "Workload")
"""Sections of a profile that may be incomplete, since it may inherit the rest."""


def full_text(source: str) -> str:
    """Return a profile as YAML with every setting, absolute paths and models as written. Raises ProfileError."""
    raw = read_profile(source).model_dump(mode="json")
    text: str = yaml.safe_dump({k: v for k, v in raw.items() if k not in _RECORDED}, sort_keys=False, width=120)
    return text


def profile_schema() -> dict[str, Any]:
    """Return the JSON schema of a profile file.

    Only ``name`` is required: other keys may come from the profile that it extends, or from its axes. A missing key is
    found when the profile is read.
    """
    schema = Profile.model_json_schema()
    for section in _SECTIONS:
        schema["$defs"][section].pop("required", None)
    schema["title"] = "kv-acceptance-harness profile"
    properties = {k: v for k, v in schema["properties"].items() if k not in _RECORDED}
    properties["extends"] = {
        "type": "string",
        "description": "A shipped profile, or a path relative to this file, that provides the keys missing here.",
    }
    properties["more_scenarios"] = properties["scenarios"] | {
        "description": "Scenarios beside those of the profile that this one extends, or in place of those by id."
    }
    properties["without_scenarios"] = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Ids of scenarios of the profile that this one extends, to leave out.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": properties,
        "required": ["name"],
    }


def schema_text() -> str:
    """Return the schema as it is stored in ``SCHEMA_FILE``."""
    return json.dumps(profile_schema(), indent=1, sort_keys=True) + "\n"
