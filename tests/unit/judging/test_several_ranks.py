"""Engines of several ranks, each of which moves and counts its own part: judged by what one hand-off means there."""

from __future__ import annotations

import pytest

from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.checks import counters, transfer
from tests.support.builders import (
    LAYERS,
    change_final,
    engine,
    history,
    observation,
    view,
    with_cells,
    with_prefill,
    with_profile,
)

LENGTHS = [31, 32, 40, 65]
TWO = {"tensor_parallel": {"prefill": 2, "decode": 1}}


def moved(o: Observation, transfers: float) -> Observation:
    return change_final(o, counters={**o.final.counters, "nixl_transfers": transfers})


def night(*transfers: float) -> list[Observation]:
    return [moved(observation("pd-none", n), made) for n, made in zip(LENGTHS, transfers, strict=True)]


def judged(check, made: list[Observation], **settings: object):
    return check(view(with_profile(history(made), engine=settings), "pd-none"))


@pytest.mark.parametrize(
    "settings", [TWO, {"tensor_parallel": {"decode": 2}}, {"extra_args": ["--pipeline-parallel-size=2"]}]
)
def test_a_hand_off_has_as_many_transfers_as_most(settings):
    assert judged(counters.counters_agree, night(2, 2, 2, 2), **settings).verdict is Verdict.PASS
    result = judged(counters.counters_agree, night(2, 2, 1, 2), **settings)
    assert result.verdict is Verdict.UNKNOWN and {f.prompt_id for f in result.findings} == {"p40"}


@pytest.mark.parametrize(
    "settings", [{}, {"tensor_parallel": {"prefill": 1}}, {"extra_args": ["--data-parallel-size=2"]}]
)
def test_one_rank_makes_one_transfer(settings):
    result = judged(counters.counters_agree, night(2, 2, 2, 2), **settings)
    assert len({f.prompt_id for f in result.findings}) == len(LENGTHS)


@pytest.mark.parametrize(("expired", "early"), [((1, 1), 0), ((2, 0), 0), ((2, 1), 1), ((2, 2), 1)])
def test_each_rank_of_p_counts_the_end_of_a_lease(expired, early):
    made = [
        with_prefill(observation("pd-none", n, sequence=i), counters={"nixl_expired": float(ended)})
        for i, (n, ended) in enumerate(zip((40, 65), expired, strict=True))
    ]
    engines = (engine("pd-none", "prefill").model_copy(update={"kept_blocks": 1}), engine("pd-none", "decode"))
    run = with_profile(history(made, engines=engines), engine=TWO)
    messages = [f.message for f in transfer.transfer(view(run, "pd-none")).findings]
    assert [m for m in messages if "leases that expired" in m] == [m for m in messages if f"found {early} leases" in m]
    assert bool(early) is any("leases that expired" in m for m in messages)


@pytest.mark.parametrize(("size", "others"), [(2, 0), (1, 2)])
def test_each_data_parallel_rank_of_p_has_a_name(size, others):
    made = [observation("pd-none", n) for n in (31, 32, 40, 65, 96)]
    for i, o in enumerate(made):
        params = {**o.legs[0].kv_transfer_params, "remote_engine_id": f"p_dp{i % 2}"}
        made[i] = with_prefill(o, kv_transfer_params=params)
    result = judged(transfer.transfer, made, extra_args=["--data-parallel-size", str(size)])
    assert len([f for f in result.findings if "the P of the other hand-offs" in f.message]) == others


WIDE = LAYERS["none"] * 32768 // (32 * 4)
"""Numbers of a token's KV that a hand-off moves of the stand-in model."""


@pytest.mark.parametrize(
    ("ranks", "share", "verdict"),
    [
        ({"prefill": 1, "decode": 2}, 1.0, Verdict.PASS),
        ({"prefill": 2, "decode": 1}, 1.0, Verdict.PASS),
        # Both ranks of D have the only head, and fetch it.
        ({"prefill": 1, "decode": 2}, 2.0, Verdict.PASS),
        # What one rank of D, or of P, has to move was not moved.
        ({"prefill": 1, "decode": 2}, 0.5, Verdict.UNKNOWN),
        ({"prefill": 4, "decode": 1}, 0.75, Verdict.UNKNOWN),
        ({"prefill": 1, "decode": 2}, 4.0, Verdict.UNKNOWN),
        ({"prefill": 1, "decode": 1}, 2.0, Verdict.UNKNOWN),
    ],
)
def test_the_ranks_of_a_pair_move_a_block_whole(ranks, share, verdict):
    made = []
    for o in night(2, 2, 2, 2):
        counters = {**o.final.counters, "nixl_bytes": o.final.counters["nixl_bytes"] * share}
        made.append(change_final(o, counters=counters))
    settings = {"tensor_parallel": ranks, "dtype": "float32"}
    run = with_cells(with_profile(history(made), engine=settings), kv_numbers=WIDE)
    result = transfer.transfer(view(run, "pd-none"))
    assert result.verdict is verdict, result.findings
    words = "layers or heads are missing"
    assert any(words in f.message for f in result.findings) is (verdict is not Verdict.PASS)
