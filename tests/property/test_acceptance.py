"""Acceptance arithmetic: padding is recognised, pooled figures obey their definitions."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from harness.history.acceptance import (
    align,
    by_position,
    counts_of_steps,
    pool,
    real_steps,
    same_but_for_undrafted,
    same_steps,
)
from harness.prompts import probe_task
from tests.support.builders import leg, speculation

K = 3
steps = st.lists(st.integers(0, K), min_size=1, max_size=40).map(tuple)


def make_leg(accepted, outputs, role="decode"):
    return leg(role, (0, 2, 9, 1, 3), tuple(range(outputs)), speculation=speculation(accepted, K))


@given(steps, st.integers(0, K))
def test_padded_first_step_is_left_out(real, overshoot):
    overshoot = min(overshoot, real[-1])
    outputs = 1 + sum(a + 1 for a in real) - overshoot
    found = real_steps(make_leg((0, *real), outputs))
    assert found is not None and found.accepted == real
    assert found.padded
    assert same_steps(make_leg((0, *real), outputs), found, real)


@given(steps, st.integers(0, K))
def test_unpadded_steps_are_kept_when_nothing_was_handed_off(real, overshoot):
    overshoot = min(overshoot, real[-1])
    found = real_steps(make_leg(real, 1 + sum(a + 1 for a in real) - overshoot, "single"))
    assert found is not None
    assert (found.accepted, found.padded, found.certain) == (real, False, True)


@given(steps, st.integers(0, K))
def test_unpadded_hand_off_is_never_a_false_alarm(real, overshoot):
    """A version that does not pad: either the steps are kept, or the reading is marked as uncertain and both match."""
    overshoot = min(overshoot, real[-1])
    one = make_leg(real, 1 + sum(a + 1 for a in real) - overshoot)
    found = real_steps(one)
    assert found is not None
    assert same_steps(one, found, real)


@given(steps, steps)
def test_different_steps_are_seen(a, b):
    assume(a != b and b != (0, *a))
    found = real_steps(make_leg(a, 1 + sum(x + 1 for x in a), "single"))
    assert found is not None
    assert not same_steps(make_leg(a, 1 + sum(x + 1 for x in a)), found, b)


@given(st.lists(steps, min_size=1, max_size=8))
def test_pooled_rates_are_nested_and_sum_to_the_length(requests):
    rates = pool(requests, K)
    assert rates.steps == sum(map(len, requests))
    assert list(rates.accepted_at) == sorted(rates.accepted_at, reverse=True)
    accepted = sum(map(sum, requests))
    assert sum(rates.accepted_at) == accepted
    assert abs(rates.length_pooled - (1 + accepted / rates.steps)) < 1e-12
    assert 1 <= rates.length_per_prompt <= 1 + K


def test_steps_are_counted_by_position():
    counted = counts_of_steps((3, 0, 1), None, K)
    assert (counted.steps, counted.accepted_at) == (3, (2, 1, 1))


def test_nothing_pooled_has_no_length():
    assert pool([], K).length_pooled is None
    assert pool([()], K).length_per_prompt is None


@given(st.lists(st.integers(probe_task.FIRST_WORD, probe_task.VOCAB_SIZE - 1), min_size=1, max_size=150, unique=True))
def test_forecast_accounts_for_every_output_token(words):
    prompt = probe_task.render(words)
    forecast = probe_task.forecast_acceptance(prompt, K, max_tokens=192)
    assert sum(a + 1 for a in forecast) >= len(probe_task.expected_output(prompt)) - 1
    assert all(0 <= a <= K for a in forecast)


@given(steps)
def test_a_request_that_is_cut_short_agrees_with_its_reference(real):
    """Cut anywhere: the steps that both begin are equal, and steps past the cut are left out."""
    produced = 1 + sum(a + 1 for a in real)
    for tokens in range(2, produced + 1):
        begun = [a for p, a in by_position(real).items() if p < tokens]
        assert align(begun, real, tokens) == (len(begun), (), sum(begun), sum(begun), len(begun))


@given(steps, st.data())
def test_a_changed_step_is_seen_where_it_is(real, data):
    at = data.draw(st.integers(0, len(real) - 1))
    changed = (*real[:at], data.draw(st.integers(0, K).filter(lambda a: a != real[at])), *real[at + 1 :])
    position = 1 + sum(a + 1 for a in real[:at])
    assert align(changed, real, 1 + sum(a + 1 for a in real)).differing[0] == position


def walk(accepts, tokens, undrafted=frozenset()):
    """The verify steps of a drafter that accepts so many drafts at each position, without drafts at some of them."""
    produced, taken = 1, []
    while produced < tokens:
        if produced in undrafted:
            produced += 1
            continue
        taken.append(accepts[produced])
        produced += accepts[produced] + 1
    return tuple(taken)


positions = st.lists(st.integers(0, K), min_size=40, max_size=40)


@given(positions, st.integers(2, 40), st.sets(st.integers(1, 39), max_size=4))
def test_steps_without_drafts_are_no_difference(accepts, tokens, undrafted):
    ours = walk(accepts, tokens, undrafted)
    assert same_but_for_undrafted(ours, walk(accepts, tokens), tokens, len(undrafted))


@given(positions, st.integers(2, 40))
def test_a_drafter_that_lost_its_kv_is_seen_however_many_were_preempted(accepts, tokens):
    """It drafts in every step and accepts nothing, which no steps without drafts explain."""
    reference = walk(accepts, tokens)
    assume(any(reference[:-1]))
    assert not same_but_for_undrafted((0,) * (tokens - 1), reference, tokens, tokens)


@given(steps, steps, st.integers(1, 60))
def test_without_preemptions_all_steps_are_compared(a, b, tokens):
    ends = 1 + sum(x + 1 for x in a)
    agreed = not align(a, b, tokens).differing and ends - a[-1] - 1 < tokens <= ends
    assert same_but_for_undrafted(a, b, tokens, 0) == agreed
