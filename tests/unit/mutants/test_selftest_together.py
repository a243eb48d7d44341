"""Self-tests on GPUs: setups beside each other, and the largest in parts."""

from __future__ import annotations

import contextlib
import threading
from typing import ClassVar

from harness.engines.inventory import Inventory
from harness.errors import HandoffError
from harness.lab.selftest import run as selftest_run
from harness.lab.selftest.run import SelfTester
from harness.lab.selftest.setups import make_setups, parted, select_trials, trial_works
from harness.lab.selftest.together import best_parts
from harness.reports.selftest_result import Kill
from harness.runner.jobs import RunningSessions, run_jobs
from harness.scheduling.model import Device
from harness.scheduling.planning import planned
from harness.util.progress import Reporter
from harness.workload.prepare import narrowed, prepare
from tests.support.engines import ENVIRONMENT

EVERYTHING = prepare("gpu", ())
PREPARED = narrowed(EVERYTHING, EVERYTHING.parts[0].variant)
SETUPS = make_setups(select_trials([], quick=False), PREPARED.profile, PREPARED.prompts)


def gpu(gib: float) -> Inventory:
    return Inventory((Device("gpu-0", "node", gib),), {}, shared=True)


def test_the_largest_setup_is_divided_where_there_is_room():
    alone, roomy = (best_parts(SETUPS, PREPARED.prompts, gpu(gib)) for gib in (8.0, 141.0))
    assert len(alone.setups) == len(SETUPS) < len(roomy.setups) and roomy.seconds < alone.seconds / 2
    assert len({setup.id for setup in roomy.setups}) == len(roomy.setups)
    tried = [trial.mutant for setup in roomy.setups for trial in setup.trials]
    assert sorted(tried) == sorted(trial.mutant for setup in SETUPS for trial in setup.trials)
    for setup in roomy.setups:
        sent = {i for work in setup.control for i in work.items}
        for trial in setup.trials:
            works = trial_works(trial, setup.profile, PREPARED.prompts, setup.group.cells)
            assert {i for work in works for i in work.items} <= sent


def test_parts_take_about_as_long_and_one_has_what_needs_the_plain_engine():
    (largest,) = (s for s in SETUPS if s.plain is not None)
    parts = parted(largest, 4, PREPARED.prompts)
    assert [p.plain is not None for p in parts] == [True, False, False, False]
    assert {"N38", "N39"} <= {t.mutant for t in parts[0].trials}
    assert not any(
        p.plain_works(trial_works(t, p.profile, PREPARED.prompts, p.group.cells)) for p in parts[1:] for t in p.trials
    )
    seconds = [
        sum(w.requests for t in p.trials for w in trial_works(t, p.profile, PREPARED.prompts, p.group.cells))
        for p in parts
    ]
    assert max(seconds) < 1.2 * min(seconds)
    # M9 leaves blocks on P, so that nothing can be tried behind it.
    assert [p.trials[-1].mutant for p in parts if "M9" in {t.mutant for t in p.trials}] == ["M9"]


def test_all_faults_take_four_minutes_on_a_gpu_that_holds_sixteen_engines():
    setups = make_setups(select_trials([], quick=False, complete=True), PREPARED.profile, PREPARED.prompts)
    assert best_parts(setups, PREPARED.prompts, gpu(80.0)).seconds <= 240


def test_there_is_room_for_the_plain_engine_that_a_pair_needs():
    jobs = {job.id: job for job in best_parts(SETUPS, PREPARED.prompts, gpu(141.0)).jobs}
    assert [e.role for e in jobs["pd-eagle3-1"].engines] == ["decode", "prefill", "single"]
    assert [e.role for e in jobs["pd-none"].engines] == ["decode", "prefill"]
    jobs = {job.id: job for job in best_parts(SETUPS, PREPARED.prompts, gpu(8.0)).jobs}
    assert [e.role for e in jobs["pd-eagle3"].engines] == ["decode", "prefill"]


def test_setups_run_beside_each_other():
    together = best_parts(SETUPS, PREPARED.prompts, gpu(141.0))
    two, ran = threading.Barrier(2, timeout=10), []

    def run(placement):
        ran.append(placement.job.id)
        if len(ran) <= 2:
            two.wait()

    scheduler = planned(together.jobs, gpu(141.0).devices)
    run_jobs(scheduler, gpu(141.0), run, RunningSessions(print), print)
    assert not scheduler.refused and sorted(ran) == sorted(setup.id for setup in together.setups)


class Executor:
    """Gives out places that nothing is started on."""

    def inventory(self, _profile):
        return gpu(141.0)

    def places(self, group, _profile, _environment, placement):
        return contextlib.nullcontext({engine.role: engine.role for engine in placement.engines})


class Session:
    """Engines that answer nothing until they are ended."""

    up = threading.Semaphore(0)
    places: ClassVar[list[dict[str, str]]] = []

    def __init__(self, _group, _profile, _environment, _logs, progress, mutation=None, places=None):
        self.gone = threading.Event()
        self.ready_seconds = 1.0
        self.places.append(places)

    def __enter__(self):
        self.up.release()
        return self

    def __exit__(self, *_):
        pass

    def switch(self, *_):
        pass

    def end_engines(self):
        self.gone.set()


def test_interruption_ends_the_engines_of_all_and_records_no_outcome(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest_run, "EngineGroupSession", Session)

    def waits(_self, _setup, session, *_):
        assert session.gone.wait(20)
        raise HandoffError("ended")

    monkeypatch.setattr(SelfTester, "_control", waits)
    tester = SelfTester(PREPARED, ENVIRONMENT, tmp_path, Reporter(1.0))

    def interrupted(*_args, **_kwargs):
        for _ in range(2):
            assert Session.up.acquire(timeout=20)
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.runner.jobs.wait", interrupted)
    result = tester.run(SETUPS, Executor())
    assert result.interrupted and not result.outcomes and not result.controls
    assert {"prefill": "prefill", "decode": "decode"} in Session.places


def test_setups_that_fit_nowhere_have_no_outcome(tmp_path, monkeypatch):
    monkeypatch.setattr(Executor, "inventory", lambda *_: gpu(1.0))
    few = make_setups(select_trials([], quick=True), PREPARED.profile, PREPARED.prompts)
    result = SelfTester(PREPARED, ENVIRONMENT, tmp_path, Reporter(1.0)).run(few, Executor())
    assert len(few) >= 2 and len(result.asked) >= 4
    assert {o.kill for o in result.outcomes} == {Kill.UNTESTED} and len(result.outcomes) == len(result.asked)
    assert result.exit_code == 2
