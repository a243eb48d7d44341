"""Which checks apply to which cell, and how their answers become the verdict of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from harness.baseline.build import identity_in
from harness.baseline.lookup import Limits, Lookup, look_up, unused
from harness.baseline.shelf import Shelf
from harness.checks import drafting, exchange, rescored, state, tokens, transfer
from harness.checks.evidence import CellView, Evidence
from harness.checks.listed import listed, most_listed
from harness.checks.night import RegisteredTest, TestName, run_tests
from harness.checks.statistical import check_for, tripped
from harness.config import Judging, Tier, describe_validation_error
from harness.confine import recorded
from harness.errors import DataError
from harness.findings import CellVerdict, CheckResult, Judgement, Verdict, worst
from harness.history import History
from harness.kinds import notices_of
from harness.locate.diagnose import diagnose, state_law
from harness.locate.location import locate


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


def _asked(cell: CellView, other: str) -> bool:
    """Whether the run was asked to observe another cell in this cell's scenario."""
    record = cell.evidence.history.cell(other)
    return record is not None and (record.planned > 0 if cell.cold else cell.scenario in record.scenarios)


def _has_reference(cell: CellView) -> bool:
    return cell.id != cell.name.reference and _asked(cell, cell.name.reference)


def _has_single(cell: CellView) -> bool:
    return cell.handed_off and cell.speculative and cell.cold and _asked(cell, cell.name.single)


def _registered(name: TestName) -> Check:
    """The check of a registered test of the normal tier; it applies where the test was announced."""
    return Check(
        name,
        QUESTIONS[name],
        lambda cell: RegisteredTest(cell.id, cell.scenario, name) in cell.evidence.night,
        check_for(name),
    )


QUESTIONS: dict[TestName, str] = {
    "survival": "do tokens stay as recorded for as long as those of equal runs?",
    "hard-divergence": "do tokens part only at near ties?",
    "rescored": "would the plain engine say the same tokens, as often as it says its own?",
    "acceptance-baseline": "acceptance as recorded, beyond chance?",
    "acceptance-single": "acceptance of the single engine of this run, beyond chance?",
    "first-step": "is the first step after the hand-off as good as without one?",
}


_COMMON: tuple[Check, ...] = (
    Check("state-occurred", "did the scenario's state occur?", lambda c: not c.cold, state.state_occurred),
    Check("cold-stays-cold", "did cold prompts stay cold?", lambda c: c.cold, state.cold_stays_cold),
    Check("complete", "was everything asked and answered?", _always, exchange.complete),
    Check("echoed-prompt", "did the server see our prompt?", _always, exchange.echoed_prompt),
    Check("response-invariants", "does each response agree with itself?", _always, exchange.response_invariants),
    Check("transfer", "did KV move, or in a control not?", _always, transfer.transfer),
)
_RESCORED = Check("rescored", "would the plain engine say the same tokens?", rescored.applies, rescored.rescored)
_DRAFTS = Check("drafts-happened", "was speculation tested?", lambda c: c.speculative, drafting.drafts_happened)

