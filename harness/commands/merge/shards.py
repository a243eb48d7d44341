"""Completeness and compatibility of recorded runs as parts of one run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.errors import NotARunError
from harness.history.acceptance import real_steps
from harness.history.folder import History, load_history
from harness.history.layout import RUN, SECOND, rounds_below
from harness.history.plan import unanswered
from harness.history.records import RESCORE, Form, Observation, RunRecord
from harness.history.token_ids import compare
from harness.profiles.axes import PATH_KEYS
from harness.profiles.cells import CellName
from harness.profiles.model_reference import TARGET, TOKENIZER
from harness.profiles.recorded_profile import RecordedProfile
from harness.util.differences import differing
from harness.workload.outputs import Outputs

_T = TypeVar("_T")
_SHOWN = 3
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORMS: tuple[Form, ...] = ("ids", "text")


class Completeness(IntEnum):
    """How complete a recording of a cell is."""

    INCOMPLETE = 0
    """The cell failed, was interrupted or never started."""
    BROKEN = 1
    """The cell finished, but requests failed or are missing."""
    WHOLE = 2
    """Every planned request was sent and answered."""


def evidence_of(history: History, cell: str) -> Completeness:
    """Return how complete a history's recording of a cell is; INCOMPLETE without one."""
    record = history.cell(cell)
    if record is None or record.state != "complete":
        return Completeness.INCOMPLETE
    answers = [o for o in history.in_order(cell) if o.scenario != RESCORE]
    broken = any(o.error is not None for o in answers) or unanswered(history.run, record, answers)
    return Completeness.BROKEN if broken else Completeness.WHOLE


def unfinished(run: RunRecord) -> str:
    """Return why a run did not finish, as a predicate ("was interrupted"); empty for one that did."""
    if run.interrupted:
        return "was interrupted"
    return "" if run.finished is not None else "did not finish: it was killed, or is still running"


def missing_evidence(history: History) -> list[str]:
    """Return what a recording lacks, and another try could supply, in words."""
    out = [f"the run {why}"] if (why := unfinished(history.run)) else []
    for record in history.run.cells:
        found = evidence_of(history, record.cell)
        if found is Completeness.INCOMPLETE:
            out.append(f"{record.cell} is {record.state}: {record.reason or 'no reason was recorded'}")
        elif found is Completeness.BROKEN:
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


class Contradiction(NamedTuple):
    """Differences between two recordings of a cell that should be bitwise equal."""

    scenario: str
    compared: int
    """Requests that both answered."""
    differing: int
    """Of these, those with other tokens or accepted drafts."""


def contradictions(first: History, second: History, cell: str, near_tie_nats: float) -> list[Contradiction]:
    """Return the scenarios, over both forms, in which two recordings of a cell contradict each other."""
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
    """Return whether two answers differ by more than rounding.

    Requests that were alone on their engines must agree in tokens and steps. Concurrent ones share a batch, which
    changes rounding: their steps, and tokens at near ties, may differ.
    """
    a, b = first.final, second.final
    if a is None or b is None or a.output_ids is None or b.output_ids is None:
        return False
    if first.concurrent == second.concurrent == 1:
        steps = [s.accepted if (s := real_steps(leg)) is not None else None for leg in (a, b)]
        return a.output_ids != b.output_ids or steps[0] != steps[1]
    parted = compare(b.output_ids, a.output_ids, a.top_gaps, near_tie_nats, a.runner_ups)
    return parted is not None and not parted.near_tie


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders that a path means: itself, or those below it.

    Second stages belong to their runs, and links (``latest``) are only aliases; neither is returned. Raises
    NotARunError when there is no run.
    """
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
    """What all parts of one run have in common.

    Parts differ in their cells, and so in the prompts, models and identities that they record; these are compared only
    where two parts have the same ones.
    """

    profile: dict[str, Any]
    """Without paths, which differ between machines; models and prompts are compared by their hashes."""
    models: dict[str, str]
    """Commits of the hub's models, as far as known, by role."""
    prompts: dict[str, str]
    """Hash of the prompts by variant."""
    identities: dict[str, Any]
    """Identities by lineup; None where none was recorded."""
    versions: dict[str, Any]
    platform: str
    gpus: tuple[str, ...]
    """Kinds of GPUs, if the engines use them."""
    mutants: tuple[str, ...]


