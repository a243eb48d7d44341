"""Drills on exchanges with running engines: what is struck, and how the fault is created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from faults.model import Drill, Group
from faults.proxy import COMPLETIONS, Fault
from faults.testbed import Scene
from harness.history.verdict import Verdict
from harness.profiles.cells import Role

LEASE_S = 8
REQUEST_S = 15.0
"""Timeout of a request in seconds; one takes less than a second, but several on a busy machine."""
BOUND_S = 60.0
Make = Callable[[Scene], Fault]
Struck = Literal["one", "last", "all"]
Topology = Literal["pd", "single"]
Target = Literal["P", "D", "single"]
"""The engine whose answers are struck."""
U: tuple[Verdict, ...] = (Verdict.UNKNOWN,)
R: tuple[Verdict, ...] = (Verdict.REGRESSION,)
EITHER: tuple[Verdict, ...] = (Verdict.UNKNOWN, Verdict.REGRESSION)
_WHOM = {"one": "one prompt of three", "last": "the last prompt of three", "all": "every prompt"}


class ExchangeDrill(NamedTuple):
    """A fault between the harness and an engine that keeps running."""

    drill: Drill
    topology: Topology
    """Topology of the cell."""
    proxy: Role
    """The engine whose exchanges are struck; a single cell is answered by the pair's decode engine."""
    make: Make
    struck: Struck
    """The struck prompts of the cell. The others must be judged as without a fault."""
    path: str
    fatal: bool = False
    """Whether vLLM may die of the fault, so that later prompts are struck too."""
    late: bool = False
    """Whether D counts the failed transfer with the next request, whose transfer is then UNKNOWN."""


def on_answers(
    name: str,
    title: str,
    target: Target,
    fault: Fault | None = None,
    verdicts: tuple[Verdict, ...] = U,
    reason: str = "",
    struck: Struck = "one",
    path: str = COMPLETIONS,
    group: Group = "response",
    bound_s: float = BOUND_S,
    make: Make | None = None,
    fatal: bool = False,
    late: bool = False,
) -> ExchangeDrill:
    """Return a drill whose fault is ``fault``, or else is created by ``make`` for the running engines."""
    assert reason, f"{name}: an empty reason matches everything"
    strikes = f"{target}, {path}, {_WHOM[struck]}"
    if late:
        strikes += "; the transfer of the next one may be UNKNOWN, too: D counts a failed one there"
    drill = Drill(name, group, title, strikes, verdicts, reason, bound_s)
    if make is None:
        assert fault is not None
        make = _always(fault)
    topology: Topology = "single" if target == "single" else "pd"
    return ExchangeDrill(drill, topology, "prefill" if target == "P" else "decode", make, struck, path, fatal, late)


def _always(fault: Fault) -> Make:
    return lambda _: fault
