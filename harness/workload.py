"""What each cell is sent: cold prompts, as ids and some as text, and the scripts of its scenarios."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from harness.config import Profile
from harness.engine.topology import EngineGroupSession
from harness.errors import UsageError
from harness.history import COLD, Form, Observation
from harness.matrix import Cell, EngineGroup, Plan, start_expected_s
from harness.prompts import Prompt, PromptSet
from harness.scenarios.play import Player
from harness.scenarios.script import Script, scripts


class Item(NamedTuple):
    """One cold request."""

    prompt: Prompt
    form: Form


class Choice(NamedTuple):
    """Which part of the workload is wanted; the default is all of it."""

    scenarios: Collection[str] | None = None
    """Ids of scenarios, ``cold`` among them; None takes all."""
    prompts: Collection[str] | None = None
    """Ids of cold prompts; None takes all."""
    forms: Collection[Form] = ("ids", "text")
    texts: int | None = None
    """Most prompts that are sent as text too; None leaves it to the profile."""
    uses: Collection[str] = ("cold",)
    """Which prompts of the set are sent cold; ``scenario`` ones too where a baseline is recorded."""

    def wants(self, scenario: str) -> bool:
        return self.scenarios is None or scenario in self.scenarios


_IDS: tuple[Form, ...] = ("ids",)
EVERYTHING = Choice()
RECORDING = Choice(scenarios=(COLD,), forms=_IDS, uses=("cold", "scenario", "held-out"))
SECOND_STAGE = Choice(scenarios=(COLD,), forms=_IDS, uses=("held-out",))


class CellWork(NamedTuple):
    """All requests of one cell, in order."""

    cell: Cell
    items: tuple[Item, ...]
    scripts: tuple[Script, ...]

    @property
    def requests(self) -> int:
        return len(self.items) + sum(s.requests for s in self.scripts)

    @property
    def planned(self) -> dict[str, int]:
        """Requests per scenario, cold ones left out."""
        counts: Counter[str] = Counter()
        for script in self.scripts:
            counts[script.scenario] += script.requests
        return dict(counts)


def cell_work(profile: Profile, prompts: PromptSet, cell: Cell, choice: Choice = EVERYTHING) -> CellWork:
    """The requests of a cell, or the chosen part of them."""
    known = {p.id: p for p in prompts.prompts}
    items = _cold(prompts, profile.workload.text_prompts, choice) if choice.wants(COLD) else []
    played = [
        script
        for scenario in profile.scenarios
        if choice.wants(scenario.id) and (scenario.routed or not cell.routed)
        for script in scripts(scenario, known, cell.topology)
    ]
    return CellWork(cell, tuple(items), tuple(played))


def _cold(prompts: PromptSet, text_prompts: int, choice: Choice) -> list[Item]:
    chosen = [p for p in prompts.prompts if p.use in choice.uses and (choice.prompts is None or p.id in choice.prompts)]
    items: list[Item] = [Item(p, "ids") for p in chosen] if "ids" in choice.forms else []
    if "text" in choice.forms:
        count = text_prompts if choice.texts is None else min(choice.texts, text_prompts)
        items += [Item(p, "text") for p in spread(chosen, count)]
    return items


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts, one stratum after the other, from the middle of each."""
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


def choose_scenarios(profile: Profile, patterns: Sequence[str]) -> Choice:
    """The scenarios that match any shell pattern. Raises UsageError when a pattern matches nothing."""
    known = [COLD, *(s.id for s in profile.scenarios)]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise UsageError(
                f"--scenario {pattern!r}: expected a pattern that matches a scenario of profile {profile.name} "
                f"({', '.join(known)}), found no match"
            )
    if not patterns:
        return EVERYTHING
    return Choice(scenarios=frozenset(k for k in known if any(fnmatch.fnmatchcase(k, p) for p in patterns)))


def perform(session: EngineGroupSession, work: CellWork) -> Iterator[Observation]:
    """Send everything to the running engines, one request or stage after the other.

    Raises EngineDiedError when an engine of the group is gone.
    """
    sequence = 0
    for item in work.items:
        yield session.observe(work.cell, item.prompt, item.form, sequence)
        sequence += 1
    player = Player(session, work.cell)
    for script in work.scripts:
        for observation in player.play(script, sequence):
            yield observation
            sequence += 1


def expected_s(plan: Plan, works: Sequence[CellWork]) -> float:
    """Rough wall time in seconds."""
    return sum(group_expected_s(g, works) for g in plan.groups)


def group_expected_s(group: EngineGroup, works: Sequence[CellWork]) -> float:
    """Rough wall time of one group of engines in seconds."""
    mine = [w for w in works if w.cell in group.cells]
    return start_expected_s(group) + sum(group.expected.request_s(w.cell.topology) * w.requests for w in mine)


def total_requests(works: Iterable[CellWork]) -> int:
    return sum(w.requests for w in works)
