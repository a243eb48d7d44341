"""The plugin that notes what KV caches hold, on caches of stand-in engines, and what is read from its notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.engines.witness import kv_harness_witness as plugin
from harness.errors import DataError
from harness.history.layout import WITNESS
from harness.history.witness import CELL, KeptBlocks, KVWitness, Noted, joined
from harness.observed.kv_notes import KVBounds, compare_kept, compare_notes, states_unpaired
from tests.support.kv_caches import (
    LAYERS,
    PROMPT,
    STATEFUL,
    AtOnce,
    StandInBackend,
    StandInRunner,
    StatefulRunner,
    as_in_an_engine,
    kv_of,
    state_of,
    take_note,
)


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
    assert (place.layer.name, place.layer.drafter, place.kind) == (LAYERS[1], False, ("keys", "values")[kind])
    assert (place.cell, place.heads, found.tokens, found.blocks) == (token // CELL, (2,), (token,), (token // 32,))
    assert place.distance < 0.01


@pytest.mark.parametrize("kept", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("way", ["side by side", "keys transposed"])
def test_quantised_numbers_are_told_apart(tmp_path: Path, way: str, kept: str) -> None:
    kv = kv_of(2)
    other = kv.clone()
    other[1, 0, 40, 2, 5] += 4
    ours = _noted(tmp_path, StandInRunner(other, 16, way, kept=kept), "decode")
    found = compare_notes(ours, _noted(tmp_path, StandInRunner(kv, 32, kept=kept), "prefill"))
    (place,) = found.places
    assert (place.layer.name, place.kind, place.cell, place.heads) == (LAYERS[1], "keys", 40 // CELL, (2,))
    assert 0.05 < place.distance < 1 and found.tokens == (40,)


def test_bytes_of_another_type_are_named_and_not_noted(tmp_path: Path) -> None:
    runner = StandInRunner(kv_of(2), 32, kept="fp8")
    runner.layers[LAYERS[0]].kv_cache_dtype = "int8_per_token_head"
    # The back end knows that type, and writes each element once.
    runner.layers[LAYERS[0]].impl = StandInBackend("side by side", otherwise="fp8")
    plugin.Witness(runner, AtOnce(tmp_path, "decode"))
    assert KVWitness(tmp_path).unseen["pd-eagle3"] == {LAYERS[0]: "its cache is of int8_per_token_head"}


def test_what_is_behind_the_prompt_does_not_count(tmp_path: Path) -> None:
    kv = kv_of(3)
    other = kv.clone()
    other[:, :, PROMPT:] = 7
    found = compare_notes(
        _noted(tmp_path, StandInRunner(other, 32), "decode"), _noted(tmp_path, StandInRunner(kv, 32), "prefill")
    )
    assert not found.differs


_ROUNDED = KVBounds(2e-3)


def _ending(folder: Path, kv: torch.Tensor, role: str, tokens: int = PROMPT) -> Noted:
    """Return the note of a request whose prompt has so many tokens."""
    runner = StandInRunner(kv, 32)
    take_note(plugin.Witness(runner, AtOnce(folder, role)), runner, role, "end", tokens)
    (noted,) = KVWitness(folder).noted(role, role, "end")  # type: ignore[arg-type]
    return noted


def test_a_token_that_is_only_rounded_is_not_named_beside_a_wrong_one(tmp_path: Path) -> None:
    kv = kv_of(4)
    other = kv.clone()
    other[2, :, 37] = 1.5
    other[2, :, 38:40] *= 1 + 1e-6
    ours, theirs = _ending(tmp_path, other, "decode"), _ending(tmp_path, kv, "prefill")
    assert compare_notes(ours, theirs).tokens == (37, 38, 39)
    assert compare_notes(ours, theirs, bounds=_ROUNDED).tokens == (37,)
    without = ours._replace(groups=tuple(g._replace(outlines=(None, None)) for g in ours.groups))
    assert compare_notes(without, theirs, bounds=_ROUNDED).tokens == (37, 38, 39)


@pytest.mark.parametrize("drafter", [False, True])
def test_the_last_tokens_are_compared_where_one_engine_has_more_of_their_cell(tmp_path: Path, drafter: bool) -> None:
    """P of several modules computes two tokens less than the single engine, so that no digest is of the same tokens."""
    kv = kv_of(5)
    rounded, other = kv * (1 + 1e-6), kv.clone()
    other[2 if drafter else 1, 0, PROMPT - 3] = kv[2 if drafter else 1, 0, 7]
    theirs = _ending(tmp_path, kv, "prefill")
    same, wrong = (_ending(tmp_path / str(n), x, "decode", PROMPT - 2) for n, x in enumerate((rounded, other)))
    assert not compare_notes(same, theirs, drafter=drafter, bounds=_ROUNDED).differs
    found = compare_notes(wrong, theirs, drafter=drafter, bounds=_ROUNDED)
    assert (found.tokens, found.places, found.drafter) == ((PROMPT - 3,), (), drafter)
    assert not compare_notes(wrong, theirs, drafter=not drafter, bounds=_ROUNDED).differs
    # Rounding that was measured is one of whole cells.
    measured = _ROUNDED._replace(by_layer={(LAYERS[0], False): 0.5})
    assert not compare_notes(wrong, theirs, drafter=drafter, bounds=measured).differs


@pytest.mark.parametrize("tokens", [1, 2, 14])
def test_rounding_up_to_its_bound_is_not_told_as_other_kv_of_a_few_tokens(tmp_path: Path, tokens: int) -> None:
    kv = kv_of(6)
    theirs = _ending(tmp_path, kv, "prefill", CELL * 4 + 15)
    for seed in range(40):
        other = kv.clone()
        noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(seed))
        other[:, :, CELL * 4 :] += 0.1 * noise[:, :, CELL * 4 :]
        ours = _ending(tmp_path / str(seed), other, "decode", CELL * 4 + tokens)
        assert not compare_notes(ours, theirs, drafter=False, bounds=KVBounds(0.1)).tokens


def _of_ranks(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kv: torch.Tensor,
    role: str,
    ranks: int,
    damaged: int | None = None,
    received: Sequence[int] | None = None,
) -> Noted:
    """Return what so many ranks of an engine noted together, of which one has a wrong number in its first head."""
    total = kv.shape[3]
    config = SimpleNamespace(get_total_num_kv_heads=lambda: total)
    copies = max(1, ranks // total)
    each = max(1, total // ranks)
    moment = "end" if received is None else "begin"
    for rank in range(ranks):
        first = rank // copies * each
        own = kv[:, :, :, first : first + each].clone()
        if rank == damaged:
            own[1, 0, 40, 0, 5] *= 1.001
        runner = StandInRunner(own, 32)
        runner.vllm_config = SimpleNamespace(
            model_config=config, speculative_config=SimpleNamespace(draft_model_config=config)
        )
        monkeypatch.setattr(plugin, "_rank", lambda rank=rank: (rank, ranks))
        writer = AtOnce(folder, role)
        writer.path = writer.path.with_name(f"pd-eagle3.{role}.{rank + 1}.jsonl")
        take_note(plugin.Witness(runner, writer), runner, role, moment, PROMPT, received)
    (whole,) = KVWitness(folder).noted(role, role, moment)
    return whole


@pytest.mark.parametrize(("of_p", "of_d"), [(1, 2), (2, 1), (2, 2), (1, 4), (2, 4), (8, 2), (1, 8)])
def test_engines_of_unlike_ranks_are_compared_head_by_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_p: int, of_d: int
) -> None:
    """Four heads: with eight ranks, two have each head."""
    kv = torch.cat([kv_of(1), kv_of(2)[:, :, :, :1]], dim=3)
    theirs = _of_ranks(tmp_path, monkeypatch, kv, "prefill", of_p)
    ours = _of_ranks(tmp_path, monkeypatch, kv, "decode", of_d, received=[0, 1, 2])
    found = compare_notes(ours, theirs, received=True)
    assert (found.cells, found.differs) == (6 * len(LAYERS), False)
    assert not compare_notes(ours, theirs, bounds=KVBounds(0.01)).differs


@pytest.mark.parametrize(("ranks", "damaged", "head"), [(2, 0, 0), (2, 1, 2), (4, 3, 3), (8, 4, 2), (8, 5, 2)])
def test_what_one_rank_lost_is_named_by_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, damaged: int, head: int
) -> None:
    kv = torch.cat([kv_of(1), kv_of(2)[:, :, :, :1]], dim=3)
    theirs = _of_ranks(tmp_path, monkeypatch, kv, "prefill", 1)
    ours = _of_ranks(tmp_path, monkeypatch, kv, "decode", ranks, damaged, received=[0, 1, 2])
    (place,) = compare_notes(ours, theirs, received=True).places
    assert (place.layer.name, place.kind, place.cell, place.heads) == (LAYERS[1], "keys", 40 // CELL, (head,))


def test_a_drafter_that_every_rank_has_whole_is_one_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of their own: the target's two heads are spread over two ranks, the drafter's one is copied."""
    kv = kv_of(1)
    runner = StandInRunner(kv[:, :, :, :1], 32)
    runner.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 1)),
    )
    for rank in range(2):
        monkeypatch.setattr(plugin, "_rank", lambda rank=rank: (rank, 2))
        writer = AtOnce(tmp_path, "decode")
        writer.path = writer.path.with_name(f"pd-eagle3.decode.{rank + 1}.jsonl")
        take_note(plugin.Witness(runner, writer), runner, "decode", "end", PROMPT)
    (whole,) = KVWitness(tmp_path).noted("decode", "decode", "end")
    assert {tuple(layer.name for layer in g.layers): g.digests.shape[-1] for g in whole.groups} == {
        LAYERS[:2]: 2,
        LAYERS[2:]: 1,
    }


