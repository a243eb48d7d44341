"""Making the models that a run needs and that can be made: those in packages are fetched, folders at rest expanded.

Both are pinned by hashes, so what is made can only be what the profile means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from harness.errors import HarnessError
from harness.profiles import at_rest, packages
from harness.profiles.availability import makeable, unavailable
from harness.profiles.converted import Tell
from harness.profiles.model import Profile, forget_parts
from harness.profiles.model_reference import TARGET, TOKENIZER, FolderAtRest, PackagedModel


def obtain_all(profile: Profile, methods: Mapping[str, Collection[str]], tell: Tell) -> bool:
    """Make what a loaded profile lacks; return whether anything was made. ``methods`` names those wanted, by variant.

    Raises what ``obtain`` raises for a model that every cell needs. Without another one, its cells say what is missing;
    ``tell`` gets the reason.
    """
    made = False
    for part in profile.parts:
        missing = unavailable(part)
        wanted = (TARGET, TOKENIZER, *methods.get(part.variant, ())) if part.variant in methods else ()
        for role, model in makeable(part).items():
            if role not in missing or role not in wanted:
                continue
            try:
                obtain(model, tell)
                made = True
            except HarnessError as error:
                if role in (TARGET, TOKENIZER) and not profile.axes:
                    raise
                tell(f"{role}: {error}")
    if made:
        forget_parts()
    return made


def obtain(model: PackagedModel | FolderAtRest, tell: Tell) -> Path:
    """Return the folder of a model, which is made if it is not there. Raises ProfileError or EnvironmentFault."""
    return packages.obtain(model, tell) if isinstance(model, PackagedModel) else at_rest.expand(model.path, tell)
