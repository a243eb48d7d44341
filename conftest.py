"""Hooks the pytest front end of the matrix into pytest; see harness/pytest_plugin.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import pytest_plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    pytest_plugin.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    pytest_plugin.configure(config)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return pytest_plugin.collect_file(file_path, parent)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    pytest_plugin.modify_items(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    pytest_plugin.summary(terminalreporter, config)
