"""The registered hypothesis tests of the normal tier, where two equal runs need not agree bit for bit.

All tests of a run are announced beforehand (``registered``), computed together, and adjusted together (Holm over the
announced number). ``harness.judging.checks.statistical`` turns the results into findings. The test of all P/D cells
together is in ``harness.judging.checks.pooled``.

* ``acceptance-baseline``: acceptance of the cell against the baseline, all positions and strata in one test;
* ``acceptance-single``: the same for P/D against the single engine of the same run;
* ``acceptance-cold``: the same for a scenario against the same cell's cold answers to the same prompts;
* ``first-step``: whether the first draft after the hand-off is accepted, P/D against single;
* ``survival``: share of prompts whose output has parted from the method's baseline by token t, other than at a near
  tie, against A/A; in a scenario against the same cell's cold answers;
* ``rescored``: outputs with a token that the plain engine would not have produced, against its own; in a scenario
  against the same cell's cold ones;
* ``logprobs-single``: how probable P/D finds the tokens that it says, against the plain engine that reads them.

The unit is the text that a prompt was made of: padded copies of one text may have the same luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from harness.baselines.model import BaselineRow
from harness.history.acceptance import RequestCounts
from harness.history.records import COLD, Leg
from harness.history.token_ids import common_prefix, parted_at
from harness.judging.checks.attached import why_in_total
from harness.judging.checks.model import YES_OR_NO, Column, RegisteredTest, Tested, TestName
from harness.judging.checks.rescored import largest_gaps, scores
from harness.judging.detection import Detectable, Floor, Level, Sample, seen_in_answers, seen_in_rate, stage_power
from harness.judging.evidence import CellView
from harness.judging.near_ties import near_tie_nats
from harness.judging.shares import ONE_PROCESS, SharedOut
from harness.observed import acceptance
from harness.profiles.cells import CellName
from harness.profiles.model import Judging
from harness.stats.multiplicity import holm
from harness.stats.paired import (
    Arms,
    Difference,
    Matrix,
    Swap,
    by_unit,
    correlation_within,
    count_arms,
    differences,
    label_swap,
    make_arms,
)
from harness.stats.power import least_units
from harness.stats.spread import Spread, TwinDrafts, spread_of

T = TypeVar("T")
SURVIVAL_AT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Output positions at which ``survival`` compares tokens."""


class _Raw(NamedTuple):
    """The result of a test before adjustment for the other tests."""

    p: float | None
    swap: Swap | None = None
    differences: tuple[Difference, ...] = ()
    prompts: tuple[int, ...] = ()
    """Number of prompts in each column."""
    problem: str = ""
    aa_p: float | None = None
    note: str = ""
    slack: float = 0.0
    """By how much of itself acceptance may move without a defect."""
    incomplete: str = ""
    """Missing evidence without which the test can show a change, but not the absence of one."""
    spread: Spread | None = None
    """How much the requests differ from their twins, of tests of acceptance."""
    widest: tuple[str, ...] = ()
    """The prompts of those that differ most."""

    @property
    def sample(self) -> Sample:
        return Sample(max(self.prompts, default=0), max((d.units for d in self.differences), default=0))


def tests_of(cell: CellName, has_single: bool, rescores: bool, cold: bool = True) -> tuple[TestName, ...]:
    """Return the tests that a cell registers cold or in a scenario, both for ``harness plan`` and for judging."""
    out: list[TestName] = ["survival"]
    if rescores and (cell.id != cell.reference or not cold):
        out.append("rescored")
    if cell.topology == "pd" and rescores:
        out.append("logprobs-single")
    if cell.method != "none":
        out.append("acceptance-baseline" if cold else "acceptance-cold")
        if cell.topology == "pd" and has_single:
            out += ["acceptance-single", "first-step"]
    return tuple(out)


def registered(views: Iterable[CellView]) -> list[RegisteredTest]:
    """Return all tests of the views, in order."""
    out = []
    for view in views:
        single = view.selected(view.name.single) if view.cold else view.asked(view.name.single)
        rescores = view.history.run.rescore and view.selected(view.name.reference)
        names = tests_of(view.name, single, rescores, view.cold)
        out += [RegisteredTest(view.id, view.scenario, name) for name in names]
    return out


