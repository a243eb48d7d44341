"""The requests of each cell: cold prompts, as ids and some as text, and the scripts of its scenarios."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from harness.history.records import COLD, Form
from harness.profiles.cells import Cell, EngineGroup, Plan, start_expected_s, what_lists
from harness.profiles.model import Expected, Profile, TopologyName, Workload
from harness.profiles.scenarios import AT_ONCE
from harness.prompts.model import Prompt, PromptSet
from harness.scenarios.base import SHORT, Script, Send
from harness.util.choices import matching, no_such
from harness.workload.at_once import AtOnce, ColdRound, Item, arranged, proof, rounds
from harness.workload.scripts import drawn, scripts


class Choice(NamedTuple):
    """The part of the workload to run; all of it by default."""

    scenarios: Collection[str] | None = None
    """Ids of scenarios, ``cold`` among them; None selects all."""
    prompts: Collection[str] | None = None
    """Ids of cold prompts; None selects all."""
    forms: Collection[Form] = ("ids", "text")
    texts: int | None = None
    """Most prompts to send as text too; None uses the profile's number."""
    uses: Collection[str] = ("cold",)
    """Which prompts of the set are sent cold, by their use."""

    def wants(self, scenario: str) -> bool:
        return self.scenarios is None or scenario in self.scenarios


_IDS: tuple[Form, ...] = ("ids",)
EVERYTHING = Choice()
RECORDING = Choice(scenarios=(COLD,), forms=_IDS, uses=("cold", "scenario", "held-out"))
SECOND_STAGE = Choice(scenarios=(COLD,), forms=_IDS, uses=("held-out",))


_AGEING_S: dict[TopologyName, float] = {"pd": 0.02, "single": 0.003}
"""Seconds that a request of one token takes on CPUs, a few at a time."""


_SHORT_SHARE = 0.2
"""Of the time of a whole answer; 0.04 to 0.21 were measured on a GPU (docs/evidence/gpu-runs.md)."""


@dataclass(frozen=True)
class CellWork:
    """All requests of one cell, in order."""

    cell: Cell
    items: tuple[Item, ...]
    scripts: tuple[Script, ...]
    at_once: AtOnce | None = None
    """How cold prompts are asked together; None: one by one."""

    @property
    def rounds(self) -> list[ColdRound]:
        """The cold requests, in the order in which they are asked."""
        return rounds(self.items, self.at_once)

    @property
    def until_proof(self) -> tuple[list[ColdRound], list[ColdRound]]:
        """The cold requests before the proof, and those whose way it decides."""
        asked = self.rounds
        first = self.at_once.alone if self.at_once is not None else 0
        return asked[:first], asked[first:]

    @cached_property
    def proof(self) -> Script | None:
        """The script that follows those that are asked alone, and decides whether the others go together."""
        return proof(self.items, self.at_once)

    @cached_property
    def played(self) -> tuple[Script, ...]:
        """All scripts, that of the proof first."""
        return self.scripts if (first := self.proof) is None else (first, *self.scripts)

    @property
    def requests(self) -> int:
        return len(self.items) + sum(s.requests for s in self.played)

    @cached_property
    def waves(self) -> Waves:
        """How long its requests take; asked again and again while cells are packed."""
        return _added_up([*([1.0] * len(asked.items) for asked in self.rounds), *_waves_of(self.played)])

    @cached_property
    def ageing_s(self) -> float:
        """Rough seconds of the requests that age caches."""
        return sum(_AGEING_S[self.cell.topology] * s.ageing for s in self.scripts)

    @property
    def planned(self) -> dict[str, int]:
        """Number of requests per scenario, without cold ones."""
        counts: Counter[str] = Counter()
        for script in self.played:
            counts[script.scenario] += script.requests
        return dict(counts)


