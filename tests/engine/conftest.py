"""Real engines are started by the command line, as a user would; every process must be gone afterwards."""

from __future__ import annotations

import pytest

from tests.support.real_engines import Done, harness


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The pair with EAGLE3, asked directly and through the router, its single engine, and the plain engine that
    re-scores what they gave: three real vLLM engines and real NIXL transfers."""
    return harness("run", "--cell", "*-eagle3*", "--cell", "single-none", out=tmp_path_factory.mktemp("eagle3"))
