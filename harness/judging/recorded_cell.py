"""A view of one recorded cell in one scenario, derived from the record alone, without baselines or thresholds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, get_args

from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from harness.errors import DataError
from harness.history.acceptance import RequestCounts, Steps, real_steps, request_counts, settle_padding
from harness.history.folder import History
from harness.history.records import COLD, COUNTED, CellRecord, EngineRecord, Form, Leg, Observation
from harness.history.token_ids import common_prefix
from harness.profiles.cells import SECOND_P, CellName
from harness.profiles.methods import Traits
from harness.profiles.recorded_profile import RecordedEngine, RecordedProfile
from harness.profiles.scenarios import (
    SECOND,
    AppendedToken,
    Crowd,
    Pressure,
    Recovery,
    Refill,
    Scenario,
    SecondPrefill,
    Trace,
)
from harness.prompts.lengths import blocks, classify, published_blocks

PRESSURE_SLACK = 0.1
CHUNKS_SLACK = 0.03
"""The most that other chunks moved the mean of a single request (EAGLE3 and MTP; docs/scenarios.md)."""


class Answer(NamedTuple):
    """A request that was answered, as its user received it."""

    o: Observation
    leg: Leg
    output: tuple[int, ...]


class Hit(NamedTuple):
    """Tokens of a prompt that an engine takes from its prefix cache, by what it was asked before."""

    least: int
    most: int


class CellCounts(NamedTuple):
    """Acceptance counts of the answered requests of a cell."""

    by_key: dict[str, RequestCounts]
    padded: bool
    """Whether a padded first step was recognised from the engine's counters."""


def published_groups(o: Observation) -> list[list[Any]]:
    """Return the block ids that P published for a hand-off, by KV-cache group; empty if there are none."""
    prefill = o.leg("prefill")
    groups = (prefill.kv_transfer_params or {}).get("remote_block_ids") if prefill is not None else None
    return groups if isinstance(groups, list) and all(isinstance(group, list) for group in groups) else []


