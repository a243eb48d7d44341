"""Searching for small cases, the variants that are tried, and what a symptom is. No engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.commands.repro import from_names
from harness.commands.shrink.oracle import Oracle, Reference, symptom_of
from harness.commands.shrink.run import _smaller, first_variant
from harness.commands.shrink.search import fewest, smallest_length, smallest_number
from harness.commands.shrink.variant import Frame, Variant
from harness.engines.counters import KvPool
from harness.errors import HandoffError, UsageError
from harness.profiles.cells import all_cells
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.runner.kv_scrub import Scrubber
from harness.scenarios.base import Stage
from harness.scenarios.features import send_with
from harness.workload.scripts import scripts
from tests.support.builders import change_final, observation, speculation

PROFILE = load_profile("cpu")
PROMPTS = load_prompts(PROFILE.workload.prompts)


# --- searching -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_delta_debugging_ends_with_exactly_what_is_needed(count, needed):
    needed = {n for n in needed if n < count}
    tried = []

    def fails(kept):
        tried.append(kept)
        return needed <= set(kept)

    assert fewest(list(range(count)), fails) == sorted(needed)
    assert all(kept == sorted(kept) for kept in tried)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(0, 24))
def test_no_single_item_can_be_left_out_of_the_result(items, wanted):
    """Any rule: here, that the sum is at least a number."""

    def fails(kept):
        return sum(kept) >= wanted

    if fails(items):
        kept = fewest(items, fails)
        assert fails(kept)
        assert not any(fails(kept[:i] + kept[i + 1 :]) for i in range(len(kept)))


@given(st.sets(st.integers(0, 15), min_size=1), st.integers(1, 90), st.integers(1, 12), st.integers(0, 100), st.data())
def test_smallest_length_is_exact_for_residues_and_a_threshold(residues, threshold, least, further, data):
    def fails(n):
        return n % 16 in residues and n >= threshold

    failing = [n for n in range(max(least, threshold), threshold + further + 40) if fails(n)]
    known = data.draw(st.sampled_from(failing))
    tried = []
    assert smallest_length(known, least, 16, lambda n: tried.append(n) or fails(n)) == min(n for n in failing)
    assert all(least <= n < known for n in tried)
    assert len(tried) <= known // 16 + 17


@given(st.integers(1, 60), st.integers(0, 60), st.lists(st.integers(0, 70), max_size=3))
def test_smallest_number_is_exact_where_all_larger_ones_fail(threshold, more, likely):
    known = threshold + more
    assert smallest_number(known, 1, [n for n in likely if n >= threshold], lambda n: n >= threshold) in range(
        threshold, known + 1
    )
    assert smallest_number(known, 1, (), lambda n: n >= threshold) == threshold


# --- variants --------------------------------------------------------------------------------------------------------


def script_of(name: str, topology="pd") -> Variant:
    scenario = next(s for s in PROFILE.scenarios if s.id == name)
    script = scripts(scenario, {p.id: p for p in PROMPTS.prompts}, topology)[0]
    part = "waiting" if name == "pressure" else "holder" if name == "concurrent" else "subject"
    return Variant(script.scenario, script.stages, part)


def test_frame_is_the_template_and_cuts_keep_it():
    frame = Frame.of(PROMPTS.prompts)
    ids = next(p.ids for p in PROMPTS.prompts if p.tokens == 96)
    assert (frame.head, frame.tail) == (2, 2)
    for tokens in range(frame.least, 97):
        cut = frame.cut(ids, tokens)
        assert len(cut) == tokens
        assert cut[:2] == ids[:2] and cut[-2:] == ids[-2:]
    assert frame.cut(ids, 200) == ids


def test_requests_are_left_out_one_by_one():
    variant = script_of("concurrent")
    assert len(variant.others) == 6
    few = variant.only(["late0"])
    assert [s.part for stage in few.stages for s in stage.sends] == ["holder", "late0"]
    assert few.stages[0].hold == "first"
    none = variant.only([])
    assert none.requests == 1 and none.stages[0].hold is None


def test_a_late_request_left_alone_waits_for_nobody():
    (stage,) = script_of("concurrent")._replace(part="late1").only([]).stages
    assert (stage.sends[0].after, stage.sends[0].after_s, stage.hold) == ((), 0.0, None)


def test_cold_variant_drops_everything_else():
    alone = script_of("late-pull").alone()
    assert (alone.scenario, alone.requests, alone.others) == ("cold", 1, ())
    assert alone.subject.between == ()


def test_other_ids_go_wherever_the_prompt_is_sent():
    changed = script_of("prefix-hit").with_ids((1, 2, 3))
    assert [s.prompt.ids for stage in changed.stages for s in stage.sends] == [(1, 2, 3)] * 2
    assert changed.subject.prompt.expected is None


def test_what_a_finding_is_about_is_what_is_shrunk():
    prepared, target, _ = from_names("cpu", "pd-eagle3", "copy-062-10", "cold")
    variant = first_variant(prepared, target)
    assert (variant.scenario, variant.subject.prompt.id) == ("cold", "copy-062-10")
    prepared, target, _ = from_names("cpu", "pd-eagle3", "", "concurrent")
    named = first_variant(prepared, target._replace(key="copy-064-12#0.late0"))
    assert named.subject.part == "late0"


def test_finding_about_a_whole_cell_is_refused():
    prepared, target, _ = from_names("cpu", "pd-eagle3", "copy-062-10", "cold")
    (work,) = prepared.works
    whole = prepared._replace(works=(replace(work, items=work.items * 2),))
    with pytest.raises(UsageError, match="about a whole cell"):
        first_variant(whole, target)


def test_fewer_drafts_begin_with_none_unless_drafts_are_what_is_wrong():
    method = next(c.method for c in all_cells(PROFILE) if c.method.kind == "eagle3")
    assert [m.draft_tokens for m in _smaller(method, "tokens")] == [0, 1, 2]
    assert [m.draft_tokens for m in _smaller(method, "acceptance")] == [1, 2]
    assert _smaller(next(c.method for c in all_cells(PROFILE) if c.method.kind == "none"), "tokens") == []


# --- symptoms --------------------------------------------------------------------------------------------------------


def seen(o, right, near=0.02):
    return symptom_of(o, o.final, right, near)


def test_symptoms_in_the_order_in_which_one_explains_the_next():
    o = observation("pd-eagle3", 40)
    right = observation("single-eagle3", 40).final
    assert seen(o, right) == (None, None)
    wrong = list(o.final.output_ids)
    wrong[5] += 1
    assert seen(change_final(o, output_ids=tuple(wrong)), right) == ("tokens", 5)
    assert seen(change_final(o, output_ids=tuple(wrong), echoed_ids=(1,)), right)[0] == "input"
    symptom, position = seen(change_final(o, speculation=speculation((0, 0, 0, *([1] * 17)))), right)
    assert (symptom, position) == ("acceptance", 1)


def test_near_tie_is_no_symptom():
    o = observation("pd-none", 40)
    right = observation("single-none", 40).final
    wrong = list(o.final.output_ids)
    wrong[5] += 1
    gaps = (*(9.0,) * 5, 0.01, *(9.0,) * (len(wrong) - 6))
    assert seen(change_final(o, output_ids=tuple(wrong)), right.model_copy(update={"top_gaps": gaps})) == (None, None)


def test_another_end_and_another_text_of_the_same_tokens_are_symptoms():
    o = observation("pd-eagle3", 40)
    right = observation("single-none", 40).final
    assert seen(change_final(o, finish_reason="length"), right)[0] == "end"
    assert seen(change_final(o, text="x"), right.model_copy(update={"text": "y"}))[0] == "text"


class Engine:
    """Answers each prompt with its own tokens and an end, and notes what it was asked."""

    def __init__(self):
        self.asked = []

    def ask(self, ask, legs):
        self.asked.append(ask)
        legs.append(observation("single-none", 40).final.model_copy(update={"output_ids": (*ask.payload, 1)}))


def with_a_parameter(feature="bad-words", length=24):
    prompt = next(p for p in PROMPTS.prompts if p.id == "copy-062-10")
    send = send_with(feature, prompt, None, "r0-0", "a")._replace(api="chat")
    variant = Variant("trace", (Stage((send,)),), "r0-0")
    return variant.with_ids(tuple(range(50, 50 + length)))


def test_a_cut_prompt_with_a_parameter_is_asked_by_ids_with_that_of_its_own_answer():
    oracle = Oracle.__new__(Oracle)
    oracle.reference, oracle._default = Reference(Engine()), 192
    subject = oracle._with_known_answer(with_a_parameter()).subject
    assert subject.api == "completion" and subject.prompt.expected == (*range(50, 74), 1)
    assert subject.max_tokens == 32
    stop = oracle._with_known_answer(with_a_parameter("stop-at-cap")).subject
    assert stop.max_tokens == 25 // 2 + 1
    with pytest.raises(HandoffError, match="needs at least 12"):
        oracle._with_known_answer(with_a_parameter(length=8))


def test_the_reference_is_asked_with_the_same_parameter():
    engine = Engine()
    reference = Reference(engine)
    reference.answer((1, 2), 8)
    reference.answer((1, 2), 8, {"stop_token_ids": [2]}, 1.5)
    reference.answer((1, 2), 8, {"stop_token_ids": [2]}, 1.5)
    assert [(dict(a.fields), a.temperature) for a in engine.asked] == [({}, 0.0), ({"stop_token_ids": [2]}, 1.5)]


# --- what earlier requests left behind -------------------------------------------------------------------------------


class FakeSession:
    """Takes requests and answers nothing."""

    def __init__(self, pool, roles=("decode", "prefill")):
        self.roles, self.profile, self.pool = roles, PROFILE, pool
        self.asked = []

    def client(self, _role):
        return self

    def kv_pool(self):
        return KvPool(self.pool)

    def ask(self, ask, _legs):
        self.asked.append(ask)
        return


def test_scrubbing_takes_every_block_of_each_pool():
    session = FakeSession(28)
    scrubber = Scrubber(session, PROMPTS.prompts)
    scrubber.scrub()
    for alone in ("prefill", "single"):
        assert sum(-(-len(a.payload) // 32) for a in session.asked if a.alone == alone) >= 27
    assert scrubber.requests == len(session.asked)
    assert not {tuple(p.ids) for p in PROMPTS.prompts} & {tuple(a.payload) for a in session.asked}
    assert not any(a.hand_off or a.counted for a in session.asked)


@pytest.mark.parametrize("pool", [None, 0, 5000])
def test_pools_that_do_not_come_round_are_left_alone(pool):
    session = FakeSession(pool, roles=("single",))
    Scrubber(session, PROMPTS.prompts).scrub()
    assert session.asked == []
