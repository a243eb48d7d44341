"""A view of one recorded cell in one scenario: what it is, what it was to run with, and its requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self, get_args

from pydantic import ValidationError

from harness.errors import DataError
from harness.history.acceptance import Steps, real_steps
from harness.history.folder import History
from harness.history.records import COLD, COUNTED, CellRecord, EngineRecord, Form, Leg, Observation
from harness.profiles.cells import SECOND_P, CellName
from harness.profiles.methods import Traits
from harness.profiles.recorded_profile import RecordedEngine, RecordedProfile
from harness.profiles.scenarios import AT_ONCE, Scenario
from harness.prompts.lengths import classify


class Answer(NamedTuple):
    """A request that was answered, as its user received it."""

    o: Observation
    leg: Leg
    output: tuple[int, ...]


@dataclass(frozen=True)
class ObservedCell:
    """One cell of a recorded run, in one scenario."""

    history: History
    record: CellRecord
    scenario: str = COLD

    @property
    def id(self) -> str:
        return self.record.cell

    @cached_property
    def name(self) -> CellName:
        return CellName.of(self.id)

    @property
    def lineup(self) -> str:
        """The key of the baseline for this cell."""
        return self.name.lineup

    @property
    def is_plain(self) -> bool:
        """Whether this is the plain single engine, which the tokens of its variant are compared with."""
        return self.id == self.name.reference

    @property
    def cold(self) -> bool:
        return self.scenario == COLD

    @property
    def planned(self) -> int:
        return self.record.planned if self.cold else self.record.scenarios.get(self.scenario, 0)

    @property
    def routed(self) -> bool:
        """Whether a router stands between the harness and the engines."""
        return self.record.route == "router"

    @property
    def speculative(self) -> bool:
        return self.record.draft_tokens > 0

    @cached_property
    def traits(self) -> Traits:
        """What is known of the cell's method of vLLM."""
        return self.profile.traits(self.name.method)

    @cached_property
    def handed_off(self) -> bool:
        return self.name.topology == "pd"

    @property
    def may_pad(self) -> bool:
        """Whether D's first step may be padded: after a hand-off that leaves it no more than one token of a prompt."""
        return self.handed_off and self.record.held_back <= 1 and self.traits.pads

    @property
    def answering(self) -> str:
        """Role of the engine that generates the output."""
        return "decode" if self.handed_off else "single"

    @property
    def prefilling(self) -> str:
        """Role of the engine that computes the prompts."""
        return "prefill" if self.handed_off else "single"

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the engines that the topology has, without routers."""
        return ("prefill", "decode") if self.handed_off else ("single",)

    def engine(self, role: str) -> EngineRecord | None:
        """Return the engine with a role in this cell; in a P/D pair, ``single`` is the decode engine."""
        return self._engines.get(role) or (self._engines.get("decode") if role == "single" else None)

    @property
    def engine_roles(self) -> set[str]:
        """Roles of the engines that are recorded for this cell, without routers and a second P."""
        return self._engines.keys() - {"router", SECOND_P}

    @property
    def _engines(self) -> dict[str, EngineRecord]:
        return self.history.engines(self.record.group)

    def selected(self, cell_id: str) -> bool:
        """Return whether the run was asked to observe another cell."""
        return self.history.cell(cell_id) is not None

    def asked(self, cell_id: str) -> bool:
        """Return whether the run was asked to observe another cell in this cell's scenario."""
        record = self.history.cell(cell_id)
        if record is None:
            return False
        return record.planned > 0 if self.cold or self.has_own_crowd else self.scenario in record.scenarios

    @property
    def has_own_crowd(self) -> bool:
        """Whether each cell asks prompts of its own choice in this scenario, so that others have them cold alone."""
        return self.scenario == AT_ONCE

    def answers_of(self, cell_id: str) -> dict[str, Observation]:
        """Return the observations of another cell to compare with, by the keys of this one's: those in this scenario,
        or cold to the prompts of a crowd that only this cell has."""
        if not self.has_own_crowd:
            return self.history.of(cell_id, scenario=self.scenario)
        cold = self.history.of(cell_id)
        return {key: cold[o.prompt_id] for key, o in self.observations().items() if o.prompt_id in cold}

    @property
    def has_twin(self) -> bool:
        """Whether this is a P/D cell with speculation whose single engine was asked in this scenario, too."""
        return self.handed_off and self.speculative and self.asked(self.name.single)

    def asked_alike(self, cell_id: str) -> bool:
        """Return whether the run was asked for prompts of this cell in another one, in this scenario or cold."""
        cold = self.history.of(cell_id)
        compared = (o for o in self.observations().values() if not (o.abandon or o.mistake or o.answered_otherwise))
        return self.asked(cell_id) or any(o.prompt_id in cold for o in compared)

    def sibling(self, topology: str, scenario: str | None = None) -> Self | None:
        """Return the same method in another topology or scenario of this run, without a router; None if absent."""
        record = self.history.cell(self.name.beside(topology).id)
        return replace(self, record=record, scenario=scenario or self.scenario) if record is not None else None

    @cached_property
    def config(self) -> Scenario | None:
        """The scenario as configured in the profile; None for cold prompts. Raises DataError for a damaged record."""
        if self.cold:
            return None
        try:
            return self.profile.scenario(self.scenario)
        except ValidationError as error:
            raise DataError(f"scenario {self.scenario} of the recorded profile is damaged: {error}") from error

    @cached_property
    def profile(self) -> RecordedProfile:
        """What was asked of this cell's variant."""
        return self.history.run.asked_for.part(self.name.variant)

    @cached_property
    def settings(self) -> RecordedEngine:
        """The settings that the engines of the cell were to have."""
        return self.profile.engine

    @cached_property
    def by_nixl(self) -> bool:
        """Whether NIXL moves the KV of a pair, and its counters prove it."""
        return self.settings.by_nixl

    def caches_prefixes(self, role: str) -> bool:
        """Return whether an engine has a prefix cache."""
        return self._caches[role == "prefill"]

    @cached_property
    def _caches(self) -> dict[bool, bool]:
        return {of_p: self.settings.of("prefill" if of_p else "decode").caches_prefixes for of_p in (False, True)}

    def fills_context(self, o: Observation, leg: Leg) -> bool:
        """Return whether a prompt and its answer fill the context, which ends a request early."""
        return self.settings.context_tokens is not None and (
            len(o.sent_ids) + len(leg.output_ids or ()) >= self.settings.context_tokens
        )

    def beside_full_context(self, o: Observation) -> bool:
        """Return whether another request was under way with this one that came so near the end of its context that it
        had no room for drafts."""
        if self.settings.context_tokens is None or o.concurrent == 1:
            return False
        # The drafts that a step verifies count, and those that it makes.
        near = self.settings.context_tokens - 2 * self.record.draft_tokens
        return any(
            len(other.sent_ids) + len(other.output) >= near
            for other in self.history.in_order(self.id)
            if other.sequence != o.sequence and other.started_at < o.ended_at and o.started_at < other.ended_at
        )

    def block_size(self, role: str) -> int:
        """Return how many tokens a KV block of an engine has: P's may be of another size than D's."""
        return self._block_size_of_p if role == "prefill" and self.handed_off else self.record.block_size

    @cached_property
    def _block_size_of_p(self) -> int:
        own = self.settings.of("prefill").asked("block_size")
        return own if isinstance(own, int) else self.record.block_size

    @property
    def first_view(self) -> bool:
        """Whether this is the first of the cell's scenarios, in which what concerns the whole cell is judged."""
        scenarios = () if self.record.planned else self.record.scenarios
        return self.scenario == next(iter(scenarios), COLD)

    @property
    def judged_whole(self) -> bool:
        """Whether what concerns the whole cell is judged in this view: in the first one of a complete cell, unless the
        record is from before its requests were planned one by one, and its engines' counters and settings read."""
        return self.first_view and self.record.state == "complete" and self.record.plan != COUNTED

    def observations(self, form: Form = "ids") -> dict[str, Observation]:
        """Return observations by key: the prompt id when cold, otherwise with instance and part."""
        return self.history.of(self.id, form, self.scenario)

    def all_observations(self) -> list[Observation]:
        """Return the observations of both forms."""
        return [*self.observations("ids").values(), *self.observations("text").values()]

    def every_answer(self) -> list[Observation]:
        """Return the observations of both forms, with all of those that answer the same request."""
        by_place = self.history.of_cell(self.id).by_place
        return [o for form in get_args(Form) for o in by_place.get((form, self.scenario), ())]

    def answers(self, form: Form = "ids") -> dict[str, Answer]:
        """Return, by key, the observations that were to be answered, ended without an error and have output ids. The
        result is shared, and not to be changed."""
        return self.history.of_cell(self.id).once(("answers", form, self.scenario), lambda: self._answers(form))

    def _answers(self, form: Form) -> dict[str, Answer]:
        return {
            k: Answer(o, leg, leg.output_ids)
            for k, o in self.observations(form).items()
            if not o.cut_short and (leg := o.final) is not None and leg.output_ids is not None
        }

    def answered(self, form: Form = "ids") -> dict[str, Observation]:
        """Return the observations of ``answers``."""
        return {k: a.o for k, a in self.answers(form).items()}

    def steps(self) -> dict[str, Steps]:
        """Return, by key, the verify steps of each answered request that reports them, without padding. The result is
        shared, and not to be changed."""
        return self.history.of_cell(self.id).once(("steps", self.scenario), self._steps)

    def _steps(self) -> dict[str, Steps]:
        return {k: steps for k, a in self.answers().items() if (steps := real_steps(a.leg)) is not None}

    def stratum(self, observation: Observation) -> str:
        return classify(len(observation.sent_ids), self.record.block_size, self.record.lookahead)
