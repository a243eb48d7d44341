"""The registry of checks: which apply to which cell, and how their results become the verdict of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, get_args

from harness.baselines.lookup import Lookup
from harness.history.folder import History
from harness.history.verdict import Verdict, worst
from harness.judging.checks import (
    apis,
    counters,
    drafting,
    drafts,
    failures,
    kv,
    kv_events,
    logprobs,
    mistakes,
    pooled_acceptance,
    pools,
    preconditions,
    request_acceptance,
    rescored,
    responses,
    settings,
    texts,
    tokens,
    traces,
    transfer,
)
from harness.judging.checks.aggregation import Covering, by_none, listed, most_listed
from harness.judging.checks.asked_again import AnswerId, AskedAgain, Judged
from harness.judging.checks.attached import without_blame
from harness.judging.checks.hypothesis_tests import asked, registered, run_tests
from harness.judging.checks.model import RegisteredTest, Results, TestName
from harness.judging.checks.pooled import pooled
from harness.judging.checks.statistical import judge_pooled, judge_pooled_drafts, judge_test, tripped
from harness.judging.checks.traces import roundings
from harness.judging.diagnosis.diagnose import diagnose, explained
from harness.judging.diagnosis.location import locate
from harness.judging.evidence import ONE_STAGE, CellScenario, CellView, Evidence, FoundOfCells, Stages, judging_of
from harness.judging.findings import CellVerdict, CheckResult, Judgement
from harness.judging.notices import notices_of
from harness.judging.rounding import records_log_probs, resolved
from harness.judging.shares import ONE_PROCESS, SharedOut
from harness.profiles.model import Tier
from harness.util.garbage import Seldom, collector_paused

_NO_TESTS = Results()


class Check(NamedTuple):
    """A named check, which is a pure function of one cell's evidence."""

    name: str
    applies: Callable[[CellView], bool]
    judge: Callable[[CellView], CheckResult]


_COMMON: tuple[Check, ...] = (
    Check("state-occurred", lambda c: not c.cold, preconditions.state_occurred),
    Check("cold-stays-cold", lambda c: c.cold, preconditions.cold_stays_cold),
    Check("complete", lambda _: True, responses.complete),
    Check(failures.NAME, failures.has_failures, failures.failed_requests),
    Check(mistakes.NAME, mistakes.has_mistakes, mistakes.mistaken_hand_offs),
    Check(settings.NAME, lambda c: c.judged_whole, settings.engine_as_asked),
    Check(counters.NAME, lambda c: c.judged_whole, counters.counters_offered),
    Check(counters.AGREE, counters.agree_applies, counters.counters_agree),
    Check(pools.NAME, pools.applies, pools.pool_returned),
    Check("echoed-prompt", lambda _: True, responses.echoed_prompt),
    Check("response-invariants", lambda _: True, responses.response_invariants),
    Check("transfer", lambda _: True, transfer.transfer),
    Check(kv.HANDED_OVER, lambda c: c.handed_off and kv.watched(c), kv.kv_handed_over),
    Check(kv.KEPT, kv.has_hits, kv.kv_kept),
    Check(kv_events.NAME, kv_events.applies, kv_events.kv_events),
    Check("prefill-token", lambda c: c.comparable and tokens.has_prefill(c), tokens.prefill_token),
    Check("finish-reason", lambda c: c.comparable and responses.has_plain_answers(c), responses.finish_reason),
    Check(texts.NAME, texts.applies, texts.texts),
    Check(apis.STREAMED, apis.has_streams, apis.streamed),
    Check(apis.CACHED, apis.offers_cached_tokens, apis.cached_tokens),
)
_DRAFTS = Check("drafts-happened", lambda c: c.speculative and drafting.may_draft(c), drafting.drafts_happened)

CHECKS: tuple[Check, ...] = (
    *_COMMON,
    Check("text-form", lambda c: bool(c.observations("text")), responses.text_form),
    Check(apis.SAME, apis.asked_otherwise, apis.same_answer),
    Check("tokens-reference", lambda c: not c.is_plain and c.asked(c.name.reference), tokens.tokens_reference),
    Check("tokens-baseline", lambda c: c.has_recorded, tokens.tokens_baseline),
    Check("tokens-single", lambda c: c.comparable and c.has_twin, tokens.tokens_single),
    Check("logprobs-single", lambda c: c.comparable and logprobs.has_reference(c), logprobs.logprobs_single),
    Check("logprobs-baseline", lambda c: c.has_recorded and records_log_probs(c), logprobs.logprobs_baseline),
    Check("prompt-logprobs", logprobs.has_prompt_logprobs, logprobs.prompt_logprobs),
    Check(kv.COMPUTED, kv.has_reference, kv.kv_computed),
    Check(drafts.NAME, drafts.applies, drafts.drafts_computed),
    Check("rescored", rescored.applies, rescored.rescored),
    _DRAFTS,
    Check("acceptance-single", drafting.has_single, drafting.acceptance_single),
    Check("acceptance-baseline", lambda c: c.speculative and c.has_recorded, drafting.acceptance_baseline),
)
"""The checks of the bitwise tier."""
NORMAL_CHECKS: tuple[Check, ...] = (
    *_COMMON,
    Check(settings.REPEATS, settings.needs_repeats, settings.engines_repeat),
    Check(kv.COMPUTED, kv.has_reference, kv.kv_computed),
    _DRAFTS,
)
"""The checks of the normal tier, whose other gates are ``GATES`` and the registered tests (``TEST_NAMES``)."""
GATES = (traces.NAME, request_acceptance.NAME)
"""Gates of the normal tier for each answer by itself, at levels that the answers of the whole run share."""
_VIEWS_BETWEEN = 512
"""Cells in scenarios that are judged before what they left in memory is looked for."""
TEST_NAMES: tuple[TestName, ...] = get_args(TestName)


