"""Run a plan on real engines and record it. Judging happens elsewhere, later, from the record alone."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from harness import __version__, provenance
from harness.baseline import identity_of
from harness.config import Profile
from harness.engine.environment import EngineEnvironment
from harness.engine.topology import EngineGroupSession
from harness.errors import InfrastructureError
from harness.history import (
    SCHEMA,
    CellRecord,
    Form,
    History,
    HistoryWriter,
    RunRecord,
    load_history,
    write_parquet,
    write_run,
)
from harness.matrix import REQUEST_S, Cell, EngineGroup, Plan
from harness.progress import Reporter
from harness.prompts import Prompt, PromptSet


class Item(NamedTuple):
    """One request of a cell's workload."""

    prompt: Prompt
    form: Form


def workload(prompts: PromptSet, text_prompts: int) -> list[Item]:
    """What each cell is sent: every prompt as ids, and ``text_prompts`` of them as text, spread over the strata."""
    items = [Item(p, "ids") for p in prompts.prompts]
    by_stratum: dict[str, list[Prompt]] = {}
    for prompt in prompts.prompts:
        by_stratum.setdefault(prompt.stratum, []).append(prompt)
    queues = [list(q) for q in by_stratum.values()]
    chosen: list[Prompt] = []
    while len(chosen) < min(text_prompts, len(prompts.prompts)):
        for queue in queues:
            if queue and len(chosen) < text_prompts:
                chosen.append(queue.pop(len(queue) // 2))
    return [*items, *(Item(p, "text") for p in chosen)]


def new_run_id(profile: Profile) -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{profile.name}-{secrets.token_hex(2)}"


class Runner:
    """Executes a plan and keeps ``run.json`` current, so that an interrupted run is still a run."""

    def __init__(
        self,
        profile: Profile,
        source: str,
        plan: Plan,
        prompts: PromptSet,
        environment: EngineEnvironment,
        folder: Path,
        run_id: str,
        reporter: Reporter,
        base_port: int | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._profile = profile
        self._plan = plan
        self._items = workload(prompts, profile.workload.text_prompts)
        self._environment = environment
        self._folder = folder
        self._reporter = reporter
        self._base_port = base_port
        self._stop_seconds = 0.0
        commit, dirty = provenance.git_state()
        methods = {m.kind: m for m in (*(c.method for c in plan.cells), *profile.methods)}
        self._record = RunRecord(
            schema_version=SCHEMA,
            run_id=run_id,
            harness_version=__version__,
            started=provenance.now(),
            finished=None,
            command=tuple(command if command is not None else sys.argv),
            git_commit=commit,
            git_dirty=dirty,
            profile={**profile.model_dump(mode="json"), "source": source},
            prompts_sha256=prompts.sha256,
            hardware=provenance.hardware(),
            versions=provenance.versions(environment),
            identities={k: identity_of(profile, m, prompts.sha256).model_dump(mode="json") for k, m in methods.items()},
            cells=tuple(
                CellRecord(
                    cell=c.id,
                    group=next(g.id for g in plan.groups if c in g.cells),
                    block_size=profile.engine.block_size,
                    lookahead=c.method.lookahead,
                    draft_tokens=c.method.draft_tokens,
                    planned=len(self._items),
                )
                for c in plan.cells
            ),
        )

    def run(self) -> History:
        """Run all groups one after the other. A group that fails leaves its cells UNKNOWN and the rest goes on.

        KeyboardInterrupt ends the engines, keeps what was recorded and returns the history, marked as interrupted.
        """
        begun = time.monotonic()
        write_run(self._folder, self._record)
        try:
            with HistoryWriter(self._folder) as writer:
                for group in self._plan.groups:
                    self._run_group(group, writer)
        except KeyboardInterrupt:
            self._reporter.line("interrupted: engines are gone, recorded observations are kept")
            self._update(interrupted=True)
            for cell in self._record.cells:
                if cell.state == "pending":
                    self._set_cell(cell.cell, state="interrupted", reason="interrupted by the user")
        return self._finish(begun)

    def _finish(self, begun: float) -> History:
        total = time.monotonic() - begun
        start = sum(c.start_seconds for c in self._record.cells)
        requests = sum(c.request_seconds for c in self._record.cells)
        self._update(
            finished=provenance.now(),
            seconds={
                "total": round(total, 3),
                "engine_start": round(start, 3),
                "requests": round(requests, 3),
                "engine_stop": round(self._stop_seconds, 3),
                "own": round(total - start - requests - self._stop_seconds, 3),
            },
        )
        history = load_history(self._folder)
        if history.observations and not (self._folder / "observations.parquet").exists():
            write_parquet(self._folder, history.observations)
        return history

    def _run_group(self, group: EngineGroup, writer: HistoryWriter) -> None:
        begun = time.monotonic()
        try:
            with EngineGroupSession(
                group,
                self._profile,
                self._environment,
                self._folder / "logs",
                self._base_port,
                self._reporter.line,
            ) as session:
                self._update(engines=(*self._record.engines, *session.records()))
                self._set_cell(group.cells[0].id, start_seconds=round(session.ready_seconds, 3))
                self._reporter.step(group.id, self._plan.group_expected_s(group) - self._request_expectation(group))
                for cell in group.cells:
                    self._run_cell(session, cell, writer)
                stopping = time.monotonic()
            self._stop_seconds += time.monotonic() - stopping
        except InfrastructureError as error:
            self._reporter.line(f"{group.id}: UNKNOWN: {error}")
            for cell in group.cells:
                if self._cell(cell.id).state == "pending":
                    self._set_cell(cell.id, state="failed", reason=str(error))
            if self._cell(group.cells[0].id).start_seconds == 0.0:
                self._set_cell(group.cells[0].id, start_seconds=round(time.monotonic() - begun, 3))

    def _request_expectation(self, group: EngineGroup) -> float:
        return sum(REQUEST_S[c.topology] * self._plan.requests_per_cell for c in group.cells)

    def _run_cell(self, session: EngineGroupSession, cell: Cell, writer: HistoryWriter) -> None:
        begun = time.monotonic()
        errors = 0
        waited = 0.0
        for sequence, item in enumerate(self._items):
            observation = session.observe(cell, item.prompt, item.form, sequence)
            writer.append(observation)
            errors += observation.error is not None
            waited += sum(leg.seconds for leg in observation.legs)
            self._reporter.step(f"{cell.id} {sequence + 1}/{len(self._items)}", REQUEST_S[cell.topology])
        spent = time.monotonic() - begun
        self._set_cell(cell.id, state="complete", request_seconds=round(waited, 3), seconds=round(spent, 3))
        self._reporter.line(
            f"{cell.id}: {len(self._items)} requests in {spent:.1f} s" + (f", {errors} broke" if errors else "")
        )

    def _cell(self, cell_id: str) -> CellRecord:
        return next(c for c in self._record.cells if c.cell == cell_id)

    def _set_cell(self, cell_id: str, **changes: Any) -> None:
        self._update(cells=tuple(c.model_copy(update=changes) if c.cell == cell_id else c for c in self._record.cells))

    def _update(self, **changes: Any) -> None:
        self._record = self._record.model_copy(update=changes)
        write_run(self._folder, self._record)


def point_latest(folder: Path) -> None:
    """Let ``latest`` beside the run folder point to it, replaced in one step."""
    link = folder.parent / "latest"
    temporary = folder.parent / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.replace(link)
