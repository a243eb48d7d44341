"""Log-probs of an answer over windows: limits that right answers keep, and damage that goes beyond them."""

from __future__ import annotations

import numpy as np
import pytest

from harness.stats.trace import (
    CAP,
    FLOOR_NATS,
    LEAST_TAIL,
    WINDOWS,
    Null,
    RoundingLimits,
    are_beyond,
    in_units,
    overall,
    tail_limit,
    usual_sizes,
    window_means,
    worst_window,
)

ANSWERS, TOKENS = 160, 256


def right(rng: np.random.Generator, sd: float, heavy: bool, answers: int = ANSWERS) -> list[np.ndarray]:
    """Differences of two rounded readings of the same tokens; texts differ in how coarsely they are rounded."""
    scale = np.exp(rng.normal(0, 0.3, (answers, 1)))
    drawn = rng.standard_t(3, (2, answers, TOKENS)) / 3**0.5 if heavy else rng.normal(0, 1, (2, answers, TOKENS))
    return list((drawn[0] - drawn[1]) * sd * scale)


def beyond(moved: np.ndarray, size: float, limits: dict[int, float]) -> bool:
    units = in_units(moved, size)
    return any(window_means(units, n).max() > limit for n, limit in limits.items())


def test_windows_of_an_answer():
    units = np.array([0.0] * 20 + [1.0] * 16 + [0.0] * 5)
    assert window_means(units, 16).max() == 1.0 and window_means(units, 32).max() == 0.5
    assert window_means(units, 64).size == 0 and window_means(np.zeros(0), 16).size == 0
    # The last window ends with the answer; a shorter answer has none.
    assert window_means(np.array([0.0] * 20 + [1.0]), 16)[-1] == 1 / 16
    assert window_means(np.ones(8), 16).size == 0


def test_units_are_what_is_usual_for_a_text_and_end_at_the_cap():
    assert usual_sizes(np.zeros((2, 0)), 0.1).tolist() == pytest.approx([0.1, 0.1])
    assert usual_sizes(np.full((1, 1000), 0.3), 0.1) == pytest.approx(0.3, rel=0.05)
    assert usual_sizes(np.zeros((1, 9)), 0.0) == FLOOR_NATS == overall([])
    assert in_units([-0.2, 9.0], 0.1).tolist() == [2.0, CAP]


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("sd", [0.03, 0.12])
def test_right_answers_keep_the_limit_and_wrong_ones_do_not(sd: float, heavy: bool):
    """At one false alarm in 2,000 runs of 640 answers, none in 30; an answer that is wrong by 0.6 nats is seen."""
    rng = np.random.default_rng(1)
    seen = []
    for _ in range(30):
        plain = right(rng, sd, heavy)
        null, usual = Null.of(plain), overall(plain)
        limits = {n: null.limit(n, 5e-4 / 4 / (640 * TOKENS * 4 / n)) for n in WINDOWS}

        # Another reading of the same texts is rounded as coarsely, each by itself.
        again = [text[rng.permutation(TOKENS)] for text in plain]
        sizes = usual_sizes(np.stack(plain), usual)
        assert not any(beyond(moved, size, limits) for moved, size in zip(again, sizes, strict=True))
        seen.append(beyond(again[0] + rng.normal(0, 0.6, TOKENS), sizes[0], limits))
    assert np.mean(seen) > 0.9


