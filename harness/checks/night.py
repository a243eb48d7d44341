"""The registered tests of a night in the normal tier, where two equal runs are not equal bit for bit.

All tests of all cells are announced before anything runs (``registered``), computed together, and adjusted together
(Holm over the announced number). Checks then read their own result from ``Evidence.night``.

* ``acceptance-baseline``: this cell against the recorded reference, all positions and strata in one test;
* ``acceptance-single``: P/D against the single engine of the same night;
* ``first-step``: was the first draft of the first step after the hand-off accepted, P/D against single (McNemar);
* ``survival``: share of prompts that still equal the method's own record at token t, against what equal runs keep;
* ``hard-divergence``: first divergences from that record that are no near ties, against A/A;
* ``rescored``: outputs with a token that the plain engine would not have said, against its own outputs (McNemar).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.acceptance import RequestCounts, real_steps, request_counts, settle_padding
from harness.baseline.model import Baseline, Row
from harness.baseline.summary import counts
from harness.checks.evidence import CellView
from harness.config import Judging
from harness.history import RESCORE
from harness.matrix import CellName
from harness.sequences import output_key, parted_at
from harness.stats.multiplicity import holm
from harness.stats.paired import Arms, Difference, Swap, count_arms, differences, label_swap, make_arms, mcnemar
from harness.stats.power import detectable, least_prompts

TestName = Literal["acceptance-baseline", "acceptance-single", "first-step", "survival", "hard-divergence", "rescored"]
SURVIVAL_AT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Output tokens at which survival of identity is looked at."""


class RegisteredTest(NamedTuple):
    """A registered test."""

    cell: str
    scenario: str
    name: TestName

    def __str__(self) -> str:
        return f"{self.cell}@{self.scenario}::{self.name}"


class Column(NamedTuple):
    """One column of a test, after the test."""

    difference: Difference
    adjusted: float
    """p-value, adjusted for the search over the columns of this test (maxT)."""


class Tested(NamedTuple):
    """Result of one registered test."""

    id: RegisteredTest
    p: float | None
    """None when the test could not be made; ``problem`` says why."""
    adjusted: float | None = None
    """Holm-adjusted; rejected when it is at most the stage's alpha."""
    columns: tuple[Column, ...] = ()
    prompts: int = 0
    problem: str = ""
    detectable: float | None = None
    """Smallest change over all prompts, as a share, that this evidence shows with the profile's power."""
    detectable_stratum: float | None = None
    """The same in the stratum that shows least."""
    quiet: bool = True
    """Two equal runs of the baseline do not reject the same test."""
    note: str = ""


class _Raw(NamedTuple):
    """A test before adjustment."""

    p: float | None
    swap: Swap | None = None
    found: tuple[Difference, ...] = ()
    prompts: int = 0
    problem: str = ""
    aa_p: float | None = None
    note: str = ""
    binary: bool = False
    """One yes or no per prompt and column."""
    lacking: str = ""
    """Evidence without which the test may show a change, but not that there is none."""


def tests_of(cell: CellName, has_single: bool, rescores: bool) -> tuple[TestName, ...]:
    """The tests that a cell registers. One place for ``plan`` and for judging."""
    out: list[TestName] = ["survival", "hard-divergence"]
    if rescores and cell.id != cell.reference:
        out.append("rescored")
    if cell.method != "none":
        out.append("acceptance-baseline")
        if cell.topology == "pd" and has_single:
            out += ["acceptance-single", "first-step"]
    return tuple(out)


def registered(views: Iterable[CellView]) -> list[RegisteredTest]:
    """All tests of the cold views, in order. Scenarios send too few prompts to reach a p-value; profiles of this tier
    cannot have them."""
    out = []
    for view in views:
        if not view.cold:
            continue
        single = view.evidence.selected(view.name.single)
        rescores = view.evidence.history.run.rescore and view.evidence.selected(view.name.reference)
        for name in tests_of(view.name, single, rescores):
            out.append(RegisteredTest(view.id, view.scenario, name))
    return out


