"""The schema of junit.xml that viewers have in common."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xmlschema import XMLSchema10


@functools.cache
def schema() -> XMLSchema10:
    # Imported here: it takes a second, in every process that collects tests.
    from xmlschema import XMLSchema10

    return XMLSchema10(Path(__file__).parent / "schemas" / "junit.xsd")
