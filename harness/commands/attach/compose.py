"""The profile of attached servers: what it extends, and what is otherwise than there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.commands.attach.told import NO_METHOD, Told, kv_roles
from harness.commands.init import InitOptions, name_of, per_stratum, recipe_of, seen_from
from harness.errors import HarnessError, UsageError
from harness.profiles.cells import Role, all_cells
from harness.profiles.load import shipped_profile_names
from harness.profiles.methods import SHORT_FORMS, Method, NoSpeculation, traits_of
from harness.profiles.model import Profile
from harness.profiles.model_reference import ModelReference, named_on_hub
from harness.util.files import model_hash, sha256_files
from harness.util.text import listed

_CONFIGURED = ("prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_cached_requests", "parallel_drafting")
"""Keys of ``speculative_config`` that are taken over for a method which the profile does not have."""
_OR = "or"
_ANSWER = {"cpu": 64, "gpu": 256}
"""Tokens of an answer of a model that the profile does not have, as in profiles of ``harness init``."""


class Wanted(NamedTuple):
    """What the user says of the profile."""

    extends: str | None
    out: Path | None
    name: str | None
    target: str | None
    drafter: str | None
    method: str | None

    @property
    def folder(self) -> Path:
        return self.out.absolute().parent if self.out is not None else Path.cwd()


class Changes(NamedTuple):
    """What a profile of the servers has that the one which it extends does not."""

    raw: dict[str, Any]
    trust: tuple[str, ...]
    """Sentences about what nobody told."""
    other_models: bool
    """Whether the models are not those of the extended profile, so that prompts have to be built."""
    kind: str
    """The method of the answering server, by its name in the profile."""


def base_name(told: Mapping[Role, Told], wanted: Wanted) -> str:
    """Return the profile to extend. Raises UsageError where it is not given and no server tells what it runs on."""
    if wanted.extends is not None:
        return wanted.extends
    devices = {t["device"] for t in told.values()} - {None}
    if not devices:
        raise UsageError(
            "no server tells what it runs on, so name the profile to extend: --extends cpu, --extends gpu or your own; "
            "or start the servers with VLLM_SERVER_DEV_MODE=1"
        )
    return "cpu" if devices == {"cpu"} else "gpu"


def answering(told: Mapping[Role, Told]) -> Told:
    """Return the server that gives the answers of the profile's method."""
    return told["decode"] if "decode" in told else told["single"]


def changes(told: Mapping[Role, Told], base: Profile, source: str, wanted: Wanted) -> Changes:
    """Return what the profile of these servers changes. Raises UsageError for models that are not known here."""
    main, folder = answering(told), wanted.folder
    known, trust = _is_target_of(base, main, wanted)
    name = wanted.name or (f"{base.name}-attached"[:40] if known else name_of(str(wanted.target or main["model"])))
    raw: dict[str, Any] = {"extends": _extended(source, folder), "name": name}
    raw["description"] = f"servers that run already: {', '.join(f'{r} {t.server.url}' for r, t in told.items())}"
    if not known:
        raw["target"] = _named(str(wanted.target or main["model"]), "--target", folder)
        if (tokenizer := main["tokenizer"]) not in (None, main["model"]) and wanted.target is None:
            raw["tokenizer"] = _named(str(tokenizer), "--target", folder)
        raw["tokenizer"] = raw.get("tokenizer", raw["target"])
    method, told_method, more = _method(told, base, wanted, known)
    trust += more
    if method is None:
        raw["methods"] = [{"kind": NO_METHOD}, told_method] if told_method else [{"kind": NO_METHOD}]
    engine = _engine(told, base)
    if engine:
        raw["engine"] = engine
    if base.batch_invariant and main.server.info.variables.get("VLLM_BATCH_INVARIANT") is False:
        raw["judging"] = {"tier": "auto"}
    if not known:
        raw |= _for_other_models(main, base, engine, told_method, wanted, name, folder)
    if engine or not known or method is None:
        raw["baselines"] = f"baselines/{name}"
    kind = method.kind if method is not None else str((told_method or {"kind": NO_METHOD})["kind"])
    return Changes(raw, tuple(trust), not known, kind)


def _extended(source: str, folder: Path) -> str:
    return source if source in shipped_profile_names() else os.path.relpath(Path(source).resolve(), folder.resolve())


def _named(model: str, option: str, folder: Path) -> Any:
    """Return how the profile names a model. Raises UsageError for what is neither a folder here nor a name on the
    hub."""
    if Path(model).is_dir():
        return seen_from(Path(model), folder)
    if named_on_hub(model, Path.cwd()) is None:
        raise UsageError(
            f"the servers loaded {model}, which is no folder on this machine and no name on the hub; name the same "
            f"model with {option}, a folder or a name on the hub, or the profile that has it with --extends"
        )
    return model


