"""Profiles from files: names, paths, what they extend, and whether all that they name is there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import ProfileError, UsageError
from harness.profiles import remote_code
from harness.profiles.availability import localise, models_of
from harness.profiles.axes import MODEL_KEYS, PATH_KEYS, VARIABLE, leaves, merged
from harness.profiles.drafter_models import misplaced
from harness.profiles.engine_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from harness.profiles.model import Profile
from harness.profiles.model_reference import described_in, named_on_hub
from harness.util import json_io, yaml_io
from harness.util.choices import nearest, same_name
from harness.util.invalid_data import describe_validation_error, shown
from harness.util.paths import REPOSITORY, joined
from harness.util.text import listed

SHIPPED_PROFILES = Path(__file__).resolve().parent
_MOST_BYTES = 16 * json_io.MIB
"""Largest config.json of a model that is read."""
MORE, WITHOUT = "more_scenarios", "without_scenarios"
"""Keys of a profile that change the list of scenarios that it inherits."""


def shipped_profile_names() -> list[str]:
    return sorted(p.stem for p in SHIPPED_PROFILES.glob("*.yaml"))


def load_profile(name_or_path: str) -> Profile:
    """Load a shipped profile by name or any profile by path, with models of the hub as folders of the local cache.

    Paths inside a profile are relative to the profile's folder; those of shipped profiles to the repository. A profile
    may name another one that it ``extends``: its own keys override those of the other, mappings key by key, everything
    else as a whole; ``more_scenarios`` are added to the other's, or replace those of the same id, and those named in
    ``without_scenarios`` are left out.

    Raises ProfileError with one sentence per problem. A model of the hub that is missing from the cache is not such a
    problem: see ``localise``.
    """
    profile, path = _read(name_or_path)
    for part in profile.written_parts:
        # A variant without prompts is UNKNOWN while the others run, and prompts of a recipe can be planned unbuilt.
        check_paths(part, path, with_prompts=not profile.axes and part.workload.recipe is None)
    if profile.axes:
        return profile
    local = localise(profile, name_or_path)
    for problem in _model_problems(local):
        raise ProfileError(f"profile {path}: {problem}")
    return local


def read_profile(name_or_path: str, with_prompts: bool = False) -> Profile:
    """Read a profile as written, with its references to the hub. Raises ProfileError.

    Its models need not be on this machine; its prompts must be if ``with_prompts`` is true.
    """
    profile, path = _read(name_or_path)
    for part in profile.written_parts:
        check_paths(part, path, with_prompts)
    return profile


def require_profile(name_or_path: str) -> str:
    """Return the name of a shipped profile as it is spelt, or the path as given; nothing of the profile is read. Raises
    ProfileError unless there is such a profile."""
    found = _profile_path(name_or_path, Path())
    return found.stem if found.parent == SHIPPED_PROFILES else name_or_path


def is_here(name_or_path: str) -> bool:
    """Return whether there is such a profile on this machine: a shipped one, or a file, which is not read."""
    try:
        require_profile(name_or_path)
    except (ProfileError, OSError):
        return False
    return True


def require_here(recorded: str, remedy: str) -> str:
    """Return the profile that a run was recorded with. Raises UsageError, with what to do, if it is not on this
    machine: the user did not name it."""
    if not is_here(recorded):
        raise UsageError(f"the run was recorded with profile {recorded}, which is not here; {remedy}")
    return recorded


def profile_of(text: str, folder: Path) -> Profile:
    """Return the profile that a text would be in a file of this folder. Raises ProfileError."""
    return _validated(_resolve(yaml_io.parse(text), folder), folder / "(not written yet)")


def _is_path(key: str, value: Any, above: str) -> bool:
    """Return whether a key's value is a path: that of a path key, the ``path`` of a model, or the texts of a recipe."""
    inside = (key == "path" and above in MODEL_KEYS) or (key == "file" and above == "recipe") or above == "adapters"
    return isinstance(value, str) and (key in PATH_KEYS or inside)