def run_tests(
    views: Sequence[CellView],
    judging: Judging,
    only: Iterable[RegisteredTest] | None = None,
    announced: int | None = None,
) -> dict[RegisteredTest, Tested]:
    """Compute and adjust all registered tests, or those of ``only`` (the second stage), as a family of their own or as
    part of one of ``announced`` tests. A test that crashes is a result with a problem and does not hide the others."""
    by_place = {(v.id, v.scenario): v for v in views}
    ids = list(only) if only is not None else registered(views)
    family = max(len(ids), announced or 0)
    alpha = judging.stage_alpha / max(1, family)
    raw: dict[RegisteredTest, _Raw] = {}
    for test in ids:
        view = by_place.get((test.cell, test.scenario))
        if view is None:
            raw[test] = _Raw(None, problem="expected this cell among those observed, found it missing")
            continue
        try:
            raw[test] = _compute(view, test, judging, alpha)
        except Exception as error:
            raw[test] = _Raw(None, problem=f"the test itself failed: {type(error).__name__}: {error}")
    adjusted = holm({str(t): r.p for t, r in raw.items() if r.p is not None}, family)
    return {t: _finish(t, r, adjusted.get(str(t)), alpha, judging) for t, r in raw.items()}


def _finish(test: RegisteredTest, raw: _Raw, adjusted: float | None, alpha: float, judging: Judging) -> Tested:
    columns = tuple(Column(d, a) for d, a in zip(raw.found, raw.swap.adjusted if raw.swap else (), strict=False))
    if raw.lacking and not _shows_more(raw, adjusted, judging):
        return Tested(test, None, prompts=raw.prompts, problem=raw.lacking, note=raw.note)
    return Tested(
        test,
        raw.p,
        adjusted,
        columns,
        raw.prompts,
        raw.problem,
        _detectable(raw, alpha, judging) if raw.p is not None else None,
        _detectable_stratum(raw, alpha, judging) if raw.p is not None else None,
        raw.aa_p is None or raw.aa_p > alpha,
        raw.note,
    )


def _shows_more(raw: _Raw, adjusted: float | None, judging: Judging) -> bool:
    """Whether the test found more of what it counts, beyond chance and the practical floor."""
    rejected = adjusted is not None and adjusted <= judging.stage_alpha
    return rejected and any(d.effect > 0 and d.effect >= judging.floor_points / 100 for d in raw.found)


def _detectable(raw: _Raw, alpha: float, judging: Judging) -> float | None:
    """Over all prompts together: the largest of the columns that count all strata."""
    return _worst([d for d in raw.found if d.column.startswith("all@")], raw, alpha, judging)


def _detectable_stratum(raw: _Raw, alpha: float, judging: Judging) -> float | None:
    """In the stratum that shows least; None when the test does not look at strata."""
    return _worst([d for d in raw.found if not d.column.startswith("all@")], raw, alpha, judging)


def _worst(found: Sequence[Difference], raw: _Raw, alpha: float, judging: Judging) -> float | None:
    """Smallest change that every one of the columns would show. Never below the practical floor; for yes-or-no tests
    never below the share of prompts that a p-value of ``alpha`` takes; infinite where so few prompts can give none."""
    if not found:
        return None
    each = alpha / max(1, len(raw.found))
    out = judging.floor_points / 100
    for d in found:
        if d.prompts < least_prompts(alpha):
            return math.inf
        out = max(out, detectable(d.error * d.prompts**0.5, d.prompts, each, judging.power))
        if raw.binary:
            out = max(out, least_prompts(alpha) / d.prompts)
    return out


# --- the tests -------------------------------------------------------------------------------------------------------


