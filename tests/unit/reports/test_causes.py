"""What a report says first: the cause before what follows from it, what a pass claims, and what to do about a doubt."""

from __future__ import annotations

import pytest

from harness.cli.shapes import judged_run
from harness.history.folder import History, load_history
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.evidence import Stages
from harness.judging.exposure import Exposure, exposure_of, one_in
from harness.judging.findings import Judgement
from harness.judging.references import References
from harness.reports.html import render_html
from harness.reports.judge_run import assess, write_reports
from harness.reports.junit import render_junit
from harness.reports.markdown import render_markdown
from harness.reports.summary import RunSummary, asked_in_words, summarise_run
from harness.reports.terminal import print_summary
from harness.util.files import write_json
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import (
    LENGTHS,
    flawless,
    garbled,
    history,
    identity,
    lookups,
    observation,
    rescoring,
    with_answers,
    with_cells,
    with_profile,
    with_run,
    written_run,
)
from tests.support.normal_tier import baselines, night, worse
from tests.support.pages import printed


def of(h: History) -> RunSummary:
    return summarise_run(h, judge(h, lookups(LENGTHS)))


def pair(cells=("pd-none", "single-none")) -> list:
    return [observation(cell, n) for cell in cells for n in LENGTHS]


# --- the cause --------------------------------------------------------------------------------------------------------


def interrupted() -> History:
    """Ctrl-C while the reference answered: two of its four answers are there, and a pair's are compared with them."""
    made = history([o for o in pair() if o.cell == "pd-none" or len(o.sent_ids) < 35], ["pd-none", "single-none"])
    made = with_cells(made, "single-none", planned=4, state="interrupted", reason="interrupted by the user")
    return with_run(made, interrupted=True)


def test_interrupted_run_says_so_before_anything_else():
    summary = of(interrupted())
    assert summary.verdict is Verdict.UNKNOWN
    words = "Interrupted by Ctrl-C or a signal after 6 of 8 planned requests. 2 of 2 cells cannot be judged in full"
    assert summary.sentence.startswith(words)
    text = printed(print_summary, summary)
    assert text.index("interrupted by the user") < text.index("not tested because of it")
    assert "harness repro" not in text
    html = render_html(summary)
    assert "harness repro" not in html
    assert html.index("interrupted by the user", html.index('id="findings"')) < html.index("expected an answer of")


def test_cell_that_ran_out_of_time_is_the_cause():
    reason = "the requests of single-none were not finished after 600 s (timeouts.cell)"
    made = with_cells(interrupted(), "single-none", state="failed", reason=reason)
    summary = of(with_run(made, interrupted=False))
    assert summary.sentence.startswith(f"Not recorded in full (6 of 8 planned requests): {reason} (1 of 2 cells). ")


@pytest.mark.parametrize("flags", [(), ("--engine-arg=--some-flag",)])
def test_engines_that_did_not_start_are_asked_again_but_not_with_flags_that_may_be_the_cause(flags):
    made = history(pair(("pd-none",)))
    died = (
        "the decode engine (pid 7) ended by itself (it logged: api_server.py: error: --some-flag); last lines of x:\n|"
    )
    made = with_profile(with_cells(with_answers(made, ()), state="failed", reason=died), source="cpu")
    summary = of(with_run(made, engines=(), engine_flags=flags))
    assert "ended by itself (it logged: api_server.py: error: --some-flag) (1 of 1 cell)" in summary.sentence
    notices = " ".join(summary.judgement.notices)
    if flags:
        assert summary.command == "" and "with --engine-arg=--some-flag: correct that" in summary.next_step
        assert "no engine became ready with" in notices and "under test" not in notices
    else:
        assert summary.command == "harness run --profile cpu --cell pd-none"
        assert (
            summary.next_step
            == f"1 of 1 cell is not complete; once the cause is gone, ask them again: {summary.command}"
        )
    assert "error: --some-flag" in " ".join(printed(print_summary, summary, 80).split())


