"""Pairs whose drafter has several modules, each of which sees one token more: P leaves the last tokens to D."""

from __future__ import annotations

import pytest

from harness.history.acceptance import real_steps
from harness.history.folder import History
from harness.history.verdict import Verdict
from harness.judging.checks import transfer
from harness.judging.checks.registry import judge
from tests.support.builders import (
    BLOCK,
    LENGTHS,
    change_final,
    history,
    lookups,
    observation,
    view,
    with_cells,
    with_prefill,
    with_profile,
)

BACK = 2


def handed(tokens: int, count: int | None = None, external: int | None = None, moved: int | None = None):
    """A hand-off of a prompt of which P computes all tokens but the last two, with three modules."""
    kept = tokens - BACK
    filled = -(-kept // BLOCK)
    o = observation("pd-mtp", tokens)
    size = o.final.counters["nixl_bytes"] / -(-tokens // BLOCK)
    params = {
        **o.leg("prefill").kv_transfer_params,
        "remote_num_tokens": kept if count is None else count,
        "remote_block_ids": [list(range(1, 1 - (-(kept if count is None else count) // BLOCK)))],
    }
    computed = dict.fromkeys(("prompt_tokens", "prefix_queries", "prompt_tokens_local_compute"), float(kept))
    o = with_prefill(o, kv_transfer_params=params, counters={"finished_requests": 1.0, **computed})
    fetched = {
        "prompt_tokens_external_kv_transfer": float(kept if external is None else external),
        "prompt_tokens_local_compute": float(BACK),
        "nixl_bytes": size * (filled if moved is None else moved),
    }
    return change_final(o, counters={**o.final.counters, **fetched})


def recorded(*last, modules: int = 3) -> History:
    """A run of such a pair; ``last`` replaces the observations of the same prompts."""
    made = {o.prompt_id: o for o in (*(handed(n) for n in (*LENGTHS, 100)), *last)}
    return with_cells(history([*made.values()]), modules=modules)


def check(h: History):
    return transfer.transfer(view(h, "pd-mtp"))


def test_p_hands_over_all_tokens_but_those_that_later_modules_look_at():
    assert check(recorded()).verdict is Verdict.PASS
    assert view(recorded(), "pd-mtp").record.held_back == BACK


def test_one_module_leaves_nothing_to_d():
    result = check(recorded(modules=1))
    assert result.verdict is Verdict.REGRESSION
    assert "KV of 100 tokens, found remote_num_tokens = 98" in next(
        f.message for f in result.findings if f.prompt_id == "p100"
    )


@pytest.mark.parametrize(("count", "damage"), [(100, "drafter-kv"), (99, "drafter-kv"), (97, "target-kv")])
def test_other_tokens_than_those_are_a_regression(count, damage):
    result = check(recorded(handed(100, count=count)))
    assert result.verdict is Verdict.REGRESSION
    assert [(f.prompt_id, f.damage) for f in result.findings] == [("p100", damage)]
    assert f"KV of 98 tokens, found remote_num_tokens = {count}" in result.findings[0].message


@pytest.mark.parametrize(("external", "verdict"), [(98, Verdict.PASS), (97, Verdict.UNKNOWN)])
def test_d_takes_all_of_them_from_outside(external, verdict):
    assert check(recorded(handed(100, external=external))).verdict is verdict


def test_the_answer_of_p_is_to_another_prompt():
    checked = {}
    for modules in (1, 3):
        (pair,) = judge(recorded(modules=modules), lookups(LENGTHS)).cells
        checked[modules] = {r.check for r in pair.results}
    assert checked[1] - checked[3] == {"prefill-token"}


@pytest.mark.parametrize(
    ("changes", "back"),
    [
        ({}, 0),
        ({"modules": 3}, 2),
        ({"modules": 2}, 2),
        ({"recurrent": True}, 1),
        ({"recurrent": True, "modules": 3}, 2),
    ],
)
def test_tokens_that_p_leaves_to_d(changes, back):
    record = view(with_cells(history([observation("pd-mtp", 40)]), **changes), "pd-mtp").record
    assert (record.draft_tokens, record.held_back) == (3, back)


def test_a_prompt_of_no_more_tokens_is_handed_over_as_a_whole():
    h = with_cells(history([observation("pd-mtp", 40)]), modules=3)
    cell = view(h, "pd-mtp")
    (o,) = cell.observations().values()
    handed_over = [
        cell.hand_off.handed_tokens(o.model_copy(update={"sent_ids": o.sent_ids[:n]})) for n in (1, 2, 3, 40)
    ]
    assert handed_over == [1, 2, 1, 38]
    assert cell.hand_off.handed_tokens(o.model_copy(update={"feature": "prompt-logprobs"})) == 40


@pytest.mark.parametrize(("tokens", "modules", "hit"), [(98, 1, 64), (98, 3, 32), (100, 3, 64), (101, 3, 64)])
def test_what_p_has_cached_ends_before_the_tokens_that_later_modules_drafted(tokens, modules, hit):
    cell = view(with_cells(history([observation("pd-mtp", tokens)]), modules=modules), "pd-mtp")
    (o,) = cell.observations().values()
    assert cell.prefix_cache.expected_hit(o, o, "prefill").least == hit


@pytest.mark.parametrize(("local", "padded"), [(1, True), (2, False)])
def test_a_first_step_without_accepted_drafts_is_padding_only_where_one_token_is_left(local, padded):
    leg = observation("pd-mtp", 40).final
    spec = leg.speculation.model_copy(update={"per_step_accepted": (0, 3, 3), "per_step_drafted": (3, 3, 3)})
    counters = {**leg.counters, "prompt_tokens_local_compute": float(local)}
    steps = real_steps(leg.model_copy(update={"speculation": spec, "counters": counters, "output_ids": (1,) * 8}))
    assert (steps.padded, steps.accepted) == (padded, (3, 3) if padded else (0, 3, 3))


TRACE = {"id": "trace", "kind": "trace", "stages": [[{"prompt": "p97"}]]}


def together(cell: str, tokens: int, counters: dict[str, float], **changes: object) -> History:
    """Two requests of one prompt at the same time, whose counters D shares out between them."""
    made = [
        observation(cell, tokens, scenario="trace", part=part, concurrent=2, shared_counters={"decode": counters})
        for part in ("r0-0", "r0-1")
    ]
    made = [change_final(o.model_copy(update={"sequence": i}), counters={}) for i, o in enumerate(made)]
    return with_cells(history(made, scenarios=[TRACE]), **changes)


@pytest.mark.parametrize(
    ("modules", "external", "enough"), [(3, 196, True), (3, 195, False), (1, 198, True), (1, 196, False)]
)
def test_requests_together_take_what_p_leaves_to_d_from_nobody(modules, external, enough):
    counters = {"nixl_bytes": 8.0, "nixl_transfers": 2.0, "prompt_tokens_external_kv_transfer": float(external)}
    h = together("pd-mtp", 100, counters, modules=modules)
    assert (not of_requests_together(h, "pd-mtp")) is enough


def of_requests_together(h: History, cell: str) -> list[str]:
    found = transfer.transfer(view(h, cell, scenario="trace")).findings
    return [f.message for f in found if "for requests sent together" in f.message]


@pytest.mark.parametrize(("cell", "hit"), [("single-mtp", 32), ("pd-mtp", 0)])
def test_only_p_of_a_pair_is_asked_for_less_than_the_prompt(cell, hit):
    """With three modules P computes 65 of 67 tokens, and its cache ends two before that; a single engine all."""
    asked = view(with_cells(history([observation(cell, 67)]), modules=3), cell)
    (o,) = asked.observations().values()
    assert asked.prefix_cache.expected_hit(o, o, asked.prefilling, answered=False).least == hit


def test_p_is_asked_for_less_than_the_prompt_that_it_may_have_cached():
    """Of 97 tokens P is asked for 96, of which it computes the last block anew in any case."""
    cell = view(with_cells(history([observation("pd-none", 97)]), recurrent=True), "pd-none")
    (o,) = cell.observations().values()
    assert [cell.prefix_cache.expected_hit(o, o, role).least for role in ("prefill", "decode")] == [64, 96]


@pytest.mark.parametrize(
    ("route", "changes", "handed_over"),
    [
        ("cell", {}, 38),
        ("former-p", {}, 38),
        ("local", {}, 40),
        ("cell", {"kv_connector": "LMCacheConnectorV1"}, 40),
        ("cell", {"kv_connector": "LMCacheConnectorV1", "recurrent": True}, 39),
    ],
)
def test_only_what_is_handed_over_is_short_of_what_p_leaves_to_d(route, changes, handed_over):
    changes = dict(changes)
    h = with_cells(history([observation("pd-mtp", 40)]), modules=3, recurrent=changes.pop("recurrent", False))
    cell = view(with_profile(h, engine=changes), "pd-mtp")
    (o,) = cell.observations().values()
    assert cell.hand_off.handed_tokens(o.model_copy(update={"route": route})) == handed_over


@pytest.mark.parametrize(
    ("role", "counters", "may_pad", "padded"),
    [
        ("decode", {}, True, True),
        ("decode", {"prompt_tokens_local_compute": 0.0}, True, True),
        ("decode", {}, False, False),
        # Two modules for two drafts: P leaves one token to D.
        ("decode", {"prompt_tokens_local_compute": 1.0}, False, True),
        ("single", {}, True, False),
        ("single", {"prompt_tokens_local_compute": 0.0}, True, False),
    ],
)
def test_padding_without_a_counter(role, counters, may_pad, padded):
    leg = observation("pd-mtp", 40).final
    told = {"per_step_accepted": (0, 3, 3), "per_step_drafted": (3, 3, 3), "may_pad": may_pad}
    spec = leg.speculation.model_copy(update=told)
    changes = {"role": role, "speculation": spec, "counters": counters, "output_ids": (1,) * 8}
    assert real_steps(leg.model_copy(update=changes)).padded is padded
