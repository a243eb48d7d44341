"""Cuts a recorded run down to a few cells, scenarios and cold prompts, so that it can be kept in the repository.

    python -m tests.golden.cut RUN OUT --cell pd-eagle3 --scenario prefix-hit --like OTHER_RUN --path /from=to

What is kept is what the run recorded, line by line; its plan and its counts are cut alike, and it is sealed anew. The
record is left in its own schema, so that it is read as its owner's would be.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.history.checksum import sealed
from harness.history.folder import History, load_history
from harness.history.layout import CELLS, LINES, ROUNDING, RUN, SCORES
from harness.history.plan import plan_key
from harness.history.records import COLD, Observation, PlannedRequest
from harness.profiles.cells import CellName
from harness.util.files import write_json
from harness.workload.outputs import Outputs


def cut(run: Path, out: Path, cells: Sequence[str], scenarios: Sequence[str], prompts: Collection[str]) -> None:
    """Write the part of a recorded run that has these cells, scenarios and cold prompts."""
    history = load_history(run)

    def kept(o: Observation | PlannedRequest) -> bool:
        return o.prompt_id in prompts if o.scenario == COLD else o.scenario in scenarios

    outputs = Outputs(history.run.normal)
    for cell in cells:
        _copy(run, out, cell, LINES, kept)
        _copy(run, out, cell, ROUNDING, lambda o: True)
        for o in filter(kept, history.in_order(cell)):
            outputs.add(o)
    for cell, scored in _by_cell(outputs).items():
        _copy(run, out, cell, SCORES, lambda o, scored=scored: o.key in scored)  # type: ignore[misc]
    raw = json.loads((run / RUN).read_text(encoding="utf-8"))
    write_json(out / RUN, sealed(_record(raw, history, cells, kept), out), sort_keys=False)


def _by_cell(outputs: Outputs) -> dict[str, set[str]]:
    out: dict[str, set[str]] = {}
    for cell, key in outputs.scored_by:
        out.setdefault(cell, set()).add(key)
    return out


def _copy(run: Path, out: Path, cell: str, name: str, kept: Callable[[Observation], bool]) -> None:
    """Copy the lines of a file that are to be kept, byte for byte."""
    source = run / CELLS / cell / name
    if not source.is_file():
        return
    lines = [x for x in source.read_text(encoding="utf-8").splitlines(True) if kept(Observation.model_validate_json(x))]
    (out / CELLS / cell).mkdir(parents=True, exist_ok=True)
    (out / CELLS / cell / name).write_text("".join(lines), encoding="utf-8")


def _record(
    raw: dict[str, Any], history: History, cells: Sequence[str], kept: Callable[[PlannedRequest], bool]
) -> dict[str, Any]:
    """Return ``run.json`` without what is left out; all else stays as it was recorded, times among it."""
    records, plans = [], {}
    for cell in (c for c in raw["cells"] if c["cell"] in cells):
        rows = [row for row in history.run.plans[cell["plan"]] if kept(row)]
        key = plan_key(rows)
        plans[key] = [row.model_dump(mode="json") for row in rows]
        counts = {s: n for s, n in cell["scenarios"].items() if any(row.scenario == s for row in rows)}
        cold = sum(row.scenario == COLD for row in rows)
        records.append({**cell, "planned": cold, "scenarios": counts, "plan": key})
    groups = {cell["group"] for cell in records}
    lineups = {CellName.of(cell).lineup for cell in cells}
    return {
        **raw,
        "cells": records,
        "plans": plans,
        "engines": [e for e in raw["engines"] if e["group"] in groups],
        "identities": {lineup: found for lineup, found in raw["identities"].items() if lineup in lineups},
    }


def renamed(out: Path, paths: Iterable[tuple[str, str]]) -> None:
    """Make the paths of the machine that recorded a run those of a checkout."""
    text = (out / RUN).read_text(encoding="utf-8")
    for old, new in paths:
        text = text.replace(old, new)
    write_json(out / RUN, sealed(json.loads(text), out), sort_keys=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the recorded run")
    parser.add_argument("out", type=Path, help="folder to write the part to; it is replaced")
    parser.add_argument("--cell", action="append", required=True, metavar="CELL", help="id of a cell to keep")
    parser.add_argument("--scenario", action="append", default=[], metavar="ID", help="scenario to keep beside cold")
    parser.add_argument("--like", type=Path, required=True, metavar="RUN", help="keep the cold prompts of this run")
    parser.add_argument("--path", action="append", default=[], metavar="OLD=NEW", help="part of a path to replace")
    given = parser.parse_args(arguments)
    like = load_history(given.like)
    prompts = {row.prompt_id for rows in like.run.plans.values() for row in rows if row.scenario == COLD}
    shutil.rmtree(given.out, ignore_errors=True)
    cut(given.run, given.out, given.cell, given.scenario, prompts)
    renamed(given.out, [(old, new) for old, _, new in (p.partition("=") for p in given.path)])


if __name__ == "__main__":
    main()
