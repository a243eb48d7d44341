"""What a run in the normal tier asks again, on fresh engines, because it failed once.

Registered tests are repeated with held-out prompts, so that chance would have to fail them twice. Answers that are
wrong by themselves are asked again as they were, several times, through P/D and alone: a defect of the code comes
again, a race may not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from harness.engines.environment import engines_for
from harness.history.folder import History
from harness.history.layout import AGAIN, SECOND
from harness.history.records import COLD, request_key
from harness.judging.checks.asked_again import AnswerId
from harness.judging.checks.model import RegisteredTest
from harness.judging.checks.registry import tripped_once
from harness.judging.references import baselines_for
from harness.profiles.cells import Cell, CellName, make_plan
from harness.runner.options import RunOptions
from harness.runner.repetitions import record_repetitions
from harness.runner.run import record_into
from harness.scenarios.base import Script
from harness.util.progress import Reporter
from harness.util.text import counted
from harness.workload.at_once import Item
from harness.workload.cells import SECOND_STAGE, CellWork, cell_work
from harness.workload.prepare import Prepared

ROUNDS = 3
"""How often an answer is asked again."""
_MOST_ANSWERS = 8
"""Most answers of a cell in a scenario that are asked again: of a defect of many, the first ones say as much."""


def later_stages(prepared: Prepared, history: History, reporter: Reporter, options: RunOptions) -> None:
    """Repeat what failed once in a run, in folders of their own inside of it."""
    if history.run.interrupted or prepared.profile.judging.tier == "bitwise":
        return
    once = tripped_once(history, baselines_for(history))
    if once.tests and not (history.folder / SECOND).exists():
        _second_stage(prepared, history, once.tests, reporter, options)
    if once.answers and not (history.folder / AGAIN).exists():
        _ask_again(prepared, history, once.answers, reporter, options)


def _second_stage(
    prepared: Prepared, history: History, tests: Sequence[RegisteredTest], reporter: Reporter, options: RunOptions
) -> None:
    """Repeat the cells that failed a registered test, with held-out prompts."""
    if prepared.profile.judging.tier == "auto" and not all(p.held_out for p in prepared.sets.values()):
        reporter.line(
            "no second stage: the prompt set has no prompts held out for it; build one with --held-out "
            "(harness prompts build)"
        )
        return
    reporter.line(f"second stage: {', '.join(map(str, tests))}")
    choice = SECOND_STAGE._replace(scenarios=frozenset({COLD, *(t.scenario for t in tests)}))
    works = tuple(
        cell_work(prepared.profile.part(c.variant), prepared.sets[c.variant], c, choice)
        for c in _with_compared(prepared, {t.cell for t in tests})
    )
    record_into(history.folder / SECOND, _only(prepared, works, reporter), reporter, options)


def _ask_again(
    prepared: Prepared, history: History, answers: Sequence[AnswerId], reporter: Reporter, options: RunOptions
) -> None:
    """Send the requests of answers that are wrong by themselves again, several times, and their prompts alone."""
    chosen = _first_of_each(answers)
    more = f" of {len(answers):,}" if len(answers) > len(chosen) else ""
    shown = ", ".join(f"{a.cell}: {a.key}" for a in chosen[:3]) + (" …" if len(chosen) > 3 else "")
    reporter.line(f"{counted(len(chosen), 'answer')}{more} asked again {ROUNDS} times: {shown}")
    again = _only(prepared, _works(prepared, chosen), reporter, ROUNDS)
    environment = options.environment or engines_for(prepared.profile, again.plan, options.engine_python, options.flags)
    record_repetitions(
        again,
        environment,
        history.folder / AGAIN,
        ROUNDS,
        reporter,
        rounding=False,
        options=options._replace(watch=None, decides=False),
    )


def _first_of_each(answers: Sequence[AnswerId]) -> list[AnswerId]:
    """Return the first answers of each cell and scenario."""
    seen: Counter[tuple[str, str]] = Counter()
    chosen = []
    for answer in answers:
        seen[answer.cell, answer.scenario] += 1
        if seen[answer.cell, answer.scenario] <= _MOST_ANSWERS:
            chosen.append(answer)
    return chosen


def _works(prepared: Prepared, answers: Sequence[AnswerId]) -> tuple[CellWork, ...]:
    """Return the requests of these answers as they were sent, and their prompts cold: in their cell, and in the single
    engines that it is compared with."""
    wanted: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for a in answers:
        wanted[a.cell].add((a.scenario, a.key))
    planned = {w.cell.id: w for w in prepared.works}
    scripts: dict[str, tuple[Script, ...]] = {}
    cold: dict[str, set[str]] = defaultdict(set)
    for cell, places in wanted.items():
        sent = {script: _asked_in(script) for script in planned[cell].scripts}
        scripts[cell] = tuple(s for s, asked in sent.items() if places & asked.keys())
        prompts = {key for scenario, key in places if scenario == COLD}
        prompts |= {asked[place] for asked in sent.values() for place in places & asked.keys()}
        for compared in _compared(cell):
            cold[compared] |= prompts
    return tuple(
        CellWork(c, _items(prepared, c, cold[c.id]), scripts.get(c.id, ())) for c in _with_compared(prepared, wanted)
    )


def _asked_in(script: Script) -> dict[tuple[str, str], str]:
    """Return the prompt of each request of a script, by scenario and key."""
    return {
        (script.scenario, request_key(script.scenario, s.prompt.id, script.instance, s.part)): s.prompt.id
        for s in script.sends
    }


def _items(prepared: Prepared, cell: Cell, prompts: Collection[str]) -> tuple[Item, ...]:
    return tuple(Item(p, "ids") for p in prepared.sets[cell.variant].prompts if p.id in prompts)


def _compared(cell: str) -> tuple[str, ...]:
    """Return a cell, the single engine that it is compared with, and the plain one, which re-scores outputs."""
    name = CellName.of(cell)
    return tuple(dict.fromkeys((cell, name.single, name.reference)))


def _with_compared(prepared: Prepared, cells: Iterable[str]) -> list[Cell]:
    """Return cells of a run with those that they are compared with."""
    wanted = {compared for cell in cells for compared in _compared(cell)}
    return [c for c in prepared.plan.cells if c.id in wanted]


def _only(prepared: Prepared, works: tuple[CellWork, ...], reporter: Reporter, times: int = 1) -> Prepared:
    """Return a run of these requests alone, and expect it ``times`` on the same engines."""
    part = prepared._replace(plan=make_plan(prepared.profile, [w.cell for w in works]), works=works, lacking={})
    reporter.more(part.starts_s + times * (part.expected_s - part.starts_s), part.starts_s)
    return part
