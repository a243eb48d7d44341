"""The Hugging Face hub and its local cache, by huggingface_hub: looking up, checking and downloading models.

Loading a profile turns references into folders of the cache without contacting the hub; a model that is not there makes
only the cells that need it UNKNOWN. Only ``harness models`` and ``harness doctor`` ask the hub about models, and only
``harness models --download`` downloads any.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import redact
from harness.errors import EnvironmentFault, HarnessError, ProfileError
from harness.profiles.model_reference import COMMIT, TOKENIZER, ModelReference, lacking, lacking_code
from harness.util.extras import why_missing
from harness.util.files import free_at, sha256_file, sha256_named

if TYPE_CHECKING:
    from huggingface_hub import HfApi

GIB = 2**30
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_TIMEOUT_S = 8.0
"""Seconds that a question waits for the hub: without a network, the next thing that can be done is worth more."""
_ERRNO = re.compile(r"\[Errno -?[0-9]+\] ")


class Remote(NamedTuple):
    """A model as the hub describes it."""

    commit: str
    size: int
    """Bytes of the files that are needed."""
    missing: int
    """How many of these bytes the cache lacks."""
    gated: bool


class Hub:
    """The hub and its local cache. ``endpoint`` and ``cache`` default to HF_ENDPOINT and HF_HOME."""

    def __init__(self, endpoint: str | None = None, cache: Path | None = None) -> None:
        try:
            from huggingface_hub import constants

            usual, home, self._usable = constants.ENDPOINT, Path(constants.HF_HUB_CACHE), True
        except ModuleNotFoundError:
            self._usable = False
            # A plan needs no models, so it is made without the library, too; nothing counts as cached then.
            usual = os.environ.get("HF_ENDPOINT", "the hub")
            home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
        self.endpoint, self.cache = (endpoint or usual).rstrip("/"), cache or home

    def cached(self, reference: ModelReference, role: str) -> Path | None:
        """Return the complete snapshot of a reference in the cache, a folder named after its commit, or None.

        This does not contact the hub. Raises ProfileError when the cache shows that a pinned branch or tag has moved.
        """
        commit = self._cached_commit(reference)
        if commit is not None:
            _refuse_moved(reference, commit)
        commit = reference.pinned or commit
        if commit is None or not self._usable:
            return None
        try:
            self._snapshot(reference, role, commit, local_files_only=True)
        except OSError:
            return None
        folder = self.snapshot_folder(reference.repo, commit)
        incomplete = lacking(folder, role) or (reference.trust_remote_code and lacking_code(folder))
        return None if incomplete else folder

    def _cached_commit(self, reference: ModelReference) -> str | None:
        """Return the commit of a branch or tag when it was last downloaded."""
        try:
            ref = self._repository(reference.repo) / "refs" / reference.revision
            commit = ref.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def _snapshot(self, reference: ModelReference, role: str, revision: str, **how: Any) -> Path:
        from huggingface_hub import snapshot_download

        wanted = _patterns(reference, role)
        return Path(snapshot_download(reference.repo, revision=revision, cache_dir=self.cache, **wanted, **how))

    def _repository(self, repo: str) -> Path:
        return self.cache / f"models--{repo.replace('/', '--')}"

    def snapshot_folder(self, repo: str, commit: str) -> Path:
        return self._repository(repo) / "snapshots" / commit

    def free(self) -> int:
        """Return the free bytes on the file system of the cache."""
        return free_at(self.cache)

    @property
    def has_token(self) -> bool:
        """Whether requests carry a token: HF_TOKEN, or a stored login."""
        if not self._usable:
            return False
        from huggingface_hub import get_token

        return get_token() is not None

    def _api(self) -> HfApi:
        if not self._usable:
            raise EnvironmentFault(why_missing("huggingface_hub"))
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint)

    def look(self, reference: ModelReference, role: str) -> Remote:
        """Ask the hub about a model. Raises ProfileError when repository or revision do not exist or the revision has
        moved, and EnvironmentFault when the hub does not answer."""
        info = self._info(reference, self._api().model_info, files_metadata=True)
        _refuse_moved(reference, info.sha)
        from huggingface_hub.utils import filter_repo_objects

        blobs = self._repository(reference.repo) / "blobs"
        size = missing = 0
        files = info.siblings or ()
        for file in filter_repo_objects(files, key=lambda f: str(f.rfilename), **_patterns(reference, role)):
            size += file.size or 0
            name = file.lfs.sha256 if file.lfs is not None else file.blob_id
            missing += 0 if name and (blobs / name).is_file() else file.size or 0
        return Remote(info.sha, size, missing, bool(info.gated))

    def check_access(self, reference: ModelReference) -> None:
        """Raise EnvironmentFault when the model is gated and there is no token with access to it."""
        self._ask(reference, lambda: self._api().auth_check(reference.repo))

    def download(self, reference: ModelReference, role: str) -> Path:
        """Download what the cache lacks and return the snapshot. Raises what ``look`` and ``check_access`` raise, and
        EnvironmentFault when the disk is too small."""
        remote = self.look(reference, role)
        if remote.gated:
            self.check_access(reference)
        if remote.missing > self.free():
            raise EnvironmentFault(
                f"{reference}: expected {remote.missing / GIB:.1f} GiB of free disk at {self.cache}, found "
                f"{self.free() / GIB:.1f} GiB; make room, or set HF_HOME to a larger disk"
            )
        fetch = partial(self._snapshot, reference, role, reference.revision, endpoint=self.endpoint)
        folder: Path = self._ask(reference, fetch)
        _refuse_moved(reference, folder.name)
        if why := lacking(folder, role):
            raise ProfileError(f"{reference}: expected a model for vLLM, found {why}; name another repository")
        if reference.trust_remote_code and (gone := lacking_code(folder)):
            raise ProfileError(
                f"{reference}: expected {', '.join(gone)} beside the config that names it (auto_map), found none in "
                "its repository; copy the model into a folder, remove the entry there, and name that folder"
            )
        return folder

    def dataset_commit(self, repo: str, revision: str) -> str:
        """Return the commit of a revision of a dataset. Raises as ``look`` does."""
        info = self._info(ModelReference(repo=repo, revision=revision), self._api().dataset_info, "datasets/")
        return str(info.sha)

    def _info(self, reference: ModelReference, question: Callable[..., Any], kind: str = "", **how: Any) -> Any:
        """Return the hub's description of a repository, which has a commit."""
        asked = partial(question, reference.repo, revision=reference.revision, timeout=_TIMEOUT_S, **how)
        info = self._ask(reference, asked, kind)
        if info.sha is None:
            raise self._unreachable(reference, "no commit")
        return info

    def _ask(self, reference: ModelReference, question: Callable[[], Any], kind: str = "") -> Any:
        """Return the hub's answer to a question.

        Which exceptions the library raises depends on its version and transport, so all are explained here.
        """
        try:
            return question()
        except HarnessError:
            raise
        except Exception as error:
            raise self._explain(reference, error, kind) from None

    def _explain(self, reference: ModelReference, error: Exception, kind: str) -> HarnessError:
        from huggingface_hub import errors

        page = f"{self.endpoint}/{kind}{reference.repo}"
        status = getattr(getattr(error, "response", None), "status_code", None)
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
                "if it is private"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            revision = f"a commit, tag or branch {reference.revision!r}"
            return ProfileError(f"{reference}: expected {revision} at {page}, found none; correct `revision`")
        if status in (401, 403):
            return EnvironmentFault(
                f"{reference}: expected {self.endpoint} to accept the token, found status {status}; renew HF_TOKEN"
            )
        if isinstance(error, OSError) and error.filename is not None and status is None:
            return EnvironmentFault(
                f"{reference}: the cache {self.cache} cannot be written ({error.strerror}); set HF_HOME to a "
                "writable folder with room"
            )
        # Redacted before it is cut: a part of a token is not recognised as one.
        found = redact.text(" ".join(_ERRNO.sub("", str(error) or type(error).__name__).split()))[:200]
        if isinstance(error, errors.OfflineModeIsEnabled):
            found = "HF_HUB_OFFLINE is set"
        return self._unreachable(reference, f"status {status}" if status else found)

    def _unreachable(self, reference: ModelReference, found: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"{reference}: not in the cache {self.cache}; expected an answer from {self.endpoint}, found {found}; "
            "check the network, or fill a cache elsewhere and set HF_HOME to it"
        )


