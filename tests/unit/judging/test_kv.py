"""Checks of the KV that engines noted, on stand-in caches."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.engines.witness import kv_harness_witness as plugin
from harness.history.records import Observation
from harness.history.verdict import Verdict
from harness.history.witness import KVWitness
from harness.judging.checks import kv
from harness.judging.checks.registry import judge_cell
from harness.observed.kv_held import KVHeld
from tests.support.builders import change_final, history, observation, view, with_profile
from tests.support.kv_caches import AtOnce, StandInRunner, as_in_an_engine, kv_of, take_note, write_notes

_TOKENS = 83


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    with as_in_an_engine():
        yield


class Run:
    """A run of a pair, its single engine and the plain one, whose KV a test may damage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kv = kv_of(1)
        self.prefill, self.decode, self.single = self.kv.clone(), self.kv.clone(), self.kv.clone()
        self.plain = self.kv.clone()
        self.received: list[int] | None = [0, 1, 2]
        self.answers = 0
        self.silent: set[str] = set()
        self.latent = False
        self.given: list[Observation] = []

    def view(self, cell: str = "pd-eagle3", hits: float = 0.0):
        answers = [observation(name, _TOKENS) for name in ("pd-eagle3", "single-eagle3", "single-none")]
        answers[0] = change_final(answers[0], counters={**answers[0].final.counters, "prefix_hits": hits})
        self.given = answers
        requests = {o.cell: o.legs[-1].request_id for o in answers}
        for role, of, held, moments in (
            ("prefill", "pd-eagle3", self.prefill, ("end",)),
            ("decode", "pd-eagle3", self.decode, ("begin", "end")),
            ("single", "single-eagle3", self.single, ("end",)),
            ("single", "single-none", self.plain, ("end",)),
        ):
            kept = [m for m in moments if f"{of} {role} {m}" not in self.silent]
            writer = AtOnce(self.folder, role, of)
            answer = self.answers if "single" in (role, of) or role == "decode" else 0
            draft = of != "single-none"
            latent = {"latent": self.latent}
            write_notes(writer, held, requests[of], _TOKENS, self.received, kept, draft=draft, answer=answer, **latent)
        return self.again(answers, cell)

    def again(self, answers: list[Observation], cell: str = "pd-eagle3"):
        """The view of a cell by the notes as they are now."""
        return view(with_profile(history(answers, folder=self.folder), witness="kv"), cell)

    def handed_over(self):
        return kv.kv_handed_over(self.view())

    def computed(self, cell: str = "pd-eagle3"):
        return kv.kv_computed(self.view(cell))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_equal_caches_pass(run: Run):
    cell = run.view()
    over, computed = kv.kv_handed_over(cell), kv.kv_computed(cell)
    assert (over.verdict, over.judged) == (Verdict.PASS, 1)
    assert (computed.verdict, computed.judged) == (Verdict.PASS, 1)
    assert over.note == "18 cells of 16 tokens of a layer compared"


def test_latents_of_a_hand_off_and_of_prompts_are_compared_and_located(run: Run):
    run.latent = True
    cell = run.view()
    over, computed = kv.kv_handed_over(cell), kv.kv_computed(cell)
    assert [(r.verdict, r.judged) for r in (over, computed)] == [(Verdict.PASS, 1)] * 2
    assert over.note == "18 cells of 16 tokens of a layer compared"


@pytest.mark.parametrize("how", ["changed", "zeros", "shifted"])
def test_other_latents_are_named_as_such(run: Run, how: str):
    run.latent = True
    if how == "changed":
        run.decode[1, 0, 40, 0, 3] += 1e-3
        where = "another latent in layer model.layers.1.attn in block 1 of 3 (token 40)"
    elif how == "zeros":
        run.decode[:2, :, 32:64] = 0
        where = "another latent in 2 layers (model.layers.0.attn to model.layers.1.attn) in block 1 of 3"
    else:
        run.decode[:2, :, 32:64] = run.kv[:2, :, :32]
        where = "in block 1 of 3 (tokens 32 to 63): block 1 holds what P has in block 0, -1 block away"
    cell = run.view()
    over, computed = kv.kv_handed_over(cell), kv.kv_computed(cell)
    (finding,) = over.findings
    assert where in finding.message and finding.location.blocks == (1,)
    assert ("zeros" in finding.message) is (how == "zeros")
    assert [(g.keys, g.values, g.latent) for g in finding.kv_layers] == [((), (), (1,))]
    assert {p.kind for p in finding.evidence.places} == {"latent"}
    # A thousandth is rounding to this check: of the prompt's other tokens it says nothing.
    assert (computed.verdict is Verdict.PASS) is (how == "changed")


