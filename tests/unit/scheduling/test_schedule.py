"""The scheduler on small, readable inventories; tests/property/test_schedule.py has the rest."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.scheduling.bounds import heads, lower_bound
from benchmarks.scheduling.first_fit import first_fit
from benchmarks.scheduling.mixes import inventory, mix
from harness.errors import UsageError
from harness.scheduling.model import Device, EngineNeed, Job, tails
from harness.scheduling.packing import impossible
from harness.scheduling.planning import one_by_one, planned, simulate
from harness.scheduling.scheduler import PlacementRule, Scheduler

ONE = [Device("a0", "a", 80.0)]
TWO_NODES = [Device(f"{n}{i}", n, 80.0, i) for n in "ab" for i in range(2)]


def single(name, gib=32.0, seconds=100.0, devices=1, **more):
    return Job(name, (EngineNeed("single", devices, gib),), 0.0, seconds, **more)


def pair(name, prefill=32.0, decode=32.0, seconds=100.0, sizes=(1, 1), **more):
    engines = (EngineNeed("prefill", sizes[0], prefill), EngineNeed("decode", sizes[1], decode))
    return Job(name, engines, 40.0, seconds - 40.0, **more)


def scheduler(jobs, devices, clock=lambda: 0.0, **more):
    return Scheduler(jobs, devices, PlacementRule("as given", tuple(j.id for j in jobs), **more), clock)


def started(found):
    return {p.job.id: [sorted(d.id for d in e.devices) for e in p.engines] for p in found}


def nodes(placement):
    return {d.node for e in placement.engines for d in e.devices}


# --- where engines go -----------------------------------------------------------------------------------------------


def test_pair_that_fits_shares_a_device():
    assert started(scheduler([pair("p", placement="together")], TWO_NODES).start_next()) == {"p": [["a0"], ["a0"]]}


def test_pair_that_does_not_fit_on_one_device_gets_two_of_one_node():
    found = scheduler([pair("p", 60, 60, placement="together")], TWO_NODES).start_next()
    assert sorted(started(found)["p"]) == [["a0"], ["a1"]]


def test_spread_pair_gets_two_nodes():
    (found,) = scheduler([pair("p", placement="spread")], TWO_NODES).start_next()
    assert nodes(found) == {"a", "b"}


def test_unequal_tensor_parallel_sizes():
    (found,) = scheduler([pair("p", sizes=(1, 2), placement="together")], TWO_NODES).start_next()
    assert [len(e.devices) for e in found.engines] == [1, 2]
    assert len(nodes(found)) == 1


def test_engines_that_share_with_none_are_alone():
    s = scheduler([pair("p", 8, 8, share=False), single("s", 8), single("t", 8)], TWO_NODES[:3])
    found = started(s.start_next())
    alone = {d for e in found["p"] for d in e}
    assert len(alone) == 2
    assert found["s"] == found["t"]
    assert alone.isdisjoint(found["s"][0])


def test_devices_of_different_memory_are_told_apart():
    mixed = [Device("small", "a", 40.0), Device("large", "a", 80.0, 1)]
    assert started(scheduler([single("s", 60.0), single("t", 20.0)], mixed).start_next())["s"] == [["large"]]


def test_exact_fit_is_a_fit():
    s = scheduler(
        [single(n, gib) for n, gib in zip("xyz", (20.25, 35.5, 24.25), strict=True)] + [single("w", 1.0)], ONE
    )
    assert list(started(s.start_next())) == ["x", "y", "z"]
    s.done("x")
    assert list(started(s.start_next())) == ["w"]


# --- what can never run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (single("j", 81.0), "larger devices"),
        (single("j", 20.0, devices=3), "a node with more devices"),
        (pair("j", 60, 60, sizes=(2, 1), placement="together"), "use more devices"),
        (Job("j", tuple(EngineNeed(r, 1, 8.0) for r in "pqr"), 0, 1, "spread"), "use 3 nodes"),
        (single("j", 8.0, devices=3, share=False), "shared with no other"),
    ],
)
def test_impossible_jobs_have_a_reason(job, said):
    reasons = impossible([job, single("fine")], TWO_NODES)
    assert list(reasons) == ["j"] and "expected" in reasons["j"]
    assert "found 2 nodes with 2 × 80 GiB" in reasons["j"] and said in reasons["j"]


def test_without_devices_nothing_is_possible():
    s = planned([single("s")], [])
    assert "found none that may be used" in s.refused["s"] and s.over
    assert s.start_next() == []


def test_a_job_does_not_wait_for_a_refused_one():
    s = planned([single("big", 100.0), single("plain", after=("big",))], ONE)
    assert list(started(s.start_next())) == ["plain"]


# --- order ----------------------------------------------------------------------------------------------------------


def test_a_job_waits_for_the_end_of_what_comes_before_it():
    s = scheduler([single("x"), single("plain", after=("x",))], ONE)
    assert list(started(s.start_next())) == ["x"] and s.start_next() == []
    s.done("x")
    assert list(started(s.start_next())) == ["plain"]
    s.done("plain")
    assert s.over


def test_wide_job_is_not_starved_by_narrow_ones():
    """Eight narrow jobs of equal length keep one of two GPUs busy at all times unless the wide one's turn is kept."""
    narrow = [single(f"n{i}", 60, seconds=100 + 10 * i) for i in range(8)]
    jobs = [narrow[0], narrow[1], single("wide", 60, devices=2), *narrow[2:]]
    rule = PlacementRule("as given", tuple(j.id for j in jobs))
    kept = simulate(jobs, TWO_NODES[:2], lambda j, d, c: Scheduler(j, d, rule, c))
    greedy = simulate(jobs, TWO_NODES[:2], lambda j, d, c: Scheduler(j, d, rule._replace(reserve=False), c))
    begins = [{s.placement.job.id: s.start_s for s in found.slots}["wide"] for found in (kept, greedy)]
    assert begins[0] == 110 and begins[1] > 300