def _compute(view: CellView, test: RegisteredTest, judging: Judging, alpha: float) -> _Raw:
    match test.name:
        case "acceptance-baseline":
            return _acceptance_baseline(view, judging, alpha)
        case "acceptance-single":
            single = view.sibling("single")
            reference = cell_counts(single)[0] if single else {}
            return _acceptance(view, reference, f"{view.name.single} of this run", judging, alpha)
        case "first-step":
            return _first_step(view, judging, alpha)
        case "survival":
            return _survival(view, judging, alpha)
        case "hard-divergence":
            return _hard(view, judging, alpha)
        case "rescored":
            return _rescored(view, judging, alpha)


def _require(n: int, swap: Swap | None, alpha: float, what: str) -> str:
    if n == 0:
        return f"expected {what} of the same prompts on both sides, found none in common"
    least = swap.least if swap is not None else 2.0 ** (1 - n)
    if least > alpha:
        return f"{n} prompts can give no p-value below {least:.2g}, and {alpha:.2g} is needed: send more prompts" + (
            "" if swap is None or 2.0 ** (1 - n) > alpha else ", or raise judging.permutations"
        )
    return ""


def cell_counts(view: CellView) -> tuple[dict[str, RequestCounts], bool]:
    """Counts of each answered request by key, and whether a padded first step was recognised from counters alone."""
    k = view.record.draft_tokens
    counted = {}
    for key, o in view.answered().items():
        leg = o.final
        if leg is not None and leg.output_ids is not None and len(leg.output_ids) > 1:
            found = request_counts(leg, k)
            if found is not None:
                counted[key] = found
    return settle_padding(counted, view.handed_off)


def _acceptance_baseline(view: CellView, judging: Judging, alpha: float) -> _Raw:
    baseline = _baseline(view, view.lineup)
    if isinstance(baseline, str):
        return _Raw(None, problem=baseline)
    k = view.record.draft_tokens
    reference = {}
    for row in baseline.rows:
        at, steps = counts(row.accepted, k)
        reference[row.prompt_id] = RequestCounts(steps, at, "per-request")
    raw = _acceptance(view, reference, "the baseline", judging, alpha)
    again = {
        r.prompt_id: RequestCounts(r.again.steps, r.again.accepted_at, "per-request")
        for r in baseline.rows
        if r.again is not None and r.again.steps
    }
    if not again:
        return _Raw(None, problem="the baseline has no A/A: record it with `harness baseline record --repeat 2`")
    arms, _ = _arms(view, {p: reference[p] for p in again}, again, dict.fromkeys(again, "all"))
    return raw._replace(aa_p=label_swap(arms, judging.permutations, judging.seed).p)


def _acceptance(
    view: CellView, reference: Mapping[str, RequestCounts], against: str, judging: Judging, alpha: float
) -> _Raw:
    ours, padded = cell_counts(view)
    answered = view.answered()
    prompt_of = {key: o.prompt_id for key, o in answered.items()}
    strata = {key: view.stratum(o) for key, o in answered.items()}
    matched = {key: reference.get(key, reference.get(prompt_of[key])) for key in ours}
    theirs = {key: value for key, value in matched.items() if value is not None}
    arms, n = _arms(view, theirs, {key: ours[key] for key in theirs}, {key: strata[key] for key in theirs})
    notes = []
    if any(c.source == "counters" for c in ours.values()):
        notes.append(
            "acceptance from the engine's counters at concurrency 1, because this version reports none per request: "
            "steps since the hand-off are not known"
            + (", and the padded first step was recognised from the totals" if padded else "")
        )
    swap = label_swap(arms, judging.permutations, judging.seed) if n else None
    problem = _require(n, swap, alpha, f"acceptance counts of {against}")
    if problem or swap is None:
        return _Raw(None, problem=problem, note="; ".join(notes))
    return _Raw(swap.p, swap, differences(arms, judging.confidence), n, note="; ".join(notes))