def _is_target_of(base: Profile, main: Told, wanted: Wanted) -> tuple[bool, list[str]]:
    """Return whether the servers' target is that of the profile, and what of that is taken on trust."""
    model = wanted.target or main["model"]
    if model is None:
        return True, [f"that the model is that of profile {base.name}: the server does not tell which one it loaded"]
    if isinstance(base.target, ModelReference) or not Path(str(model)).is_dir():
        same = str(base.target).partition("@")[0] == str(model).partition("@")[0]
        if same:
            return True, [f"that the revision of {model} is that of profile {base.name}"]
        if wanted.extends is not None and wanted.target is None and named_on_hub(str(model), Path.cwd()) is None:
            return True, [f"that {model} on the machine of the servers is the model of profile {base.name}"]
        return False, []
    try:
        ours = base.target_folder
    except HarnessError:
        return False, []
    theirs = Path(str(model))
    same = theirs.resolve() == ours.resolve() or (
        _config(theirs) == _config(ours) and model_hash(theirs) == model_hash(ours)
    )
    return same, [f"that the weights in {theirs} are those that the servers loaded"] if same else []


def _config(folder: Path) -> str:
    """Return the hash of a model's config, before that of its weights is worth its time."""
    return sha256_files(folder, ["config.json"])


def _method(
    told: Mapping[Role, Told], base: Profile, wanted: Wanted, known: bool
) -> tuple[Method | None, dict[str, Any] | None, list[str]]:
    """Return the method of the profile that the servers have, or None and how it is written into one; and what is taken
    on trust. Raises UsageError where it is not told and not named."""
    main = answering(told)
    drafts, on_p = main.drafts, told["prefill"].drafts if "prefill" in told else None
    others = [m for m in base.methods if not isinstance(m, NoSpeculation)]
    if drafts == 0:
        plain = next((m for m in base.methods if isinstance(m, NoSpeculation)), None)
        return (plain if known else None), None, []
    kind = wanted.method or main["method"]
    trust = []
    if kind is None:
        fitting = [m for m in others if drafts in (None, m.draft_tokens)]
        if len(fitting) != 1 or not known:
            raise UsageError(
                f"the server --{main.server.option} {main.server.url} does not tell its speculation method; name it "
                f"with --method{f' ({listed([m.kind for m in fitting], _OR)})' if fitting else ''}, or start the "
                "server with VLLM_SERVER_DEV_MODE=1"
            )
        kind, trust = fitting[0].kind, [f"that the method is {fitting[0].kind}"]
    k = drafts if drafts is not None else next((m.draft_tokens for m in others if m.kind == kind), 3)
    for method in others if known else ():
        same_k = method.draft_tokens == k and method.on_prefill.draft_tokens == (k if on_p is None else on_p)
        if _called(method) == kind and same_k and _same_drafter(method, main["drafter"], wanted):
            return method, None, trust
    return None, _written(kind, k, on_p, main, base, wanted), trust


def _called(method: Method) -> str:
    """Return what vLLM calls a method in its settings."""
    return "mtp" if method.vllm_method.endswith("_mtp") else method.vllm_method


def _same_drafter(method: Method, told: Any, wanted: Wanted) -> bool:
    drafter = wanted.drafter or told
    if drafter is None or method.drafter is None or not Path(str(drafter)).is_dir():
        return wanted.drafter is None
    ours, theirs = method.drafter_path, Path(str(drafter))
    return ours is not None and (ours.resolve() == theirs.resolve() or model_hash(ours) == model_hash(theirs))


def _written(kind: str, k: int, on_p: int | None, main: Told, base: Profile, wanted: Wanted) -> dict[str, Any]:
    raw: dict[str, Any] = {"kind": kind}
    drafter = wanted.drafter or main["drafter"]
    if drafter is None and (same := next((m for m in base.methods if m.kind == kind), None)) is not None:
        drafter = str(same.drafter) if same.drafter is not None else None
    if drafter is not None and traits_of(kind, {}).drafter != "none":
        raw["drafter"] = _named(str(drafter), "--drafter", wanted.folder)
    raw["num_speculative_tokens"] = k
    if on_p not in (None, k):
        raw["prefill_num_speculative_tokens"] = on_p
    if kind not in SHORT_FORMS:
        said = {key: main.server.info.say(f"speculative_config.{key}") for key in _CONFIGURED}
        raw["speculative_config"] = {"method": kind} | {key: v for key, v in said.items() if v not in (None, False, 0)}
    return raw