def test_one_changed_element_of_a_hand_off_is_located(run: Run):
    run.decode[1, 0, 40, 2, 3] += 1e-3
    found = run.handed_over()
    (finding,) = found.findings
    assert (found.verdict, finding.damage, finding.verdict) == (Verdict.REGRESSION, "target-kv", Verdict.REGRESSION)
    assert "other keys in layer model.layers.1.attn in head 2 in block 1 of 3 (token 40)" in finding.message
    assert finding.location.blocks == (1,) and finding.location.of == 3 and finding.location.position == 40


def test_damage_to_the_drafter_alone_is_of_that_class(run: Run):
    run.decode[2, 1, 5] = 0
    (finding,) = run.handed_over().findings
    assert finding.damage == "drafter-kv"
    cell = run.view()
    assert judge_cell(cell).diagnosis.damage == "drafter-kv"


def test_lost_and_shifted_blocks_are_named(run: Run):
    run.decode[:, :, 32:64] = 0
    assert "block 1 of 3 (tokens 32 to 63): zeros" in run.handed_over().findings[0].message


def test_blocks_of_elsewhere_are_named(run: Run):
    run.decode[:, :, :32] = run.kv[:, :, 32:64]
    (finding,) = run.handed_over().findings
    assert "block 0 holds what P has in block 1, +1 block away" in finding.message
    assert finding.location.shift == 1


def test_blocks_that_were_not_sent_are_left_to_the_other_check(run: Run):
    run.received = [1, 2]
    run.decode[0, 0, 3] = 0
    assert run.handed_over().verdict is Verdict.PASS
    found = run.computed()
    assert found.verdict is Verdict.REGRESSION
    assert (
        "expected the decode engine to hold before its first step what single-none computed"
        in found.findings[0].message
    )
    assert len(found.findings) == 1


@pytest.mark.parametrize("side", ["pd-eagle3 prefill end", "pd-eagle3 decode begin"])
def test_a_hand_off_without_a_note_is_unknown(run: Run, side: str):
    run.silent.add(side)
    found = run.handed_over()
    assert found.verdict is Verdict.UNKNOWN and len(found.findings) == 1


@pytest.mark.parametrize("side", ["pd-eagle3 prefill end", "pd-eagle3 decode end"])
def test_an_engine_without_a_note_is_unknown(run: Run, side: str):
    run.silent.add(side)
    found = run.computed()
    assert {f.verdict for f in found.findings} == {Verdict.UNKNOWN}
    assert f"expected a note of the {side.split()[1]} engine" in found.findings[0].message


def _decoded(run: Run, *notes: tuple[str, str], damage: int | None = None):
    """The view of the pair where D noted these requests and moments on one engine; ``{}`` is the pair's own request.
    With ``damage``, a head of that block of a layer becomes zero before the last note."""
    answers = list(run.view().history.observations)
    request = next(o for o in answers if o.cell == "pd-eagle3").legs[-1].request_id
    writer = AtOnce(run.folder, "decode", "pd-eagle3")
    writer.path.unlink()
    runner = StandInRunner(run.kv, 32)
    witness = plugin.Witness(runner, writer)
    for number, (name, moment) in enumerate(notes, 1):
        if damage is not None and number == len(notes):
            runner.layers["model.layers.0.attn"].kv_cache[runner.blocks[damage], 2] = 0
        take_note(witness, runner, name.format(request), moment, _TOKENS)
    return run.again(answers)


def test_the_last_token_of_a_prompt_is_computed_whatever_stands_there_before(run: Run):
    """P of a model with recurrent state hands over all tokens but the last."""
    run.kv[:, :, _TOKENS - 1] = 0
    cell = _decoded(run, ("{}", "begin"))
    writer = AtOnce(run.folder, "decode", "pd-eagle3")
    write_notes(writer, run.plain, _request(cell), _TOKENS)
    assert kv.kv_computed(cell).verdict is Verdict.PASS


def _request(cell) -> str:
    return next(iter(cell.all_observations())).legs[-1].request_id


