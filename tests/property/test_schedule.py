"""Whatever the jobs and devices: memory is never exceeded, each possible job runs once, in order, on what is left."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduling.bounds import lower_bound
from benchmarks.scheduling.first_fit import first_fit
from harness.scheduling.model import Device, EngineNeed, Job, tails, without
from harness.scheduling.packing import impossible
from harness.scheduling.planning import least_s, one_by_one, planned, simulate
from harness.scheduling.scheduler import PlacementRule, Scheduler

POLICIES = [planned, first_fit, one_by_one]
few = settings(max_examples=60)


@st.composite
def inventories(draw):
    nodes = draw(st.lists(st.lists(st.sampled_from([24.0, 40.0, 80.0]), min_size=1, max_size=4), max_size=3))
    return [Device(f"n{n}g{i}", f"n{n}", m, i) for n, sizes in enumerate(nodes) for i, m in enumerate(sizes)]


@st.composite
def matrices(draw):
    jobs: list[Job] = []
    for number in range(draw(st.integers(0, 9))):
        engines = draw(
            st.lists(
                st.builds(
                    EngineNeed, st.just("e"), st.sampled_from([1, 1, 2, 4]), st.sampled_from([8, 16.5, 26.7, 40, 72])
                ),
                min_size=1,
                max_size=3,
            )
        )
        after = draw(st.lists(st.sampled_from([j.id for j in jobs]), unique=True, max_size=3)) if jobs else []
        jobs.append(
            Job(
                f"j{number}",
                tuple(engines),
                float(draw(st.integers(0, 180))),
                float(draw(st.integers(0, 900))),
                draw(st.sampled_from(["together", "spread", "any"])),
                tuple(after),
                draw(st.booleans()),
                draw(st.sampled_from(["together", "apart", "any", "any"])),
            )
        )
    return draw(st.permutations(jobs))


def overlap(one, other):
    return one.start_s < other.end_s and other.start_s < one.end_s


def holds(slot):
    """(device id, GiB) of each engine of a slot."""
    return [
        (d.id, need.gib)
        for need, e in zip(slot.placement.job.engines, slot.placement.engines, strict=True)
        for d in e.devices
    ]


@few
@given(matrices(), inventories(), st.sampled_from(POLICIES))
def test_memory_is_never_exceeded_and_devices_are_shared_only_where_allowed(jobs, devices, policy):
    found = simulate(jobs, devices, policy)
    memory = {d.id: d.memory_gib for d in devices}
    for moment in {s.start_s for s in found.slots}:
        there = [s for s in found.slots if s.start_s <= moment < s.end_s]
        used = Counter()
        engines = Counter()
        for slot in there:
            for device, gib in holds(slot):
                used[device] += gib
                engines[device] += 1
        assert all(gib <= memory[d] + 1e-6 for d, gib in used.items())
        assert all(engines[d] == 1 for s in there if not s.placement.job.share for d, _ in holds(s))


@few
@given(matrices(), inventories(), st.sampled_from(POLICIES))
def test_every_possible_job_runs_exactly_once_where_it_may(jobs, devices, policy):
    found = simulate(jobs, devices, policy)
    refused = impossible(jobs, devices)
    assert found.refused == refused
    assert sorted(s.placement.job.id for s in found.slots) == sorted(j.id for j in jobs if j.id not in refused)
    for slot in found.slots:
        job, places = slot.placement.job, slot.placement.engines
        for need, place in zip(job.engines, places, strict=True):
            assert len({d.id for d in place.devices}) == need.devices
            assert len({d.node for d in place.devices}) == 1
        nodes = [p.devices[0].node for p in places]
        assert job.placement != "together" or len(set(nodes)) == 1
        assert job.placement != "spread" or len(set(nodes)) == len(nodes)
        sets = [{d.id for d in p.devices} for p in places]
        assert job.overlap != "apart" or len(set().union(*sets)) == sum(map(len, sets))
        assert job.overlap != "together" or len(set().union(*sets)) == max(map(len, sets))


@few
@given(matrices(), inventories(), st.sampled_from(POLICIES))
def test_dependencies_are_over_before_a_job_starts(jobs, devices, policy):
    slots = {s.placement.job.id: s for s in simulate(jobs, devices, policy).slots}
    for slot in slots.values():
        assert all(slots[a].end_s <= slot.start_s for a in slot.placement.job.after if a in slots)


@few
@given(matrices(), inventories())
def test_bound_holds_for_every_policy_and_the_plan_is_no_worse_than_one_by_one(jobs, devices):
    bound = lower_bound(jobs, devices)
    times = [simulate(jobs, devices, p).makespan_s for p in POLICIES]
    assert all(bound <= t * (1 + 1e-9) for t in times)
    assert times[0] <= times[2]
    left = [j for j in jobs if j.id not in impossible(jobs, devices)]
    assert bound >= max((j.seconds for j in left), default=0.0)
    # What ends the search for a rule, and rules out a step of CI without a simulation.
    assert least_s(without(jobs, impossible(jobs, devices)), devices) <= min(times) * (1 + 1e-9)


@few
@given(matrices(), inventories())
def test_the_same_request_gives_the_same_schedule(jobs, devices):
    first = simulate(jobs, devices)
    assert first == simulate(jobs, devices)
    # The order in which devices are listed does not matter either.
    assert first.slots == simulate(jobs, devices[::-1]).slots


@st.composite
def one_shape(draw):
    sizes = draw(st.lists(st.sampled_from([24.0, 40.0, 80.0]), min_size=1, max_size=5))
    nodes = draw(st.lists(st.sampled_from("ab"), min_size=len(sizes), max_size=len(sizes)))
    devices = [Device(f"{n}{i}", n, m, i) for i, (n, m) in enumerate(zip(nodes, sizes, strict=True))]
    engines = draw(
        st.lists(
            st.builds(EngineNeed, st.just("e"), st.integers(1, 2), st.sampled_from([8.0, 20.0, 30.0, 60.0])),
            min_size=1,
            max_size=3,
        )
    )
    placement = draw(st.sampled_from(["together", "spread", "any"]))
    overlap = draw(st.sampled_from(["together", "apart", "any"]))
    return Job("j", tuple(engines), 1.0, 1.0, placement, (), draw(st.booleans()), overlap), devices


def fits_by_trying_everything(job, devices):
    """Each engine on each set of devices: no cleverness."""
    choices = [[c for c in combinations(devices, e.devices) if len({d.node for d in c}) == 1] for e in job.engines]
    for chosen in product(*choices):
        nodes = [c[0].node for c in chosen]
        if job.placement == "together" and len(set(nodes)) > 1:
            continue
        if job.placement == "spread" and len(set(nodes)) < len(nodes):
            continue
        held, widest = len(set().union(*chosen)), max(map(len, chosen))
        if held != {"apart": sum(map(len, chosen)), "together": widest, "any": held}[job.overlap]:
            continue
        used = Counter()
        engines = Counter()
        for need, devices_of in zip(job.engines, chosen, strict=True):
            for device in devices_of:
                used[device] += need.gib
                engines[device] += 1
        if all(gib <= d.memory_gib for d, gib in used.items()) and (job.share or max(engines.values()) == 1):
            return True
    return False


@settings(max_examples=300)
@given(one_shape())
def test_refused_is_exactly_what_fits_in_no_way(case):
    job, devices = case
    assert (job.id in impossible([job], devices)) == (not fits_by_trying_everything(job, devices))


@few
@given(matrices(), inventories(), st.data())
def test_whatever_is_lost_nothing_starts_there_again_and_every_job_comes_to_an_end(jobs, devices, data):
    order = tuple(j.id for j in jobs)
    now = 0.0
    s = Scheduler(jobs, devices, PlacementRule("as given", order), lambda: now)
    ran: list[str] = []
    lost: set[str] = set()
    while not s.over:
        for placement in s.start_next():
            assert placement.devices.isdisjoint(lost)
            ran.append(placement.job.id)
        assert s.running, "jobs wait and nothing runs"
        act = data.draw(st.sampled_from(["done", "done", "device", "node"]))
        if act == "done":
            s.done(data.draw(st.sampled_from(s.running)))
        else:
            device = data.draw(st.sampled_from(devices))
            before = s.running
            s.quarantine(device.node if act == "node" else device.id, "lost")
            lost |= {d.id for d in devices if d.id == device.id or (act == "node" and d.node == device.node)}
            assert s.running == before
        now += 10.0
    assert len(ran) == len(set(ran))
    assert sorted([*ran, *s.refused]) == sorted(order)


@few
@given(matrices(), inventories(), st.data())
def test_durations_that_were_guessed_wrong_change_times_only(jobs, devices, data):
    seconds = {j.id: data.draw(st.floats(0, 3000)) for j in jobs}
    found = simulate(jobs, devices, planned, seconds)
    assert len(found.slots) + len(found.refused) == len(jobs)
    assert all(s.end_s == s.start_s + seconds[s.placement.job.id] for s in found.slots)


@given(matrices())
def test_tails_are_the_longest_chains(jobs):
    after = tails(jobs)
    for job in jobs:
        behind = [j for j in jobs if job.id in j.after]
        assert after[job.id] == max((j.seconds + after[j.id] for j in behind), default=0.0)
