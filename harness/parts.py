"""Recorded runs as parts of one night: what evidence a recording holds, and what makes two recordings parts of one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.acceptance import real_steps
from harness.checks.tokens import compare
from harness.config import PATH_KEYS
from harness.errors import NotARunError
from harness.history import COLD, RESCORE, RUN, SECOND, Form, History, Observation, RunRecord, load_history
from harness.hub import TARGET, TOKENIZER
from harness.matrix import CellName
from harness.rescore import Outputs

_T = TypeVar("_T")
_SHOWN = 3
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORMS: tuple[Form, ...] = ("ids", "text")


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
    # Of scores, whether they are there: 10 KB each of a quarter of a million do not fit.
    scores = {(o.cell, o.key): rescored(o) for o in history.of_scenario(RESCORE)}
    return sum(not scores.get(key, False) for key in outputs.scored_by)


def rescored(o: Observation) -> bool:
    """Whether a re-scoring request was answered with scores."""
    return o.error is None and o.final is not None and o.final.rescored is not None


class Contradiction(NamedTuple):
    """What two recordings of a cell say differently, where equal runs are equal bit for bit."""

    scenario: str
    compared: int
    """Requests that both answered."""
    differing: int
    """Of these, those with other tokens or accepted drafts."""


def contradictions(first: History, second: History, cell: str, near_tie_nats: float) -> list[Contradiction]:
    """Where two recordings of a cell contradict each other: in every scenario, of both forms."""
    out = []
    for scenario in dict.fromkeys(o.scenario for o in first.in_order(cell) if o.scenario != RESCORE):
        pairs = [
            (mine, theirs[key])
            for form in _FORMS
            for theirs in (second.of(cell, form, scenario),)
            for key, mine in first.of(cell, form, scenario).items()
            if key in theirs and _answered(mine) and _answered(theirs[key])
        ]
        differing = sum(_differ(mine, other, near_tie_nats) for mine, other in pairs)
        if differing:
            out.append(Contradiction(scenario, len(pairs), differing))
    return out


def _answered(o: Observation) -> bool:
    return o.error is None and o.final is not None and o.final.output_ids is not None


def _differ(first: Observation, second: Observation, near_tie_nats: float) -> bool:
    """Requests that were alone on their engines are answered alike, token for token and step for step. In company,
    what shares a step with them may round differently, which shows in the steps and at near ties."""
    a, b = first.final, second.final
    if a is None or b is None or a.output_ids is None or b.output_ids is None:
        return False
    if first.concurrent == second.concurrent == 1:
        steps = [s.accepted if (s := real_steps(leg)) is not None else None for leg in (a, b)]
        return a.output_ids != b.output_ids or steps[0] != steps[1]
    parted = compare(b.output_ids, a.output_ids, a.top_gaps, near_tie_nats)
    return parted is not None and not parted.near_tie


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
    """What all parts of one night have in common. Cells are apart: they are what parts differ in, and with them the
    prompts, models and identities that a part knows, which are compared where two parts know the same ones."""

    profile: dict[str, Any]
    """Without the paths, which differ from machine to machine; models and prompts count by their hashes."""
    models: dict[str, str]
    """Commit of each model of the hub that is known, by role."""
    prompts: dict[str, str]
    """Hash of the prompts by variant."""
    identities: dict[str, Any]
    """By lineup; None for one that was recorded without."""
    versions: dict[str, Any]
    platform: str
    gpus: tuple[str, ...]
    """Kinds of GPUs, where the engines use them."""
    mutants: tuple[str, ...]


_KNOWN_IN_PART = ("models", "prompts", "identities")
"""Fields of a signature of which a part knows those of its own cells."""


def signature_of(run: RunRecord) -> Signature:
    """Raises nothing for odd data: what is missing differs from what is there."""
    engine = run.profile.get("engine")
    on_gpu = isinstance(engine, dict) and engine.get("device") == "gpu"
    gpus = run.hardware.get("gpus")
    recorded = {CellName.of(c.cell).lineup for c in run.cells if c.state == "complete"}
    return Signature(
        profile=comparable_profile(run.profile),
        models=commits_in(run.profile),
        prompts=_prompts_in(run),
        identities={**dict.fromkeys(sorted(recorded)), **run.identities},
        versions={**run.versions, "harness": run.harness_version},
        platform=str(run.hardware.get("platform")),
        gpus=tuple(sorted(set(map(str, gpus)))) if on_gpu and isinstance(gpus, list) else (),
        mutants=run.mutants,
    )


def _prompts_in(run: RunRecord) -> dict[str, str]:
    """By variant; a run says one hash itself, of the first variant that it asked anything."""
    first = next((c.cell for c in run.cells if c.planned or c.scenarios), "")
    out = {CellName.of(first).variant: run.prompts_sha256}
    for lineup, identity in run.identities.items():
        found = identity.get("prompts_sha256")
        if found is not None:
            out.setdefault(CellName.of_lineup(lineup).variant, str(found))
    return out


def comparable_profile(profile: Mapping[str, Any]) -> dict[str, Any]:
    """A profile as data without what differs from machine to machine: paths, where it was read from, and whether a
    model of the hub was there, which puts a folder in the place of its name."""
    return dict(without_paths(_with_names(profile)))


def _with_names(profile: Mapping[str, Any]) -> dict[str, Any]:
    """A profile as data with models of the hub by name, whether they were turned into folders or not."""
    out = {k: v for k, v in profile.items() if k not in ("source", "sources")}
    names = {role: {k: m.get(k) for k in ("repo", "revision")} for role, m in _models_in(profile).items()}
    out |= {role: name for role, name in names.items() if role in (TARGET, TOKENIZER)}
    methods = out.get("methods")
    if isinstance(methods, list | tuple):
        out["methods"] = [
            {**m, "drafter": names[str(m["kind"])]} if isinstance(m, Mapping) and str(m.get("kind")) in names else m
            for m in methods
        ]
    return out


def commits_in(profile: Mapping[str, Any]) -> dict[str, str]:
    """Commit of each model of the hub, by role, where the profile or its record says it."""
    out = {}
    for role, model in _models_in(profile).items():
        revision = str(model.get("revision"))
        commit = model.get("commit") or (revision if _COMMIT.fullmatch(revision) else None)
        if commit is not None:
            out[role] = str(commit)
    return out


def _models_in(profile: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Models of the hub by role, as they are named, or as they were found."""
    given = {role: profile.get(role) for role in (TARGET, TOKENIZER)}
    methods = profile.get("methods")
    for method in methods if isinstance(methods, list | tuple) else ():
        if isinstance(method, Mapping):
            given[str(method.get("kind"))] = method.get("drafter")
    sources = profile.get("sources")
    found = {**given, **(sources if isinstance(sources, Mapping) else {})}
    return {role: model for role, model in found.items() if isinstance(model, Mapping)}


