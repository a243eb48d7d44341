"""Reports of hand-made runs: hostile text stays inert, formats are well formed, every verdict is shown."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.reports.cause_words import sentence_of
from harness.reports.html import render_html
from harness.reports.judge_run import judgement_json, linked_from
from harness.reports.junit import render_junit
from harness.reports.markdown import code, plain_cell, render_markdown
from harness.reports.prompts import PromptRow
from harness.reports.selftest_result import Kill
from harness.reports.summary import RunSummary, summarise_run
from harness.reports.terminal import print_summary
from harness.util.files import write_json
from tests.support.builders import (
    CELLS,
    LAYERS,
    LENGTHS,
    change_final,
    flawless,
    garbled,
    history,
    lookups,
    observation,
    summarised,
    with_profile,
)
from tests.support.pages import Page, printed
from tests.support.self_tests import self_test

HOSTILE = "</pre><script>alert(1)</script>\"'&\x00\x1b[31m‮ | `x` " + "y" * 500


def summarise(observations: list) -> RunSummary:
    return summarised(history(observations, CELLS))


@pytest.fixture
def bad() -> RunSummary:
    changed = [garbled(o) if o.cell == "pd-eagle3" and len(o.sent_ids) == 32 else o for o in flawless()]
    changed.append(observation("pd-mtp", 64, error=HOSTILE))
    return summarise(changed)


def found_in_pair(summary: RunSummary) -> PromptRow:
    """The first request of pd-eagle3 with a finding."""
    return next(r for r in summary.prompts.rows if r.place[0] == "pd-eagle3" and r.findings)


def scenario_run(mutants: tuple[str, ...] = ()) -> RunSummary:
    """A pair whose prefix-hit scenario gave another prompt's tokens."""
    raw = {"id": "hit", "kind": "prefix-hit", "where": "decode", "pairs": [{"donor": "p96", "subject": "p96"}]}
    donor = observation("pd-none", 96, scenario="hit", part="donor", sequence=1)
    subject = observation("pd-none", 96, scenario="hit", part="subject", sequence=2)
    moved = {"prefix_hits": 64.0, "prompt_tokens_external_kv_transfer": 32.0, "nixl_bytes": LAYERS["none"] * 32768.0}
    subject = garbled(change_final(subject, counters={**subject.final.counters, **moved}), at=40)
    h = history([observation("pd-none", 96), donor, subject], scenarios=[raw], mutants=mutants)
    return summarise_run(h, judge(h, lookups([96])))


def test_scenarios_and_diagnoses_are_shown_everywhere():
    summary = scenario_run()
    assert summary.scenario_grid["pd-none"] == {"cold": Verdict.PASS, "hit": Verdict.REGRESSION}
    html, markdown = render_html(summary), render_markdown(summary)
    assert 'id="cell-pd-none-hit"' in html and "wrong KV of the target" in html
    assert "prompt position 42 in block 1" in html
    assert "✘ REGRESSION (hit)" in markdown and "in hit: wrong KV of the target" in markdown
    suites = {s.get("name"): s for s in ET.fromstring(render_junit(summary)).findall("testsuite")}
    assert suites["pd-none"].get("failures") == "0" and suites["pd-none.hit"].get("failures") == "1"
    text = printed(print_summary, summary)
    assert "pd-none in hit" in text and "block 1" in text


def test_injected_mutant_is_stamped_on_every_report():
    summary = scenario_run(("M5b",))
    shown = printed(print_summary, summary)
    for text in (render_html(summary), render_markdown(summary), render_junit(summary), shown):
        assert "INJECTED FAULT M5b" in text


def test_injected_fault_is_louder_than_other_notices():
    """A list of known defects that is not there matters less than that the run says nothing about vLLM."""
    summary = scenario_run(("M5b",))
    missing = "there is no list of expected failures known-defects.yaml, so no finding is expected"
    said = summary.judgement.model_copy(update={"notices": (missing, *summary.judgement.notices)})
    html = render_html(summary._replace(judgement=said))
    loud = re.findall(r'<p class="alarm">(.*?)</p>', html)
    assert len(loud) == 1 and "INJECTED FAULT M5b" in loud[0]
    assert f"<p><strong>Notice:</strong> <bdi>{missing}</bdi></p>" in html
    assert html.index(loud[0]) < html.index(missing)
    markdown = render_markdown(summary._replace(judgement=said))
    assert re.findall(r"^\*\*(.*)\*\*$", markdown, re.MULTILINE) == [
        n for n in said.notices if n.startswith("INJECTED")
    ]


