"""What all parts of one run have in common, and how it is compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from harness.engines.flags import role_of
from harness.history.records import RunRecord
from harness.profiles.axes import PATH_KEYS
from harness.profiles.cells import CellName
from harness.profiles.model_reference import TARGET, TOKENIZER, on_p_role
from harness.profiles.recorded_profile import RecordedProfile
from harness.util.differences import differing

_SHOWN = 3
_ALL_ENGINES = "all"
_COMMIT = re.compile(r"[0-9a-f]{40}")


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
    commit: dict[str, str]
    """Commit of the harness; empty where it is not known."""
    engine_flags: dict[str, tuple[str, ...]]
    """Options that added to engines: those for all, and those for each role that an engine has."""

    def joined(self, later: Signature) -> Signature:
        """Return this signature with the entries that only a later part has."""
        return self._replace(
            models=later.models | self.models,
            prompts=later.prompts | self.prompts,
            identities=later.identities | self.identities,
            commit=later.commit | self.commit,
            engine_flags=later.engine_flags | self.engine_flags,
        )


_KNOWN_IN_PART = ("models", "prompts", "identities", "commit", "engine_flags")
"""Fields of a signature of which a part has only the entries of its own cells, or none."""


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
        commit={"harness": run.git_commit} if run.git_commit else {},
        engine_flags=_flags_in(run),
    )


def _flags_in(run: RunRecord) -> dict[str, tuple[str, ...]]:
    """Return the options that added to engines by role: an option for a role is refused where no engine has it."""
    by_role = {option: role_of(option) or _ALL_ENGINES for option in run.engine_flags}
    roles = dict.fromkeys((_ALL_ENGINES, *(e.role for e in run.engines)))
    return {role: tuple(o for o in run.engine_flags if by_role[o] == role) for role in roles}


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
        out["methods"] = [_with_drafters(m, names) if isinstance(m, Mapping) else m for m in methods]
    return out


def _with_drafters(method: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(method.get("kind"))
    roles = {"drafter": kind, "prefill_drafter": on_p_role(kind)}
    return {**method, **{key: names[role] for key, role in roles.items() if role in names}}


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