def _resolve(value: Any, base: Path, key: str = "") -> Any:
    """Make the paths of a raw profile absolute, relative to ``base``, and plain names of models on the hub references.
    Raises ValueError as ``joined`` does."""
    if isinstance(value, dict):
        return {k: _located(v, base, k) if _is_path(k, v, key) else _resolve(v, base, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolve(v, base, key) for v in value]
    return value


def _located(text: str, base: Path, key: str) -> str | dict[str, str]:
    named = named_on_hub(text, base) if key in MODEL_KEYS else None
    return named or str(joined(base, text))


def _read(name_or_path: str) -> tuple[Profile, Path]:
    path = _profile_path(name_or_path, Path())
    return _validated(_with_parents(path, ()), path), path


def _validated(raw: Mapping[str, Any], path: Path) -> Profile:
    try:
        profile = Profile.model_validate(raw)
        # Every part is validated before anything runs.
        parts = profile.written_parts
    except ValidationError as error:
        words = describe_validation_error(error, _fixed_by(raw))
        raise ProfileError(f"profile {path} is not valid:\n{words}") from error
    _check_unlike(parts, path)
    for key, values in (
        ("engine.device", {p.engine.device for p in parts}),
        ("workload.rescore", {p.workload.rescore for p in parts}),
    ):
        if len(values) > 1:
            raise ProfileError(
                f"profile {path}: axes: expected {key} to be the same for all values, found "
                f"{', '.join(sorted(map(str, values)))}: it applies to the whole run; write a profile for each value"
            )
    return profile


def _fixed_by(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a profile says that is no axis's to change, so that it is the same in every part."""
    axes = raw.get("axes")
    values = [v for v in axes.values() if isinstance(v, Mapping)] if isinstance(axes, Mapping) else []
    varied = {key for v in values for changes in v.values() if isinstance(changes, Mapping) for key in changes}
    return {key: value for key, value in raw.items() if key not in varied}


def _check_unlike(parts: Sequence[Profile], path: Path) -> None:
    """Raise ProfileError for two variants with the same settings: all their cells would run twice."""
    seen: dict[str, str] = {}
    for part in parts:
        settings = part.model_dump_json(exclude={"variant"})
        if settings in seen:
            raise ProfileError(
                f"profile {path}: axes: expected values that differ, found {seen[settings]} and {part.variant} with "
                "the same settings throughout, whose cells would run twice; change one of them, or take it out"
            )
        seen[settings] = part.variant


def _profile_path(name_or_path: str, base: Path, source: str = "") -> Path:
    """Return the file of a shipped profile, or a path relative to ``base``."""
    shipped = shipped_profile_names()
    path = base / name_or_path
    if name_or_path not in shipped and path.is_file():
        return path
    if (name := same_name(name_or_path, shipped)) is not None:
        return SHIPPED_PROFILES / f"{name}.yaml"
    if os.sep in name_or_path or path.suffix in (".yaml", ".yml"):
        meant = same_name(path.stem, shipped)
        hint = f"did you mean the shipped profile {meant}?" if meant is not None else "correct the path"
        raise ProfileError(
            f"{source}expected the path of a YAML file, found {name_or_path!r}: "
            f"{'that is a folder' if path.is_dir() else 'there is no such file'}; {hint}"
        )
    near = nearest(name_or_path, shipped)
    hint = f"did you mean {listed(near, 'or')}?" if near else f"shipped profiles: {', '.join(shipped)}"
    raise ProfileError(
        f"{source}expected a shipped profile or the path of a YAML file, found {name_or_path!r}, which is neither; "
        f"{hint} (`harness list profiles` says what they are)"
    )


def _with_parents(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    """Return a profile as data with absolute paths, merged with the profiles that it extends."""
    if path.resolve() in children:
        raise ProfileError(f"profile {path} extends itself; name another profile")
    try:
        raw = yaml_io.load(path)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ProfileError(f"profile {path}: expected YAML, but it cannot be read: {reason}") from error
    if not isinstance(raw, dict):
        raise ProfileError(f"profile {path}: expected a mapping at the top level, found {shown(raw)}")
    if "sources" in raw:
        raise ProfileError(f"profile {path}: sources: unknown key; only runs record it; remove it")
    parent = raw.pop("extends", None)
    is_shipped = path.resolve().parent == SHIPPED_PROFILES
    folder = path.resolve().parent
    try:
        raw = _resolve(raw, REPOSITORY if is_shipped else folder)
        if isinstance(parent, str) and parent not in shipped_profile_names():
            joined(folder, parent)
    except ValueError as error:
        raise ProfileError(f"profile {path}: {error}") from error
    changes = {key: raw.pop(key) for key in (MORE, WITHOUT) if key in raw}
    if parent is None:
        if changes:
            raise ProfileError(
                f"profile {path}: {next(iter(changes))}: expected a profile that extends another, found none"
            )
        return dict(raw)
    if not isinstance(parent, str):
        raise ProfileError(f"profile {path}: extends: expected the name or path of a profile, found {parent!r}")
    above = _profile_path(parent, folder, f"profile {path}: extends: ")
    inherited = _with_parents(above, (*children, path.resolve()))
    _check_not_overridden(path, raw, inherited)
    if "name" not in raw and not children:
        raise ProfileError(
            f"profile {path}: expected a name, found none: reports and trends would take it for profile "
            f"{inherited.get('name')}, which it extends; add one (name: {path.stem})"
        )
    whole = merged(inherited, raw)
    if changes:
        whole["scenarios"] = _changed_scenarios(path, whole.get("scenarios") or [], **changes)
    return whole


def _changed_scenarios(
    path: Path, inherited: list[Any], more_scenarios: Any = (), without_scenarios: Any = ()
) -> list[Any]:
    """Return the inherited scenarios with others added, or in place of those with their ids, and without some. Raises
    ProfileError for what is no list of scenarios, or of ids that are inherited."""
    ids = [s.get("id") for s in inherited]
    for key, values, kind, what in (
        (MORE, more_scenarios, dict, "scenarios"),
        (WITHOUT, without_scenarios, str, "ids"),
    ):
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, kind) for value in values):
            raise ProfileError(f"profile {path}: {key}: expected a list of {what}, found {values!r}")
    if any("id" not in scenario for scenario in more_scenarios):
        raise ProfileError(f"profile {path}: {MORE}: expected an id in each scenario, found one without; add it")
    if strange := next((i for i in without_scenarios if i not in ids), None):
        near = nearest(strange, ids)
        hint = f"did you mean {listed(near, 'or')}?" if near else f"there are {', '.join(ids) or 'none'}"
        raise ProfileError(f"profile {path}: {WITHOUT}: expected ids of inherited scenarios, found {strange!r}; {hint}")
    named = {s.get("id"): s for s in (*inherited, *more_scenarios)}
    return [scenario for name, scenario in named.items() if name not in without_scenarios]


def _check_not_overridden(path: Path, raw: Mapping[str, Any], inherited: Mapping[str, Any]) -> None:
    """Raise ProfileError for settings of a profile that an inherited axis would silently override."""
    own = leaves({k: v for k, v in raw.items() if k in VARIABLE})
    for axis, values in (inherited.get("axes") or {}).items():
        if axis in (raw.get("axes") or {}) or not isinstance(values, Mapping):
            continue
        taken = {leaf for changes in values.values() if isinstance(changes, Mapping) for leaf in leaves(changes)}
        # A whole mapping is lost like a key of it.
        if lost := sorted(".".join(o) for o in own if any(o[: len(t)] == t[: len(o)] for t in taken)):
            raise ProfileError(
                f"profile {path}: expected settings that no inherited axis sets, found {', '.join(lost)}, which axis "
                f"{axis} sets; give the axis its values here (axes: {axis})"
            )


def check_paths(profile: Profile, source: Path, with_prompts: bool = True) -> None:
    """Raise ProfileError when a model or prompt path of the profile does not exist or is not a model.

    References to the hub and models in packages are checked where they are looked up.
    """
    models = {"target": profile.target} | {
        name: drafter
        for m in profile.methods
        for name, drafter in ((f"drafter of {m.kind}", m.drafter), (f"drafter of {m.kind} on P", m.prefill_drafter))
        if drafter is not None
    }
    for role, model in models.items():
        # One that was looked up says why it has none where it is used.
        if (folder := described_in(model)) is None:
            continue
        config = folder / "config.json"
        if not config.is_file():
            raise ProfileError(
                f"profile {source}: {role}: expected a model folder with config.json at {folder}, found none. "
                "Correct the path, or restore models/probe from version control for the probe models"
            )
        try:
            json_io.loads(json_io.read_text(config, _MOST_BYTES))
        except (ValueError, OSError) as error:
            raise ProfileError(f"profile {source}: {role}: {config} is not JSON ({error})") from error
    for name, folder in profile.engine.adapters.items():
        # Without the second, vLLM looks for pickled weights.
        if lost := [part for part in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / part).is_file()]:
            raise ProfileError(
                f"profile {source}: engine.adapters: expected a LoRA adapter with {lost[0]} at {folder} for {name}, "
                "found none; correct the path"
            )
    tokenizer = described_in(profile.tokenizer if profile.tokenizer is not None else profile.target)
    if tokenizer is not None and not (tokenizer / "tokenizer_config.json").is_file():
        raise ProfileError(
            f"profile {source}: tokenizer: expected a folder with tokenizer_config.json at "
            f"{tokenizer}, found none; correct the path"
        )
    for problem in _model_problems(profile):
        raise ProfileError(f"profile {source}: {problem}")
    if with_prompts and not profile.workload.prompts.is_file():
        how = f" recipe --profile {called(source)}" if profile.workload.recipe is not None else ""
        raise ProfileError(
            f"profile {source}: workload.prompts: expected a prompt set at {profile.workload.prompts}, found none. "
            f"Correct the path, or run `harness prompts build{how}`"
        )


def called(source: Path) -> str:
    """Return how a command line names the profile in a file: a shipped one by name, others by path."""
    return source.stem if source.parent == SHIPPED_PROFILES else shlex.quote(str(source))


def _model_problems(profile: Profile) -> Iterator[str]:
    """Yield why the models of a plain profile must not be loaded, as far as they are on this machine."""
    yield from misplaced(profile)
    for method in profile.methods:
        yield from dict.fromkeys(
            p for m in (method, method.on_prefill) for p in remote_code.problems(models_of(profile, m))
        )
