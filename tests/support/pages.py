"""A page as a browser's parser sees it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

from rich.console import Console


def printed(show: Callable[[Any, Console], object], what: object, width: int = 160) -> str:
    """What is printed on a terminal of this width."""
    console = Console(record=True, width=width, force_terminal=False)
    show(what, console)
    return console.export_text()


class Page(HTMLParser):
    """Elements with their attributes, and the contents of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._inside = True
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data

    @property
    def ids(self) -> list[str]:
        return [a["id"] or "" for _, a in self.elements if "id" in a]

    @property
    def data(self) -> dict:
        """The requests that the page's script shows."""
        return json.loads(self.scripts[0])

    def require_inert(self) -> None:
        """Nothing runs but the script whose hash the policy names, and nothing is fetched."""
        policy = next(a["content"] or "" for t, a in self.elements if t == "meta" and "http-equiv" in a)
        assert "default-src 'none'" in policy and "unsafe-eval" not in policy
        assert [a.get("type") for t, a in self.elements if t == "script"] == ["application/json", None]
        for script in self.scripts[1:]:
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
        for tag, attributes in self.elements:
            assert "src" not in attributes, (tag, attributes)
            assert not [a for a in attributes if a.startswith("on")], (tag, attributes)
            assert tag not in ("iframe", "object", "embed", "img", "link", "base"), (tag, attributes)
            link = attributes.get("href") or "#"
            assert link.startswith(("#", "https://", "./", "../")), link
