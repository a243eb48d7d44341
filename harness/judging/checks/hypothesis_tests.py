"""The registered hypothesis tests of the normal tier, where two equal runs need not agree bit for bit.

All tests of a run are announced beforehand (``registered``), computed together, and adjusted together (Holm over the
announced number). ``harness.judging.checks.statistical`` turns the results into findings.

* ``acceptance-baseline``: acceptance of the cell against the baseline, all positions and strata in one test;
* ``acceptance-single``: the same for P/D against the single engine of the same run;
* ``first-step``: whether the first draft after the hand-off is accepted, P/D against single (McNemar);
* ``survival``: share of prompts whose output still equals the method's baseline at token t, against A/A;
* ``hard-divergence``: first divergences from that baseline that are not near ties, against A/A (McNemar);
* ``rescored``: outputs with a token that the plain engine would not have produced, against its own (McNemar).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from harness.baselines.model import Baseline, Row
from harness.baselines.summary import counts
from harness.history.acceptance import RequestCounts, real_steps
from harness.history.records import COLD, RESCORE
from harness.history.token_ids import output_key, parted_at
from harness.judging.checks.model import Column, RegisteredTest, Tested, TestName
from harness.judging.evidence import CellView
from harness.judging.near_ties import near_tie_nats
from harness.profiles.cells import CellName
from harness.profiles.model import Judging
from harness.stats.multiplicity import holm
from harness.stats.paired import Arms, Difference, Swap, count_arms, differences, label_swap, make_arms, mcnemar
from harness.stats.power import detectable, least_prompts

SURVIVAL_AT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Output positions at which ``survival`` compares tokens."""


class _Raw(NamedTuple):
    """The result of a test before adjustment for the other tests."""

    p: float | None
    swap: Swap | None = None
    differences: tuple[Difference, ...] = ()
    prompts: int = 0
    problem: str = ""
    aa_p: float | None = None
    note: str = ""
    binary: bool = False
    """Whether each prompt gives a yes or no per column."""
    incomplete: str = ""
    """Missing evidence without which the test can show a change, but not the absence of one."""


def tests_of(cell: CellName, has_single: bool, rescores: bool) -> tuple[TestName, ...]:
    """Return the tests that a cell registers, both for ``harness plan`` and for judging."""
    out: list[TestName] = ["survival", "hard-divergence"]
    if rescores and cell.id != cell.reference:
        out.append("rescored")
    if cell.method != "none":
        out.append("acceptance-baseline")
        if cell.topology == "pd" and has_single:
            out += ["acceptance-single", "first-step"]
    return tuple(out)


def registered(views: Iterable[CellView]) -> list[RegisteredTest]:
    """Return all tests of the cold views, in order. Scenarios send too few prompts to test, and this tier has none."""
    out = []
    for view in views:
        if not view.cold:
            continue
        single = view.selected(view.name.single)
        rescores = view.history.run.rescore and view.selected(view.name.reference)
        for name in tests_of(view.name, single, rescores):
            out.append(RegisteredTest(view.id, view.scenario, name))
    return out


def run_tests(
    views: Sequence[CellView],
    judging: Judging,
    only: Iterable[RegisteredTest] | None = None,
    announced: int | None = None,
) -> dict[RegisteredTest, Tested]:
    """Compute and adjust all registered tests, or only those in ``only`` (the second stage).

    They form a family of their own, or part of a family of ``announced`` tests. A test that raises gives a result with
    a problem and does not hide the others.
    """
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
    columns = tuple(Column(d, a) for d, a in zip(raw.differences, raw.swap.adjusted if raw.swap else (), strict=False))
    if raw.incomplete and not _shows_more(raw, adjusted, judging):
        return Tested(test, None, prompts=raw.prompts, problem=raw.incomplete, note=raw.note)
    pooled = [d for d in raw.differences if d.column.startswith("all@")]
    by_stratum = [d for d in raw.differences if not d.column.startswith("all@")]
    return Tested(
        test,
        raw.p,
        adjusted,
        columns,
        raw.prompts,
        raw.problem,
        _detectable(pooled, raw, alpha, judging) if raw.p is not None else None,
        _detectable(by_stratum, raw, alpha, judging) if raw.p is not None else None,
        raw.aa_p is None or raw.aa_p > alpha,
        raw.note,
    )


