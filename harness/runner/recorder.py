"""Write a run folder: observations as they arrive, and an up-to-date ``run.json``, so that an interrupted run remains
readable."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from harness import redact
from harness.engines.environment import EngineEnvironment, versions
from harness.errors import StorageError
from harness.history.engine_interfaces import WITHOUT
from harness.history.folder import History, HistoryWriter, load_history, read_so_far, write_run
from harness.history.identity import identity_of
from harness.history.migrations import SCHEMA
from harness.history.parquet import write_parquet
from harness.history.plan import plan_key
from harness.history.records import RESCORE, CellRecord, EngineRecord, Kind, Observation, RunRecord
from harness.history.verdict import Verdict
from harness.profiles.availability import reason_for
from harness.profiles.cells import CellName
from harness.profiles.kv_layout import kv_numbers, modules_in, recurrent, target_config, windows_in
from harness.profiles.model import Profile
from harness.prompts.model import PromptSet
from harness.scheduling import hardware
from harness.scheduling.gpus import gpus
from harness.util import clock, machine
from harness.util.intervals import Intervals
from harness.util.signals import SignalName, ended_by
from harness.version import __version__
from harness.workload.cells import CellWork
from harness.workload.outputs import Outputs
from harness.workload.rows import planned_rows


def new_run_id(profile: Profile, kind: str = "") -> str:
    """Return a run id that sorts by time; ``kind`` tells other runs, such as self-tests, from plain ones."""
    what = f"{profile.name}-{kind}" if kind else profile.name
    return f"{clock.utc():%Y%m%d-%H%M%S}-{what}-{secrets.token_hex(2)}"


def _identities(
    profile: Profile, works: Sequence[CellWork], prompts: Mapping[str, PromptSet], environment: EngineEnvironment
) -> dict[str, dict[str, Any]]:
    """Return identities by lineup, for every method of the variants that the works belong to."""
    found = tuple(gpus())
    out = {}
    for variant in dict.fromkeys(w.cell.variant for w in works):
        part = profile.part(variant)
        used = [w.cell.method for w in works if w.cell.variant == variant]
        for method in {m.kind: m for m in (*used, *part.methods)}.values():
            lineup = CellName("single", method.kind, variant=variant).lineup
            if variant not in prompts or reason_for(part, method.kind) is not None:
                # The model is missing, so its cells are UNKNOWN and there is nothing to hash.
                continue
            identity = identity_of(part, method, prompts[variant].sha256, environment.vllm, found)
            out[lineup] = identity.model_dump(mode="json")
    return out


def _described(profile: Profile, source: str) -> dict[str, Any]:
    """Return the profile as used, with its free-text description redacted."""
    raw = profile.model_dump(mode="json")
    return {**raw, "description": redact.text(raw["description"]), "source": source}


def cleaned(observation: Observation) -> Observation:
    """Return the observation with secrets redacted from free text of engines and errors; tokens, ids and numbers are
    unchanged."""
    legs = tuple(
        leg.model_copy(update={"kv_transfer_params": redact.data(leg.kv_transfer_params)})
        if leg.kv_transfer_params is not None
        else leg
        for leg in observation.legs
    )
    return observation.model_copy(update={"legs": legs, "error": redact.optional(observation.error)})


class Recorder:
    """The record of a run in progress, shared by engine groups that run concurrently."""

    def __init__(
        self,
        profile: Profile,
        source: str,
        works: Sequence[CellWork],
        group_of: Mapping[str, str],
        prompts: Mapping[str, PromptSet],
        environment: EngineEnvironment,
        folder: Path,
        run_id: str,
        mutants: Sequence[str] = (),
        rescore: bool = False,
        rounding: bool = False,
        adopt: Callable[[RunRecord], RunRecord] = lambda fresh: fresh,
        kind: Kind = "run",
    ) -> None:
        """Create the record; ``adopt`` may replace it by the record of an interrupted run that is being resumed."""
        self.works = {w.cell.id: w for w in works}
        self.outputs = Outputs(profile.judging.tier != "bitwise")
        self._lock = threading.RLock()
        self.folder = folder
        self._begun = clock.now()
        self.busy = Intervals()
        """When engines were starting, answering or ending: the rest is the harness's own time."""
        self._stop_seconds = 0.0
        self._scoring_seconds = 0.0
        commit, dirty = machine.git_state()
        rows = {w.cell.id: planned_rows(w, profile.part(w.cell.variant).workload.max_tokens) for w in works}
        keys = {cell: plan_key(of) for cell, of in rows.items()}
        targets = {v: target_config(profile.part(v)) for v in {w.cell.variant for w in works}}
        flags = [flag.text for flag in environment.flags.arguments]
        self.record = RunRecord(
            schema_version=SCHEMA,
            run_id=run_id,
            harness_version=__version__,
            started=machine.now(),
            finished=None,
            command=redact.words(sys.argv),
            git_commit=commit,
            git_dirty=dirty,
            profile=_described(profile, source),
            prompts_sha256=next(iter(prompts.values())).sha256,
            hardware=hardware.hardware(),
            versions=versions(environment),
            identities=_identities(profile, works, prompts, environment),
            cells=tuple(
                CellRecord(
                    cell=w.cell.id,
                    group=group_of[w.cell.id],
                    block_size=profile.part(w.cell.variant).engine.block_size,
                    lookahead=w.cell.method.lookahead,
                    draft_tokens=w.cell.method.draft_tokens,
                    windows=windows_in(
                        targets[w.cell.variant],
                        w.cell.method,
                        [*profile.part(w.cell.variant).engine.extra_args, *flags],
                    ),
                    recurrent=recurrent(targets[w.cell.variant]),
                    modules=modules_in(profile.part(w.cell.variant), w.cell.method),
                    kv_numbers=kv_numbers(profile.part(w.cell.variant), w.cell.method),
                    texts=True,
                    route=w.cell.route,
                    planned=len(w.items),
                    scenarios=w.planned,
                    plan=keys[w.cell.id],
                )
                for w in works
            ),
            plans={keys[cell]: of for cell, of in rows.items()},
            mutants=tuple(mutants),
            engine_flags=environment.flags.options,
            rescore=rescore,
            rounding=rounding,
            lacking={name: WITHOUT[name] for name in WITHOUT if not environment.has(name)},
            kind=kind,
        )
        self.record = adopt(self.record)
        self._earlier_s, self._earlier_own_s = (self.record.seconds.get(key, 0.0) for key in ("total", "own"))
        self._writer = HistoryWriter(folder)
        self._sha256 = write_run(folder, self.record)

    def append(self, observation: Observation) -> None:
        observation = cleaned(observation)
        self.busy.add(observation.started_at, observation.ended_at)
        with self._lock:
            self._writer.append(observation)
            self.outputs.add(observation)
            if observation.scenario == RESCORE:
                self._scoring_seconds += sum(leg.seconds for leg in observation.legs)

    def engines(self, records: Iterable[EngineRecord]) -> None:
        with self._lock:
            self._update(engines=(*self.record.engines, *records))

    def stopped(self, seconds: float) -> None:
        """Add time that engines took to end."""
        self.busy.took(seconds)
        with self._lock:
            self._stop_seconds += seconds

    def cell(self, cell_id: str) -> CellRecord:
        return next(c for c in self.record.cells if c.cell == cell_id)

    def set_cell(self, cell_id: str, **changes: Any) -> None:
        if isinstance(changes.get("reason"), str):
            changes["reason"] = redact.text(changes["reason"])
        with self._lock:
            cells = tuple(c.model_copy(update=changes) if c.cell == cell_id else c for c in self.record.cells)
            self._update(cells=cells)

    def fail_pending(self, cells: Iterable[str], state: str, reason: str) -> None:
        """Mark the cells that are not complete."""
        with self._lock:
            for cell_id in cells:
                if self.cell(cell_id).state == "pending":
                    self.set_cell(cell_id, state=state, reason=reason)

    def so_far(self, cells: Collection[str]) -> History:
        """Return these cells as a run of their own, while others are still being recorded. Raises OSError or DataError
        when they cannot be read."""
        with self._lock:
            run = self.record.model_copy(update={"cells": tuple(c for c in self.record.cells if c.cell in cells)})
        return read_so_far(self.folder, run)

    def still(self) -> AbstractContextManager[object]:
        """Keep other threads from recording, so that what is there can be read while engines still answer."""
        return self._lock

    def interrupted(self, by: SignalName) -> None:
        self._update(interrupted=True, ended_by=by)
        self.fail_pending([c.cell for c in self.record.cells], "interrupted", ended_by(by))

    def store_soak_verdict(self, verdict: Verdict) -> None:
        """Store the verdict of a whole soak; call before ``finish``."""
        with self._lock:
            self._update(came_to=verdict)

    def finish(self) -> History:
        """Close the files, seal them, and load what was recorded."""
        self._writer.close()
        history = load_history(self.folder)
        notices = list(history.notices)
        if history.observations:
            try:
                write_parquet(self.folder, history.observations)
            except StorageError as error:
                # The Parquet file is only a copy; the run is complete without it.
                notices.append(str(error))
        now = clock.now()
        start = sum(c.start_seconds for c in self.record.cells)
        requests = sum(c.request_seconds for c in self.record.cells) + self._scoring_seconds
        self._update(
            finished=machine.now(),
            seconds={
                "total": round(self._earlier_s + now - self._begun, 3),
                # Those of groups side by side are added up, and may come to more than the total.
                "engine_start": round(start, 3),
                "requests": round(requests, 3),
                "engine_stop": round(self._stop_seconds, 3),
                "own": round(self._earlier_own_s + self.busy.outside(self._begun, now), 3),
            },
        )
        return history.model_copy(
            update={"run": self.record, "sha256": self._sha256, "notices": tuple(notices), "own": True}
        )

    def _update(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update=changes)
        self._sha256 = write_run(self.folder, self.record)
