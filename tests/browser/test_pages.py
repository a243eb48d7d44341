"""The pages in a real browser: charts, filters, links, copying, without scripts, and on paper."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browsing import DESKTOP, PHONE, Reader, Visitor

Pages = dict[str, Path]
MARKS = ".plot .dot, .plot .line"


@pytest.fixture
def page(visitor: Visitor, pages: Pages) -> Page:
    """The report of a red run, opened for one test."""
    return visitor.open(pages["red"])


def shown(page: Page) -> list[str]:
    """Ids of the findings that can be seen."""
    return page.evaluate("[...document.querySelectorAll('.finding')].filter((f) => !f.hidden).map((f) => f.id)")


def in_view(target: Locator) -> bool:
    return target.evaluate(
        "(e) => { const r = e.getBoundingClientRect(); return r.top >= -1 && r.top < innerHeight && r.height > 0; }"
    )


# --- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["green", "red", "known", "trend", "hostile", "hostile-trend"])
def test_every_chart_has_marks_that_can_be_told_from_the_page(reader: Reader, pages: Pages, name):
    boxes = reader.page(pages[name]).locator("[data-chart]")
    assert boxes.count() >= (3 if "trend" in name else 7)
    for box in boxes.all():
        sizes = box.evaluate(
            "(box, marks) => [...box.querySelectorAll(marks)].map((m) => m.getBoundingClientRect())"
            ".map((r) => r.width + r.height)",
            MARKS,
        )
        # An interval of no width has no size.
        assert sum(size > 0 for size in sizes) >= 2, box.get_attribute("data-chart")
    # Text of axes and legends is as readable as the page's own (4.5:1 on its card, WCAG 2.2 1.4.3).
    for scheme in ("light", "dark"):
        assert reader.page(pages[name], scheme=scheme).evaluate(_CONTRAST) >= 4.5


_CONTRAST = """() => {
  const luminance = (rgb) => rgb.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  return Math.min(...[...document.querySelectorAll("[data-chart] svg text")].filter((t) => t.textContent).map((t) => {
    const ink = luminance(getComputedStyle(t).fill);
    const card = luminance(getComputedStyle(t.closest("figure")).backgroundColor);
    return (Math.max(ink, card) + 0.05) / (Math.min(ink, card) + 0.05);
  }));
}"""


def test_charts_follow_the_colour_scheme(reader: Reader, pages: Pages):
    text = "getComputedStyle(document.querySelector('[data-chart] svg text')).fill"
    light = reader.page(pages["red"]).evaluate(text)
    assert reader.page(pages["red"], scheme="dark").evaluate(text) != light


def test_detectable_effect_and_published_figures_stand_at_the_chart(reader: Reader, pages: Pages):
    page = reader.page(pages["green"])
    figure = page.locator("figure", has=page.locator("[data-chart='acceptance-eagle3']"))
    expect(figure).to_contain_text("Smallest detectable change")
    expect(figure).to_contain_text("pd-eagle3: one draft of")
    expect(figure).to_contain_text("published for the same models, with its tolerance (advisory)")
    expect(figure).to_contain_text("rates 0.7296 0.5208 0.3545")
    assert figure.locator("rect.band").count() >= 3


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "attribute"), [("cell", "pd-eagle3", "data-cell"), ("verdict", "UNKNOWN", "data-verdict")]
)
def test_filter_leaves_what_it_names(page: Page, field, value, attribute):
    everything = shown(page)
    page.locator(f"select[name={field}]").select_option(value)
    left = shown(page)
    assert 0 < len(left) < len(everything)
    for found in page.locator(".finding:not([hidden])").all():
        assert value in (found.get_attribute(attribute) or value).split(" ")
    expect(page.locator("#shown")).to_contain_text(f"{len(left)} of {len(everything)} groups of findings shown")
    page.get_by_role("button", name="show all").click()
    assert shown(page) == everything
    expect(page.locator("#shown")).to_have_text("")


def test_filters_narrow_each_other(page: Page):
    page.locator("select[name=cell]").select_option("pd-eagle3")
    page.locator("select[name=verdict]").select_option("UNKNOWN")
    assert shown(page) == []
    rows = page.locator("table.strip tr[data-cell]:not([hidden])")
    assert rows.count() == 0
    page.locator("select[name=verdict]").select_option("REGRESSION")
    assert rows.count() == 1
    assert len(shown(page)) > 0


def test_filter_works_by_keyboard(page: Page):
    everything = shown(page)
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "cell":
            break
    assert page.evaluate("document.activeElement.name") == "cell"
    page.keyboard.type("pd-d")
    page.keyboard.press("Tab")
    assert page.locator("select[name=cell]").input_value() == "pd-dflash"
    assert 0 < len(shown(page)) < len(everything)
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert shown(page) == everything


def test_charts_of_other_methods_are_hidden(page: Page):
    page.locator("select[name=cell]").select_option("pd-mtp")
    assert page.locator("[data-chart=acceptance-eagle3]").is_visible() is False
    assert page.locator("[data-chart=acceptance-mtp]").is_visible()
    page.get_by_role("button", name="show all").click()
    box = page.locator("[data-chart=acceptance-eagle3] svg.plot").bounding_box()
    assert box is not None and box["width"] > 200


def test_search_finds_words_of_prompts_and_of_findings(page: Page):
    everything = shown(page)
    page.get_by_role("searchbox").fill("aligned pd-eagle3 N=32")
    rows = page.locator("#table tbody tr")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("p32")
    page.get_by_role("searchbox").fill("tokens-baseline")
    assert 0 < len(shown(page)) < len(everything)
    page.get_by_role("searchbox").fill("no such words")
    expect(rows).to_have_count(0)
    assert shown(page) == []
    expect(page.locator("#shown")).to_contain_text("0 of ")
    expect(page.locator("#none")).to_have_text("None that the search and the filter leave.")


# --- the table of all prompts, and one prompt ----------------------------------------------------------------------


def column(page: Page, number: int) -> list[str]:
    return page.locator(f"#table tbody tr :nth-child({number})").all_inner_texts()


def test_table_is_sorted_by_its_headers(page: Page):
    assert "REGRESSION" in column(page, 6)[0]
    page.get_by_role("button", name="length").click()
    lengths = [int(n) for n in column(page, 4)]
    assert lengths == sorted(lengths)
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("length")
    page.get_by_role("button", name="length").click()
    assert [int(n) for n in column(page, 4)] == sorted(lengths, reverse=True) or int(column(page, 4)[0]) == 65
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("length")
    # The header keeps the focus, so that it can be pressed again.
    assert "length" in page.evaluate("document.activeElement.textContent")


def test_more_rows_are_shown_when_asked(page: Page):
    few = page.locator("#table tbody tr").count()
    page.get_by_role("button", name="more of").click()
    assert page.locator("#table tbody tr").count() == 32 > few
    assert page.get_by_role("button", name="more of").count() == 0


def test_state_of_the_page_is_its_address(page: Page, visitor: Visitor, pages: Pages):
    page.locator("select[name=cell]").select_option("pd-eagle3")
    page.get_by_role("searchbox").fill("cold")
    page.get_by_role("button", name="length").click()
    fragment = page.evaluate("location.hash")
    assert {"cell=pd-eagle3", "q=cold", "sort=length"} <= set(fragment[1:].split("&"))
    again = visitor.open(pages["red"], fragment)
    assert again.locator("select[name=cell]").input_value() == "pd-eagle3"
    assert again.get_by_role("searchbox").input_value() == "cold"
    assert column(again, 1) == column(page, 1) and shown(again) == shown(page)
    page.get_by_role("button", name="show all").click()
    assert page.evaluate("location.hash") == ""


def test_prompt_has_a_link_of_its_own(page: Page, visitor: Visitor, pages: Pages):
    assert page.locator("#prompt").is_visible() is False
    page.locator("#table tr", has_text="pd-eagle3").first.get_by_role("link").click()
    one = page.locator("#prompt")
    expect(one).to_be_visible()
    assert in_view(one)
    title = one.locator("h3").inner_text()
    assert "pd-eagle3" in title
    again = visitor.open(pages["red"], page.evaluate("location.hash"))
    assert again.locator("#prompt h3").inner_text() == title
    # The answer is a diff: what was expected and is missing, and what came instead.
    assert again.locator("#prompt .token.del").count() > 0
    assert again.locator("#prompt .token.ins").count() > 0
    again.get_by_text("The prompt, block by block").click()
    assert again.locator("#prompt .kv.hit").count() > 0
    again.get_by_role("link", name="next").click()
    expect(again.locator("#prompt h3")).not_to_have_text(title)
    again.get_by_role("link", name="previous").click()
    expect(again.locator("#prompt h3")).to_have_text(title)
    again.get_by_role("link", name="close").click()
    expect(again.locator("#prompt")).to_be_hidden()


def test_prompt_with_lost_drafts_shows_them_as_its_example_does(visitor: Visitor, pages: Pages):
    """The drafter of D lost its KV: the answer is right, and every draft is rejected."""
    page = visitor.open(pages["red"], "#p=pd-dflash%2Fcold%2Fids%2Fp40")
    strip, example = page.locator("#prompt .drafts"), page.locator(".cause .drafts").first
    assert strip.get_attribute("aria-label") == example.get_attribute("aria-label")
    texts = strip.locator("> span").all_inner_texts()
    assert [t.split() for t in texts[:3]] == [["expected", "found"], ["D"], ["1", "0"]]
    assert texts == example.locator("> span").all_inner_texts()
    assert strip.locator("+ .key").inner_text() == example.locator("+ .key").inner_text()
    assert strip.locator(".hit").count() > 3
    page.set_viewport_size(PHONE)
    edges = strip.evaluate("(s) => [...s.children].map((c) => c.getBoundingClientRect().right)")
    assert max(edges) <= PHONE["width"] and page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert float(strip.evaluate("(s) => getComputedStyle(s).fontSize").removesuffix("px")) >= 12


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_bar_at_the_top_covers_no_heading(page: Page, width):
    """It is higher where its fields need two lines, and where it says what is shown; on a phone it stays behind."""
    page.set_viewport_size({"width": width, "height": 900})
    for cell in ("", "pd-eagle3"):
        page.locator("select[name=cell]").select_option(cell)
        page.locator("#table tbody a").first.click()
        expect(page.locator("#prompt")).to_be_visible()
        assert below_the_bar(page, "#prompt h3"), cell
        page.locator("#prompt").get_by_role("link", name="close").click()
        page.locator("nav").get_by_role("link", name="Prompts").click()
        assert below_the_bar(page, "#prompts"), cell


def below_the_bar(page: Page, heading: str) -> bool:
    return page.evaluate(
        """(heading) => {
          const top = document.querySelector(heading).getBoundingClientRect().top;
          const bar = document.getElementById("filter").getBoundingClientRect();
          return top >= Math.max(bar.bottom, 0) && top < innerHeight / 2;
        }""",
        heading,
    )


def test_link_to_a_request_of_another_run_says_so(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["red"], "#p=pd-eagle3%2Fcold%2Fids%2Fother")
    expect(page.locator("#prompt")).to_contain_text("no such request: pd-eagle3/cold/ids/other")


def test_length_leads_to_its_prompts(page: Page):
    page.locator(".heat tr[data-cell=pd-eagle3]").get_by_role("link", name="65 tokens").click()
    rows = page.locator("#table tbody tr")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("p65")
    assert in_view(page.locator("#prompts"))


# --- links -----------------------------------------------------------------------------------------------------------


def test_every_finding_has_a_link_that_opens_at_it(visitor: Visitor, pages: Pages):
    ids = shown(visitor.open(pages["red"]))
    assert len(ids) >= 5
    for found in (ids[0], ids[-1]):
        page = visitor.open(pages["red"], f"#{found}")
        assert in_view(page.locator(f"[id='{found}']"))


def test_link_reveals_what_is_filtered_away(page: Page):
    hidden = page.locator(".finding[data-cell=pd-eagle3]").first.get_attribute("id")
    page.locator("select[name=cell]").select_option("pd-none")
    assert hidden not in shown(page)
    page.evaluate("(id) => { location.hash = id; }", hidden)
    expect(page.locator(f"[id='{hidden}']")).to_be_visible()
    assert in_view(page.locator(f"[id='{hidden}']"))
    assert page.locator("select[name=cell]").input_value() == ""


def test_link_opens_closed_details(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["green"])
    details = page.locator("[id='cell-pd-none']")
    assert details.evaluate("(e) => e.open") is False
    page.get_by_role("link", name="pd-none").click()
    expect(details).to_have_attribute("open", "")
    assert in_view(details)


def test_finding_inside_closed_details_is_revealed(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["known"])
    target = page.locator("details:not([open]) .finding").last.get_attribute("id")
    page = visitor.open(pages["known"], f"#{target}")
    expect(page.locator(f"[id='{target}']")).to_be_visible()
    assert in_view(page.locator(f"[id='{target}']"))


@pytest.mark.parametrize("fragment", ["#finding-of-another-run", "#%E0%A4%A", "#", "#%00"])
def test_odd_fragment_breaks_nothing(visitor: Visitor, pages: Pages, fragment):
    page = visitor.open(pages["red"], fragment)
    expect(page.locator("#findings")).to_be_visible()
    assert page.locator("#table tbody tr").count() > 3


def test_links_inside_the_page_have_their_place(reader: Reader, pages: Pages):
    for name in ("green", "red", "known", "hostile", "trend", "hostile-trend"):
        lost = reader.page(pages[name]).evaluate(
            "[...document.querySelectorAll('a[href^=\"#\"]')].map((a) => a.hash.slice(1))"
            ".filter((id) => !id.includes('=') && !document.getElementById(decodeURIComponent(id)))"
        )
        assert lost == [], name


def test_copy_button_copies_the_line(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["red"], permissions=["clipboard-read", "clipboard-write"])
    line = page.locator(".repro").first
    line.get_by_role("button").click()
    expect(line.get_by_role("button")).to_have_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == line.locator("code").text_content()
    assert "harness repro" in (line.locator("code").text_content() or "")


def test_copy_button_works_where_the_clipboard_is_refused(page: Page):
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }")
    copied = page.evaluate_handle(
        "() => { const seen = []; document.addEventListener('copy', () => seen.push(String(getSelection()) || "
        "document.activeElement.value)); return seen; }"
    )
    line = page.locator(".repro").first
    line.get_by_role("button").click()
    expect(line.get_by_role("button")).to_have_text("copied")
    assert copied.json_value() == [line.locator("code").text_content()]


def test_nights_link_to_their_reports(visitor: Visitor, pages: Pages):
    for name in ("trend", "hostile-trend"):
        page = visitor.open(pages[name])
        links = page.evaluate("[...document.querySelectorAll('tbody td a')].map((a) => a.href)")
        # The first night has no report.
        assert len(links) == page.locator("tbody tr[id^=run-]").count() - 1
        titles = []
        for link in links:
            opened = page.context.new_page()
            opened.goto(link)
            titles.append(opened.title())
        assert titles == [f"night {i}" for i in range(1, len(links) + 1)]


def test_point_of_a_night_opens_its_report(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["trend"])
    points = page.locator("[data-chart=trend-eagle3] a .dot")
    last = points.nth(points.count() - 1)
    last.scroll_into_view_if_needed()
    box = last.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url("**/report.html")
    assert page.title().startswith("night ")
    visitor.problems.clear()


def test_self_test_and_aa_beside_the_run_are_panels(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["green"])
    page.get_by_role("heading", name="Self-test and A/A").click()
    panel = page.locator("#selftest")
    expect(panel).to_contain_text("not every fault caught")
    panel.get_by_text("Kill matrix").click()
    expect(panel.get_by_role("row").nth(1)).to_be_visible()
    assert panel.get_by_role("link").first.evaluate("(a) => a.href").endswith("/selftest/report.html")
    expect(page.locator("#aa")).to_contain_text("1 false alarm")
    page.locator("#aa summary").click()
    expect(page.locator("#aa")).to_contain_text("1 REGRESSION")


def test_prompt_shows_both_sides_of_the_hand_off(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["red"], "#p=pd-eagle3%2Fcold%2Fids%2Fp32")
    one = page.locator("#prompt")
    expect(one).to_contain_text("gap between the two best tokens there 9.000 nats")
    one.get_by_text("The hand-off").click()
    for text in ("remote_num_tokens", "NIXL bytes", "NIXL descriptors", "prompt tokens from P"):
        expect(one).to_contain_text(text)
    expect(one).to_contain_text("prompt tokens from its own prefix cache")


def test_raw_files_are_linked(reader: Reader, pages: Pages):
    links = (
        reader.page(pages["red"]).locator(".files a").evaluate_all("(all) => all.map((a) => a.getAttribute('href'))")
    )
    assert {"./run.json", "./judgement.json", "./junit.xml", "./logs/pd-mtp.decode.log"} <= set(links)


@pytest.mark.parametrize(("name", "screens"), [("green", 3), ("known", 3), ("red", 10)])
def test_page_is_short(visitor: Visitor, pages: Pages, name, screens):
    page = visitor.open(pages[name], viewport={"width": 1300, "height": 900})
    assert page.evaluate("document.documentElement.scrollHeight") <= screens * 900


# --- without scripts, on a phone, on paper ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["green", "red", "hostile", "compare", "trend"])
def test_page_can_be_read_without_scripts(visitor: Visitor, pages: Pages, name):
    page = visitor.open(pages[name], java_script_enabled=False)
    for heading in page.locator("h1, h2").all():
        expect(heading).to_be_visible()
    # A control that does nothing is not shown; a chart says in words what it shows.
    assert page.locator("select:visible, button:visible, input:visible").count() == 0
    # Charts need no script.
    charts = page.locator("[data-chart]")
    if name != "compare":
        expect(charts.first.locator("svg.plot")).to_be_visible()
    if name == "red":
        card = page.locator(".cause", has=page.locator("p.diff")).first
        expect(card.locator(".diff").first).to_be_visible()
        card.locator("details summary").last.click()
        expect(card.locator(".finding").first).to_be_visible()
        expect(page.locator("noscript a")).to_be_visible()


@pytest.mark.parametrize(
    "name", ["green", "red", "known", "hostile", "compare", "hostile-compare", "trend", "hostile-trend"]
)
def test_page_is_no_wider_than_the_window(reader: Reader, pages: Pages, name):
    for size in (DESKTOP, PHONE):
        assert reader.page(pages[name], size).evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_both_runs_of_a_comparison_fit_on_a_phone(reader: Reader, pages: Pages):
    """The second one lay beyond the edge."""
    page = reader.page(pages["compare"], PHONE)
    for table in page.locator(".scroll").all():
        assert table.evaluate("(t) => t.scrollWidth <= t.clientWidth")


def test_paper_shows_everything_but_controls(visitor: Visitor, pages: Pages):
    page = visitor.open(pages["red"], color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator("nav:visible, button:visible, select:visible").count() == 0
    assert page.locator(".finding:visible").count() == page.locator(".finding").count()
    # What is folded on the screen is unfolded on paper.
    heights = page.evaluate(
        "[...document.querySelectorAll('details:not([open]) table')].map((t) => t.getBoundingClientRect().height)"
    )
    assert len(heights) > 3 and min(heights) > 0
    # Dark schemes are for screens: on paper, ink is dark, in charts too.
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 253)"
    assert page.evaluate(_CONTRAST) >= 4.5


def test_paper_says_what_was_filtered_away(page: Page):
    page.locator("select[name=cell]").select_option("pd-eagle3")
    page.emulate_media(media="print")
    expect(page.locator("#shown")).to_be_visible()
    expect(page.locator("#shown")).to_contain_text("cell pd-eagle3")
