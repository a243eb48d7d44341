"""Send all requests of a cell to its running engines, and those at which an engine failed a second time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from harness.engines.session import EngineGroupSession
from harness.errors import EngineDiedError, HandoffError, InfrastructureError
from harness.history.at_once import CrowdProof, proof_of, tells_drafts
from harness.history.records import Observation, SecondTry
from harness.profiles.cells import Cell
from harness.runner.play import Player
from harness.scenarios.base import Script
from harness.workload.at_once import ColdRound, crowd
from harness.workload.cells import CellWork


def perform(
    session: EngineGroupSession, work: CellWork, told: Callable[[CrowdProof], None] = lambda _: None
) -> Iterator[Observation]:
    """Send all requests of a cell, one request or stage at a time, and yield the observations. ``told`` is called with
    what shows whether cold prompts may be asked together, if anything has to. Raises EngineDiedError when an engine of
    the group died."""
    sequence = 0
    first, others = work.until_proof
    alone: dict[str, Observation] = {}
    for asked in first:
        for observation in _one_by_one(session, work.cell, asked, sequence):
            if observation.form == "ids":
                alone[observation.prompt_id] = observation
            yield observation
            sequence += 1
    speculative = work.cell.method.draft_tokens > 0
    together = not speculative or all(map(tells_drafts, alone.values()))
    if work.proof is not None:
        beside: list[Observation] = []
        for observation in _play(session, work.cell, work.proof, sequence):
            beside.append(observation)
            yield observation
            sequence += 1
        found = proof_of(alone, beside, session.profile.judging.logprob_nats, speculative)
        together = found.holds
        told(found)
    for asked in others:
        way = _in_a_crowd if together and len(asked.items) > 1 else _one_by_one
        for observation in way(session, work.cell, asked, sequence):
            yield observation
            sequence += 1
    for script in work.scripts:
        for observation in _play(session, work.cell, script, sequence):
            yield observation
            sequence += 1


def _one_by_one(session: EngineGroupSession, cell: Cell, asked: ColdRound, sequence: int) -> Iterator[Observation]:
    """Yield the answers to cold prompts that have the engines to themselves."""
    for number, item in enumerate(asked.items, sequence):
        ask = partial(session.observe, cell, item.prompt, item.form, number)
        observation = ask()
        found = _tried_again(session, observation, ask) if failed(observation) else observation
        yield found.model_copy(update={"stage": asked.number}) if asked.number else found
        if observation.error is not None:
            _go_on(session, failed(observation))


def _in_a_crowd(session: EngineGroupSession, cell: Cell, asked: ColdRound, sequence: int) -> Iterator[Observation]:
    return _play(session, cell, crowd(asked), sequence)


def _play(session: EngineGroupSession, cell: Cell, script: Script, sequence: int) -> Iterator[Observation]:
    """Yield the observations of a script, and see to it that what comes after it can be sent."""
    broke, by_itself = False, False
    for observation in _played(session, cell, script, sequence):
        broke, by_itself = broke or observation.error is not None, by_itself or failed(observation)
        yield observation
    if broke:
        _go_on(session, by_itself)


def _go_on(session: EngineGroupSession, by_itself: bool) -> None:
    """Start engines again that have ended by themselves, so that what remains can be sent. Raises EngineDiedError where
    they cannot be started, or were ended by others."""
    try:
        session.require_alive()
    except EngineDiedError as gone:
        if not by_itself:
            raise
        try:
            session.restart_ended()
        except InfrastructureError as why:
            raise EngineDiedError(f"{gone}; it could not be started again: {why}") from why


def failed(o: Observation) -> bool:
    """Return whether an engine failed by itself at a request, which is then sent a second time."""
    return o.failure is not None and o.failure.by_itself and o.mistake is None


def _played(session: EngineGroupSession, cell: Cell, script: Script, sequence: int) -> Iterator[Observation]:
    """Yield the observations of a script. From the first one on at which an engine failed, they come after the script
    was played once more, which must not come between its requests."""
    held: list[Observation] = []
    for observation in Player(session, cell).play(script, sequence):
        if held or failed(observation):
            held.append(observation)
        else:
            yield observation
    again: dict[str, Observation] = {}

    def once_more(key: str) -> Observation:
        if not again:
            again.update((o.key, o) for o in Player(session, cell).play(script, sequence))
        if key not in again:
            raise HandoffError("an engine ended before it, at another request of its script")
        return again[key]

    for observation in held:
        ask = partial(once_more, observation.key)
        yield _tried_again(session, observation, ask) if failed(observation) else observation


def _tried_again(session: EngineGroupSession, first: Observation, ask: Callable[[], Observation]) -> Observation:
    """Return an observation with what comes of the same request a second time. An engine that ended is started again
    before that."""
    try:
        if first.failure is not None and first.failure.ended is not None:
            session.restart_ended()
        second = ask()
        tried = SecondTry(failure=second.failure, error=second.error, legs=second.legs)
    except InfrastructureError as why:
        tried = SecondTry(error=f"it could not be sent again: {why}")
    with contextlib.suppress(HandoffError):
        # So that nothing of it is charged to the next request.
        session.settle()
    return first.model_copy(update={"second_try": tried})
