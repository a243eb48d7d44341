"""Pairs whose model has recurrent state: what P hands over of it is judged, or the pair is UNKNOWN with the reason."""

from __future__ import annotations

import pytest

from harness.history.folder import History
from harness.history.verdict import Verdict
from harness.judging.checks import settings, transfer
from harness.judging.checks.counters import counters_agree
from harness.judging.checks.registry import judge
from tests.support.builders import (
    BLOCK,
    LENGTHS,
    change_final,
    engines_of,
    history,
    lookups,
    observation,
    view,
    with_answers,
    with_cells,
    with_prefill,
    with_profile,
    with_run,
)

STATE = 2 * 17536.0


def handed(tokens: int, groups: list | None = None, count: int | None = None, moved: float | None = None):
    """A hand-off of a prompt of which P computes all tokens but the last, a block of state in each of two groups."""
    filled = -(-(tokens - 1) // BLOCK)
    o = observation("pd-none", tokens)
    params = {
        **o.leg("prefill").kv_transfer_params,
        "remote_num_tokens": tokens - 1 if count is None else count,
        "remote_block_ids": [[20], [21], list(range(1, 1 + filled))] if groups is None else groups,
    }
    computed = dict.fromkeys(("prompt_tokens", "prefix_queries", "prompt_tokens_local_compute"), tokens - 1.0)
    o = with_prefill(o, kv_transfer_params=params, counters={"finished_requests": 1.0, **computed})
    moved = 32768.0 * filled + STATE if moved is None else moved
    external = {"prompt_tokens_external_kv_transfer": tokens - 1.0, "prompt_tokens_local_compute": 1.0}
    return change_final(o, counters={**o.final.counters, "nixl_bytes": moved, **external})


def recorded(*last, block_size: int | None = BLOCK, lengths=LENGTHS, **changes: object) -> History:
    """A run of such a pair; ``last`` replaces the observations of the same prompts."""
    made = {o.prompt_id: o for o in (*(handed(n) for n in lengths), *last)}
    h = history([*made.values(), *(observation("single-none", n) for n in lengths)])
    engines = [e for name in ("pd-none", "single-none") for e in engines_of(name)]
    told = tuple(e.model_copy(update={"block_size": block_size}) for e in engines)
    return with_run(with_cells(h, recurrent=True, **changes), engines=told)


def check(h: History):
    return transfer.transfer(view(h, "pd-none"))


def test_a_healthy_pair_passes():
    judgement = judge(recorded(), lookups(LENGTHS))
    assert {c.cell: c.verdict for c in judgement.cells} == {"pd-none": Verdict.PASS, "single-none": Verdict.PASS}
    (pair,) = [c for c in judgement.cells if c.cell == "pd-none"]
    # P has not seen the last token, so its own answer is to another prompt.
    assert "prefill-token" not in {r.check for r in pair.results}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"count": 100}, "KV of 99 tokens, found remote_num_tokens = 100"),
        ({"groups": [[20, 22], [21], [1, 2, 3, 4]]}, "one block of state in KV-cache group 0, found 2"),
        ({"groups": [[20], [21], [1, 2, 3]]}, "= 4 blocks in KV-cache group 2, found 3"),
    ],
)
def test_another_token_or_number_of_blocks_is_a_regression(wrong, words):
    result = check(recorded(handed(100, **wrong), lengths=[*LENGTHS, 100]))
    assert result.verdict is Verdict.REGRESSION
    assert [f.prompt_id for f in result.findings] == ["p100"]
    assert words in result.findings[0].message


@pytest.mark.parametrize("moved", [32768.0 * 4, 32768.0 * 4 + STATE / 2, 32768.0 * 3 + STATE])
def test_state_or_block_that_did_not_move_is_unknown(moved):
    result = check(recorded(handed(100, moved=moved), lengths=[*LENGTHS, 100]))
    assert result.verdict is Verdict.UNKNOWN
    assert "expected NIXL to move 4 blocks of 32768 bytes and 35072 bytes of state" in result.findings[0].message


