"""Control of the error rate over the many tests of one run."""

from __future__ import annotations

from collections.abc import Mapping


def holm(p_values: Mapping[str, float], registered: int) -> dict[str, float]:
    """Return Holm-adjusted p-values (Holm 1979); one below the family's alpha is a rejection.

    ``registered`` is the number of tests registered before the run: a test without a result must not loosen the
    correction of the others. Raises ValueError when there are more results than registered tests.
    """
    if len(p_values) > registered:
        raise ValueError(f"expected at most the {registered} registered tests, found {len(p_values)} results")
    adjusted: dict[str, float] = {}
    largest = 0.0
    # Break ties by name, so that the same results always give the same answer.
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: (item[1], item[0]))):
        largest = max(largest, min(1.0, p * (registered - rank)))
        adjusted[name] = largest
    return adjusted


def stage_alpha(family_alpha: float, stages: int) -> float:
    """Return the family level of each stage, where a false alarm has to pass all of them independently."""
    return float(family_alpha ** (1 / stages))