@dataclass(frozen=True)
class RecordedCell:
    """One cell of a recorded run, in one scenario."""

    history: History
    record: CellRecord
    scenario: str = COLD

    @property
    def id(self) -> str:
        return self.record.cell

    @property
    def name(self) -> CellName:
        return CellName.of(self.id)

    @property
    def topology(self) -> str:
        return self.name.topology

    @property
    def method(self) -> str:
        return self.name.method

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
        return self.profile.traits(self.method)

    @property
    def handed_off(self) -> bool:
        return self.topology == "pd"

    @property
    def may_pad(self) -> bool:
        """Whether D's first step may be padded: after a hand-off that leaves it no more than one token of a prompt."""
        return self.handed_off and self.record.held_back <= 1

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
        return {e.role: e for e in self.history.run.engines if e.group == self.record.group}

    def selected(self, cell_id: str) -> bool:
        """Return whether the run was asked to observe another cell."""
        return self.history.cell(cell_id) is not None

    def asked(self, cell_id: str) -> bool:
        """Return whether the run was asked to observe another cell in this cell's scenario."""
        record = self.history.cell(cell_id)
        return record is not None and (record.planned > 0 if self.cold else self.scenario in record.scenarios)

    def asked_alike(self, cell_id: str) -> bool:
        """Return whether the run was asked for prompts of this cell in another one, in this scenario or cold."""
        cold = self.history.of(cell_id)
        return self.asked(cell_id) or any(o.prompt_id in cold for o in self.observations().values())

    def sibling(self, topology: str, scenario: str | None = None) -> Self | None:
        """Return the same method in another topology or scenario of this run, without a router; None if absent."""
        record = self.history.cell(self.name.beside(topology).id)
        return replace(self, record=record, scenario=scenario or self.scenario) if record is not None else None

    @property
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

    @property
    def settings(self) -> RecordedEngine:
        """The settings that the engines of the cell were to have."""
        return self.profile.engine

    def fills_context(self, o: Observation, leg: Leg) -> bool:
        """Return whether a prompt and its answer fill the context, which ends a request early."""
        return self.settings.context_tokens is not None and (
            len(o.sent_ids) + len(leg.output_ids or ()) >= self.settings.context_tokens
        )

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

    @property
    def acceptance_slack(self) -> float:
        """Relative tolerance on a request's accepted drafts. It is zero except under pressure, in crowds, some traces
        and for the cold prompts of a soak: there prompts are chunked differently than alone, which changes what EAGLE3
        and MTP drafters see."""
        loaded = self.cold and self.history.run.kind == "soak"
        config = self.config
        other_chunks = isinstance(config, Pressure | Crowd) or (
            isinstance(config, Trace) and self._other_chunks(config)
        )
        return PRESSURE_SLACK if loaded or other_chunks else 0.0

    @property
    def mean_slack(self) -> float:
        """By how much of itself mean acceptance may be moved by a state alone: prompts of a crowd are prefilled in
        other chunks than alone, and a request that was preempted is prefilled again."""
        return CHUNKS_SLACK if isinstance(self.config, Crowd) else 0.0

    def _other_chunks(self, trace: Trace) -> bool:
        """Return whether prompts of a trace may be prefilled in other chunks than alone: beside others, or because they
        are longer than a step and some of them is cached."""
        engine = self.engine(self.answering)
        step = engine.step_tokens if engine is not None else None
        return trace.crowded or (step is not None and any(len(o.sent_ids) > step for o in self.observations().values()))

    def observations(self, form: Form = "ids") -> dict[str, Observation]:
        """Return observations by key: the prompt id when cold, otherwise with instance and part."""
        return self.history.of(self.id, form, self.scenario)

    def all_observations(self) -> list[Observation]:
        """Return the observations of both forms."""
        return [*self.observations("ids").values(), *self.observations("text").values()]

    def p_of(self, o: Observation) -> int:
        """Return which P of this scenario a request met, counted from 0: P is restarted, or not the only one."""
        if isinstance(self.config, SecondPrefill):
            return int(o.part.startswith(SECOND))
        if not (isinstance(self.config, Recovery) and self.config.restart):
            return 0
        return sum(other.route == "former-p" and other.sequence < o.sequence for other in self.all_observations())

    def every_answer(self) -> list[Observation]:
        """Return the observations of both forms, with all of those that answer the same request."""
        by_place = self.history.of_cell(self.id).by_place
        return [o for form in get_args(Form) for o in by_place.get((form, self.scenario), ())]

    def answers(self, form: Form = "ids") -> dict[str, Answer]:
        """Return, by key, the observations that were to be answered, ended without an error and have output ids."""
        return {
            k: Answer(o, leg, leg.output_ids)
            for k, o in self.observations(form).items()
            if not o.cut_short and (leg := o.final) is not None and leg.output_ids is not None
        }

    def answered(self, form: Form = "ids") -> dict[str, Observation]:
        """Return the observations of ``answers``."""
        return {k: a.o for k, a in self.answers(form).items()}

    def steps(self) -> dict[str, Steps]:
        """Return, by key, the verify steps of each answered request that reports them, without padding."""
        return {k: steps for k, a in self.answers().items() if (steps := real_steps(a.leg)) is not None}

    def prompt_of(self, o: Observation, role: str) -> tuple[int, ...]:
        """Return the prompt ids that an engine was asked: P all but the last, where that is P's own answer."""
        shortened = role == "prefill" and isinstance(self.config, AppendedToken) and o.route == "cell"
        return o.sent_ids[:-1] if shortened else o.sent_ids

    def handed_tokens(self, o: Observation) -> int:
        """Return of how many prompt tokens P hands over what it computed: all but those that it leaves to D."""
        return len(self.prompt_of(o, "prefill")) - self._left_to_d(o)

    def fetched_tokens(self, o: Observation) -> int:
        """Return how many prompt tokens D takes from outside if it has none of them cached: all but those that P leaves
        to it, and never the last one, which it computes in any case."""
        return len(o.sent_ids) - max(self._left_to_d(o), 1)

    def _left_to_d(self, o: Observation) -> int:
        """Return how many tokens of a prompt P leaves to D. Of what later modules look at, NIXL's connector alone knows
        (vLLM 0.32.0); log-probs of a prompt make D compute all of it."""
        if not self.record.held_back or not self.handed_off or not o.looked_up or o.route not in ("cell", "former-p"):
            return 0
        held = len(self.prompt_of(o, "prefill"))
        return self.record.left_to_d(held) if self.settings.by_nixl else int(self.record.recurrent and held > 1)

    def has_all_cached(self, o: Observation, decode: Leg) -> bool:
        """Return whether D, asked alone, had all tokens cached that P hands over, so that nothing moves. Where P leaves
        none to D, something always does: D fetches the last token, too, which it computes in any case."""
        return self._left_to_d(o) > 0 and decode.counters.get("prefix_hits", 0) >= self.fetched_tokens(o)

    def most_all_cached(self, members: Iterable[Observation], counters: Mapping[str, float]) -> int:
        """Return of how many requests beside each other, whose counters are known for all of them together, D may have
        had all tokens cached that P hands over: each of them takes that many from the cache."""
        hits, most = counters.get("prefix_hits", 0), 0
        if not hits:
            return 0
        for tokens in sorted(self.fetched_tokens(o) for o in members if self._may_have_all_cached(o)):
            hits -= tokens
            most += hits >= 0
        return most

    def _may_have_all_cached(self, o: Observation) -> bool:
        if o.concurrent == 1 or not self._left_to_d(o):
            return False
        return self.hit_of_any(self.all_observations(), o) >= self.fetched_tokens(o)

    @cached_property
    def transfers_each(self) -> float:
        """NIXL transfers of a hand-off: one, or with several ranks as many as most have. Each rank of D reads from one
        or more of P, which depends on how KV is split."""
        if max(map(self.settings.ranks, self.roles)) == 1:
            return 1.0
        counted = [made for _, leg in self.counted_alone() if (made := leg.counters.get("nixl_transfers"))]
        return statistics.mode(counted) if counted else 1.0

    def counted_alone(self) -> Iterator[tuple[Observation, Leg]]:
        """Yield hand-offs with D's leg whose bytes are theirs alone: sent once, by themselves, not after one that
        broke.

        What D pulls for a request that breaks or is given up is counted with the next one.
        """
        broke = False
        for o in self.history.in_order(self.id):
            leg = o.leg("decode")
            alone = not broke and o.attempts == 1 and o.concurrent == 1 and o.route == "cell" and o.abandon is None
            if alone and o.error is None and leg is not None and leg.counters.get("nixl_bytes"):
                yield o, leg
            broke = o.cut_short

    def stratum(self, observation: Observation) -> str:
        return classify(len(observation.sent_ids), self.record.block_size, self.record.lookahead)

    @cached_property
    def clipped_groups(self) -> frozenset[int]:
        """The KV-cache groups with a sliding window or recurrent state: those of which P mostly publishes fewer blocks
        than the prompts fill that are longer than a window (of several, than one of them), or than a block."""
        clipped: Counter[tuple[int, int]] = Counter()
        for o in self.history.in_order(self.id):
            whole = blocks(self.handed_tokens(o), self.record.block_size)
            for limit in self.limits(o):
                for index, group in enumerate(published_groups(o)):
                    clipped[limit, index] += 1 if len(group) < whole else -1
        return frozenset(index for (_, index), votes in clipped.items() if votes > 0)

    def limits(self, o: Observation) -> list[int]:
        """Return the tokens of the windows, and of a block of state, that are fewer than those that P hands over: of
        some group it then publishes fewer blocks than the prompt fills."""
        size = self.record.block_size
        whole = blocks(self.handed_tokens(o), size)
        windows = [w for w in self.record.windows if w and published_blocks(len(o.sent_ids), size, w) < whole]
        return [*windows, *([size] if self.record.recurrent and whole > 1 else [])]

    @cached_property
    def counts(self) -> CellCounts:
        """Acceptance counts of each answered request with at least two output tokens, by key."""
        k = self.record.draft_tokens
        counted = {
            key: found
            for key, a in self.answers().items()
            if len(a.output) > 1 and (found := request_counts(a.leg, k)) is not None
        }
        return CellCounts(*settle_padding(counted, self.may_pad))

    def expected_hit(
        self, donor: Observation, subject: Observation, role: str | None = None, answered: bool = True
    ) -> Hit:
        """Return how many tokens of the subject an engine must have cached after the donor: the whole common blocks,
        never the whole prompt. ``role`` defaults to the answering engine, which also holds the donor's answer once it
        has ``answered``.

        With drafters that make vLLM recompute the last matched block (``use_eagle_block_drop``) it is one block less.
        Versions after 0.32.0 may reuse that one: vllm-project/vllm#50438 hashes blocks with their lookahead. Where
        layers are of several kinds the block to recompute may end with the prompt: vLLM looks for it beyond the last
        token but one (``eagle_proof_margin``). Tokens of which later modules saw drafts are not cached.
        """
        size = self.record.block_size
        role = role or self.answering
        held, asked = self._computed_prompt(donor, role), self._computed_prompt(subject, role)
        if answered and role == self.answering:
            held = (*held, *_computed_output(donor))
        held = held[: max(len(held) - self.record.unverified, 0)]
        matched = common_prefix(held, asked) // size * size
        limit = (len(asked) - 1) // size * size
        whole = min(matched, limit)
        drops = self.speculative and self.traits.drops_block
        last = matched if self.record.several_kinds else whole
        least = min(max(last - size, 0), limit) if drops else whole
        return Hit(least, whole if drops and _after(self.history.run.versions.get("vllm"), "0.32.0") else least)

    def _computed_prompt(self, o: Observation, role: str) -> tuple[int, ...]:
        """Return the prompt tokens of a request that an engine computes: P all but those that it leaves to D."""
        return o.sent_ids[: self.handed_tokens(o)] if role == "prefill" else o.sent_ids

    def allowed_hit(self, o: Observation, role: str) -> int | None:
        """Return the most prompt tokens of a request that may be in an engine's prefix cache: its longest common prefix
        with an earlier request of the same script. Zero for cold prompts; None if the counters are shared with other
        requests.
        """
        if o.concurrent > 1:
            return None
        if self.cold or isinstance(self.config, Refill):
            return 0
        return self.hit_of_any((x for x in self.observations().values() if x.sequence < o.sequence), o, role)

    def hit_of_any(self, donors: Iterable[Observation], subject: Observation, role: str | None = None) -> int:
        """Return the most tokens of the subject that an engine may have cached after the donors of its instance."""
        others = (x for x in donors if x.instance == subject.instance and x is not subject)
        return max((self.expected_hit(x, subject, role).most for x in others), default=0)


def _after(version: str | None, other: str) -> bool:
    """Return whether a version is later than a release, of which builds such as ``+cu129`` are no later ones."""
    try:
        return Version(Version(version or "").public) > Version(other)
    except InvalidVersion:
        return False


def _computed_output(o: Observation) -> tuple[int, ...]:
    """Return the output tokens whose KV was computed: all but the last one, and at most those of a request that was
    given up."""
    leg = o.final
    if leg is None and o.abandon is not None:
        return o.known_answer or ()
    return (leg.output_ids or ())[:-1] if leg is not None else ()


def recorded_cells(history: History) -> list[RecordedCell]:
    """Return the cells that the run was asked to observe with cold prompts, or that have no scenario."""
    return [RecordedCell(history, r) for r in history.run.cells if r.planned or not r.scenarios]