def test_the_kv_of_an_answer_is_compared_up_to_its_first_other_token(run: Run):
    run.answers = 4
    run.decode[0, 1, _TOKENS + 2] = 0
    (finding,) = run.computed().findings
    assert "expected the decode engine to hold of its answer what single-none computed" in finding.message
    assert (finding.location.blocks, finding.location.position) == ((2,), _TOKENS + 2)


def test_cached_blocks_that_are_what_they_were_pass(run: Run):
    assert not kv.has_hits(run.view())
    cell = _decoded(run, ("before", "end"), ("{}", "begin"))
    found = kv.kv_kept(cell)
    assert kv.has_hits(cell)
    assert (found.verdict, found.judged, found.note) == (Verdict.PASS, 1, "12 cells of 16 tokens of a layer compared")


def test_a_cached_block_that_changed_is_named(run: Run):
    cell = _decoded(run, ("before", "end"), ("{}", "begin"), damage=1)
    (finding,) = kv.kv_kept(cell).findings
    assert "prefix cache to find blocks as they were when they were filled, found other" in finding.message
    assert "in layer model.layers.0.attn in head 2 in block 1 of 3: zeros" in finding.message


def test_a_hit_without_a_note_is_unknown(run: Run):
    run.silent |= {"pd-eagle3 decode begin"}
    cell = run.view(hits=64.0)
    assert kv.has_hits(cell)
    (finding,) = kv.kv_kept(cell).findings
    assert finding.verdict is Verdict.UNKNOWN
    assert "expected a note of what the decode engine found in its prefix cache" in finding.message


def test_without_any_reference_nothing_passes(run: Run):
    run.silent |= {"single-none single end", "single-eagle3 single end"}
    found = run.computed()
    assert (found.verdict, found.judged) == (Verdict.UNKNOWN, 0)


def test_a_single_engine_is_judged_by_the_plain_one(run: Run):
    run.single[0, 1, 50, 1] = 0
    found = run.computed("single-eagle3")
    assert found.verdict is Verdict.REGRESSION and found.findings[0].damage == "target-kv"


def test_rounding_is_no_finding_for_what_was_computed_and_one_for_what_was_sent(run: Run):
    run.prefill *= 1 + 1e-6
    assert run.computed().verdict is Verdict.PASS
    assert run.handed_over().verdict is Verdict.REGRESSION


def test_an_error_of_the_plugin_and_a_layer_that_it_cannot_read_are_unknown(run: Run):
    cell = run.view()
    with (run.folder / "witness" / "pd-eagle3.decode.1.jsonl").open("a") as stream:
        stream.write('{"error":"OSError: no space"}\n')
    found = kv.kv_handed_over(cell)
    assert found.verdict is Verdict.UNKNOWN and "OSError: no space" in found.findings[0].message


def _rewritten(run: Run, notes: str, change) -> None:
    """Change each line of notes that were taken."""
    path = run.folder / "witness" / f"{notes}.1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _of_two_ranks(row: dict) -> None:
    row.update({"ranks": 2} if "witness" in row else {})


def _of_nothing(row: dict) -> None:
    row.update({"groups": []} if row.get("moment") == "end" else {})


@pytest.mark.parametrize(
    ("change", "words"),
    [(_of_two_ranks, "expected a note of the prefill engine's KV"), (_of_nothing, "expected a note of the prefill")],
)
def test_notes_of_a_part_of_the_heads_or_of_nothing_are_none(run: Run, change, words: str):
    """What is left would be compared, and pass for all of it."""
    run.view()
    _rewritten(run, "pd-eagle3.prefill", change)
    cell = run.again(run.given)
    found = kv.kv_computed(cell)
    assert found.verdict is Verdict.UNKNOWN and any(words in f.message for f in found.findings), found.findings


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([0, 2], "expected the decode engine to note the KV of layer model.layers.1.attn, as others do, found none"),
        ([0, 1], "expected the decode engine to note the KV of its drafter's layers, found none"),
    ],
)
def test_a_layer_that_one_engine_does_not_note_is_unknown(run: Run, kept: list[int], words: str):
    """Only layers that both have are compared."""
    run.view()

    def without(row: dict) -> None:
        for group in row["groups"]:
            if "witness" in row:
                group.update({key: [group[key][n] for n in kept] for key in ("layers", "firsts")})
            elif group["digests"]:
                for key, dtype in (("digests", "<u8"), ("sketches", "<f2")):
                    of_layers = np.frombuffer(base64.b64decode(group[key]), dtype).reshape(3, -1)
                    group[key] = base64.b64encode(of_layers[kept].tobytes()).decode()

    _rewritten(run, "pd-eagle3.decode", without)
    cell = run.again(run.given)
    for check in (kv.kv_computed, kv.kv_handed_over):
        found = check(cell)
        assert found.verdict is Verdict.UNKNOWN and any(words in f.message for f in found.findings), found.findings


