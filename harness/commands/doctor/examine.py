"""Examine what this machine can run: packages, memory, disk, ports, models, prompts, baselines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from harness.baselines.index import BaselineIndex
from harness.baselines.lookup import Lookup
from harness.commands.doctor import Examined
from harness.engines.environment import EngineEnvironment, inspect_environment, need_build, need_nixl
from harness.engines.inventory import ENGINE_GIB
from harness.engines.router_program import program
from harness.errors import HarnessError
from harness.history.engine_interfaces import WITHOUT
from harness.judging.power import lookups_of
from harness.profiles.availability import made_later
from harness.profiles.cells import CellName, all_cells
from harness.profiles.drafter_context import short_drafters
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.profiles.model_reference import TARGET, TOKENIZER, folder_of
from harness.prompts.model import load_prompts
from harness.prompts.probe_task import RECIPE_FILE, WEIGHTS
from harness.scheduling.gpus import gpus
from harness.supervision.ports import free_ports, release
from harness.util import allowance
from harness.util.extras import INSTALL_RUN, install_engines, lacking_to_run
from harness.util.files import sha256_file
from harness.util.paths import REPOSITORY
from harness.util.text import counted


def _attempt(what: str, advice: str, action: Callable[[], str]) -> Examined:
    """Build an item from an action that returns what it found, or raises a HarnessError saying what is wrong."""
    try:
        return Examined(what, action(), True, True)
    except HarnessError as error:
        return Examined(what, str(error), False, True, advice)


def examine(executable: str, source: str) -> list[Examined]:
    """Return all items for a profile, in the order in which a run would need them."""
    items = [_packages_item()]
    environment: EngineEnvironment | None = None
    try:
        environment = inspect_environment(executable)
        items.append(
            Examined("vllm", f"{environment.vllm} ({environment.vllm_build}), torch {environment.torch}", True, True)
        )
    except HarnessError as error:
        items.append(
            Examined("vllm", str(error), False, True, f"{install_engines(executable)}, or name --engine-python")
        )
    profile: Profile | None = None
    try:
        profile = load_profile(source)
        items.append(Examined("profile", f"{profile.name}, {counted(len(all_cells(profile)), 'cell')}", True, True))
    except HarnessError as error:
        items.append(Examined("profile", str(error), False, True, "correct the profile"))
    if environment is not None:
        items += _environment_items(environment, profile)
    items += _machine_items(profile)
    if profile is not None:
        items += _real_model_items(profile, source, environment)
        items += _drafter_items(profile)
    if profile is None or any(
        (f := folder_of(p.target)) is not None and f.is_relative_to(WEIGHTS) for p in profile.parts
    ):
        items.append(_probe_item())
    if profile is not None:
        items += _data_items(profile, source)
    return items


def _packages_item() -> Examined:
    """What the harness itself needs to send requests; an installation without can judge."""
    lacking = lacking_to_run()
    found = f"no {', '.join(lacking)}: recorded runs can be judged" if lacking else "those to judge and to run"
    return Examined("packages", found, not lacking, True, INSTALL_RUN)


def _drafter_items(profile: Profile) -> list[Examined]:
    """Say which drafters end before the engines' context does."""
    found = {short.words: short for part in profile.parts for short in short_drafters(part)}
    advice = (
        "vLLM says nothing of it: acceptance is 0 beyond. Raise max_position_embeddings in a copy of the drafter if it "
        "was trained for more, or lower engine.max_model_len"
    )
    return [Examined(f"drafter of {short.method}", words, False, False, advice) for words, short in found.items()]


def _real_model_items(profile: Profile, source: str, environment: EngineEnvironment | None) -> list[Examined]:
    from harness.commands.doctor.gpu import (
        convertible_items,
        gpu_items,
        hub_items,
        read_gpus,
        toolchain_items,
        weights_of,
    )
    from harness.commands.doctor.transport import transport_items

    items = [*hub_items(source), *convertible_items(source)]
    items += transport_items(profile, environment) if environment is not None else []
    if profile.engine.device == "gpu":
        items += gpu_items(profile, environment, read_gpus(), weights_of(source))
        items += toolchain_items(profile, environment)
    return items


def _environment_items(environment: EngineEnvironment, profile: Profile | None) -> list[Examined]:
    wants_pair = profile is None or "pd" in profile.topologies

    def nixl() -> str:
        need_nixl(environment)
        return str(environment.nixl)

    nixl_item = _attempt("nixl", "install the extra `cpu` or `gpu`", nixl)
    items = [nixl_item._replace(needed=wants_pair)]
    if profile is not None:
        device = profile.engine.device

        def build() -> str:
            need_build(environment, device)
            return environment.vllm_build

        items.append(_attempt("vllm build", f"an environment that fits has the extra `{device}` alone", build))
    if profile is not None and any(c.routed for c in all_cells(profile)):
        items.append(_attempt("router", "install the extra `router`, or take routes: [client]", lambda: str(program())))
    missing = [name for name in WITHOUT if not environment.has(name)]
    found = ", ".join(f"no {name}" for name in missing) or f"all {len(WITHOUT)} that the harness needs"
    cost = "; ".join(WITHOUT[name] for name in missing)
    items.append(Examined("vllm surfaces", found, not missing, False, f"{cost}. Use a newer vLLM, or accept this"))
    if profile is not None and profile.engine.device == "cpu":
        advice = "install intel-openmp: without it a P/D request may take a minute instead of 1–2 s"
        items.append(Examined.of_file("libiomp5", environment.openmp, False, advice))
        advice = "install g++: vLLM's CPU kernels are compiled at the first request"
        items.append(Examined.of_file("C++ compiler", shutil.which("g++") or shutil.which("c++"), True, advice))
    return items


