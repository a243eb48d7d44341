"""Re-scoring: the plain single engine reads a prompt together with the output that a cell gave, in one fresh prefill.

Acceptance can stay high while the output is wrong, when target and drafter read the same bad KV, and after a benign
near tie two outputs cannot be compared token by token any more. The plain engine can: given all tokens before, would it
have said this one?
"""

from __future__ import annotations

from collections.abc import Iterator

from harness import clock
from harness.engine.client import Sampling
from harness.engine.exchange import new_id
from harness.engine.topology import EngineGroupSession
from harness.errors import HandoffError
from harness.history import COLD, RESCORE, Leg, Observation
from harness.matrix import CellName
from harness.sequences import output_key


class Outputs:
    """Distinct (prompt, output) pairs of a run, by variant, in the order in which they came."""

    def __init__(self) -> None:
        self._known: dict[str, dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]] = {}

    def add(self, o: Observation) -> None:
        """Remember the output of a cold request, or of one that was sampled."""
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
        """Cell and ``Observation.key`` of the request that re-scores each pair."""
        return [
            (CellName("single", "none", variant=variant).id, f"{prompt_id}#0.{key}")
            for variant, pairs in self._known.items()
            for prompt_id, key in pairs
        ]

    def requests(self, session: EngineGroupSession) -> Iterator[Observation]:
        """Score each pair of the session's variant on the engine that answers plain single requests.

        Raises EngineDiedError when it is gone; an exchange that breaks is part of the observation.
        """
        limit = session.profile.engine.max_model_len
        known = dict(self._known.get(session.group.variant, {}))
        for number, ((prompt_id, key), (prompt, output)) in enumerate(known.items()):
            started, legs, error = clock.now(), list[Leg](), None
            # The engine has to have room for one token of its own.
            scored = output[: max(0, limit - len(prompt) - 1)]
            try:
                legs.append(
                    session.client("single").complete(
                        [*prompt, *scored],
                        Sampling(1, session.profile.workload.logprobs),
                        new_id(),
                        new_id(),
                        role="single",
                        count=False,
                        rescore_from=len(prompt),
                    )
                )
            except HandoffError as failure:
                session.require_alive()
                error = str(failure)
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
                error=error,
                started_at=started,
            )
