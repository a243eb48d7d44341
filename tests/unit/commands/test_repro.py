"""Repro without engines: which request a finding names, what counts as shown again, and when it is decided."""

from __future__ import annotations

import numpy as np
import pytest

from harness.commands import repro
from harness.commands.repro import Attempt, Result, find, from_names, target_of
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN, UsageError
from harness.history.verdict import Verdict
from harness.profiles.model import load_profile
from harness.stats.sequential import interval_of
from tests.support.builders import change_final, garbled, history, judged, observation


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
    broken = judged(observation("pd-none", 96, error="no answer"))
    assert repro._again(broken, target) is None
    # The reference of another cell is not there when one cell is tried alone.
    assert repro._again(red, target._replace(check="tokens-reference")) is True


@pytest.mark.parametrize(
    ("tries", "code"),
    [((True,), EXIT_REGRESSION), ((False,), EXIT_PASS), ((None,), EXIT_UNKNOWN), ((), EXIT_UNKNOWN)],
)
def test_exit_code_and_sentence(tmp_path, red, tries, code):
    target = target_of(find(red.judgement, "pd-none/tokens-baseline"))
    attempts = tuple(Attempt(Verdict.PASS, again) for again in tries)
    result = Result(target, attempts, tmp_path, None, 1.0, False)
    assert result.exit_code == code
    assert target.words in result.sentence


@pytest.mark.parametrize(
    ("tries", "given", "code"),
    [
        ((False, None), {"problem": "the decode engine ended by itself"}, EXIT_UNKNOWN),
        ((False,), {"problem": "the decode engine ended by itself", "decided": True}, EXIT_UNKNOWN),
        ((False,), {"interrupted": True}, EXIT_UNKNOWN),
        ((None, False), {}, EXIT_UNKNOWN),
        ((None, *7 * (False,)), {"decided": True}, EXIT_PASS),
        ((True, None), {"problem": "the decode engine ended by itself"}, EXIT_REGRESSION),
        ((True,), {"interrupted": True}, EXIT_REGRESSION),
    ],
)
def test_tries_that_were_cut_short_do_not_say_that_it_is_gone(tmp_path, red, tries, given, code):
    target = target_of(find(red.judgement, "pd-none/tokens-baseline"))
    attempts = tuple(Attempt(Verdict.PASS, again) for again in tries)
    result = Result(target, attempts, tmp_path, None, 1.0, **{"decided": False, **given})
    assert result.exit_code == code
    assert result.sentence.startswith({0: "not reproduced", 1: "reproduced", 2: "UNKNOWN"}[code])
    if code == EXIT_UNKNOWN:
        assert given.get("problem", "") in result.sentence


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
    cells = tuple(c.model_copy(update={"group": "pd-none"}) for c in made.run.cells)
    prompts = repro.load_prompts(profile.workload.prompts)
    run = made.run.model_copy(update={"cells": cells, "prompts_sha256": prompts.sha256})
    target = repro.Target("single-none", "cold", None, "copy-096-19", "ids", None, None, "x")
    prepared = repro._prepared(profile, "cpu", target, made.model_copy(update={"run": run}))
    assert [g.topology for g in prepared.plan.groups] == ["pd"]
    assert [w.cell.id for w in prepared.works] == ["single-none"]
    other = made.model_copy(update={"run": run.model_copy(update={"prompts_sha256": "0" * 64})})
    with pytest.raises(UsageError, match="expected the prompts of the run"):
        repro._prepared(profile, "cpu", target, other)


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
