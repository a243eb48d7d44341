"""The input of judging: the recorded history, the baselines by lineup, and the thresholds of the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

from harness.baselines.lookup import Lookup
from harness.baselines.model import Baseline, BaselineRow, Header
from harness.errors import DataError
from harness.history.folder import History
from harness.history.records import COLD, CellRecord, Observation
from harness.history.verdict import Verdict
from harness.judging.decision import Against
from harness.judging.figures import NO_EVIDENCE, FindingEvidence
from harness.judging.findings import DamageClass, Finding
from harness.observed.acceptance import CellCounts, counts_of
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.model import Judging
from harness.profiles.scenarios import AT_ONCE, SAMPLED
from harness.util.invalid_data import refused_as

T = TypeVar("T")
_K = TypeVar("_K")
_KEPT = 6
"""How many things that were found are kept."""
_OTHER_KERNELS = frozenset({"attention_backend", "enforce_eager"})
"""Settings of the identity that choose the kernels of attention, or let a compiler make them."""
_LINEUPS_KEPT = 2
"""Lineups of which the baseline's rows are kept: a cell's own, and plain decoding."""
_Key = tuple[str, str, str]
"""What was found, the cell and the scenario."""


def _once(kept: dict[_K, Any], key: _K, find: Callable[[], T]) -> T:
    """Return what is kept under a key: what ``find`` finds the first time that it is asked for."""
    if key not in kept:
        kept[key] = find()
    return cast(T, kept[key])


def _not_looked_up(lineup: str) -> str:
    return f"the baseline of {lineup} was not looked up"


@dataclass(frozen=True)
class FoundOfCells:
    """What several checks need of a run's cells and takes long to find. All views of one judgement share it."""

    large: dict[_Key, Any] = field(default_factory=dict)
    """The last few."""
    small: dict[_Key, Any] = field(default_factory=dict)
    """All."""
    rows: dict[str, tuple[Mapping[str, Lookup], dict[str, BaselineRow]]] = field(default_factory=dict)
    """Of the last few lineups, the rows of the baseline by prompt, with the baselines that it is one of."""


