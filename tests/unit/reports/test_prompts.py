"""The rows of all requests: which pass, which differ and where, their text, and how much of them a page holds."""

from __future__ import annotations

import pytest

from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.profiles.load import SHIPPED_PROFILES
from harness.reports import prompts
from harness.reports.prompts import changes, page_data, prompts_of
from harness.util.files import tokenizer_hash
from harness.util.paths import REPOSITORY
from tests.support.builders import LENGTHS, change_final, garbled, history, lookups, observation, with_cells, with_run

PAIR = ("pd-none", "single-none")


def rows_of(observations: list, baselines: dict | None = None, **run):
    h = with_run(history(observations), **run)
    known = lookups(LENGTHS) if baselines is None else baselines
    return prompts_of(h, judge(h, known), known)


def pair(change=lambda o: o) -> list:
    return [change(observation(cell, n)) for cell in PAIR for n in LENGTHS]


def test_right_answers_pass_because_they_were_compared():
    found = rows_of(pair())
    assert len(found.rows) == len(PAIR) * len(LENGTHS)
    assert {(r.verdict, r.compared, r.parted) for r in found.rows} == {(Verdict.PASS, True, None)}


def test_answers_that_nothing_was_compared_with_do_not_pass():
    found = rows_of([observation("single-none", n) for n in LENGTHS], baselines={})
    assert {r.compared for r in found.rows} == {False}
    assert Verdict.PASS not in {r.verdict for r in found.rows}


def test_broken_and_abandoned_answers_do_not_pass():
    broken = pair(lambda o: o.model_copy(update={"error": "500"}) if o.cell == "pd-none" else o)
    row = next(r for r in rows_of(broken).rows if r.place[0] == "pd-none")
    assert (row.verdict, row.compared, row.error) == (Verdict.UNKNOWN, False, "500")


def test_wrong_answer_comes_first_with_the_place_of_its_first_wrong_token():
    wrong = pair(lambda o: garbled(o, at=9) if (o.cell, o.prompt_id) == ("pd-none", "p40") else o)
    first, *others = rows_of(wrong).rows
    assert first.place == ("pd-none", "cold", "ids", "p40")
    assert (first.verdict, first.parted) == (Verdict.REGRESSION, 9)
    assert first.output[:9] == first.expected[:9] and first.damaged
    assert [s.name for s in first.sides] == ["P", "D"]
    assert not any(r.findings or r.sides for r in others)


def test_sampled_answers_are_compared_with_this_run_and_not_with_the_greedy_baseline():
    def sampled(cell: str):
        return observation(cell, 40, temperature=0.8)

    other = [change_final(sampled(cell), output_ids=(9, 8, 7)) for cell in PAIR]
    by_cell = {r.place[0]: r for r in rows_of(other).rows}
    assert by_cell["pd-none"].compared and by_cell["pd-none"].parted is None
    assert not by_cell["single-none"].compared


def test_lengths_show_the_worst_of_their_prompts_and_what_is_equal_although_unknown():
    found = rows_of(pair(lambda o: garbled(o) if (o.cell, o.prompt_id) == ("pd-none", "p32") else o)).by_length
    assert {n: e.symbol for n, e in found["pd-none"].items()} == {31: "·", 32: "✘", 40: "·", 65: "·"}
    assert (found["pd-none"][32].requests, found["pd-none"][32].damaged) == (1, 1)
    # Re-scoring was planned, and did not happen: the tokens are right all the same.
    assert {e.symbol for e in rows_of(pair(), rescore=True).by_length["pd-none"].values()} == {"="}


# --- text ------------------------------------------------------------------------------------------------------------


def with_tokenizer(sha256: str, folder: str = "models/probe/tokenizer"):
    return rows_of(
        pair(), identities={"none": {"tokenizer_sha256": sha256}}, profile={"name": "t", "tokenizer": folder}
    )