def run_tests(
    views: Sequence[CellView],
    judging: Judging,
    only: Iterable[RegisteredTest] | None = None,
    announced: int | None = None,
    shared_out: SharedOut = ONE_PROCESS,
) -> dict[RegisteredTest, Tested]:
    """Compute and adjust all registered tests, or only those in ``only`` (the second stage).

    They form a family of their own, or part of a family of ``announced`` tests. A test that raises gives a result with
    a problem and does not hide the others.
    """
    ids = list(only) if only is not None else registered(views)
    family = max(len(ids), announced or 0)
    alpha = judging.stage_alpha / max(1, family)
    names: dict[tuple[str, str], list[TestName]] = {}
    for test in ids:
        names.setdefault((test.cell, test.scenario), []).append(test.name)
    observed = [v for v in views if (v.id, v.scenario) in names]
    results = shared_out.each(observed, lambda v: [_computed(v, name, alpha) for name in names[v.id, v.scenario]])
    found = {
        RegisteredTest(v.id, v.scenario, name): raw
        for v, of_view in zip(observed, results, strict=True)
        for name, raw in zip(names[v.id, v.scenario], of_view, strict=True)
    }
    missing = _Raw(None, problem="this cell is missing among those observed")
    raw = {test: found.get(test, missing) for test in ids}
    adjusted = holm({str(t): r.p for t, r in raw.items() if r.p is not None}, family)
    return {t: _finish(t, r, adjusted.get(str(t)), alpha, judging) for t, r in raw.items()}


def _computed(view: CellView, name: TestName, alpha: float) -> _Raw:
    try:
        return _TESTS[name](view, alpha)
    except Exception as error:
        return _Raw(None, problem=f"the test itself failed: {type(error).__name__}: {error}")


def _finish(test: RegisteredTest, raw: _Raw, adjusted: float | None, alpha: float, judging: Judging) -> Tested:
    columns = tuple(Column(d, a) for d, a in zip(raw.differences, raw.swap.adjusted if raw.swap else (), strict=False))
    if raw.incomplete and not _shows_more(raw, adjusted, judging):
        return Tested(test, None, sample=raw.sample, problem=raw.incomplete, note=raw.note)
    level = _level(test.name, raw, alpha, judging)
    seen = {
        column.difference.column: _seen(test.name, column.difference, prompts, level, judging, raw.slack)
        for column, prompts in zip(columns, raw.prompts, strict=True)
    }
    by_stratum = [s for name, s in seen.items() if not name.startswith("all@")]
    return Tested(
        test,
        raw.p,
        adjusted,
        columns,
        raw.sample,
        raw.problem,
        _least([s for name, s in seen.items() if name.startswith("all@")]),
        _least(by_stratum),
        raw.aa_p is None or raw.aa_p > alpha,
        raw.note,
        raw.spread,
        raw.widest,
    )


def _shows_more(raw: _Raw, adjusted: float | None, judging: Judging) -> bool:
    """Return whether the test found an increase of what it counts beyond chance."""
    return adjusted is not None and adjusted <= judging.stage_alpha and any(d.effect > 0 for d in raw.differences)


def _level(name: TestName, raw: _Raw, alpha: float, judging: Judging) -> Level:
    # The columns of survival are nested: fewer units differ in the earlier ones, which thus add no chance to the last.
    columns = 1 if name in YES_OR_NO else len(raw.differences)
    return Level(alpha, columns, stage_power(judging))


def _seen(name: TestName, d: Difference, prompts: int, level: Level, judging: Judging, slack: float) -> Detectable:
    """Return what a column would have seen."""
    sample = Sample(prompts, d.units)
    sd = d.error * d.units**0.5
    if name not in YES_OR_NO:
        # Drafts are lost or not, which adds noise; a probability falls without.
        own = 0.0 if name == "logprobs-single" else d.trials
        floor = Floor(judging.floor_points / 100, slack, judging.confidence)
        return seen_in_rate(sd, d.rates[0], own, sample, level, floor)
    # Damage shows in a first draft only where it would have been accepted.
    return seen_in_answers(sd, sample, level, d.rates[0] if name == "first-step" else 1.0)


def _least(columns: Sequence[Detectable]) -> Detectable | None:
    """Return what every one of the columns would have seen; None without columns."""
    if not columns:
        return None
    return Detectable(max(s.share for s in columns), max(s.prompts for s in columns))


# --- the tests -------------------------------------------------------------------------------------------------------


