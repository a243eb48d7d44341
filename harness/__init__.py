"""Correctness harness for speculative decoding and prefill/decode disaggregation.

``import harness`` offers the names of ``harness.api``, which are loaded when one of them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.version import __version__

if TYPE_CHECKING:
    from harness.api import (
        CellVerdict,
        Comparison,
        Finding,
        HarnessError,
        Judgement,
        Observation,
        Run,
        Verdict,
        acceptance,
        compare,
        judge,
        load_run,
        observations,
        write_reports,
    )

__all__ = [
    "CellVerdict",
    "Comparison",
    "Finding",
    "HarnessError",
    "Judgement",
    "Observation",
    "Run",
    "Verdict",
    "__version__",
    "acceptance",
    "compare",
    "judge",
    "load_run",
    "observations",
    "write_reports",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(import_module("harness.api"), name)


def __dir__() -> list[str]:
    return __all__
