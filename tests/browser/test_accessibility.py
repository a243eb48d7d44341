"""axe-core finds nothing on any page, in light and dark, on a desktop and on a phone.

Every run has each scheme and each screen once; all four pairs of them take minutes on the longest pages.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.browsing import DESKTOP, PHONE, Reader, Visitor

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
_RUN = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .map((v) => `${v.id}: ${v.nodes.slice(0, 3).map((n) => n.html.slice(0, 120)).join(" | ")}`)"""


PAIRS = [
    pytest.param((("light", DESKTOP), ("dark", PHONE)), id="each-once"),
    pytest.param((("light", PHONE), ("dark", DESKTOP)), id="other-pairs", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize(
    "name",
    [
        "green",
        pytest.param("red", marks=pytest.mark.exhaustive),
        pytest.param("known", marks=pytest.mark.exhaustive),
        pytest.param("hostile", marks=pytest.mark.exhaustive),
        "compare",
        "trend",
    ],
)
def test_no_violations(reader: Reader, pages: dict[str, Path], name, pairs):
    reader.page(pages[name]).evaluate(AXE)
    found = {(scheme, size["width"]): reader.page(pages[name], size, scheme).evaluate(_RUN) for scheme, size in pairs}
    assert found == {place: [] for place in found}


@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)])
def test_prompt_with_lost_drafts_has_no_violations(visitor: Visitor, pages: dict[str, Path], scheme, size):
    page = visitor.open(pages["red"], "#p=pd-dflash%2Fcold%2Fids%2Fp40", viewport=size, color_scheme=scheme)
    assert page.locator("#prompt .drafts").is_visible()
    page.evaluate(AXE)
    assert page.evaluate(_RUN) == []


def test_violations_are_noticed(visitor: Visitor, pages: dict[str, Path]):
    """The check above can fail: on a colour, a name and a scrolling region."""
    page = visitor.open(pages["green"])
    page.evaluate(
        """() => {
          document.querySelector(".lead").style.color = "#e0e0e0";
          document.querySelector("select[name=cell]").closest("label").replaceWith(document.createElement("select"));
        }"""
    )
    page.evaluate(AXE)
    assert {found.partition(":")[0] for found in page.evaluate(_RUN)} == {"color-contrast", "select-name"}
