"""A/A: the same cells again and again on the same engines, judged against the baselines and against each other.

Nothing was changed between repetitions, so every finding is a false alarm of the harness or a flake of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from harness import provenance, strict_json
from harness.acceptance import real_steps
from harness.engine.environment import EngineEnvironment
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN, UsageError
from harness.findings import Judgement, Verdict, how_many
from harness.history import COLD, History, Observation, load_history
from harness.operations import Prepared, judge_and_report
from harness.progress import Reporter
from harness.repetitions import record_repetitions
from harness.strict import Strict


class Count(Strict):
    """A cell in a scenario over all repetitions."""

    cell: str
    scenario: str
    requests: int
    """Requests that were answered, over all repetitions."""
    compared: int
    """Of these, how many could be compared with the same request of the first repetition."""
    tokens_differ: int
    steps_differ: int
    """Requests with other accepted counts than the first time; those of one engine step more or less included."""
    findings: int
    verdicts: dict[str, int]
    """How many repetitions got which verdict."""


class AgainstItself(Strict):
    """The result of an A/A run."""

    run_id: str
    started: str
    profile: str
    versions: dict[str, str | None]
    repetitions: int
    counts: tuple[Count, ...]
    seconds: float
    interrupted: bool = False

    @property
    def verdicts(self) -> int:
        """Cells and scenarios judged, over all repetitions."""
        return sum(n for c in self.counts for n in c.verdicts.values())

    @property
    def alarms(self) -> int:
        """Of these, how many did not pass; known defects of the engine are no false alarms."""
        return sum(n for c in self.counts for v, n in c.verdicts.items() if v not in (Verdict.PASS, Verdict.KNOWN))

    @property
    def alarm_bound(self) -> float:
        """Upper 95 % bound of the chance that a cell in a scenario raises a false alarm (Clopper-Pearson)."""
        from scipy.stats import beta

        n, k = self.verdicts, self.alarms
        return 1.0 if n == 0 or k >= n else float(beta.ppf(0.95, k + 1, n - k))

    @property
    def exit_code(self) -> int:
        """0 when no repetition of any cell in any scenario had a finding, and none gave other tokens than the
        first."""
        wrong = (Verdict.REGRESSION, Verdict.DRIFT, Verdict.IMPROVED)
        if any(c.tokens_differ or set(c.verdicts) & set(wrong) for c in self.counts):
            return EXIT_REGRESSION
        return EXIT_UNKNOWN if self.alarms or self.interrupted or not self.verdicts else EXIT_PASS

    @property
    def sentence(self) -> str:
        """What happened, in one sentence."""
        requests = sum(c.requests for c in self.counts)
        compared = sum(c.compared for c in self.counts)
        return (
            f"{self.repetitions} repetitions, {requests} requests, {self.verdicts} verdicts of cells in scenarios: "
            f"{self.alarms} false alarms (at most {100 * self.alarm_bound:.2f} % with 95 % confidence), "
            f"{sum(c.findings for c in self.counts)} findings; of {compared} requests compared with their first "
            f"repetition {sum(c.tokens_differ for c in self.counts)} gave other tokens and "
            f"{sum(c.steps_differ for c in self.counts)} other accepted counts."
        )


def against_itself(
    prepared: Prepared, environment: EngineEnvironment, folder: Path, repetitions: int, reporter: Reporter
) -> AgainstItself:
    """Repeat the cells, judge every repetition and count."""
    begun, started = time.monotonic(), provenance.now()
    done = record_repetitions(prepared, environment, folder, repetitions, reporter)
    judged = [judge_and_report(history).judgement for history in done.histories]
    return AgainstItself(
        run_id=folder.name,
        started=started,
        profile=prepared.profile.name,
        versions=provenance.versions(environment),
        repetitions=repetitions,
        counts=count(done.histories, judged),
        seconds=round(time.monotonic() - begun, 1),
        interrupted=done.interrupted,
    )


def judge_again(folder: Path) -> AgainstItself:
    """Judge the repetitions of a recorded A/A run by today's checks, and count anew. Raises UsageError when the folder
    is none."""
    try:
        raw = strict_json.loads(strict_json.read_text(folder / "aa.json", 16 * strict_json.MIB))
        before = AgainstItself.model_validate({k: v for k, v in raw.items() if k in AgainstItself.model_fields})
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder}: expected the folder of an A/A run with aa.json, found none ({error})") from error
    histories = [load_history(p) for p in sorted(folder.glob("repetition-*"))]
    if len(histories) != before.repetitions:
        raise UsageError(f"{folder}: expected {before.repetitions} repetitions, found {len(histories)}")
    judged = [judge_and_report(history).judgement for history in histories]
    return before.model_copy(update={"counts": count(histories, judged)})


def count(histories: Sequence[History], judged: Sequence[Judgement]) -> tuple[Count, ...]:
    """Compare each repetition with the first, request by request, and count verdicts and findings."""
    first = {_place(o): o for o in histories[0].observations}
    rows: dict[tuple[str, str], dict[str, int]] = {}
    verdicts: dict[tuple[str, str], dict[str, int]] = {}
    findings: dict[tuple[str, str], int] = {}
    for judgement in judged:
        for item in judgement.cells:
            key = (item.cell, item.scenario)
            mine = verdicts.setdefault(key, {})
            mine[item.verdict] = mine.get(item.verdict, 0) + 1
            findings[key] = findings.get(key, 0) + how_many(
                f for r in item.results for f in r.findings if f.known is None
            )
    for number, history in enumerate(histories):
        for o in history.observations:
            row = rows.setdefault((o.cell, o.scenario), dict.fromkeys(("requests", "compared", "tokens", "steps"), 0))
            row["requests"] += o.error is None
            other = first.get(_place(o))
            if number and other is not None and o.final is not None and other.final is not None:
                row["compared"] += 1
                row["tokens"] += o.final.output_ids != other.final.output_ids
                row["steps"] += _steps(o) != _steps(other)
    return tuple(
        Count(
            cell=cell,
            scenario=scenario,
            requests=rows.get((cell, scenario), {}).get("requests", 0),
            compared=rows.get((cell, scenario), {}).get("compared", 0),
            tokens_differ=rows.get((cell, scenario), {}).get("tokens", 0),
            steps_differ=rows.get((cell, scenario), {}).get("steps", 0),
            findings=findings[cell, scenario],
            verdicts=dict(mine),
        )
        for (cell, scenario), mine in verdicts.items()
    )


def _place(o: Observation) -> tuple[str, str, str, str]:
    return (o.cell, o.scenario, o.form, o.prompt_id if o.scenario == COLD else o.key)


def _steps(o: Observation) -> tuple[int, ...] | None:
    steps = real_steps(o.final) if o.final is not None else None
    return steps.accepted if steps is not None else None
