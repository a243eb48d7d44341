"""The questions that the project ships, and the prompts that are made of them."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from harness.profiles.scenarios import Pair
from harness.prompts.datasets import SHIPPED, shipped_texts
from harness.prompts.lengths import Stratum
from harness.prompts.model import PromptSet, load_prompts
from harness.prompts.padded import coverage
from harness.scenarios.possible import shared_blocks
from harness.util.files import sha256_file

BLOCK = 32


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    return load_prompts(SHIPPED.with_name("smollm2.jsonl"))


def test_questions_are_distinct_and_conversations_end_with_their_user():
    texts = shipped_texts("all")
    assert len(texts.rows) == len(SHIPPED.read_text(encoding="utf-8").splitlines()) >= 250
    talks = [text for _, text in texts.rows if not isinstance(text, str)]
    assert len(talks) >= 40 and all(t[-1].role == "user" and len(t) >= 3 for t in talks)
    assert all(isinstance(text, str) for _, text in shipped_texts("first").rows)


def test_prompts_are_made_of_the_questions_that_are_here(prompts):
    assert prompts.header.source is not None and prompts.header.source.revision == sha256_file(SHIPPED)
    assert prompts.header.origin.startswith("conversations of questions.jsonl")


def test_every_stratum_that_the_template_allows_is_full_and_spread_over_blocks(prompts):
    for row in coverage(prompts):
        if row.key.stratum is Stratum.SUB_BLOCK:
            assert (row.cold, row.held_out) == (0, 0)
        else:
            assert row.cold >= 20 and row.held_out >= 20
            # A length on the end of a block of 32 is on that of every second block of 16.
            assert set(row.blocks) >= set(range(2, 7)) if row.key.block_size == BLOCK else len(set(row.blocks)) >= 5
    assert {row.key.block_size for row in coverage(prompts)} == {16, 32}
    assert max(p.tokens for p in (*prompts.cold, *prompts.held_out)) < 7 * BLOCK
    rows = [{p.source for p in half} for half in (prompts.cold, prompts.held_out)]
    assert rows[0].isdisjoint(rows[1]) and len(rows[0]) == len(prompts.cold)


def test_little_is_padded_and_conversations_are_used_whole(prompts):
    padded = [int(p.origin.rsplit(" by ", 1)[1].split()[0]) for p in (*prompts.cold, *prompts.held_out)]
    assert max(padded) < BLOCK and Counter(padded)[0] > len(padded) // 4
    assert sum(p.text.count("<|im_start|>assistant") > 1 for p in prompts.cold) > 10


def test_scenario_prompts_are_what_their_names_say(prompts):
    known = {p.id: p for p in prompts.prompts if p.use == "scenario"}
    assert sorted(p.tokens for name, p in known.items() if name.startswith("long-")) == [288, 319, 321, 368, 394]
    assert all(p.tokens == int(name.rsplit("-")[1]) for name, p in known.items() if name.startswith(("long-", "base-")))
    for pair, shared in (
        (Pair(donor="fork-095-1", subject="base-095"), 1),
        (Pair(donor="fork-138-2", subject="base-138"), 2),
        (Pair(donor="fork-160-3", subject="base-160"), 3),
        (Pair(donor="fork-long-368-2", subject="long-368"), 2),
    ):
        assert shared_blocks(known[pair.donor], known[pair.subject], BLOCK) == shared
    for number in (1, 2):
        first, following = known[f"talk-{number}-first"], known[f"talk-{number}-next"]
        assert following.ids[: first.tokens] == first.ids and following.tokens > first.tokens
    first, bridge, second = (known[f"mix-{name}"] for name in ("first", "bridge", "second"))
    assert first.ids[:BLOCK] != second.ids[:BLOCK] == bridge.ids[:BLOCK]
    assert first.ids[BLOCK : 3 * BLOCK] == second.ids[BLOCK : 3 * BLOCK] != bridge.ids[BLOCK : 3 * BLOCK]


def test_ids_name_length_and_row(prompts):
    rows = [json.loads(line)["prompt"] for line in SHIPPED.read_text(encoding="utf-8").splitlines()]
    for prompt in prompts.cold:
        _, tokens, row = prompt.id.split("-")
        assert int(tokens) == prompt.tokens
        said = rows[int(row)] if isinstance(rows[int(row)], str) else rows[int(row)][-1]["content"]
        assert said in prompt.text
