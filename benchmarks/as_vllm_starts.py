"""The harness, with CPU engines that start as ``vllm serve`` does: python -m benchmarks.as_vllm_starts ARGUMENT …

No process is forked from one that has done the imports, the model runs in a process of its own, and what vLLM compiles
at the first request is compiled. The rest of the command line and the environment is the harness's.
"""

from __future__ import annotations

from typing import Any

from harness.cli.app import main
from harness.engines import command

_OURS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE")
_variables = command._cpu_variables


def _as_vllm(*arguments: Any) -> dict[str, str]:
    kept = {name: value for name, value in _variables(*arguments).items() if name not in _OURS}
    return {**kept, command.START_METHOD: "spawn"}


if __name__ == "__main__":
    command._cpu_variables = _as_vllm
    main()
