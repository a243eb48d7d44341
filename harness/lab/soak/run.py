"""Run a soak: engines, load, samples, and the verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import redact
from harness.engines.environment import EngineEnvironment, engines_for, versions
from harness.engines.flags import NO_FLAGS, EngineFlags
from harness.engines.session import EngineGroupSession
from harness.errors import EXIT_REGRESSION, EXIT_UNKNOWN, HarnessError, StorageError, UsageError
from harness.history.folder import History
from harness.history.records import COLD, Observation
from harness.history.verdict import Verdict
from harness.judging.references import baselines_for
from harness.lab.soak.growth import judge_growth
from harness.lab.soak.load import Load
from harness.lab.soak.model import COUNTED, HARNESS, Round, Soak
from harness.lab.soak.report import write_soak
from harness.lab.soak.rounds import RoundJudge
from harness.lab.soak.sampler import Record, Sampler, Watcher
from harness.profiles.cells import EngineGroup, start_expected_s
from harness.profiles.known_defects import load_known
from harness.runner.record_cells import emptied_pools
from harness.runner.recorder import Recorder
from harness.runner.run import new_folder, prepared_recorder
from harness.util import machine
from harness.util.progress import Reporter
from harness.util.signals import SignalName, ended_by, ignored, raise_once, signal_of
from harness.util.storage import FolderLock
from harness.workload.at_once import Item
from harness.workload.cells import CellWork
from harness.workload.prepare import Prepared, prepare


class SoakOptions(NamedTuple):
    """The requested parameters of a soak."""

    minutes: float
    concurrency: int
    interval_s: float = 5.0


def prepare_soak(source: str, cell: str) -> Prepared:
    """Prepare one cell with its cold prompts, as token ids. Raises UsageError when ``cell`` does not match exactly one
    cell, or the profile cannot be judged at a concurrency above 1."""
    # Notes of the KV would grow without end.
    prepared = prepare(source, [cell], [COLD]).witnessing("off")
    if len(prepared.works) != 1 or not prepared.plan.groups:
        names = ", ".join(w.cell.id for w in prepared.works)
        raise UsageError(
            f"--cell {cell!r}: expected one cell that can run, found {names}; a soak runs exactly one cell"
        )
    if prepared.profile.judging.tier != "bitwise":
        raise UsageError(
            f"profile {source} is of the tier {prepared.profile.judging.tier}, and a soak needs the bitwise one: it "
            "compares every answer with the right tokens, which other tiers judge over many prompts at once"
        )
    work = prepared.works[0]
    items = tuple(Item(i.prompt, "ids") for i in work.items if i.form == "ids")
    return prepared._replace(works=(CellWork(work.cell, items, ()),))


class JudgedSoak(NamedTuple):
    """A judged soak."""

    result: Soak
    folder: Path
    unwritten: str = ""
    """Why its reports could not be written; empty when they were."""

    @property
    def exit_code(self) -> int:
        """The exit code of the verdict, but never 0 when the reports are missing."""
        code = self.result.verdict.exit_code
        return EXIT_UNKNOWN if self.unwritten and code != EXIT_REGRESSION else code


def soak(
    prepared: Prepared, wanted: SoakOptions, out: Path, engine_python: str | None, flags: EngineFlags = NO_FLAGS
) -> JudgedSoak:
    """Run the load, judge it and write the reports. Raises HarnessError only before anything was recorded."""
    environment = engines_for(prepared.profile, prepared.plan, engine_python, flags)
    folder = new_folder(out, prepared.profile, "soak")
    group, work = prepared.plan.groups[0], prepared.works[0]
    with FolderLock(folder), raise_once():
        reporter = Reporter(start_expected_s(group) + 60 * wanted.minutes)
        run = _Soak(prepared, wanted, folder, environment, reporter)
        try:
            with reporter:
                reporter.line(
                    f"{work.cell.id}: {len(work.items)} prompts, repeated for {wanted.minutes:g} minutes, "
                    f"{wanted.concurrency} concurrent requests; {folder}"
                )
                run.perform(group)
        except KeyboardInterrupt as error:
            run.interrupted(signal_of(error))
        with ignored():
            return run.end()


class _Soak:
    """One soak. Whatever fails, the result covers what was recorded until then."""

    def __init__(
        self, prepared: Prepared, wanted: SoakOptions, folder: Path, environment: EngineEnvironment, reporter: Reporter
    ) -> None:
        self._prepared = prepared
        self._wanted = wanted
        self._folder = folder
        self._environment = environment
        self._reporter = reporter
        self._work = prepared.works[0]
        self._cell = self._work.cell.id
        self._started = machine.now()
        self._doubts: list[str] = []
        self._recorder: Recorder = prepared_recorder(prepared, environment, folder, kind="soak")
        self._record = Record(folder)
        self._judge: RoundJudge | None = None

    def perform(self, group: EngineGroup) -> None:
        """Start the engines and run rounds until the time is up."""
        profile, logs = self._prepared.profile.part(group.variant), self._folder / "logs"
        session = EngineGroupSession(group, profile, self._environment, logs, progress=self._reporter.line)
        try:
            with session:
                self._recorder.engines(session.records())
                self._reporter.step(group.id, start_expected_s(group), start=True)
                self._play(session)
                emptied = emptied_pools(session, self._recorder)
            self._recorder.set_cell(self._cell, state="complete", emptied_s=emptied)
        except Exception as error:
            # An unexpected error must not lose what was recorded.
            unexpected = redact.text(f"the harness itself failed: {type(error).__name__}: {error}")
            reason = str(error) if isinstance(error, HarnessError) else unexpected
            self._doubts.append(reason)
            self._reporter.line(f"{self._cell}: UNKNOWN: {reason}")
            self._guarded("closing the record", lambda: self._recorder.fail_pending([self._cell], "failed", reason))
        finally:
            self._doubts += [f"could not be ended: {words}" for words in session.left]

    def interrupted(self, by: SignalName) -> None:
        self._doubts.append(ended_by(by))
        self._guarded("closing the record", lambda: self._recorder.interrupted(by))

    def _guarded(self, what: str, act: Callable[[], object]) -> None:
        """Run ``act``; a failure becomes a doubt, so that the result is written all the same."""
        try:
            act()
        except Exception as error:
            self._doubts.append(redact.text(f"{what} failed: {type(error).__name__}: {error}"))

    def _play(self, session: EngineGroupSession) -> None:
        # The session's records include routers.
        roots = {HARNESS: os.getpid(), **{str(e.role): e.pid for e in session.records()}}
        begun = time.monotonic()
        sampler = Sampler(Watcher(roots), self._record, begun, self._wanted.interval_s)
        prompts = [i.prompt for i in self._work.items]
        load = Load(session, self._work.cell, prompts, self._wanted.concurrency, self._recorder)
        number = 0
        try:
            with sampler:
                while number == 0 or time.monotonic() - begun < 60 * self._wanted.minutes:
                    number += 1
                    self._round(load, number, begun)
                    if sampler.trouble:
                        break
        finally:
            if sampler.trouble:
                self._doubts.append(sampler.trouble)
            load.keep()

    def _round(self, load: Load, number: int, begun: float) -> None:
        started = time.monotonic()
        observations = load.play(number)
        ended = time.monotonic()
        load.keep()
        done = _round_of(observations, number, ended - begun, ended - started, self._judged(observations))
        self._record.append(done)
        self._reporter.step(f"{self._cell} round {number}", ended - started)
        broke = f", {done.broken} broke" if done.broken else ""
        self._reporter.line(f"round {number}: {done.answered} answered in {done.seconds:.0f} s{broke}, {done.verdict}")

    def _judged(self, observations: Sequence[Observation]) -> Verdict:
        if self._judge is None:
            history = History(folder=self._folder, run=self._recorder.record, observations=(), own=True)
            known = load_known(self._prepared.profile.known_defects)
            self._judge = RoundJudge(self._folder, baselines_for(history), known)
        return self._judge.judge(self._recorder.record, observations)

    def end(self) -> JudgedSoak:
        """Judge and report what was recorded, then close the history: the answers of a long soak may not fit in memory,
        and the result does not need them."""
        self._guarded("closing the samples", self._record.close)
        ended = self._reported()
        before = len(self._doubts)
        self._guarded("closing the history", lambda: self._close(ended.result.verdict))
        return ended if len(self._doubts) == before else self._reported()

    def _close(self, verdict: Verdict) -> None:
        self._recorder.store_soak_verdict(verdict)
        self._recorder.finish()

    def _reported(self) -> JudgedSoak:
        """Build the result from what was recorded, and write the reports."""
        record, judge = self._record, self._judge
        together = judge.together(self._cell) if judge else []
        result = Soak(
            run_id=self._folder.name,
            started=self._started,
            profile=self._prepared.profile.name,
            cell=self._cell,
            versions=versions(self._environment),
            engine_flags=self._environment.flags.options,
            minutes=self._wanted.minutes,
            concurrency=self._wanted.concurrency,
            findings=(*together, *(judge.findings if judge else ())),
            found=len(together) + (judge.found if judge else 0),
            doubts=tuple(self._doubts),
            seconds=round(record.seconds, 1),
            rounds=record.verdicts.total(),
            verdicts=dict(record.verdicts),
            samples=len(record.times_s),
            growths=tuple(judge_growth(record.trees, record.times_s)) if record.times_s else (),
            **{name: record.sums[name] for name in COUNTED},
        )
        try:
            write_soak(result, record, self._folder)
        except StorageError as error:
            return JudgedSoak(result, self._folder, str(error))
        return JudgedSoak(result, self._folder)


def _round_of(observations: Sequence[Observation], number: int, at_s: float, seconds: float, verdict: Verdict) -> Round:
    finals = [o.final for o in observations if o.error is None]
    spec = [leg.speculation for leg in finals if leg is not None and leg.speculation is not None]
    shared = observations[0].shared_counters if observations else {}
    answering = shared.get("decode") or shared.get("single") or {}
    return Round(
        number=number,
        at_s=round(at_s, 3),
        seconds=round(seconds, 3),
        answered=sum(leg is not None and bool(leg.output_ids) for leg in finals),
        broken=sum(o.error is not None for o in observations),
        tokens=sum(len(leg.output_ids or ()) for leg in finals if leg is not None),
        drafts=sum(s.num_drafted for s in spec),
        accepted=sum(s.num_accepted for s in spec),
        moved_bytes=int(answering.get("nixl_bytes", 0)),
        preemptions=int(answering.get("preemptions", 0)),
        verdict=verdict,
    )
