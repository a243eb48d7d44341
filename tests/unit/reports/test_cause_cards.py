"""One cause per defect, whatever cells, scenarios and checks show it; and what was not tested apart from what broke."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.figures import AcceptanceFigures, IncompleteCell, RatesFigures
from harness.judging.findings import CellVerdict, CheckResult, Diagnosis, Finding, Judgement, Law
from harness.reports.cause_words import detail_of, headline_of, sentence_of
from harness.reports.causes import Cause, causes_of, consequences, group_key
from harness.reports.html import render_html
from harness.reports.prompts import Place, place_of, prompts_of
from harness.reports.summary import RunSummary
from tests.support import builders, runs
from tests.support.builders import flawless, garbled, history, summarised, with_cells, with_run
from tests.support.pages import Page

LAW = Law(
    text="fails if and only if N mod 32 = 0; 4 of 32 residues were tested",
    residues=(0,),
    modulus=32,
    tested=(0, 1, 8, 31),
)
FEWER = Law(
    text="fails if and only if N mod 32 = 0; 2 of 32 residues were tested", residues=(0,), modulus=32, tested=(0, 1)
)
OTHER = Law(
    text="fails if and only if N mod 32 = 1; 4 of 32 residues were tested",
    residues=(1,),
    modulus=32,
    tested=(0, 1, 8, 31),
)


RUN = history([])


def finding(cell: str, prompt: str | None = "p32", law: Law | None = None, **changes) -> Finding:
    return builders.finding(cell, prompt, law=law.text if law else None, **changes)


def view(*findings: Finding, law: Law | None = None) -> CellVerdict:
    first = findings[0]
    diagnosis = Diagnosis(damage=first.damage, failed=1, judged=4, law=law, text="in words")
    results = tuple(
        CheckResult(check=f.check, cell=f.cell, verdict=f.verdict, judged=4, findings=(f,)) for f in findings
    )
    return CellVerdict(
        cell=first.cell, scenario=first.scenario, verdict=first.verdict, diagnosis=diagnosis, results=results
    )


def causes(*views: CellVerdict, lengths: dict[Place, int] | None = None) -> list[Cause]:
    judgement = Judgement(run_id="r", verdict=Verdict.REGRESSION, cells=views)
    known = {place_of(f): 32 for f in judgement.findings}
    return causes_of(RUN, judgement, {**known, **(lengths or {})})


def test_cells_with_the_same_law_are_one_cause_also_where_fewer_lengths_were_tested():
    found = causes(
        view(finding("pd-none-router", law=FEWER), law=FEWER),
        view(finding("pd-none", law=LAW), law=LAW),
        view(finding("pd-mtp", law=OTHER), law=OTHER),
    )
    assert [set(c.cells) for c in found] == [{"pd-none-router", "pd-none"}, {"pd-mtp"}]
    # The law that was tested at more lengths says more.
    assert found[0].law == LAW


def test_scenarios_join_the_law_that_their_lengths_fit():
    cold = view(finding("pd-none", law=LAW), law=LAW)
    fits = finding("pd-none", scenario="prefix-hit", part="p64#0.subject")
    does_not = finding("pd-none", scenario="late-pull", part="p40#0.subject")
    found = causes(cold, view(fits), view(does_not), lengths={place_of(fits): 64, place_of(does_not): 40})
    assert [c.scenarios for c in found] == [["cold", "prefix-hit"], ["late-pull"]]
    assert found[0].cells == {"pd-none": 2}


def test_drafts_that_changed_with_the_answer_need_no_cause_of_their_own():
    changed = {"check": "acceptance-baseline", "verdict": Verdict.IMPROVED, "damage": "engine-changed"}
    (one,) = causes(view(finding("pd-mtp", law=LAW), finding("pd-mtp", **changed), law=LAW))
    assert one.checks == {"tokens-baseline": 1, "acceptance-baseline": 1}
    assert one.verdict is Verdict.REGRESSION
    apart = causes(view(finding("pd-mtp", law=LAW), law=LAW), view(finding("single-mtp", **changed)))
    assert [c.damage for c in apart] == ["target-kv", "engine-changed"]


def broke(cell: str, reason: str) -> Finding:
    return finding(
        cell,
        None,
        check="complete",
        verdict=Verdict.UNKNOWN,
        damage="infrastructure",
        message=f"expected 4, found 0: {reason}",
        evidence=IncompleteCell(reason=reason),
    )


def untested(cell: str) -> Finding:
    return finding(cell, verdict=Verdict.UNKNOWN, damage="nothing-tested")


def test_what_broke_alike_is_one_cause_and_comes_before_what_was_not_tested():
    found = causes(
        view(untested("pd-none")),
        view(broke("pd-none", "no hand-off on pd-none within 5 attempts, port 4711")),
        view(broke("pd-mtp", "no hand-off on pd-mtp within 5 attempts, port 4712")),
    )
    first, after = consequences(found)
    assert [list(c.cells) for c in first] == [["pd-none", "pd-mtp"]]
    assert first[0].title.startswith("infrastructure: no hand-off on pd-none")
    assert [c.damage for c in after] == ["nothing-tested"]


def test_evidence_that_is_missing_for_one_reason_is_one_cause_whatever_check_misses_it():
    same = "prompts can give no p-value below 0.062, and 0.0032 is needed"
    views = [
        view(untested(cell).model_copy(update={"check": check, "message": f"{n} {same} by {cell}"}))
        for cell, check, n in (("pd-mtp", "survival", 5), ("single-mtp", "first-step", 6))
    ]
    other = view(untested("pd-none").model_copy(update={"message": "expected a baseline, found none"}))
    assert [c.count for c in causes(*views, other)] == [2, 1]


def test_what_was_not_tested_is_the_cause_where_nothing_broke():
    first, after = consequences(causes(view(untested("pd-none")), view(untested("pd-mtp"))))
    assert [c.count for c in first] == [2]
    assert after == []


def test_known_defects_are_one_cause_each():
    known = {"known": "sampled", "link": "https://example.org", "verdict": Verdict.KNOWN}
    found = causes(
        view(finding("pd-none", **known)),
        view(finding("pd-mtp", **known)),
        view(finding("pd-mtp", "p31", law=LAW), law=LAW),
    )
    assert [(c.known, c.count) for c in found] == [(None, 1), ("sampled", 2)]


def test_findings_that_are_only_counted_are_counted():
    (one,) = causes(view(finding("pd-none", others=7, law=LAW), law=LAW))
    assert (one.count, one.cells, one.groups[0][1]) == (8, {"pd-none": 8}, 8)


def test_every_finding_is_in_exactly_one_cause():
    made = runs.red()
    known = runs.references()
    judgement = judge(made, known)
    found = causes_of(made, judgement, {r.place: r.length for r in prompts_of(made, judgement, known).rows})
    listed = [f.id for c in found for f in c.findings]
    assert sorted(listed) == sorted(f.id for f in judgement.findings)
    for cause in found:
        assert cause.example in cause.findings


# --- in words ---------------------------------------------------------------------------------------------------------

EVERY = Law(text="every tested length fails (4 from 31 to 65)", tested=(0, 1, 8, 31))
RATES = {"requests": 4, "steps": 9, "accepted_at": (), "acceptance_length_pooled": 1, "acceptance_length_per_prompt": 1}


def lost_acceptance(scenario: str = "cold", cell: str = "pd-eagle3", before=(0.907, 0.81, 0.73)) -> CellVerdict:
    """A drafter that lost its KV: no token is wrong, and no draft is accepted."""
    law = EVERY if scenario == "cold" else None
    of = {"damage": "drafter-kv", "check": "acceptance-baseline", "scenario": scenario}
    made = view(finding(cell, law=law, **of), law=law)
    sides = [RatesFigures(rates=rates, **RATES) for rates in ((0.0,) * 3, before)]
    figures = AcceptanceFigures(ours=sides[0], reference=sides[1], against="the baseline")
    right = CheckResult(check="tokens-baseline", cell=cell, verdict=Verdict.PASS, judged=4)
    changed = made.results[0].model_copy(update={"figures": figures})
    return made.model_copy(update={"results": (right, changed)})


def test_a_defect_of_many_scenarios_is_one_sentence_with_its_numbers():
    scenarios = [f"state-{n}" for n in range(17)]
    (one,) = causes(lost_acceptance(), *(lost_acceptance(s) for s in scenarios))
    assert one.count == 18
    assert sentence_of(one) == (
        "pd-eagle3 (also in 17 scenarios): wrong KV of the drafter after a hand-off; acceptance of pd-eagle3 "
        "0.91/0.81/0.73 → 0.00/0.00/0.00, tokens right, at every tested length"
    )
    assert headline_of([one]) == sentence_of(one)


def test_a_sentence_says_where_it_shows_and_how_many_more_causes_there_are():
    (alone,) = causes(lost_acceptance("refill"))
    assert sentence_of(alone).startswith(
        "pd-eagle3 in refill: wrong KV of the drafter after a hand-off; acceptance 0.91/"
    )
    (both,) = causes(lost_acceptance(), lost_acceptance(cell="single-eagle3"))
    assert sentence_of(both).startswith(
        "pd-eagle3 and single-eagle3: wrong KV of the drafter; acceptance of pd-eagle3 "
    )
    many = causes(*(lost_acceptance(cell=f"pd-m{n}") for n in range(5)))
    assert sentence_of(many[0]).startswith("pd-m0 and 4 more cells: ")
    two = causes(lost_acceptance(), view(finding("pd-none", law=LAW), law=LAW), view(untested("single-mtp")))
    assert headline_of(two).endswith("; 1 more cause")
    assert headline_of([]) == ""


def test_a_long_message_is_told_whole_and_abridged_where_there_is_little_room():
    message = f"no baseline: {'the nearest one differs, ' * 20}so none fits; record it with a command"
    (cause,) = causes(view(untested("single-mtp").model_copy(update={"message": message})))
    assert sentence_of(cause).endswith(message) and headline_of([cause]) == sentence_of(cause)
    brief = sentence_of(cause, 240)
    assert len(brief) < 300 and brief.endswith(" …; record it with a command")


def test_a_broken_engine_is_told_whole_without_the_lines_of_its_log():
    reason = f"the engine ended by itself: {'word ' * 60}end"
    (cause,) = causes(view(broke("single-mtp", f"{reason}; last lines of x.log:\nmore")))
    assert sentence_of(cause) == f"single-mtp: infrastructure: {reason}"
    assert cause.title.endswith("word …") and len(cause.title) < 200


def test_a_small_change_is_told_with_digits_that_show_it():
    (cause,) = causes(lost_acceptance(before=(0.001, 0.0, 0.0)))
    assert "acceptance 0.001/0.000/0.000 → 0.000/0.000/0.000" in sentence_of(cause)
    (none,) = causes(lost_acceptance(before=()))
    assert "acceptance" not in sentence_of(none)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAW.text, "only if N mod 32 = 0"),
        (EVERY.text, "at every tested length"),
        ("fails if and only if the prompt has more than 31 tokens", "only if the prompt has more than 31 tokens"),
    ],
)
def test_a_law_is_told_without_its_remarks(text, words):
    law = LAW.model_copy(update={"text": text})
    (cause,) = causes(view(finding("pd-none", law=law), law=law))
    assert sentence_of(cause).endswith(f", {words}") or sentence_of(cause).endswith(f"; {words}")


def test_a_law_with_exceptions_is_none():
    law = LAW.model_copy(update={"exact": False, "text": "no rule on the length explains it"})
    (cause,) = causes(view(finding("pd-none", law=law, check="transfer", message="expected x"), law=law))
    assert sentence_of(cause) == "pd-none: wrong KV of the target after a hand-off; expected x"


def test_the_place_does_not_repeat_the_sentence():
    law = LAW.model_copy(update={"text": f"{LAW.text.partition(';')[0]}, which is where the end lies; 4 were tested"})
    made = view(finding("pd-none", law=law), law=law)
    text = (
        f"wrong KV of the target in 1 of 4 requests; {law.text}; p32 (32 tokens): the output repeats nothing of block 0"
    )
    assert made.diagnosis is not None
    made = made.model_copy(update={"diagnosis": made.diagnosis.model_copy(update={"text": text})})
    (cause,) = causes(made)
    where = "p32 (32 tokens): the output repeats nothing of block 0"
    assert detail_of(cause) == f"pd-none: at these lengths, the end lies; {where}"


def test_a_command_shows_the_most_telling_finding_again():
    cold, warm = finding("pd-none", "p32", law=LAW), finding("pd-none", scenario="refill", part="p32#0.subject")
    (cause,) = causes(view(warm), view(cold, law=LAW))
    assert cause.command == "harness repro run pd-none/tokens-baseline/p32"
    assert [c.command for c in causes(view(untested("pd-none")))] == [""]


def test_findings_of_one_run_only_are_shown_again_by_a_command_of_their_own():
    cold, warm = finding("pd-none", "p32", law=LAW), finding("pd-none", scenario="refill", part="p32#0.subject")
    (cause,) = causes(view(warm), view(cold, law=LAW))
    some = cause.among({group_key(warm)}, RUN)
    assert some is not None and (some.count, list(some.views)) == (1, [("pd-none", "refill")])
    assert "refill" in some.command
    assert cause.among(set(), RUN) is None


def test_what_a_known_defect_covers_without_the_fault_is_a_cause_of_its_own():
    """In a run with an injected fault nothing is excused, but what is no news does not look like the fault."""
    fault, usual = finding("pd-eagle3", law=LAW), finding("single-eagle3", scenario="sampled", damage="target-kv")
    judgement = Judgement(run_id="r", verdict=Verdict.REGRESSION, cells=(view(usual), view(fault, law=LAW)))
    found = causes_of(RUN, judgement, {place_of(f): 32 for f in judgement.findings}, {usual.id: "cpu-sampled"})
    assert [(c.anyway, c.verdict) for c in found] == [(None, Verdict.REGRESSION), ("cpu-sampled", Verdict.REGRESSION)]
    assert sentence_of(found[1]).endswith("; expected without the injected fault, too (cpu-sampled)")


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lookahead() -> str:
    """All pairs give wrong tokens at the length that fills its block: one defect of the hand-off."""
    h = history([garbled(o) if o.cell.startswith("pd-") and len(o.sent_ids) == 32 else o for o in flawless()])
    return render_html(summarised(h))


def test_defect_of_all_pairs_is_one_card(lookahead):
    page = Page(lookahead)
    (card,) = [a for t, a in page.elements if t == "article" and a.get("class") == "cause"]
    assert (card["data-cell"] or "").split("\n") == ["pd-none", "pd-eagle3", "pd-dflash", "pd-mtp"]
    # Each group of findings keeps the place that older links lead to.
    places = [i for i in page.ids if i.startswith("finding-")]
    assert "finding-pd-none-tokens-baseline-p32-ids" in places and len(places) == len(set(places)) > 4
    assert lookahead.count("Lengths:") == 1


def test_cards_are_folded_beyond_the_first_ones(lookahead):
    """However many findings there are, the page that opens is short: everything but causes and tables is folded."""
    assert not [a for t, a in Page(lookahead).elements if t == "details" and "open" in a]


def test_run_with_expected_failures_alone_says_that_it_passes(tmp_path):
    summary = runs.summarise_known(tmp_path)
    assert summary.verdict is Verdict.KNOWN and summary.headline == "✔ PASS (1 expected failure)"
    assert "<title>✔ PASS (1 expected failure) · " in render_html(summary)
    worse = summary._replace(judgement=summary.judgement.model_copy(update={"verdict": Verdict.REGRESSION}))
    assert worse.headline == "✘ REGRESSION"


def test_diagnosis_of_a_law_with_exceptions_is_said_in_full():
    exceptions = LAW.model_copy(update={"exact": False, "text": "no rule on the length explains it"})
    (one,) = causes(view(finding("pd-none", law=exceptions), law=exceptions))
    assert one.diagnoses == [("pd-none", "in words")]
    assert replace(one, damage="sampler").diagnoses == []


# --- how an UNKNOWN run goes on ---------------------------------------------------------------------------------------


def unfinished(folder, **run) -> RunSummary:
    """A pair that was not asked to its end."""
    made = history([o for o in flawless() if o.cell in ("pd-none", "single-none")], folder=folder)
    made = with_cells(made, "pd-none", planned=9, state="failed", reason="ran out of time")
    return summarised(with_run(made, run_id="night", **run))


def test_interrupted_run_is_resumed(tmp_path):
    for how in ({"interrupted": True}, {"finished": None}):
        summary = unfinished(tmp_path / "night", **how)
        assert summary.verdict is Verdict.UNKNOWN
        assert summary.command == f"harness run --resume {tmp_path / 'night'}"
        assert summary.next_step.startswith("1 of 2 cells is not complete; go on: ")
        html = render_html(summary)
        # The command comes before the findings, and can be copied.
        assert html.index(summary.command) < html.index('id="findings"')


def test_copy_of_an_interrupted_run_cannot_be_resumed(tmp_path):
    summary = unfinished(tmp_path / "copy", interrupted=True, command=("harness", "run", "--out=/data/runs/"))
    assert summary.command == ""
    assert summary.next_step == (
        "1 of 2 cells is not complete; this is a copy, which cannot be resumed; go on where the run was recorded: "
        "harness run --resume /data/runs/night"
    )
    assert "harness run --resume reports/night" in unfinished(tmp_path / "copy", interrupted=True).next_step


def test_cells_whose_engines_broke_are_asked_again(tmp_path):
    summary = unfinished(tmp_path / "night", engine_flags=("--engine-arg=--x",))
    assert summary.command == "harness run --profile test --cell pd-none --engine-arg=--x"


@pytest.mark.parametrize("run", [{"mutants": ("M1",)}, {"kind": "soak"}])
def test_runs_that_say_nothing_about_vllm_are_not_asked_again(tmp_path, run):
    assert unfinished(tmp_path / "night", interrupted=True, **run).command == ""


def test_complete_runs_have_nothing_to_go_on_with():
    made = history([o for o in flawless() if o.cell in ("pd-none", "single-none")])
    assert summarised(made, {}).command == ""
