"""The plugin's notes of caches that keep one latent of each token (MLA), on caches of stand-in engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.engines.witness import kv_harness_witness as plugin
from harness.errors import DataError
from harness.history.witness import CELL, KEYS_AND_VALUES, LATENT, KVWitness, Noted
from harness.observed.kv_notes import KVBounds, compare_kept, compare_notes
from tests.support.kv_caches import (
    LAYERS,
    PROMPT,
    RANK,
    ROTATED,
    AtOnce,
    LatentRunner,
    StandInRunner,
    as_in_an_engine,
    kv_of,
    take_note,
)


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    with as_in_an_engine():
        yield


def _noted(folder: Path, runner: Any, role: str, received: Sequence[int] | None = None) -> Noted:
    moment = "end" if received is None else "begin"
    take_note(plugin.Witness(runner, AtOnce(folder, role)), runner, role, moment, PROMPT, received)
    (noted,) = KVWitness(folder).noted(role, role, moment)  # type: ignore[arg-type]
    return noted


def _unseen(folder: Path, runner: Any) -> dict[str, str]:
    plugin.Witness(runner, AtOnce(folder, "decode"))
    return KVWitness(folder).unseen["pd-eagle3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_notes_of_latents_do_not_depend_on_the_block_size(tmp_path: Path, block_size: int, dtype: torch.dtype) -> None:
    kv = kv_of(1, dtype=dtype)
    ours = _noted(tmp_path, LatentRunner(kv, block_size), "decode")
    theirs = _noted(tmp_path, LatentRunner(kv, 32), "prefill")
    found = compare_notes(ours, theirs)
    assert (found.cells, found.differs) == (6 * len(LAYERS), False)
    # In one KV-cache group, the drafter has keys and values.
    assert {tuple(x.name for x in g.layers): g.kinds for g in ours.groups} == {
        LAYERS[:2]: LATENT,
        LAYERS[2:]: KEYS_AND_VALUES,
    }


@pytest.mark.parametrize("element", [0, RANK - 1, RANK, RANK + ROTATED - 1])
@pytest.mark.parametrize("token", [0, 16, PROMPT - 1])
def test_one_element_of_a_latent_is_named_by_layer_and_token(tmp_path: Path, token: int, element: int) -> None:
    kv = kv_of(2)
    other = kv.clone()
    other[1, 0, token].view(-1)[element] *= 1.001
    ours = _noted(tmp_path, LatentRunner(other, 16), "decode", received=range(6))
    found = compare_notes(ours, _noted(tmp_path, LatentRunner(kv, 32), "prefill"), received=True)
    (place,) = found.places
    assert (place.layer.name, place.kind, place.cell, place.heads) == (LAYERS[1], "latent", token // CELL, ())
    assert (found.tokens, found.blocks, place.zeros, place.elsewhere) == ((token,), (token // 16,), False, None)


def test_zeros_and_shifts_of_latents_are_told(tmp_path: Path) -> None:
    kv = kv_of(3)
    lost, shifted = kv.clone(), kv.clone()
    lost[:2, :, :32] = 0
    shifted[:2, :, 32:64] = kv[:2, :, :32]
    theirs = _noted(tmp_path, LatentRunner(kv, 32), "prefill")
    found = compare_notes(_noted(tmp_path / "a", LatentRunner(lost, 32), "decode"), theirs)
    assert {(p.layer.name, p.cell, p.zeros) for p in found.places} == {(x, c, True) for x in LAYERS[:2] for c in (0, 1)}
    found = compare_notes(_noted(tmp_path / "b", LatentRunner(shifted, 32), "decode"), theirs)
    assert {(p.cell, p.elsewhere) for p in found.places} == {(2, 0), (3, 1)}


def test_rounded_latents_are_told_from_wrong_ones(tmp_path: Path) -> None:
    kv = kv_of(4)
    wrong = kv.clone()
    wrong[0, :, 40] = kv[0, :, 41]
    theirs = _noted(tmp_path, LatentRunner(kv, 32), "prefill")
    rounded = _noted(tmp_path / "a", LatentRunner(kv * (1 + 1e-6), 32), "decode")
    assert compare_notes(rounded, theirs).differs
    assert not compare_notes(rounded, theirs, bounds=KVBounds(2e-3)).differs
    found = compare_notes(_noted(tmp_path / "b", LatentRunner(wrong, 32), "decode"), theirs, bounds=KVBounds(2e-3))
    assert found.tokens == (40,) and found.places[0].distance > 0.05


def test_quantised_latents_are_read(tmp_path: Path) -> None:
    kv = kv_of(5)
    other = kv.clone()
    other[0, 0, 40, 0, 5] += 4
    ours = _noted(tmp_path, LatentRunner(other, 16, "fp8"), "decode")
    (place,) = compare_notes(ours, _noted(tmp_path, LatentRunner(kv, 32, "fp8"), "prefill")).places
    assert (place.layer.name, place.kind, place.cell) == (LAYERS[0], "latent", 40 // CELL)


def test_ranks_that_have_the_same_latent_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = kv_of(6)
    theirs = _noted(tmp_path, LatentRunner(kv, 32), "prefill")
    other = kv.clone()
    other[1, 0, 40, 0, 0] *= 1.001
    heads = SimpleNamespace(get_total_num_kv_heads=lambda: 2 * kv.shape[3])
    for folder, of_ranks in ((tmp_path / "same", (kv, kv)), (tmp_path / "other", (kv, other))):
        for rank, held in enumerate(of_ranks):
            monkeypatch.setattr(plugin, "_rank", lambda rank=rank: (rank, 2))
            runner: Any = LatentRunner(held, 32)
            # The target's latent is on each of them, and this drafter's heads are spread.
            runner.vllm_config = SimpleNamespace(
                model_config=heads, speculative_config=SimpleNamespace(draft_model_config=heads)
            )
            writer = AtOnce(folder, "decode")
            writer.path = writer.path.with_name(f"pd-eagle3.decode.{rank + 1}.jsonl")
            take_note(plugin.Witness(runner, writer), runner, "decode", "end", PROMPT)
    (same,), (one_damaged,) = (
        KVWitness(tmp_path / name).noted("decode", "decode", "end") for name in ("same", "other")
    )
    found = compare_notes(same, theirs, drafter=False)
    assert (found.cells, found.differs) == (6 * 2, False)
    (place,) = compare_notes(one_damaged, theirs, drafter=False).places
    assert (place.layer.name, place.kind, place.cell, place.heads) == (LAYERS[1], "latent", 40 // CELL, ())


def test_a_latent_that_changed_in_the_prefix_cache_is_seen(tmp_path: Path) -> None:
    runner = LatentRunner(kv_of(7), 32)
    witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
    take_note(witness, runner, "first", "end", PROMPT)
    take_note(witness, runner, "again", "begin", PROMPT)
    runner.layers[LAYERS[0]].kv_cache[runner.blocks[1], 3, 0] += 1
    take_note(witness, runner, "changed", "begin", PROMPT)
    again, changed = (KVWitness(tmp_path).noted(name, "decode", "begin")[0] for name in ("again", "changed"))
    assert compare_kept(again).cells and not compare_kept(again).differs
    (place,) = compare_kept(changed).places
    assert (place.layer.name, place.kind, place.cell, place.heads) == (LAYERS[0], "latent", 2, ())


def test_caches_that_are_laid_out_otherwise_are_named_and_not_noted(tmp_path: Path) -> None:
    # As those that keep scales beside it: nothing tells what of a token they are.
    wider = LatentRunner(kv_of(8), 32, width=RANK + ROTATED + 5)
    assert set(_unseen(tmp_path / "wider", wider).values()) == {
        f"its blocks have {32 * 21} elements where a latent would have {32 * 16}"
    }
    compressed: Any = LatentRunner(kv_of(8), 32)
    # An entry for four tokens.
    compressed.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size = 128
    reasons = _unseen(tmp_path / "compressed", compressed)
    assert reasons.keys() == set(LAYERS)
    assert "room for 224 tokens, where its group has blocks of 896" in reasons[LAYERS[0]]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"decode_context_parallel_size": 2}, "2 ranks share the tokens of a context"),
        # Its stages name themselves by the same rank, so that of two notes of a request one was never looked at.
        ({"pipeline_parallel_size": 2}, "2 stages of a pipeline share the layers"),
    ],
)
def test_what_processes_share_is_unseen(tmp_path: Path, sizes: dict[str, int], reason: str) -> None:
    divided: Any = LatentRunner(kv_of(8), 32)
    divided.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes))
    assert _unseen(tmp_path, divided) == dict.fromkeys(LAYERS, reason)


def test_a_drafter_with_other_heads_than_its_target_is_noted(tmp_path: Path) -> None:
    kv = kv_of(9)
    runner = StandInRunner(kv, 32)
    fewer = StandInRunner(kv[:, :, :, :1], 32)
    runner.layers[LAYERS[2]] = fewer.layers[LAYERS[2]]
    ours = _noted(tmp_path, runner, "decode", received=[0, 1])
    assert [(g.digests.shape[-1], g.received) for g in ours.groups] == [(3, {0, 1}), (1, {0, 1})]
    theirs = _noted(tmp_path, StandInRunner(kv, 32, draft=False), "prefill")
    assert not compare_notes(ours, theirs, drafter=False).differs


def test_damaged_notes_of_latents_are_refused(tmp_path: Path) -> None:
    _noted(tmp_path, LatentRunner(kv_of(1), 32), "decode")
    (path,) = (tmp_path / "witness").iterdir()
    whole = path.read_text()
    for was, damaged in (('"kinds": ["latent"]', '"kinds": ["keys", "values"]'), ('["latent"]', '["keys"]')):
        assert was in whole
        path.write_text(whole.replace(was, damaged))
        with pytest.raises(DataError):
            KVWitness(tmp_path).noted("decode", "decode", "end")
