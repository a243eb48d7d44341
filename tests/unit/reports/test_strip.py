"""The strip of steps: expected over found where both begin, around the first difference, in words too."""

from __future__ import annotations

import pytest

from harness.history.acceptance import Steps
from harness.reports.html import render_html
from harness.reports.prompts import PromptRow, page_data
from harness.reports.strip import MOST_COLUMNS, StepStrip, strip_of
from tests.support.builders import (
    LENGTHS,
    change_final,
    flawless,
    history,
    leg,
    lookups,
    observation,
    speculation,
    summarised,
)
from tests.support.pages import Page

REFERENCE = "the baseline"


def steps(*accepted: int, drafted: tuple[int, ...] | None = None) -> Steps:
    return Steps(accepted, padded=False, certain=True, drafted=drafted)


def answer(*accepted: int, role: str = "single", drafted: tuple[int, ...] = ()):
    """An answer whose steps account for all of its tokens."""
    told = speculation(accepted)
    if drafted:
        told = told.model_copy(update={"per_step_drafted": drafted, "up_to": True})
    return leg(role, (1, 2), tuple(range(1 + sum(a + 1 for a in accepted))), speculation=told)


def strip(found, *expected: Steps, parted: int | None = None) -> StepStrip:
    made = strip_of(found, [(REFERENCE, e) for e in expected], parted)
    assert made is not None
    return made


def columns(made: StepStrip) -> list[tuple[int, int | None, int | None]]:
    return [tuple(c) for c in made.columns]


def test_steps_stand_over_those_that_begin_at_the_same_token():
    made = strip(answer(0, 0, 0, 0, 2), steps(3, 2))
    assert columns(made) == [(1, 3, 0), (2, None, 0), (3, None, 0), (4, None, 0), (5, 2, 2)]
    assert [c.differs for c in made.columns] == [True, False, False, False, False]
    assert (made.before, made.after, made.took_over, made.placed_by) == (0, 0, False, "token")


def test_d_takes_over_at_the_first_step_behind_a_padded_one():
    padded = answer(0, 1, 1, 1, 1, role="decode")
    padded = padded.model_copy(update={"output_ids": padded.output_ids[:-1]})
    made = strip(padded, steps(2, 1, 1, 0))
    assert made.took_over and made.columns[0] == (1, 2, 1)
    assert "since D took over" in made.words


def test_strip_begins_before_the_first_difference_of_a_long_answer():
    alike = (1,) * (MOST_COLUMNS + 10)
    made = strip(answer(*alike, 0, *alike, role="decode"), steps(*alike, 2, *alike))
    assert made.before == len(alike) - 4 and [c.differs for c in made.columns[:5]] == [False] * 4 + [True]
    assert len(made.columns) == MOST_COLUMNS
    # The answer begins one step within the two tokens by which it fell behind, and ends one step before the reference.
    assert made.before + len(made.columns) + made.after == 2 * len(alike) + 2
    assert "since D took over" not in made.words


def test_words_have_every_number():
    assert strip(answer(0, 0, 1), steps(2, 1)).words == (
        f"accepted drafts per step: expected ({REFERENCE}) 2, 1; found 0, 0, 1"
    )


def test_first_reference_that_differs_is_shown():
    ours = answer(1, 1)
    made = strip_of(ours, [(REFERENCE, steps(1, 1)), ("single-eagle3", steps(2, 0))], None)
    assert made is not None and made.against == "single-eagle3"
    assert strip_of(ours, [(REFERENCE, steps(1, 1))], None) is None


def test_steps_after_a_wrong_token_are_not_compared():
    """Its drafters saw other tokens. The step that made it is the last one whose tokens were alike before."""
    assert [c.token for c in strip(answer(0, 1, 1, 1), steps(3, 3), parted=2).columns] == [1, 2]
    assert strip_of(answer(0, 1, 1), [(REFERENCE, steps(3, 3))], 0) is None


def test_steps_of_a_method_that_drafts_up_to_k_are_compared_in_order():
    """Those without drafts are missing, so that the tokens at which the others begin are not known."""
    ours = answer(1, 0, drafted=(1, 2))
    made = strip(ours, steps(1, 2, drafted=(1, 2)))
    assert columns(made) == [(0, 1, 1), (1, 2, 0)] and made.placed_by == "step"
    assert strip_of(ours, [(REFERENCE, steps(1, 2, drafted=(1, 2)))], 3) is None


def test_answers_without_steps_have_no_strip():
    assert strip_of(leg("single", (1,), (2, 3)), [(REFERENCE, steps(1))], None) is None


# --- on the page -----------------------------------------------------------------------------------------------------


def lost(o):
    """The answer is right, and no draft of P/D is accepted."""
    if (o.cell, len(o.sent_ids)) != ("pd-eagle3", 40):
        return o
    return change_final(o, speculation=speculation((0, *(0,) * (len(o.final.output_ids) - 1))))


def rows_of(observations, baselines=None) -> dict[str, PromptRow]:
    summary = summarised(history([lost(o) for o in observations]), lookups(LENGTHS) if baselines is None else baselines)
    return {"/".join(r.place): r for r in summary.prompts.rows}


@pytest.mark.parametrize(("baselines", "against"), [(None, REFERENCE), ({}, "single-eagle3")])
def test_answer_with_lost_drafts_has_its_strip(baselines, against):
    found = rows_of(flawless(), baselines)
    with_strip = {name: row.strip for name, row in found.items() if row.strip is not None}
    assert list(with_strip) == ["pd-eagle3/cold/ids/p40"]
    (made,) = with_strip.values()
    assert made.against == against and made.took_over
    assert {c.found for c in made.columns} == {0} and {c.expected for c in made.columns} == {1, None}


def test_request_for_fewer_tokens_is_compared_as_far_as_it_went():
    short = lost(observation("pd-eagle3", 40, max_tokens=8))
    made = rows_of([short])["pd-eagle3/cold/ids/p40"].strip
    assert made is not None
    assert max(c.token for c in made.columns if c.expected is not None) < 8


def test_page_has_the_strip_for_those_with_and_without_scripts(monkeypatch):
    summary = summarised(history([lost(o) for o in flawless()]))
    page = Page(render_html(summary))
    (shown,) = [a for t, a in page.elements if t == "p" and a.get("class") == "drafts"]
    (row,) = [r for r in page_data(summary.prompts, {})["rows"] if "drafts" in r]
    assert shown["aria-label"] == row["drafts"].words and shown["role"] == "img"
    monkeypatch.setattr("harness.reports.prompts.MOST_STRIPS", 0)
    assert not [r for r in page_data(summary.prompts, {})["rows"] if "drafts" in r]
