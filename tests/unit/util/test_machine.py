"""The warning about other processes."""

from __future__ import annotations

import io

import psutil
import pytest
from rich.console import Console

from harness.cli.run import warn_of_disturbance
from harness.engines.attached import AttachedExecutor
from harness.engines.executor import LocalExecutor
from harness.util.machine import others_at_work
from harness.util.progress import Reporter


@pytest.mark.parametrize(("percent", "warned"), [(0.0, False), (29.0, False), (31.0, True), (100.0, True)])
def test_a_busy_machine_is_named(monkeypatch, percent, warned):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    warning = others_at_work()
    assert (warning is not None) is warned
    assert not warned or f"{percent:.0f} % of this machine" in str(warning)


@pytest.mark.parametrize(("executor", "warned"), [(LocalExecutor(), True), (AttachedExecutor({}), False)])
def test_a_busy_machine_matters_only_to_engines_that_are_started_on_it(monkeypatch, executor, warned):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 100.0)
    said = io.StringIO()
    warn_of_disturbance(Reporter(1.0, Console(file=said, width=200)), executor)
    assert ("warning: other processes use 100 %" in said.getvalue()) is warned
