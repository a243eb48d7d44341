"""What a server that ran already cannot be blamed for: others may use it, and it may draft otherwise than the profile.

An engine that this harness started serves nobody else, and drafts as it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.history.engine_interfaces import PER_REQUEST_FLAG
from harness.history.verdict import Verdict, worst
from harness.judging.checks.counters import requests_of_others
from harness.judging.evidence import CellView
from harness.judging.findings import CheckResult, Finding
from harness.util.text import counted

_ACCEPTANCE = "acceptance-"


def without_blame(cell: CellView, results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the results with findings UNKNOWN that an attached server cannot be blamed for."""
    attached = {role for role in cell.engine_roles if (engine := cell.engine(role)) is not None and engine.attached}
    if not attached:
        return list(results)
    others = requests_of_others(cell, attached)
    drafts = _drafts_per_step(cell)
    wanted = cell.record.draft_tokens

    def excuse(finding: Finding) -> str:
        if others:
            # Of any answer of the cell: one that shares its steps with a request need not see the end of that.
            return (
                f"; but the server finished {counted(others, 'request')} of other clients meanwhile, so this says "
                "nothing of vLLM: keep them away, and run again"
            )
        if finding.check.startswith(_ACCEPTANCE) and drafts not in (None, wanted) and not cell.traits.up_to:
            return (
                f"; but the server drafts {drafts} tokens a step, where the profile says {wanted}: set "
                f"num_speculative_tokens: {drafts} in the profile, or start the server with {wanted}"
            )
        return ""

    return [_excused(result, excuse) for result in results]


def why_in_total(cell: CellView) -> str:
    """Return why acceptance is compared in total and not step by step, and what to do where something can be done."""
    engine = cell.engine(cell.answering)
    if engine is not None and engine.attached:
        return (
            "the server reports none per request; start the servers with "
            f"`{PER_REQUEST_FLAG} detailed` to compare each step"
        )
    return "this version of vLLM reports none per request"


def _drafts_per_step(cell: CellView) -> int | None:
    """Return how many tokens the answering engine drafts in a step, by its counters; None where it drafted none."""
    grown = [leg.counters for _, leg, _ in cell.answers().values()]
    steps, tokens = (sum(c.get(name, 0.0) for c in grown) for name in ("drafts", "draft_tokens"))
    return round(tokens / steps) if steps else None


def _excused(result: CheckResult, excuse: Callable[[Finding], str]) -> CheckResult:
    findings = tuple(
        f.model_copy(update={"verdict": Verdict.UNKNOWN, "damage": "nothing-tested", "message": f.message + why})
        if f.verdict.fails and (why := excuse(f))
        else f
        for f in result.findings
    )
    if findings == result.findings:
        return result
    return result.model_copy(update={"findings": findings, "verdict": worst(f.verdict for f in findings)})
