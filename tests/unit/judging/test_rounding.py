"""Bounds of log-probs and near ties that follow from measured rounding, and the tier that auto comes to."""

from dataclasses import replace

import pytest

from harness.baselines.index import StoredBaseline
from harness.baselines.lookup import Lookup
from harness.errors import DataError
from harness.history.records import RESCORE
from harness.history.rounding import ASIDE, MULTIPLE, Rounding, Way
from harness.history.verdict import Verdict
from harness.judging import rounding
from harness.judging.checks.logprobs import logprobs_single
from harness.judging.checks.registry import evidence_for, judge
from harness.judging.near_ties import near_tie_nats
from harness.judging.rounding import OTHERWISE_NATS, RESOLUTION_NATS, bounds, records_log_probs
from tests.support.builders import change_final, history, lookups, observation, rescoring, view

LENGTHS = [40, 48]


def way(largest, parted=0, parted_nats=None):
    return Way(answers=4, tokens=64, quantiles=(0, 0, largest), largest=largest, parted=parted, parted_nats=parted_nats)


def measured(**ways):
    """Baselines whose plain engine was measured so."""
    found = lookups(LENGTHS)
    plain = found["none"].baseline
    here = plain.header.provenance.model_copy(update={"hardware": history([]).run.hardware})
    header = plain.header.model_copy(update={"rounding": Rounding(ways=ways), "provenance": here})
    return {**found, "none": Lookup(plain.model_copy(update={"header": header}), "")}


def without_bounds(the_history, **judging):
    """The run of a profile that sets no bounds."""
    set_ = {"judging": {"logprob_nats": None, "near_tie_nats": None, **judging}}
    run = the_history.run.model_copy(update={"profile": {**the_history.run.profile, **set_}})
    return the_history.model_copy(update={"run": run})


def moved(o, nats):
    return change_final(o, chosen_logprobs=tuple(v - nats for v in o.final.chosen_logprobs))


def pair(nats, **changes):
    made = history([moved(observation("pd-none", 40, **changes), nats), observation("single-none", 40)])
    return without_bounds(made)


def test_the_bound_is_a_multiple_of_the_largest_that_was_seen():
    cell = view(pair(0), "pd-none", measured(hit=way(2e-5), prefill=way(1e-5), crowd=way(1e-4)))
    found = bounds(cell)
    assert found.alone == found.beside == pytest.approx(MULTIPLE * 1e-4)
    # Where crowds were not measured, they may round more than what was.
    assert bounds(view(pair(0), "pd-none", measured(hit=way(2e-5)))).beside == OTHERWISE_NATS
    for nats, verdict in ((1.5e-4, Verdict.PASS), (2e-4, Verdict.REGRESSION)):
        judged = view(pair(nats), "pd-none", measured(hit=way(2e-5)))
        assert logprobs_single(judged).verdict is verdict


def test_a_row_alone_that_rounds_otherwise_is_no_regression():
    """As a real model of 30 layers does: 1.7e-5 nats between P/D and alone, all tokens right."""
    assert judge(pair(1.7e-5), measured(hit=way(1.3e-5), prefill=way(3e-5))).verdict is Verdict.PASS


def test_what_a_record_cannot_resolve_is_no_difference():
    assert bounds(view(pair(0), "pd-none", measured(hit=way(0.0)))).alone == RESOLUTION_NATS


def test_without_a_measurement_the_plain_engine_of_the_run_gives_one():
    assert bounds(view(pair(0), "pd-none", lookups(LENGTHS))).alone == OTHERWISE_NATS
    o = observation("single-none", 40)
    again = moved(o, 5e-6).model_copy(update={"scenario": RESCORE, "instance": ASIDE["again"]})
    shown = history([observation("pd-none", 40), o, again], cells=["pd-none", "single-none"])
    assert bounds(view(shown, "pd-none", lookups(LENGTHS))).alone == pytest.approx(MULTIPLE * 5e-6)


