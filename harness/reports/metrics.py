"""The figures of a judged run for other programs: one row per figure, as CSV or as OpenMetrics."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

from harness.history.acceptance import Rates, pool_counts
from harness.history.folder import History
from harness.history.plan import counts_of
from harness.observed.recorded_cell import RecordedCell
from harness.reports.summary import RunSummary

LABELS = ("cell", "scenario", "check", "verdict", "position", "part")
"""Every label that a metric may have; ``position`` counts drafts of a verify step from 0."""
_HELP = {
    "kv_harness_run_verdict": "1 for the verdict of the run",
    "kv_harness_cell_verdict": "1 for the verdict of a cell in a scenario",
    "kv_harness_findings": "Findings of a check, with its verdict; UNKNOWN may have none",
    "kv_harness_answers_checked": "Answers whose tokens were checked one by one",
    "kv_harness_acceptance_rate": "Share of verify steps that accepted the draft at a position",
    "kv_harness_acceptance_length": "1 + the sum of the rates: tokens per verify step",
    "kv_harness_verify_steps": "Verify steps behind the acceptance rates",
    "kv_harness_seconds": "Seconds that a part of the run took",
}


class Metric(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def acceptance_of(history: History) -> Iterator[tuple[RecordedCell, dict[str | None, Rates]]]:
    """Yield each speculative cell in each scenario, with its acceptance by stratum; that of all strata under None."""
    for record in history.run.cells:
        for scenario in counts_of(record):
            view = RecordedCell(history, record, scenario)
            if not view.speculative or not view.counts.by_key:
                continue
            strata = {key: view.stratum(o) for key, o in view.answered().items()}
            k = record.draft_tokens
            rates: dict[str | None, Rates] = {None: pool_counts(view.counts.by_key.values(), k)}
            for stratum in dict.fromkeys(strata.values()):
                counted = [c for key, c in view.counts.by_key.items() if strata[key] == stratum]
                if counted:
                    rates[stratum] = pool_counts(counted, k)
            yield view, rates


def metrics_of(summary: RunSummary) -> Iterator[Metric]:
    """Yield all figures of a judged run."""
    yield Metric("kv_harness_run_verdict", {"verdict": summary.verdict.value}, 1)
    for cell in summary.judgement.cells:
        place = {"cell": cell.cell, "scenario": cell.scenario}
        yield Metric("kv_harness_cell_verdict", {**place, "verdict": cell.verdict.value}, 1)
        for result in cell.results:
            labels = {**place, "check": result.check, "verdict": result.verdict.value}
            yield Metric("kv_harness_findings", labels, result.found)
    for name, answers in summary.exposure.by_cell.items():
        yield Metric("kv_harness_answers_checked", {"cell": name}, answers)
    for view, rates in acceptance_of(summary.history):
        place, pooled = {"cell": view.id, "scenario": view.scenario}, rates[None]
        for position, rate in enumerate(pooled.rates):
            yield Metric("kv_harness_acceptance_rate", {**place, "position": str(position)}, rate)
        if pooled.length_pooled is not None:
            yield Metric("kv_harness_acceptance_length", place, pooled.length_pooled)
        yield Metric("kv_harness_verify_steps", place, pooled.steps)
    for part, seconds in summary.history.run.seconds.items():
        yield Metric("kv_harness_seconds", {"part": part}, seconds)


def _run_labels(history: History) -> dict[str, str]:
    run = history.run
    return {
        "run": run.run_id,
        "started": run.started,
        "profile": run.asked_for.name,
        "vllm": run.versions.get("vllm") or "",
        "harness": run.harness_version,
    }


def as_csv(summary: RunSummary) -> str:
    """Return the figures as CSV: the run's columns, those of ``LABELS``, ``metric`` and ``value``."""
    run = _run_labels(summary.history)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*run, "metric", *LABELS, "value"], restval="", lineterminator="\n")
    writer.writeheader()
    for metric in metrics_of(summary):
        writer.writerow({**run, "metric": metric.name, **metric.labels, "value": metric.value})
    return text.getvalue()


def as_openmetrics(summary: RunSummary) -> str:
    """Return the figures in the OpenMetrics text format, with the run as ``kv_harness_run_info``."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
    from prometheus_client.openmetrics.exposition import generate_latest

    class Collector:
        def collect(self) -> Iterator[Any]:
            yield InfoMetricFamily("kv_harness_run", "The run", value=_run_labels(summary.history))
            by_name: dict[str, list[Metric]] = {name: [] for name in _HELP}
            for metric in metrics_of(summary):
                by_name[metric.name].append(metric)
            for name, metrics in by_name.items():
                if metrics:
                    family = GaugeMetricFamily(name, _HELP[name], labels=list(metrics[0].labels))
                    for metric in metrics:
                        family.add_metric(list(metric.labels.values()), metric.value)
                    yield family

    registry = CollectorRegistry()
    registry.register(Collector())
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()


RENDER = {"csv": as_csv, "openmetrics": as_openmetrics}