def test_short_job_fills_the_time_before_a_reservation():
    jobs = [
        single("long", 60, 300),
        single("wide", 60, 100, devices=2),
        single("late", 60, 400),
        single("short", 60, 90),
    ]
    found = simulate(
        jobs, TWO_NODES[:2], lambda j, d, c: Scheduler(j, d, PlacementRule("r", tuple(x.id for x in j)), c)
    )
    times = {s.placement.job.id: s.start_s for s in found.slots}
    assert times == {"long": 0, "short": 0, "wide": 300, "late": 400}


def test_longest_chain_goes_first():
    jobs = [single("a", 60, 100), single("b", 60, 100), single("c", 60, 100), single("plain", 60, 300, after=("c",))]
    found = simulate(jobs, TWO_NODES[:2])
    assert found.makespan_s == 400
    assert {s.placement.job.id: s.start_s for s in found.slots} == {"c": 0, "a": 0, "plain": 100, "b": 100}


def test_what_matters_most_is_started_first():
    jobs = [single("short", 60, 50), single("long", 60, 100), single("longer", 60, 150)]
    policy = partial(planned, first=["short"])
    times = {s.placement.job.id: s.start_s for s in simulate(jobs, ONE, policy).slots}
    assert min(times, key=lambda name: times[name]) == "short"
    assert simulate(jobs, ONE).makespan_s == simulate(jobs, ONE, policy).makespan_s == 300


def test_one_by_one_and_first_fit_are_what_they_say():
    jobs = [single(n, 20, 50) for n in "xyz"]
    assert simulate(jobs, ONE, one_by_one).makespan_s == 150
    assert simulate(jobs, ONE, first_fit).makespan_s == 50


def test_times_that_turn_out_otherwise():
    found = simulate([single(n, 60, 100) for n in "xyz"], ONE, seconds={"x": 30, "y": 400})
    assert found.makespan_s == 530
    assert sorted(s.placement.job.id for s in found.slots) == ["x", "y", "z"]


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_devices_are_taken_until_the_end_is_reported():
    s = scheduler([single("x", 60), single("y", 60)], ONE)
    s.start_next()
    assert s.running == ("x",) and s.start_next() == []


def test_lost_node_is_not_used_again():
    s = scheduler([single(n, 60) for n in "vwxyz"] + [pair("s", placement="spread")], TWO_NODES)
    first = s.start_next()
    assert len(first) == 4
    assert list(s.quarantine("a", "node a does not answer")) == ["s"]
    assert "node a does not answer" in s.refused["s"]
    for name in s.running:
        s.done(name)
    (last,) = s.start_next()
    assert nodes(last) == {"b"}


def test_a_job_that_lost_one_device_holds_the_others_until_its_end_is_reported():
    s = scheduler([single("wide", 60, devices=2), single("next", 60)], TWO_NODES[:2])
    s.start_next()
    assert s.quarantine("a0", "lost") == {} and s.start_next() == []
    s.done("wide")
    assert started(s.start_next()) == {"next": [["a1"]]}


def test_quarantined_device_keeps_its_jobs_and_gets_no_more():
    s = scheduler([single("x", 30), single("y", 30), single("z", 60), single("w", 60)], TWO_NODES[:2])
    s.start_next()
    assert s.quarantine("a0", "20.0 GiB were not given back") == {} and s.running == ("x", "y", "z")
    for name in s.running:
        s.done(name)
    assert started(s.start_next()) == {"w": [["a1"]]}


