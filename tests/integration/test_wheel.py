"""The wheel, unpacked outside of a checkout, where nothing but its base dependencies can be imported."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from harness.util.extras import RUN
from harness.util.paths import REPOSITORY
from tests.golden.oracle import BASELINES, RUNS

BLOCKED = (*RUN, "datasets", "detect_secrets", "pandas", "ray", "torch", "vllm")
BASE = (
    *("cachetools", "jinja2", "numpy", "packaging", "prometheus-client", "psutil", "pydantic", "pyyaml", "rich"),
    *("scipy", "typer"),
)
"""What is installed with the wheel alone."""
BLOCKER = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


class Installed(NamedTuple):
    site: Path
    folder: Path
    """An empty folder to work in."""

    def __call__(self, *arguments: str, module: str = "harness") -> tuple[int, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {
            "PYTHONPATH": f"{self.site.parent / 'blocker'}{os.pathsep}{self.site}",
            "COLUMNS": "200",
        }
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
        assert "Traceback" not in done.stdout, done.stdout
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    for name in ("harness", "prompts", "baselines", "models", "requirements"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "known-defects.yaml"):
        shutil.copy2(REPOSITORY / file, source / file)
    build = [sys.executable, "-c", "from setuptools import build_meta as b; print(b.build_wheel('..'))"]
    done = subprocess.run(build, cwd=source, text=True, capture_output=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return root / done.stdout.splitlines()[-1]


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Installed:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    (tmp_path / "here").mkdir()
    return Installed(site, tmp_path / "here")


def test_wheel_has_the_data_that_its_commands_read(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "models/probe/target/model.safetensors",
        "prompts/probe.jsonl",
        "baselines/cpu/none.json",
        "requirements/cpu.txt",
        "known-defects.yaml",
    ):
        assert f"harness/data/{wanted}" in names
    assert wheel.stat().st_size < 12 * 2**20


def described_in(archive: zipfile.ZipFile) -> str:
    """The folder of the wheel's own metadata; plugins for engines have some of their own."""
    (folder,) = {n.partition("/")[0] for n in archive.namelist() if n.partition("/")[0].endswith(".dist-info")}
    return f"{folder}/"


def test_its_metadata_is_what_an_index_takes(wheel: Path):
    """As `twine check` and PyPI validate it; files are those of its record."""
    archive = zipfile.ZipFile(wheel)
    folder = described_in(archive)
    found = Metadata.from_email(archive.read(f"{folder}METADATA"), validate=True)
    assert found.name == "kv-acceptance-harness" and found.description_content_type == "text/markdown"
    assert found.description is not None and found.description.startswith("# kv-acceptance-harness")
    base = {Requirement(str(r)).name for r in found.requires_dist or () if r.marker is None}
    assert base == set(BASE)
    assert found.license_expression == "Apache-2.0" and found.license_files
    recorded = {row.split(",")[0] for row in archive.read(f"{folder}RECORD").decode().splitlines()}
    assert recorded == set(archive.namelist())
    assert not [n for n in archive.namelist() if n.startswith("tests/") or n.endswith(".pyc")]


def test_its_programs_are_there(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    entries = configparser.ConfigParser()
    entries.read_string(archive.read(f"{described_in(archive)}entry_points.txt").decode())
    for target in entries["console_scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert set(entries["console_scripts"]) == {"harness", "kv-acceptance-harness"}
    assert dict(entries["pytest11"]) == {"harness.pytest_plugin": "harness.pytest_plugin"}


def test_planning_and_judging_need_neither_a_checkout_nor_an_extra(installed: Installed):
    assert installed("plan")[0] == 0
    assert installed("plan", "--profile", "nightly")[0] == 0
    assert installed("baseline", "list")[0] == 0
    shutil.copytree(RUNS / "pass", installed.folder / "rec")
    shutil.copytree(BASELINES, installed.folder / "mine")
    code, said = installed("check", "rec", "--baselines", "mine")
    assert code == 0, said
    code, said = installed("report", "--compare", "rec", "rec")
    assert code == 0 and "Both are the same record" in said
    assert installed("ci", "matrix")[0] == 0


def test_what_engines_need_is_named_with_its_extra(installed: Installed):
    code, said = installed("doctor")
    assert code == 2 and "kv-acceptance-harness[run]" in said
    code, said = installed("run")
    assert code == 2 and "pip install 'kv-acceptance-harness[run]'" in said
    assert not list(installed.folder.iterdir())


def test_only_engines_with_faults_find_a_plugin_in_it(installed: Installed):
    def plugins(path: Path) -> set[str]:
        found = importlib.metadata.distributions(path=[str(path)])
        return {p.name for d in found for p in d.entry_points if p.group == "vllm.general_plugins"}

    assert plugins(installed.site) == set()
    assert plugins(installed.site / "harness/mutants/plugin") == {"kv_harness_mutants"}


def test_pytest_plugin_is_found_and_stays_out_of_the_way(installed: Installed):
    (installed.folder / "test_mine.py").write_text("def test_mine(): pass\n")
    code, said = installed("-q", "-p", "no:cacheprovider", module="pytest")
    assert code == 0, said
    code, said = installed("--harness-profile", "cpu", "-p", "no:cacheprovider", module="pytest")
    assert code == 4 and "kv-acceptance-harness[run]" in said
