"""Ask cells on running engines, record the answers, and mark cells that are incomplete."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from harness.engines.session import EngineGroupSession
from harness.errors import HandoffError, InfrastructureError
from harness.history.at_once import CrowdProof, in_words
from harness.history.engine_interfaces import RESET_PREFIX_CACHE
from harness.profiles.model import TopologyName
from harness.runner.kv_notes import notes_brought, notes_of_servers
from harness.runner.perform import perform
from harness.runner.recorder import Recorder
from harness.runner.rescore import scores
from harness.runner.rounding import chosen, largest_crowd, plain_work, rounding
from harness.runner.timeouts import limited, requests_limit_s
from harness.util.progress import Reporter
from harness.util.text import counted
from harness.workload.cells import CellWork


def record_cells(
    session: EngineGroupSession, works: Sequence[CellWork], recorder: Recorder, reporter: Reporter
) -> None:
    """Ask cells and record the answers; when the engines fail, mark the incomplete cells with the reason. Raises
    InfrastructureError when an engine died, or was ended because a cell took too long."""
    try:
        ask_cells(session, works, recorder, reporter)
    except InfrastructureError as error:
        recorder.fail_pending([w.cell.id for w in works], "failed", str(error))
        raise


def ask_cells(
    session: EngineGroupSession,
    works: Sequence[CellWork],
    recorder: Recorder,
    reporter: Reporter,
    outputs_come: Callable[[], None] = lambda: None,
) -> None:
    """Record the engines, ask each cell, and re-score the outputs where the run asks for it, once ``outputs_come``
    returns. Raises InfrastructureError as ``record_cells`` does, and leaves it to the caller to mark the cells."""
    attached = session.notes
    from_servers = notes_of_servers(attached, recorder.folder, session.group.id) if attached else nullcontext()
    with notes_brought(session.kv_folder, recorder.folder, session.group.id), from_servers:
        _ask_cells(session, works, recorder, reporter, outputs_come)


def _ask_cells(
    session: EngineGroupSession,
    works: Sequence[CellWork],
    recorder: Recorder,
    reporter: Reporter,
    outputs_come: Callable[[], None],
) -> None:
    recorder.engines(session.records())
    for work in works:
        run_cell(session, work, recorder, reporter)
    if recorder.record.rounding and session.group.rescores:
        show_rounding(session, works, recorder, reporter)
    if recorder.record.rescore and session.group.rescores:
        outputs_come()
        rescore(session, recorder, reporter)


def run_cell(session: EngineGroupSession, work: CellWork, recorder: Recorder, reporter: Reporter) -> None:
    """Send a cell's requests and record the answers. Raises EngineDiedError when an engine died; the engines of a cell
    that takes too long are ended."""
    if not work.requests:
        # In a resumed run the cell may be complete already; its engine only re-scores the outputs of the others.
        return
    limit_s = _limit_s(session, work.cell.topology, work.requests)
    late = (
        f"the requests of {work.cell.id} were not finished after {limit_s:.0f} s (timeouts.cell), so its engines "
        f"were ended; see logs/{session.group.id}.*.stacks.txt, or raise the limit"
    )
    begun = time.monotonic()
    try:
        with limited(limit_s, lambda: session.give_up("cell", late)):
            _send_all(session, work, recorder, reporter)
    except InfrastructureError:
        # Most of it was spent on waiting for engines that hang: it is not the harness's own time.
        spent = round(time.monotonic() - begun, 3)
        recorder.busy.took(spent)
        recorder.set_cell(work.cell.id, request_seconds=spent, seconds=spent)
        raise


def _limit_s(session: EngineGroupSession, topology: TopologyName, requests: int) -> float:
    return requests_limit_s(session.profile.timeouts, session.group, topology, requests, session.ready_seconds)


def _send_all(session: EngineGroupSession, work: CellWork, recorder: Recorder, reporter: Reporter) -> None:
    begun, restarting, restarts = time.monotonic(), session.restart_seconds, len(session.restarts)
    second_p = session.second_p_records()
    errors = done = 0
    waited = 0.0
    busy_until = 0.0

    def told(found: CrowdProof) -> None:
        reporter.line(f"{work.cell.id}: {in_words(found)}")

    for observation in perform(session, work, told):
        # An engine that is being ended truncates its answers.
        if session.ended:
            break
        recorder.append(observation)
        done += 1
        errors += observation.error is not None
        # Overlapping requests count once.
        waited += max(0.0, observation.ended_at - max(observation.started_at, busy_until))
        busy_until = max(busy_until, observation.ended_at)
        step = session.group.expected.request_s(work.cell.topology)
        reporter.step(f"{work.cell.id} {observation.scenario} {done}/{work.requests}", step)
    if not second_p:
        recorder.engines(session.second_p_records())
    # Check before the cell counts as complete: another server may have taken over the port of a dead engine.
    session.require_alive()
    restarting = session.restart_seconds - restarting
    for interval in session.restarts[restarts:]:
        recorder.busy.add(*interval)
    spent = time.monotonic() - begun - restarting
    recorder.set_cell(
        work.cell.id,
        state="complete",
        start_seconds=round(recorder.cell(work.cell.id).start_seconds + restarting, 3),
        request_seconds=round(min(waited, spent), 3),
        seconds=round(spent, 3),
        emptied_s=emptied_pools(session, recorder),
    )
    broke = f", {errors} broke" if errors else ""
    reporter.line(f"{work.cell.id}: {counted(done, 'request')} in {spent:.1f} s{broke}")


def emptied_pools(session: EngineGroupSession, recorder: Recorder) -> dict[str, float | None] | None:
    """Return after how many seconds the KV pool of each engine was empty, by role; empty if this vLLM cannot be asked,
    None if an engine did not answer."""
    if RESET_PREFIX_CACHE in recorder.record.lacking:
        return {}
    try:
        return session.emptied()
    except HandoffError:
        session.require_alive()
        return None


def show_rounding(
    session: EngineGroupSession, works: Sequence[CellWork], recorder: Recorder, reporter: Reporter
) -> None:
    """Let the plain engine show how it rounds, and record it. Raises EngineDiedError when the engine died."""
    plain = plain_work(works)
    if plain is None:
        return
    begun = time.monotonic()
    prompts, answered = chosen(plain), {i.prompt.id for i in plain.items if i.form == "ids"}
    crowd = largest_crowd(plain, prompts)
    limit_s = _limit_s(session, "single", 3 * len(prompts) + len(crowd))
    late = f"expected the rounding of {session.group.id} to be measured within {limit_s:.0f} s (timeouts.cell)"
    with limited(limit_s, lambda: session.give_up("rounding", late)):
        for observation in rounding(prompts, session, recorder.record.rescore, answered, crowd):
            recorder.append(observation)
    # As after re-scoring: not to be charged to what is sent next.
    session.settle()
    reporter.line(f"rounding measured with {counted(len(prompts), 'prompt')} in {time.monotonic() - begun:.1f} s")


def rescore(session: EngineGroupSession, recorder: Recorder, reporter: Reporter) -> None:
    """Re-score the recorded outputs with the plain engine. Raises EngineDiedError when the engine died, or was ended
    because it exceeded the time limit. Scores recorded before that are kept."""
    begun = time.monotonic()
    count = recorder.outputs.count(session.group.variant)
    limit_s = _limit_s(session, "single", count)
    late = (
        f"{count} outputs were not re-scored after {limit_s:.0f} s (timeouts.cell), so the engine was ended; see "
        f"logs/{session.group.id}.*.stacks.txt, or raise the limit"
    )
    with limited(limit_s, lambda: session.give_up("re-scoring", late)):
        for observation in scores(recorder.outputs, session):
            recorder.append(observation)
    # Uncounted until now, and not to be charged to what is sent to these engines next.
    session.settle()
    reporter.line(f"{count} distinct outputs re-scored in {time.monotonic() - begun:.1f} s")