def test_losing_everything_leaves_reasons_and_no_waiting():
    s = scheduler([single("x"), single("y", 60)], ONE)
    s.start_next()
    assert list(s.quarantine("a0", "lost")) == ["y"]
    s.done("x")
    assert s.over and s.start_next() == []


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda s: s.done("y"), "job y"),
        (lambda s: s.done("nobody"), "expected the end of a running job (x)"),
        (lambda s: s.quarantine("nowhere", "lost"), "'nowhere'"),
    ],
)
def test_reports_that_make_no_sense(act, said):
    s = scheduler([single("x", 60), single("y", 60)], ONE)
    s.start_next()
    with pytest.raises(UsageError) as caught:
        act(s)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([single("x"), single("x")], "x more than once"),
        ([single("x", after=("nobody",))], "nobody"),
        ([single("x", after=("y",)), single("y", after=("x",))], "waiting for each other"),
        ([single("x", float("nan"))], "GiB of single"),
        ([single("x", 0.0)], "above 0"),
        ([single("x", seconds=-1.0)], "run_s"),
        ([single("x", devices=0)], "tensor parallel size"),
        ([single("x", placement="nearby")], "'nearby'"),
        ([Job("x", (), 0, 1)], "at least one engine"),
    ],
)
def test_jobs_that_make_no_sense(jobs, said):
    with pytest.raises(UsageError) as caught:
        planned(jobs, ONE)
    assert said in str(caught.value)


@pytest.mark.parametrize("devices", [[*ONE, *ONE], [Device("a0", "a", -1.0)], [Device("a0", "a", float("inf"))]])
def test_devices_that_make_no_sense(devices):
    with pytest.raises(UsageError):
        planned([single("x")], devices)


@pytest.mark.parametrize("rule", [PlacementRule("short", ()), PlacementRule("none at once", ("x",), at_once=0)])
def test_rules_that_make_no_sense(rule):
    with pytest.raises(UsageError, match=rule.name):
        Scheduler([single("x")], ONE, rule)


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_chains():
    jobs = [single("a", seconds=10), single("b", seconds=20, after=("a",)), single("c", seconds=5, after=("b", "a"))]
    assert tails(jobs) == {"a": 25, "b": 5, "c": 0} and heads(jobs) == {"a": 0, "b": 10, "c": 30}


@pytest.mark.parametrize(
    ("jobs", "devices", "expected"),
    [
        ([], ONE, 0),
        ([single("too big", 100)], ONE, 0),
        ([single(n, 41, 100) for n in "xyz"], ONE, 300),
        ([single(n, 20, 100) for n in "wxyz"], ONE, 100),
        # Two of 27 GiB or more fill a GPU with at most 26 GiB left: three at a time is what 81 GiB would take.
        ([single(n, 27, 100) for n in "uvwxyz"], ONE, 300),
        ([single(n, 60, 100, devices=2) for n in "xyz"], TWO_NODES[:2], 300),
        # One after the other on each node, although three GPUs in four would do for all.
        ([pair(n, 60, 60, placement="together") for n in "xyz"], TWO_NODES, 200),
        ([single(n, 60, 60) for n in "xyz"], TWO_NODES[:2], 120),
        ([single("x", 60, 100), single("y", 60, 100), single("plain", 20, 50, after=("x", "y"))], ONE, 250),
        # 630 s of four GPUs before the last 30 s, in which only the plain engines can run; jobs of 10 s cannot be cut.
        (
            [
                *(single(f"{m}{i}", 60, 10) for m in "xy" for i in range(30)),
                single("plain x", 60, 30, after=tuple(f"x{i}" for i in range(30))),
                single("plain y", 60, 60, after=tuple(f"y{i}" for i in range(30))),
            ],
            TWO_NODES,
            190,
        ),
        ([single(n, 60, 100) for n in "xy"], [Device("s", "a", 40.0), Device("l", "a", 80.0)], 200),
    ],
)
def test_bounds_that_can_be_told_by_hand(jobs, devices, expected):
    assert lower_bound(jobs, devices) == pytest.approx(expected, rel=1e-4)


def test_a_job_that_is_longer_than_the_time_between_cuts_counts_as_that_time():
    """Between two cuts, more than the time between them cannot pass; counting more gives a bound above the makespan."""
    jobs = [
        single("a", 72, 35),
        single("b", 20, 10),
        single("c", 45, 13, after=("b",)),
        single("d", 30, 8),
        single("e", 20, 42),
    ]
    assert lower_bound(jobs, TWO_NODES[:2], tries=0) == simulate(jobs, TWO_NODES[:2]).makespan_s == 42


@pytest.mark.parametrize(("gpus", "cells"), [(1, 80), (2, 80), (4, 8), (8, 24), (32, 80)])
def test_makespan_is_near_the_bound(gpus, cells):
    devices = inventory(gpus)
    jobs = mix(cells, devices, 0)
    assert impossible(jobs, devices) == {}
    bound = lower_bound(jobs, devices)
    assert bound <= simulate(jobs, devices).makespan_s <= 1.10 * bound


def test_mixes_have_the_cells_that_were_asked_for():
    jobs = mix(80, inventory(16), 0)
    assert jobs == mix(80, inventory(16), 0) and jobs != mix(80, inventory(16), 1)
    plain = [j for j in jobs if j.after]
    assert len(plain) == 3
    assert {a for j in plain for a in j.after} == {j.id for j in jobs} - {j.id for j in plain}
