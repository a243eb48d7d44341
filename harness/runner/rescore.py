"""Re-score outputs: the plain single engine reads a prompt and a cell's output in one fresh prefill.

Acceptance can stay high although the output is wrong, when target and drafter read the same bad KV. After a benign near
tie, two outputs can no longer be compared token by token. The plain engine can still tell, for each token, whether it
would have chosen it given all tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.engines.answers import Sampling
from harness.engines.request import new_id
from harness.engines.session import EngineGroupSession
from harness.errors import EngineDiedError, HandoffError
from harness.history.records import RESCORE, Leg, Observation
from harness.util import clock
from harness.workload.outputs import Outputs


def scores(outputs: Outputs, session: EngineGroupSession) -> Iterator[Observation]:
    """Score each pair of the session's variant on the engine that answers plain single requests.

    A failed exchange is recorded in its observation. When the engine dies, all remaining observations carry the
    reason, and EngineDiedError is raised after the last one.
    """
    limit = session.profile.engine.max_model_len
    known = outputs.of_variant(session.group.variant)
    gone: EngineDiedError | None = None
    for number, ((prompt_id, key), (prompt, output)) in enumerate(known.items()):
        # Leave room for the one token that the engine generates.
        scored = output[: max(0, limit - len(prompt) - 1)]
        o = score_of(session, prompt_id, key, prompt, scored, number) if gone is None else None
        if o is not None and o.error is not None:
            gone = _end_of(session)
        why = str(gone) if gone is not None else o.error if o is not None else None
        o = o or _observed(session, prompt_id, key, (*prompt, *scored), number, (), clock.now())
        yield o.model_copy(update={"error": why})
    if gone is not None:
        raise gone


def score_of(
    session: EngineGroupSession,
    prompt_id: str,
    key: str,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    number: int = 0,
) -> Observation:
    """Score an output; a failed exchange is recorded in the observation. ``key`` is the output's name."""
    started, legs, error = clock.now(), list[Leg](), None
    try:
        legs.append(_score(session, prompt, output))
    except HandoffError as failure:
        error = str(failure)
    found = _observed(session, prompt_id, key, (*prompt, *output), number, legs, started)
    return found.model_copy(update={"error": error})


def _observed(
    session: EngineGroupSession,
    prompt_id: str,
    key: str,
    sent: tuple[int, ...],
    number: int,
    legs: Sequence[Leg],
    started: float,
) -> Observation:
    return Observation(
        cell=session.group.name.reference,
        prompt_id=prompt_id,
        form="ids",
        scenario=RESCORE,
        part=key,
        sequence=number,
        sent_ids=sent,
        engine_roles=session.roles,
        legs=tuple(legs),
        started_at=started,
    )


def _score(session: EngineGroupSession, prompt: tuple[int, ...], output: tuple[int, ...]) -> Leg:
    """Return the leg that scores ``output`` after ``prompt``. Raises HandoffError."""
    sampling = Sampling(1, session.profile.workload.logprobs)
    return session.client("single").complete(
        [*prompt, *output], sampling, new_id(), new_id(), role="single", count=False, rescore_from=len(prompt)
    )


def _end_of(session: EngineGroupSession) -> EngineDiedError | None:
    """Return why the engine died, or None while it is alive."""
    try:
        session.require_alive()
    except EngineDiedError as error:
        return error
    return None
