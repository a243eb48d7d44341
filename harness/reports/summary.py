"""A judged run as plain data: the one place that decides what every report shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from harness.baselines.lookup import Lookup
from harness.baselines.published import Band, load_published, published_for
from harness.errors import EXIT_REGRESSION, EXIT_UNKNOWN, DataError
from harness.history.acceptance import Rates, pool_counts
from harness.history.folder import History
from harness.history.records import COLD, RESCORE
from harness.history.verdict import Verdict
from harness.judging.exposure import Exposure, exposure_of
from harness.judging.figures import AcceptanceFigures, HypothesisFigures, TransferFigures
from harness.judging.findings import CellVerdict, CheckResult, Judgement, how_many
from harness.judging.known_defects import UNTESTED
from harness.observed.recorded_cell import RecordedCell, recorded_cells
from harness.profiles.cells import CellName
from harness.profiles.remote_code import said
from harness.reports.cause_words import BRIEF, headline_of
from harness.reports.causes import Cause, causes_of, consequences
from harness.reports.chart_data import Figures, figures_of
from harness.reports.inputs import Inputs
from harness.reports.next_steps import go_on, next_step
from harness.reports.prompts import Prompts, prompts_of
from harness.util.signals import ended_by
from harness.util.text import counted, cut, without_log
from harness.workload.expected import left_out

_REASON_CHARS = 160


class AcceptanceRow(NamedTuple):
    """Acceptance per position of one speculative cell and of its baseline."""

    cell: str
    ours: Rates
    baseline_rates: tuple[float | None, ...] | None
    padded: int
    has_baseline: bool = False
    """Whether there is a baseline, though its rates may not have been judged."""


NOT_WHOLE = "expected the whole plan"
"""How a notice begins that says why a run is UNKNOWN that planned less than it had to."""
SAME_RECORD = "the run was compared with itself (--against)"
"""How a notice begins that says that a run and its reference are the same record."""


class RunSummary(NamedTuple):
    """Everything that reports show of a judged run."""

    history: History
    judgement: Judgement
    scenarios: list[str]
    """Scenarios of any cell except the cold one, in the profile's order."""
    scenario_grid: dict[str, dict[str, Verdict]]
    """Cell → scenario → verdict."""
    acceptance: list[AcceptanceRow]
    equal_tokens: dict[str, str]
    """Cell → how many of its cold prompts were answered with the right tokens, as text."""
    figures: Figures
    """The data of the charts."""
    prompts: Prompts
    """Every request, and what the checks say of it."""
    published: list[tuple[str | None, str]]
    """(method, published acceptance for this run's models as text), advisory; or (None, why there is none)."""
    causes: Sequence[Cause] = ()
    """What the findings come from, gravest first: every report shows these."""
    next_step: str = ""
    """How to show the gravest cause again, what to do about tests that are SUSPECT, or about a run that was not
    recorded in full; empty when there is nothing to do."""
    command: str = ""
    """The command that does it; empty where none can be said."""
    inputs: Inputs | None = None
    """What the verdict was made of; None where that is not asked."""
    strict: bool = False
    """Whether expected failures fail."""
    unwritten: str = ""
    """Why the reports could not be written; empty when they were, or were not to be."""
    written: Path | None = None
    """The folder that the reports were written into; None when they were not."""

    @property
    def remote_code(self) -> str:
        """The models whose code from the hub ran, as text; empty when none did."""
        return said(self.history.run.profile)

    @property
    def cells(self) -> dict[str, Verdict]:
        return self.judgement.by_cell()

    @property
    def diagnosed(self) -> list[CellVerdict]:
        """Cells and scenarios with a diagnosis of KV damage, worst first; broken engines are left out."""
        found = [c for c in self.judgement.cells if c.diagnosis is not None and c.diagnosis.damage != "infrastructure"]
        return sorted(found, key=lambda c: -c.verdict.severity)

    @property
    def found(self) -> list[Cause]:
        """The causes that are no expected failures; of a run in which something broke, without what was not tested."""
        return consequences([c for c in self.causes if c.known is None])[0]

    @property
    def untested(self) -> list[Cause]:
        """What was not tested because something broke."""
        return consequences([c for c in self.causes if c.known is None])[1]

    @property
    def untested_words(self) -> str:
        """How many findings of missing evidence there are beside what was found."""
        missing = counted(sum(c.count for c in self.untested), "finding")
        return f"not tested{' because of it' if self.verdict is Verdict.UNKNOWN else ''}: {missing} of missing evidence"

    @property
    def expected(self) -> list[Cause]:
        """The expected failures."""
        return [c for c in self.causes if c.known is not None]

    def causes_behind(self, view: CellVerdict, result: CheckResult) -> list[Cause]:
        """Return the causes of what a check found that are no expected failures, gravest first; of one that examined
        nothing, the gravest cause in its cell and scenario."""
        ids = {f.id for f in result.findings}
        causes = [*self.found, *self.untested]
        if not ids:
            return [c for c in causes if (view.cell, view.scenario) in c.views][:1]
        return [c for c in causes if not ids.isdisjoint(c.ids)]

    @property
    def repro(self) -> str:
        """The command that shows the gravest cause again; empty where nothing but expected failures can be shown."""
        return next((c.command for c in self.found if c.command), "")

    @property
    def only_repro(self) -> bool:
        """Whether the next step is to show the gravest cause again, and nothing else."""
        return bool(self.repro) and self.command == self.repro

    @property
    def exposure(self) -> Exposure:
        """How many answers were checked token by token."""
        return exposure_of(self.judgement)

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def headline(self) -> str:
        """The verdict; a run with nothing but known defects passes, and says how many failures were expected."""
        if self.verdict is not Verdict.KNOWN:
            return f"{self.verdict.symbol} {self.verdict}"
        known = len({f.known for f in self.judgement.findings if f.known})
        return f"{Verdict.PASS.symbol} PASS ({counted(known, 'expected failure')})"

    @property
    def exit_code(self) -> int:
        """The exit code of the verdict, but never 0 when the reports could not be written, nor for expected failures in
        a strict run."""
        code = EXIT_REGRESSION if self.strict and self.verdict is Verdict.KNOWN else self.verdict.exit_code
        return EXIT_UNKNOWN if self.unwritten and code != EXIT_REGRESSION else code

    @property
    def sentence(self) -> str:
        """The verdict's sentence, whole."""
        return describe(self.history, self.judgement, self.found)

    @property
    def brief(self) -> str:
        """The verdict's sentence, with long messages abridged."""
        return describe(self.history, self.judgement, self.found, BRIEF)


