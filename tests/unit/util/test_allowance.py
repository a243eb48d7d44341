"""Limits of control groups, read from folders like those of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from harness.util import allowance

GIB = 2**30


def groups(folder: Path, text: str, **files: str) -> tuple[Path, Path]:
    """The folder of control groups, with these files (``__`` for a slash), and the file that names this process's."""
    for name, content in files.items():
        path = folder / "cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (folder / "self").write_text(text)
    return folder / "cgroup", folder / "self"


@pytest.fixture
def big(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 256 * GIB})())


def test_without_limits_it_is_the_machine(big, tmp_path):
    for text in ("0::/\n", "", "nonsense\n"):
        where = groups(tmp_path, text, cpu_DOT_max="max 100000", memory_DOT_max="max", memory_DOT_current="5")
        assert len(allowance.cores(*where)) == 64 and allowance.memory_gib(*where) == 256
    assert len(allowance.cores(tmp_path / "no", tmp_path / "such")) == 64


def test_container_of_two_cpus_and_8_gib_on_a_large_host(big, tmp_path):
    """Version 2; the kernel gives back what it caches of files."""
    where = groups(
        tmp_path,
        "0::/docker/x\n",
        cpu_DOT_max="200000 100000",
        memory_DOT_max=str(8 * GIB),
        memory_DOT_current=str(3 * GIB),
        memory_DOT_stat=f"anon {GIB}\ninactive_file {GIB}",
    )
    assert allowance.cores(*where) == [0, 1] and allowance.memory_gib(*where) == 6


def test_the_tightest_of_nested_groups_counts(big, tmp_path):
    where = groups(
        tmp_path,
        "0::/a/b\n",
        a__cpu_DOT_max="400000 100000",
        a__b__cpu_DOT_max="1600000 100000",
        a__memory_DOT_max=str(4 * GIB),
        a__memory_DOT_current="0",
    )
    assert len(allowance.cores(*where)) == 4 and allowance.memory_gib(*where) == 4


def test_version_1_and_less_than_a_core(big, tmp_path):
    where = groups(
        tmp_path,
        "4:memory:/x\n1:cpu,cpuacct:/x\n",
        cpu__x__cpu_DOT_cfs_quota_us="50000",
        cpu__x__cpu_DOT_cfs_period_us="100000",
        memory__x__memory_DOT_limit_in_bytes=str(2 * GIB),
        memory__x__memory_DOT_usage_in_bytes=str(GIB),
    )
    assert allowance.cores(*where) == [0] and allowance.memory_gib(*where) == 1
    unlimited = groups(
        tmp_path / "b", "1:cpu:/x\n", cpu__x__cpu_DOT_cfs_quota_us="-1", cpu__x__cpu_DOT_cfs_period_us="100000"
    )
    assert len(allowance.cores(*unlimited)) == 64


def test_here_it_is_no_more_than_the_machine_has():
    assert 1 <= len(allowance.cores()) <= len(os.sched_getaffinity(0))
    assert 0 < allowance.memory_gib() <= psutil.virtual_memory().total / GIB
