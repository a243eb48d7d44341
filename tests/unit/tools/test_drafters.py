"""The trainer of drafters: its questions, its files, and the walk that forecasts what an engine counts."""

from __future__ import annotations

import json
import random

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.drafters import build, export, measure
from tools.drafters.__main__ import test_questions as asked_in_tests
from tools.drafters.networks import DRAFTS, MTP, DFlash, Drafter, Eagle3
from tools.drafters.questions import Question, questions, resembles, words
from tools.drafters.target import Cache, Target, decode, prefill
from tools.drafters.texts import Conversation, Row
from tools.drafters.train import Recipe, groups, items, lr_factor

# Threads that wait for a core spin on another one: beside other tests this took twenty times as long.
torch.set_num_threads(1)

VOCAB, HIDDEN, LAYERS = 96, 64, 30


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    """A random target of the real one's depth, and hardly any width."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("target")
    config = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "self_attn.q_proj": (64, HIDDEN),
        "self_attn.k_proj": (32, HIDDEN),
        "self_attn.v_proj": (32, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 64),
        "mlp.gate_proj": (64, HIDDEN),
        "mlp.up_proj": (64, HIDDEN),
        "mlp.down_proj": (HIDDEN, 64),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    tensors = {
        f"model.layers.{i}.{n}.weight": torch.randn(s) * 0.1 + len(s) % 2
        for i in range(LAYERS)
        for n, s in shapes.items()
    }
    tensors |= {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    save_file(tensors, str(folder / "model.safetensors"))
    return Target(folder, positions=128)


def agreement(drafter: Drafter, target: Target, prompt: list[int], answer: list[int]) -> list[int]:
    return measure.agreement(drafter, measure.reading(target, prompt, answer))


@pytest.fixture(scope="module")
def tests() -> list[str]:
    return asked_in_tests()


@pytest.fixture(scope="module")
def training(tests) -> list[Question]:
    return questions(1, tests, False)


def all_drafters(target: Target) -> list[Drafter]:
    return [Eagle3(target, torch.arange(0, VOCAB, 2)), MTP(target), DFlash(target)]


def test_questions_are_distinct_and_held_out_by_topic(tests, training):
    validation = questions(1, tests, True)
    assert len(training) > 10_000 and len(validation) > 500
    assert len({q.turns[0] for q in training}) > 0.95 * len(training)
    assert not {(q.kind, q.topic) for q in training} & {(q.kind, q.topic) for q in validation}
    assert not {q.turns[0] for q in training} & {q.turns[0] for q in validation}


def test_no_question_resembles_one_of_the_test_set(tests, training):
    assert len(tests) == 60
    avoided = [words(test) for test in tests]
    assert resembles("why is the SKY so blue", avoided)
    assert not any(resembles(q.turns[0], avoided) for q in training[:2000])


def test_the_first_questions_cover_every_topic(training):
    topics = {(q.kind, q.topic) for q in training}
    assert len({(q.kind, q.topic) for q in training[: len(topics)]}) > 0.95 * len(topics)


def test_a_second_question_follows_the_end_of_an_answer_that_was_cut():
    class Prompts:
        end = 2

        def next(self, question: str) -> list[int]:
            return [50, 51, 52]

    class Lengths:
        total, answer, first_answer = 64, 4, 3

    question = Question("thing", "x", ("One?", "Two?"))
    row = Row(question, "train", False, [1, 10, 11], 2, 3)
    assert [row.add(token, Prompts(), Lengths()) for token in (20, 21, 22)] == [False, False, False]
    assert row.ids == [1, 10, 11, 20, 21, 22, 2, 50, 51, 52]
    assert [row.add(token, Prompts(), Lengths()) for token in (30, 2)] == [False, True]
    assert row.spans == [(3, 6), (10, 12)]


def test_decoding_token_by_token_gives_the_streams_of_one_prefill(target):
    ids = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(5))
    whole = prefill(target, ids.tolist(), Cache(target, 1, 12))
    cache = Cache(target, 2, 12)
    prefill(target, ids[:4].tolist(), cache)
    cache.repeat_first(4)
    for at in range(4, 12):
        # The second row lags by one token, so that the rows are at different positions.
        positions = torch.tensor([at, max(4, at - 1)])
        streams = decode(target, ids[positions], positions, cache)
        torch.testing.assert_close(streams[0], whole[at], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(streams[1], whole[positions[1]], atol=1e-4, rtol=1e-4)


def test_a_file_at_rest_gives_back_exactly_what_its_8_bits_mean(tmp_path):
    torch.manual_seed(1)
    tensors = {
        "wide.weight": torch.randn(5, 64),
        "odd.weight": torch.randn(4, 33),
        "norm.weight": torch.randn(64),
        "d2t": torch.tensor([0, 3, 70_000]),
    }
    export.write("eagle3", tensors, {"architectures": ["X"]}, tmp_path / "rest")
    back = export.read(tmp_path / "rest")
    kind = gguf.GGMLQuantizationType.Q8_0
    meant = gguf.quants.dequantize(gguf.quants.quantize(tensors["wide.weight"].numpy(), kind), kind)
    assert np.array_equal(back["wide.weight"].numpy(), meant)
    assert not torch.equal(back["wide.weight"], tensors["wide.weight"])
    assert all(torch.equal(back[name], tensors[name]) for name in ("odd.weight", "norm.weight", "d2t"))
    export.expand(tmp_path / "rest", tmp_path / "expanded")
    expanded = load_file(tmp_path / "expanded" / "model.safetensors")
    assert torch.equal(expanded["wide.weight"], torch.from_numpy(meant).to(torch.bfloat16))
    assert torch.equal(expanded["d2t"], tensors["d2t"])
    assert json.loads((tmp_path / "expanded" / "config.json").read_text()) == {"architectures": ["X"]}


def test_a_loaded_drafter_drafts_as_its_expanded_weights_say(target, tmp_path):
    for drafter in all_drafters(target):
        name = export.name_of(drafter)
        export.write(name, export.tensors_of(drafter), export.config_of(drafter, target), tmp_path / name)
        loaded = export.load(tmp_path / name, target)
        expanded = export.rounded(export.read(tmp_path / name))
        mine = export.tensors_of(loaded)
        assert mine.keys() == export.tensors_of(drafter).keys() == expanded.keys()
        assert all(torch.equal(mine[n], expanded[n].to(mine[n].dtype)) for n in mine)
        assert not any("embed_tokens" in n for n in mine)


def test_the_walk_counts_steps_as_an_engine_does():
    # Two right drafts and one more token, then one right draft and the last token.
    assert measure.walk([2, 0, 0, 1, 3], 6) == measure.Counts(2, (2, 1, 0))
    # What lies behind the end is not counted.
    assert measure.walk([3], 2) == measure.Counts(1, (1, 0, 0))
    assert measure.walk([0, 0, 0], 4) == measure.Counts(3, (0, 0, 0))
    assert measure.walk([], 1) == measure.NOTHING
    summary = measure.Counts(4, (3, 2, 0)).summary()
    assert summary == {"steps": 4, "accepted": [3, 2, 0], "acceptance": [0.75, 0.5, 0.0]}


def test_drafts_of_a_walk_do_not_depend_on_the_tokens_that_follow(target):
    prompt, answer = [1, 5, 9, 13], [20, 21, 22, 23, 24, 25, 26, 27]
    for drafter in all_drafters(target):
        whole = agreement(drafter, target, prompt, answer)
        part = agreement(drafter, target, prompt, answer[:6])
        assert len(whole) == 7 and len(part) == 5
        assert [min(a, 6 - 1 - i) for i, a in enumerate(whole[:5])] == part


def test_drafts_equal_to_the_answer_are_all_accepted(target):
    """The walk over an answer that the drafter itself would write."""
    for drafter in all_drafters(target):
        prompt, answer = [1, 5, 9, 13], [20]
        while len(answer) < 3:
            candidates = range(VOCAB)
            answer = next(
                tried
                for tried in ([*answer, token] for token in candidates)
                if agreement(drafter, target, prompt, tried)[0] == len(tried) - 1
            )
        (counts,) = measure.count([drafter], target, [(prompt, answer)])
        assert counts == measure.Counts(1, (1, 1, 0)) and len(counts.accepted) == DRAFTS


def test_every_answer_is_in_one_batch_of_the_budget():
    lengths = [random.Random(2).randint(20, 200) for _ in range(50)]
    made = groups(lengths, 400, random.Random(1))
    assert sorted(i for group in made for i in group) == list(range(50))
    assert all(len(group) * max(lengths[i] for i in group) <= 400 for group in made)


def test_items_are_answers_with_all_that_precedes_them():
    ids = torch.arange(20, dtype=torch.int32)
    made = Conversation(
        "train", "thing", "x", ("A?", "B?"), ids, ((3, 9), (12, 14), (15, 20)), torch.zeros(19, 4, HIDDEN)
    )
    found = items([made, made._replace(part="test")], "train")
    assert [(i.start, len(i.ids), len(i.streams)) for i in found] == [(3, 9, 8), (15, 20, 19)]


def test_the_learning_rate_rises_then_stays_then_falls():
    recipe = Recipe()
    assert lr_factor(recipe, 0, 0.0) < lr_factor(recipe, recipe.warmup_steps, 0.1) == 1.0
    assert lr_factor(recipe, 900, 1.0) == pytest.approx(recipe.floor)


def test_a_head_keeps_what_it_learnt_when_its_vocabulary_changes():
    """Tokens 2, 5 and 7 were known; 5, 6 and 7 are wanted."""

    def weights(tokens: list[int], rows: list[float]) -> dict[str, torch.Tensor]:
        d2t = torch.tensor(tokens) - torch.arange(len(tokens))
        return {"d2t": d2t, "lm_head.weight": torch.tensor(rows)[:, None], "norm.weight": torch.tensor(rows[:1])}

    new = build.revised(weights([2, 5, 7], [0.2, 0.5, 0.7]), weights([5, 6, 7], [9.5, 9.6, 9.7]))
    assert new["lm_head.weight"].flatten().tolist() == pytest.approx([0.5, 9.6, 0.7])
    assert (new["d2t"] + torch.arange(3)).tolist() == [5, 6, 7]
    assert new["norm.weight"].tolist() == pytest.approx([0.2])


def test_the_recipe_lists_the_commands_that_were_run(tmp_path):
    for name in ("seed1-shard0-0000", "seed1-shard0-0001", "seed2-shard1-0000"):
        (tmp_path / f"{name}.pt").touch()
    assert [line.partition(" --data D ")[2] for line in build.data_commands(tmp_path)] == [
        "--seed 1 --shard 0",
        "--seed 2 --shard 1",
    ]
    runs = {"mtp": [{"seconds": 640.0, "entry": None}, {"seconds": 420.0, "entry": 0.45}]}
    assert [line.partition(" --checkpoints C ")[2] for line in build.train_commands(runs)] == [
        "--seconds 640",
        "--seconds 420 --entry 0.45",
    ]