@pytest.mark.parametrize(("nats", "verdict"), [(0.01, Verdict.PASS), (0.4, Verdict.UNKNOWN)])
def test_a_plain_engine_that_is_wrong_does_not_widen_the_bounds_that_it_is_judged_by(nats, verdict):
    """Its answers are less probable when they are read afresh. On a machine that recorded no baseline, that was taken
    for rounding, however much it was."""
    o = observation("single-none", 40)
    read = tuple(v + nats for v in o.final.chosen_logprobs)
    score = change_final(rescoring("p40", o.sent_ids, o.final.output_ids), rescored_logprobs=read)
    made = history([observation("pd-none", 40), o, score], cells=["pd-none", "single-none"])
    run = made.run.model_copy(update={"rescore": True})
    shown = without_bounds(made.model_copy(update={"run": run}))
    judged = {r.check: r for c in judge(shown, lookups(LENGTHS)).cells if c.cell == "pd-none" for r in c.results}
    for check in ("rescored", "logprobs-single", "logprobs-baseline"):
        assert judged[check].verdict is verdict, judged[check]
        assert any("would excuse damage" in f.message for f in judged[check].findings) == (verdict is Verdict.UNKNOWN)
    given = judge(without_bounds(shown, logprob_nats=1.0), lookups(LENGTHS))
    assert given.result("pd-none", "logprobs-single").verdict is Verdict.PASS


def test_a_profile_may_set_the_bound():
    cell = view(pair(0.5), "pd-none", measured(hit=way(2e-5)))
    wide = replace(cell, judging=cell.judging.model_copy(update={"logprob_nats": 1.0}))
    assert bounds(wide).alone == 1.0 and logprobs_single(wide).verdict is Verdict.PASS


def test_baselines_of_another_processor_may_round_otherwise():
    cell = view(pair(0), "pd-none", measured(hit=way(2e-6)))
    elsewhere = cell.history.run.model_copy(update={"hardware": {"processor": "another"}})
    other = replace(cell, history=cell.history.model_copy(update={"run": elsewhere}))
    assert bounds(cell).alone == pytest.approx(MULTIPLE * 2e-6)
    # What was measured there says nothing of the kernels here.
    assert bounds(other).recorded == bounds(other).alone == OTHERWISE_NATS


def test_near_ties_of_the_bitwise_tier_are_what_was_seen_to_part():
    cell = view(pair(0), "pd-none", measured(hit=way(2e-5), crowd=way(2e-5, parted=1, parted_nats=0.03)))
    alone, crowded = observation("pd-none", 40), observation("pd-none", 40, concurrent=3)
    assert near_tie_nats(cell, alone) == pytest.approx(MULTIPLE * 2e-5)
    assert near_tie_nats(cell, crowded) == 0.03
    assert near_tie_nats(replace(cell, judging=cell.judging.model_copy(update={"near_tie_nats": 0.2}))) == 0.2


def test_the_header_of_a_baseline_tells_how_its_engine_rounds(tmp_path):
    """The rows of a large run's baselines do not all fit into memory: here there are none to read."""
    in_memory = measured(hit=way(2e-5))
    on_disk = Lookup(StoredBaseline(tmp_path / "none.json", in_memory["none"].baseline.header), "")
    run = without_bounds(history([observation("single-none", 40)], cells=["single-none"]))
    cells = [view(run, "single-none", {"none": known}) for known in (on_disk, in_memory["none"])]
    assert bounds(cells[0]) == bounds(cells[1]) and records_log_probs(cells[0])
    with pytest.raises(DataError):
        cells[0].baseline_or_reason("none")


def auto(repeats):
    """A run with the tier auto, whose plain engine gave the same tokens again, other ones, or was not asked (None)."""
    o = observation("single-none", 40)
    other = change_final(o, output_ids=(*o.final.output_ids[:5], 7, *o.final.output_ids[6:]))
    beside = {"scenario": RESCORE, "instance": ASIDE["again"]}
    again = [] if repeats is None else [(o if repeats else other).model_copy(update=beside)]
    made = history([observation("pd-none", 40), o, *again], cells=["pd-none", "single-none"])
    asked = made.model_copy(update={"run": made.run.model_copy(update={"rounding": True})})
    return without_bounds(asked, tier="auto")


