"""What a check may look at: the history, the baselines by method, and the bounds of the profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from harness.baseline import Lookup
from harness.config import Judging
from harness.findings import DamageClass, Finding, Verdict
from harness.history import CellRecord, Form, History, Observation
from harness.strata import classify

REFERENCE_CELL = "single-none"


class Evidence(NamedTuple):
    """Everything that judging needs, for all cells of a run."""

    history: History
    baselines: Mapping[str, Lookup]
    """By method; a missing key means that the method was not looked up."""
    judging: Judging

    def selected(self, cell_id: str) -> bool:
        """Whether the run was asked to observe this cell."""
        return self.history.cell(cell_id) is not None


class CellView(NamedTuple):
    """One cell of the evidence."""

    evidence: Evidence
    record: CellRecord

    @property
    def id(self) -> str:
        return self.record.cell

    @property
    def topology(self) -> str:
        return self.id.split("-", 1)[0]

    @property
    def method(self) -> str:
        return self.id.split("-", 1)[1]

    @property
    def speculative(self) -> bool:
        return self.record.draft_tokens > 0

    @property
    def handed_off(self) -> bool:
        return self.topology == "pd"

    def observations(self, form: Form = "ids") -> dict[str, Observation]:
        return self.evidence.history.of(self.id, form)

    def every(self) -> list[Observation]:
        """Observations of both forms."""
        return [*self.observations("ids").values(), *self.observations("text").values()]

    def answered(self, form: Form = "ids") -> dict[str, Observation]:
        """Observations whose exchange ended with output ids."""
        return {
            k: o
            for k, o in self.observations(form).items()
            if o.error is None and o.final is not None and o.final.output_ids is not None
        }

    def stratum(self, observation: Observation) -> str:
        return classify(len(observation.sent_ids), self.record.block_size, self.record.lookahead)

    def finding(
        self,
        check: str,
        verdict: Verdict,
        damage: DamageClass,
        message: str,
        observation: Observation | None = None,
        **evidence: object,
    ) -> Finding:
        return Finding(
            check=check,
            cell=self.id,
            verdict=verdict,
            damage=damage,
            message=message,
            prompt_id=observation.prompt_id if observation else None,
            form=observation.form if observation else None,
            stratum=self.stratum(observation) if observation else None,
            evidence=dict(evidence),
        )
