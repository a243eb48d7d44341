"""Visits to pages that note whatever a page should not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (e) => window.violations.push(e.violatedDirective));
"""


class Reader:
    """Keeps one open page of each path, for tests that only look."""

    def __init__(self, visitor: Visitor) -> None:
        self.visitor = visitor
        self._open: dict[Path, Page] = {}

    def page(self, path: Path, size: dict[str, int] = DESKTOP, scheme: str = "light") -> Page:
        """The page with everything unfolded, on a screen of that size and scheme."""
        page = self._open.get(path)
        if page is None:
            page = self._open[path] = self.visitor.open(path)
            page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=scheme, media="screen")
        return page


class Visitor:
    """Opens pages; ``problems`` are what no page may do."""

    def __init__(self, browser: Browser) -> None:
        self.problems: list[str] = []
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self._pages: list[Page] = []

    def open(self, path: Path, fragment: str = "", **context: Any) -> Page:
        """The page at a path, once its script has run unless scripts are off."""
        made = self._browser.new_context(**{"viewport": DESKTOP, **context})
        self._contexts.append(made)
        page = made.new_page()
        self._pages.append(page)
        if context.get("java_script_enabled", True):
            page.add_init_script(_WATCH)
        page.on("console", lambda m: self.problems.append(f"console {m.type}: {m.text}"))
        page.on("pageerror", lambda e: self.problems.append(f"error: {e}"))
        page.on("dialog", lambda d: (self.problems.append(f"dialog: {d.message}"), d.dismiss()))
        page.on("request", lambda r: self._requested(r.url, path.as_uri()))
        page.goto(path.as_uri() + fragment)
        if context.get("java_script_enabled", True):
            page.wait_for_selector("html[data-ready]", state="attached")
        return page

    def _requested(self, url: str, own: str) -> None:
        if url.partition("#")[0] != own and not url.startswith(("data:", "blob:")):
            self.problems.append(f"request: {url}")

    def close(self) -> None:
        for page in self._pages:
            if not page.is_closed() and page.evaluate("'violations' in window"):
                self.problems += [f"policy: {v}" for v in page.evaluate("window.violations")]
                if page.evaluate("window.pwned !== undefined"):
                    self.problems.append("a script of the data ran")
        for context in self._contexts:
            context.close()
