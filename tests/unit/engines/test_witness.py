"""The plugin that notes what KV caches hold, on caches of stand-in engines, and what is read from its notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.engines.witness import kv_harness_witness as plugin
from harness.errors import DataError
from harness.history.layout import WITNESS
from harness.history.witness import CELL, KeptBlocks, KVWitness, Noted, joined
from harness.observed.kv_notes import KVBounds, compare_kept, compare_notes
from tests.support.kv_caches import LAYERS, PROMPT, AtOnce, StandInRunner, as_in_an_engine, kv_of, take_note


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    with as_in_an_engine():
        yield


def _noted(
    folder: Path, runner: StandInRunner, role: str, moment: str = "end", received: Sequence[int] | None = None
) -> Noted:
    take_note(plugin.Witness(runner, AtOnce(folder, role)), runner, role, moment, PROMPT, received)
    (first,) = KVWitness(folder).noted(role, role, moment)  # type: ignore[arg-type]
    return first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("way", ["side by side", "keys transposed"])
def test_notes_do_not_depend_on_layout_or_block_size(
    tmp_path: Path, way: str, block_size: int, dtype: torch.dtype
) -> None:
    kv = kv_of(1, dtype=dtype)
    ours = _noted(tmp_path, StandInRunner(kv, block_size, way), "decode")
    theirs = _noted(tmp_path, StandInRunner(kv, 32), "prefill")
    found = compare_notes(ours, theirs)
    assert found.cells == 6 * len(LAYERS)
    assert not found.differs


@pytest.mark.parametrize("token", [0, 15, 16, 47, 80, PROMPT - 1])
@pytest.mark.parametrize("kind", [0, 1])
def test_one_element_is_named_by_layer_kind_head_and_token(tmp_path: Path, token: int, kind: int) -> None:
    kv = kv_of(2)
    other = kv.clone()
    other[1, kind, token, 2, 5] *= 1.001
    found = compare_notes(
        _noted(tmp_path, StandInRunner(other, 32), "decode"), _noted(tmp_path, StandInRunner(kv, 32), "prefill")
    )
    (place,) = found.places
    assert (place.layer.name, place.layer.drafter, place.values) == (LAYERS[1], False, bool(kind))
    assert (place.cell, place.heads, found.tokens, found.blocks) == (token // CELL, (2,), (token,), (token // 32,))
    assert place.distance < 0.01


def test_what_is_behind_the_prompt_does_not_count(tmp_path: Path) -> None:
    kv = kv_of(3)
    other = kv.clone()
    other[:, :, PROMPT:] = 7
    found = compare_notes(
        _noted(tmp_path, StandInRunner(other, 32), "decode"), _noted(tmp_path, StandInRunner(kv, 32), "prefill")
    )
    assert not found.differs


def test_long_prompts_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = StandInRunner(kv_of(5), 32)
    whole = _noted(tmp_path / "whole", runner, "decode").groups[0]
    monkeypatch.setattr(plugin, "_AT_ONCE", 2 * CELL)
    parts = _noted(tmp_path / "parts", runner, "decode").groups[0]
    assert (parts.digests == whole.digests).all() and (parts.sketches == whole.sketches).all()
    assert parts.marks is not None and whole.marks is not None
    assert all((a == b).all() for a, b in zip(parts.marks, whole.marks, strict=True))


def test_zeros_and_shifts_are_told(tmp_path: Path) -> None:
    kv = kv_of(4)
    lost, shifted = kv.clone(), kv.clone()
    lost[0, 0, :32] = 0
    shifted[:, :, 32:64] = kv[:, :, :32]
    theirs = _noted(tmp_path, StandInRunner(kv, 32), "prefill")
    found = compare_notes(_noted(tmp_path / "a", StandInRunner(lost, 32), "decode"), theirs)
    assert all(p.zeros and p.elsewhere is None and p.distance == pytest.approx(1, abs=1e-2) for p in found.places)
    assert {(p.cell, p.values) for p in found.places} == {(0, False), (1, False)}
    found = compare_notes(_noted(tmp_path / "b", StandInRunner(shifted, 32), "decode"), theirs)
    assert {(p.cell, p.elsewhere) for p in found.places} == {(2, 0), (3, 1)}
    assert found.tokens == tuple(range(32, 64))
    assert {p.layer.drafter for p in found.places} == {False, True}


def test_only_received_blocks_are_compared_where_asked(tmp_path: Path) -> None:
    kv = kv_of(5)
    other = kv.clone()
    other[:, :, :32] = 0
    runner = StandInRunner(other, 32)
    ours = _noted(tmp_path, runner, "decode", "begin", received=range(1, len(runner.blocks)))
    theirs = _noted(tmp_path, StandInRunner(kv, 32), "prefill")
    assert not compare_notes(ours, theirs, received=True).differs
    assert compare_notes(ours, theirs).blocks == (0,)


def test_an_engine_without_a_drafter_is_compared_in_the_targets_layers(tmp_path: Path) -> None:
    kv = kv_of(6)
    other = kv.clone()
    other[2] = 0
    ours = _noted(tmp_path, StandInRunner(other, 32), "decode")
    plain = _noted(tmp_path, StandInRunner(kv, 32, draft=False), "prefill")
    found = compare_notes(ours, plain, drafter=False)
    assert found.cells == 6 * 2
    assert not found.differs


def test_rounding_is_within_a_bound_and_a_lost_head_is_not(tmp_path: Path) -> None:
    kv = kv_of(7)
    rounded, lost = kv * (1 + 1e-6), kv.clone()
    lost[1, 0, 40, 0] = 0
    theirs = _noted(tmp_path, StandInRunner(kv, 32), "prefill")
    ours = _noted(tmp_path / "a", StandInRunner(rounded, 32), "decode")
    assert compare_notes(ours, theirs).differs
    assert not compare_notes(ours, theirs, bounds=KVBounds(2e-3)).differs
    (place,) = compare_notes(
        _noted(tmp_path / "b", StandInRunner(lost, 32), "decode"), theirs, bounds=KVBounds(2e-3)
    ).places
    assert place.distance > 0.05
    assert place.heads == (0,)


def test_tokens_of_cells_that_reach_further_on_one_side_are_compared(tmp_path: Path) -> None:
    kv = kv_of(8)
    other = kv.clone()
    other[0, 0, 81] = 0
    runner = StandInRunner(other, 32)
    take_note(plugin.Witness(runner, AtOnce(tmp_path, "decode")), runner, "x", "end", PROMPT - 1)
    (ours,) = KVWitness(tmp_path).noted("x", "decode", "end")
    found = compare_notes(ours, _noted(tmp_path, StandInRunner(kv, 32), "prefill"))
    assert (found.places, found.tokens) == ((), (81,))


def test_a_cache_of_another_kind_is_named_and_not_noted(tmp_path: Path) -> None:
    runner = StandInRunner(kv_of(9), 32)
    runner.layers[LAYERS[0]].kv_cache = [torch.zeros(3), torch.zeros(3)]
    runner.layers[LAYERS[1]].impl.way = "of one"
    plugin.Witness(runner, AtOnce(tmp_path, "decode"))
    unseen = KVWitness(tmp_path).unseen["pd-eagle3"]
    assert unseen[LAYERS[0]] == "its cache is 2 tensors, as that of recurrent state"
    assert unseen[LAYERS[1]] == "its backend does not write each element of a block once"


def test_requests_of_routers_are_told_by_prompt_and_group(tmp_path: Path) -> None:
    prompt = tuple(range(PROMPT))
    routed = "___prefill_addr_127.0.0.1:{}___decode_addr_127.0.0.1:2_{}"
    for group, port in (("pd-none", 1), ("pd-mtp", 3)):
        for role in ("prefill", "decode"):
            runner = StandInRunner(kv_of(1), 32)
            witness = plugin.Witness(runner, AtOnce(tmp_path, role, group))
            for id_ in "ab":
                take_note(witness, runner, routed.format(port, id_ * 32), "end", PROMPT)
    found = KVWitness(tmp_path).routed("pd-mtp", prompt)
    assert found == [f"___prefill_addr_127.0.0.1:3___decode_addr_127.0.0.1:2_{id_ * 32}" for id_ in "ab"]
    assert len(KVWitness(tmp_path).noted(found[0], "prefill", "end")) == 1
    assert KVWitness(tmp_path).routed("pd-mtp", prompt[:-1]) == []


def test_damaged_notes_are_refused(tmp_path: Path) -> None:
    _noted(tmp_path, StandInRunner(kv_of(1), 32), "decode")
    (path,) = (tmp_path / WITNESS).iterdir()
    whole = path.read_text()
    for was, damaged in (
        ('"moment": "end"', '"moment": "end", "more": 1'),
        ('"digests": "', '"digests": "A'),
        ('"sketches": "', '"sketches": "AAAA'),
        ('"marks": ["', '"marks": ["AAAA'),
        ('{"group": 0, "counted"', '{"group": 1, "counted"'),
    ):
        assert was in whole
        path.write_text(whole.replace(was, damaged))
        with pytest.raises(DataError):
            KVWitness(tmp_path).noted("decode", "decode", "end")
    path.write_text("{\n")
    with pytest.raises(DataError, match="damaged"):
        KVWitness(tmp_path)
    # A line that an engine was writing when it was killed is left out.
    path.write_text(whole[: len(whole) - 20])
    assert KVWitness(tmp_path).noted("decode", "decode", "end") == []


def _kept(folder: Path) -> KeptBlocks | None:
    (found,) = KVWitness(folder).noted("b", "decode", "begin")
    return found.groups[0].kept


class TestPrefixCache:
    """A request that ended, then another one of the same tokens that finds its blocks."""

    @pytest.fixture
    def runner(self) -> StandInRunner:
        return StandInRunner(kv_of(1), 32)

    @pytest.fixture
    def witness(self, runner: StandInRunner, tmp_path: Path) -> plugin.Witness:
        witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
        take_note(witness, runner, "a", "end", PROMPT, answer=60)
        return witness

    def test_blocks_of_prompt_and_answer_are_as_they_were(self, tmp_path, runner, witness) -> None:
        turn = [*range(PROMPT), *range(60), 7, 7]
        take_note(witness, runner, "b", "begin", turn)
        kept = _kept(tmp_path)
        assert kept is not None and (kept.blocks, kept.foreign) == ((0, 1, 2, 3), ())
        found = compare_kept(KVWitness(tmp_path).noted("b", "decode", "begin")[0])
        assert (found.cells, found.differs) == (4 * 2 * len(LAYERS), False)

    @pytest.mark.parametrize("token", [3, PROMPT - 1, PROMPT, 120])
    def test_a_block_that_was_overwritten_is_named(self, tmp_path, runner, witness, token: int) -> None:
        slot = torch.tensor([runner.blocks[token // 32] * 32 + token % 32])
        other = torch.zeros((1, 3, 8))
        runner.layers[LAYERS[1]].impl.do_kv_cache_update(None, other, other, runner.layers[LAYERS[1]].kv_cache, slot)
        take_note(witness, runner, "b", "begin", [*range(PROMPT), *range(60), 7, 7])
        found = compare_kept(KVWitness(tmp_path).noted("b", "decode", "begin")[0])
        assert {(p.layer.name, p.cell, p.heads) for p in found.places} == {(LAYERS[1], token // CELL, (0, 1, 2))}
        assert found.blocks == (token // 32,)

    def test_blocks_that_were_filled_for_other_tokens_are_named(self, tmp_path, runner, witness) -> None:
        take_note(witness, runner, "b", "begin", [*range(32), 9, *range(33, PROMPT)])
        kept = _kept(tmp_path)
        assert kept is not None and (kept.blocks, kept.foreign) == ((0, 1), (1,))

    def test_a_block_that_another_request_has_taken_is_that_ones(self, tmp_path, runner, witness) -> None:
        witness.requests["cmpl-c-0"] = plugin.WatchedRequest([5] * 64, 64, 1)
        witness.take("cmpl-c-0", [runner.blocks[1:2]], 0)
        take_note(witness, runner, "b", "begin", PROMPT)
        kept = _kept(tmp_path)
        # What it holds now is not known before that one has ended; that it is not for these tokens is.
        assert kept is not None and (kept.blocks, kept.foreign) == ((0,), (1,))

    def test_what_another_engine_filled_is_not_a_hit(self, tmp_path, runner, witness) -> None:
        witness.forget([runner.blocks[:1]])
        take_note(witness, runner, "b", "begin", PROMPT, received=[0])
        kept = _kept(tmp_path)
        assert kept is not None and (kept.blocks, kept.foreign) == ((1,), ())

    def test_the_oldest_blocks_are_forgotten(self, tmp_path, runner, monkeypatch) -> None:
        monkeypatch.setattr(plugin, "_MOST_KEPT", 1)
        witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
        take_note(witness, runner, "a", "end", PROMPT)
        take_note(witness, runner, "b", "begin", PROMPT)
        kept = _kept(tmp_path)
        assert kept is not None and kept.blocks == (1,)

    def test_a_block_that_a_window_left_and_another_took_does_not_count(self, tmp_path, runner, witness) -> None:
        witness.requests["cmpl-w-0"] = plugin.WatchedRequest(range(PROMPT), PROMPT, 1)
        witness.take("cmpl-w-0", [runner.blocks], 0)
        witness.requests["cmpl-c-0"] = plugin.WatchedRequest([5] * 64, 64, 1)
        witness.take("cmpl-c-0", [runner.blocks[:1]], 0)
        witness.end("cmpl-w-0", range(PROMPT))
        (found,) = KVWitness(tmp_path).noted("w", "decode", "end")
        assert not found.groups[0].counted[:32].any() and found.groups[0].counted[32:PROMPT].all()

    def test_other_connectors_fill_blocks_that_are_no_hits(self, tmp_path, runner) -> None:
        runner.vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector"))
        witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
        take_note(witness, runner, "a", "end", PROMPT)
        take_note(witness, runner, "b", "begin", [9] * PROMPT)
        kept = _kept(tmp_path)
        assert kept is not None and (kept.blocks, kept.foreign) == ((), ())


def test_an_answer_is_noted_behind_the_cells_that_its_prompt_fills(tmp_path: Path) -> None:
    runner = StandInRunner(kv_of(3), 32)
    take_note(plugin.Witness(runner, AtOnce(tmp_path, "decode")), runner, "a", "end", PROMPT, answer=40)
    witness = KVWitness(tmp_path)
    (prompt,), (answer,) = witness.noted("a", "decode", "end"), witness.noted("a", "decode", "answer")
    counted = answer.groups[0].counted
    assert not counted[:80].any() and counted[80 : PROMPT + 40].all() and not counted[PROMPT + 40 :].any()
    whole = joined(prompt, answer)
    take_note(plugin.Witness(runner, AtOnce(tmp_path, "prefill")), runner, "turn", "end", PROMPT + 40)
    found = compare_notes(whole, KVWitness(tmp_path).noted("turn", "prefill", "end")[0])
    assert (found.cells, found.differs) == (8 * len(LAYERS), False)


def test_a_plugin_that_fails_says_so_and_raises_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "_writer", AtOnce(tmp_path, "decode"))
    plugin._ended(StandInRunner(kv_of(1), 32), SimpleNamespace())
    assert KVWitness(tmp_path).errors["pd-eagle3"] == [
        "AttributeError: 'types.SimpleNamespace' object has no attribute 'finished_req_ids'"
    ]
    plugin._witnesses.clear()
