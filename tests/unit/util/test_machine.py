"""The warning about other processes."""

from __future__ import annotations

import psutil
import pytest

from harness.util.machine import others_at_work


@pytest.mark.parametrize(("percent", "warned"), [(0.0, False), (29.0, False), (31.0, True), (100.0, True)])
def test_a_busy_machine_is_named(monkeypatch, percent, warned):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    warning = others_at_work()
    assert (warning is not None) is warned
    assert not warned or f"{percent:.0f} % of this machine" in str(warning)
