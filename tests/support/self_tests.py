"""Results of self-tests and of A/A runs, made by hand."""

from __future__ import annotations

from harness.history.verdict import Verdict
from harness.reports.aa_result import AgainstItself, Count
from harness.reports.selftest_result import Control, Kill, MutantOutcome, SelfTest


def outcome(kill: Kill) -> MutantOutcome:
    return MutantOutcome(
        mutant="M1",
        kill=kill,
        reason="because | <script>",
        expected="x",
        found=("pd-eagle3 cold: <script>alert(1)</script>",),
        checks={"tokens-baseline": Verdict.REGRESSION, "complete": Verdict.PASS},
        fired=True,
        folder="M1",
        seconds=1.0,
    )


def self_test(kills: list[Kill], controls: list[Verdict], **changes) -> SelfTest:
    base = SelfTest(
        run_id="r",
        started="2026-01-01",
        profile="cpu",
        versions={"vllm": "0"},
        hardware={},
        asked=("M1",) * len(kills),
        outcomes=tuple(outcome(k) for k in kills),
        controls=tuple(Control(id="c", verdict=v, requests=1, folder="control-c", seconds=1.0) for v in controls),
        engine_starts=2,
        seconds=10.0,
    )
    return base.model_copy(update=changes)


def against_itself(*counts: Count, **changes) -> AgainstItself:
    base = AgainstItself(
        run_id="r", started="2026-01-01", profile="cpu", versions={}, repetitions=2, counts=counts, seconds=1.0
    )
    return base.model_copy(update=changes)
