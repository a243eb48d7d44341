"""Fake engines that answer cold prompts as the committed baselines of the cpu profile say, for tests of what becomes of
a recorded run. They prove nothing about engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from harness.baselines.model import BaselineRow
from harness.baselines.store import load_baseline
from harness.history.records import Observation, Speculation
from harness.history.token_ids import output_key
from harness.runner.recorder import Recorder
from harness.util.paths import REPOSITORY
from harness.workload.at_once import Item
from harness.workload.cells import CellWork
from tests.support.builders import change_final, counted, engine, leg, rescoring
from tests.support.fake_notes import note


@cache
def _rows(method: str) -> dict:
    return load_baseline(REPOSITORY / "baselines" / "cpu" / f"{method}.json").by_prompt()


def _logprobs(row: BaselineRow) -> tuple[float, ...]:
    """Log-probs as recorded, but for what rounding made of them: two tokens cannot be more probable than all."""
    return tuple(min(nats, -math.log1p(math.exp(-gap))) for nats, gap in zip(row.logprobs, row.gaps, strict=True))


def answer(work: CellWork, item: Item, sequence: int) -> Observation:
    """What the single engine of the cell's method said when the baseline was recorded."""
    assert work.cell.topology == "single"
    row = _rows(work.cell.method.kind)[item.prompt.id]
    k = work.cell.method.draft_tokens
    metrics = None
    gaps = row.gaps or (row.min_top_gap,) * len(row.output_ids)
    if k:
        metrics = Speculation(
            per_step_accepted=row.accepted,
            per_step_drafted=(k,) * len(row.accepted),
            num_steps=len(row.accepted),
            num_drafted=k * len(row.accepted),
            num_accepted=sum(row.accepted),
        )
    made = Observation(
        cell=work.cell.id,
        prompt_id=item.prompt.id,
        form=item.form,
        sequence=sequence,
        sent_ids=item.prompt.ids,
        source=item.prompt.source,
        known_answer=item.prompt.expected,
        max_tokens=192,
        engine_roles=("single",),
        legs=(
            leg(
                "single",
                item.prompt.ids,
                row.output_ids,
                speculation=metrics,
                top_gaps=gaps,
                chosen_logprobs=_logprobs(row),
            ),
        ),
        started_at=0.0,
    )
    return counted(made)


def perform(recorder: Recorder, work: CellWork, change: Callable[[Observation], Observation] = lambda o: o) -> None:
    """Record a cell to its end."""
    if not any(e.group == work.cell.id for e in recorder.record.engines):
        recorder.engines([engine(work.cell.id, "single")])
    for number, item in enumerate(work.items):
        made = change(answer(work, item, number))
        recorder.append(made)
        note(recorder.folder, made, speculative=bool(work.cell.method.draft_tokens))
    recorder.set_cell(work.cell.id, state="complete", emptied_s={"single": 0.0})


def score(recorder: Recorder) -> None:
    """Record that the plain engine would have said every output."""
    for number, ((prompt, key), (sent, output)) in enumerate(recorder.outputs._known.get("", {}).items()):
        assert output_key(output) == key
        row = _rows("none").get(prompt)
        said = {"rescored_logprobs": _logprobs(row)} if row is not None and row.output_ids == output else {}
        recorder.append(change_final(rescoring(prompt, sent, output, sequence=number), **said))