def without_paths(value: Any) -> Any:
    """A profile without its path-valued keys."""
    if isinstance(value, Mapping):
        return {k: without_paths(v) for k, v in value.items() if k not in PATH_KEYS or not isinstance(v, str | None)}
    return [without_paths(v) for v in value] if isinstance(value, list | tuple) else value


def signature_of_night(signatures: Sequence[Signature]) -> Signature:
    """What most parts say, the earliest of equals; of what parts know for their own cells, what most that know it say.
    Expects one signature at least."""
    shared = [s._replace(models={}, prompts={}, identities={}) for s in signatures]
    expected = _most(shared)
    fitting = [s for s, own in zip(signatures, shared, strict=True) if not describe_differences(expected, own)]
    return expected._replace(
        models=_votes([s.models for s in fitting]),
        prompts=_votes([s.prompts for s in fitting]),
        identities=_votes([s.identities for s in fitting]),
    )


def _votes(known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for mapping in known for key in mapping)
    return {key: _most([mapping[key] for mapping in known if key in mapping]) for key in keys}


def _most(values: Sequence[_T]) -> _T:
    """The most frequent value, the first of equals."""
    count = Counter(map(repr, values))
    return max(values, key=lambda v: count[repr(v)])


def describe_differences(expected: Signature, found: Signature) -> str:
    """Where two signatures differ, the first few places in words; empty when they do not."""
    places = [
        place
        for name in Signature._fields
        for place in (_differing_in_common if name in _KNOWN_IN_PART else differing)(
            getattr(expected, name), getattr(found, name), name
        )
    ]
    more = f"; and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return "; ".join(places[:_SHOWN]) + more


def _differing_in_common(expected: Mapping[str, Any], found: Mapping[str, Any], place: str) -> Iterator[str]:
    """As ``differing``, of the keys that both have."""
    for key in expected:
        if key in found:
            yield from differing(expected[key], found[key], f"{place}.{key}" if key else place)


def differing(expected: Any, found: Any, place: str) -> Iterator[str]:
    """Each place where two values as data differ, in words."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(k for k in found if k not in expected)]:
            yield from differing(expected.get(key), found.get(key), f"{place}.{key}")
    elif _lists_of_mappings(expected, found):
        for at, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differing(one, other, f"{place}.{at}")
    elif _plain(expected) != _plain(found):
        yield f"{place}: expected {_short(expected)}, found {_short(found)}"


def _lists_of_mappings(expected: Any, found: Any) -> bool:
    lists = isinstance(expected, list | tuple) and isinstance(found, list | tuple)
    return lists and len(expected) == len(found) and all(isinstance(v, Mapping) for v in (*expected, *found))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = repr(_plain(value))
    return text if len(text) <= 80 else text[:77] + "…"
