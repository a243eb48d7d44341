"""Drills on exchanges with running engines: what is struck, and how the fault is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from harness.drills.model import Drill, Group
from harness.drills.proxy import COMPLETIONS, Fault
from harness.drills.scene import Scene
from harness.engine.command import Role
from harness.findings import Verdict

LEASE_S = 8
REQUEST_S = 15.0
"""Limits of the engines that exchanges are drilled on: a request takes 0.65 s on two cores, and up to 10 s were seen
when both are busy with other things."""
BOUND_S = 60.0
Make = Callable[[Scene], Fault]
Struck = Literal["one", "last", "all"]
Topology = Literal["pd", "single"]
U: tuple[Verdict, ...] = (Verdict.UNKNOWN,)
R: tuple[Verdict, ...] = (Verdict.REGRESSION,)
EITHER: tuple[Verdict, ...] = (Verdict.UNKNOWN, Verdict.REGRESSION)
_WHOM = {"one": "one prompt of three", "last": "the last prompt of three", "all": "every prompt"}


class ExchangeDrill(NamedTuple):
    """A fault between the harness and an engine that goes on running."""

    drill: Drill
    topology: Topology
    """Of the cell that is run."""
    proxy: Role
    """The engine whose exchanges are struck; a single cell is answered by the pair's decode engine."""
    make: Make
    struck: Struck
    """Which prompts of the cell. What is not struck must be judged as ever."""
    path: str
    fatal: bool = False
    """Whether vLLM may not live through it, so that later prompts are struck too."""
    late: bool = False
    """Whether D counts its failed transfer with the request after the struck one, whose transfer is UNKNOWN then."""


def on_answers(
    name: str,
    title: str,
    topology: Topology,
    role: Role,
    fault: Fault | None,
    verdicts: tuple[Verdict, ...],
    reason: str,
    struck: Struck = "one",
    path: str = COMPLETIONS,
    group: Group = "response",
    bound_s: float = BOUND_S,
    make: Make | None = None,
    fatal: bool = False,
    late: bool = False,
) -> ExchangeDrill:
    """A drill whose fault is ``fault``, or what ``make`` makes of the running engines."""
    whose = {"prefill": "P", "decode": "D", "single": "single"}[role if topology == "pd" else "single"]
    strikes = f"{whose}, {path}, {_WHOM[struck]}"
    if late:
        strikes += "; the transfer of the next one may be UNKNOWN, too: D counts a failed one there"
    drill = Drill(name, group, title, strikes, verdicts, reason, bound_s)
    if make is None:
        assert fault is not None
        make = _always(fault)
    return ExchangeDrill(drill, topology, role, make, struck, path, fatal, late)


def _always(fault: Fault) -> Make:
    return lambda _: fault
