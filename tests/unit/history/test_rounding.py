"""How an engine rounds, from what it was asked in several ways."""

import pytest

from harness.history.records import RESCORE
from harness.history.rounding import ASIDE, HELD_AGAINST, QUANTILES, Rounding, Way, compared, differences, measured
from tests.support.builders import change_final, history, observation


def moved(o, nats, at=3):
    """The answer with the log-prob of one token moved."""
    chosen = tuple(v + (nats if i == at else 0) for i, v in enumerate(o.final.chosen_logprobs))
    return change_final(o, chosen_logprobs=chosen)


def beside(way, o, **changes):
    return o.model_copy(update={"scenario": RESCORE, "instance": ASIDE[way], **changes})


def parted(o, at=5):
    output = o.final.output_ids
    return change_final(o, output_ids=(*output[:at], output[at] + 1, *output[at + 1 :]))


def test_each_way_has_the_differences_of_its_own_answers():
    cold = {f"p{n}": observation("single-none", n) for n in (40, 48)}
    again = [beside("again", moved(o, 1e-6)) for o in cold.values()]
    crowd = [beside("crowd", moved(o, 3e-5), concurrent=2) for o in cold.values()]
    found = measured([*cold.values()], [], [*again, *crowd])
    assert set(found) == {"again", "crowd"}
    assert found["again"].largest == pytest.approx(1e-6) and found["crowd"].largest == pytest.approx(3e-5)
    assert found["again"].answers == 2 and len(found["again"].quantiles) == len(QUANTILES)
    assert Rounding(ways=found).repeats


def test_a_hit_counts_only_if_the_engine_took_all_but_one_token_from_its_cache():
    donor = beside("hit", observation("single-none", 33), part=HELD_AGAINST)
    for hits, shown in ((32, True), (0, False), (16, False)):
        subject = change_final(moved(donor, 2e-5), counters={"prefix_hits": hits}).model_copy(
            update={"part": "subject"}
        )
        assert ("hit" in measured([], [], [donor, subject])) is shown


def test_a_re_scored_answer_shows_how_many_rows_round():
    o = observation("single-none", 40)
    values = tuple(v - 7e-6 for v in o.final.chosen_logprobs)
    score = change_final(o, rescored_logprobs=values, rescored=(0.0,) * len(values)).model_copy(
        update={"scenario": RESCORE, "sent_ids": (*o.sent_ids, *o.final.output_ids)}
    )
    assert measured([o], [score], [])["prefill"].largest == pytest.approx(7e-6)
    # Of another output it says nothing.
    other = score.model_copy(update={"sent_ids": (*o.sent_ids, *parted(o).final.output_ids)})
    assert "prefill" not in measured([o], [other], [])


def test_answers_that_part_are_counted_with_the_distance_of_the_two_best_there():
    o = observation("single-none", 40)
    gaps = tuple(0.004 if i == 5 else 9.0 for i in range(len(o.final.output_ids)))
    usual = change_final(o, top_gaps=gaps)
    found = measured([usual], [], [beside("again", parted(usual))])["again"]
    assert (found.answers, found.parted, found.parted_nats, found.tokens) == (1, 1, 0.004, 5)
    assert Rounding(ways={"again": found}).repeats is False


def test_an_answer_that_was_asked_for_fewer_tokens_does_not_part():
    o = observation("single-none", 40)
    short = change_final(o, output_ids=o.final.output_ids[:4])
    assert compared({o.prompt_id: o}, {o.prompt_id: short}).parted == 0


def test_the_distance_of_the_two_best_counts_where_it_moves_more():
    o = observation("single-none", 40)
    other = change_final(o, top_gaps=tuple(g + 2e-4 for g in o.final.top_gaps))
    assert max(differences(o.final, other.final)) == pytest.approx(2e-4)


def test_nothing_is_measured_of_answers_without_log_probs_or_that_broke():
    o = observation("single-none", 40)
    assert not measured([o], [], [beside("again", change_final(o, chosen_logprobs=None))])
    assert not measured([o], [], [beside("again", o, error="engine answered 500")])
    assert Rounding().repeats is None and Rounding().largest("again", "hit") is None


def test_of_two_measurements_the_one_that_differs_more_counts():
    few, many = (Way(answers=1, tokens=9 - n, quantiles=(0, 0, 0), largest=n) for n in (3, 8))
    both = Rounding(ways={"again": few}) | Rounding(ways={"again": many, "hit": few})
    assert both.ways == {"again": many, "hit": few}


def test_a_run_has_the_measurement_of_its_plain_engine_alone():
    o, drafting = observation("single-none", 40), observation("single-eagle3", 40)
    made = history([o, drafting, beside("again", moved(o, 4e-6))], cells=["single-none", "single-eagle3"])
    assert made.rounding[""].largest("again") == pytest.approx(4e-6)
    assert not history([drafting]).rounding
