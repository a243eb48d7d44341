"""How differences of log-probs are told."""

from __future__ import annotations

import pytest

from harness.judging.checks.logprobs import _digits


@pytest.mark.parametrize("bound", [1e-7, 1e-5, 3.4e-5, 1e-3, 0.25])
def test_a_difference_beyond_the_bound_always_shows(bound):
    digits = _digits(bound)
    assert f"{2.1587:.{digits}f}" != f"{2.1587 + 1.01 * bound:.{digits}f}"
    assert float(f"{bound:.{digits}f}") > 0