CHECKS: tuple[Check, ...] = (
    *_COMMON,
    Check("text-form", "does templated text give what ids give?", _has_text, exchange.text_form),
    Check(
        "tokens-reference",
        "tokens of the plain single engine of this run?",
        _has_reference,
        tokens.tokens_reference,
    ),
    Check("tokens-baseline", "tokens as recorded?", _always, tokens.tokens_baseline),
    _RESCORED,
    _DRAFTS,
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
"""Of the bitwise tier."""
NORMAL_CHECKS: tuple[Check, ...] = (*_COMMON, _DRAFTS, *(_registered(name) for name in QUESTIONS))
"""Of the normal tier, where the gates are registered tests."""


def checks_of(tier: Tier) -> tuple[Check, ...]:
    """The checks of a tier, in the order of the reports."""
    return CHECKS if tier == "bitwise" else NORMAL_CHECKS


def judge_cell(cell: CellView, checks: tuple[Check, ...] | None = None) -> CellVerdict:
    """All applicable checks on one cell. A check that crashes is UNKNOWN and does not hide the others."""
    results = []
    for check in checks if checks is not None else checks_of(cell.evidence.judging.tier):
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
    diagnosis = None
    try:
        results = locate(cell, results)
        diagnosis = diagnose(cell, results)
    except Exception as error:
        results.append(
            CheckResult(
                check="location",
                cell=cell.id,
                verdict=Verdict.UNKNOWN,
                judged=0,
                note=f"where the damage is could not be worked out: {type(error).__name__}: {error}",
            )
        )
    return CellVerdict(
        cell=cell.id,
        scenario=cell.scenario,
        verdict=worst(r.verdict for r in results),
        diagnosis=diagnosis,
        results=tuple(state_law(results, diagnosis)),
    )


def views(evidence: Evidence) -> list[CellView]:
    """One view per cell and scenario that the run was asked to observe; a cell's cold one first."""
    out = []
    for record in evidence.history.run.cells:
        out += [CellView(evidence, record)] if record.planned or not record.scenarios else []
        out += [CellView(evidence, record, scenario) for scenario in record.scenarios]
    return out


def with_tests(evidence: Evidence, second: History | None = None) -> Evidence:
    """The evidence with the registered tests of the normal tier computed, and those of the second stage."""
    if evidence.judging.tier == "bitwise":
        return evidence
    evidence = evidence._replace(night=run_tests(views(evidence), evidence.judging))
    if second is None:
        return evidence
    fresh = Evidence(second, evidence.baselines, evidence.judging)
    return evidence._replace(second=run_tests(views(fresh), evidence.judging, tripped(views(evidence))))


def tripped_tests(history: History, baselines: Mapping[str, Lookup]) -> list[RegisteredTest]:
    """Registered tests that failed in the first stage, which a second one has to confirm."""
    evidence = with_tests(Evidence(history, baselines, judging_of(history)))
    return tripped(views(evidence)) if evidence.judging.stages > 1 else []


def judging_of(history: History) -> Judging:
    """The bounds that the run was planned with. Raises DataError when they are damaged."""
    try:
        return Judging.model_validate(history.run.profile.get("judging", {}))
    except ValidationError as error:
        raise DataError(
            f"{history.folder}: the recorded profile is damaged:\n{describe_validation_error(error)}"
        ) from error


def judge(history: History, baselines: Mapping[str, Lookup], second: History | None = None) -> Judgement:
    """Judge a recorded run and its second stage, if it has one. Reads nothing but its arguments."""
    judging = judging_of(history)
    evidence = with_tests(Evidence(history, baselines, judging), second)
    asked = views(evidence)
    most = most_listed(len(asked))
    cells = tuple(listed(judge_cell(view), most) for view in asked)
    verdict = worst(c.verdict for c in cells)
    notices = [n for lookup in baselines.values() for n in lookup.notices]
    if history.torn_line:
        notices.append("the last observation was cut off while being written and was left out")
    notices += history.notices
    notices += [r.sentence for r in history.run.resumed]
    notices += notices_of(history.run)
    merged = history.run.merged
    if merged is not None:
        notices = [*merged.notices, *notices]
    if history.run.interrupted:
        notices.append("the run was interrupted before its end")
    elif history.run.finished is None:
        # A merged run has no end when one of its parts has none.
        further = "; `harness run --resume` goes on with it" if merged is None and history.run.kind == "run" else ""
        notices.append(f"the run has no end: it was killed, or is still going on{further}")
    notices += [
        f"{cell.cell}: left over when its engines ended: {words}; see `harness ps` and `harness clean`"
        + ("; a run whose engines may still be there cannot pass" if cell.left_running else "")
        for cell in history.run.cells
        for words in cell.left_over
    ]
    version = history.run.versions.get("vllm")
    notices += [f"vLLM {version} lacks {name}: {cost}" for name, cost in history.run.lacking.items()]
    mutants = history.run.mutants
    if mutants:
        notices.append(
            f"ARMED MUTANT {', '.join(mutants)}: a defect was put in on purpose, so this run says nothing about vLLM "
            "and cannot pass"
        )
    verdict = worst([verdict, *history.run.at_best])
    return Judgement(run_id=history.run.run_id, verdict=verdict, cells=cells, notices=tuple(notices), mutants=mutants)


def _folder(history: History) -> Path | None:
    """The folder of baselines that a run names; None when a recorded run names one that judging may not read."""
    named = history.run.profile.get("baselines", "baselines")
    return Path(str(named)) if history.own else recorded(named)


def out_of_reach(key: str, option: str, history: History) -> str:
    """Why something that a recorded run names is not read, and what to do."""
    return (
        f"the recorded run names {key} outside of the repository and of the current folder "
        f"({history.run.profile.get(key)}), which judging a recorded run does not read; name them with {option}"
    )


def unused_baselines(history: History, folder: Path | None = None) -> list[str]:
    """A sentence for each baseline beside those of the run that none of its methods could be compared with."""
    try:
        identities = [identity_in(history, method) for method in history.run.identities]
    except (ValidationError, KeyError):
        # Looking them up says which is damaged.
        return []
    where = folder or _folder(history)
    return unused(where, identities) if where is not None else []


def baselines_for(history: History, folder: Path | None = None) -> dict[str, Lookup]:
    """Look up the baselines that judging the run needs: of its methods, and of plain decoding for the tokens."""
    profile = history.run.profile
    where = folder or _folder(history)
    out: dict[str, Lookup] = {}
    judging = judging_of(history)
    limits = Limits(judging.baseline_days, judging.baseline_minors)
    shelf = Shelf(where) if where is not None else None
    for method in history.run.identities:
        if where is None:
            out[method] = Lookup(None, out_of_reach("baselines", "--baselines", history))
            continue
        try:
            identity = identity_in(history, method)
            source = str(profile.get("source", profile["name"]))
            out[method] = look_up(where, identity, source, limits, history.run.started, shelf)
        except (ValidationError, KeyError) as error:
            out[method] = Lookup(None, f"the run's identity of {method} is damaged: {error}")
    return out
