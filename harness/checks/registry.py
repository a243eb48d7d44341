"""Which checks apply to which cell, and how their answers become the verdict of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from harness.baseline import Identity, Lookup, look_up
from harness.checks import drafting, exchange, tokens, transfer
from harness.checks.evidence import REFERENCE_CELL, CellView, Evidence
from harness.config import Judging, describe_validation_error
from harness.errors import DataError
from harness.findings import CellVerdict, CheckResult, Judgement, Verdict, worst
from harness.history import History


class Check(NamedTuple):
    """A named, pure function of one cell's evidence."""

    name: str
    question: str
    applies: Callable[[CellView], bool]
    judge: Callable[[CellView], CheckResult]


def _always(_: CellView) -> bool:
    return True


def _has_text(cell: CellView) -> bool:
    return bool(cell.observations("text"))


def _has_reference(cell: CellView) -> bool:
    return cell.id != REFERENCE_CELL and cell.evidence.selected(REFERENCE_CELL)


def _has_single(cell: CellView) -> bool:
    return cell.handed_off and cell.speculative and cell.evidence.selected(f"single-{cell.method}")


CHECKS: tuple[Check, ...] = (
    Check("complete", "was everything asked and answered?", _always, exchange.complete),
    Check("echoed-prompt", "did the server see our prompt?", _always, exchange.echoed_prompt),
    Check("response-invariants", "does each response agree with itself?", _always, exchange.response_invariants),
    Check("text-form", "does templated text give what ids give?", _has_text, exchange.text_form),
    Check("transfer", "did KV move, or in a control not?", _always, transfer.transfer),
    Check(
        "tokens-reference",
        "tokens of the plain single engine of this run?",
        _has_reference,
        tokens.tokens_reference,
    ),
    Check("tokens-baseline", "tokens as recorded?", _always, tokens.tokens_baseline),
    Check("drafts-happened", "was speculation tested?", lambda c: c.speculative, drafting.drafts_happened),
    Check(
        "acceptance-single",
        "acceptance of the single engine of this run?",
        _has_single,
        drafting.acceptance_single,
    ),
    Check(
        "acceptance-baseline",
        "acceptance as recorded?",
        lambda c: c.speculative,
        drafting.acceptance_baseline,
    ),
)


def judge_cell(cell: CellView, checks: tuple[Check, ...] = CHECKS) -> CellVerdict:
    """All applicable checks on one cell. A check that crashes is UNKNOWN and does not hide the others."""
    results = []
    for check in checks:
        try:
            if check.applies(cell):
                results.append(check.judge(cell))
        except Exception as error:
            results.append(
                CheckResult(
                    check=check.name,
                    cell=cell.id,
                    verdict=Verdict.UNKNOWN,
                    judged=0,
                    note=f"the check itself failed: {type(error).__name__}: {error}",
                )
            )
    return CellVerdict(cell=cell.id, verdict=worst(r.verdict for r in results), results=tuple(results))


def judge(history: History, baselines: Mapping[str, Lookup]) -> Judgement:
    """Judge a recorded run. Reads nothing but its arguments."""
    try:
        judging = Judging.model_validate(history.run.profile.get("judging", {}))
    except ValidationError as error:
        raise DataError(
            f"{history.folder}: the recorded profile is damaged:\n{describe_validation_error(error)}"
        ) from error
    evidence = Evidence(history, baselines, judging)
    cells = tuple(judge_cell(CellView(evidence, record)) for record in history.run.cells)
    verdict = worst(c.verdict for c in cells)
    notices = []
    if history.torn_line:
        notices.append("the last observation was cut off while being written and was left out")
    if history.run.interrupted:
        notices.append("the run was interrupted before its end")
        verdict = worst([verdict, Verdict.UNKNOWN])
    return Judgement(run_id=history.run.run_id, verdict=verdict, cells=cells, notices=tuple(notices))


def baselines_for(history: History, folder: Path | None = None) -> dict[str, Lookup]:
    """Look up the baselines that judging the run needs: of its methods, and of plain decoding for the tokens."""
    profile = history.run.profile
    where = folder or Path(str(profile.get("baselines", "baselines")))
    out: dict[str, Lookup] = {}
    for method, raw in history.run.identities.items():
        try:
            out[method] = look_up(where, Identity.model_validate(raw), str(profile.get("source", profile["name"])))
        except (ValidationError, KeyError) as error:
            out[method] = Lookup(None, f"the run's identity of {method} is damaged: {error}")
    return out
