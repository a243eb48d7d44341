"""Of very many findings some are listed and all are counted; nothing that is concluded from them changes."""

from __future__ import annotations

from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.history.verdict import Verdict, worst
from harness.judging.checks import aggregation as module
from harness.judging.checks.aggregation import listed, most_listed
from harness.judging.checks.registry import judge
from harness.judging.figures import TokenDifference
from harness.judging.findings import CellVerdict, CheckResult, Finding, Judgement, conclude, how_many
from harness.judging.known_defects import apply_known, covering
from harness.profiles.known_defects import Entry, KnownDefect, KnownDefects
from harness.reports.causes import causes_of
from harness.reports.junit import render_junit
from harness.reports.summary import describe, summarise_run
from tests.support.builders import evidence_of_test, finding, garbled, history, known_entry, observation

CELL = "pd-eagle3"
STRATA = ("aligned", "short", "other", None)
RUN = history([observation(CELL)])


def defect(**changes: object) -> KnownDefect:
    changes |= {"vllm": ">=0", "added": date(2026, 1, 1), "expires": date(2026, 3, 1)}
    return KnownDefect.model_validate(known_entry(**changes))


def other_tokens(position: int) -> TokenDifference:
    """Other tokens from the first, the second or the last one of three on."""
    tokens = {"found": (1,), "expected": (2,), "differing_tokens": 1, "output_tokens": 3}
    return TokenDifference(position=position, reference_gap_nats=None, window_start=0, **tokens)


_findings = st.builds(
    lambda number, verdict, damage, stratum, changed: finding(
        CELL,
        f"p{number}" if stratum else None,
        verdict=verdict,
        damage=damage,
        message=f"finding {number}",
        stratum=stratum,
        evidence=evidence_of_test(changed) if stratum is None else other_tokens(number % 3),
    ),
    st.integers(0, 99),
    st.sampled_from([Verdict.REGRESSION, Verdict.UNKNOWN, Verdict.DRIFT, Verdict.IMPROVED]),
    st.sampled_from(["target-kv", "drafter-kv", "nothing-tested"]),
    st.sampled_from(STRATA),
    st.lists(st.sampled_from(["aligned@0", "short@1", "all"]), max_size=2),
)
_defects = st.builds(
    lambda number, classes, strata, cells, at_most, narrow: defect(
        id=f"defect-{number}",
        classes=classes,
        cells=[cells],
        strata=strata,
        scenarios=["cold"],
        at_most=at_most,
        **narrow,
    ),
    st.integers(0, 3),
    st.sets(st.sampled_from(["target-kv", "drafter-kv"]), min_size=1),
    st.sets(st.sampled_from(["*", "aligned", "short", "all"]), min_size=1),
    st.sampled_from(["*", CELL, "single-*"]),
    st.integers(1, 80),
    st.sampled_from([{}, {"runs_on": True}, {"prompts": ["p1*"]}, {"parameters": ["n"]}]),
)


def judged(cell: CellVerdict) -> Judgement:
    return Judgement(run_id="r", verdict=cell.verdict, cells=(cell,))


def of(findings: list[Finding]) -> CellVerdict:
    result = conclude("tokens-reference", CELL, len(findings), findings)
    return CellVerdict(cell=CELL, verdict=result.verdict, results=(result,))


@settings(max_examples=60)
@given(st.lists(_findings, min_size=1, max_size=60), st.lists(_defects, max_size=3), st.integers(1, 12))
def test_no_verdict_count_or_known_defect_depends_on_how_many_are_listed(findings, defects, most):
    whole = of(findings)
    known = KnownDefects(Path("known-defects.yaml"), tuple({d.id: Entry(d, 1, 2) for d in defects}.values()))
    covered = covering(known, RUN)
    some = listed(whole, most, covered)
    before, after = (apply_known(judged(c), known, RUN) for c in (whole, some))
    assert after.verdict == before.verdict and after.cells[0].verdict == before.cells[0].verdict
    assert after.notices == before.notices
    causes = [causes_of(RUN, judgement, {}) for judgement in (before, after)]
    assert describe(RUN, after, causes[1]) == describe(RUN, before, causes[0])
    said = [[(c.damage, c.known, c.count, list(c.cells), c.strata) for c in some] for some in causes]
    assert said[1] == said[0]
    per_known = [Counter(), Counter()]
    for counter, judgement in zip(per_known, (before, after), strict=True):
        for f in judgement.findings:
            counter[f.known, f.verdict, f.damage, f.stratum] += 1 + f.others
    assert per_known[0] == per_known[1]
    kinds = len({(f.verdict, f.damage, f.stratum, f.changed, covered(f)) for f in findings})
    assert len(some.results[0].findings) <= max(most, kinds)
    assert some.results[0].found == len(findings)
    assert ("not listed" in some.results[0].note) == (len(some.results[0].findings) < len(findings))