def _arms(
    view: CellView,
    first: Mapping[str, RequestCounts],
    second: Mapping[str, RequestCounts],
    strata: Mapping[str, str],
) -> tuple[Arms, int]:
    """Columns ``all@p`` and ``stratum@p``; prompts in the order of their names, so that the seed fixes the result."""
    k = view.record.draft_tokens
    keys = sorted(first)
    names = sorted({strata[key] for key in keys} - {"all"})
    masks = {"all": np.ones(len(keys), bool)}
    if len(names) > 1:
        masks |= {name: np.array([strata[key] == name for key in keys]) for name in names}
    columns = [f"{name}@{p}" for name in masks for p in range(k)]
    whole = count_arms([[(side[key].accepted_at, side[key].steps) for key in keys] for side in (first, second)], k)
    sides = [
        tuple(np.concatenate([part * mask[:, None] for mask in masks.values()], axis=1) for part in side)
        for side in zip(whole.hits, whole.trials, strict=True)
    ]
    return make_arms(columns, (sides[0][0], sides[0][1]), (sides[1][0], sides[1][1])), len(keys)


def _first_step(view: CellView, judging: Judging, alpha: float) -> _Raw:
    single = view.sibling("single")
    sides = [_first_accepted(v) if v is not None else {} for v in (single, view)]
    keys = sorted(set(sides[0]) & set(sides[1]))
    problem = _require(len(keys), None, alpha, "first draft steps")
    if problem:
        return _Raw(None, problem=problem)
    first, second = (np.array([side[key] for key in keys]) for side in sides)
    return _yes_or_no("all@first step", first, second, judging)


def _first_accepted(view: CellView) -> dict[str, bool]:
    out = {}
    for key, o in view.answered().items():
        steps = real_steps(o.final) if o.final is not None else None
        if steps is not None and steps.accepted:
            out[key] = steps.accepted[0] > 0
    return out


def _baseline(view: CellView, method: str) -> Baseline | str:
    lookup = view.evidence.baselines.get(method)
    if lookup is None:
        return f"the baseline of {method} was not looked up"
    return lookup.baseline if lookup.baseline is not None else lookup.reason


def near_tie_nats(view: CellView) -> float:
    """Top-2 gap up to which a difference is a near tie: as configured in the bitwise tier; else at least what equal
    runs of the method showed."""
    bound = view.evidence.judging.near_tie_nats
    lookup = view.evidence.baselines.get(view.lineup)
    if view.evidence.judging.tier == "bitwise" or lookup is None or lookup.baseline is None:
        return bound
    return max(bound, lookup.baseline.noise_floor_nats or 0.0)


class Parting(NamedTuple):
    """Where a request left the recorded tokens."""

    at: int | None
    hard: bool


def _partings(view: CellView, rows: Mapping[str, Row]) -> dict[str, tuple[Parting, Parting]]:
    """Per key: (of equal runs, of this cell) against the method's recorded tokens, both by the same rule; prompts
    without A/A are left out."""
    bound = near_tie_nats(view)
    out = {}
    for key, o in view.answered().items():
        row = rows.get(o.prompt_id)
        if row is None or row.again is None or o.final is None or o.final.output_ids is None:
            continue
        expected = row.output_ids[: o.max_tokens]
        ours = o.final.output_ids
        again = row.again.divergence
        out[key] = (
            _parting(again if again is not None and again < len(expected) else None, row, bound),
            _parting(parted_at(ours, expected), row, bound),
        )
    return out


def _parting(at: int | None, row: Row, bound: float) -> Parting:
    if at is None:
        return Parting(None, False)
    return Parting(at, not any(token == at and gap <= bound for token, gap in row.close))


def _recorded_tokens(view: CellView) -> dict[str, Row] | str:
    baseline = _baseline(view, view.lineup)
    if isinstance(baseline, str):
        return baseline
    if baseline.noise_floor_nats is None:
        return f"the baseline of {view.lineup} has no A/A: record it with `harness baseline record --repeat 2`"
    return baseline.by_prompt()


