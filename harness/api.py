"""The Python API: what ``import harness`` offers. docs/api.md

Names in ``__all__`` are kept from one version to the next; everything else in the package may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError, UsageError
from harness.history.folder import History as Run
from harness.history.folder import load_history
from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.findings import CellVerdict, Finding, Judgement
from harness.judging.references import References
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.cells import CellName
from harness.reports.compare import Comparison, compare_runs
from harness.reports.judge_run import check, judged
from harness.reports.metrics import acceptance_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CellVerdict",
    "Comparison",
    "Finding",
    "HarnessError",
    "Judgement",
    "Observation",
    "Run",
    "Verdict",
    "acceptance",
    "compare",
    "judge",
    "load_run",
    "observations",
    "write_reports",
]

Folder = str | Path


def load_run(folder: Folder) -> Run:
    """Load a recorded run. Raises HarnessError for a folder that is none, or whose record is damaged."""
    return load_history(_folder(folder))


def judge(
    run: Run | Folder, *, baselines: Folder | None = None, known: Folder | None = None, against: Folder | None = None
) -> Judgement:
    """Judge a run as ``harness check`` does; nothing is written, and equal inputs give equal judgements.

    ``baselines`` (a folder), ``known`` (a list of known defects) and ``against`` (the folder of another run) replace
    what the run names. What is missing makes the verdict UNKNOWN, never PASS. Raises HarnessError for bad input.
    """
    return judged(_loaded(run), _references(baselines, known, against))


def write_reports(
    run: Run | Folder,
    out: Folder,
    *,
    baselines: Folder | None = None,
    known: Folder | None = None,
    against: Folder | None = None,
) -> Judgement:
    """Judge a run and write report.html, summary.md, junit.xml and judgement.json into the folder ``out``.

    Raises HarnessError for bad input, and when the reports cannot be written.
    """
    summary = check(_folder(run), _references(baselines, known, against), _folder(out)).summary
    if summary.unwritten:
        raise HarnessError(summary.unwritten)
    return summary.judgement


def compare(
    first: Run | Folder, second: Run | Folder, *, baselines: Folder | None = None, known: Folder | None = None
) -> Comparison:
    """Compare two runs: verdicts, tokens, acceptance paired by prompt, and findings of only one of them.

    Raises HarnessError when they have no cell in common.
    """
    return compare_runs(_folder(first), _folder(second), _references(baselines, known, None))


def observations(*runs: Run | Folder) -> pd.DataFrame:
    """Return a row for each answer of the runs, of every cell, form and scenario, in the order of the record.

    Columns: ``run, cell, topology, method, scenario, form, prompt_id, instance, part, sequence, stratum,
    prompt_tokens, output_ids, steps, accepted, per_step_accepted, seconds, error``. ``steps`` and ``accepted`` (drafts,
    over all steps) are as the engine reported them for the request, and missing where it did not. Needs pandas (the
    extra ``frames``).
    """
    return _frame(_answers(run) for run in runs)


def acceptance(*runs: Run | Folder, by_stratum: bool = False) -> pd.DataFrame:
    """Return the acceptance of the runs: a row for each speculative cell, scenario and draft position.

    Columns: ``run, cell, topology, method, scenario, position, requests, steps, accepted, rate``, and ``stratum`` if
    asked for. Padded first steps of handed-off requests are left out. Needs pandas (the extra ``frames``).
    """
    return _frame(_rates(run, by_stratum) for run in runs)


def _loaded(run: Run | Folder) -> Run:
    return run if isinstance(run, Run) else load_run(run)


def _references(baselines: Folder | None, known: Folder | None, against: Folder | None) -> References:
    if baselines is not None and against is not None:
        raise UsageError("baselines and against exclude each other; leave one out")
    return References(_path(baselines), _path(known), _path(against))


def _path(value: Folder | None) -> Path | None:
    return _folder(value) if value is not None else None


def _folder(value: Run | Folder) -> Path:
    if isinstance(value, Run):
        return value.folder
    if not isinstance(value, str | Path):
        raise UsageError(f"expected a run or the path of a folder, found {value!r}; load_run(FOLDER) returns a run")
    return Path(value)


def _place(run: Run, cell: str) -> dict[str, Any]:
    name = CellName.of(cell)
    return {"run": run.run.run_id, "cell": cell, "topology": name.topology, "method": name.method}


def _answers(source: Run | Folder) -> Iterator[dict[str, Any]]:
    run = _loaded(source)
    for record in run.run.cells:
        view = RecordedCell(run, record)
        for o in run.in_order(record.cell):
            final = o.final
            spec = final.speculation if final is not None else None
            yield {
                **_place(run, record.cell),
                "scenario": o.scenario,
                "form": o.form,
                "prompt_id": o.prompt_id,
                "instance": o.instance,
                "part": o.part,
                "sequence": o.sequence,
                "stratum": view.stratum(o),
                "prompt_tokens": len(o.sent_ids),
                "output_ids": final.output_ids if final is not None else None,
                "steps": len(spec.per_step_accepted) if spec is not None else None,
                "accepted": sum(spec.per_step_accepted) if spec is not None else None,
                "per_step_accepted": spec.per_step_accepted if spec is not None else None,
                "seconds": sum(leg.seconds for leg in o.legs),
                "error": o.error,
            }


def _rates(source: Run | Folder, by_stratum: bool) -> Iterator[dict[str, Any]]:
    run = _loaded(source)
    for view, rates in acceptance_of(run):
        for stratum, found in rates.items():
            if (stratum is not None) != by_stratum:
                continue
            for position, accepted in enumerate(found.accepted_at):
                yield {
                    **_place(run, view.id),
                    "scenario": view.scenario,
                    **({"stratum": stratum} if by_stratum else {}),
                    "position": position,
                    "requests": found.requests,
                    "steps": found.steps,
                    "accepted": accepted,
                    "rate": found.rates[position] if found.steps else None,
                }


def _frame(rows: Iterator[Iterator[dict[str, Any]]]) -> pd.DataFrame:
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise UsageError(
            "frames need pandas, which is not here; pip install 'kv-acceptance-harness[frames]'"
        ) from error
    return pd.DataFrame([row for of_run in rows for row in of_run]).convert_dtypes()
