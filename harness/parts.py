"""Recorded runs as parts of one night: what evidence a recording holds, and what makes two recordings parts of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from harness.config import PATH_KEYS
from harness.errors import NotARunError
from harness.history import COLD, RESCORE, RUN, SECOND, History, Observation, RunRecord, load_history
from harness.rescore import Outputs

_SHOWN = 3


class Evidence(IntEnum):
    """How much a recording of a cell can be judged by."""

    INCOMPLETE = 0
    """The cell failed, was interrupted or was never begun."""
    BROKEN = 1
    """The cell went to its end, but requests broke or are missing."""
    WHOLE = 2
    """Everything that was planned was asked and answered."""


def evidence_of(history: History, cell: str) -> Evidence:
    """How much evidence a history holds of a cell; INCOMPLETE where it has none of it."""
    record = history.cell(cell)
    if record is None or record.state != "complete":
        return Evidence.INCOMPLETE
    answered: dict[str, int] = {}
    for o in history.in_order(cell):
        if o.scenario != RESCORE:
            if o.error is not None:
                return Evidence.BROKEN
            answered[o.scenario] = answered.get(o.scenario, 0) + 1
    planned = {COLD: record.planned, **record.scenarios}
    return Evidence.WHOLE if all(answered.get(s, 0) >= n for s, n in planned.items()) else Evidence.BROKEN


def unfinished(run: RunRecord) -> str:
    """Why a run did not come to its end, in words; empty for one that did."""
    if run.interrupted:
        return "was interrupted"
    return "" if run.finished is not None else "has no end: it was killed, or is still going on"


def lacks(history: History) -> list[str]:
    """What keeps a recording from being whole, in words: what trying it again could mend."""
    out = [f"the run {why}"] if (why := unfinished(history.run)) else []
    for record in history.run.cells:
        found = evidence_of(history, record.cell)
        if found is Evidence.INCOMPLETE:
            out.append(f"{record.cell} is {record.state}: {record.reason or 'no reason was recorded'}")
        elif found is Evidence.BROKEN:
            out.append(f"{record.cell}: requests broke or are missing")
    missing = _not_rescored(history) if history.run.rescore else 0
    if missing:
        out.append(f"{missing} outputs were not re-scored by the plain engine")
    second = history.folder / SECOND
    if (second / RUN).is_file():
        out += [f"second stage: {why}" for why in lacks(load_history(second))]
    return out


def _not_rescored(history: History) -> int:
    outputs = Outputs()
    for o in history.observations:
        if o.scenario != RESCORE:
            outputs.add(o)
    scores = {(o.cell, o.key): o for o in history.observations if o.scenario == RESCORE}
    return sum(key not in scores or not rescored(scores[key]) for key in outputs.scored_by)


def rescored(o: Observation) -> bool:
    """Whether a re-scoring request was answered with scores."""
    return o.error is None and o.final is not None and o.final.rescored is not None


def find_runs(folder: Path) -> list[Path]:
    """The run folders that a path means: itself, or those below it. Second stages belong to their runs, and links
    (``latest``) are other names of runs. Raises NotARunError when there is none."""
    found = list(_runs_below(folder))
    if not found:
        what = "a folder without one" if folder.is_dir() else "no such folder"
        raise NotARunError(f"{folder}: expected the folder of a recorded run, or one with runs below it, found {what}")
    return found


def _runs_below(folder: Path) -> Iterator[Path]:
    if (folder / RUN).is_file():
        yield folder
    elif folder.is_dir():
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink():
                yield from _runs_below(child)


class Signature(NamedTuple):
    """What all parts of one night have in common. Cells are apart: they are what parts differ in."""

    profile: dict[str, Any]
    """Without the paths, which differ from machine to machine; models and prompts count by their hashes."""
    prompts: str
    identities: dict[str, Any]
    versions: dict[str, Any]
    platform: str
    gpus: tuple[str, ...]
    """Kinds of GPUs, where the engines use them."""
    mutants: tuple[str, ...]


def signature_of(run: RunRecord) -> Signature:
    """Raises nothing for odd data: what is missing differs from what is there."""
    engine = run.profile.get("engine")
    on_gpu = isinstance(engine, dict) and engine.get("device") == "gpu"
    gpus = run.hardware.get("gpus")
    return Signature(
        profile=without_paths({k: v for k, v in run.profile.items() if k != "source"}),
        prompts=run.prompts_sha256,
        identities=run.identities,
        versions={**run.versions, "harness": run.harness_version},
        platform=str(run.hardware.get("platform")),
        gpus=tuple(sorted(set(map(str, gpus)))) if on_gpu and isinstance(gpus, list) else (),
        mutants=run.mutants,
    )


def without_paths(value: Any) -> Any:
    """A profile without its path-valued keys."""
    if isinstance(value, Mapping):
        return {k: without_paths(v) for k, v in value.items() if k not in PATH_KEYS or not isinstance(v, str | None)}
    return [without_paths(v) for v in value] if isinstance(value, list | tuple) else value


def describe_differences(expected: Signature, found: Signature) -> str:
    """Where two signatures differ, the first few places in words; empty when they do not."""
    places = [p for name in Signature._fields for p in _differing(getattr(expected, name), getattr(found, name), name)]
    more = f"; and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return "; ".join(places[:_SHOWN]) + more


def _differing(expected: Any, found: Any, place: str) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(k for k in found if k not in expected)]:
            yield from _differing(expected.get(key), found.get(key), f"{place}.{key}")
    elif _plain(expected) != _plain(found):
        yield f"{place}: expected {_short(expected)}, found {_short(found)}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = repr(_plain(value))
    return text if len(text) <= 80 else text[:77] + "…"
