"""Code that comes with a model: run only if the profile trusts that model, and mentioned in every report.

Weights are loaded as safetensors, which hold numbers alone; a pickled checkpoint (``*.bin``, ``*.pt``) can run any code
when it is read. A repository may also contain Python files that its config names (``auto_map``); vLLM runs them with
``--trust-remote-code``, which applies to the whole engine: target, tokenizer and drafter at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import EnvironmentFault, UsageError
from harness.profiles.model_reference import Given as Model
from harness.profiles.model_reference import PackagedModel, code_of, folder_of, lacking_code

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MODEL_KEYS = ("target", "tokenizer", "drafter")

Given = Model | None


def only_pickled(folder: Path) -> str | None:
    """Return the name of a pickled weight file of a folder without safetensors, or None."""
    if any(folder.glob("*.safetensors")):
        return None
    return next((f.name for pattern in _PICKLED for f in sorted(folder.glob(pattern))), None)


def _trusted(given: Given) -> bool:
    # A package has weights alone: none of its code is taken.
    return given is not None and not isinstance(given, Path | PackagedModel) and given.trust_remote_code


def trusts_code(models: Mapping[str, Given]) -> bool:
    """Return whether engines that load these models get ``--trust-remote-code``."""
    return any(map(_trusted, models.values()))


def require_loadable(models: Mapping[str, Given]) -> None:
    """Raise EnvironmentFault when an engine must not load these models, given by role.

    Call it before every start: only then do the models of the hub, of variants and of recorded profiles all have
    folders.
    """
    for problem in problems(models):
        raise EnvironmentFault(problem)


def problems(models: Mapping[str, Given]) -> Iterator[str]:
    """Yield why an engine must not load these models, given by role, as far as they are on this machine."""
    for role, given in models.items():
        folder = folder_of(given)
        if folder is None:
            continue
        pickled = only_pickled(folder) if role != "tokenizer" else None
        if pickled is not None:
            yield (
                f"{role}: expected weights as *.safetensors in {folder}, found only {pickled}: a pickled checkpoint "
                "can run code when it is read; convert it"
            )
        if _trusted(given):
            yield from _unfit_code(role, folder)
        if trusts_code(models) and not _trusted(given) and code_of(folder):
            yield (
                f"{role}: expected trust_remote_code: true for {folder} too, which comes with its own code "
                "(auto_map), since another model of the same engine has it and vLLM has one switch for all of "
                "them; review its code, then set it for all of these models or for none"
            )


def _unfit_code(role: str, folder: Path) -> Iterator[str]:
    """Yield what is wrong with the code of a trusted model."""
    elsewhere = sorted({named.partition("--")[0] for named in code_of(folder) if "--" in named})
    if elsewhere:
        yield (
            f"{role}: expected {folder} to contain its own code, found code of {', '.join(elsewhere)} (auto_map), "
            "which would be fetched at its commit of that day; copy the model and the reviewed files into a folder, "
            "name them in its config, and use that folder"
        )
    gone = lacking_code(folder)
    if gone:
        yield f"{role}: expected {', '.join(gone)} in {folder}, which its config names (auto_map), found none; add them"


def trusted_models(profile: Mapping[str, Any]) -> list[str]:
    """Return role and name of each model whose code a profile, given as data, allows to run, axes included."""
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
    """Return the line for the head of a report, or "" when no code of a model was run."""
    models = trusted_models(profile)
    return f"remote code: {', '.join(models)}" if models else ""


def require_trusted(profile: Mapping[str, Any], trusted: bool) -> None:
    """Raise UsageError when a recorded profile would run code of models without the user's consent now."""
    models = trusted_models(profile)
    if models and not trusted:
        raise UsageError(
            f"the recorded run allows code of its models to run ({', '.join(models)}); review the code, then add "
            "--trust-recorded-code"
        )
