"""Names that become parts of file names: of profiles, cells, variants, scenarios, runs and logs."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

_PATTERN = r"^[A-Za-z0-9](?:\.?[A-Za-z0-9_+~-])*$"
"""No slash, no leading or trailing dot, no two dots in a row and no leading dash: joined to a folder, such a name stays
in it, and no program takes it for an option."""
LONGEST = 120

SafeName = Annotated[str, StringConstraints(pattern=_PATTERN, max_length=LONGEST)]
ShortName = Annotated[str, StringConstraints(pattern=_PATTERN, max_length=60)]
"""Name of a profile: run ids are made of it, with a date in front and a few letters behind."""
GroupName = Annotated[str, StringConstraints(pattern=rf"^\(no part\)$|{_PATTERN}", max_length=LONGEST)]
"""Name of a group of engines; ``(no part)`` marks a cell that no part of a merged run recorded."""
VariantName = Annotated[str, StringConstraints(pattern=rf"^$|{_PATTERN}", max_length=LONGEST)]
"""Name of a variant; empty in a profile without axes."""
