"""Text of prompts, outputs, logs, paths and records stays text, and stays in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browsing import DESKTOP, PHONE, Reader, Visitor

Pages = dict[str, Path]
HOSTILE = ["hostile", "hostile-compare", "hostile-trend"]
# Words run from left to right, and what follows on a line stands to the right of what it follows.
_TURNED = """() => {
  const out = [], range = document.createRange();
  const skipped = "script, style, select, svg, noscript, .up, .sr, .skip, .lane";
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let before = null;
  while (walker.nextNode()) {
    const node = walker.currentNode, text = node.data;
    if (!text.trim() || node.parentElement.closest(skipped)) continue;
    for (const match of text.matchAll(/[A-Za-z]{2,}/g)) {
      const boxes = [0, 1].map((i) => {
        range.setStart(node, match.index + i);
        range.setEnd(node, match.index + i + 1);
        return range.getBoundingClientRect();
      });
      if (boxes[0].width && boxes[0].top === boxes[1].top && boxes[0].left > boxes[1].left) out.push(match[0]);
    }
    const cell = node.parentElement.closest("th, td");
    // A name that is too long is cut, and has no end to follow.
    if (cell && cell.scrollWidth > cell.clientWidth) { before = null; continue; }
    range.selectNodeContents(node);
    const rects = [...range.getClientRects()].filter((r) => r.width > 0);
    if (!rects.length) continue;
    const line = (r) => rects.filter((other) => Math.abs(other.bottom - r.bottom) < 8);
    if (before && Math.abs(before.bottom - rects[0].bottom) < 8) {
      const left = Math.min(...line(rects[0]).map((r) => r.left));
      if (left < before.right - 1) out.push(`${before.text} / ${text.slice(0, 40)}`);
    }
    const last = rects.reduce((a, b) => (b.bottom > a.bottom + 8 ? b : a));
    before = { text: text.slice(0, 40), bottom: last.bottom, right: Math.max(...line(last).map((r) => r.right)) };
  }
  return out;
}"""


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_the_data_becomes_an_element_or_runs(reader: Reader, pages: Pages, name):
    page = reader.page(pages[name])
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, iframe, object, embed, link, base, svg[onload]").count() == 0
    assert page.locator("script").count() == 2
    handlers = "[...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames()).filter((n) => /^on/.test(n))"
    assert page.evaluate(handlers) == []
    # It is there, as text.
    assert "window.pwned=1" in page.locator("body").inner_text()


@pytest.mark.parametrize("name", HOSTILE)
def test_links_lead_into_the_page_or_to_files_beside_it(reader: Reader, pages: Pages, name):
    page = reader.page(pages[name])
    links = page.evaluate("[...document.querySelectorAll('a[href]')].map((a) => a.getAttribute('href'))")
    schemes = {page.evaluate("(link) => new URL(link, document.baseURI).protocol", link) for link in links}
    assert schemes <= {"file:", "https:"}


@pytest.mark.parametrize("name", HOSTILE)
def test_direction_marks_do_not_turn_their_neighbours(reader: Reader, pages: Pages, name):
    for size in (DESKTOP, PHONE):
        assert reader.page(pages[name], size).evaluate(_TURNED) == []


@pytest.mark.parametrize(("text", "turned"), [("\u202eabc", "plain"), ("\u05e9\u05dc", "12 plain")])
def test_turned_words_are_noticed(visitor: Visitor, pages: Pages, text, turned):
    """The check above can fail: on an override, and on a number that letters from right to left pull along."""
    page = visitor.open(pages["hostile-compare"])
    page.evaluate(
        "(text) => { const p = document.createElement('p'), span = document.createElement('span');"
        " span.textContent = text; p.append('x ', span, ' 12 plain words'); document.body.append(p); }",
        text,
    )
    assert any(turned in found for found in page.evaluate(_TURNED))


def test_filters_take_hostile_cells(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["hostile"])
    everything = page.locator(".finding:not([hidden])").count()
    names = page.locator("select[name=cell] option").all_text_contents()
    page.locator("select[name=cell]").select_option(index=next(i for i, n in enumerate(names) if "pwned" in n))
    assert 0 < page.locator(".finding:not([hidden])").count() < everything