def summarise_run(
    history: History,
    judgement: Judgement,
    baselines: Mapping[str, Lookup] | None = None,
    anyway: Mapping[str, str] = MappingProxyType({}),
) -> RunSummary:
    """Summarise a judged run; without baselines, the figures are of this run alone.

    ``anyway`` are the findings, by id, that known defects cover in a run without its injected fault.
    """
    views = {v.id: v for v in recorded_cells(history)}
    acceptance = [_acceptance_row(view, judgement, baselines or {}) for view in views.values() if view.speculative]
    onward = go_on(history, judgement)
    prompts = prompts_of(history, judgement, baselines or {})
    summary = RunSummary(
        history=history,
        judgement=judgement,
        scenarios=list(dict.fromkeys(s for r in history.run.cells for s in r.scenarios)),
        scenario_grid=_scenario_grid(judgement),
        acceptance=acceptance,
        equal_tokens={cell: _equal_tokens(judgement, view) for cell, view in views.items()},
        figures=figures_of(history, judgement, baselines or {}),
        prompts=prompts,
        published=_published(history, acceptance),
        causes=causes_of(history, judgement, {r.place: r.length for r in prompts.rows}, anyway),
        next_step="; ".join(filter(None, (next_step(history, judgement), onward.words))),
        command=onward.command,
    )
    if summary.next_step or not summary.repro:
        return summary
    return summary._replace(next_step=f"reproduce it: {summary.repro}", command=summary.repro)


def _published(history: History, acceptance: Sequence[AcceptanceRow]) -> list[tuple[str | None, str]]:
    try:
        bands = load_published()
    except DataError as error:
        # Advisory figures must not prevent the report.
        return [(None, str(error))]
    rows: dict[str, list[AcceptanceRow]] = defaultdict(list)
    for row in acceptance:
        rows[CellName.of(row.cell).lineup].append(row)
    return [
        (lineup, f"{lineup}: {band.describe()}; {_as_gate(band, of)}")
        for lineup, of in rows.items()
        for band in published_for(bands, history.run.asked_for, lineup)
    ]