def test_recorded_interruption_shows_its_cause_and_counts_no_more_requests_than_there_were():
    summary = assess(load_history(RUNS / "interrupted"), References(baselines=BASELINES))
    text = printed(print_summary, summary)
    assert summary.sentence.startswith("Interrupted by Ctrl-C or a signal after ")
    assert "nothing tested in" not in text and "harness repro" not in text
    for cell in summary.judgement.cells:
        if cell.diagnosis is not None:
            assert cell.diagnosis.failed <= cell.diagnosis.judged


def test_a_run_that_is_compared_with_itself_says_so():
    summary = assess(load_history(RUNS / "pass"), References(against=RUNS / "pass"))
    assert summary.verdict is Verdict.UNKNOWN
    words = "The run was compared with itself (--against), so what it lacks is missing on both sides: single-dflash"
    assert summary.sentence.startswith(words)
    assert any("nothing can differ" in n for n in summary.judgement.notices)
    other = assess(load_history(RUNS / "pass"), References(against=RUNS / "plan-rows"))
    assert "compared with itself" not in " ".join((other.sentence, *other.judgement.notices))


def test_a_run_that_is_compared_with_itself_does_not_pass(tmp_path):
    """Nor where it lacks nothing; but two that are compared are both judged by the first."""
    identities = {m: identity(m).model_dump(mode="json") for m in ("none", "eagle3", "dflash", "mtp")}
    made = [
        written_run(tmp_path / name, history(flawless()), run_id=name, identities=identities) for name in ("one", "two")
    ]
    itself = assess(load_history(made[0]), References(against=made[0]))
    assert itself.verdict is Verdict.UNKNOWN and itself.exit_code == 2
    assert itself.sentence.startswith("the run was compared with itself (--against), so nothing can differ")
    assert 'type="UNKNOWN"' in render_junit(itself)
    for run, references in (
        (made[1], References(against=made[0])),
        (made[0], References(against=made[0], of_both=True)),
    ):
        assert assess(load_history(run), references).verdict is Verdict.PASS


def test_the_run_that_another_one_is_compared_with_is_named_among_what_it_is_judged_from():
    other = load_history(RUNS / "plan-rows")
    made = assess(load_history(RUNS / "pass"), References(against=other.folder)).inputs
    assert made is not None and made.as_json()["against"] == {"run": other.run.run_id, "record": other.sha256}
    assert f"of run {other.run.run_id} (record {str(other.sha256)[:12]}), expected failures" in made.sentence
    alone = assess(load_history(RUNS / "pass")).inputs
    assert alone is not None and alone.as_json()["against"] is None


def test_a_run_that_nothing_in_the_other_one_can_be_compared_with_says_why():
    summary = assess(load_history(RUNS / "M4"), References(against=RUNS / "gpu"))
    (notice,) = [n for n in summary.judgement.notices if "--against" in n]
    assert notice.startswith(f"nothing in {RUNS / 'gpu'} can be compared with this run (--against): ")
    assert "prompts_sha256: this run has 0adb4cec60bf…, the other 7f6e0d77918f…" in notice
    assert "nothing of run" in summary.inputs.sentence
    # It has no cell of this method, but a plain one, which gives the right tokens.
    plain = assess(load_history(RUNS / "pass"), References(against=RUNS / "plan-rows"))
    assert plain.inputs.baselines and not [n for n in plain.judgement.notices if "--against" in n]


def test_machines_are_told_texts_whole():
    summary = assess(load_history(RUNS / "real-model"))
    told = judged_run(summary)
    texts = [
        told["sentence"],
        *(c["sentence"] for c in told["causes"]),
        *(d for c in told["cells"] for d in c["diagnoses"]),
    ]
    advised = [t for t in texts if "send more prompts" in t]
    assert len(advised) > 2 and all("(`harness plan` says what they show)" in t for t in advised)
    assert not [t for t in texts if "…" in t]
    # A terminal has less room, and what to do has to be there.
    assert "…; send more prompts (`harness plan` says what they show)" in summary.brief