def test_a_single_uncovered_finding_at_the_end_still_fails_the_run():
    many = [aligned(number) for number in range(500)]
    last = finding(CELL, "p500", stratum="short")
    one = defect(cells=["*"], strata=["aligned"], at_most=500)
    known = KnownDefects(Path("known-defects.yaml"), (Entry(one, 1, 2),))
    only = apply_known(judged(listed(of(many), 5)), known, RUN)
    assert only.verdict is Verdict.KNOWN and any("500 findings" in n for n in only.notices)
    judgement = apply_known(judged(listed(of([*many, last]), 5)), known, RUN)
    assert judgement.verdict is Verdict.REGRESSION
    assert how_many(judgement.findings) == 501 and len(judgement.findings) == 5
    assert worst(f.verdict for f in judgement.findings) is Verdict.REGRESSION


@pytest.mark.parametrize("narrow", [{"runs_on": True}, {"prompts": ["p[01]??"]}])
def test_what_a_known_defect_does_not_cover_is_not_counted_with_what_it_covers(narrow):
    """However alike their messages are."""
    covered_by_it = [aligned(n, "output token 2 is 1", evidence=other_tokens(2)) for n in range(100, 200)]
    others = [aligned(n, "output token 0 is 1", evidence=other_tokens(0)) for n in range(200, 220)]
    one = defect(cells=["*"], at_most=500, **narrow)
    known = KnownDefects(Path("known-defects.yaml"), (Entry(one, 1, 2),))
    some = listed(of([*covered_by_it, *others]), 5, covering(known, RUN))
    judgement = apply_known(judged(some), known, RUN)
    assert judgement.verdict is Verdict.REGRESSION and len(judgement.findings) == 5
    assert how_many(f for f in judgement.findings if f.known) == len(covered_by_it)


def aligned(number: int, message: str = "other tokens", **changes: object) -> Finding:
    return finding(CELL, f"p{number}", message=message, stratum="aligned", **changes)


def test_a_lost_reference_gives_few_records_and_true_counts(monkeypatch: pytest.MonkeyPatch):
    """The reference cell of the variant failed: each request of the others has a finding in two checks."""
    prompts = range(40, 120)
    lost = [observation("single-none", 40).model_copy(update={"error": "the engine died"})]
    run = history([*lost, *(observation("pd-none", n) for n in prompts)])
    monkeypatch.setattr(module, "_MOST", 10)
    judgement = judge(run, {})
    (result,) = (r for c in judgement.cells for r in c.results if r.check == "tokens-reference")
    assert result.verdict is Verdict.UNKNOWN and judgement.verdict is Verdict.UNKNOWN
    assert len(result.findings) <= 10 and result.found == len(prompts)
    assert f"{len(prompts) - len(result.findings)} of {len(prompts)} findings are counted" in result.note
    summary = summarise_run(run, judgement)
    (group,) = (g for c in summary.causes for g in c.groups if g[0].check == "tokens-reference")
    assert group[1] == len(prompts)
    assert f"and {len(prompts) - 1} more findings" in render_junit(summary)


def test_how_many_requests_gave_the_recorded_tokens_is_of_all(monkeypatch: pytest.MonkeyPatch):
    prompts = range(40, 80)
    wrong = [garbled(observation("pd-none", n), at=0) for n in prompts]
    run = history([*(observation("single-none", n) for n in prompts), *wrong])
    monkeypatch.setattr(module, "_MOST", 5)
    judgement = judge(run, {})
    assert summarise_run(run, judgement).equal_tokens["pd-none"] == f"0/{len(prompts)}"
    assert len(judgement.findings) < len(prompts) < how_many(judgement.findings)


def test_small_results_stay_as_they_are():
    cell = of([aligned(n) for n in range(52)])
    assert listed(cell, most_listed(12)) == cell
    assert (most_listed(1), most_listed(1000), most_listed(10**6)) == (100, 20, 5)
    assert CheckResult.model_validate(cell.results[0].model_dump(mode="json")).found == 52


def test_second_fault_with_the_same_verdict_is_listed_too():
    many = [aligned(n, f"expected usage to count {n} tokens, found {n + 1}") for n in range(200)]
    whole = of([*many, aligned(200, "a step accepts more drafts than it made: 4 of 3")])
    (result,) = listed(whole, 5).results
    assert len(result.findings) == 5 and result.found == 201
    assert any("a step accepts more drafts than it made" in f.message for f in result.findings)


def test_sentences_that_quote_the_request_are_one_kind():
    broke = {"verdict": Verdict.UNKNOWN, "damage": "infrastructure"}
    many = [aligned(n, f"the exchange broke: {chr(97 + n % 26)}{chr(97 + n // 26)}", **broke) for n in range(300)]
    (result,) = listed(of(many), 5).results
    assert len(result.findings) == 5 and result.found == 300