def _engine(told: Mapping[Role, Told], base: Profile) -> dict[str, Any]:
    """Return the settings of ``engine`` that the servers tell, and that are not the extended profile's."""
    main, p = answering(told), told.get("prefill")
    every = list(told.values())
    found: dict[str, Any] = {
        name: main[name]
        for name in ("block_size", "dtype", "kv_cache_dtype", "max_num_batched_tokens", "enforce_eager", "hf_overrides")
    }
    found |= {name: _least(every, name) for name in ("max_model_len", "max_num_seqs", "kv_blocks")}
    found["device"] = None if main["device"] is None else ("cpu" if main["device"] == "cpu" else "gpu")
    if p is not None:
        found["kv_roles"] = kv_roles(p, main)
        found["kv_lease_s"] = p.lease_s
        found["kv_buffer_device"] = main["kv_buffer_device"]
        found["kv_load_failure_policy"] = main["kv_load_failure_policy"]
    engine = base.engine
    out = {n: v for n, v in found.items() if v is not None and v != getattr(engine, n) and (n, v) != _AUTO}
    ranks = {"prefill": (p or main)["tensor_parallel"], "decode": main["tensor_parallel"]}
    if None not in ranks.values() and ranks != engine.tensor_parallel.model_dump():
        out["tensor_parallel"] = ranks
    return out | (_connector(main, base) if p is not None else {})


_AUTO = ("kv_cache_dtype", "auto")


def _least(every: list[Told], name: str) -> Any:
    values = [t[name] for t in every if isinstance(t[name], int)]
    return min(values) if values else None


def _connector(main: Told, base: Profile) -> dict[str, Any]:
    """Return the connector where it is not the extended profile's."""
    name = main["kv_connector"]
    ours = base.engine.kv_connector or ("NixlPushConnector" if base.engine.kv_transfer == "push" else "NixlConnector")
    if name is None or name == ours:
        return {}
    if name in ("NixlConnector", "NixlPushConnector") and base.engine.kv_connector is None:
        return {"kv_transfer": "push" if name == "NixlPushConnector" else "pull"}
    return {"kv_connector": name, "kv_connector_extra_config": main["kv_connector_extra_config"] or {}}


def _for_other_models(
    main: Told,
    base: Profile,
    engine: Mapping[str, Any],
    method: Mapping[str, Any] | None,
    wanted: Wanted,
    name: str,
    folder: Path,
) -> dict[str, Any]:
    """Return what other models than those of the extended profile need: prompts of their own, and no state of its
    prompts."""
    size, device = engine.get("block_size", base.engine.block_size), engine.get("device", base.engine.device)
    kind, drafts = (str(method["kind"]), int(method["num_speculative_tokens"])) if method else (NO_METHOD, 0)
    traits = traits_of(kind, {})
    options = InitOptions(str(main["model"]), None, kind, drafts, device, size)
    _, source, texts = recipe_of(None, folder)
    recipe = yaml.safe_load(source) | {
        "block_sizes": [size],
        "lookaheads": [drafts + traits.bonus_slot if drafts and traits.reserves else 0],
        "texts": texts,
        "per_stratum": per_stratum(options),
        "max_blocks": 6,
    }
    workload = {"prompts": f"prompts/{name}.jsonl", "recipe": recipe, "max_tokens": _ANSWER[device], "text_prompts": 4}
    more: dict[str, Any] = {"workload": workload, "scenarios": [], "known_defects": None}
    return more | {"judging": {"tier": "auto", "near_tie_nats": None}}


def with_cells(
    raw: Mapping[str, Any], told: Mapping[Role, Told], kind: str, profile: Profile, routed: bool
) -> dict[str, Any]:
    """Return a raw profile with the cells alone that the servers can answer; ``profile`` is it with all cells."""
    wanted = set()
    if "decode" in told:
        wanted |= {f"pd-{kind}", f"single-{kind}"} | ({f"pd-{kind}-router"} if routed else set())
    if "single" in told:
        wanted.add(f"single-{NO_METHOD if told['single'].drafts == 0 else kind}")
    others = [c.id for c in all_cells(profile) if c.id not in wanted]
    return {**raw, "exclude": [{"cells": cell, "reason": "no server was given for it"} for cell in others]}


def with_topologies(raw: Mapping[str, Any], told: Mapping[Role, Told], routed: bool) -> dict[str, Any]:
    topologies = ["pd", "single"] if "decode" in told else ["single"]
    return {**raw, "topologies": topologies, "routes": ["client", "router"] if routed else ["client"], "exclude": []}


def text_of(raw: Mapping[str, Any], comments: list[str]) -> str:
    """Return the profile as text, with comments at its head."""
    lines = [f"# {raw['name']}: written by `harness attach`; docs/profiles.md has every key."]
    lines += [f"# {words}" for words in comments]
    lines.append("format: 1")
    for key, value in raw.items():
        if key in ("exclude", "methods") and value:
            lines += [f"{key}:", *(f"  - {_flow(item)}" for item in value)]
        elif isinstance(value, dict) and value:
            lines.append(f"{key}:")
            lines += [f"  {name}: {_flow(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """Return a value on one line of YAML."""
    return (
        json.dumps(value, ensure_ascii=False)
        if isinstance(value, (dict, list))
        else str(yaml.safe_dump(value, width=10_000, allow_unicode=True).split("\n...")[0].rstrip())
    )