def _as_gate(band: Band, rows: Sequence[AcceptanceRow]) -> str:
    """Return what the publisher's tolerance as a gate would say of each cell."""
    said: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        passes = row.ours.steps > 0 and not band.outside(row.ours.rates, row.ours.length_pooled)
        said["pass" if passes else "fail"].append(row.cell)
    return "its tolerance would " + " and ".join(f"{verb} {', '.join(cells)}" for verb, cells in said.items())


def _scenario_grid(judgement: Judgement) -> dict[str, dict[str, Verdict]]:
    out: dict[str, dict[str, Verdict]] = defaultdict(dict)
    for item in judgement.cells:
        out[item.cell][item.scenario] = item.verdict
    return dict(out)


def _equal_tokens(judgement: Judgement, view: RecordedCell) -> str:
    """Return how many cold answers have the tokens that they must have. Where tests judge instead of every token, count
    those that equal the single engine's, or the plain one's."""
    result = judgement.result(view.id, "tokens-reference") or judgement.result(view.id, "tokens-baseline")
    if result is None or not result.judged:
        return (_by_tests(view) and _counted_equal(view)) or "not judged"
    wrong = len({f.prompt_id for f in result.findings if f.verdict is not Verdict.UNKNOWN})
    wrong += sum(f.others for f in result.findings if f.verdict is not Verdict.UNKNOWN)
    return f"{result.judged - wrong}/{result.judged}"


def _by_tests(view: RecordedCell) -> bool:
    return view.history.run.asked_for.tier == "normal"


def _counted_equal(view: RecordedCell) -> str | None:
    """Return how many answers to the same prompts another cell of the run gave alike, or None without such a cell."""
    other = view.sibling("single", COLD) if view.handed_off else None
    if other is None and not view.is_plain:
        plain = view.history.cell(view.name.reference)
        other = replace(view, record=plain) if plain is not None else None
    if other is None or other.id == view.id:
        return None
    theirs = other.answers()
    pairs = [(ours.output, theirs[key].output) for key, ours in view.answers().items() if key in theirs]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}" if pairs else None


def _acceptance_row(view: RecordedCell, judgement: Judgement, baselines: Mapping[str, Lookup]) -> AcceptanceRow:
    compared = judgement.result(view.id, "acceptance-baseline")
    figures = compared.figures if compared is not None else None
    rates = figures.reference.rates if isinstance(figures, AcceptanceFigures | HypothesisFigures) else ()
    return AcceptanceRow(
        cell=view.id,
        ours=pool_counts(view.counts.by_key.values(), view.record.draft_tokens),
        baseline_rates=rates or None,
        padded=sum(s.padded for s in view.steps().values()),
        has_baseline=(lookup := baselines.get(view.lineup)) is not None and lookup.found,
    )


def describe(history: History, judgement: Judgement, causes: Sequence[Cause], most: int | None = None) -> str:
    """Return the verdict's sentence: what passed, or the gravest of the causes and how many cells it leaves; with
    ``most``, that many characters of a message."""
    verdicts = judgement.by_cell()
    cells = len(verdicts)
    bad = [f"{cell} {v}" for cell, v in verdicts.items() if v.exit_code != 0]
    known = sorted({f.known for f in judgement.findings if f.known})
    if judgement.verdict is Verdict.PASS:
        who = "The cell passes" if cells == 1 else f"All {cells} cells pass"
        return f"{who}: {_judged_right(history, judgement)}.{_limits(history, judgement)}"
    if judgement.verdict is Verdict.KNOWN:
        count = how_many(f for f in judgement.findings if f.known is not None)
        where = f"{counted(count, 'finding')} in {counted(cells, 'cell')}, {asked_in_words(history)}"
        return f"Only expected failures ({', '.join(known)}): {where}.{_limits(history, judgement)}"
    if not bad:
        most = 1 if judgement.notices and judgement.notices[0].startswith((NOT_WHOLE, SAME_RECORD)) else None
        return f"{'; '.join(judgement.notices[:most]) or 'no cell was judged'}."
    unknown = judgement.verdict is Verdict.UNKNOWN
    what = f"{len(bad)} of {counted(cells, 'cell')} {_fate(len(bad), unknown)}"
    injected = f"With {', '.join(judgement.mutants)} injected, " if judgement.mutants else ""
    cause = (_cause(history, judgement, most) if unknown else "") or headline_of(causes, most)
    if unknown and any(n.startswith(SAME_RECORD) for n in judgement.notices):
        cause = f"{SAME_RECORD[0].upper()}{SAME_RECORD[1:]}, so what it lacks is missing on both sides: {cause}"
    rest = (_right_so_far(judgement) if unknown else "") or counted(how_many(judgement.findings), "finding")
    # A sentence that was cut ends by itself.
    end = "" if not cause else " " if cause.endswith("…") else ". "
    return f"{injected}{cause}{end}{what}; {rest}."