def test_auto_is_bitwise_where_the_plain_engine_repeats_itself():
    found = judge(auto(True), lookups(LENGTHS))
    assert evidence_for(auto(True), lookups(LENGTHS)).judging.tier == "bitwise"
    assert any("tier bitwise" in n and "1 of 1 answers" in n for n in found.notices)


def test_auto_looks_at_the_plain_engines_once(monkeypatch):
    asked = []
    found = rounding._repeatability
    monkeypatch.setattr(rounding, "_repeatability", lambda *given: asked.append(given) or found(*given))
    assert any("by measurement" in n for n in judge(auto(True), lookups(LENGTHS)).notices)
    assert len(asked) == 1


def rounding_by(nats, gap):
    """A run with the tier auto, whose plain engine repeats itself, moves log-probs by ``nats`` when it reads its answer
    afresh, and has its two best tokens ``gap`` apart."""
    made = auto(True)
    wide = [
        change_final(o, top_gaps=tuple(gap for _ in o.final.output_ids)) if o.cell == "single-none" else o
        for o in made.observations
    ]
    plain = next(o for o in wide if o.cell == "single-none")
    crowd = moved(plain, nats).model_copy(update={"scenario": RESCORE, "instance": ASIDE["crowd"]})
    return made.model_copy(update={"observations": (*wide, crowd)})


def test_auto_is_normal_where_rounding_decides_tokens():
    """As a real model in bfloat16 on a GPU does: the same request again gives the same tokens, but two of three have a
    second best within what rounding moves, so that right answers part in P/D and in crowds."""
    made = rounding_by(nats=0.25, gap=1.9)
    assert evidence_for(made, lookups(LENGTHS)).judging.tier == "normal"
    (notice,) = [n for n in judge(made, lookups(LENGTHS)).notices if "tier" in n]
    assert "100 % of its tokens have a second best within 2 nats, as far as rounding may move them" in notice


def test_auto_is_bitwise_where_tokens_are_farther_apart_than_rounding_moves_them():
    """As a probe model does in bfloat16, and a real one in float32."""
    for made in (rounding_by(nats=0.25, gap=6.6), rounding_by(nats=1e-5, gap=0.01)):
        assert evidence_for(made, lookups(LENGTHS)).judging.tier == "bitwise"


def test_auto_is_normal_without_log_probs_to_know_it_from():
    made = auto(True)
    blind = [change_final(o, top_gaps=None) if o.cell == "single-none" else o for o in made.observations]
    assert evidence_for(made.model_copy(update={"observations": tuple(blind)}), {}).judging.tier == "normal"


def test_auto_is_normal_where_it_does_not_or_was_not_asked():
    for repeats in (False, None):
        found = judge(auto(repeats), lookups(LENGTHS))
        assert any("tier normal" in n for n in found.notices) and found.verdict is not Verdict.PASS


def test_auto_takes_the_baseline_s_word_for_an_engine_that_the_run_does_not_have():
    known = measured(again=way(0.0))
    assert evidence_for(auto(None), known).judging.tier == "bitwise"
    # What tonight's engine shows goes first.
    assert evidence_for(auto(False), known).judging.tier == "normal"


@pytest.mark.parametrize(
    ("dtype", "here", "compared"), [("float32", False, True), ("bfloat16", True, True), ("bfloat16", False, False)]
)
def test_16_bit_log_probs_of_another_kind_of_machine_are_not_held_against_a_run(dtype, here, compared):
    """Between AMD 25/1 and 26/2 a healthy hybrid model moved by 0.94 nats in one answer of 46."""
    shown = without_bounds(history([observation("single-none", 40)], cells=["single-none"]), logprob_nats=0.3)
    engine = {**shown.run.profile.get("engine", {}), "dtype": dtype}
    shown = shown.model_copy(
        update={"run": shown.run.model_copy(update={"profile": {**shown.run.profile, "engine": engine}})}
    )
    baselines = measured(hit=way(2e-5)) if here else lookups(LENGTHS)
    judgement = judge(shown, baselines)
    (cell,) = judgement.cells
    assert ("logprobs-baseline" in {r.check for r in cell.results}) is compared
    assert any("compared within the run alone" in n for n in judgement.notices) is not compared
