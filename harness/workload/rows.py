"""The plan of a cell as rows: every request, in the order of sending, as it must be found in the record."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from harness.history.plan import prompt_sha256
from harness.history.records import LegRole, PlannedRequest, SentTo
from harness.profiles.cells import Cell
from harness.prompts.model import Prompt
from harness.scenarios.base import Script
from harness.workload.at_once import ColdRound
from harness.workload.cells import CellWork


def planned_rows(work: CellWork, max_tokens: int) -> tuple[PlannedRequest, ...]:
    """Return a row for each request of a cell; ``max_tokens`` is that of requests without a number of their own."""
    number = itertools.count()
    first, others = work.until_proof
    rows = [*_cold(work.cell, first, number, max_tokens)]
    rows += _played(work.cell, work.proof, number, max_tokens) if work.proof is not None else ()
    rows += _cold(work.cell, others, number, max_tokens)
    return (*rows, *(row for script in work.scripts for row in _played(work.cell, script, number, max_tokens)))


def _cold(cell: Cell, asked: Iterable[ColdRound], number: Iterator[int], max_tokens: int) -> Iterator[PlannedRequest]:
    for together in asked:
        for item in together.items:
            yield PlannedRequest(
                sequence=next(number),
                prompt_id=item.prompt.id,
                form=item.form,
                stage=together.number,
                prompt_sha256=_hash(item.prompt),
                max_tokens=max_tokens,
                concurrent=len(together.items),
                legs=_legs(cell, "cell"),
            )


def _played(cell: Cell, script: Script, number: Iterator[int], max_tokens: int) -> Iterator[PlannedRequest]:
    for at, stage in enumerate(script.stages):
        for outer in stage.sends:
            for send in (*outer.between, outer):
                yield PlannedRequest(
                    sequence=next(number),
                    prompt_id=send.prompt.id,
                    form="ids",
                    scenario=script.scenario,
                    instance=script.instance,
                    part=send.part,
                    stage=at,
                    prompt_sha256=_hash(send.prompt),
                    route=send.route,
                    max_tokens=send.max_tokens or max_tokens,
                    temperature=send.temperature,
                    concurrent=len(stage.sends),
                    abandon=send.abandon,
                    feature=send.feature,
                    api=send.api,
                    mistake=send.mistake,
                    legs=_legs(cell, send.route),
                )


def _hash(prompt: Prompt) -> str:
    return prompt_sha256(prompt.ids, prompt.source, prompt.expected)


def _legs(cell: Cell, route: SentTo) -> tuple[LegRole, ...]:
    """Return the roles of the engines whose answers to a request are recorded; a router hides P's."""
    if route in ("prefill", "read-back"):
        return ("prefill",)
    if route in ("former-p", "reference"):
        return ("decode",)
    if route == "local" or cell.topology == "single":
        return ("single",)
    return ("decode",) if cell.routed else ("prefill", "decode")
