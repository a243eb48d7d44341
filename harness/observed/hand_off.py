"""What P hands to D in a cell: which tokens of a prompt, from which P, in how many transfers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from harness.history.records import Leg, Observation
from harness.observed.cell import ObservedCell


@dataclass(frozen=True)
class HandOff:
    """The hand-offs of one cell in one scenario."""

    _cell: ObservedCell

    def prompt_of(self, o: Observation, role: str) -> tuple[int, ...]:
        """Return the prompt ids that an engine was asked: P all but the last, where that is P's own answer."""
        shortened = self._appends_answer and role == "prefill" and o.route == "cell"
        return o.sent_ids[:-1] if shortened else o.sent_ids

    @cached_property
    def _appends_answer(self) -> bool:
        config = self._cell.config
        return config is not None and config.appends_answer

    @cached_property
    def _leaves_nothing(self) -> bool:
        """Whether P leaves D no token of any prompt."""
        return not self._cell.record.held_back or not self._cell.handed_off

    def handed_tokens(self, o: Observation) -> int:
        """Return of how many prompt tokens P hands over what it computed: all but those that it leaves to D."""
        return len(self.prompt_of(o, "prefill")) - self.left_to_d(o)

    def fetched_tokens(self, o: Observation) -> int:
        """Return how many prompt tokens D takes from outside if it has none of them cached: all but those that P leaves
        to it, and never the last one, which it computes in any case."""
        return len(o.sent_ids) - max(self.left_to_d(o), 1)

    def left_to_d(self, o: Observation) -> int:
        """Return how many tokens of a prompt P leaves to D. Of what later modules look at, NIXL's connector alone knows
        (vLLM 0.32.0); log-probs of a prompt make D compute all of it."""
        if self._leaves_nothing or not o.looked_up or o.route not in ("cell", "former-p"):
            return 0
        record = self._cell.record
        held = len(self.prompt_of(o, "prefill"))
        return record.left_to_d(held) if self._cell.by_nixl else int(record.recurrent and held > 1)

    @cached_property
    def transfers_each(self) -> float:
        """NIXL transfers of a hand-off: one, or with several ranks as many as most have. Each rank of D reads from one
        or more of P, which depends on how KV is split."""
        if max(map(self._cell.settings.ranks, self._cell.roles)) == 1:
            return 1.0
        counted = [made for _, leg in self.counted_alone() if (made := leg.counters.get("nixl_transfers"))]
        return statistics.mode(counted) if counted else 1.0

    def counted_alone(self) -> list[tuple[Observation, Leg]]:
        """Return hand-offs with D's leg whose bytes are theirs alone: sent once, by themselves, not after one that
        broke. The result is shared, and not to be changed.

        What D pulls for a request that breaks or is given up is counted with the next one.
        """
        rows = self._cell.history.of_cell(self._cell.id)
        return rows.once(("counted alone",), lambda: list(self._counted_alone()))

    def _counted_alone(self) -> Iterator[tuple[Observation, Leg]]:
        broke = False
        for o in self._cell.history.in_order(self._cell.id):
            leg = o.leg("decode")
            alone = not broke and o.attempts == 1 and o.concurrent == 1 and o.route == "cell" and o.abandon is None
            if alone and o.error is None and leg is not None and leg.counters.get("nixl_bytes"):
                yield o, leg
            broke = o.cut_short

    def p_of(self, o: Observation) -> int:
        """Return which P of this scenario a request met, counted from 0: P is restarted, or not the only one."""
        config = self._cell.config
        if config is None or config.by_second_p(o.part):
            return int(config is not None)
        if not config.restarts_p:
            return 0
        return sum(other.route == "former-p" and other.sequence < o.sequence for other in self._cell.all_observations())
