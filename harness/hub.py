"""Models on the Hugging Face hub, named by repository and revision, and their snapshots in the local cache.

A profile may name a model by a folder or by a ``ModelReference``. Loading a profile turns references into folders of
the cache without asking the hub; a model that is not there makes only the cells that need it UNKNOWN. Only
``harness models`` and ``harness doctor`` ask the hub about models, and only ``harness models --download`` fetches any.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Discriminator, Tag, ValidationInfo, field_validator

from harness.errors import EnvironmentFault, HarnessError, ModelUnavailableError, ProfileError
from harness.files import sha256_file, sha256_named
from harness.strict import Strict

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from harness.config import Profile

GIB = 2**30
TARGET, TOKENIZER = "target", "tokenizer"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ABBREVIATED = re.compile(r"[0-9a-fA-F]{7,}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_MODEL_FILES = (*_TOKENIZER_FILES, "*.safetensors")
_CODE_FILES = ("*.py",)
# fnmatch's * crosses slashes; vLLM loads what lies at the top, and folders hold other formats of the same weights.
_NOT_WANTED = ("*/*",)
_TIMEOUT_S = 20.0


class ModelReference(Strict):
    """A model by name: ``{repo: org/name, revision: main, commit: 40 hex digits}``."""

    repo: str
    """Organisation and name on the hub."""
    revision: str
    """A commit (40 hex digits), a tag or a branch."""
    commit: str | None = None
    """Which commit a branch or tag must be; another one is refused as moved."""
    trust_remote_code: bool = False
    """Let code of this model run in engines (``harness.remote_code``)."""

    @field_validator("repo")
    @classmethod
    def _has_both_names(cls, value: str) -> str:
        if not _REPO.fullmatch(value) or ".." in value:
            raise ValueError("expected ORGANISATION/NAME as on the hub")
        return value

    @field_validator("revision")
    @classmethod
    def _is_whole(cls, value: str) -> str:
        if not _REVISION.fullmatch(value) or ".." in value:
            raise ValueError("expected a commit of 40 hex digits, a tag or a branch")
        if _ABBREVIATED.fullmatch(value) and not _COMMIT.fullmatch(value):
            raise ValueError(f"expected all 40 lower-case hex digits of the commit, found {len(value)} digits")
        return value

    @field_validator("commit")
    @classmethod
    def _is_a_commit(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if not _COMMIT.fullmatch(value):
            raise ValueError("expected the 40 lower-case hex digits of a commit")
        revision = info.data.get("revision")
        if isinstance(revision, str) and _COMMIT.fullmatch(revision) and revision != value:
            raise ValueError(f"expected the commit that revision names ({revision}), or no commit at all")
        return value

    @property
    def pinned(self) -> str | None:
        """The only commit that will do; None for a branch or tag that may move."""
        return self.revision if _COMMIT.fullmatch(self.revision) else self.commit

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


class ModelFolder(Strict):
    """A model in a folder, with what is said about it: ``{path: folder, trust_remote_code: true}``."""

    path: Path
    trust_remote_code: bool = False
    """As of a ``ModelReference``."""

    def __str__(self) -> str:
        return str(self.path)


class UnresolvedModel(ModelReference):
    """A reference that has no folder, and why. What is written down is the reference: the reason is that of a day and
    a machine."""

    reason: str


class Source(Strict):
    """Where a model of a profile came from."""

    repo: str
    revision: str
    commit: str


def _shape(value: object) -> str:
    if isinstance(value, ModelFolder) or (isinstance(value, Mapping) and "path" in value):
        return "folder"
    return "hub" if isinstance(value, Mapping | ModelReference) else "path"


ModelPath = Annotated[
    Annotated[Path, Tag("path")] | Annotated[ModelFolder, Tag("folder")] | Annotated[ModelReference, Tag("hub")],
    Discriminator(_shape),
]
"""What a profile may give for a model: a folder, or a name on the hub."""


def folder_of(value: Path | ModelFolder | ModelReference | None) -> Path | None:
    """The folder of a model; None for one that is named on the hub, and for none."""
    if isinstance(value, ModelFolder):
        return value.path
    return value if isinstance(value, Path) else None


def local_folder(value: Path | ModelFolder | ModelReference, role: str) -> Path:
    """The folder of a model. Raises ModelUnavailableError, with the reason, when a reference has none."""
    folder = folder_of(value)
    if folder is not None:
        return folder
    if isinstance(value, UnresolvedModel):
        raise ModelUnavailableError(f"{role}: {value.reason}")
    raise ModelUnavailableError(
        f"{role}: expected the model {value} in a local folder, but it was not looked up; load the profile anew"
    )


class Snapshot(NamedTuple):
    """A model in the local cache."""

    folder: Path
    commit: str


class Remote(NamedTuple):
    """What the hub says about a model."""

    commit: str
    size: int
    """Bytes of the files that are needed."""
    missing: int
    """Bytes of them that the cache lacks."""
    gated: bool


class Hub:
    """The hub and the local cache of it. ``endpoint`` and ``cache`` default to HF_ENDPOINT and HF_HOME."""

    def __init__(self, endpoint: str | None = None, cache: Path | None = None) -> None:
        from huggingface_hub import constants

        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.cache = cache or Path(constants.HF_HUB_CACHE)

    # --- the cache ------------------------------------------------------------------------------------------------

    def cached(self, reference: ModelReference, role: str) -> Snapshot | None:
        """The complete snapshot of a reference in the cache; asks nobody.

        Raises ProfileError when the cache knows that a pinned branch or tag moved.
        """
        commit = self._cached_commit(reference)
        if commit is not None:
            _refuse_moved(reference, commit)
        commit = reference.pinned or commit
        if commit is None:
            return None
        folder = self.snapshot_folder(reference.repo, commit)
        return Snapshot(folder, commit) if self._is_complete(reference, commit, role) else None

    def snapshot_folder(self, repo: str, commit: str) -> Path:
        return self._repository(repo) / "snapshots" / commit

    def _repository(self, repo: str) -> Path:
        return self.cache / f"models--{repo.replace('/', '--')}"

    def _cached_commit(self, reference: ModelReference) -> str | None:
        """The commit that a branch or tag was when it was fetched last."""
        ref = self._repository(reference.repo) / "refs" / reference.revision
        try:
            commit = ref.read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def _is_complete(self, reference: ModelReference, commit: str, role: str) -> bool:
        """Whether no wanted file is missing: by the library's own list where it keeps one, and by our needs."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            snapshot_download(
                reference.repo,
                revision=commit,
                cache_dir=self.cache,
                local_files_only=True,
                allow_patterns=list(_files_of(reference, role)),
                ignore_patterns=list(_NOT_WANTED),
            )
        except (LocalEntryNotFoundError, OSError):
            return False
        folder = self.snapshot_folder(reference.repo, commit)
        code_is_there = not reference.trust_remote_code or not lacking_code(folder)
        return code_is_there and lacking(folder, role) is None

    def free(self) -> int:
        """Free bytes where the cache lies."""
        folder = self.cache
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free

    # --- the hub --------------------------------------------------------------------------------------------------

    @property
    def has_token(self) -> bool:
        """Whether requests carry a token: HF_TOKEN, or a stored login."""
        from huggingface_hub import get_token

        return get_token() is not None

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint)

    def look(self, reference: ModelReference, role: str) -> Remote:
        """What the hub has. Raises ProfileError when repository or revision do not exist or the revision moved,
        EnvironmentFault when the hub does not answer."""
        info = self._ask(
            reference,
            lambda: self._api().model_info(
                reference.repo, revision=reference.revision, files_metadata=True, timeout=_TIMEOUT_S
            ),
        )
        if info.sha is None:
            raise EnvironmentFault(f"{reference}: expected a commit from {self.endpoint}, found none; try again later")
        _refuse_moved(reference, info.sha)
        blobs = self._repository(reference.repo) / "blobs"
        size = missing = 0
        for file in _wanted(info.siblings or (), reference, role):
            size += file.size or 0
            name = file.lfs.sha256 if file.lfs is not None else file.blob_id
            missing += 0 if name and (blobs / name).is_file() else file.size or 0
        return Remote(info.sha, size, missing, bool(info.gated))

    def check_access(self, reference: ModelReference) -> None:
        """Raises EnvironmentFault when the model is gated and the token, or the lack of one, does not open it."""
        self._ask(reference, lambda: self._api().auth_check(reference.repo))

    def download(self, reference: ModelReference, role: str) -> Snapshot:
        """Fetch what the cache lacks, and return the snapshot. Raises what ``look`` and ``check_access`` raise, and
        EnvironmentFault when the disk is too small."""
        from huggingface_hub import snapshot_download

        remote = self.look(reference, role)
        if remote.gated:
            self.check_access(reference)
        self._require_room(reference, remote)
        folder = self._ask(
            reference,
            lambda: snapshot_download(
                reference.repo,
                revision=reference.revision,
                cache_dir=self.cache,
                endpoint=self.endpoint,
                allow_patterns=list(_files_of(reference, role)),
                ignore_patterns=list(_NOT_WANTED),
            ),
        )
        _refuse_moved(reference, Path(folder).name)
        why = lacking(Path(folder), role)
        if why is not None:
            raise ProfileError(f"{reference}: expected a model for vLLM, found {why}; name another repository")
        if reference.trust_remote_code and (gone := lacking_code(Path(folder))):
            raise ProfileError(
                f"{reference}: expected {', '.join(gone)} beside the config that names it (auto_map), found none in "
                "its repository; copy the model into a folder, take the entry out, and name that folder"
            )
        return Snapshot(Path(folder), Path(folder).name)

    def _require_room(self, reference: ModelReference, remote: Remote) -> None:
        free = self.free()
        if remote.missing > free:
            raise EnvironmentFault(
                f"{reference}: expected {remote.missing / GIB:.1f} GiB of free disk at {self.cache}, found "
                f"{free / GIB:.1f} GiB; free some, or let HF_HOME name a larger disk"
            )

    def dataset_commit(self, repo: str, revision: str) -> str:
        """The commit that a revision of a dataset is. Raises as ``look`` does."""
        name = ModelReference(repo=repo, revision=revision)
        info = self._ask(
            name, lambda: self._api().dataset_info(repo, revision=revision, timeout=_TIMEOUT_S), kind="datasets/"
        )
        if info.sha is None:
            raise EnvironmentFault(f"{name}: expected a commit from {self.endpoint}, found none; try again later")
        return str(info.sha)

    def _ask(self, reference: ModelReference, question: Callable[[], Any], kind: str = "") -> Any:
        """The hub's answer. The library's failures differ by version and transport, so that all are explained here."""
        try:
            return question()
        except HarnessError:
            raise
        except Exception as error:
            raise self._explain(reference, error, kind) from None

    def _explain(self, reference: ModelReference, error: Exception, kind: str) -> HarnessError:
        from huggingface_hub import errors

        page = f"{self.endpoint}/{kind}{reference.repo}"
        if isinstance(error, errors.GatedRepoError):
            found = "a token that was not granted access" if self.has_token else "no token"
            return EnvironmentFault(
                f"{reference}: expected a token (HF_TOKEN) with access to this gated repository, found {found}; ask "
                f"for access at {page} and set HF_TOKEN"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            token = "with the token in use" if self.has_token else "without a token"
            return ProfileError(
                f"{reference}: expected a repository at {page}, found none {token}; correct `repo`, or set HF_TOKEN "
                "when it is private"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ProfileError(
                f"{reference}: expected a commit, tag or branch {reference.revision!r} at {page}, found none; correct "
                "`revision`"
            )
        if isinstance(error, errors.OfflineModeIsEnabled):
            return self._unreachable(reference, "HF_HUB_OFFLINE is set")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            return EnvironmentFault(
                f"{reference}: expected {self.endpoint} to accept the token, found status {status}; renew HF_TOKEN"
            )
        if isinstance(error, OSError) and error.errno is not None and status is None and error.filename is not None:
            return EnvironmentFault(
                f"{reference}: expected to write the cache {self.cache}, found {error.strerror}; let HF_HOME name a "
                "folder with room that you may write to"
            )
        return self._unreachable(reference, f"status {status}" if status else _words(error))

    def _unreachable(self, reference: ModelReference, found: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"{reference}: not in the cache {self.cache}, and expected an answer of {self.endpoint}, found {found}; "
            "see to the network, or fill the cache elsewhere and let HF_HOME name it"
        )


def _words(error: Exception) -> str:
    """An error in one line, without a token that a library may have put into it."""
    from huggingface_hub import get_token

    text = " ".join(f"{type(error).__name__} {error}".split())
    token = get_token()
    return (text.replace(token, "***") if token else text)[:200]


def _refuse_moved(reference: ModelReference, commit: str) -> None:
    if reference.pinned is not None and reference.pinned != commit:
        raise ProfileError(
            f"{reference}: expected commit {reference.pinned}, found that {reference.revision!r} is now {commit}; "
            "review the change, then correct `commit` and record baselines anew, or let `revision` name the old commit"
        )


def _files_of(reference: ModelReference, role: str) -> tuple[str, ...]:
    """Patterns of the files that are fetched; code only of a model whose code may run."""
    files = _TOKENIZER_FILES if role == TOKENIZER else _MODEL_FILES
    return (*files, *_CODE_FILES) if reference.trust_remote_code else files


def _wanted(siblings: Any, reference: ModelReference, role: str) -> list[Any]:
    from huggingface_hub.utils import filter_repo_objects

    return list(
        filter_repo_objects(
            siblings,
            allow_patterns=list(_files_of(reference, role)),
            ignore_patterns=list(_NOT_WANTED),
            key=lambda file: str(file.rfilename),
        )
    )


_NAMING = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files of a model in which ``auto_map`` names code."""


def code_of(folder: Path) -> list[str]:
    """What a model's files name as its code, as ``module.Class``, or ``organisation/name--module.Class`` of another
    repository."""
    found: set[str] = set()
    for name in _NAMING:
        try:
            raw = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        named = raw.get("auto_map") if isinstance(raw, dict) else None
        # A tokenizer's are lists: the slow one and the fast one, either of which may be missing.
        for value in named.values() if isinstance(named, dict) else [named]:
            found |= {str(v) for v in (value if isinstance(value, list) else [value]) if v}
    return sorted(found)


def lacking_code(folder: Path) -> list[str]:
    """Files of code that a model names as its own and has not got."""
    modules = {named.partition(".")[0] for named in code_of(folder) if "--" not in named}
    return sorted(f"{m}.py" for m in modules if not (folder / f"{m}.py").is_file())


def lacking(folder: Path, role: str) -> str | None:
    """What a model folder lacks for its role, in words; None when it is complete. Its code is not looked at."""
    if role == TOKENIZER:
        return None if (folder / "tokenizer_config.json").is_file() else "no tokenizer_config.json"
    if not (folder / "config.json").is_file():
        return "no config.json"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None if any(f.is_file() for f in folder.glob("*.safetensors")) else "no *.safetensors"
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return f"a damaged {index.name}"
    gone = sorted(n for n in named if not (folder / str(n)).is_file())
    return f"{len(gone)} of {len(named)} weight files missing" if gone else None


def damaged_files(folder: Path) -> list[str]:
    """Names of files whose contents do not have the hash that the cache filed them under. Reads everything."""
    return sorted(
        p.name for p in folder.iterdir() if (named := sha256_named(p)) is not None and sha256_file(p.resolve()) != named
    )


# --- profiles --------------------------------------------------------------------------------------------------------


def references_of(profile: Profile) -> dict[str, ModelReference]:
    """The models of a profile that have no folder yet, by role: target, tokenizer, or the kind of a method."""
    given: dict[str, Path | ModelFolder | ModelReference | None] = {
        TARGET: profile.target,
        TOKENIZER: profile.tokenizer,
    }
    given |= {m.kind: m.drafter for m in profile.methods if m.kind != "none"}
    return {role: value for role, value in given.items() if isinstance(value, ModelReference)}


def unavailable(profile: Profile) -> dict[str, str]:
    """Why models of a localised profile cannot be used, by role."""
    return {r: v.reason for r, v in references_of(profile).items() if isinstance(v, UnresolvedModel)}


def reason_for(profile: Profile, kind: str) -> str | None:
    """Why a method of a localised profile cannot be run for lack of a model; None when it can."""
    missing = unavailable(profile)
    return next((missing[role] for role in (TARGET, TOKENIZER, kind) if role in missing), None)


def localise(profile: Profile, name: str = "", hub: Hub | None = None) -> Profile:
    """The profile with folders of the cache in the place of references, and where they came from in ``sources``.

    Asks no hub and never raises: a reference that cannot be turned into a folder becomes an ``UnresolvedModel`` with
    the reason, and using it raises ModelUnavailableError. ``name`` is what the user calls the profile.
    """
    references = references_of(profile)
    if not references:
        return profile
    hub = hub or Hub()
    folders: dict[str, Path | ModelFolder | ModelReference] = {}
    sources = dict(profile.sources)
    for role, reference in references.items():
        # Without a tokenizer of its own, the profile takes the target's.
        also_tokenizer = role == TARGET and profile.tokenizer is None
        found = _look_up(hub, reference, role, also_tokenizer, name or profile.name)
        if isinstance(found, Snapshot):
            trusted = reference.trust_remote_code
            folders[role] = ModelFolder(path=found.folder, trust_remote_code=trusted) if trusted else found.folder
            sources[role] = Source(repo=reference.repo, revision=reference.revision, commit=found.commit)
        else:
            folders[role] = UnresolvedModel(**reference.model_dump(exclude={"reason"}), reason=found)
    changes: dict[str, Any] = {r: folders[r] for r in (TARGET, TOKENIZER) if r in folders}
    methods = tuple(
        m.model_copy(update={"drafter": folders[m.kind]}) if m.kind in folders else m for m in profile.methods
    )
    return profile.model_copy(update={**changes, "methods": methods, "sources": sources})


def _look_up(hub: Hub, reference: ModelReference, role: str, also_tokenizer: bool, name: str) -> Snapshot | str:
    """The snapshot of a reference, or why there is none."""
    try:
        found = hub.cached(reference, role)
    except HarnessError as error:
        return str(error)
    if found is None:
        return (
            f"expected {reference} in the cache {hub.cache}, found no complete snapshot; run "
            f"`harness models {name} --download`"
        )
    why = lacking(found.folder, TOKENIZER) if also_tokenizer else None
    if why is not None:
        return f"expected a tokenizer with {reference}, found {why}; name one in the profile (tokenizer:)"
    return found


class Model(NamedTuple):
    """One model of a profile, for ``harness models``."""

    role: str
    reference: ModelReference
    commit: str | None
    size: int | None
    gated: bool | None
    cached: bool
    missing: int | None
    """Bytes that would have to be fetched."""
    error: HarnessError | None
    """Why it cannot be used or fetched; None when all is well."""


def survey(
    profile: Profile, hub: Hub, download: bool = False, methods: Mapping[str, Collection[str]] | None = None
) -> list[Model]:
    """Every reference of a profile as it was written, once, as cache and hub have it; one failure does not hide the
    others. With ``download`` what is missing is fetched. ``methods`` are the methods, by variant, whose models are
    wanted; None wants all."""
    wanted = {
        (str(reference), reference.commit): (role, reference)
        for part in profile.written_parts
        if methods is None or part.variant in methods
        for role, reference in references_of(part).items()
        if methods is None or role in (TARGET, TOKENIZER, *methods[part.variant])
    }
    return [_survey_one(hub, role, reference, download) for role, reference in wanted.values()]


def _survey_one(hub: Hub, role: str, reference: ModelReference, download: bool) -> Model:
    snapshot: Snapshot | None = None
    remote: Remote | None = None
    error: HarnessError | None = None
    try:
        snapshot = hub.cached(reference, role)
        remote = hub.look(reference, role)
        if remote.gated and snapshot is None:
            hub.check_access(reference)
        if download and (snapshot is None or snapshot.commit != remote.commit):
            snapshot = hub.download(reference, role)
    except EnvironmentFault as fault:
        # What lies in the cache can be used without the hub.
        error = None if snapshot is not None and remote is None else fault
    except HarnessError as fault:
        error = fault
    commit = snapshot.commit if snapshot is not None else remote.commit if remote is not None else None
    size = remote.size if remote is not None else _size(snapshot.folder) if snapshot is not None else None
    missing = 0 if snapshot is not None else remote.missing if remote is not None else None
    return Model(role, reference, commit, size, remote.gated if remote else None, snapshot is not None, missing, error)


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
