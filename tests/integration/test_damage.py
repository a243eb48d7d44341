"""No damage to what was recorded may leave a run green, unless it is listed with the reason why it may."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.support import damage

pytestmark = pytest.mark.computes

BASE = damage.read(damage.BASE)


def first_of(case: damage.Case) -> str:
    """The field below which a value lies."""
    return case.kind.name.rsplit(":", 1)[0].split(".")[0]


SAMPLED = sorted({first_of(case) for case in damage.cases(BASE, every=False)})


def outcomes(first: str, every: bool, folder: Path) -> dict[damage.Case, str]:
    """What comes of each case whose value lies below this field."""
    found = [c for c in damage.cases(BASE, every) if first_of(c) == first]
    return {case: damage.outcome(damage.damaged(BASE, case), folder / "run") for case in found}


def unexplained(found: dict[damage.Case, str]) -> list[str]:
    return [case.name for case, came in found.items() if came in damage.GREEN and damage.reason(case.kind) is None]


def test_undamaged_run_is_green(tmp_path):
    assert damage.outcome(BASE, tmp_path / "run") == "nothing changed"
    assert damage.judged(damage.load_history(damage.BASE), damage.REFERENCES).verdict.value == "PASS"


def test_there_are_enough_kinds():
    assert len(damage.kinds(BASE)) >= 100 and len(damage.cases(BASE, every=False)) >= 300


@pytest.mark.parametrize("first", SAMPLED)
def test_damage_is_never_green_without_a_reason(first, tmp_path):
    """A sample of the kinds, each with one value, half of them or all."""
    assert unexplained(outcomes(first, False, tmp_path)) == []


@pytest.mark.exhaustive
def test_every_case_and_every_reason(tmp_path):
    """Every case; and every reason is needed."""
    found: dict[damage.Case, str] = {}
    for first in sorted({first_of(case) for case in damage.cases(BASE)}):
        found |= outcomes(first, True, tmp_path)
    assert unexplained(found) == []
    assert not any(came.startswith("crash") for came in found.values())
    used = Counter(damage.reason(case.kind) for case, came in found.items() if came in damage.GREEN)
    assert set(used) == set(damage.BENIGN.values())
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for case, came in found.items():
        table[case.kind.where][came] += 1
    print({where: dict(counts) for where, counts in table.items()})