def test_neighbours_that_move_alike_widen_the_limit():
    rng = np.random.default_rng(2)
    alone = Null.of(list(rng.normal(0, 0.05, (200, TOKENS))))
    alike = Null.of(list(np.repeat(rng.normal(0, 0.05, (200, TOKENS // 8)), 8, axis=1)))
    assert alike.limit(32, 1e-6) > 1.5 * alone.limit(32, 1e-6)


@pytest.mark.parametrize("tokens", [12, 26, 200])
def test_a_whole_answer_of_any_length_has_a_limit(tokens: int):
    """It is seen where no window fits, or where each of its windows is within its limit; right ones keep it."""
    rng = np.random.default_rng(4)
    plain = list(rng.normal(0, 0.05, (160, tokens)))
    limits = RoundingLimits.of(plain, 5e-4, 640 * tokens)
    right = np.stack([in_units(m, limits.usual_nats) for m in rng.normal(0, 0.05, (640, tokens))])
    assert not are_beyond(right, limits).any()
    wrong = right[0] + 3.0
    found = worst_window(wrong, limits.windows, limits.whole)
    assert found is not None and found.mean > found.limit
    assert are_beyond(wrong[None], limits).tolist() == [True]
    longer = limits.whole.limit(tokens), limits.whole.limit(2 * tokens)
    assert longer[1] < longer[0]


def test_a_little_damage_all_along_is_seen_in_the_whole_answer_alone():
    rng = np.random.default_rng(5)
    limits = RoundingLimits.of(list(rng.normal(0, 0.05, (160, TOKENS))), 5e-4, 640 * TOKENS)
    seen = []
    for _ in range(40):
        units = in_units(rng.normal(0, 0.05 * 1.55, TOKENS), limits.usual_nats)
        found = worst_window(units, limits.windows, limits.whole)
        seen.append((found.tokens == TOKENS) and found.mean > found.limit)
    assert np.mean(seen) > 0.5


def test_texts_that_differ_in_how_coarsely_they_are_rounded_widen_the_limit_of_whole_answers():
    rng = np.random.default_rng(6)
    alike = RoundingLimits.of(list(rng.normal(0, 0.05, (160, TOKENS))), 5e-4, 640 * TOKENS)
    halves = np.repeat(np.exp(rng.normal(0, 0.5, (160, 2))), TOKENS // 2, axis=1)
    unlike = RoundingLimits.of(list(rng.normal(0, 0.05, (160, TOKENS)) * halves), 5e-4, 640 * TOKENS)
    assert unlike.whole.limit(TOKENS) > 1.3 * alike.whole.limit(TOKENS)


def test_too_little_shows_nothing():
    assert Null.of([[0.1] * 10]).limit(16, 1e-6) is None and Null.of([[0.1] * 10]).whole(1e-6) is None
    assert tail_limit([1.0] * (LEAST_TAIL - 1) + [0.0] * 1000, 1e-6) is None


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_rate_is_between_0_and_1(rate: float):
    with pytest.raises(ValueError, match="a rate between 0 and 1"):
        tail_limit([1.0], rate)


@pytest.mark.parametrize("draw", ["normal", "exponential", "standard_t"])
def test_tail_is_no_smaller_than_the_true_one(draw: str):
    """Of 40 samples, what is exceeded by one in 100,000 lies at or above the true figure in most."""
    rng = np.random.default_rng(3)

    def sample(n: int) -> np.ndarray:
        return rng.standard_t(3, n) if draw == "standard_t" else getattr(rng, draw)(size=n)

    true = np.quantile(sample(4_000_000), 1 - 1e-5)
    assert np.median([tail_limit(sample(4_000), 1e-5) for _ in range(40)]) > 0.7 * true


def test_engines_that_round_nothing_allow_what_nobody_looks_for():
    null = Null.of([[0.0] * 64] * 20)
    assert null.limit(16, 1e-9) == 1.0 and null.whole(1e-9).limit(64) == 1.0


def test_answers_of_one_length_are_taken_together_as_each_by_itself():
    rng = np.random.default_rng(6)
    lengths = (40, 40, 40, 90, 17, 17, 300, 40)
    answers = [rng.normal(0, 0.05, n) for n in lengths for _ in range(3)]
    null, usual = Null.of(answers), overall(answers)

    def size_of(part: np.ndarray) -> float:
        return float(usual_sizes(part[None], usual)[0])

    for mine, moved in zip(null.answers, answers, strict=True):
        first, last = np.split(moved, [len(moved) // 2])
        wanted = [*in_units(first, size_of(last)), *in_units(last, size_of(first))]
        assert mine.tolist() == pytest.approx(wanted)
    limits = RoundingLimits.of(answers, 5e-4, 1000)
    assert limits.sizes == pytest.approx([np.clip(size_of(a), usual / 3, usual * 3) for a in answers])
