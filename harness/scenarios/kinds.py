"""The kinds of scenarios by name."""

from __future__ import annotations

from typing import Any

from harness.profiles.scenarios import Scenario
from harness.scenarios.appended_token import AppendedTokenKind
from harness.scenarios.base import Kind
from harness.scenarios.chunked_prefill import ChunkedPrefillKind
from harness.scenarios.concurrent import ConcurrentKind
from harness.scenarios.continuation import ContinuationKind
from harness.scenarios.crowd import CrowdKind
from harness.scenarios.features import FeaturesKind
from harness.scenarios.late_pull import LatePullKind
from harness.scenarios.prefix_hit import PrefixHitKind
from harness.scenarios.pressure import PressureKind
from harness.scenarios.recovery import RecoveryKind
from harness.scenarios.refill import RefillKind
from harness.scenarios.same_step import SameStepKind
from harness.scenarios.sampled import SampledKind
from harness.scenarios.second_prefill import SecondPrefillKind
from harness.scenarios.shared_block import SharedBlockKind
from harness.scenarios.trace import TraceKind

KINDS: dict[str, Kind[Any]] = {
    "appended-token": AppendedTokenKind(),
    "chunked-prefill": ChunkedPrefillKind(),
    "concurrent": ConcurrentKind(),
    "continuation": ContinuationKind(),
    "crowd": CrowdKind(),
    "features": FeaturesKind(),
    "late-pull": LatePullKind(),
    "prefix-hit": PrefixHitKind(),
    "pressure": PressureKind(),
    "recovery": RecoveryKind(),
    "refill": RefillKind(),
    "same-step": SameStepKind(),
    "sampled": SampledKind(),
    "second-prefill": SecondPrefillKind(),
    "shared-block": SharedBlockKind(),
    "trace": TraceKind(),
}
"""By the ``kind`` that a profile names."""


def kind_of(scenario: Scenario) -> Kind[Any]:
    return KINDS[scenario.kind]
