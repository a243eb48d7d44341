"""Drills and their results."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN, UsageError
from harness.history.verdict import Verdict
from harness.util.strict import Strict

Group = Literal["response", "handoff", "process", "resource", "harness", "folder"]
GROUPS: tuple[Group, ...] = ("response", "handoff", "process", "resource", "harness", "folder")


class Drill(NamedTuple):
    """One fault and its required outcome, stated before it is tried."""

    id: str
    group: Group
    title: str
    """The fault, in a few words."""
    strikes: str
    """Where and when."""
    verdicts: tuple[Verdict, ...]
    """The acceptable verdicts. PASS only if the fault must not affect what is judged."""
    reason: str
    """Regular expression that a finding or a reason of the run must match."""
    bound_s: float
    """Most seconds from the fault, or from the first request of the struck cell, to the end."""

    @property
    def expected(self) -> str:
        return " or ".join(self.verdicts)


class Ending(StrEnum):
    """How a drill ended."""

    SURVIVED = "survived"
    FALSE_GREEN = "false green"
    FAILED = "not survived"
    """Not green, but with a wrong verdict or reason, with something lost or left behind, or too late."""
    LOST = "lost"
    """Inconclusive: the drill itself failed, or the fault did not take place."""

    @property
    def symbol(self) -> str:
        return {"survived": "✔", "false green": "✘", "not survived": "✘", "lost": "?"}[self.value]


class Result(Strict):
    """The result of one drill."""

    id: str
    group: Group
    title: str
    strikes: str
    expected: str
    ending: Ending
    verdict: Verdict | None = None
    """Verdict of the struck run; None if it has none."""
    reason: str = ""
    """The run's message that matches the stated reason, or else its first message."""
    problems: tuple[str, ...] = ()
    """Why the drill does not count as survived."""
    planned: int = 0
    """Observations recorded when the fault struck, or planned ones if all must be recorded."""
    recorded: int = 0
    """Observations that were readable afterwards."""
    left: tuple[str, ...] = ()
    """Processes, shared memory and ports that were left behind."""
    seconds: float = 0.0
    bound_s: float = 0.0
    folder: str = ""


class ControlRun(Strict):
    """The same engines, proxies and prompts without a fault. A set is void if a control fails."""

    id: str
    verdict: Verdict
    requests: int
    seconds: float
    findings: tuple[str, ...] = ()


class DrillSet(Strict):
    """Drills that were tried together (``drills.json``)."""

    run_id: str
    started: str
    profile: str
    commits: tuple[str, ...] = ()
    """Commits of the harness, with ``+changes`` for uncommitted changes; several in joined sets."""
    versions: dict[str, str | None]
    hardware: dict[str, object]
    asked: tuple[str, ...]
    """Ids of the planned drills, each of which must have a result."""
    results: tuple[Result, ...]
    controls: tuple[ControlRun, ...]
    left: tuple[str, ...] = ()
    """What was left after all engines of the set should have ended."""
    seconds: float
    interrupted: bool = False

    def count(self, ending: Ending) -> int:
        return sum(r.ending is ending for r in self.results)

    @property
    def left_overs(self) -> int:
        return len(self.left) + sum(len(r.left) for r in self.results)

    @property
    def missing(self) -> tuple[str, ...]:
        """Planned drills without a result."""
        had = {r.id for r in self.results}
        return tuple(i for i in self.asked if i not in had)

    @property
    def void(self) -> bool:
        """Whether the results are void: there is no control, or one did not pass."""
        return not self.controls or any(c.verdict is not Verdict.PASS for c in self.controls)

    @property
    def exit_code(self) -> int:
        """0 only if every drill was survived, nothing was left and every control passed."""
        if self.count(Ending.FALSE_GREEN) or self.count(Ending.FAILED) or self.left_overs:
            return EXIT_REGRESSION
        if self.void or self.interrupted or self.missing or not self.results or self.count(Ending.LOST):
            return EXIT_UNKNOWN
        return EXIT_PASS

    @property
    def sentence(self) -> str:
        """A summary in one sentence."""
        words = [
            f"{len(self.results)} faults tried",
            f"{self.count(Ending.SURVIVED)} survived",
            f"{self.count(Ending.FALSE_GREEN)} false greens",
            f"{self.left_overs} leftovers",
        ]
        words += [f"{n} not survived"] if (n := self.count(Ending.FAILED)) else []
        words += [f"{n} lost"] if (n := self.count(Ending.LOST)) else []
        words += [f"not tried: {', '.join(self.missing)}"] if self.missing else []
        words += ["interrupted"] if self.interrupted else []
        words += [f"with {n} versions of the harness"] if (n := len(self.commits)) > 1 else []
        if self.void:
            words.append("void, because a control did not pass")
        return f"{', '.join(words)}; {len(self.controls)} controls, {self.seconds:.0f} s."


def _no_control(drills: DrillSet) -> ControlRun:
    """Return a failed control for a set without one, so that joining it with others does not make it valid."""
    return ControlRun(id=f"none in {drills.run_id}", verdict=Verdict.UNKNOWN, requests=0, seconds=0.0)


def _require_alike(sets: Sequence[DrillSet]) -> None:
    first = sets[0]
    for other in sets[1:]:
        for what in ("profile", "versions"):
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise UsageError(
                    f"{other.run_id}: expected the {what} of {first.run_id} ({ours}), found {theirs}; join sets of the "
                    "same engines and profile, or print each on its own"
                )


def joined(sets: Sequence[DrillSet]) -> DrillSet:
    """Join sets; a drill in several gets its worst result, so that a retry is not a second chance.

    Raises UsageError when their profiles or engines differ, since one table cannot describe both.
    """
    _require_alike(sets)
    order = [Ending.SURVIVED, Ending.LOST, Ending.FAILED, Ending.FALSE_GREEN]
    kept: dict[str, Result] = {}
    for result in (r for s in sets for r in s.results):
        old = kept.get(result.id)
        if old is None or order.index(result.ending) > order.index(old.ending):
            kept[result.id] = result
    first = sets[0]
    return first.model_copy(
        update={
            "run_id": "+".join(s.run_id for s in sets),
            "commits": tuple(dict.fromkeys(c for s in sets for c in s.commits or ("unknown",))),
            "asked": tuple(dict.fromkeys(i for s in sets for i in s.asked)),
            "results": tuple(kept.values()),
            "controls": tuple(c for s in sets for c in s.controls or (_no_control(s),)),
            "left": tuple(text for s in sets for text in s.left),
            "seconds": round(sum(s.seconds for s in sets), 1),
            "interrupted": any(s.interrupted for s in sets),
        }
    )