def test_passing_report_names_every_cell_and_needs_no_network():
    html = render_html(summarise(flawless()))
    assert all(cell in html for cell in CELLS)
    assert "PASS" in html
    page = Page(html)
    page.require_inert()
    assert not [a for t, a in page.elements if t == "a" and (a["href"] or "").startswith("http")]


def test_hostile_text_is_inert_everywhere(bad):
    html = render_html(bad)
    Page(html).require_inert()
    assert "&lt;script&gt;" in html
    assert "<script>" in "".join(ET.fromstring(render_junit(bad)).itertext())
    markdown = render_markdown(bad)
    assert "<script>" not in markdown
    assert max(map(len, markdown.splitlines())) < 700


def test_junit_counts_failures_and_errors(bad):
    root = ET.fromstring(render_junit(bad))
    failures, errors = root.findall(".//failure"), root.findall(".//error")
    assert root.get("failures") == str(len(failures)) != "0"
    assert root.get("errors") == str(len(errors)) != "0"
    assert {e.get("type") for e in errors} == {"UNKNOWN"}
    assert {f.get("type") for f in failures} == {"REGRESSION"}


def test_exposure_is_there_for_machines(bad):
    exposure = judgement_json(bad)["exposure"]
    assert exposure["sentence"] == bad.exposure.sentence
    assert exposure["answers"] == bad.exposure.answers > exposure["handed_off"] > 0
    assert f"a bug that hits 1 in {exposure['excludes_one_in']} requests" in exposure["sentence"]
    (told,) = ET.fromstring(render_junit(bad)).findall("./testsuite[1]/properties/property")
    assert told.attrib == {"name": "exposure", "value": bad.exposure.sentence}
    nothing = judgement_json(summarise([observation("pd-mtp", 64, error="broke")]))["exposure"]
    assert (nothing["answers"], nothing["excludes_one_in"]) == (0, None)


def test_divergence_is_shown_side_by_side(bad):
    html = render_html(bad)
    assert re.search(r'<p class="diff"[^>]*>.*class="del".*class="ins".*</p>', html, re.DOTALL)
    assert "p32" in html and "harness repro" in html


def test_charts_have_data_words_and_a_table():
    summary = summarise(flawless())
    page = Page(render_html(summary))
    boxes = {a["data-chart"] or "": a["aria-label"] or "" for _, a in page.elements if "data-chart" in a}
    assert {i.split("-")[0] for i in boxes} == {"acceptance", "steps", "survival"}
    rates = {p.side: p.rate for p in summary.figures.positions if (p.method, p.position) == ("eagle3", 0)}
    assert {"pd-eagle3", "single-eagle3"} <= rates.keys()
    assert all(f"{side} ({100 * rate:.1f} %" in boxes["acceptance-eagle3"] for side, rate in rates.items())
    assert boxes["survival-none"].endswith("at the end pd-none 100 %, single-none 100 %")
    assert sum(t == "svg" and a.get("class") == "plot" for t, a in page.elements) == len(boxes)
    points = [a for t, a in page.elements if t == "path" and "dot" in (a.get("class") or "")]
    assert len(points) > len(summary.figures.positions)


def test_survival_falls_where_the_output_leaves_the_record(bad):
    shares = {s.token: s.share for s in bad.figures.survival if s.cell == "pd-eagle3"}
    assert shares[0] == 1.0 and min(shares.values()) == 0.75


def test_anchors_are_unique_and_every_link_has_its_place(bad):
    page = Page(render_html(bad))
    assert len(set(page.ids)) == len(page.ids)
    inside = [(a["href"] or "")[1:] for t, a in page.elements if t == "a" and (a["href"] or "").startswith("#")]
    assert {unquote(i) for i in inside if "=" not in i} <= set(page.ids)
    # The others are states of the table: each names something that it can show.
    states = [parse_qs(i) for i in inside if "=" in i]
    assert {s["p"][0] for s in states if "p" in s} <= {"/".join(r.place) for r in bad.prompts.rows}
    assert {s["cell"][0] for s in states if "cell" in s} <= set(CELLS)
    assert len(states) > len(CELLS)