def check_names(tier: Tier) -> tuple[str, ...]:
    """Return the names of all checks and tests of a tier, in report order."""
    if tier != "normal":
        # Those that auto comes to as a rule; which tier it is, only a run can tell.
        return tuple(c.name for c in CHECKS)
    return (*(c.name for c in NORMAL_CHECKS), *GATES, *TEST_NAMES)


def judge_cell(cell: CellView, tests: Results = _NO_TESTS) -> CellVerdict:
    """Judge one cell by all applicable checks and by its registered tests.

    A check that raises is UNKNOWN and does not hide the others.
    """
    results: list[CheckResult] = []
    for check in CHECKS if cell.judging.tier == "bitwise" else NORMAL_CHECKS:
        with _crash_is_unknown(cell, check.name, "the check itself failed", results):
            if check.applies(cell):
                results.append(check.judge(cell))
    if cell.judging.tier == "normal":
        results += _gates(cell, tests)
    for name in TEST_NAMES:
        tested = tests.first.get(RegisteredTest(cell.id, cell.scenario, name))
        if tested is not None:
            with _crash_is_unknown(cell, name, "the check itself failed", results):
                results.append(judge_test(cell, tested, tests))
    together = tests.pooled.get(cell.scenario)
    if together is not None and cell.id in together.cells:
        with _crash_is_unknown(cell, "pooled", "the check itself failed", results):
            alone = traces.sees_single_answers(cell, tests.roundings.get(cell.name.reference))
            results.append(judge_pooled(cell, together, alone))
    if cell.cold and tests.drafts is not None and cell.id in tests.drafts.cells:
        with _crash_is_unknown(cell, pooled_acceptance.NAME, "the check itself failed", results):
            results.append(judge_pooled_drafts(cell, tests.drafts))
    with _crash_is_unknown(cell, "attached", "what is not the server's fault could not be told", results):
        results[:] = without_blame(cell, results)
    diagnosis = None
    with _crash_is_unknown(cell, "location", "the damage could not be located", results):
        results[:] = locate(cell, results)
        diagnosis = diagnose(cell, results)
    return CellVerdict(
        cell=cell.id,
        scenario=cell.scenario,
        verdict=worst(r.verdict for r in results),
        diagnosis=diagnosis,
        results=tuple(explained(results, diagnosis)),
    )


def _gates(cell: CellView, tests: Results) -> list[CheckResult]:
    """Judge each answer of a cell by itself."""
    results: list[CheckResult] = []
    with _crash_is_unknown(cell, traces.NAME, "the check itself failed", results):
        if rescored.applies(cell):
            results.append(traces.judge_traces(cell, tests.roundings.get(cell.name.reference), tests.again))
    with _crash_is_unknown(cell, request_acceptance.NAME, "the check itself failed", results):
        if request_acceptance.applies(cell):
            results.append(request_acceptance.judge_requests(cell, tests.requests, tests.again))
    return results


def _answers_judged(cell: CellView, tests: Results) -> dict[str, Judged]:
    """Return what each gate finds in each answer of a cell that it can judge; nothing where the gate itself fails,
    which judging the cell says."""
    found: dict[str, Judged] = {}
    with suppress(Exception):
        if rescored.applies(cell):
            found[traces.NAME] = traces.moved_answers(cell, tests.roundings.get(cell.name.reference))
    with suppress(Exception):
        if request_acceptance.applies(cell):
            found[request_acceptance.NAME] = request_acceptance.drafted_answers(cell, tests.requests)
    return found


@contextmanager
def _crash_is_unknown(cell: CellView, check: str, what: str, results: list[CheckResult]) -> Iterator[None]:
    """Add an UNKNOWN result if the body raises; ``what`` says what failed."""
    try:
        yield
    except Exception as error:
        note = f"{what}: {type(error).__name__}: {error}"
        results.append(CheckResult(check=check, cell=cell.id, verdict=Verdict.UNKNOWN, judged=0, note=note))


