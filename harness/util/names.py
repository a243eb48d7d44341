"""Names that become parts of file names: of profiles, cells, variants, scenarios, runs and logs."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

NAME_PATTERN = r"^[A-Za-z0-9](?:\.?[A-Za-z0-9_+~-])*$"
"""No slash, no leading or trailing dot, no two dots in a row and no leading dash: joined to a folder, such a name stays
in it, and no program takes it for an option."""
NAME_WORDS = "a name of letters, digits and . _ + ~ -, which begins with a letter or digit"
LONGEST = 120

SafeName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=LONGEST)]
ShortName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=60)]
"""Name of a profile: run ids are made of it, with a date in front and a few letters behind."""
GroupName = Annotated[str, StringConstraints(pattern=rf"^\(no part\)$|{NAME_PATTERN}", max_length=LONGEST)]
"""Name of a group of engines; ``(no part)`` marks a cell that no part of a merged run recorded."""
VariantName = Annotated[str, StringConstraints(pattern=rf"^$|{NAME_PATTERN}", max_length=LONGEST)]
"""Name of a variant; empty in a profile without axes."""