def test_no_state_in_any_hand_off_is_unknown():
    result = check(recorded(*(handed(n, moved=32768.0 * -(-(n - 1) // BLOCK)) for n in LENGTHS)))
    assert "found only blocks" in result.findings[0].message


@pytest.mark.parametrize(
    ("h", "words"),
    [
        (recorded(block_size=None), "their blocks have 32 tokens, but nothing"),
        (recorded(block_size=544), "their blocks have 32 tokens, but 544"),
        (recorded(windows=(None, 48)), "sliding windows, too"),
        (recorded(lengths=[20, 30]), "0 of 3 KV-cache groups of which P publishes a single block"),
        (recorded(*(handed(n, groups=[[20], [21]]) for n in LENGTHS)), "2 of 2 KV-cache groups"),
        (recorded(lengths=[100]), "no two hand-offs of unlike numbers of blocks"),
    ],
)
def test_what_is_not_known_makes_the_pair_unknown_with_the_reason(h, words):
    result = check(h)
    assert result.verdict is Verdict.UNKNOWN
    (finding,) = result.findings
    assert words in finding.message


def test_another_block_size_than_asked_for_is_unknown():
    h = with_profile(recorded(block_size=544), engine={"block_size": 32})
    (first, *_) = settings.engine_as_asked(view(h, "pd-none")).findings
    assert "engine.block_size: 32, found 544" in first.message


@pytest.mark.parametrize(
    ("tokens", "recurrent", "hit"), [(96, True, 64), (96, False, 32), (97, True, 64), (117, True, 64)]
)
def test_a_hit_with_a_drafter_may_recompute_a_block_that_ends_with_the_prompt(tokens, recurrent, hit):
    h = with_cells(history([observation("single-mtp", tokens)]), recurrent=recurrent, block_size=BLOCK)
    cell = view(h, "single-mtp")
    (o,) = cell.observations().values()
    assert cell.prefix_cache.expected_hit(o, o).least == hit


@pytest.mark.parametrize(
    ("cell", "changes", "retention", "route", "hit"),
    [
        # The donor of 117 tokens and its answer begin as the subject of 161 does: 160 tokens, or its own prompt's 96.
        ("single-none", {}, None, "cell", 160),
        ("single-none", {"recurrent": True}, None, "cell", 96),
        ("single-none", {"recurrent": True}, 0, "cell", 96),
        ("single-none", {"recurrent": True}, 32, "cell", 160),
        ("single-none", {"recurrent": True}, 64, "cell", 96),
        ("single-none", {"windows": (None, 48)}, 32, "cell", 160),
        ("single-none", {"windows": (None, 48)}, None, "cell", 96),
        # D has the end of a window alone, unless it was asked alone.
        ("pd-none", {"windows": (None, 48)}, 32, "cell", 0),
        ("pd-none", {"windows": (None, 48)}, None, "local", 96),
        ("pd-none", {"recurrent": True}, None, "cell", 96),
    ],
)
def test_windows_and_states_are_kept_where_a_prompt_would_be_asked_again(cell, changes, retention, route, hit):
    donor = change_final(observation(cell, 117, route=route), output_ids=tuple(range(117, 162)))
    subject = observation(cell, 161).model_copy(update={"sent_ids": (*donor.sent_ids, *range(117, 161))})
    h = with_cells(history([donor, subject]), block_size=32, **changes)
    seen = view(with_profile(h, engine={"prefix_cache_retention": retention}), cell)
    found = seen.prefix_cache.expected_hit(donor, subject)
    assert (found.least, found.most) == (hit, 160)


@pytest.mark.parametrize(
    ("changes", "retention", "hit"), [({"recurrent": True}, None, 0), ({"recurrent": True}, 32, 128), ({}, None, 128)]
)
def test_the_state_behind_a_prompt_serves_no_shorter_hit(changes, retention, hit):
    """P, asked for 161 tokens alone, has the state of 160; of a hand-off it computes 160, and may hit 128."""
    donor, subject = (observation("pd-none", 161, route=route) for route in ("prefill", "cell"))
    h = with_cells(history([donor, subject]), block_size=32, draft_tokens=0, **changes)
    seen = view(with_profile(h, engine={"prefix_cache_retention": retention}), "pd-none")
    subject = subject.model_copy(update={"sent_ids": subject.sent_ids[: 161 - (not changes)]})
    assert seen.prefix_cache.expected_hit(donor, subject, "prefill").least == hit


@pytest.mark.parametrize(("route", "hit"), [("prefill", 160), ("cell", 128)])
def test_p_has_the_answer_that_it_gave_alone(route, hit):
    donor = change_final(observation("pd-none", 159, route=route), output_ids=(159, 160))
    subject = observation("pd-none", 175).model_copy(update={"sent_ids": (*donor.sent_ids, *range(159, 175))})
    seen = view(with_cells(history([donor, subject]), block_size=32), "pd-none")
    assert seen.prefix_cache.expected_hit(donor, subject, "prefill").least == hit


@pytest.mark.parametrize(("version", "most"), [("0.32.0", 32), ("0.32.0+cu129", 32), ("0.33.0+cpu", 64), ("x", 32)])
def test_a_later_version_may_use_the_block_that_is_recomputed(version, most):
    h = history([observation("single-mtp", 96)])
    cell = view(with_run(h, versions={**h.run.versions, "vllm": version}), "single-mtp")
    (o,) = cell.observations().values()
    assert cell.prefix_cache.expected_hit(o, o).most == most


def test_an_appended_token_is_fetched_although_p_was_asked_for_less():
    """P was asked for all tokens but the last, and leaves none of them to D."""
    scenario = {"id": "appended", "kind": "appended-token", "prompts": ["p161"]}
    h = with_profile(history([observation("pd-none", 161, scenario="appended")]), scenarios=[scenario])
    cell = view(h, "pd-none", scenario="appended")
    (o,) = cell.observations().values()
    leg = o.final.model_copy(update={"counters": {**o.final.counters, "prefix_hits": 160.0}})
    assert (
        cell.hand_off.handed_tokens(o),
        cell.hand_off.fetched_tokens(o),
        cell.prefix_cache.has_all_cached(o, leg),
    ) == (160, 160, False)


@pytest.mark.parametrize(
    ("tokens", "cached", "recurrent", "all_cached"),
    [(97, 96, True, True), (97, 64, True, False), (98, 96, True, False), (97, 96, False, False)],
)
def test_nothing_moves_where_d_has_all_but_the_last_token_cached(tokens, cached, recurrent, all_cached):
    h = with_cells(history([observation("pd-none", tokens)]), recurrent=recurrent)
    cell = view(h, "pd-none")
    (o,) = cell.observations().values()
    leg = o.final.model_copy(update={"counters": {**o.final.counters, "prefix_hits": float(cached)}})
    assert cell.prefix_cache.has_all_cached(o, leg) is all_cached


@pytest.mark.parametrize(("cached", "early"), [(96.0, True), (64.0, False)])
def test_what_d_had_cached_excuses_no_lease_that_ends_early(cached, early):
    """D tells P that it needs nothing, which ends the lease; where it pulled nothing of what it lacks, P's must end."""
    h = with_cells(history([observation("pd-none", n, sequence=i) for i, n in enumerate((97, 120))]), recurrent=True)
    hit, after = h.observations
    hit = change_final(hit, counters={**hit.final.counters, "prefix_hits": cached, "nixl_bytes": 0.0})
    after = with_prefill(after, counters={"nixl_expired": 1.0})
    told = tuple(e.model_copy(update={"block_size": BLOCK}) for e in h.run.engines)
    cell = view(with_run(with_answers(h, (hit, after)), engines=told), "pd-none")
    assert bool(transfer._leases(cell)) is early


TRACE = {"id": "trace", "kind": "trace", "stages": [[{"prompt": "p97"}]]}


def together(tokens: int, counters: dict[str, float]) -> History:
    """Such a run with two requests of one prompt at the same time, which share D's counters."""
    h = recorded()
    asked = change_final(handed(tokens), counters={})
    common = {"scenario": "trace", "concurrent": 2, "shared_counters": {"decode": counters}}
    made = [asked.model_copy(update={**common, "part": f"r0-{i}", "sequence": 90 + i}) for i in range(2)]
    return with_profile(with_answers(h, (*h.observations, *made)), scenarios=[TRACE])


@pytest.mark.parametrize(
    ("tokens", "transfers", "external", "right", "counted_right"),
    [
        (97, 2, 192, True, True),
        (97, 1, 96, True, True),
        (97, 0, 0, True, True),
        (97, 0, 96, False, False),
        # One transfer, although D had nothing cached.
        (97, 1, 192, False, False),
        (97, 1, 95, False, True),
        (98, 1, 98, False, False),
    ],
)
def test_of_requests_together_d_may_have_all_cached(tokens, transfers, external, right, counted_right):
    """Each may have found the other's 96 tokens, and then nothing is left to pull of 97."""
    counters = {
        "nixl_bytes": (STATE + 3 * 32768.0) * transfers,
        "nixl_transfers": float(transfers),
        "prompt_tokens_external_kv_transfer": float(external),
        "prefix_hits": float((192 - external) // 96 * 96),
    }
    cell = view(together(tokens, {k: v for k, v in counters.items() if v}), "pd-none", scenario="trace")
    found = [f for f in transfer.transfer(cell).findings if "for requests sent together" in f.message]
    assert (not found) is right
    assert (not [f for f in counters_agree(cell).findings if "nixl_transfers" in f.message]) is counted_right