def _test(view: CellView, rows: Arms, keys: Sequence[str], what: str, alpha: float) -> _Raw:
    """Compare two arms with a row per prompt, whose answers have these keys."""
    judging, units = view.judging, units_of(view, keys)
    if not units:
        return _Raw(None, problem=f"expected {what} of the same prompts on both sides, found none in common")
    arms = by_unit(rows, units)
    swap = label_swap(arms, judging.permutations, judging.seed, alpha)
    if swap.least > alpha:
        copies = f" of {arms.units} texts" if arms.units < rows.units else ""
        return _Raw(
            None,
            problem=f"{rows.units} prompts{copies} can give no p-value below {swap.least:.2g}, and {alpha:.2g} is "
            f"needed: send prompts of at least {least_units(alpha)} texts",
        )
    both = ((rows.trials[0] > 0) & (rows.trials[1] > 0)).sum(axis=0)
    return _Raw(swap.p, swap, differences(arms, judging.confidence), tuple(int(n) for n in both))


class _RequestAsked(NamedTuple):
    """What is asked in a request that was answered."""

    prompt_id: str
    text: str
    """What the prompt was made of: its own id, unless it may have padded copies."""
    max_tokens: int


def asked(view: CellView) -> dict[str, _RequestAsked]:
    """Return what the answered requests ask, by key."""
    return view.remembered(
        "asked",
        lambda: {
            key: _RequestAsked(o.prompt_id, o.source or o.prompt_id, o.max_tokens or 0)
            for key, o in view.answered().items()
        },
    )


def full_answers(view: CellView, keys: Iterable[str]) -> list[str]:
    """Return the keys of answers that are compared: in a scenario those of full length, not those that fill caches."""
    answered = asked(view)
    most = max((a.max_tokens for a in answered.values()), default=0)
    return [k for k in keys if view.cold or answered[k].max_tokens == most]


def of_cold(view: CellView, found: Mapping[str, T]) -> dict[str, T]:
    """Return what was found of a cell's cold answers, by the key of the same prompt's answer in the scenario."""
    answered = asked(view)
    prompt_of = {key: answered[key].prompt_id for key in full_answers(view, answered)}
    return {key: found[prompt] for key, prompt in prompt_of.items() if prompt in found}


def units_of(view: CellView, keys: Iterable[str]) -> list[str]:
    """Return the text that each answered prompt was made of."""
    answered = asked(view)
    return [answered[key].text for key in keys]


def _acceptance_baseline(view: CellView, alpha: float) -> _Raw:
    baseline = view.baseline_or_reason(view.lineup)
    if isinstance(baseline, str):
        return _Raw(None, problem=baseline)
    k = view.record.draft_tokens
    reference = {row.prompt_id: row.counts(k) for row in baseline.rows}
    raw = _acceptance(view, reference, baseline.outputs, "the baseline", alpha)
    # Equal runs of the prompts that were sent, whose texts are known.
    unit = {a.prompt_id: a.text for a in asked(view).values()}
    again = {
        r.prompt_id: r.again.counts
        for r in baseline.rows
        if r.again is not None and r.again.steps and r.prompt_id in unit
    }
    if not again:
        return _Raw(None, problem="the baseline has no A/A: record it with `harness baseline record --repeat 2`")
    rows = _rows(view, {p: reference[p] for p in again}, again, dict.fromkeys(again, "all"))
    units = [unit[p] for p in sorted(again)]
    swap = label_swap(by_unit(rows, units), view.judging.permutations, view.judging.seed, alpha)
    within = correlation_within(rows, units)
    copies = f"equal runs: padded copies of a text correlate by {within:.2f}" if within is not None else ""
    return raw._replace(aa_p=swap.p, note="; ".join(n for n in (raw.note, copies) if n))


def _acceptance_cold(view: CellView, alpha: float) -> _Raw:
    cold = replace(view, scenario=COLD)
    reference, said = of_cold(view, cold.counts.by_key), of_cold(view, _outputs(cold))
    return _acceptance(view, reference, said, "the cold answers of this run", alpha)


def _acceptance_single(view: CellView, alpha: float) -> _Raw:
    single = view.sibling("single")
    reference, said = (single.counts.by_key, _outputs(single)) if single else ({}, {})
    return _acceptance(view, reference, said, f"{view.name.single} of this run", alpha)


def _outputs(view: CellView) -> dict[str, tuple[int, ...]]:
    return {key: answer.output for key, answer in view.answers().items()}