@pytest.mark.parametrize("at_once", [{"_AT_ONCE": 2 * CELL}, {"_ELEMENTS": {"cpu": 1}}])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_long_prompts_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_size: int, at_once: dict[str, Any]
) -> None:
    runner = StandInRunner(kv_of(5), block_size)
    whole = _noted(tmp_path / "whole", runner, "decode").groups[0]
    # A block at a time, and a layer.
    for name, limit in at_once.items():
        monkeypatch.setattr(plugin, name, limit)
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
    assert {(p.cell, p.kind) for p in found.places} == {(0, "keys"), (1, "keys")}
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
    # Where one has more tokens of the last cell, too.
    found = compare_notes(ours, plain, drafter=False, bounds=_ROUNDED, tokens=PROMPT - 1)
    assert (found.cells, found.differs) == (5 * 2 + 1, False)


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
    assert unseen[LAYERS[0]] == "its cache is 2 tensors"
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

    @pytest.mark.parametrize(
        ("names", "hits"),
        [
            (["OffloadingConnector"], False),
            (["MultiConnector", "NixlConnector"], True),
            (["MultiConnector", "NixlConnector", "OffloadingConnector"], False),
        ],
    )
    def test_other_connectors_fill_blocks_that_are_no_hits(self, tmp_path, runner, names, hits) -> None:
        extra = {"connectors": [{"kv_connector": child} for child in names[1:]]}
        config = SimpleNamespace(kv_connector=names[0], kv_connector_extra_config=extra)
        runner.vllm_config = SimpleNamespace(kv_transfer_config=config)
        witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
        take_note(witness, runner, "a", "end", PROMPT)
        take_note(witness, runner, "b", "begin", [9] * PROMPT)
        kept = _kept(tmp_path)
        assert kept is not None and bool(kept.blocks or kept.foreign) is hits