def _refuse_moved(reference: ModelReference, commit: str) -> None:
    if reference.pinned is not None and reference.pinned != commit:
        raise ProfileError(
            f"{reference}: {reference.revision!r} is now {commit}, not {reference.pinned}; review the change, then "
            "correct `commit` and record new baselines, or set `revision` to the old commit"
        )


def _patterns(reference: ModelReference, role: str) -> dict[str, Any]:
    """Return the patterns of the files that are needed; code only of a model whose code may run."""
    weights = () if role == TOKENIZER else ("*.safetensors",)
    code = ("*.py",) if reference.trust_remote_code else ()
    # fnmatch's * crosses slashes. vLLM loads files at the top level; folders hold other formats of the same weights.
    return {"allow_patterns": [*_TOKENIZER_FILES, *weights, *code], "ignore_patterns": ["*/*"]}


def damaged_files(folder: Path) -> list[str]:
    """Return the names of files whose contents do not match the hash that names them in the cache. Reads everything."""
    return sorted(
        p.name for p in folder.iterdir() if (named := sha256_named(p)) is not None and sha256_file(p.resolve()) != named
    )


def look_up(hub: Hub, reference: ModelReference, role: str, also_tokenizer: bool, name: str) -> Path | str:
    """Return the snapshot of a reference in the cache, or the reason why there is none.

    ``name`` is what the user calls the profile.
    """
    try:
        found = hub.cached(reference, role)
    except HarnessError as error:
        return str(error)
    if found is None:
        # A plain text may also be a folder that is not there.
        folder = "" if reference.pinned or reference.revision != "main" else ", or correct the path if it is a folder"
        return (
            f"expected {reference} in the cache {hub.cache}, found no complete snapshot; run "
            f"`harness models --profile {shlex.quote(name)} --download`{folder}"
        )
    why = lacking(found, TOKENIZER) if also_tokenizer else None
    if why is not None:
        return f"expected a tokenizer with {reference}, found {why}; name one in the profile (tokenizer:)"
    return found