def _survival(view: CellView, judging: Judging, alpha: float) -> _Raw:
    rows = _recorded_tokens(view)
    if isinstance(rows, str):
        return _Raw(None, problem=rows)
    partings = _partings(view, rows)
    keys = sorted(partings)
    prompt_of = {key: o.prompt_id for key, o in view.answered().items()}
    longest = max((len(rows[prompt_of[key]].output_ids) for key in keys), default=0)
    at = sorted({*(t for t in SURVIVAL_AT if t < longest), max(1, longest)})
    sides = []
    for side in (0, 1):
        left = [partings[key][side].at for key in keys]
        sides.append(np.array([[float(a is not None and a < t) for t in at] for a in left]).reshape(len(keys), len(at)))
    ones = np.ones((len(keys), len(at)))
    arms = make_arms([f"all@token {t}" for t in at], (sides[0], ones), (sides[1], ones))
    swap = label_swap(arms, judging.permutations, judging.seed) if keys else None
    problem = _require(len(keys), swap, alpha, "tokens with A/A")
    if problem or swap is None:
        return _Raw(None, problem=problem)
    return _Raw(swap.p, swap, differences(arms, judging.confidence), len(keys), binary=True)


def _rescored(view: CellView, judging: Judging, alpha: float) -> _Raw:
    """Per prompt: has the output a token that the plain engine would not have said, beyond a near tie? Against the
    plain engine's own outputs of the same prompts, which differ from its prefill by rounding alone."""
    plain = CellView(view.evidence, view.evidence.history.cell(view.name.reference) or view.record)
    sides = [_wrong_when_rescored(v) for v in (plain, view)]
    keys = sorted(set(sides[0]) & set(sides[1]))
    problem = _require(len(keys), None, alpha, "re-scored outputs")
    if problem:
        return _Raw(None, problem=problem)
    given = sum(bool(o.final and o.final.output_ids) for v in (plain, view) for o in v.answered().values())
    missing = given - len(sides[0]) - len(sides[1])
    note = f"{missing} outputs were not re-scored" if missing else ""
    first, second = (np.array([side[key] for key in keys]) for side in sides)
    raw = _yes_or_no("all@re-scored", first, second, judging, note)
    # Wrong outputs are distinct ones: those that were not asked about are no random sample.
    lacking = f"expected {view.name.reference} to re-score every output, found {missing} without a score"
    return raw._replace(lacking=lacking) if missing else raw


def _wrong_when_rescored(view: CellView) -> dict[str, bool]:
    scores = view.evidence.history.of(view.name.reference, scenario=RESCORE)
    bound = near_tie_nats(view)
    out = {}
    for key, o in view.answered().items():
        leg = o.final
        if leg is None or not leg.output_ids:
            continue
        score = scores.get(f"{o.prompt_id}#0.{output_key(leg.output_ids)}")
        gaps = score.final.rescored if score is not None and score.error is None and score.final else None
        if gaps is not None:
            out[key] = any(gap > bound for gap in gaps)
    return out


def _yes_or_no(
    column: str, first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_], judging: Judging, note: str = ""
) -> _Raw:
    """McNemar's exact test of one answer per prompt in each arm."""
    ones = np.ones((len(first), 1))
    arms = make_arms([column], (first[:, None].astype(float), ones), (second[:, None].astype(float), ones))
    p = mcnemar(first, second)
    swap = Swap(p, (p,), 2.0 ** (1 - len(first)), 0, True)
    return _Raw(p, swap, differences(arms, judging.confidence), len(first), note=note, binary=True)


def _hard(view: CellView, judging: Judging, alpha: float) -> _Raw:
    rows = _recorded_tokens(view)
    if isinstance(rows, str):
        return _Raw(None, problem=rows)
    partings = _partings(view, rows)
    keys = sorted(partings)
    problem = _require(len(keys), None, alpha, "tokens with A/A")
    if problem:
        return _Raw(None, problem=problem)
    equal = np.array([partings[key][0].hard for key in keys])
    ours = np.array([partings[key][1].hard for key in keys])
    note = f"{int(ours.sum())} hard divergences in {len(keys)} requests, {int(equal.sum())} between equal runs"
    return _yes_or_no("all@hard", equal, ours, judging, note)
