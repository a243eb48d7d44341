"""Every mutant and its trial, in the order of their ids. Plain data, which the harness reads without importing vLLM.

M1 to M11 put back the historic defects of ``docs/mutants.md``; the others are related defects. Each is declared, with
its patches and its trial, in a module of ``harness.mutants.families``.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

from harness.mutants import families
from harness.mutants.model import DECLARED, Mutant, Trial

for _family in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
    importlib.import_module(_family.name)


def _place(mutant: str) -> tuple[str, int, str]:
    found = re.fullmatch(r"([A-Z])(\d+)([a-z]?)", mutant)
    if found is None:
        raise ValueError(f"expected an id such as M1 or M1c, found {mutant!r}")
    return found[1], int(found[2]), found[3]


_IDS = sorted(DECLARED, key=_place)
MUTANTS: dict[str, Mutant] = {i: DECLARED[i][0] for i in _IDS}
TRIALS: dict[str, Trial] = {i: DECLARED[i][1] for i in _IDS}
HISTORIC = tuple(m.id for m in MUTANTS.values() if m.historic)
