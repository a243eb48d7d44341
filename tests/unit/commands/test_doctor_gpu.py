"""What `doctor` says about hub and GPU, from canned answers of the driver: no GPU is needed here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.commands.doctor import Examined
from harness.commands.doctor.gpu import (
    VisibleGpu,
    gpu_items,
    hub_items,
    parse_gpus,
    toolchain_items,
    weights_of,
)
from harness.engines.environment import EngineEnvironment
from harness.profiles.availability import references_of
from harness.profiles.hub import GIB, Hub
from harness.profiles.load import load_profile, read_profile
from harness.profiles.model import Profile
from harness.prompts.probe_task import WEIGHTS
from tests.support.builders import changed_profile
from tests.support.engines import ENVIRONMENT
from tests.support.fake_hub import FakeRepository, fake_hub
from tests.support.program import script

A = "a" * 40
SMI = "NVIDIA L4, 580.65.06, 23034, 22500\nNVIDIA H200 MIG 1g.18gb, 580.65.06, [N/A], [N/A]\n"


def gpu_profile(tmp_path: Path, **engine: object) -> Profile:
    def change(raw: dict) -> None:
        raw["engine"] |= {"device": "gpu", "kv_buffer_device": "cuda", **engine}

    return load_profile(changed_profile(tmp_path, change))


def environment(executable: str) -> EngineEnvironment:
    return ENVIRONMENT.model_copy(update={"executable": executable, "vllm_build": "gpu", "torch": None, "nixl": None})


def fake_python(tmp_path: Path, cuda: str = "13.0") -> EngineEnvironment:
    """An engine interpreter (a script) whose site-packages have a torch."""
    site = tmp_path / "site-packages"
    for name, content in (
        ("torch/__init__.py", b""),
        ("torch/version.py", f"__version__ = '2.13.0'\ncuda: Optional[str] = '{cuda}'\n".encode()),
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    answer = f"*torch*) echo {site}/torch/__init__.py;;\n"
    return environment(str(script(tmp_path / "python", f'#!/bin/sh\ncase "$2" in\n{answer}esac\n')))


# --- GPU ------------------------------------------------------------------------------------------------------------


def test_driver_answers_are_read_and_unknown_memory_is_left_out():
    assert parse_gpus(SMI) == [VisibleGpu("NVIDIA L4", "580.65.06", 23034 / 1024, 22500 / 1024)]
    assert parse_gpus("") == parse_gpus("No devices were found\n") == []


@pytest.mark.parametrize(
    ("share", "target", "free", "fits"),
    [
        (0.4, 5, 22, True),
        (0.4, 8, 22, False),
        (0.6, 5, 22, False),
        (0.4, 4, 15, False),
        (0.06, 5, 18, True),
        (0.06, 5, 17, False),
    ],
)
def test_memory_of_a_pair_on_one_gpu(tmp_path, share, target, free, fits):
    """What each engine takes, its share or weights, KV and working space, must fit twice into what is free."""
    profile = gpu_profile(tmp_path, gpu_memory_utilization=share)
    drafters = {m.kind: str(m.drafter) for m in profile.methods if m.kind != "none"}
    weights = {str(profile.target): target * GIB, drafters["eagle3"]: GIB, drafters["mtp"]: GIB // 2}
    [item] = gpu_items(profile, None, [VisibleGpu("L4", "580.1", 22.5, free)], weights)
    assert (item.what, item.ok, item.needed) == ("GPU memory", fits, True)
    assert f"2 engines of {max(share * 22.5, target + 1 + 1 + 2):.1f} GiB" in item.found
    assert f"weights {target + 1:.1f} GiB" in item.found
    assert "gpu_memory_utilization" in item.advice


@pytest.mark.parametrize(
    ("driver", "cuda", "ok"),
    [("580.65.06", "13.0", True), ("570.1", "13.0", False), ("525.60.13", "12.8", True), ("470.1", "12.8", False)],
)
def test_driver_is_compared_with_the_cuda_of_torch(tmp_path, driver, cuda, ok):
    items = gpu_items(gpu_profile(tmp_path), fake_python(tmp_path, cuda), [VisibleGpu("L4", driver, 22.5, 22.0)], {})
    [item] = [i for i in items if i.what == "GPU driver"]
    assert item.ok is ok and f"CUDA {cuda}" in item.found
    assert ok or "update it" in item.advice


def test_cpu_profiles_ask_for_no_gpu():
    cpu = load_profile("cpu")
    assert gpu_items(cpu, None, [VisibleGpu("L4", "1", 22.5, 1.0)], {}) == []
    assert hub_items("cpu") == []


def test_weights_of_folders():
    weights = weights_of("cpu")
    assert {Path(k).name for k in weights} == {"target", "eagle3", "dflash", "mtp"}
    assert weights[str(WEIGHTS / "target")] == (WEIGHTS / "target" / "model.safetensors").stat().st_size


def test_memory_is_judged_by_the_variant_that_fits_worst():
    """A small model of an axis must not hide a large one, and the KV pool counts."""
    profile = read_profile("nightly")
    weights = {t: (2 if "0.8B" in t else 15) * GIB for t in {str(p.target) for p in profile.written_parts}}

    def fits(total: float) -> bool:
        [item] = gpu_items(profile, None, [VisibleGpu("A100", "580.1", total, total)], weights)
        return item.ok

    # Each takes 15 GiB of weights, 8 of KV and 2 to work with; the share of 58 GiB, 42 %, is less.
    assert [fits(t) for t in (24.0, 40.0, 48.0, 58.0)] == [False, False, False, True]


# --- kernels, memory, stacks ----------------------------------------------------------------------------------------


def program_in(folder: Path, name: str) -> Path:
    return script(folder / name, "#!/bin/sh\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of its own: nothing on the PATH, no CUDA, root without capabilities."""
    for name in ("CC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    root = tmp_path / "root"
    (root / "dev" / "shm").mkdir(parents=True)
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "status").write_text("Name:\tharness\nCapEff:\t0000000000000000\nCapBnd:\t0\n")
    (root / "proc" / "sys" / "kernel" / "yama").mkdir(parents=True)
    (root / "proc" / "sys" / "kernel" / "yama" / "ptrace_scope").write_text("1\n")
    monkeypatch.setattr("harness.commands.doctor.gpu.shutil.disk_usage", lambda _: SimpleNamespace(total=64 * 2**20))
    monkeypatch.setattr("harness.commands.doctor.gpu.resource.getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr("harness.commands.doctor.gpu.program", lambda: program_in(tmp_path / "scripts", "py-spy"))
    return root


def look(profile: Profile, engines: EngineEnvironment | None, machine: Path) -> dict[str, Examined]:
    return {i.what: i for i in toolchain_items(profile, engines, machine)}


def test_a_bare_container_lacks_all_and_every_lack_has_its_advice(tmp_path, machine):
    (machine / "dev" / "infiniband").mkdir()
    wide = gpu_profile(tmp_path, attention_backend="FLASHINFER", tensor_parallel={"prefill": 2, "decode": 1})
    items = look(wide, fake_python(tmp_path), machine)
    assert not any(i.ok for i in items.values()) and all(i.advice for i in items.values())
    needed = {what for what, i in items.items() if i.needed}
    assert needed == {"C compiler", "FlashInfer package", "FlashInfer kernels", "shared memory"}
    assert "8 MiB, RDMA devices" in items["locked memory"].found
    assert f"PATH={tmp_path}:" in items["FlashInfer kernels"].advice


def test_what_a_profile_does_not_use_is_not_needed(tmp_path, machine):
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    items = look(gpu_profile(tmp_path, attention_backend="FLASH_ATTN", env=env), None, machine)
    assert {what for what, i in items.items() if i.needed} == {"C compiler"}
    assert items["locked memory"].ok and "no RDMA device" in items["locked memory"].found


@pytest.mark.parametrize("given", ["CUDA_HOME", "CUDA_PATH", "path", "/usr/local/cuda"])
def test_flashinfer_compiles_with_the_nvcc_that_vllm_finds_and_ninja(tmp_path, machine, monkeypatch, given):
    home = machine / "usr/local/cuda" if given.startswith("/") else tmp_path / "toolkit"
    nvcc = program_in(home / "bin", "nvcc")
    if given == "path":
        monkeypatch.setenv("PATH", f"{home / 'bin'}:{tmp_path / 'path'}")
    elif not given.startswith("/"):
        monkeypatch.setenv(given, str(home))
    profile = gpu_profile(tmp_path, attention_backend="FLASHINFER")
    item = look(profile, fake_python(tmp_path), machine)["FlashInfer kernels"]
    assert not item.ok and str(nvcc) in item.found
    program_in(tmp_path / "path", "ninja")
    assert look(profile, fake_python(tmp_path), machine)["FlashInfer kernels"].ok


def test_the_sampler_needs_flashinfer_whatever_the_attention_is(tmp_path, machine):
    profile, engines = gpu_profile(tmp_path, attention_backend="FLASH_ATTN"), fake_python(tmp_path)
    lacking = look(profile, engines, machine)["FlashInfer package"]
    assert lacking.needed and not lacking.ok and "VLLM_USE_FLASHINFER_SAMPLER" in lacking.advice
    python = Path(engines.executable)
    python.write_text(python.read_text().replace("esac", f"*flashinfer*) echo {tmp_path}/f/__init__.py;;\nesac"))
    assert look(profile, engines, machine)["FlashInfer package"].ok


def test_delta_nets_need_flashinfer_unless_tritons_kernel_is_asked_for(tmp_path, machine):
    off = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    engines, hybrid = fake_python(tmp_path), tmp_path / "hybrid"
    hybrid.mkdir()
    (hybrid / "config.json").write_text(json.dumps({"layer_types": ["linear_attention", "full_attention"]}))
    nets = gpu_profile(tmp_path, env=off).model_copy(update={"target": hybrid})
    lacking = look(nets, engines, machine)["FlashInfer package"]
    assert lacking.needed and not lacking.ok
    assert lacking.advice.endswith("or add --gdn-prefill-backend triton to engine.extra_args")
    for written in (("--gdn-prefill-backend", "triton"), ("--gdn-prefill-backend=triton",)):
        triton = nets.engine.model_copy(update={"extra_args": written})
        assert not look(nets.model_copy(update={"engine": triton}), engines, machine)["FlashInfer package"].needed


def test_gpu_hybrid_needs_no_flashinfer(tmp_path, machine):
    assert not look(load_profile("gpu-hybrid"), fake_python(tmp_path), machine)["FlashInfer package"].needed


def test_compiled_kernels_need_no_compiler(tmp_path, machine):
    engines = fake_python(tmp_path)
    python = Path(engines.executable)
    python.write_text(python.read_text().replace("esac", f"*flashinfer_cubin*) echo {tmp_path}/f/__init__.py;;\nesac"))
    item = look(gpu_profile(tmp_path, attention_backend="FLASHINFER"), engines, machine)["FlashInfer kernels"]
    assert item.ok and "flashinfer-cubin" in item.found


def test_stacks_can_be_read_with_the_capability_or_where_the_kernel_lets_everybody(tmp_path, machine):
    profile = gpu_profile(tmp_path)
    stacks = "stacks of engines that hang"
    assert not look(profile, None, machine)[stacks].ok
    (machine / "proc/self/status").write_text("CapEff:\t0000000000080000\n")
    assert look(profile, None, machine)[stacks].ok
    (machine / "proc/self/status").write_text("CapEff:\t0000000000000000\n")
    (machine / "proc/sys/kernel/yama/ptrace_scope").unlink()
    assert look(profile, None, machine)[stacks].ok


# --- hub ------------------------------------------------------------------------------------------------------------


def test_hub_token_models_and_disk(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    files = {f.name: f.read_bytes() for f in (WEIGHTS / "target").iterdir()}
    repositories = {
        "fake/open": FakeRepository({A: files}, {"main": A}),
        "fake/gated": FakeRepository({A: files}, {"main": A}, gated=True),
    }

    def change(raw: dict) -> None:
        raw["target"] = {"repo": "fake/open", "revision": "main"}
        raw["methods"][1]["drafter"] = {"repo": "fake/gated", "revision": "main"}

    path = changed_profile(tmp_path, change)
    with fake_hub(repositories) as server:
        hub = Hub(server.url, tmp_path / "hub")
        items = {i.what: i for i in hub_items(path, hub)}
        assert list(items) == ["hub", "hub token", "model target", "model eagle3", "disk for models"]
        assert items["hub"].ok and "answers" in items["hub"].found
        token = items["hub token"]
        assert (token.ok, token.needed, token.found) == (False, True, "none, needed by fake/gated")
        assert not items["model target"].ok and "not in the cache" in items["model target"].found
        assert items["model target"].advice == f"harness models --profile {path} --download"
        assert "found no token" in items["model eagle3"].found
        assert items["disk for models"].ok and items["disk for models"].needed
        hub.download(next(iter(references(path).values())), "target")
        assert {i.what: i for i in hub_items(path, hub)}["model target"].ok
        monkeypatch.setattr(Hub, "free", lambda _: 10)
        assert not {i.what: i for i in hub_items(path, hub)}["disk for models"].ok
    items = {i.what: i for i in hub_items(path, Hub("http://127.0.0.1:1", tmp_path / "hub"))}
    assert not items["hub"].ok and items["hub"].needed
    assert items["model target"].ok and not items["model eagle3"].ok


def references(path: str) -> dict:
    return references_of(read_profile(path))