def test_run_beside_a_self_test_shows_its_kill_matrix(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "broken").mkdir()
    write_json(tmp_path / "test" / "selftest.json", self_test([Kill.KILLED], [Verdict.PASS]).model_dump(mode="json"))
    (tmp_path / "broken" / "selftest.json").write_text("{")
    summary = summarise(flawless())
    summary = summary._replace(history=summary.history.model_copy(update={"folder": tmp_path / "run"}))
    assert "newest self-test" in render_html(summary)


def test_logs_of_cells_that_could_not_be_judged_are_quoted(bad, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "pd-mtp.decode.log").write_text("one\n" + HOSTILE)
    html = render_html(bad._replace(history=bad.history.model_copy(update={"folder": tmp_path})))
    Page(html).require_inert()
    assert "last lines of <bdi>pd-mtp.decode.log</bdi>" in html


def test_grid_marks_the_stratum_of_the_damage(bad):
    strata = bad.prompts.by_stratum["pd-eagle3"]
    assert strata["aligned"].verdict == "REGRESSION"
    assert strata["middle"].verdict == "PASS"
    assert bad.equal_tokens["pd-eagle3"] == "3/4" and bad.equal_tokens["pd-none"] == "4/4"


def test_strata_and_lengths_say_the_same_of_right_tokens_without_evidence():
    """Without a baseline nothing is compared in the reference cell, and only tokens in the others: no tick is green."""
    html = render_html(summarised(history(flawless(), CELLS), {}))
    grid = html[: html.index('id="lengths"')]
    rows = {cell: grid.split(f'<tr data-cell="{cell}"')[1].split("</tr>")[0] for cell in ("single-none", "pd-eagle3")}
    assert "✔" not in "".join(rows.values())
    assert 'title="not compared">– ' in rows["single-none"] and 'title="UNKNOWN">= ' in rows["pd-eagle3"]


def test_scenarios_that_fail_are_the_first_columns():
    summary = scenario_run()
    summary = summary._replace(
        scenarios=["quiet", "hit"], scenario_grid={"pd-none": {"quiet": Verdict.PASS, "hit": Verdict.DRIFT}}
    )
    html = render_html(summary)
    head = html[html.index('id="cells"') :]
    assert head.index("<bdi>hit</bdi>") < head.index("<bdi>quiet</bdi>")


def test_baseline_is_of_the_prompts_that_the_cells_were_sent():
    h = history([o for o in flawless() if len(o.sent_ids) != 32], CELLS)
    rates = {}
    for lengths in (LENGTHS, [n for n in LENGTHS if n != 32]):
        figures = summarised(h, lookups(lengths)).figures
        rates[len(lengths)] = [p for p in figures.positions if p.side == "baseline"]
    assert rates[len(LENGTHS)] == rates[len(LENGTHS) - 1] != []


def test_commands_in_messages_are_code_on_the_page():
    summary = scenario_run()
    said = summary.judgement.model_copy(update={"notices": ("run `harness plan <b>`, not `<i>`",)})
    assert "run <code>harness plan &lt;b&gt;</code>, not `&lt;i&gt;`" in render_html(summary._replace(judgement=said))


def test_causes_are_the_same_in_every_report_and_the_gravest_comes_first(bad):
    assert [c.verdict for c in bad.causes] == ["REGRESSION", "UNKNOWN"]
    first = sentence_of(bad.causes[0])
    assert first == "pd-eagle3: wrong KV of the target after a hand-off; 1 of 4 answers with wrong tokens"
    (failure,) = {e.get("message") for e in ET.fromstring(render_junit(bad)).iter("failure")}
    assert failure == f"{first} ({bad.causes[0].count} findings in all)"
    for text in (printed(print_summary, bad), render_html(bad)):
        assert first in " ".join(text.split())
    assert f"**REGRESSION** {plain_cell(first)}" in render_markdown(bad)


