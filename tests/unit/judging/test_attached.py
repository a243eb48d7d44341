"""What a server that ran already cannot be blamed for is UNKNOWN, and what it can be blamed for is not."""

from __future__ import annotations

import pytest

from harness.history.engine_interfaces import SERVER_INFO, WITHOUT
from harness.history.records import ATTACHED
from harness.history.verdict import Verdict
from harness.judging.checks import drafting
from harness.judging.checks.registry import evidence_for, judge_cell
from harness.judging.checks.settings import engine_as_asked
from harness.judging.figures import AcceptanceFigures
from harness.judging.notices import notices_of
from harness.profiles.load import load_profile
from tests.support.builders import (
    change_final,
    engine,
    history,
    lookups,
    observation,
    speculation,
    view,
    with_run,
)

CELL = "pd-eagle3"
LENGTHS = [31, 32, 40]


def judged(change, attached: bool = True):
    """Judge a cell whose first answer is changed, and how it was counted."""
    argv = (ATTACHED, "http://127.0.0.1:1") if attached else ()
    engines = tuple(engine(CELL, r).model_copy(update={"argv": argv}) for r in ("prefill", "decode"))
    first, *rest = (observation(CELL, n, sequence=i) for i, n in enumerate(LENGTHS))
    made = history([change(first), *rest], engines=engines)
    return [f for r in judge_cell(view(made, CELL, lookups(LENGTHS))).results for f in r.findings]


def wrong(o, **counters):
    final = o.final
    assert final is not None
    return change_final(o, output_ids=(9, *final.output_ids[1:]), counters={**final.counters, **counters})


@pytest.mark.parametrize(
    ("counted", "attached", "verdict"),
    [
        ({"finished_requests": 2.0}, True, Verdict.UNKNOWN),
        ({}, True, Verdict.REGRESSION),
        # Nobody else reaches an engine that the harness started.
        ({"finished_requests": 2.0}, False, Verdict.REGRESSION),
    ],
)
def test_wrong_answer_where_others_used_the_server_says_nothing(counted, attached, verdict):
    findings = judged(lambda o: wrong(o, **counted), attached)
    (tokens,) = [f for f in findings if f.check == "tokens-baseline" and f.prompt_id == "p31"]
    assert tokens.verdict is verdict
    assert ("1 request of other clients" in tokens.message) == (verdict is Verdict.UNKNOWN)


@pytest.mark.parametrize("drafts", [1, 3])
def test_server_that_drafts_another_number_of_tokens_is_not_comparable(drafts):
    def change(o):
        final = o.final
        counters = {**final.counters, "drafts": 900.0, "draft_tokens": 900.0 * drafts}
        return change_final(o, speculation=speculation([0] * final.speculation.num_steps), counters=counters)

    findings = [f for f in judged(change) if f.check == "acceptance-baseline" and f.prompt_id == "p31"]
    assert [f.verdict for f in findings] == [Verdict.UNKNOWN if drafts == 1 else Verdict.REGRESSION]
    assert ("num_speculative_tokens: 1" in findings[0].message) == (drafts == 1)


def by_counters(length: int, sequence: int):
    """An answer of P/D whose acceptance only the engine's counters tell, with the steps of the baseline."""
    o = observation(CELL, length, sequence=sequence)
    final = o.final
    assert final is not None and final.speculation is not None
    accepted = final.speculation.per_step_accepted
    at = {f"accepted_at_{p}": float(sum(n > p for n in accepted)) for p in range(3)}
    grown = {"drafts": float(len(accepted)), "draft_tokens": 3.0 * len(accepted), **at}
    return change_final(o, speculation=None, counters={**final.counters, **grown})


@pytest.mark.parametrize("attached", [True, False])
def test_acceptance_in_total_says_what_to_start_the_servers_with(attached):
    argv = (ATTACHED, "http://127.0.0.1:1") if attached else ()
    engines = tuple(engine(CELL, r).model_copy(update={"argv": argv}) for r in ("prefill", "decode"))
    made = history([by_counters(n, i) for i, n in enumerate(LENGTHS)], engines=engines)
    result = drafting.acceptance_baseline(view(made, CELL, lookups(LENGTHS)))
    remedy = "start the servers with `--per-request-spec-decode-metrics detailed` to compare each step"
    assert result.verdict is Verdict.PASS
    assert result.note.startswith("acceptance of 3 requests compared in total")
    assert (remedy in result.note) == attached
    assert ("this version of vLLM reports none per request" in result.note) != attached
    # What it was compared with is shown beside it.
    figures = result.figures
    assert isinstance(figures, AcceptanceFigures)
    assert (figures.reference.steps, figures.ours.steps) == (46, 46 + len(LENGTHS)), "each hand-off pads a step"
    (words,) = [n for n in notices_of(evidence_for(made, lookups(LENGTHS))) if "in total" in n] or [""]
    assert words == (f"acceptance is compared in total in {CELL}; {remedy}" if attached else "")


def attached_pair(**of_p: object):
    """P and D as servers that ran already; ``of_p`` changes what P tells."""
    pair = (
        engine(CELL, role).model_copy(update={"argv": (ATTACHED, f"http://{role}")}) for role in ("prefill", "decode")
    )
    return tuple(e.model_copy(update=of_p) if e.role == "prefill" else e for e in pair)


@pytest.mark.parametrize("silent", [True, False])
def test_the_first_notice_names_the_server_that_does_not_tell_its_settings(silent):
    made = history([observation(CELL, n, sequence=i) for i, n in enumerate(LENGTHS)])
    engines = attached_pair(step_tokens=None) if silent else attached_pair()
    made = with_run(made, engines=engines, lacking={SERVER_INFO: WITHOUT[SERVER_INFO]} if silent else {})
    notices = notices_of(evidence_for(made, lookups(LENGTHS)))
    words = "the prefill server http://prefill does not tell all settings: that the engines have the profile's"
    assert [n.startswith(words) for n in notices] == ([True] if silent else [])


@pytest.mark.parametrize(
    ("told", "attached", "verdict"),
    [
        ({"step_tokens": 1664}, True, Verdict.PASS),
        ({"step_tokens": 1664}, False, Verdict.UNKNOWN),
        # The longest prompt has 40 tokens.
        ({"step_tokens": 32}, True, Verdict.UNKNOWN),
        ({"kv_blocks": 512}, True, Verdict.PASS),
        ({"kv_blocks": 512}, False, Verdict.UNKNOWN),
    ],
)
def test_a_server_may_have_another_step_where_each_prompt_fits_it_and_another_pool(told, attached, verdict):
    made = history([observation(CELL, n, sequence=i) for i, n in enumerate(LENGTHS)])
    pair = tuple(e.model_copy(update=told) for e in attached_pair())
    if not attached:
        pair = tuple(e.model_copy(update={"argv": engine(CELL, e.role).argv}) for e in pair)
    profile = load_profile("cpu").model_dump(mode="json")
    result = engine_as_asked(view(with_run(made, engines=pair, profile=profile), CELL))
    assert result.verdict is verdict