def _acceptance(
    view: CellView,
    reference: Mapping[str, RequestCounts],
    said: Mapping[str, Sequence[int]],
    against: str,
    alpha: float,
) -> _Raw:
    """Compare the acceptance of the cell's requests with that of a reference, which ``said`` these tokens; both by key,
    or by prompt."""
    ours, padded = view.counts
    answered = view.answered()
    # A scenario has too few texts to tell strata apart.
    strata = {key: view.stratum(o) if view.cold else "all" for key, o in answered.items()}
    matched = {key: reference.get(key, reference.get(answered[key].prompt_id)) for key in full_answers(view, ours)}
    theirs = {key: value for key, value in matched.items() if value is not None}
    rows = _rows(view, theirs, {key: ours[key] for key in theirs}, {key: strata[key] for key in theirs})
    notes = []
    if any(c.source == "counters" for c in ours.values()):
        notes.append(
            "acceptance compared in total, by the engine's counters at concurrency 1, without the steps since the "
            f"hand-off: {why_in_total(view)}"
            + (", and the padded first step was recognised from the totals" if padded else "")
        )
    keys = sorted(theirs)
    raw = _test(view, rows, keys, f"acceptance counts of {against}", alpha)
    outputs = _outputs(view)
    beside = [
        _beside(text, theirs[key], ours[key], outputs[key], said.get(key, said.get(answered[key].prompt_id, ())))
        for key, text in zip(keys, units_of(view, keys), strict=True)
    ]
    spread = spread_of(beside, _equal_runs(view), alpha)
    return raw._replace(
        note="; ".join(notes),
        slack=acceptance.mean_slack(view),
        spread=spread,
        widest=tuple(answered[keys[i]].prompt_id for i in spread.widest) if spread is not None else (),
    )


def _beside(
    text: str, theirs: RequestCounts, ours: RequestCounts, output: Sequence[int], expected: Sequence[int]
) -> TwinDrafts:
    at = common_prefix(output, expected)
    longest = max(len(output), len(expected))
    return _drafts_beside(text, theirs, ours, (longest - at) / longest if longest else 0.0)


def _drafts_beside(text: str, theirs: RequestCounts, ours: RequestCounts, behind: float) -> TwinDrafts:
    counted = [(sum(side.accepted_at), sum(side.trials)) for side in (theirs, ours)]
    return TwinDrafts(text, counted[0], counted[1], behind)


def _equal_runs(view: CellView) -> list[TwinDrafts]:
    """Return what the baseline's equal runs (A/A) accepted of the prompts of this cell."""
    return view.remembered("equal runs", lambda: _of_equal_runs(view))


def _of_equal_runs(view: CellView) -> list[TwinDrafts]:
    k = view.record.draft_tokens
    unit = {a.prompt_id: a.text for a in asked(view).values()}
    out = []
    for prompt, row in view.rows(view.lineup).items():
        if row.again is not None and row.again.steps and prompt in unit:
            tokens, at = len(row.output_ids), row.again.divergence
            behind = 0.0 if at is None else max(0.0, (tokens - at) / tokens)
            out.append(_drafts_beside(unit[prompt], row.counts(k), row.again.counts, behind))
    return out


def _rows(
    view: CellView,
    first: Mapping[str, RequestCounts],
    second: Mapping[str, RequestCounts],
    strata: Mapping[str, str],
) -> Arms:
    """Return both arms with a row per prompt, sorted by key, and columns ``all@p`` and ``stratum@p``."""
    k = view.record.draft_tokens
    keys = sorted(first)
    names = sorted({strata[key] for key in keys} - {"all"})
    masks = {"all": np.ones(len(keys), bool)}
    if len(names) > 1:
        masks |= {name: np.array([strata[key] == name for key in keys]) for name in names}
    columns = [f"{name}@{p}" for name in masks for p in range(k)]
    whole = count_arms([[(side[key].accepted_at, side[key].trials) for key in keys] for side in (first, second)], k)
    sides = [
        tuple(np.concatenate([part * mask[:, None] for mask in masks.values()], axis=1) for part in side)
        for side in zip(whole.hits, whole.trials, strict=True)
    ]
    return make_arms(columns, (sides[0][0], sides[0][1]), (sides[1][0], sides[1][1]))


def _first_step(view: CellView, alpha: float) -> _Raw:
    single = view.sibling("single")
    reference = _first_accepted(single) if single is not None else {}
    return _yes_or_no(view, "first step", reference, _first_accepted(view), "first draft steps", alpha)