def _machine_items(profile: Profile | None) -> list[Examined]:
    pair = profile is None or "pd" in profile.topologies
    cores = len(allowance.cores())
    memory = allowance.memory_gib()
    gpu = profile is not None and profile.engine.device == "gpu"
    on_host = profile is None or not gpu or profile.engine.kv_buffer_device == "cpu"
    cache = 0 if not on_host else profile.engine.kv_cache_gib if profile is not None else 1
    wanted = (2 if pair else 1) * (ENGINE_GIB + cache)
    disk = shutil.disk_usage(REPOSITORY).free / 2**30
    found_gpus = gpus()
    items = [
        Examined("cores", str(cores), cores >= 2, False, "two engines on one core work, but slowly"),
        Examined("free memory", f"{memory:.1f} GiB, {wanted:.1f} needed", memory >= wanted, True, "end other programs"),
        Examined("free disk", f"{disk:.0f} GiB", disk >= 1, True, "free some disk space"),
        Examined(
            "GPUs",
            ", ".join(found_gpus) or "none",
            bool(found_gpus),
            gpu,
            "run on a machine with GPUs that nvidia-smi lists" if gpu else "only GPU profiles need one",
        ),
    ]
    try:
        release(free_ports(4))
        items.append(Examined("loopback ports", "free ones available", True, True))
    except (OSError, HarnessError) as error:
        items.append(Examined("loopback ports", str(error), False, True, "allow sockets on 127.0.0.1"))
    return items


def _probe_item() -> Examined:
    advice = "restore models/probe from version control, or run `python -m tools.probe_models build` in a checkout"
    try:
        hashes = json.loads((WEIGHTS / RECIPE_FILE).read_text(encoding="utf-8"))["weights_sha256"]
        wrong = [n for n, h in hashes.items() if sha256_file(WEIGHTS / n / "model.safetensors") != h]
    except (OSError, ValueError, KeyError) as error:
        return Examined("probe models", f"cannot be read: {error}", False, True, advice)
    if wrong:
        return Examined("probe models", f"{', '.join(wrong)} differ from the recipe's hash", False, True, advice)
    return Examined("probe models", f"{', '.join(hashes)} match their hashes", True, True)


def _data_items(profile: Profile, source: str) -> list[Examined]:
    """Return items for prompt sets and baselines; the baselines of a profile with axes are only counted."""
    items, found = [], dict[str, Lookup]()
    hardware = tuple(gpus())
    paths = list(dict.fromkeys(p.workload.prompts for p in profile.parts))
    for path in paths:
        parts = [p for p in profile.parts if p.workload.prompts == path]
        recipe = f" recipe --profile {source}" if parts[0].workload.recipe is not None else ""

        def prompts(part: Profile = parts[0]) -> str:
            prompt_set = load_prompts(part.workload.prompts)
            found = f"{len(prompt_set.prompts)} in {part.workload.prompts.name}"
            if made_later(part) & {TARGET, TOKENIZER}:
                return f"{found}, not compared with the tokenizer, which is not here yet"
            prompt_set.check_tokenizer(part.tokenizer_folder, part.workload.prompts)
            return found

        name = "prompts" if len(paths) == 1 else f"prompts {path.stem}"
        items.append(_attempt(name, f"restore the file, or run `harness prompts build{recipe}`", prompts))
        if items[-1].ok:
            digest = load_prompts(path).sha256
            indexes: dict[Path, BaselineIndex] = {}
            for part in parts:
                found |= lookups_of(part, source, digest, None, hardware, indexes)
    advice = f"harness baseline record --profile {source}"
    if not profile.axes:
        later = made_later(profile)
        return items + [
            Examined(
                f"baseline {lineup}",
                f"{len(k.baseline.rows)} prompts" if k.baseline else k.reason,
                k.found,
                # A run makes the model first.
                not later & {TARGET, TOKENIZER, CellName.of_lineup(lineup).method},
                advice,
            )
            for lineup, k in found.items()
        ]
    lineups = {CellName.of(c.id).lineup for c in all_cells(profile)}
    there = [lineup for lineup in lineups if lineup in found and found[lineup].found]
    return [*items, Examined("baselines", f"{len(there)} of {len(lineups)}", len(there) == len(lineups), True, advice)]
