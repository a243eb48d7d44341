"""What a check may look at: the history, the baselines by method, and the bounds of the profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter, ValidationError

from harness.baseline.lookup import Lookup
from harness.config import Judging, part_of
from harness.errors import DataError
from harness.findings import DamageClass, Finding, Verdict
from harness.history import COLD, CellRecord, EngineRecord, Form, History, Observation
from harness.matrix import CellName
from harness.scenarios.config import Pressure, Scenario
from harness.strata import classify

if TYPE_CHECKING:
    from harness.checks.night import RegisteredTest, Tested

PRESSURE_SLACK = 0.1
_SCENARIO: TypeAdapter[Scenario] = TypeAdapter(Scenario)


class Evidence(NamedTuple):
    """Everything that judging needs, for all cells of a run."""

    history: History
    baselines: Mapping[str, Lookup]
    """By lineup; a missing key means that it was not looked up."""
    judging: Judging
    night: Mapping[RegisteredTest, Tested] = {}
    """Results of the registered tests, in the normal tier."""
    second: Mapping[RegisteredTest, Tested] | None = None
    """Of the tests that failed, on prompts and engines of the second stage; None when there was none."""

    def selected(self, cell_id: str) -> bool:
        """Whether the run was asked to observe this cell."""
        return self.history.cell(cell_id) is not None


class CellView(NamedTuple):
    """One cell of the evidence, in one scenario."""

    evidence: Evidence
    record: CellRecord
    scenario: str = COLD

    @property
    def cold(self) -> bool:
        return self.scenario == COLD

    @property
    def planned(self) -> int:
        """Observations that the plan asks for."""
        return self.record.planned if self.cold else self.record.scenarios.get(self.scenario, 0)

    def sibling(self, topology: str, scenario: str | None = None) -> CellView | None:
        """The view of the same method in another topology or scenario of this run, asked without a router."""
        record = self.evidence.history.cell(self.name.beside(topology).id)
        return CellView(self.evidence, record, scenario or self.scenario) if record is not None else None

    @property
    def config(self) -> Scenario | None:
        """The scenario as the profile describes it; None for the cold one. Raises DataError when it is damaged."""
        if self.cold:
            return None
        for raw in part_of(self.evidence.history.run.profile, self.name.variant).get("scenarios", ()):
            if raw.get("id") == self.scenario:
                try:
                    return _SCENARIO.validate_python(raw)
                except ValidationError as error:
                    raise DataError(f"scenario {self.scenario} of the recorded profile is damaged: {error}") from error
        return None

    @property
    def kv_lease_s(self) -> float:
        """Seconds for which P keeps the blocks of a hand-off; vLLM's default where the profile is silent."""
        engine = part_of(self.evidence.history.run.profile, self.name.variant).get("engine") or {}
        return float(engine.get("kv_lease_s", 30))

    @property
    def acceptance_slack(self) -> float:
        """Share by which a request's accepted drafts may differ from the reference: zero, but for pressure and for
        the cold prompts of a soak, where a prompt is prefilled in other chunks than alone, which changes what EAGLE3
        and MTP drafters see."""
        loaded = self.cold and self.evidence.history.run.kind == "soak"
        return PRESSURE_SLACK if loaded or isinstance(self.config, Pressure) else 0.0

    def engine(self, role: str) -> EngineRecord | None:
        """The engine that plays a role for this cell; ``single`` in a pair is the decode engine."""
        mine = {e.role: e for e in self.evidence.history.run.engines if e.group == self.record.group}
        return mine.get(role) or (mine.get("decode") if role == "single" else None)

    @property
    def answering(self) -> str:
        """Role of the engine that gives the output."""
        return "decode" if self.handed_off else "single"

    @property
    def id(self) -> str:
        return self.record.cell

    @property
    def name(self) -> CellName:
        return CellName.of(self.id)

    @property
    def topology(self) -> str:
        return self.name.topology

    @property
    def method(self) -> str:
        return self.name.method

    @property
    def lineup(self) -> str:
        """The key of the baseline that it is judged against."""
        return self.name.lineup

    @property
    def routed(self) -> bool:
        """Whether a router stands between the harness and the engines."""
        return self.record.route == "router"

    @property
    def speculative(self) -> bool:
        return self.record.draft_tokens > 0

    @property
    def handed_off(self) -> bool:
        return self.topology == "pd"

    def observations(self, form: Form = "ids") -> dict[str, Observation]:
        """By key: the prompt's id when cold, with instance and part in other scenarios."""
        return self.evidence.history.of(self.id, form, self.scenario)

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
            scenario=self.scenario,
            part=observation.key if observation and not self.cold else None,
            verdict=verdict,
            damage=damage,
            message=message,
            prompt_id=observation.prompt_id if observation else None,
            form=observation.form if observation else None,
            stratum=self.stratum(observation) if observation else None,
            evidence=dict(evidence),
        )
