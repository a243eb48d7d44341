"""Repro without engines: which request a finding names, what counts as shown again, and when it is decided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from harness.commands import repro
from harness.commands.repro import Attempt, Goal, Result, find, from_names, goal_of, measured, settled, target_of
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN, UsageError
from harness.history.records import ATTACHED
from harness.history.verdict import Verdict
from harness.profiles.load import load_profile
from harness.reports.next_steps import repro_line
from harness.stats.quiet import excluded_above, least_rate, quiet_tries
from harness.stats.sequential import interval_of
from tests.support.builders import change_final, engine, garbled, history, judged, observation, with_cells, with_run


@pytest.fixture
def red():
    return judged(garbled(observation("pd-none", 96)), observation("pd-none", 64))


def test_finding_is_named_by_its_id_or_a_beginning(red):
    wanted = "pd-none/tokens-baseline/p96/ids"
    assert find(red.judgement, wanted).id == wanted
    assert find(red.judgement, "pd-none/tokens-b").id == wanted
    with pytest.raises(UsageError, match="there are:\n    pd-none/"):
        find(red.judgement, "pd-none/tokens-baseline/p32")
    with pytest.raises(UsageError, match="the run has no findings"):
        find(judged(observation("pd-none", 96)).judgement, "x")


def test_a_beginning_names_no_other_prompt_when_not_all_findings_are_listed(red):
    """The one that is meant may be among those that are counted."""
    cut = red.judgement.model_copy(
        update={
            "cells": tuple(
                c.model_copy(
                    update={
                        "results": tuple(
                            r.model_copy(
                                update={"findings": tuple(f.model_copy(update={"others": 3}) for f in r.findings)}
                            )
                            for r in c.results
                        )
                    }
                )
                for c in red.judgement.cells
            )
        }
    )
    wanted = "pd-none/tokens-baseline/p96/ids"
    assert find(cut, wanted).id == find(cut, "pd-none/tokens-baseline/p96").id == wanted
    with pytest.raises(UsageError, match="more are counted and not listed, try theirs with --cell and --prompt"):
        find(cut, "pd-none/tokens-baseline/p9")


def test_target_is_the_request_of_the_finding(red):
    target = target_of(find(red.judgement, "pd-none/tokens-baseline"))
    assert (target.cell, target.prompt, target.form, target.scenario) == ("pd-none", "p96", "ids", "cold")
    in_scenario = find(red.judgement, "pd-none/tokens-baseline").model_copy(
        update={"scenario": "refill", "part": "copy-117-22#2.subject"}
    )
    target = target_of(in_scenario)
    assert (target.instance, target.prompt, target.key) == (2, None, "copy-117-22#2.subject")


def test_shown_again_means_the_same_check_in_the_same_request(red):
    target = target_of(find(red.judgement, "pd-none/tokens-baseline"))
    assert repro._again(red, target) is True
    assert repro._again(judged(observation("pd-none", 96)), target) is False
    # Another request that is wrong is another finding.
    assert repro._again(judged(garbled(observation("pd-none", 64)), observation("pd-none", 96)), target) is False
    assert repro._again(judged(observation("pd-none", 96, error="no answer")), target) is None
    # The reference of another cell is not there when one cell is tried alone.
    assert repro._again(red, target._replace(check="tokens-reference")) is True


@pytest.mark.parametrize(
    ("tries", "given", "code"),
    [
        ((True,), {}, EXIT_REGRESSION),
        (59 * (False,), {}, EXIT_PASS),
        (58 * (False,), {}, EXIT_UNKNOWN),
        ((False,), {}, EXIT_UNKNOWN),
        ((None,), {}, EXIT_UNKNOWN),
        ((), {}, EXIT_UNKNOWN),
        ((False, None), {"problem": "the decode engine ended by itself"}, EXIT_UNKNOWN),
        (59 * (False,), {"problem": "the decode engine ended by itself"}, EXIT_UNKNOWN),
        ((False,), {"interrupted": True}, EXIT_UNKNOWN),
        ((None, False), {}, EXIT_UNKNOWN),
        ((None, *7 * (False,)), {}, EXIT_UNKNOWN),
        ((None, *59 * (False,)), {}, EXIT_PASS),
        ((True, None), {"problem": "the decode engine ended by itself"}, EXIT_REGRESSION),
        ((True,), {"interrupted": True}, EXIT_REGRESSION),
    ],
)
def test_too_few_tries_and_those_that_were_cut_short_do_not_say_that_it_is_gone(tmp_path, red, tries, given, code):
    """No run says how often it shows, so that a rate of 1 in 20 must be excluded: 59 quiet tries."""
    target = target_of(find(red.judgement, "pd-none/tokens-baseline"))
    result = Result(target, tuple(Attempt(Verdict.PASS, again) for again in tries), tmp_path, None, 1.0, **given)
    assert result.exit_code == code and target.words in result.sentence
    assert result.sentence.startswith({0: "not reproduced", 1: "reproduced", 2: "UNKNOWN"}[code])
    if code == EXIT_UNKNOWN:
        assert given.get("problem", "") in result.sentence


def test_servers_that_ran_already_are_asked_again_and_no_engines_stand_in_for_them(monkeypatch, red):
    asked = ("/env/bin/harness", "run", "--single", "http://10.0.0.7:8000", "--key-variable", "MY_KEY")
    server = engine("pd-none", "decode").model_copy(update={"argv": (ATTACHED, "http://10.0.0.7:8000")})
    attached = with_run(red.history, engines=(server,), command=asked)
    again = "harness run --single http://10.0.0.7:8000 --key-variable MY_KEY"
    finding = red.judgement.findings[0]
    assert repro_line(attached, finding) == again
    assert repro_line(red.history, finding) == f"harness repro run {finding.id}"
    monkeypatch.setattr(repro, "load_history", lambda _: attached)
    with pytest.raises(UsageError, match=f"ask them again with: {again}; or try .*--cell and --prompt"):
        repro.from_run(Path("run"), finding.id)


def test_prompt_of_a_cell_is_prepared_with_its_engines_only():
    prepared, target, mutants = from_names("cpu", "pd-eagle3", "copy-096-19", "cold")
    assert [(w.cell.id, w.requests) for w in prepared.works] == [("pd-eagle3", 1)]
    assert [g.topology for g in prepared.plan.groups] == ["pd"]
    assert (target.words, mutants) == ("pd-eagle3/copy-096-19", ())
    assert repro.expected_s(prepared, 3) > repro.expected_s(prepared, 1) > 0
    # Nobody scores the plain engine's outputs again in a repro: asked for, no try could ever say anything.
    prepared, _, _ = from_names("cpu", "single-none", "copy-096-19", "cold")
    assert not prepared.rescores
    prepared, _, _ = from_names("cpu", "single-none", "", "refill")
    assert prepared.works[0].requests == 7
    for cell, prompt in (("pd-*", "copy-096-19"), ("pd-eagle3", "copy-999"), ("pd-gpt", "copy-096-19")):
        with pytest.raises(UsageError):
            from_names("cpu", cell, prompt, "cold")


def test_engines_of_a_shared_group_are_those_of_the_run():
    profile = load_profile("cpu")
    made = history([change_final(observation("single-none", 96)), observation("pd-none", 96)])
    prompts = repro.load_prompts(profile.workload.prompts)
    shared = with_run(with_cells(made, group="pd-none"), prompts_sha256=prompts.sha256)
    target = repro.Target("single-none", "cold", None, "copy-096-19", "ids", None, None, "x")
    prepared = repro._prepared(profile, "cpu", target, shared)
    assert [g.topology for g in prepared.plan.groups] == ["pd"]
    assert [w.cell.id for w in prepared.works] == ["single-none"]
    with pytest.raises(UsageError, match="is not the prompt set of the run"):
        repro._prepared(profile, "cpu", target, with_run(shared, prompts_sha256="0" * 64))


# --- what quiet tries exclude ----------------------------------------------------------------------------------------


def test_quiet_tries_are_those_of_the_exact_binomial_bound():
    """A defect of 1 in 20 stays quiet in 7 tries with a chance of 0.70, and in 59 with less than 0.05."""
    assert [quiet_tries(rate) for rate in (1, 0.5, 1 / 4, 1 / 20, 1 / 48, 1 / 300)] == [1, 5, 11, 59, 143, 898]
    for rate in (0.5, 0.3, 1 / 20, 1 / 48, 0.001):
        n = quiet_tries(rate)
        upper = [binomtest(0, m, alternative="less").proportion_ci(0.95).high for m in (n - 1, n) if m]
        assert upper[-1] <= rate < (upper[0] if n > 1 else 1.1)
        assert excluded_above(n) == pytest.approx(upper[-1])
    assert least_rate(4) == pytest.approx(binomtest(4, 4, alternative="greater").proportion_ci(0.95).low)
    with pytest.raises(ValueError, match="above 0"):
        quiet_tries(0)


def test_the_rate_to_exclude_is_that_of_the_run():
    """One wrong answer of three: 8 quiet tries, one more than were once enough to exclude one half."""
    run = judged(garbled(observation("pd-none", 96)), *(observation("pd-none", n) for n in (32, 64)))
    finding = find(run.judgement, "pd-none/tokens-baseline/p96")
    goal = goal_of(run.judgement, finding)
    assert (goal.rate, goal.tries, goal.why) == (1 / 3, 8, "1 of 3 requests had it")
    target = target_of(finding)._replace(goal=goal)
    quiet = tuple(Attempt(Verdict.PASS, False) for _ in range(7))
    result = Result(target, quiet, Path(), None, 1.0)
    assert result.exit_code == EXIT_UNKNOWN
    assert "exclude a rate above 35 %, and 8 are needed to exclude a rate of 33 % (1 of 3" in result.sentence
    assert "--repeat 8" in result.sentence
    enough = result._replace(attempts=(*quiet, *quiet))
    assert enough.exit_code == EXIT_PASS
    assert "not reproduced" in enough.sentence and "which exclude a rate of 33 %" in enough.sentence


def test_where_all_requests_failed_the_smallest_rate_that_explains_it_is_excluded():
    one = judged(garbled(observation("pd-none", 96)))
    goal = goal_of(one.judgement, find(one.judgement, "pd-none/tokens-baseline"))
    assert goal.tries == 59 and "the only request had it" in goal.why
    several = judged(*(garbled(observation("pd-none", n)) for n in (32, 64, 96)))
    assert goal_of(several.judgement, find(several.judgement, "pd-none/tokens-baseline/p96")).tries == 7
    of_a_test = several.judgement.findings[0].model_copy(update={"prompt_id": None})
    assert goal_of(several.judgement, of_a_test).tries == 5


def test_tries_end_when_it_shows_or_when_the_quiet_ones_suffice():
    goal = Goal(0.25, "1 of 4 requests had it")
    quiet, shown, lost = (Attempt(Verdict.PASS, again) for again in (False, True, None))
    assert not settled([quiet] * 10 + [lost] * 5, goal)
    assert settled([quiet] * 11, goal) and settled([quiet, shown], goal)
    # A rate is measured further, and seven quiet tries decide nothing any more.
    assert not measured([quiet] * 10, goal) and measured([quiet] * 11, goal)
    assert not measured([shown] * 6, goal) and measured([shown] * 7, goal)


# --- when it is decided ----------------------------------------------------------------------------------------------


def test_seven_of_seven_decide_and_six_do_not():
    assert interval_of(6, 6).low < 0.5 < interval_of(7, 7).low
    assert interval_of(0, 7).high < 0.5
    assert interval_of(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="expected between 0 and 2"):
        interval_of(3, 2)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_interval_holds_for_all_looks_together(rate):
    """With a look after each of 200 tries, it excludes the true rate in at most 5 % of runs."""
    rng = np.random.default_rng(5)
    runs, missed = 300, 0
    for _ in range(runs):
        shown = np.cumsum(rng.random(200) < rate)
        looks = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200)
        missed += any(
            not interval_of(int(shown[n - 1]), n)[0] <= rate <= interval_of(int(shown[n - 1]), n)[1] for n in looks
        )
    assert missed / runs <= 0.05
