"""The figures of a run as CSV and OpenMetrics: both have the same ones, and standard readers read them."""

from __future__ import annotations

import csv
import io

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from harness.history.folder import load_history
from harness.judging.references import References
from harness.reports.judge_run import assess
from harness.reports.metrics import as_csv, as_openmetrics, metrics_of
from harness.reports.summary import RunSummary
from tests.golden.oracle import BASELINES, RUNS
from tests.support.program import harness


@pytest.fixture(scope="module")
def summary() -> RunSummary:
    return assess(load_history(RUNS / "M1"), References(baselines=BASELINES))


def test_both_formats_have_every_figure(summary: RunSummary):
    wanted = {(m.name, frozenset(m.labels.items())): float(m.value) for m in metrics_of(summary)}
    assert len(wanted) > 20
    rows = list(csv.DictReader(io.StringIO(as_csv(summary))))
    labels = ("cell", "scenario", "check", "verdict", "position", "part")
    assert {(r["metric"], frozenset((k, r[k]) for k in labels if r[k])): float(r["value"]) for r in rows} == wanted
    assert {r["run"] for r in rows} == {summary.history.run.run_id}
    samples = [s for family in text_string_to_metric_families(as_openmetrics(summary)) for s in family.samples]
    info = [s for s in samples if s.name == "kv_harness_run_info"]
    assert {(s.name, frozenset(s.labels.items())): s.value for s in samples if s not in info} == wanted
    assert [s.labels["vllm"] for s in info] == ["0.32.0"]


def test_figures_are_those_of_the_report(summary: RunSummary):
    values = {(m.name, m.labels.get("check"), m.labels.get("position")): m.value for m in metrics_of(summary)}
    assert values["kv_harness_findings", "transfer", None] == 9
    (row,) = summary.acceptance
    for position, rate in enumerate(row.ours.rates):
        assert values["kv_harness_acceptance_rate", None, str(position)] == rate
    assert values["kv_harness_acceptance_length", None, None] == row.ours.length_pooled


def test_command_prints_figures_and_writes_nothing():
    before = sorted(p.stat().st_mtime_ns for p in (RUNS / "M1").rglob("*"))
    done = harness("report", str(RUNS / "M1"), "--baselines", str(BASELINES), "--format", "openmetrics")
    assert done.code == 0
    assert done.stdout.endswith("# EOF\n")
    assert 'kv_harness_run_verdict{verdict="REGRESSION"} 1.0' in done.stdout
    done = harness("report", str(RUNS / "M1"), "--format", "csv", "--out", "x")
    assert (
        done.code == 64 and "--format prints figures and goes with none of --compare, --out and --json" in done.output
    )
    assert sorted(p.stat().st_mtime_ns for p in (RUNS / "M1").rglob("*")) == before