def test_an_unknown_run_says_what_is_missing():
    summary = summarise_run(made := history(pair(("pd-none", "single-none"))), judge(made, {}))
    assert summary.verdict is Verdict.UNKNOWN
    assert summary.sentence.startswith("pd-none and single-none: no baseline; the baseline of none ")
    assert "2 of 2 cells cannot be judged in full; " in summary.sentence


def test_broken_request_is_counted_among_those_asked():
    """A request that broke has a finding, and so has one that only prepared the scenario."""
    summary = of(history([o.model_copy(update={"error": "500"}) if o.cell == "pd-none" else o for o in pair()]))
    (found,) = [c.diagnosis for c in summary.judgement.cells if c.cell == "pd-none"]
    assert found.damage == "infrastructure"
    assert (found.failed, found.judged) == (4, 4)


def test_wrong_answers_are_still_offered_a_repro():
    wrong = [garbled(o, at=0) if o.cell == "pd-none" else o for o in pair()]
    summary = of(history(wrong))
    assert "reproduce: harness repro run pd-none/tokens-reference/p65/ids" in printed(print_summary, summary)
    assert "Repro:" in render_html(summary)


# --- answers that hide behind a test without power --------------------------------------------------------------------


def score(o, nats: float):
    """What the plain engine says of an answer: it dislikes one token by ``nats``."""
    output = o.final.output_ids
    return rescoring(o.prompt_id, o.sent_ids, output, [nats, *(0.0 for _ in output[1:])])


def test_an_answer_that_is_garbage_is_named_and_outweighs_missing_evidence():
    """No test of three prompts can tell, but the gate of single answers does, and says which one it is."""
    made = night(lengths=[40, 41, 42])
    scores = [score(o, 15.0 if o.prompt_id == "p41" else 0.0) for o in made.observations if o.cell == "pd-eagle3"]
    made = with_run(with_answers(made, (*made.observations, *scores)), rescore=True)
    summary = summarise_run(made, judge(made, baselines([40, 41, 42])))
    sent = len(made.observations) - len(scores)
    assert asked_in_words(made) == f"{sent} requests and {len(scores)} re-scorings"
    assert summary.judgement.by_cell()["pd-eagle3"] is Verdict.SUSPECT
    named = "expected no output token of p41 that single-none dislikes by more than 3 nats"
    for text in (printed(print_summary, summary), render_markdown(summary), render_html(summary)):
        assert named in " ".join(text.split())


# --- what a pass claims -----------------------------------------------------------------------------------------------


def test_pass_claims_what_was_judged():
    assert of(history(pair(("pd-eagle3", "single-eagle3", "single-none")))).sentence == (
        "All 3 cells pass: 12 answers have the right tokens, acceptance is as expected, and every P/D request moved "
        "its KV."
    )
    assert of(history(pair(("single-none",)))).sentence == "The cell passes: 4 answers have the right tokens."


def test_pass_of_the_normal_tier_does_not_claim_right_tokens():
    made = night(stages=1)
    judgement = judge(made, baselines())
    tested = {r.check for c in judgement.cells for r in c.results} & {"survival", "first-step"}
    assert judgement.verdict is Verdict.PASS and tested
    summary = summarise_run(made, judgement)
    assert "right tokens" not in summary.sentence
    assert "registered tests found a change beyond chance in 288 requests" in summary.sentence
    assert "every P/D request moved its KV" in summary.sentence
    assert "no answer was checked token by token" in summary.exposure.sentence
    # The table counts equal answers all the same.
    assert any("/" in equal for equal in summary.equal_tokens.values())
    assert "(equal answers are counted, but" in summary.exposure.sentence