def run_registered_tests(
    evidence: Evidence,
    stages: Stages = ONE_STAGE,
    cells: Collection[str] | None = None,
    shared_out: SharedOut = ONE_PROCESS,
) -> Results:
    """Compute the registered tests of the normal tier, those that failed again on the second stage, and what the gates
    of single answers need.

    With ``cells``, only theirs, as a part of the family of the whole run, and none of many cells together.
    """
    judging = evidence.judging
    if judging.tier == "bitwise":
        return _NO_TESTS
    views = list(evidence.views())
    announced = registered(views)
    mine = [v for v in views if cells is None or v.id in cells]
    wanted = [t for t in announced if cells is None or t.cell in cells]
    first = run_tests(mine, judging, wanted, len(announced), shared_out)
    second = None
    if stages.second is not None:
        second = run_tests(list(evidence.over(stages.second).views()), judging, tripped(mine, first))
    drafting = sum(len(asked(v)) for v in views if v.speculative)
    together = pooled(views, judging) if cells is None else {}
    drafts = pooled_acceptance.pooled_acceptance(views, judging) if cells is None else None
    results = Results(first, second, together, drafts, roundings(views, judging), drafting)
    return results._replace(again=_asked_again(evidence, stages.again, results))


def _asked_again(evidence: Evidence, rounds: Sequence[History], results: Results) -> AskedAgain:
    """Judge the answers that were asked again by what the first stage says of rounding and levels."""
    found: dict[str, list[Judged]] = {}
    for history in rounds:
        for view in evidence.over(history).views():
            for check, judged in _answers_judged(view, results).items():
                found.setdefault(check, []).append(judged)
    return AskedAgain.counted(evidence.judging.stages > 1, found)


class Tripped(NamedTuple):
    """What a run found once, and what has to be asked again."""

    tests: list[RegisteredTest]
    """Registered tests that failed."""
    answers: list[AnswerId]
    """Answers that are wrong by themselves."""


NOTHING = Tripped([], [])


def tripped_once(history: History, baselines: Mapping[str, Lookup]) -> Tripped:
    """Return what failed in the first stage of a run and must be confirmed; nothing in a tier with one stage."""
    evidence = evidence_for(history, baselines)
    if evidence.judging.tier == "bitwise" or evidence.judging.stages == 1:
        return NOTHING
    results = run_registered_tests(evidence)
    answers = [
        answer
        for view in evidence.views()
        for judged in _answers_judged(view, results).values()
        for answer, finding in judged.items()
        if finding is not None
    ]
    return Tripped(tripped(evidence.views(), results.first), list(dict.fromkeys(answers)))


def evidence_for(history: History, baselines: Mapping[str, Lookup]) -> Evidence:
    """Return what a run is judged by, in the tier that it comes to. Raises DataError as ``judging_of`` does."""
    return resolved(Evidence(history, baselines, judging_of(history), FoundOfCells()))


def judge_cells(
    evidence: Evidence,
    stages: Stages = ONE_STAGE,
    cells: Collection[str] | None = None,
    processes: int = 1,
    covering: Covering = by_none,
) -> tuple[CellVerdict, ...]:
    """Judge all cells of a run, or with ``cells`` only those, in every scenario."""
    every = list(evidence.places())
    most, cycles = most_listed(len(every)), Seldom(_VIEWS_BETWEEN)
    places = [place for place in every if cells is None or place.record.cell in cells]
    shared_out = SharedOut(evidence, processes)
    with collector_paused():
        tests = run_registered_tests(evidence, stages, cells, shared_out)

        def judged(place: CellScenario) -> CellVerdict:
            verdict = listed(judge_cell(evidence.view(*place), tests), most, covering)
            cycles.done()
            return verdict

        return tuple(shared_out.each(places, judged))


def judge(
    history: History,
    baselines: Mapping[str, Lookup],
    stages: Stages = ONE_STAGE,
    processes: int = 1,
    covering: Covering = by_none,
) -> Judgement:
    """Judge a recorded run, and what was recorded after it, from the arguments alone: with several ``processes``, too,
    it is the same judgement. Findings that known defects tell apart (``covering``) are listed apart. Raises DataError
    for damaged lines of one that was loaded ``unread``."""
    evidence = evidence_for(history, baselines)
    cells = judge_cells(evidence, stages, processes=processes, covering=covering)
    # A check that met them is UNKNOWN, as one that crashes.
    history.require_valid()
    verdict = worst([worst(c.verdict for c in cells), *history.limiting_verdicts])
    notices, mutants = notices_of(evidence), history.run.mutants
    return Judgement(run_id=history.run.run_id, verdict=verdict, cells=cells, notices=notices, mutants=mutants)
