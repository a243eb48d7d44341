"""What the gates of single answers notice of damage that the gate of three nats missed, and how often they name a right
answer. docs/evidence/error-rates.md has the figures of all lines."""

from __future__ import annotations

import numpy as np
import pytest

from tests.statistics.damaged import DAMAGES, LEVEL, RIGHT, Damage, RoundedBy, notice
from tests.statistics.nights import Share

MISSED = [
    d for d in DAMAGES if d.name.startswith(("one answer by", "1 in", "5 % of the aligned", "drafter lost for 5"))
]
FINE, COARSE = RoundedBy(0.06), RoundedBy(0.12, heavy=True)


def of(nights: int, rounding: RoundedBy, damage: Damage) -> list:
    rng = np.random.default_rng(1)
    return [notice(rounding, damage, rng) for _ in range(nights)]


@pytest.mark.parametrize("rounding", [FINE, COARSE], ids=str)
@pytest.mark.parametrize("damage", MISSED, ids=lambda d: d.name)
def test_what_was_missed_is_noticed_and_comes_again(damage, rounding):
    found = of(10, rounding, damage)
    assert sum(n.now for n in found) >= 9
    assert sum(n.again for n in found) >= 9


@pytest.mark.parametrize("nights", [100, pytest.param(5_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("rounding", [FINE, COARSE], ids=str)
def test_right_answers_are_not_named(rounding, nights):
    named = Share(sum(n.gates > 0 for n in of(nights, rounding, RIGHT)), nights)
    print(f"{rounding}: {named}")
    assert named.low <= LEVEL


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d.where == "prompts"], ids=lambda d: d.name)
def test_no_right_answer_is_named_beside_damaged_ones(damage):
    assert sum(n.right for n in of(5, FINE, damage)) == 0
