"""Real engines are started by the command line, as a user would; every process must be gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.util import machine
from tests.support.builders import changed_profile
from tests.support.real_engines import Done, harness

TEXT_PROMPTS = 2


@pytest.fixture(scope="session", autouse=True)
def short_look() -> Iterator[None]:
    """How busy the machine is, which each run looks at first, is a warning that no test here reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_LOOK_S", 0.05)
        yield


@pytest.fixture(scope="session")
def small_profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The cpu profile with every cell and scenario, and three cold prompts of each stratum."""
    few = {"per_stratum": 3, "text_prompts": TEXT_PROMPTS}
    return changed_profile(tmp_path_factory.mktemp("profile"), lambda raw: raw["workload"].update(few))


@pytest.fixture(scope="session")
def eagle3(small_profile: str, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The pair with EAGLE3, asked directly and through the router, its single engine, and the plain engine that
    re-scores what they gave: three real vLLM engines and real NIXL transfers."""
    cells = ("--cell", "*-eagle3*", "--cell", "single-none")
    return harness("run", "--profile", small_profile, *cells, out=tmp_path_factory.mktemp("eagle3"))


@pytest.fixture(scope="session")
def quick_selftest(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Exit code, output and folder of the quick self-test."""
    out = tmp_path_factory.mktemp("selftest")
    done = harness("selftest", "--quick", "--out", str(out))
    return done.code, done.output, (out / "latest-selftest").resolve()