def test_tokens_have_their_text_where_the_tokenizer_is_the_recorded_one(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    known = tokenizer_hash(REPOSITORY / "models/probe/tokenizer")
    found = with_tokenizer(known)
    assert set(found.pieces) == {i for r in found.rows for i in (*r.prompt, *r.expected, *r.output)}
    assert found.pieces[0] == "<|bos|>"
    # A run from elsewhere names a folder that is not here; the shipped tokenizer has the same hash.
    assert with_tokenizer(known, "/nowhere/tokenizer").pieces == found.pieces


def test_another_tokenizer_says_nothing(tmp_path):
    assert with_tokenizer("0" * 64).pieces == {}
    (tmp_path / "tokenizer.json").write_text("{")
    assert with_tokenizer(tokenizer_hash(tmp_path), str(tmp_path)).pieces == {}


@pytest.mark.parametrize(
    ("expected", "output"),
    [((1, 2, 3), (1, 2, 3)), ((1, 2, 3), (1, 9, 3)), ((1, 2, 3), (1, 2)), ((), (5,)), ((1, 2, 3, 4), (2, 3, 4, 5))],
)
def test_changes_turn_the_expected_tokens_into_the_output(expected, output):
    found = changes(expected, output)
    assert tuple(i for c in found if c.kind != "ins" for i in c.ids) == expected
    assert tuple(i for c in found if c.kind != "del" for i in c.ids) == output
    assert all(c.ids for c in found)
    if expected == output:
        assert [c.kind for c in found] == ["same"]


def test_an_answer_that_repeats_itself_parts_where_it_parts():
    """The rest of the first answer occurs in the second, further to the left of what they begin with."""
    expected, output = (1, 2, 3, 4), (1, 2, 1, 2, 3, 4)
    assert [c.kind for c in changes(expected, output)] == ["same", "ins", "same"]
    assert changes(expected, output)[0].ids == (1, 2)
    long = tuple(range(58)) * 3
    first, second, *_ = changes((*long[:58], 99, *long[:20]), long)
    assert (first.kind, len(first.ids)) == ("same", 58) and second.at == 58


# --- data of the page ------------------------------------------------------------------------------------------------


def test_page_has_each_sequence_once():
    wrong = pair(lambda o: garbled(o) if (o.cell, o.prompt_id) == ("pd-none", "p32") else o)
    data = page_data(rows_of(wrong), {"pd-none/tokens-reference/p32/ids": "harness repro"})
    assert len(set(data["sequences"])) == len(data["sequences"]) == 2 * len(LENGTHS) + 1
    row = data["rows"][0]
    expected, output = (data["sequences"][row[key]] for key in ("expected", "output"))
    assert tuple(t for i, j, k, m in row["diff"] for t in output[k:m]) == output
    assert row["tokens"] == next(i for i, (a, b) in enumerate(zip(expected, output, strict=False)) if a != b)
    assert {f[0]: f[3] for f in row["findings"]}["tokens-reference"] == "harness repro"
    assert "findings" not in data["rows"][-1]


def test_large_runs_keep_the_rows_with_findings(monkeypatch):
    wrong = pair(lambda o: garbled(o) if (o.cell, o.prompt_id) == ("pd-none", "p32") else o)
    monkeypatch.setattr(prompts, "MOST_ROWS", 3)
    monkeypatch.setattr(prompts, "MOST_TOKENS", 40)
    found = rows_of(wrong)
    assert [r.place[3] for r in found.rows] == ["p32"]
    assert found.left_out == len(PAIR) * len(LENGTHS) - 1
    # Lengths are counted whether or not their requests have a row.
    assert sum(e.requests for row in found.by_length.values() for e in row.values()) == len(PAIR) * len(LENGTHS)
    data = page_data(found, {})
    assert sum(map(len, data["sequences"])) <= 40
    assert "output" not in data["rows"][0] or data["rows"][0]["output"] < len(data["sequences"])


def test_shipped_profiles_name_the_tokenizer_that_is_tried():
    assert "tokenizer: models/probe/tokenizer" in (SHIPPED_PROFILES / "cpu.yaml").read_text()


def test_right_tokens_do_not_pass_where_the_cell_as_a_whole_is_in_doubt():
    """A registered test without power, or a cell that was not asked to its end, says nothing of single requests."""
    made = with_cells(history(pair()), "pd-none", planned=9)
    found = prompts_of(made, judge(made, lookups(LENGTHS)), lookups(LENGTHS))
    assert {r.verdict for r in found.rows if r.place[0] == "pd-none"} == {Verdict.UNKNOWN}
    assert {e.symbol for e in found.by_length["pd-none"].values()} == {"="}
    assert {r.verdict for r in found.rows if r.place[0] == "single-none"} == {Verdict.PASS}
