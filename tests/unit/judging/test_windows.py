"""Pairs whose layers have windows: what P hands over of several KV-cache groups, and what cannot be told of it."""

from __future__ import annotations

import pytest

from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.checks import transfer
from harness.prompts.lengths import published_blocks
from tests.support.builders import change_final, history, observation, view, with_cells, with_prefill

LENGTHS = [31, 65, 120]


@pytest.mark.parametrize(("lengths", "unknown"), [(LENGTHS, True), ([31, 40], False)])
def test_unseen_hand_offs_of_prompts_longer_than_a_window_are_unknown_with_the_reason(lengths, unknown):
    made = [observation("pd-none", n) for n in lengths]
    unseen = [o.model_copy(update={"legs": o.legs[1:], "engine_roles": ("decode",)}) for o in made]
    cell = view(with_cells(history(unseen), windows=(None, 48)), "pd-none")
    why = "which blocks of a model with windows P hands over, found no hand-off whose parameters were seen"
    assert any(why in f.message for f in transfer.transfer(cell).findings) is unknown


def with_bytes(o: Observation, moved: float) -> Observation:
    return change_final(o, counters={**o.final.counters, "nixl_bytes": moved})


@pytest.mark.parametrize(("extra", "verdict"), [(1, Verdict.PASS), (0, Verdict.UNKNOWN)])
def test_a_drafter_may_change_how_many_layers_a_block_holds(extra, verdict):
    """The target alone has one group of three layers; with its drafter, groups of one."""
    plain = [observation("pd-none", n) for n in LENGTHS]
    drafted = []
    for o in (observation("pd-eagle3", n) for n in LENGTHS):
        (blocks,) = o.legs[0].kv_transfer_params["remote_block_ids"]
        groups = [[len(blocks) * group + block for block in blocks] for group in range(3 + extra)]
        o = with_prefill(o, kv_transfer_params={**o.legs[0].kv_transfer_params, "remote_block_ids": groups})
        drafted.append(with_bytes(o, 32768.0 * len(blocks) * (3 + extra)))
    assert transfer.transfer(view(history([*plain, *drafted]), "pd-eagle3")).verdict is verdict


PULLED = {31: (1, 1, 1), 65: (3, 3, 3), 120: (4, 2, 4), 200: (7, 3, 4)}
"""Blocks of 32 that D pulls of a prompt: of layers without a window, with one of 48 tokens, and with one of 96."""


@pytest.mark.parametrize(("less", "verdict"), [(0, Verdict.PASS), (1, Verdict.UNKNOWN)])
def test_each_group_has_its_own_window(less, verdict):
    made = []
    for n, pulled in PULLED.items():
        o = observation("pd-none", n)
        published = [list(range(1, 1 + published_blocks(n, 32, window))) for window in (None, 48, 96)]
        o = with_prefill(o, kv_transfer_params={**o.legs[0].kv_transfer_params, "remote_block_ids": published})
        made.append(with_bytes(o, 32768.0 * (sum(pulled) - less * (n == 200))))
    cell = view(with_cells(history(made), windows=(None, 48, 96)), "pd-none")
    assert transfer.transfer(cell).verdict is verdict


@pytest.mark.parametrize(
    ("windowed", "full", "found"),
    [
        ([7, 8, 9], [1, 2, 3, 4], None),
        ([0, 8, 9], [1, 2, 3, 4], None),
        # The token after the prompt sees the last two blocks.
        ([0, 0, 9], [1, 2, 3, 4], "in KV-cache group 1, found 0"),
        ([7, 0, 9], [1, 2, 3, 4], "in KV-cache group 1, found 0"),
        ([7, 8, 9], [0, 2, 3, 4], "in KV-cache group 0, found 0"),
        ([0, 9, 9], [1, 2, 3, 4], "published a block of KV-cache group 1 twice"),
    ],
)
def test_blocks_that_a_window_has_left_are_published_as_the_null_block(windowed, full, found):
    o = observation("pd-none", 120)
    given = {**o.legs[0].kv_transfer_params, "remote_block_ids": [full, windowed]}
    cell = view(with_cells(history([with_prefill(o, kv_transfer_params=given)]), windows=(None, 48)), "pd-none")
    told = [f.message for f in transfer.transfer(cell).findings if "of its pool" in f.message or "twice" in f.message]
    assert told == [] if found is None else found in told[0]


@pytest.mark.parametrize("told", [False, True])
def test_any_group_may_have_the_window_until_a_longer_hand_off_tells_which(told):
    """Of 96 tokens, P publishes three blocks of each group, the first of which a window of 48 has left."""
    groups = {96: [[0, 2, 3], [7, 8, 9]], 120: [[1, 2, 3, 4], [7, 8, 9]]}
    made = []
    for n in (96, 120) if told else (96,):
        o = observation("pd-none", n)
        made.append(with_prefill(o, kv_transfer_params={**o.legs[0].kv_transfer_params, "remote_block_ids": groups[n]}))
    cell = view(with_cells(history(made), windows=(None, 48)), "pd-none")
    found = [f for f in transfer.transfer(cell).findings if "of its pool" in f.message]
    assert bool(found) is told and {f.verdict for f in found} <= {Verdict.REGRESSION}


@pytest.mark.parametrize("count", [None, "40", 40.0, [40]])
def test_a_number_of_tokens_that_is_none_hides_no_other_finding(count):
    odd, short = observation("pd-none", 40), observation("pd-none", 65)
    odd = with_prefill(odd, kv_transfer_params={**odd.legs[0].kv_transfer_params, "remote_num_tokens": count})
    short = with_prefill(short, kv_transfer_params={**short.legs[0].kv_transfer_params, "remote_num_tokens": 64})
    result = transfer.transfer(view(history([odd, short]), "pd-none"))
    assert result.verdict is Verdict.REGRESSION
    found = {f.prompt_id: f for f in result.findings if "remote_num_tokens" in f.message}
    assert found["p40"].verdict is Verdict.UNKNOWN and found["p65"].verdict is Verdict.REGRESSION