def cell_work(profile: Profile, prompts: PromptSet, cell: Cell, choice: Choice = EVERYTHING) -> CellWork:
    """Return the requests of a cell, or the chosen part of them."""
    known = {p.id: p for p in prompts.prompts}
    sent = _sent(prompts, profile.workload, cell, choice)
    items, at_once = _arranged(_cold(sent, profile.workload, choice), profile, cell, choice)
    played = [
        script
        for scenario in profile.scenarios
        if choice.wants(scenario.id) and (scenario.routed or not cell.routed)
        for script in scripts(scenario, known, cell.topology, drawn(scenario, profile, sent))
    ]
    if choice.wants(COLD):
        return CellWork(cell, tuple(items), tuple(played), at_once)
    alone = proof(items, at_once) if choice.wants(AT_ONCE) else None
    return CellWork(cell, (), tuple(played) if alone is None else (alone, *played))


def _arranged(items: list[Item], profile: Profile, cell: Cell, choice: Choice) -> tuple[list[Item], AtOnce | None]:
    """Divide cold requests into crowds, if the profile wants any. What baselines are compared with bit for bit is asked
    one by one."""
    bitwise = profile.judging.tier != "normal"
    if profile.workload.at_once == 1 or (bitwise and choice.uses == RECORDING.uses):
        return items, None
    return arranged(items, profile, cell)


def _sent(prompts: PromptSet, workload: Workload, cell: Cell, choice: Choice) -> list[Prompt]:
    """Return the prompts that a cell is sent cold."""
    chosen = [p for p in prompts.prompts if p.use in choice.uses and (choice.prompts is None or p.id in choice.prompts)]
    return chosen if choice.uses == RECORDING.uses else cold_prompts(chosen, workload, cell.routed)


def _cold(chosen: Sequence[Prompt], workload: Workload, choice: Choice) -> list[Item]:
    items: list[Item] = [Item(p, "ids") for p in chosen] if "ids" in choice.forms else []
    if "text" in choice.forms:
        count = workload.text_prompts if choice.texts is None else min(choice.texts, workload.text_prompts)
        items += [Item(p, "text") for p in spread(chosen, count)]
    # A baseline keeps the order of its recording, which is that of the set.
    as_listed = workload.order_seed is None or choice.uses == RECORDING.uses
    return items if as_listed else in_seeded_order(items, workload.order_seed or 0)


def in_other_crowds(work: CellWork, profile: Profile, number: int) -> CellWork:
    """Return the work with its cold prompts in other crowds, if what crowds do to answers is noise to be measured:
    equal crowds would show less of it."""
    if work.at_once is None or work.at_once.proven:
        return work
    items, at_once = arranged(in_seeded_order(work.items, number), profile, work.cell)
    return replace(work, items=tuple(items), at_once=at_once)


def in_seeded_order(items: Iterable[Item], seed: int) -> list[Item]:
    """Return requests in the order that a seed gives them: by a hash of each, so that two of them have the same order
    wherever both are sent."""

    def drawn_place(item: Item) -> bytes:
        return hashlib.sha256(f"{seed} {item.form} {item.prompt.id}".encode()).digest()

    return sorted(items, key=drawn_place)


def cold_prompts(prompts: Sequence[Prompt], workload: Workload, routed: bool = False) -> list[Prompt]:
    """Return the prompts that the workload sends cold to a cell, in their order in the set."""
    limits = (workload.per_stratum, workload.routed_per_stratum if routed else None)
    limit = min((limit for limit in limits if limit is not None), default=None)
    return list(prompts) if limit is None else thinned(prompts, limit)


def to_record(prompts: PromptSet, part: Profile) -> PromptSet:
    """Return the part of a set that runs with this profile can send, which is what its baselines record: of held-out
    prompts none where there is no second stage."""
    second = part.judging.stages == 2 and part.judging.tier != "bitwise"
    stages = (prompts.cold, prompts.held_out) if second else (prompts.cold,)
    sent = {p.id for some in stages for p in cold_prompts(some, part.workload)}
    kept = tuple(p for p in prompts.prompts if p.use == "scenario" or p.id in sent)
    return prompts.model_copy(update={"prompts": kept})


