"""Models of a profile on this machine: which have a folder for engines, where the others come from, and why not."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from harness.profiles import at_rest, converted, packages
from harness.profiles.hub import Hub, look_up
from harness.profiles.methods import Method
from harness.profiles.model_reference import (
    TARGET,
    TOKENIZER,
    FolderAtRest,
    GgufSource,
    Given,
    ModelFolder,
    ModelPath,
    ModelReference,
    PackagedModel,
    PackageSource,
    Source,
    UnresolvedModel,
    UnresolvedPackage,
    described_in,
)


class NamesModels(Protocol):
    """A profile, as far as its models go."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> ModelPath: ...
    @property
    def tokenizer(self) -> ModelPath | None: ...
    @property
    def methods(self) -> tuple[Method, ...]: ...
    @property
    def sources(self) -> dict[str, Source | PackageSource | GgufSource]: ...
    def model_copy(self, *, update: Mapping[str, Any]) -> Self: ...


_P = TypeVar("_P", bound=NamesModels)


def models_of(profile: NamesModels, method: Method) -> dict[str, ModelPath | None]:
    """Return the models that an engine of a method loads, by role."""
    return {"target": profile.target, "tokenizer": profile.tokenizer, f"drafter of {method.kind}": method.drafter}


def given_models(profile: NamesModels) -> dict[str, Given | None]:
    """Return the models of a profile by role: target, tokenizer, or the kind of a method."""
    return {TARGET: profile.target, TOKENIZER: profile.tokenizer} | {m.kind: m.drafter for m in profile.methods}


def references_of(profile: NamesModels) -> dict[str, ModelReference]:
    """Return the models on the hub that have no folder yet, by role."""
    return {role: value for role, value in given_models(profile).items() if isinstance(value, ModelReference)}


def makeable(profile: NamesModels) -> dict[str, PackagedModel | FolderAtRest]:
    """Return the models of a profile as written, by role, that can be made without the hub: those in packages, and
    folders at rest."""
    out: dict[str, PackagedModel | FolderAtRest] = {}
    for role, value in given_models(profile).items():
        folder = described_in(value)
        if isinstance(value, PackagedModel | FolderAtRest):
            out[role] = value
        elif folder is not None and at_rest.is_at_rest(folder):
            trusted = isinstance(value, ModelFolder) and value.trust_remote_code
            out[role] = FolderAtRest(path=folder, trust_remote_code=trusted, reason="not looked up")
    return out


def unavailable(profile: NamesModels) -> dict[str, str]:
    """Return, by role, why models of a localised profile cannot be used."""
    return {
        role: value.reason
        for role, value in given_models(profile).items()
        if isinstance(value, UnresolvedModel | UnresolvedPackage | FolderAtRest)
    }


def made_later(profile: NamesModels) -> set[str]:
    """Return the roles of models of a localised profile that a run makes before it starts."""
    return makeable(profile).keys() & unavailable(profile).keys()


def reason_for(profile: NamesModels, kind: str) -> str | None:
    """Return which missing model keeps a method of a localised profile from running, or None."""
    missing = unavailable(profile)
    return next((missing[role] for role in (TARGET, TOKENIZER, kind) if role in missing), None)


def localise(profile: _P, name: str = "", hub: Hub | None = None) -> _P:
    """Replace references, models in packages and folders at rest by folders of the caches, and note their origin in
    ``sources``.

    This contacts nobody, makes nothing and never raises: what has no folder keeps its name, with the reason, and using
    it raises ModelUnavailableError. ``name`` is what the user calls the profile.
    """
    references, others = references_of(profile), makeable(profile)
    if not references and not others:
        return profile
    found: dict[str, tuple[Given, Source | PackageSource | GgufSource | None]] = {}
    called_so = name or profile.name
    if references:
        hub = hub or Hub()
    for role, reference in references.items():
        # Without its own tokenizer, the profile uses the target's.
        also_tokenizer = role == TARGET and profile.tokenizer is None
        found[role] = _of_hub(reference, look_up(hub or Hub(), reference, role, also_tokenizer, called_so))
    command = f"harness models --profile {shlex.quote(called_so)} --download"
    for role, value in others.items():
        found[role] = _made(value, command)
    folders = {role: folder for role, (folder, _) in found.items()}
    sources = profile.sources | {role: source for role, (_, source) in found.items() if source is not None}
    changes: dict[str, Any] = {r: folders[r] for r in (TARGET, TOKENIZER) if r in folders}
    methods = tuple(
        m.model_copy(update={"drafter": folders[m.kind]}) if m.kind in folders else m for m in profile.methods
    )
    return profile.model_copy(update={**changes, "methods": methods, "sources": sources})


def _of_hub(reference: ModelReference, found: Path | str) -> tuple[Given, Source | None]:
    """Return a model of the hub with its origin, or with the reason why it has no folder."""
    if isinstance(found, str):
        return UnresolvedModel(**reference.model_dump(exclude={"reason"}), reason=found), None
    trusted = reference.trust_remote_code
    source = Source(repo=reference.repo, revision=reference.revision, commit=found.name)
    return ModelFolder(path=found, trust_remote_code=trusted) if trusted else found, source


def _made(value: PackagedModel | FolderAtRest, command: str) -> tuple[Given, PackageSource | GgufSource | None]:
    """Return a model of a package or at rest with its origin, or with the reason why it has no folder."""
    if isinstance(value, PackagedModel):
        folder = packages.found(value)
        if folder is not None:
            return folder, packages.source_of(value)
        known = value.model_dump(exclude={"reason"})
        return UnresolvedPackage(**known, reason=packages.why_not(value, command)), None
    try:
        folder = at_rest.expanded(value.path)
        source = at_rest.source_of(value.path)
    except OSError as error:
        return value.model_copy(update={"reason": f"{value.path}: cannot be read ({error.strerror})"}), None
    if folder is not None:
        trusted = value.trust_remote_code
        return ModelFolder(path=folder, trust_remote_code=trusted) if trusted else folder, source
    reason = (
        f"{value.path / at_rest.WEIGHTS} has to be expanded in the cache {converted.root()} first; run `{command}`, "
        "which needs no network for that"
    )
    return value.model_copy(update={"reason": reason}), None