class TestRecurrentState:
    """A target with attention and recurrent state, whose state after 64 tokens a prefix cache has."""

    @pytest.fixture(autouse=True)
    def _rows_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM says which axis of a convolution's state is its window; here the last one is."""
        monkeypatch.setattr(plugin, "_window_axis", lambda: 2)

    def _ended(self, folder: Path, states: dict[int, torch.Tensor], role: str = "decode", **more: int) -> Noted:
        runner = StatefulRunner(kv_of(1), states, **more)
        take_note(plugin.Witness(runner, AtOnce(folder, role)), runner, role, "end", PROMPT, states=sorted(states))
        (noted,) = KVWitness(folder).noted(role, role, "end")  # type: ignore[arg-type]
        return noted

    def test_states_are_compared_after_the_same_tokens(self, tmp_path: Path) -> None:
        ours = self._ended(tmp_path, {64: state_of(1), PROMPT: state_of(2)})
        theirs = self._ended(tmp_path, {64: state_of(1), PROMPT - 1: state_of(3)}, "prefill", drafts=3)
        assert [s.tokens for s in ours.states] == [64, PROMPT]
        found = compare_notes(ours, theirs)
        assert (found.states_compared, found.differs) == (len(STATEFUL), False)

    def test_which_axis_is_the_window_does_not_matter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An engine that NIXL connects has its inputs last, a plain one first."""
        ours = self._ended(tmp_path, {64: state_of(1)})
        monkeypatch.setattr(plugin, "_window_axis", lambda: 1)
        theirs = self._ended(tmp_path, {64: state_of(1)}, "prefill", drafts=3, window_axis=1)
        assert not compare_notes(ours, theirs).differs

    @pytest.mark.parametrize(
        ("at", "kind", "heads"), [(0, "convolution", ()), (11, "convolution", ()), (37, "state", (1,))]
    )
    def test_one_number_is_named(self, tmp_path: Path, at: int, kind: str, heads: tuple[int, ...]) -> None:
        other = state_of(1)
        other[1, at] += 1e-6
        ours, theirs = self._ended(tmp_path, {64: other}), self._ended(tmp_path, {64: state_of(1)}, "prefill")
        (found,) = compare_notes(ours, theirs).states
        assert (found.layer.name, found.kind, found.tokens, found.heads) == (STATEFUL[1], kind, 64, heads)
        assert found.distance < 1e-5
        assert not compare_notes(ours, theirs, bounds=KVBounds(of_states=2e-3)).differs
        assert not compare_notes(ours, theirs, tokens=63).states

    def test_a_lost_state_is_zeros(self, tmp_path: Path) -> None:
        ours = self._ended(tmp_path, {64: torch.zeros_like(state_of(1))})
        found = compare_notes(
            ours, self._ended(tmp_path, {64: state_of(1)}, "prefill"), bounds=KVBounds(of_states=0.2)
        ).states
        assert [(s.zeros, s.heads) for s in found] == 2 * [(True, ()), (True, (0, 1))]

    def test_without_a_prefix_cache_the_first_block_has_it(self, tmp_path: Path) -> None:
        runner = StatefulRunner(kv_of(1), {32: state_of(4)}, mode="none")
        take_note(plugin.Witness(runner, AtOnce(tmp_path, "decode")), runner, "a", "end", PROMPT, states=[PROMPT])
        noted = KVWitness(tmp_path).noted("a", "decode", "end")[0]
        theirs = self._ended(tmp_path / "b", {PROMPT: state_of(4)}, "prefill")
        assert compare_notes(noted, theirs).states_compared == 2
        assert not compare_notes(noted, theirs).states

    def _hit(self, folder: Path, damage: bool = False, tokens: Sequence[int] = range(64)) -> Noted:
        runner = StatefulRunner(kv_of(1), {64: state_of(1)})
        witness = plugin.Witness(runner, AtOnce(folder, "decode"))
        take_note(witness, runner, "a", "end", PROMPT, states=[64])
        if damage:
            runner.put(64, state_of(9))
        take_note(witness, runner, "b", "begin", list(tokens))
        return KVWitness(folder).noted("b", "decode", "begin")[0]

    def test_a_state_that_the_prefix_cache_finds_is_as_it_was(self, tmp_path: Path) -> None:
        hit = self._hit(tmp_path)
        assert hit.states[0].kept is not None and not hit.states[0].foreign
        found = compare_kept(hit)
        assert (found.states_compared, found.differs) == (2, False)

    def test_one_that_was_overwritten_is_named(self, tmp_path: Path) -> None:
        found = compare_kept(self._hit(tmp_path, damage=True)).states
        assert {(s.layer.name, s.kind) for s in found} == {(n, k) for n in STATEFUL for k in ("convolution", "state")}

    def test_one_of_other_tokens_is_foreign(self, tmp_path: Path) -> None:
        assert self._hit(tmp_path, tokens=[9, *range(1, 64)]).states[0].foreign

    def test_one_that_was_sent_is_no_hit_and_needs_its_senders_note(self, tmp_path: Path) -> None:
        runner = StatefulRunner(kv_of(1), {64: state_of(1)})
        witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
        take_note(witness, runner, "b", "begin", 64, received=[0, 1])
        (state,) = KVWitness(tmp_path).noted("b", "decode", "begin")[0].states
        assert (state.received, state.kept, state.foreign) == (True, None, False)
        received = KVWitness(tmp_path).noted("b", "decode", "begin")[0]
        assert states_unpaired(received, self._ended(tmp_path / "p", {32: state_of(1)}, "prefill")) == (64,)
        sent = self._ended(tmp_path / "q", {64: state_of(1)}, "prefill")
        assert states_unpaired(received, sent) == ()
        assert compare_notes(received, sent, received=True).states_compared == 2

    def test_damaged_notes_are_refused(self, tmp_path: Path) -> None:
        self._ended(tmp_path, {64: state_of(1)})
        (path,) = (tmp_path / WITNESS).iterdir()
        whole = path.read_text()
        states = whole.index('"states": [{"group": 1, "tokens"')
        for was, damaged in (
            ('"group": 1', '"group": 2'),
            ('"digests": "', '"digests": "AAAAAAAAAAA='),
            ('"sketches": "', '"sketches": "AAAA'),
            ('"tokens": 64', '"tokens": 0'),
        ):
            path.write_text(whole[:states] + whole[states:].replace(was, damaged, 1))
            with pytest.raises(DataError):
                KVWitness(tmp_path).noted("decode", "decode", "end")

    def test_ranks_have_a_part_each(self, tmp_path: Path) -> None:
        one = self._ended(tmp_path, {64: state_of(1)})
        (path,) = (tmp_path / WITNESS).iterdir()
        other = path.read_text().replace('"rank": 0', '"rank": 1')
        path.with_name("pd-eagle3.decode.2.jsonl").write_text(other)
        both = KVWitness(tmp_path).noted("decode", "decode", "end")[0].states[0]
        assert [layer.parts for layer in both.layers] == [(2, 4), (2, 4)]
        assert (both.digests[1][1][:2] == one.states[0].digests[1][1]).all()
        assert (both.sketches == 2 * one.states[0].sketches).all()


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


@pytest.mark.parametrize("left", [1, 2])
def test_an_answer_is_joined_to_its_prompt_where_a_window_has_left_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    held = plugin.Witness._still_held
    null = [plugin._NULL_BLOCK] * left
    monkeypatch.setattr(plugin.Witness, "_still_held", lambda *args: [*null, *held(*args)[left:]])
    runner = StandInRunner(kv_of(3), 32)
    take_note(plugin.Witness(runner, AtOnce(tmp_path, "decode")), runner, "a", "end", 20, answer=PROMPT)
    take_note(plugin.Witness(runner, AtOnce(tmp_path, "prefill")), runner, "turn", "end", 20 + PROMPT)
    witness = KVWitness(tmp_path)
    (prompt,), (answer,) = witness.noted("a", "decode", "end"), witness.noted("a", "decode", "answer")
    (turn,) = witness.noted("turn", "prefill", "end")
    for ours, whole in zip(joined(prompt, answer).groups, turn.groups, strict=True):
        assert (ours.counted == whole.counted).all() and not ours.counted[: 32 * left].any()
        assert (ours.digests == whole.digests).all() and (ours.marks[1] == whole.marks[1]).all()


def test_a_plugin_that_fails_says_so_and_raises_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "_writer", AtOnce(tmp_path, "decode"))
    plugin._ended(StandInRunner(kv_of(1), 32), SimpleNamespace())
    assert KVWitness(tmp_path).errors["pd-eagle3"] == [
        "AttributeError: 'types.SimpleNamespace' object has no attribute 'finished_req_ids'"
    ]
    plugin._witnesses.clear()
