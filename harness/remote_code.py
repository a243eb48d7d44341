"""Code that comes with a model: run only where a profile says so for that model, and said in every report.

Weights are loaded as safetensors, which hold numbers alone; a pickled checkpoint (``*.bin``, ``*.pt``) runs what it
likes when it is read. A repository may also bring Python files that its config names (``auto_map``); vLLM runs them
with ``--trust-remote-code``, a switch of the whole engine: target, tokenizer and drafter at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import EnvironmentFault, UsageError
from harness.hub import ModelFolder, ModelReference, code_of, folder_of, lacking_code

if TYPE_CHECKING:
    from harness.config import Method, Profile

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MODEL_KEYS = ("target", "tokenizer", "drafter")

Given = Path | ModelFolder | ModelReference | None


def brings_code(folder: Path) -> bool:
    """Whether a model's files name code of its own."""
    return bool(code_of(folder))


def only_pickled(folder: Path) -> str | None:
    """A pickled weight file of a folder that has no safetensors; None when all is well."""
    if any(folder.glob("*.safetensors")):
        return None
    return next((f.name for pattern in _PICKLED for f in sorted(folder.glob(pattern))), None)


def _models(profile: Profile, method: Method) -> dict[str, Given]:
    """What an engine of a method loads, by what it is."""
    drafter = None if method.kind == "none" else method.drafter
    return {"target": profile.target, "tokenizer": profile.tokenizer, f"drafter of {method.kind}": drafter}


def _trusted(given: Given) -> bool:
    return given is not None and not isinstance(given, Path) and given.trust_remote_code


def trusts_code(profile: Profile, method: Method) -> bool:
    """Whether engines of a method get ``--trust-remote-code``."""
    return any(_trusted(given) for given in _models(profile, method).values())


def problems(profile: Profile) -> Iterator[str]:
    """What forbids to load the models of a plain profile, in words, as far as they are on this machine."""
    for method in profile.methods:
        yield from _problems_of(profile, method)


def require_loadable(profile: Profile, method: Method) -> None:
    """Raise EnvironmentFault when an engine of this method must not load its models. Asked before every start, because
    only then all of them are folders: of the hub, of parts of profiles with axes, and of recorded profiles."""
    for problem in _problems_of(profile, method):
        raise EnvironmentFault(problem)


def _problems_of(profile: Profile, method: Method) -> Iterator[str]:
    for role, given in _models(profile, method).items():
        folder = folder_of(given)
        if folder is None:
            continue
        pickled = only_pickled(folder) if role != "tokenizer" else None
        if pickled is not None:
            yield (
                f"{role}: expected weights as *.safetensors in {folder}, found {pickled} and none: a pickled "
                "checkpoint runs code when it is read; convert it"
            )
        if _trusted(given):
            yield from _unfit_code(role, folder)
        if trusts_code(profile, method) and not _trusted(given) and brings_code(folder):
            yield (
                f"{role}: expected trust_remote_code: true for {folder} too, which brings code of its own "
                "(auto_map), since another model of the same engine has it and vLLM has one switch for all of "
                "them; review its code, and say so for this model or for none"
            )


def _unfit_code(role: str, folder: Path) -> Iterator[str]:
    """What is wrong with code that may run."""
    elsewhere = sorted({named.partition("--")[0] for named in code_of(folder) if "--" in named})
    if elsewhere:
        yield (
            f"{role}: expected that {folder} brings its code itself, found code of {', '.join(elsewhere)} (auto_map), "
            "which would be fetched at whatever commit it has that day; copy the reviewed files into a folder of your "
            "own, name them there, and give that folder"
        )
    gone = lacking_code(folder)
    if gone:
        yield f"{role}: expected {', '.join(gone)} in {folder}, which its config names (auto_map), found none; add them"


def trusted_models(profile: Mapping[str, Any]) -> list[str]:
    """The models whose code a profile allows to run, in a profile as data, its axes included: what and which."""
    return list(dict.fromkeys(_walk(profile)))


def _walk(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in _MODEL_KEYS and isinstance(inner, Mapping):
                if inner.get("trust_remote_code"):
                    yield f"{key} {inner.get('path') or '{}@{}'.format(inner.get('repo'), inner.get('revision'))}"
            else:
                yield from _walk(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _walk(inner)


def said(profile: Mapping[str, Any]) -> str:
    """For the head of a report; empty when no code of a model was run."""
    models = trusted_models(profile)
    return f"remote code: {', '.join(models)}" if models else ""


def require_trusted(profile: Mapping[str, Any], trusted: bool) -> None:
    """Raise UsageError when a recorded profile would run code of models and nobody asked for that today."""
    models = trusted_models(profile)
    if models and not trusted:
        raise UsageError(
            f"the recorded run lets code of its models run ({', '.join(models)}); expected --trust-recorded-code for "
            "that, found none; review the code first"
        )
