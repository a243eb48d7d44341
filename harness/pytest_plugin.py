"""pytest plugin: ``pytest --harness-profile cpu -k "pd and eagle3"`` runs those cells, and each check is a test.

It is loaded into every pytest of an environment with this package, so it imports nothing before it is asked for a
profile, and its options have long names. The checkout's conftest.py adds short ones.
"""

from __future__ import annotations

import pytest

_OPTIONS = {
    "profile": "run the matrix of this profile (a shipped name or a YAML path)",
    "engine-python": "interpreter whose vLLM is tested",
    "out": "folder for runs (default: reports/)",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("harness", "run the matrix as tests")
    for name, words in _OPTIONS.items():
        group.addoption(f"--harness-{name}", dest=f"harness_{name.replace('-', '_')}", default=None, help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Collect the profile instead of other tests when one is named. Raises pytest.UsageError for a wrong one."""
    source = config.getoption("harness_profile")
    if source is None:
        return
    from harness.util.extras import why_missing

    try:
        from harness import pytest_items
    except ModuleNotFoundError as error:
        lacking = why_missing(error.name or "")
        if lacking is None:
            raise
        raise pytest.UsageError(lacking) from error
    pytest_items.prepare_config(config, source)
    config.pluginmanager.register(pytest_items)
