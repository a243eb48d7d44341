"""The check of what drafts are made of, on notes of stand-in engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.engines.witness import kv_harness_witness as plugin
from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.judging.checks import drafts
from harness.judging.checks.kv import kv_computed
from harness.judging.checks.registry import judge_cell
from tests.support.builders import change_final, history, observation, view, with_profile
from tests.support.kv_caches import AtOnce, as_in_an_engine, kv_of, write_notes

_TOKENS = 83
_STEPS = 4


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    with as_in_an_engine():
        yield


class Drafting:
    """A pair, its single engine and the plain one, of equal KV; a test may change what each drafts from, by step and
    draft, or when it does not note it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hidden = torch.randn((_STEPS, 3, 24), generator=torch.Generator().manual_seed(1))
        self.hidden = {"decode": hidden, "single": hidden.clone()}
        self.kv = {role: kv_of(1) for role in ("prefill", "decode", "single", "plain")}
        self.positions = {"decode": [_TOKENS - 1 + 4 * i for i in range(_STEPS)]}
        self.silent: set[str] = set()
        self.said = 0
        """Tokens of the answer that have KV."""
        self.answers = [observation(name, _TOKENS) for name in ("pd-eagle3", "single-eagle3", "single-none")]

    def view(self, cell: str = "pd-eagle3"):
        for o, role, kv in (
            (self.answers[0], "prefill", "prefill"),
            (self.answers[0], "decode", "decode"),
            (self.answers[1], "single", "single"),
            (self.answers[2], "single", "plain"),
        ):
            writer, request = AtOnce(self.folder, role, o.cell), o.legs[-1].request_id
            said = 0 if role == "prefill" else self.said
            write_notes(writer, self.kv[kv], request, _TOKENS, draft=kv != "plain", answer=said)
            if kv in self.hidden:
                self._note(writer, o, kv)
        return view(with_profile(history(self.answers, folder=self.folder), witness="kv"), cell)

    def _note(self, writer: AtOnce, o: Observation, role: str) -> None:
        # What stands first in the file says what its engine notes.
        header, *rows = writer.path.read_text().splitlines()
        lines = [json.dumps(json.loads(header) | {"drafts": True}), *rows]
        if role not in self.silent:
            row = {"request": f"cmpl-{o.legs[-1].request_id}-0-0a1b2c3d", "prompt": "", "moment": "drafts"}
            lines.append(json.dumps(plugin._drafts_row({**row, "groups": []}, list(self._steps(role)), 0)))
        writer.path.write_text("\n".join(lines) + "\n")

    def _steps(self, role: str) -> Iterator[tuple[plugin.DraftedSteps, int, int]]:
        steps = plugin.DraftedSteps()
        for at, position in enumerate(self.positions.get(role, self.positions["decode"])):
            hidden = self.hidden[role][at]
            step = plugin.DraftedStep(torch.tensor([position]), [hidden], hidden.argmax(-1)[None])
            yield steps, steps.add(step), 0
        steps.close()

    def judged(self, cell: str = "pd-eagle3"):
        return drafts.drafts_computed(self.view(cell))


@pytest.fixture
def run(tmp_path: Path) -> Drafting:
    return Drafting(tmp_path)


def test_equal_drafts_pass(run: Drafting):
    cell = run.view()
    found = drafts.drafts_computed(cell)
    assert drafts.applies(cell)
    assert (found.verdict, found.judged, found.note) == (Verdict.PASS, 1, "12 drafts compared")
    assert drafts.NAME in {r.check for r in judge_cell(cell).results}


def test_rounding_is_no_finding(run: Drafting):
    run.hidden["decode"] *= 1 + 1e-4
    assert run.judged().verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("step", "draft", "where"),
    [(0, 0, "draft 1 behind the first token of the answer"), (1, 2, f"draft 3 behind token {_TOKENS + 4}, output 4")],
)
def test_a_draft_that_was_made_of_something_else_is_named(run: Drafting, step: int, draft: int, where: str):
    run.hidden["decode"][step, draft] += 0.3
    (finding,) = run.judged().findings
    assert (finding.verdict, finding.damage) == (Verdict.REGRESSION, "drafter-input")
    # The largest number stays the largest: no word of an answer tells.
    assert where in finding.message and "the same token" in finding.message
    assert (finding.evidence.draft, finding.evidence.behind_token) == (draft + 1, _TOKENS + 4 * step)
    assert judge_cell(run.view()).diagnosis.damage == "drafter-input"


def test_what_wrong_kv_explains_is_left_to_its_own_finding(run: Drafting):
    run.hidden["decode"] += 0.3
    run.kv["decode"][2, 1, 5] = 0
    cell = run.view()
    found = drafts.drafts_computed(cell)
    assert (found.verdict, found.findings) == (Verdict.PASS, ())
    assert found.note == "1 answer with other KV, left to kv-computed"
    assert judge_cell(cell).diagnosis.damage == "drafter-kv"


@pytest.mark.parametrize(("token", "compared"), [(1, True), (12, True), (13, False)])
def test_the_drafters_kv_of_an_answer_is_compared_as_far_as_both_drafted(run: Drafting, token: int, compared: bool):
    run.said = 20
    # The last step drafted behind the twelfth token of the answer.
    run.hidden["decode"] += 0.3
    run.kv["decode"][2, 1, _TOKENS + token - 1] = 0
    cell = run.view()
    found = kv_computed(cell)
    assert found.verdict is (Verdict.REGRESSION if compared else Verdict.PASS)
    assert drafts.drafts_computed(cell).verdict is (Verdict.PASS if compared else Verdict.REGRESSION)
    for finding in found.findings:
        assert finding.damage == "drafter-kv"
        assert "expected the decode engine to hold of its answer what single-eagle3 computed" in finding.message
        assert f"in block 2 of 3 (token {_TOKENS + token - 1})" in finding.message


@pytest.mark.parametrize("silent", ["decode", "single"])
def test_an_engine_that_drafts_and_notes_none_is_unknown(run: Drafting, silent: str):
    run.silent.add(silent)
    found = run.judged()
    (finding,) = found.findings
    assert (found.verdict, found.judged, finding.verdict) == (Verdict.UNKNOWN, 0, Verdict.UNKNOWN)
    assert "expected a note of what" in finding.message


def test_steps_that_have_no_place_in_common_are_unknown(run: Drafting):
    run.positions["single"] = [p + 1 for p in run.positions["decode"]]
    found = run.judged()
    assert (found.verdict, found.judged) == (Verdict.UNKNOWN, 0)


def test_answers_that_begin_with_another_token_are_not_compared(run: Drafting):
    ids = run.answers[0].final.output_ids
    run.answers[0] = change_final(run.answers[0], output_ids=(ids[0] + 1, *ids[1:]))
    assert not drafts.applies(run.view())


def test_the_check_applies_where_drafters_tell(run: Drafting):
    assert not drafts.applies(run.view("single-none"))
    # There is nothing to compare the single engine's own answers with.
    assert not drafts.applies(run.view("single-eagle3"))


def test_the_check_does_not_apply_to_drafters_that_do_not_tell(run: Drafting):
    run.hidden.clear()
    assert not drafts.applies(run.view())
