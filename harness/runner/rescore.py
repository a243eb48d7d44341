"""Re-score outputs: the plain single engine reads a prompt and a cell's output in one fresh prefill.

Acceptance can stay high although the output is wrong, when target and drafter read the same bad KV. After a benign near
tie, two outputs can no longer be compared token by token. The plain engine can still tell, for each token, whether it
would have chosen it given all tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.engines.client import Sampling
from harness.engines.request import new_id
from harness.engines.session import EngineGroupSession
from harness.errors import EngineDiedError, HandoffError
from harness.history.records import COLD, RESCORE, Leg, Observation
from harness.history.token_ids import output_key
from harness.profiles.cells import CellName
from harness.util import clock


class Outputs:
    """Distinct (prompt, output) pairs of a run, by variant, in order of arrival."""

    def __init__(self) -> None:
        self._known: dict[str, dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]] = {}

    def add(self, o: Observation) -> None:
        """Add the output of a cold or sampled request; ignore all other observations."""
        leg = o.final
        if o.error or leg is None or not leg.output_ids or o.form != "ids":
            return
        if o.scenario == COLD or o.temperature > 0:
            mine = self._known.setdefault(CellName.of(o.cell).variant, {})
            mine.setdefault((o.prompt_id, output_key(leg.output_ids)), (o.sent_ids, leg.output_ids))

    def count(self, variant: str) -> int:
        return len(self._known.get(variant, {}))

    @property
    def scored_by(self) -> list[tuple[str, str]]:
        """The cell and ``Observation.key`` of the request that re-scores each pair."""
        return [
            (CellName("single", "none", variant=variant).id, f"{prompt_id}#0.{key}")
            for variant, pairs in self._known.items()
            for prompt_id, key in pairs
        ]

    def requests(self, session: EngineGroupSession) -> Iterator[Observation]:
        """Score each pair of the session's variant on the engine that answers plain single requests.

        A failed exchange is recorded in its observation. When the engine dies, all remaining observations carry the
        reason, and EngineDiedError is raised after the last one.
        """
        limit = session.profile.engine.max_model_len
        known = dict(self._known.get(session.group.variant, {}))
        gone: EngineDiedError | None = None
        for number, ((prompt_id, key), (prompt, output)) in enumerate(known.items()):
            started, legs, error = clock.now(), list[Leg](), None
            # Leave room for the one token that the engine generates.
            scored = output[: max(0, limit - len(prompt) - 1)]
            if gone is None:
                try:
                    legs.append(_score(session, prompt, scored))
                except HandoffError as failure:
                    error = str(failure)
                    gone = _end_of(session)
            yield Observation(
                cell=session.group.name.reference,
                prompt_id=prompt_id,
                form="ids",
                scenario=RESCORE,
                part=key,
                sequence=number,
                sent_ids=(*prompt, *scored),
                engine_roles=session.roles,
                legs=tuple(legs),
                error=error if gone is None else str(gone),
                started_at=started,
            )
        if gone is not None:
            raise gone


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
