"""What the harness says about recorded runs stays as it is, byte for byte, until somebody decides otherwise."""

from __future__ import annotations

import pytest

from tests.golden import oracle

RENEWED = "other than before; if that was meant, renew it: python -m tests.golden.oracle update"


@pytest.mark.parametrize("run", oracle.recorded(), ids=lambda p: p.name)
def test_recorded_run_is_judged_as_before(run):
    assert oracle.kept(run.name, oracle.outputs(run)) == oracle.expected(run.name), RENEWED


def test_plans_and_engine_commands_are_as_before():
    assert oracle.plans() == oracle.expected("plans"), RENEWED


def test_runs_on_cpu_engines_and_on_a_gpu_are_compared_as_before():
    assert oracle.comparison() == oracle.expected("comparison"), RENEWED


def test_no_expected_output_is_a_traceback():
    """An update writes down whatever is said."""
    files = [f for f in oracle.EXPECTED.rglob("*") if f.is_file()]
    assert files and not [str(f) for f in files if "Traceback (most recent call last)" in f.read_text(encoding="utf-8")]