def thinned(prompts: Sequence[Prompt], per_stratum: int) -> list[Prompt]:
    """Return about ``per_stratum`` prompts of each stratum, in the given order."""
    kept = {p.id for p in spread(prompts, per_stratum * len({p.stratum for p in prompts}))}
    return [p for p in prompts if p.id in kept]


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Pick up to ``count`` prompts, from the strata in turn and from the middle of each."""
    by_stratum: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_stratum.setdefault(prompt.stratum, []).append(prompt)
    queues = [list(q) for q in by_stratum.values()]
    chosen: list[Prompt] = []
    while len(chosen) < min(count, len(prompts)):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop(len(queue) // 2))
    return chosen


def choose_scenarios(profile: Profile, patterns: Sequence[str], source: str | None = None) -> Choice:
    """Choose the scenarios that match any shell pattern. Raises UsageError as ``select_cells`` does."""
    proofs = [AT_ONCE] if any(proves(part) for part in profile.written_parts) else []
    known = list(dict.fromkeys([COLD, *proofs, *(s.id for part in profile.written_parts for s in part.scenarios)]))
    if not patterns:
        return EVERYTHING
    wanted: set[str] = set()
    for pattern in patterns:
        found = matching(pattern, known)
        if not found:
            raise no_such("--scenario", pattern, known, *what_lists(profile, "scenario", source))
        wanted.update(found)
    return Choice(scenarios=frozenset(wanted))


def expected_s(plan: Plan, works: Sequence[CellWork]) -> float:
    """Return the rough wall time of a plan in seconds."""
    return sum(group_expected_s(g, works) for g in plan.groups)


def starts_expected_s(plan: Plan) -> float:
    """Return how much of it is starts of engines."""
    return sum(map(start_expected_s, plan.groups))


def group_expected_s(group: EngineGroup, works: Sequence[CellWork]) -> float:
    """Return the rough wall time of one group of engines in seconds."""
    mine = [w for w in works if w.cell in group.cells]
    asked = sum(w.waves.seconds(w.cell.topology, group.expected) for w in mine)
    return start_expected_s(group) + asked + sum(w.ageing_s for w in mine)


def scripts_expected_s(scripts: Iterable[Script], topology: TopologyName, expected: Expected) -> float:
    """Return the rough time of scripts in seconds."""
    return _added_up(_waves_of(scripts)).seconds(topology, expected)


class Waves(NamedTuple):
    """How long waves of requests take, counted in requests that have the engines to themselves."""

    longest: float
    """The longest requests of all waves."""
    beside: float
    """Those that are under way beside them, each as long as the longest of its wave."""

    def seconds(self, topology: TopologyName, expected: Expected) -> float:
        return expected.request_s(topology) * (self.longest + expected.beside_share * self.beside)


def _added_up(waves: Iterable[Sequence[float]]) -> Waves:
    """Add up waves of requests that are under way together, of each of which the part of a request's time is given."""
    known = [(max(shares), len(shares)) for shares in waves if shares]
    return Waves(sum(longest for longest, _ in known), sum(longest * (count - 1) for longest, count in known))


def _waves_of(scripts: Iterable[Script]) -> Iterator[list[float]]:
    for stage in (stage for script in scripts for stage in script.stages):
        yield [_share(send) for send in stage.sends if not send.after]
        yield [_share(send) for send in stage.sends if send.after]
        yield from ([_share(other)] for send in stage.sends for other in send.between)


def _share(send: Send) -> float:
    """Return what part of a request's time one takes that only fills caches."""
    return _SHORT_SHARE if (send.max_tokens or SHORT + 1) <= SHORT else 1.0


def proves(profile: Profile) -> bool:
    """Return whether cells have to show that asking cold prompts together changes nothing."""
    return profile.workload.at_once > 1 and profile.judging.tier != "normal"


def total_requests(works: Iterable[CellWork]) -> int:
    return sum(w.requests for w in works)