@dataclass(frozen=True, kw_only=True)
class CellView(RecordedCell):
    """One cell in one scenario, with the baselines and thresholds it is judged by."""

    baselines: Mapping[str, Lookup]
    """By lineup; a missing key means that no baseline was looked up."""
    judging: Judging
    found: FoundOfCells = field(default_factory=FoundOfCells, repr=False, compare=False)
    own: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    """What was found of this view alone, by its thresholds, too."""

    def shared(self, what: str, find: Callable[[], T]) -> T:
        """Return what ``find`` finds of this cell and scenario, which is kept for a while: a run may be larger than the
        memory."""
        key, kept = (what, self.id, self.scenario), self.found.large
        while key not in kept and len(kept) >= _KEPT:
            del kept[next(iter(kept))]
        return _once(kept, key, find)

    def remembered(self, what: str, find: Callable[[], T]) -> T:
        """Return what ``find`` finds of this cell and scenario, which is small and kept to the end, so that the cell
        need not be parsed again for it."""
        return _once(self.found.small, (what, self.id, self.scenario), find)

    def noted(self, what: str, find: Callable[[], T]) -> T:
        """Return what ``find`` finds of this view, which is kept as long as the view is."""
        return _once(self.own, what, find)

    @cached_property
    def counts(self) -> CellCounts:
        """Acceptance counts of each answered request with at least two output tokens, by key."""
        if self.judging.tier == "bitwise":
            return counts_of(self)
        # Tests of several cells ask for them again.
        return self.remembered("counts", lambda: counts_of(self))

    def baseline_or_reason(self, lineup: str) -> Baseline | str:
        """Return the baseline of a lineup, or why there is none."""
        lookup = self.baselines.get(lineup)
        if lookup is None:
            return _not_looked_up(lineup)
        return lookup.baseline or lookup.reason

    def header_or_reason(self, lineup: str) -> Header | str:
        """Return the same without its rows, which are not read for it."""
        lookup = self.baselines.get(lineup)
        if lookup is None or lookup.source is None:
            return _not_looked_up(lineup) if lookup is None else lookup.reason
        return lookup.source.header

    def rows(self, lineup: str) -> dict[str, BaselineRow]:
        """Return the rows of a lineup's baseline by prompt; empty without one."""
        kept = self.found.rows
        if lineup not in kept or kept[lineup][0] is not self.baselines:
            baseline = self.baseline_or_reason(lineup)
            while len(kept) >= _LINEUPS_KEPT:
                del kept[next(iter(kept))]
            kept[lineup] = self.baselines, {} if isinstance(baseline, str) else baseline.by_prompt()
        return kept[lineup][1]

    def against(self, lineup: str) -> Against:
        """Return what a lineup's baseline is: a recording of such engines, or of others on purpose."""
        lookup = self.baselines.get(lineup)
        return "other engines" if lookup is not None and lookup.across else "baseline"

    def of_other_kernels(self, lineup: str) -> bool:
        """Return whether kernels recorded a lineup's baseline that round 16-bit numbers otherwise than this run's."""
        lookup = self.baselines.get(lineup)
        across = lookup.across if lookup is not None else ()
        return self.settings.dtype != "float32" and not _OTHER_KERNELS.isdisjoint(across)

    def recorded(self, lineup: str, o: Observation) -> BaselineRow | None:
        """Return the row that a lineup's baseline has of a request; None also where a parameter decides its answer."""
        return None if o.answered_otherwise else self.rows(lineup).get(o.prompt_id)

    @property
    def has_recorded(self) -> bool:
        """Whether baselines have answers to requests of this scenario: not where parameters decide all of them."""
        found = self.all_observations()
        return not found or any(not o.answered_otherwise for o in found)

    @property
    def comparable(self) -> bool:
        """Whether answers of other cells say which are right: not where all are drawn beside drafts."""
        found = self.all_observations() if self.speculative else []
        return not found or any(o.feature not in SAMPLED for o in found)

    @property
    def wrong_output(self) -> DamageClass:
        """The default damage class of a wrong output: a cold prompt on a single engine reads no KV but its own."""
        return "sampler" if self.cold and not self.handed_off else "target-kv"

    @property
    def wrong_drafts(self) -> DamageClass:
        """The same for drafts that are accepted too rarely."""
        return "sampler" if self.cold and not self.handed_off else "drafter-kv"

    def finding(
        self,
        check: str,
        verdict: Verdict,
        damage: DamageClass,
        message: str,
        observation: Observation | None = None,
        evidence: FindingEvidence = NO_EVIDENCE,
    ) -> Finding:
        """Return a finding about this cell, or about one of its requests if ``observation`` is given."""
        return Finding(
            check=check,
            cell=self.id,
            scenario=self.scenario,
            part=observation.key if observation and not self.cold else None,
            verdict=verdict,
            damage=damage,
            message=message,
            prompt_id=observation.prompt_id if observation else None,
            form=observation.form if observation else None,
            stratum=self.stratum(observation) if observation else None,
            evidence=evidence,
        )

    def untested(
        self, check: str, message: str, observation: Observation | None = None, evidence: FindingEvidence = NO_EVIDENCE
    ) -> Finding:
        """Return a finding that the cell, or one of its requests, gave no evidence: nothing was tested (UNKNOWN)."""
        return self.finding(check, Verdict.UNKNOWN, "nothing-tested", message, observation, evidence)

    def no_baseline(self, check: str, message: str, observation: Observation | None = None) -> Finding:
        """Return a finding that there is no baseline to compare the cell, or one of its requests, with (UNKNOWN)."""
        return self.finding(check, Verdict.UNKNOWN, "baseline", message, observation)

    def wrong_kv(
        self, check: str, message: str, observation: Observation, evidence: FindingEvidence = NO_EVIDENCE
    ) -> Finding:
        """Return a finding that a request read KV of the target that is not its own (REGRESSION)."""
        return self.finding(check, Verdict.REGRESSION, "target-kv", message, observation, evidence)


class CellScenario(NamedTuple):
    """A cell in a scenario, of which a view can be made."""

    record: CellRecord
    scenario: str


class Evidence(NamedTuple):
    """Everything needed to judge all cells of a run."""

    history: History
    baselines: Mapping[str, Lookup]
    """By lineup; a missing key means that no baseline was looked up."""
    judging: Judging
    found: FoundOfCells

    def once(self, what: str, find: Callable[[], T]) -> T:
        """Return what ``find`` finds of the whole run, the first time that it is asked for."""
        return _once(self.found.small, (what, "", ""), find)

    def over(self, history: History) -> Evidence:
        """Return the same with another history, recorded after this one to be judged alike."""
        return self._replace(history=history, found=FoundOfCells())

    def view(self, record: CellRecord, scenario: str = COLD) -> CellView:
        return CellView(
            self.history, record, scenario, baselines=self.baselines, judging=self.judging, found=self.found
        )

    def views(self) -> Iterator[CellView]:
        """Yield one view for each place."""
        return (self.view(*place) for place in self.places())

    def places(self) -> Iterator[CellScenario]:
        """Yield each cell and scenario that the run was asked to observe, a cell's cold prompts first."""
        for record in self.history.run.cells:
            if record.planned or not record.scenarios:
                yield CellScenario(record, COLD)
            for scenario in record.scenarios:
                # In the normal tier these few requests only decide how the others are asked.
                if scenario != AT_ONCE or self.judging.tier != "normal":
                    yield CellScenario(record, scenario)


class Stages(NamedTuple):
    """What was recorded after a run, because something in it was found once."""

    second: History | None = None
    """The second stage: the tests that failed, on held-out prompts and fresh engines."""
    again: tuple[History, ...] = ()
    """The answers that were wrong by themselves, asked again; one history each time."""


ONE_STAGE = Stages()


def judging_of(history: History) -> Judging:
    """Return the thresholds that the run was planned with. Raises DataError if they are damaged."""
    with refused_as(DataError, f"{history.folder}: the recorded profile is damaged"):
        return history.run.asked_for.judging
