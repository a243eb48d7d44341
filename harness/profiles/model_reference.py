"""How a profile names a model (a folder, or a repository and revision on the Hugging Face hub), and which files a
model's folder must contain."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Discriminator, Tag, ValidationInfo, field_validator

from harness.errors import ModelUnavailableError
from harness.util.strict import Strict

TARGET, TOKENIZER = "target", "tokenizer"
COMMIT = re.compile(r"[0-9a-f]{40}")
_ABBREVIATED = re.compile(r"[0-9a-fA-F]{7,}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")


class ModelReference(Strict):
    """A model by name: ``{repo: org/name, revision: main, commit: 40 hex digits}``."""

    repo: str
    """Organisation and name on the hub."""
    revision: str
    """A commit (40 hex digits), a tag or a branch."""
    commit: str | None = None
    """The commit that a branch or tag must point to; if it points elsewhere, it has moved and is refused."""
    trust_remote_code: bool = False
    """Let code of this model run in engines (``harness.profiles.remote_code``)."""

    @field_validator("repo")
    @classmethod
    def _has_both_names(cls, value: str) -> str:
        if not _REPO.fullmatch(value) or ".." in value:
            raise ValueError("expected ORGANISATION/NAME, as on the hub")
        return value

    @field_validator("revision")
    @classmethod
    def _is_whole(cls, value: str) -> str:
        if not _REVISION.fullmatch(value) or ".." in value:
            raise ValueError("expected a commit of 40 hex digits, a tag or a branch")
        if _ABBREVIATED.fullmatch(value) and not COMMIT.fullmatch(value):
            raise ValueError(f"expected all 40 lower-case hex digits of the commit, found {len(value)} digits")
        return value

    @field_validator("commit")
    @classmethod
    def _is_a_commit(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if not COMMIT.fullmatch(value):
            raise ValueError("expected the 40 lower-case hex digits of a commit")
        revision = info.data.get("revision")
        if isinstance(revision, str) and COMMIT.fullmatch(revision) and revision != value:
            raise ValueError(f"expected the commit that revision names ({revision}), or no `commit`")
        return value

    @property
    def pinned(self) -> str | None:
        """The only commit that will do; None for a branch or tag that may move."""
        return self.revision if COMMIT.fullmatch(self.revision) else self.commit

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def named_on_hub(text: str, base: Path) -> dict[str, str] | None:
    """Return the reference that a plain text stands for, ORGANISATION/NAME or ORGANISATION/NAME@REVISION, or None.

    A folder of that name below ``base`` goes first. Without a revision it is the branch main, which is not pinned.
    """
    repo, at, revision = text.partition("@")
    if not _REPO.fullmatch(repo) or ".." in repo or bool(at) != bool(revision) or (base / text).exists():
        return None
    return {"repo": repo, "revision": revision or "main"}


class ModelFolder(Strict):
    """A model in a folder, with its settings: ``{path: folder, trust_remote_code: true}``."""

    path: Path
    trust_remote_code: bool = False
    """As in ``ModelReference``."""

    def __str__(self) -> str:
        return str(self.path)


class UnresolvedModel(ModelReference):
    """A reference that has no folder, with the reason. Identities and records use the reference alone: the reason
    depends on the day and the machine."""

    reason: str


class Source(Strict):
    """The origin of a model of a profile."""

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
"""A model in a profile: a folder, or a name on the hub. In a file, a plain text may be either (``named_on_hub``)."""


def folder_of(value: Path | ModelFolder | ModelReference | None) -> Path | None:
    """Return the folder of a model, or None for a reference to the hub or no model."""
    if isinstance(value, ModelFolder):
        return value.path
    return value if isinstance(value, Path) else None


def local_folder(value: Path | ModelFolder | ModelReference, role: str) -> Path:
    """Return the folder of a model. Raises ModelUnavailableError, with the reason, for a reference without one."""
    folder = folder_of(value)
    if folder is not None:
        return folder
    if isinstance(value, UnresolvedModel):
        raise ModelUnavailableError(f"{role}: {value.reason}")
    raise ModelUnavailableError(
        f"{role}: expected the model {value} in a local folder, but it was not looked up; load the profile again"
    )


_NAMING = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files of a model in which ``auto_map`` names code."""


def code_of(folder: Path) -> list[str]:
    """Return the code that a model's files name: ``module.Class``, or ``organisation/name--module.Class`` for code of
    another repository."""
    found: set[str] = set()
    for name in _NAMING:
        try:
            raw = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        named = raw.get("auto_map") if isinstance(raw, dict) else None
        # Tokenizers have lists: the slow and the fast class, either of which may be missing.
        for value in named.values() if isinstance(named, dict) else [named]:
            found |= {str(v) for v in (value if isinstance(value, list) else [value]) if v}
    return sorted(found)


def lacking_code(folder: Path) -> list[str]:
    """Return the missing files among those that a model names as its own code."""
    modules = {named.partition(".")[0] for named in code_of(folder) if "--" not in named}
    return sorted(f"{m}.py" for m in modules if not (folder / f"{m}.py").is_file())


def lacking(folder: Path, role: str) -> str | None:
    """Return what a model folder lacks for its role, in words, or None. Its code is not checked."""
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