def _first_accepted(view: CellView) -> dict[str, bool]:
    """Return, by observation key, whether the first verify step accepted its first draft."""
    return {key: steps.accepted[0] > 0 for key, steps in view.steps().items() if steps.accepted}


class BaselineDivergence(NamedTuple):
    """The first difference of an output from the baseline's tokens."""

    at: int | None
    """Index of the first differing output token; None if all are equal."""
    hard: bool
    """Whether the difference is not a near tie."""


def divergences(
    view: CellView, rows: Mapping[str, BaselineRow]
) -> dict[str, tuple[BaselineDivergence, BaselineDivergence]]:
    """Return the divergences of the A/A and of this cell from the baseline, by key, for prompts with an A/A."""
    return view.remembered("divergences", lambda: _divergences(view, rows))


def _divergences(
    view: CellView, rows: Mapping[str, BaselineRow]
) -> dict[str, tuple[BaselineDivergence, BaselineDivergence]]:
    bound = near_tie_nats(view)
    out = {}
    for key, (o, _, ours) in view.answers().items():
        row = rows.get(o.prompt_id)
        if row is None or row.again is None:
            continue
        expected = row.output_ids[: o.most_tokens]
        again = row.again.divergence
        out[key] = (
            _divergence(again if again is not None and again < len(expected) else None, row.again.token, row, bound),
            _divergence(at := parted_at(ours, expected), _token(ours, at), row, bound),
        )
    return out


def _divergence(at: int | None, token: int | None, row: BaselineRow, bound: float) -> BaselineDivergence:
    """Return the divergence of an output that has ``token`` at index ``at``."""
    return BaselineDivergence(at, at is not None and not row.near_tie(at, token, bound))


def _token(output: Sequence[int], at: int | None) -> int | None:
    return output[at] if at is not None and at < len(output) else None


def rows_with_repetition(view: CellView) -> dict[str, BaselineRow] | str:
    """Return the rows of the method's baseline, which must have an A/A, or the reason why there are none."""
    baseline = view.baseline_or_reason(view.lineup)
    if isinstance(baseline, str):
        return baseline
    if baseline.noise_floor_nats is None:
        return f"the baseline of {view.lineup} has no A/A: record it with `harness baseline record --repeat 2`"
    return baseline.by_prompt()


def _survival(view: CellView, alpha: float) -> _Raw:
    rows = rows_with_repetition(view)
    if isinstance(rows, str):
        return _Raw(None, problem=rows)
    parted = divergences(view, rows)
    if not view.cold:
        cold = of_cold(view, divergences(replace(view, scenario=COLD), rows))
        parted = {key: (cold[key][1], parted[key][1]) for key in parted.keys() & cold.keys()}
    keys = sorted(parted)
    prompt_of = {key: a.prompt_id for key, a in asked(view).items()}
    longest = max((len(rows[prompt_of[key]].output_ids) for key in keys), default=0)
    at = sorted({*(t for t in SURVIVAL_AT if t < longest), max(1, longest)})
    sides = []
    for side in (0, 1):
        # Rounding alone may part two right runs at a near tie, and P/D may round otherwise than a single engine.
        left = [d.at if d.hard else None for d in (parted[key][side] for key in keys)]
        sides.append(np.array([[float(a is not None and a < t) for t in at] for a in left]).reshape(len(keys), len(at)))
    ones = np.ones((len(keys), len(at)))
    arms = make_arms([f"all@token {t}" for t in at], (sides[0], ones), (sides[1], ones))
    raw = _test(view, arms, keys, "tokens with A/A", alpha)
    if raw.problem:
        return raw
    raw = raw._replace(note=_partings(parted.values(), "between equal runs" if view.cold else "cold"))
    once = {p for p in prompt_of.values() if (row := rows.get(p)) and row.again is None}
    if not once:
        return raw
    return raw._replace(
        # Equal answers keep their A/A when a baseline is replaced by a run, so those that have one are the steadier.
        incomplete=f"expected an A/A of every prompt in the baseline of {view.lineup}, found {len(once)} without: "
        "record it with `harness baseline record --repeat 2`"
    )


def _partings(pairs: Iterable[tuple[BaselineDivergence, BaselineDivergence]], beside: str) -> str:
    """Say how many outputs parted, of this run and of what it is compared with."""
    again, ours = zip(*pairs, strict=True)
    hard, ties = (
        [sum(d.at is not None and d.hard is wanted for d in side) for side in (ours, again)] for wanted in (True, False)
    )
    return (
        f"{hard[0]} of {len(ours)} outputs part other than at a near tie, {hard[1]} {beside}; {ties[0]} at a near tie, "
        f"{ties[1]} {beside}"
    )