def test_command_that_shows_a_cause_again_stands_where_ci_shows_it(bad):
    command = bad.causes[0].command
    assert command == bad.repro == "harness repro run pd-eagle3/tokens-reference/p32/ids"
    assert f"  - reproduce: `{command}`" in render_markdown(bad).splitlines()
    failures = list(ET.fromstring(render_junit(bad)).iter("failure"))
    assert failures and all(f"reproduce: {command}" in (e.text or "").splitlines() for e in failures)
    assert bad.next_step == f"reproduce it: {command}"
    # On the page it stands in the card, right below.
    assert command in render_html(bad) and 'id="next"' not in render_html(bad)
    # Missing evidence cannot be shown again.
    errors = list(ET.fromstring(render_junit(bad)).iter("error"))
    assert errors and not any("harness repro" in (e.text or "") for e in errors)


def test_card_says_what_a_run_has_without_its_injected_fault(bad):
    (cause, *_) = bad.causes
    html = render_html(bad._replace(causes=[replace(cause, anyway="some-defect")]))
    assert "expected without the injected fault, too <code>some-defect</code>" in html


def test_code_in_a_summary_cannot_end_early():
    assert code("harness repro x") == "`harness repro x`"
    assert code("a `b`\nc") == "``a `b` c``" and code("`") == "`` ` ``"


def test_summary_is_short_even_for_a_catastrophe():
    text = render_markdown(summarise([change_final(o, output_ids=(9,)) for o in flawless()]))
    assert len(text.splitlines()) <= 60
    assert text.startswith("# ✘ REGRESSION")


# --- what a run could see, and the hand-off --------------------------------------------------------------------------


def test_smallest_change_is_said_for_every_kind_of_comparison():
    """Exact comparisons, none without a baseline, and none where nothing could be compared."""
    seen = {s.cell: s.text for s in summarise(flawless()).figures.smallest_changes}
    steps = sum(len(o.final.speculation.per_step_accepted) for o in flawless() if o.cell == "single-mtp")
    assert seen["single-mtp"].startswith(f"one draft of {steps} steps ({100 / steps:.2f} points)")
    h = history(flawless(), CELLS)
    alone = summarised(h, {})
    assert {s.text for s in alone.figures.smallest_changes} == {"unknown, because there is no baseline to compare with"}
    found = summarised(with_profile(h, judging={"tier": "normal"})).figures.smallest_changes
    assert not [s for s in found if "one draft" in s.text]


def test_counters_that_stood_still_are_told_from_those_never_read(bad):
    """D's prefix cache gave nothing, which is not the same as not knowing."""
    p, d = (dict(side.facts) for side in found_in_pair(bad).sides)
    assert p["handed over: remote_block_ids"] == "[[1]]"
    assert d["counted: NIXL bytes"] == "131,072" and d["counted: prompt tokens from P"] == "32"
    assert d["counted: prompt tokens from its own prefix cache"] == "0"
    unread = [
        change_final(garbled(o), counters={}) if o.cell == "pd-eagle3" and len(o.sent_ids) == 32 else o
        for o in flawless()
    ]
    assert dict(found_in_pair(summarise(unread)).sides[1].facts) == {"counted": "not read for this request"}


def test_counters_of_requests_that_ran_together_say_so():
    together = [
        change_final(garbled(o), counters={}).model_copy(
            update={"concurrent": 6, "shared_counters": {"decode": {"nixl_bytes": 500.0}}}
        )
        if o.cell == "pd-eagle3" and len(o.sent_ids) == 32
        else o
        for o in flawless()
    ]
    facts = dict(found_in_pair(summarise(together)).sides[1].facts)
    assert facts["counted: NIXL bytes (of 6 concurrent requests)"] == "500"


def test_page_in_another_folder_links_to_what_lies_beside_the_run(tmp_path: Path):
    run, out = tmp_path / "runs" / "a b", tmp_path / "pages"
    page = '<a href="#x"><a href="../self/report.html"><a href="https://e.org/"><script>\'<a href="y">\'</script>'
    # The reports beside the page are its own; those in the run may be of another verdict.
    page = '<a href="./judgement.json"><a href="./junit.xml">' + page
    assert linked_from(run, run, page) == page
    assert linked_from(out, run, page) == page.replace('"../self', '"../runs/a%20b/../self')