def test_an_answer_of_which_no_kv_was_noted_is_unknown(run: Run):
    run.answers = 40
    cell = run.view()
    assert kv.kv_computed(cell).verdict is Verdict.PASS
    path = run.folder / "witness" / "pd-eagle3.decode.1.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line).get("moment") != "answer"]
    path.write_text("".join(lines))
    found = kv.kv_computed(run.again(run.given))
    assert found.verdict is Verdict.UNKNOWN, found.findings
    assert "expected a note of the decode engine's KV of its answer, found none" in found.findings[0].message


def test_the_checks_apply_where_the_profile_asks_for_notes(run: Run):
    cell = run.view()
    assert {kv.HANDED_OVER, kv.COMPUTED} <= {r.check for r in judge_cell(cell).results}
    without = view(history([observation("pd-eagle3", _TOKENS)], folder=run.folder), "pd-eagle3")
    assert not {kv.HANDED_OVER, kv.COMPUTED} & {r.check for r in judge_cell(without).results}


def test_the_last_entry_of_a_drafter_may_follow_another_answer(run: Run):
    run.decode[2, :, _TOKENS - 1] += 1
    run.prefill = run.decode
    cell = run.view()
    assert kv.kv_computed(cell).verdict is Verdict.REGRESSION
    answered = cell.history.of("pd-eagle3")[f"p{_TOKENS}"]
    other = answered.model_copy(
        update={"legs": (*answered.legs[:-1], answered.legs[-1].model_copy(update={"output_ids": (9, 9)}))}
    )
    assert isinstance(other, Observation)
    changed = [other, *(o for o in cell.history.observations if o.cell != "pd-eagle3")]
    made = with_profile(history(changed, folder=run.folder), witness="kv")
    assert kv.kv_computed(view(made, "pd-eagle3")).verdict is Verdict.PASS


def test_an_answer_of_another_cell_is_found_by_its_own_legs_behind_a_router(run: Run):
    made = run.view().history
    (plain,) = [o for o in made.observations if o.cell == "single-none"]
    behind = SimpleNamespace(routed=True, id="pd-eagle3-router", history=made)
    assert KVHeld(behind, KVWitness(run.folder)).had(plain, "single") is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", [False, True])
def test_what_p_reads_back_and_answers_from_is_compared_with_what_d_held(tmp_path: Path, damage: bool):
    """P has the last block of the turn before from D alone."""
    held = kv_of(4)
    donor = observation("pd-none", _TOKENS, scenario="next", part="donor")
    said = len(donor.final.output_ids or ())
    subject = observation("pd-none", _TOKENS + said - 1, scenario="next", part="subject", route="read-back", sequence=1)
    leg = subject.legs[0].model_copy(update={"counters": {"prompt_tokens_external_kv_transfer": 9.0}})
    subject = subject.model_copy(update={"legs": (leg,)})
    write_notes(AtOnce(tmp_path, "decode", "pd-none"), held, donor.legs[-1].request_id, _TOKENS, answer=said - 1)
    if damage:
        held[1, 1, 70, 2] = 0
    ours = AtOnce(tmp_path, "prefill", "pd-none")
    write_notes(ours, held, leg.request_id, _TOKENS + said - 1, received=[2], moments=("begin", "end"))
    raw = {"id": "next", "kind": "continuation", "read_back": True, "on_p": True, "donor": "p83", "continued": ["x"]}
    the_history = with_profile(history([donor, subject], scenarios=[raw], folder=tmp_path), witness="kv")
    found = kv.kv_handed_over(view(the_history, "pd-none", scenario="next"))
    messages = [f.message for f in found.findings if f.part == subject.key]
    if not damage:
        assert messages == [] and "cells of 16 tokens of a layer compared" in found.note
    else:
        (words,) = messages
        assert "expected P to hold what D had when it ended the turn before, found other values in layer" in words
        assert words.endswith("in layer model.layers.1.attn in head 2 in block 2 of 6 (token 70)")