def _rescored(view: CellView, alpha: float) -> _Raw:
    """Test whether more outputs have a token that the plain engine would not have produced, beyond a near tie, than its
    own outputs of the same prompts, which differ from its prefill only by rounding; in a scenario, than the same
    cell's cold outputs."""
    plain = view.history.cell(view.name.reference) if view.cold else view.record
    other = replace(view, record=plain or view.record, scenario=COLD)
    sides = [wrong_when_rescored(v) for v in (other, view)]
    theirs = sides[0] if view.cold else of_cold(view, sides[0])
    raw = _yes_or_no(view, "re-scored", theirs, sides[1], "re-scored outputs", alpha)
    outputs = sum(bool(a.output) for v in (other, view) for a in v.answers().values())
    missing = outputs - len(sides[0]) - len(sides[1])
    if raw.problem or not missing:
        return raw
    return raw._replace(
        note=f"{missing} outputs were not re-scored",
        # Wrong outputs are rarely shared between cells, so those without a score are not a random sample.
        incomplete=f"expected {view.name.reference} to re-score every output, found {missing} without a score",
    )


def wrong_when_rescored(view: CellView) -> dict[str, bool]:
    """Return, by observation key, whether a re-scored output has a token beyond a near tie."""
    bound = near_tie_nats(view)
    return {key: gap > bound for key, gap in largest_gaps(view).items()}


def _logprobs(view: CellView, alpha: float) -> _Raw:
    """Test whether P/D finds the tokens that it says as probable as the plain engine that reads them afresh.

    The mean of the probabilities is compared, not that of their logarithms, which one unlikely token can outweigh.
    Rounding moves it either way, so that the sides can be exchanged text by text, also where P/D rounds differently;
    what is left of a bias, since an engine says what its own rounding favours, is far below the practical floor.
    """
    moved = {s.observation.key: s.moved for s in scores(view)}
    said = view.answers()
    keys = sorted(full_answers(view, moved))
    missing = [k for k in keys if moved[k] is None]
    if missing:
        problem = (
            f"expected log-probs in all answers of {view.id}, and of {view.name.reference} that reads them, found "
            f"{len(missing)} prompts without"
        )
        return _Raw(None, problem=problem)
    pairs = {k: _probabilities(said[k].leg, m) for k in keys if (m := moved[k]) is not None and len(m)}
    sums = np.array([pair.sum(axis=1) for pair in pairs.values()]).reshape(len(pairs), 2)
    tokens = np.array([[float(pair.shape[1])] for pair in pairs.values()]).reshape(len(pairs), 1)
    arms = make_arms(["all@probability"], (sums[:, :1], tokens), (sums[:, 1:], tokens))
    raw = _test(view, arms, list(pairs), "output tokens with log-probs", alpha)
    return raw if raw.problem else raw._replace(note=f"{int(tokens.sum())} output tokens")


def _probabilities(said: Leg, moved: Matrix) -> Matrix:
    """Return the probabilities [2, tokens] of output tokens, as they are read and as they were said."""
    ours = np.array(said.chosen_logprobs or ())[: len(moved)]
    return np.exp([ours - moved, ours])


def _yes_or_no(
    view: CellView,
    column: str,
    reference: Mapping[str, bool],
    ours: Mapping[str, bool],
    what: str,
    alpha: float,
) -> _Raw:
    """Compare one answer per prompt in each arm, for the prompts that both have."""
    keys = sorted(full_answers(view, reference.keys() & ours.keys()))
    first, second = (np.array([[float(side[key])] for key in keys]).reshape(len(keys), 1) for side in (reference, ours))
    ones = np.ones((len(keys), 1))
    arms = make_arms([f"all@{column}"], (first, ones), (second, ones))
    return _test(view, arms, keys, what, alpha)


_TESTS: dict[TestName, Callable[[CellView, float], _Raw]] = {
    "survival": _survival,
    "rescored": _rescored,
    "logprobs-single": _logprobs,
    "acceptance-baseline": _acceptance_baseline,
    "acceptance-cold": _acceptance_cold,
    "acceptance-single": _acceptance_single,
    "first-step": _first_step,
}
"""The tests of one cell, each by the level at which it has to reject."""
