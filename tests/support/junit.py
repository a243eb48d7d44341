"""The schema of junit.xml that viewers have in common."""

from __future__ import annotations

from pathlib import Path

import xmlschema

SCHEMA = xmlschema.XMLSchema10(Path(__file__).parent / "schemas" / "junit.xsd")
