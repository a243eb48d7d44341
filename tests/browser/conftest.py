"""A headless Chromium that opens pages from file URLs, and writes down whatever a page should not do.

It ends with the tests of this folder: as long as Playwright is there, no other test can run an event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.chromium import ARGUMENTS, NoBrowser, find_chromium
from tests.support import runs
from tests.support.browsing import Reader, Visitor


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path, missing = "", ""
    try:
        path = find_chromium()
    except NoBrowser as error:
        missing = str(error)
    if missing:
        pytest.fail(missing, pytrace=False)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture(scope="package")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All pages by name: report, compare and trend of quiet and of hostile runs."""
    root = tmp_path_factory.mktemp("pages")
    quiet = ("plain", "second", "third")
    return {
        "green": runs.report("green", runs.green(), root / "a"),
        "red": runs.report("red", runs.red(), root / "a"),
        "known": runs.known_report(root / "a"),
        "hostile": runs.report("hostile", runs.hostile(), root / "b"),
        "compare": runs.comparison("quiet", runs.green(), runs.red(), root),
        "hostile-compare": runs.comparison("hostile", runs.green(), runs.hostile(), root),
        "trend": runs.trend("quiet", runs.red(), root, quiet),
        "hostile-trend": runs.trend("hostile", runs.hostile(), root, runs.HOSTILE_FOLDERS),
    }


@pytest.fixture(scope="package")
def reader(browser: Browser) -> Iterator[Reader]:
    visitor = Visitor(browser)
    yield Reader(visitor)
    visitor.close()
    assert visitor.problems == []


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """Fails the test when a page that it opened wrote to the console, broke, fetched, or ran what it should not."""
    made = Visitor(browser)
    yield made
    made.close()
    assert made.problems == []
