"""The pytest front end of the matrix in this checkout, where its options have short names, too."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # Nothing happens where the package is installed, which has pytest load it already.
    pluginmanager.import_plugin("harness.pytest_plugin")
    # Outside of this checkout these may be options of other plugins.
    for short, name in (("profile", "profile"), ("engine-python", "engine_python"), ("matrix-out", "out")):
        parser.getgroup("harness").addoption(
            f"--{short}", dest=f"harness_{name}", default=None, help="the same, shorter"
        )
