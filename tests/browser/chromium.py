"""The system's Chromium: the same places in the same order as scripts/environment.sh."""

from __future__ import annotations

import os
import shutil

PLACES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class NoBrowser(Exception):
    """There is no Chromium; the message says what to do."""


def find_chromium() -> str:
    """Path of the browser. Raises NoBrowser."""
    named = os.environ.get("CHROMIUM")
    if named:
        found = shutil.which(named)
        if found is None:
            raise NoBrowser(
                f"expected CHROMIUM to name a Chromium, found no program {named!r}; correct it, or unset it to have "
                "one found"
            )
        return found
    found = next((path for path in map(shutil.which, PLACES) if path), None)
    if found is None:
        raise NoBrowser(
            f"expected {', '.join(PLACES)} on the PATH for the tests of the report pages, found none; run "
            "./run_tests.sh without arguments as root on Debian, which installs it, or install it yourself "
            "(apt-get install chromium), or name it: CHROMIUM=/path/to/chromium"
        )
    return found