_KNOWN_IN_PART = ("models", "prompts", "identities")
"""Fields of a signature of which a part has only the entries of its own cells."""


def signature_of(run: RunRecord) -> Signature:
    """Return the signature of a run. Never raises on malformed data: a missing value differs from a present one."""
    on_gpu = run.asked_for.engine.on_gpu
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
    """Return the hash of the prompts by variant; the run's own hash is that of the first variant with requests."""
    first = next((c.cell for c in run.cells if c.planned or c.scenarios), "")
    out = {CellName.of(first).variant: run.prompts_sha256}
    for lineup, identity in run.identities.items():
        found = identity.get("prompts_sha256")
        if found is not None:
            out.setdefault(CellName.of_lineup(lineup).variant, str(found))
    return out


def comparable_profile(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile as data without what differs between machines.

    That is paths, the file it was read from, and whether a model of the hub was already resolved to a folder.
    """
    return dict(without_paths(_with_names(profile)))


def _with_names(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile as data with models of the hub and of packages by name, whether or not they were resolved to
    folders."""
    out = {k: v for k, v in profile.items() if k not in ("source", "sources")}
    # A folder at rest is a path like any other.
    models = {role: m for role, m in RecordedProfile(profile).models.items() if "gguf" not in m}
    names = {role: {k: m.get(k) for k in _named_by(m)} for role, m in models.items()}
    out |= {role: name for role, name in names.items() if role in (TARGET, TOKENIZER)}
    methods = out.get("methods")
    if isinstance(methods, list | tuple):
        out["methods"] = [
            {**m, "drafter": names[str(m["kind"])]} if isinstance(m, Mapping) and str(m.get("kind")) in names else m
            for m in methods
        ]
    return out


def _named_by(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that name a model, whether or not it was resolved to a folder."""
    return ("package", "version", "file", "form") if "package" in model else ("repo", "revision")


def commits_in(profile: Mapping[str, Any]) -> dict[str, str]:
    """Return what pins the models that are no plain folders, by role, as far as the profile or its record has it: the
    commit on the hub, or the hash of a file."""
    out = {}
    for role, model in RecordedProfile(profile).models.items():
        revision = str(model.get("revision"))
        commit = model.get("commit") or model.get("sha256") or (revision if _COMMIT.fullmatch(revision) else None)
        if commit is not None:
            out[role] = str(commit)
    return out


def without_paths(value: Any) -> Any:
    """Return a profile as data without its path-valued keys."""
    if isinstance(value, Mapping):
        return {k: without_paths(v) for k, v in value.items() if k not in PATH_KEYS or not isinstance(v, str | None)}
    return [without_paths(v) for v in value] if isinstance(value, list | tuple) else value


def common_signature(signatures: Sequence[Signature]) -> Signature:
    """Return the most frequent signature, on a tie the earliest. Expects at least one.

    Each entry that depends on a part's cells is decided by the parts that have it.
    """
    shared = [s._replace(models={}, prompts={}, identities={}) for s in signatures]
    expected = _most(shared)
    matching = [s for s, own in zip(signatures, shared, strict=True) if not describe_differences(expected, own)]
    return expected._replace(
        models=_votes([s.models for s in matching]),
        prompts=_votes([s.prompts for s in matching]),
        identities=_votes([s.identities for s in matching]),
    )


def _votes(known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for mapping in known for key in mapping)
    return {key: _most([mapping[key] for mapping in known if key in mapping]) for key in keys}


def _most(values: Sequence[_T]) -> _T:
    """Return the most frequent value, on a tie the first."""
    count = Counter(map(repr, values))
    return max(values, key=lambda v: count[repr(v)])


def describe_differences(expected: Signature, found: Signature) -> str:
    """Describe the first few differences of two signatures; empty when there is none."""
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
    """Yield differences as ``differing`` does, but only of the keys that both have."""
    for key in expected:
        if key in found:
            yield from differing(expected[key], found[key], f"{place}.{key}" if key else place)