def _fate(cells: int, unknown: bool) -> str:
    """Return what became of so many cells of a run that did not pass."""
    if unknown:
        return "cannot be judged in full"
    return "does not pass" if cells == 1 else "do not pass"


def _right_so_far(judgement: Judgement) -> str:
    """Return that an UNKNOWN run found nothing wrong, or it would not be UNKNOWN; empty where no answer was checked."""
    answers = exposure_of(judgement).answers
    return f"no wrong answer among the {answers:,} that were checked" if answers else ""


def _limits(history: History, judgement: Judgement) -> str:
    """Return what a green verdict does not speak of: cells and scenarios of the profile that were not run, and states
    that an expected failure makes say nothing."""
    untested = [n.removeprefix(UNTESTED).partition(":")[0] for n in judgement.notices if n.startswith(UNTESTED)]
    found = [left_out(history.run), f"Untested: {'; '.join(untested)}." if untested else ""]
    return "".join(f" {words}" for words in found if words)


def asked_in_words(history: History) -> str:
    """Return how many requests a run sent, and how many answers it had re-scored."""
    rescored = sum(o.scores for o in history.observations)
    asked = counted(sum(o.scenario != RESCORE for o in history.observations), "request")
    return f"{asked} and {counted(rescored, 're-scoring')}" if rescored else asked


def _judged_right(history: History, judgement: Judgement) -> str:
    """Return what the checks of a passing run showed: no more than they judged."""
    results = [r for c in judgement.cells for r in c.results if r.judged]
    parts = []
    answers = exposure_of(judgement).answers
    if answers:
        parts.append(f"{answers:,} answers have the right tokens")
    tests = sum(isinstance(r.figures, HypothesisFigures) for r in results)
    if tests:
        parts.append(f"none of {tests} registered tests found a change beyond chance in {asked_in_words(history)}")
    elif any(r.check.startswith("acceptance-") for r in results):
        parts.append("acceptance is as expected")
    if any(r.check == "transfer" and isinstance(r.figures, TransferFigures) for r in results):
        parts.append("every P/D request moved its KV")
    if not parts:
        return "all requests were answered"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}{',' if len(parts) > 2 else ''} and {parts[-1]}"


def _cause(history: History, judgement: Judgement, most: int | None) -> str:
    """Return why a run could not be recorded in full: what its other findings follow from. Empty when it was."""
    planned = sum(c.planned + sum(c.scenarios.values()) for c in history.run.cells)
    so_far = f"{history.answered:,} of {counted(planned, 'planned request')}"
    if history.run.interrupted:
        words = ended_by(history.run.ended_by)
        return f"{words[0].upper()}{words[1:]} after {so_far}"
    reasons: dict[str, set[str]] = defaultdict(set)
    for f in judgement.findings:
        if f.damage == "infrastructure":
            reasons[f.reason or f.message].add(f.cell)
    if not reasons:
        return "The run ended before all was recorded" if history.run.finished is None else ""
    reason, hit = max(reasons.items(), key=lambda item: len(item[1]))
    what = without_log(reason) if most is None else cut(without_log(reason), _REASON_CHARS)
    others = f", and {counted(len(reasons) - 1, 'more reason')}" if len(reasons) > 1 else ""
    return (
        f"Not recorded in full ({so_far}): {what} ({len(hit)} of {counted(len(judgement.by_cell()), 'cell')}{others})"
    )
