"""The distinct outputs of a run, each of which the plain single engine re-scores once."""

from __future__ import annotations

from harness.history.records import COLD, RESCORE, Observation
from harness.history.token_ids import output_key
from harness.profiles.cells import CellName


class Outputs:
    """Distinct (prompt, output) pairs of a run, by variant, in order of arrival.

    They are those of cold and sampled requests, and of all scenarios where registered tests may judge the run.
    """

    def __init__(self, normal: bool = False) -> None:
        self._normal = normal
        self._known: dict[str, dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]] = {}

    def add(self, o: Observation) -> None:
        """Add an output that is to be re-scored; ignore all other observations."""
        leg = o.final
        if o.error or leg is None or not leg.output_ids or o.form != "ids":
            return
        if o.scenario == RESCORE or o.answered_otherwise:
            return
        if o.scenario == COLD or o.temperature > 0 or self._normal:
            mine = self._known.setdefault(CellName.of(o.cell).variant, {})
            mine.setdefault((o.prompt_id, output_key(leg.output_ids)), (o.sent_ids, leg.output_ids))

    def count(self, variant: str) -> int:
        return len(self._known.get(variant, {}))

    def of_variant(self, variant: str) -> dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return (prompt ids, output ids) of a variant by prompt id and key of the output."""
        return dict(self._known.get(variant, {}))

    @property
    def scored_by(self) -> list[tuple[str, str]]:
        """The cell and ``Observation.key`` of the request that re-scores each pair."""
        return [
            (CellName("single", "none", variant=variant).id, f"{prompt_id}#0.{key}")
            for variant, pairs in self._known.items()
            for prompt_id, key in pairs
        ]
