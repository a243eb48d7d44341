"""Many tests in one night, and what a night may get wrong."""

from __future__ import annotations

from collections.abc import Mapping


def holm(p_values: Mapping[str, float], registered: int) -> dict[str, float]:
    """Holm-adjusted p-values (Holm 1979); below the family's alpha means rejected.

    ``registered`` is the number of tests that were announced before the run: a test without a result does not make
    the others easier to pass. Raises ValueError when there are more results than announced tests.
    """
    if len(p_values) > registered:
        raise ValueError(f"expected at most the {registered} registered tests, found {len(p_values)} results")
    adjusted: dict[str, float] = {}
    largest = 0.0
    # Ties by name, so that the same results always give the same answer.
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: (item[1], item[0]))):
        largest = max(largest, min(1.0, p * (registered - rank)))
        adjusted[name] = largest
    return adjusted


def stage_alpha(family_alpha: float, stages: int) -> float:
    """Family level of each stage when a false alarm has to pass all of them, on independent prompts and engines."""
    return float(family_alpha ** (1 / stages))
