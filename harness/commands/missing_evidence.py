"""What a recorded run lacks, and another try could supply."""

from __future__ import annotations

from harness.history.folder import History, load_history
from harness.history.layout import RUN, SECOND, rounds_below
from harness.history.plan import unanswered
from harness.history.records import RESCORE, Observation, RunRecord
from harness.util.signals import ended_by
from harness.workload.outputs import Outputs


def unfinished(run: RunRecord) -> str:
    """Return why a run did not finish, as a predicate ("was interrupted"); empty for one that did."""
    if run.interrupted:
        return "was interrupted" if run.ended_by is None else f"was {ended_by(run.ended_by)}"
    return "" if run.finished is not None else "did not finish: it was killed, or is still running"


def missing_evidence(history: History) -> list[str]:
    """Return what a recording and its later stages lack. Raises the errors of ``load_history``."""
    out = [f"the run {why}"] if (why := unfinished(history.run)) else []
    for record in history.run.cells:
        if record.state != "complete":
            out.append(f"{record.cell} is {record.state}: {record.reason or 'no reason was recorded'}")
            continue
        answers = [o for o in history.in_order(record.cell) if o.scenario != RESCORE]
        if any(o.error is not None for o in answers) or unanswered(history.run, record, answers):
            out.append(f"{record.cell}: requests failed or are missing")
    if history.run.rescore and (missing := not_rescored(history)):
        out.append(f"{len(missing)} outputs were not re-scored by the plain engine")
    for stage in (history.folder / SECOND, *rounds_below(history.folder)):
        if (stage / RUN).is_file():
            out += [f"{stage.relative_to(history.folder)}: {why}" for why in missing_evidence(load_history(stage))]
    return out


def not_rescored(history: History) -> list[tuple[str, str]]:
    """Return the plain cell that was to re-score each output that has no score, and the key of that request."""
    outputs = Outputs(history.run.normal)
    for o in history.observations:
        if o.scenario != RESCORE:
            outputs.add(o)
    # Only whether there are scores: the scores of a large run do not fit into memory.
    scores = {(o.cell, o.key): rescored(o) for o in history.of_scenario(RESCORE)}
    return [place for place in outputs.scored_by if not scores.get(place, False)]


def rescored(o: Observation) -> bool:
    """Return whether a request beside the plan was answered: a re-scoring one with scores."""
    return o.error is None and o.final is not None and (o.final.rescored is not None or not o.scores)
