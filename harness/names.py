"""Names that become parts of file names: of profiles, cells, variants, scenarios, runs and logs."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

_PATTERN = r"^[A-Za-z0-9](?:\.?[A-Za-z0-9_+~-])*$"
"""No slash, no beginning or end with a dot and no two in a row: such a name is a file in the folder that it is joined
to, and no option of a program."""
LONGEST = 120

SafeName = Annotated[str, StringConstraints(pattern=_PATTERN, max_length=LONGEST)]
ShortName = Annotated[str, StringConstraints(pattern=_PATTERN, max_length=60)]
"""Of profiles: ids of runs are made of them, with a date before and a few letters behind."""
GroupName = Annotated[str, StringConstraints(pattern=rf"^\(no part\)$|{_PATTERN}", max_length=LONGEST)]
"""Of engines; ``(no part)`` in a merged run stands for none."""
VariantName = Annotated[str, StringConstraints(pattern=rf"^$|{_PATTERN}", max_length=LONGEST)]
"""Empty in a profile without axes."""