def _shows_more(raw: _Raw, adjusted: float | None, judging: Judging) -> bool:
    """Return whether the test found an increase of what it counts, beyond chance and the practical floor."""
    rejected = adjusted is not None and adjusted <= judging.stage_alpha
    return rejected and any(d.effect > 0 and d.effect >= judging.floor_points / 100 for d in raw.differences)


def _detectable(columns: Sequence[Difference], raw: _Raw, alpha: float, judging: Judging) -> float | None:
    """Return the smallest change, as a fraction, that each of the columns would detect; None without columns.

    It is at least the practical floor and, for yes-or-no tests, the fraction of prompts needed to reach a p-value of
    ``alpha``. It is infinite if there are too few prompts to reach that p-value at all.
    """
    if not columns:
        return None
    each = alpha / max(1, len(raw.differences))
    out = judging.floor_points / 100
    for d in columns:
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
            reference = single.counts.by_key if single else {}
            return _acceptance(view, reference, f"{view.name.single} of this run", judging, alpha)
        case "first-step":
            return _first_step(view, judging, alpha)
        case "survival":
            return _survival(view, judging, alpha)
        case "hard-divergence":
            return _hard(view, judging, alpha)
        case "rescored":
            return _rescored(view, judging, alpha)


def _problem(n: int, swap: Swap | None, alpha: float, what: str) -> str:
    """Return why ``n`` prompts cannot be tested at level ``alpha``; empty if they can."""
    if n == 0:
        return f"expected {what} of the same prompts on both sides, found none in common"
    least = swap.least if swap is not None else 2.0 ** (1 - n)
    if least > alpha:
        return f"{n} prompts can give no p-value below {least:.2g}, and {alpha:.2g} is needed: send more prompts" + (
            "" if swap is None or 2.0 ** (1 - n) > alpha else ", or raise judging.permutations"
        )
    return ""


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
    ours, padded = view.counts
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
    problem = _problem(n, swap, alpha, f"acceptance counts of {against}")
    if problem or swap is None:
        return _Raw(None, problem=problem, note="; ".join(notes))
    return _Raw(swap.p, swap, differences(arms, judging.confidence), n, note="; ".join(notes))


def _arms(
    view: CellView,
    first: Mapping[str, RequestCounts],
    second: Mapping[str, RequestCounts],
    strata: Mapping[str, str],
) -> tuple[Arms, int]:
    """Return both arms, with columns ``all@p`` and ``stratum@p``, and the number of prompts.

    Prompts are sorted by key, so that the seed determines the result.
    """
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
    reference = _first_accepted(single) if single is not None else {}
    return _yes_or_no("first step", reference, _first_accepted(view), "first draft steps", judging, alpha)


def _first_accepted(view: CellView) -> dict[str, bool]:
    """Return, by observation key, whether the first verify step accepted its first draft."""
    out = {}
    for key, o in view.answered().items():
        steps = real_steps(o.final) if o.final is not None else None
        if steps is not None and steps.accepted:
            out[key] = steps.accepted[0] > 0
    return out


def _baseline(view: CellView, method: str) -> Baseline | str:
    lookup = view.baselines.get(method)
    if lookup is None:
        return f"the baseline of {method} was not looked up"
    return lookup.baseline if lookup.baseline is not None else lookup.reason


class _Divergence(NamedTuple):
    """The first difference of an output from the baseline's tokens."""

    at: int | None
    """Index of the first differing output token; None if all are equal."""
    hard: bool
    """Whether the difference is not a near tie."""


def _divergences(view: CellView, rows: Mapping[str, Row]) -> dict[str, tuple[_Divergence, _Divergence]]:
    """Return the divergences of the A/A and of this cell from the baseline, by key, for prompts with an A/A."""
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
            _divergence(again if again is not None and again < len(expected) else None, row.again.token, row, bound),
            _divergence(at := parted_at(ours, expected), _token(ours, at), row, bound),
        )
    return out


def _divergence(at: int | None, token: int | None, row: Row, bound: float) -> _Divergence:
    """Return the divergence of an output that has ``token`` at index ``at``."""
    return _Divergence(at, at is not None and not row.near_tie(at, token, bound))


def _token(output: Sequence[int], at: int | None) -> int | None:
    return output[at] if at is not None and at < len(output) else None