# --- exposure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answers", "rare"), [(1, 1), (14, 5), (48, 16), (156, 52), (628, 210), (992, 331)])
def test_rarest_defect_that_would_have_shown(answers, rare):
    assert one_in(answers) == rare
    assert 1 - (1 - 1 / max(rare, 1.0001)) ** answers >= 0.95
    assert 1 - (1 - 1 / (rare + 1)) ** answers < 0.95


def test_exposure_stands_in_every_report():
    summary = of(history(pair()))
    words = (
        "8 answers checked token by token, 4 after a hand-off; a bug that hits 1 in 3 requests, or every P/D request, "
        "would have shown (95 % confidence)"
    )
    assert summary.exposure == Exposure({"pd-none": 4, "single-none": 4}, 4)
    for text in (printed(print_summary, summary), render_markdown(summary), render_html(summary)):
        assert words in " ".join(text.split())
    assert (
        "4 answers checked token by token, all after a hand-off; a bug that hits every P/D request would"
        in of(history(pair(("pd-none",)))).exposure.sentence
    )


def test_answers_that_a_known_defect_excuses_are_not_exposed():
    wrong = [garbled(o, at=0) if o.cell == "pd-none" else o for o in pair()]
    judgement = judge(history(wrong), lookups(LENGTHS))
    assert exposure_of(judgement).by_cell == {"pd-none": 4, "single-none": 4}
    raw = judgement.model_dump(mode="json")
    for found in (f for c in raw["cells"] for r in c["results"] for f in r["findings"]):
        found["verdict"] = "KNOWN"
    assert exposure_of(Judgement.model_validate(raw)).by_cell == {"pd-none": 0, "single-none": 4}


# --- a suspect night --------------------------------------------------------------------------------------------------


def suspect(folder=None) -> RunSummary:
    first = night(pd=worse)
    if folder is not None:
        first = first.model_copy(update={"folder": folder})
    return summarise_run(first, judge(first, baselines(), Stages(night())))


def test_suspect_says_what_to_do_next(tmp_path):
    (tmp_path / "tonight").mkdir()
    summary = suspect(tmp_path / "tonight")
    assert any(f.verdict is Verdict.SUSPECT for f in summary.judgement.findings)
    cells = "--cell pd-eagle3 --cell single-eagle3 --cell single-none"
    assert f"harness run --profile test {cells}: failing there in another run is a finding" in summary.next_step
    assert "no earlier runs beside this one" in summary.next_step
    for text in (printed(print_summary, summary), render_markdown(summary), render_html(summary)):
        assert "failing there in another run is a finding" in " ".join(text.split())


def test_suspect_remembers_earlier_runs(tmp_path):
    """Three earlier nights: one suspected of the same, one quiet, and one of another profile."""
    (tmp_path / "tonight").mkdir()
    summary = suspect(tmp_path / "tonight")
    quiet: Judgement = judge(night(), baselines())
    for name, judgement, profile in (
        ("a", summary.judgement, "test"),
        ("b", quiet, "test"),
        ("c", summary.judgement, "other"),
    ):
        run = {"started": f"2025-01-0{ord(name) - 96}T00:00:00+00:00", "profile": {"name": profile}, "mutants": []}
        write_json(tmp_path / name / "run.json", run)
        write_json(tmp_path / name / "judgement.json", judgement.model_dump(mode="json"))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    again = suspect(tmp_path / "tonight").next_step
    assert "failed in 1 of 2 earlier runs beside this one, too, last in a" in again
    assert "treat it as a regression" in again
    (tmp_path / "a" / "judgement.json").write_text('{"cells": 3}')
    assert "none of the 1 earlier runs beside this one failed there" in suspect(tmp_path / "tonight").next_step


def test_run_without_doubt_needs_no_next_step(tmp_path):
    summary = of(history(pair(), folder=tmp_path / "run"))
    assert summary.next_step == ""
    (tmp_path / "run").mkdir()
    write_reports(summary, tmp_path / "run")
    assert 'id="next"' not in (tmp_path / "run" / "report.html").read_text()
