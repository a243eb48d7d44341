"""Models of a profile in the place of another: a drafter as target, or the target as its own drafter."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.profiles.kv_layout import config_in
from harness.profiles.methods import Method
from harness.profiles.model import Profile
from harness.profiles.model_reference import Given, ModelReference, PackagedModel, described_in

_DRAFTS = re.compile(
    r"P?[Ee]agle3?[A-Z]\w*ForCausalLM|\w+ForCausalLMEagle3|\w+MTP(?:Model)?|\w+(?:Draft|DSpark)Model|DFlash\w+|MedusaModel"
    r"|MLPSpeculator\w+"
)
"""Architectures of drafters alone, as vLLM 0.32.0 calls them (``_SPECULATIVE_DECODING_MODELS``). Some drafters have the
name of a whole model instead, so that a name which is not among these tells nothing."""


def misplaced(profile: Profile) -> Iterator[str]:
    """Yield, as sentences, which models of a plain profile cannot do what they are named for, as far as they tell."""
    named = config_in(described_in(profile.target)).get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if _DRAFTS.fullmatch(architecture):
        yield (
            f"target: expected the model that answers, found {profile.target}, which can only draft ({architecture} in "
            "its config.json); name the model that it drafts for, and this one as its drafter"
        )
    for method in profile.methods:
        yield from dict.fromkeys(p for m in (method, method.on_prefill) for p in _target_as_drafter(profile.target, m))


def _target_as_drafter(target: Given, method: Method) -> Iterator[str]:
    """Yield that a method's drafter is the target, unless it drafts with a whole model or with layers of the target."""
    apart = method.traits.drafter == "needed" and method.vllm_method != "draft_model"
    if apart and method.drafter is not None and _known_as(method.drafter) == _known_as(target):
        yield (
            f"drafter of {method.kind}: expected a model that was trained to draft for the target, found the target "
            f"itself ({method.drafter}); name the drafter, or leave the method out"
        )


def _known_as(model: Given) -> tuple[str, ...]:
    """Return what tells a model from others."""
    if (folder := described_in(model)) is not None:
        return (str(folder.resolve()),)
    if isinstance(model, ModelReference):
        return (model.repo, model.revision)
    return (model.package, model.version, model.file) if isinstance(model, PackagedModel) else (str(model),)