def _rows_with_repetition(view: CellView) -> dict[str, Row] | str:
    """Return the rows of the method's baseline, which must have an A/A, or the reason why there are none."""
    baseline = _baseline(view, view.lineup)
    if isinstance(baseline, str):
        return baseline
    if baseline.noise_floor_nats is None:
        return f"the baseline of {view.lineup} has no A/A: record it with `harness baseline record --repeat 2`"
    return baseline.by_prompt()


def _survival(view: CellView, judging: Judging, alpha: float) -> _Raw:
    rows = _rows_with_repetition(view)
    if isinstance(rows, str):
        return _Raw(None, problem=rows)
    divergences = _divergences(view, rows)
    keys = sorted(divergences)
    prompt_of = {key: o.prompt_id for key, o in view.answered().items()}
    longest = max((len(rows[prompt_of[key]].output_ids) for key in keys), default=0)
    at = sorted({*(t for t in SURVIVAL_AT if t < longest), max(1, longest)})
    sides = []
    for side in (0, 1):
        left = [divergences[key][side].at for key in keys]
        sides.append(np.array([[float(a is not None and a < t) for t in at] for a in left]).reshape(len(keys), len(at)))
    ones = np.ones((len(keys), len(at)))
    arms = make_arms([f"all@token {t}" for t in at], (sides[0], ones), (sides[1], ones))
    swap = label_swap(arms, judging.permutations, judging.seed) if keys else None
    problem = _problem(len(keys), swap, alpha, "tokens with A/A")
    if problem or swap is None:
        return _Raw(None, problem=problem)
    return _Raw(swap.p, swap, differences(arms, judging.confidence), len(keys), binary=True)


def _rescored(view: CellView, judging: Judging, alpha: float) -> _Raw:
    """Test whether more outputs have a token that the plain engine would not have produced, beyond a near tie, than its
    own outputs of the same prompts, which differ from its prefill only by rounding."""
    plain = replace(view, record=view.history.cell(view.name.reference) or view.record, scenario=COLD)
    sides = [_wrong_when_rescored(v) for v in (plain, view)]
    raw = _yes_or_no("re-scored", sides[0], sides[1], "re-scored outputs", judging, alpha)
    outputs = sum(bool(o.final and o.final.output_ids) for v in (plain, view) for o in v.answered().values())
    missing = outputs - len(sides[0]) - len(sides[1])
    if raw.problem or not missing:
        return raw
    return raw._replace(
        note=f"{missing} outputs were not re-scored",
        # Wrong outputs are rarely shared between cells, so those without a score are not a random sample.
        incomplete=f"expected {view.name.reference} to re-score every output, found {missing} without a score",
    )


def _wrong_when_rescored(view: CellView) -> dict[str, bool]:
    """Return, by observation key, whether a re-scored output has a token beyond a near tie."""
    scores = view.history.of(view.name.reference, scenario=RESCORE)
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
    column: str, reference: Mapping[str, bool], ours: Mapping[str, bool], what: str, judging: Judging, alpha: float
) -> _Raw:
    """Apply McNemar's exact test to one answer per prompt in each arm, for the prompts that both have."""
    keys = sorted(reference.keys() & ours.keys())
    problem = _problem(len(keys), None, alpha, what)
    if problem:
        return _Raw(None, problem=problem)
    first, second = (np.array([side[key] for key in keys]) for side in (reference, ours))
    ones = np.ones((len(keys), 1))
    arms = make_arms([f"all@{column}"], (first[:, None].astype(float), ones), (second[:, None].astype(float), ones))
    p = mcnemar(first, second)
    swap = Swap(p, (p,), 2.0 ** (1 - len(keys)), 0, True)
    return _Raw(p, swap, differences(arms, judging.confidence), len(keys), binary=True)


def _hard(view: CellView, judging: Judging, alpha: float) -> _Raw:
    rows = _rows_with_repetition(view)
    if isinstance(rows, str):
        return _Raw(None, problem=rows)
    divergences = _divergences(view, rows)
    repeated = {key: again.hard for key, (again, _) in divergences.items()}
    ours = {key: now.hard for key, (_, now) in divergences.items()}
    raw = _yes_or_no("hard", repeated, ours, "tokens with A/A", judging, alpha)
    if raw.problem:
        return raw
    found = f"{sum(ours.values())} hard divergences in {len(ours)} requests"
    return raw._replace(note=f"{found}, {sum(repeated.values())} between equal runs")
