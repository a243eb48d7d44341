"""The allow-list of arguments and environment variables that a profile, which is only data, may add to engines.

Many arguments and variables of vLLM and of the libraries below it run code (``--middleware``, ``--worker-cls``,
``LD_PRELOAD``, ``NCCL_NET_PLUGIN``), open addresses (``--host``), or read and write files (``--config``,
``UCX_LOG_FILE``). Those listed here do not, in vLLM 0.32.0, and their values are plain words: no paths, no JSON.
Names are compared as a whole, so that neither an abbreviation (``--middle``) nor a dotted form is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

SWITCHES = frozenset(
    {
        "--async-scheduling",
        "--disable-cascade-attn",
        "--disable-chunked-mm-input",
        "--disable-custom-all-reduce",
        "--disable-hybrid-kv-cache-manager",
        "--disable-sliding-window",
        "--enable-auto-tool-choice",
        "--enable-chunked-prefill",
        "--enable-dbo",
        "--enable-eplb",
        "--enable-expert-parallel",
        "--enable-prefix-caching",
        "--kv-sharing-fast-prefill",
        "--scheduler-reserve-full-isl",
    }
)
"""Arguments without a value; ``--no-…`` negates them."""
VALUES = frozenset(
    {
        "--all2all-backend",
        "--cpu-offload-gb",
        "--cudagraph-capture-sizes",
        "--data-parallel-size",
        "--dbo-decode-token-threshold",
        "--dbo-prefill-token-threshold",
        "--gdn-prefill-backend",
        "--long-prefill-token-threshold",
        "--mamba-block-size",
        "--mamba-cache-dtype",
        "--mamba-cache-mode",
        "--mamba-ssm-cache-dtype",
        "--max-cudagraph-capture-size",
        "--max-logprobs",
        "--max-parallel-loading-workers",
        "--optimization-level",
        "--performance-mode",
        "--pipeline-parallel-size",
        "--prefix-caching-hash-algo",
        "--quantization",
        "--reasoning-parser",
        "--scheduling-policy",
        "--stream-interval",
        "--tool-call-parser",
        "--uvicorn-log-level",
    }
)
"""Arguments with one value."""
SEVERAL = frozenset({"--cudagraph-capture-sizes"})
"""Arguments with several values, all numbers. After any other, a second word would be positional, and vLLM's server
would take it for the model."""
SETTINGS = {
    "--attention-backend": "engine.attention_backend",
    "--block-size": "engine.block_size",
    "--device-memory-utilization": "engine.gpu_memory_utilization",
    "--dtype": "engine.dtype",
    "--enable-lora": "engine.adapters",
    "--enforce-eager": "engine.enforce_eager",
    "--gpu-memory-utilization": "engine.gpu_memory_utilization",
    "--hf-overrides": "engine.hf_overrides",
    "--kv-cache-dtype": "engine.kv_cache_dtype",
    "--kv-cache-memory-bytes": "engine.kv_cache_gib",
    "--kv-events-config": "engine.kv_events",
    "--kv-transfer-config": "engine.kv_connector",
    "--lora-modules": "engine.adapters",
    "--max-lora-rank": "engine.adapters",
    "--max-loras": "engine.adapters",
    "--max-model-len": "engine.max_model_len",
    "--max-num-batched-tokens": "engine.max_num_batched_tokens",
    "--max-num-seqs": "engine.max_num_seqs",
    "--model": "target",
    "--num-gpu-blocks-override": "engine.kv_blocks",
    "--prefix-cache-retention-interval": "engine.prefix_cache_retention",
    "--spec-method": "methods",
    "--spec-model": "methods",
    "--spec-tokens": "methods",
    "--speculative-config": "methods",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "--tokenizer": "tokenizer",
    "--trust-remote-code": "trust_remote_code of the model",
    "-sc": "methods",
    "-tp": "engine.tensor_parallel",
}
"""The settings of a profile that set an argument: given beside them, it would have the last word, and plans and
judgements would go by the other."""
VARIABLES = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUBLAS_WORKSPACE_CONFIG",
        "GLOO_SOCKET_IFNAME",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "MKL_NUM_THREADS",
        "NCCL_ALGO",
        "NCCL_BUFFSIZE",
        "NCCL_CUMEM_ENABLE",
        "NCCL_DEBUG",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_IB_DISABLE",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_HCA",
        "NCCL_IB_TIMEOUT",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NVLS_ENABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_PROTO",
        "NCCL_SHM_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "UCX_IB_GID_INDEX",
        "UCX_IB_SL",
        "UCX_IB_TRAFFIC_CLASS",
        "UCX_LOG_LEVEL",
        "UCX_MAX_RNDV_RAILS",
        "UCX_MEMTYPE_CACHE",
        "UCX_NET_DEVICES",
        "UCX_RNDV_SCHEME",
        "UCX_RNDV_THRESH",
        "UCX_TLS",
        "UCX_WARN_UNUSED_ENV_VARS",
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "VLLM_BATCH_INVARIANT",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_DISABLE_COMPILE_CACHE",
        "VLLM_DISABLE_PYNCCL",
        "VLLM_ENABLE_CUDAGRAPH_GC",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
        "VLLM_FLOAT32_MATMUL_PRECISION",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_LOGGING_LEVEL",
        "VLLM_SKIP_P2P_CHECK",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "VLLM_USE_DEEP_GEMM",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_WORKER_MULTIPROC_METHOD",
    }
)
NEUTRAL_VARIABLES = frozenset(
    name for name in VARIABLES if name.startswith("UCX_") or name.endswith(("_IFNAME", "_DEBUG", "_LOGGING_LEVEL"))
)
"""Those that cannot change an answer, only which device carries bytes and what is logged: no part of a baseline."""
SETTINGS_OF_VARIABLES = {
    "VLLM_ATTENTION_BACKEND": "engine.attention_backend",
    "VLLM_CPU_KVCACHE_SPACE": "engine.kv_cache_gib",
    "VLLM_USE_V2_MODEL_RUNNER": "engine.model_runner",
}
"""The settings of a profile in whose place a variable would have the last word, as ``SETTINGS`` for arguments."""
_VALUE = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.,:|+=^-]*|-?[0-9]+(?:\.[0-9]+)?|")
"""Numbers (``-1`` too), words and lists of them. UCX and NCCL write devices as ``mlx5_0:1`` and ``^docker0``."""
_LIST_WORD = re.compile(r"\^?[A-Za-z0-9_+=][A-Za-z0-9_.,:|+=^-]*|")


def is_plain(value: str) -> bool:
    """Return whether a value is a number or a plain word, neither a path nor JSON."""
    return len(value) <= 200 and bool(_VALUE.fullmatch(value) or _LIST_WORD.fullmatch(value))


def not_plain(value: Any) -> str:
    """Return, as a sentence, that nested data has what is neither a number nor a plain word; "" if it does not."""
    strange = next(_strange(value), None)
    return "" if strange is None else f"expected numbers and plain words, neither paths nor code, found {strange!r}"


def _strange(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*_strange(key), *_strange(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strange(inner)
    elif isinstance(value, str):
        if not is_plain(value):
            yield value
    elif not isinstance(value, int | float | None):
        yield str(value)


def keys_in(value: Any) -> Iterator[str]:
    """Yield the keys of all mappings in nested data."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from keys_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from keys_in(inner)


def setting_of(name: str) -> str | None:
    """Return the setting of a profile that sets an argument, given by its name or by that of its negation; None if
    there is none."""
    # vLLM's parser treats underscores as dashes.
    return SETTINGS.get(name.replace("_", "-").replace("--no-", "--", 1))


def for_p(setting: str, on_p: Collection[str]) -> str | None:
    """Return the setting for P alone, which has these of its own; None if P has the others'."""
    name = setting.removeprefix("engine.")
    return f"engine.prefill.{name}" if name in on_p else None


def check_arguments(arguments: Sequence[str], on_p: Collection[str] = ()) -> None:
    """Raise ValueError, with a sentence for the user, for the first argument that a profile may not pass to engines.
    ``on_p`` names the settings that P has of its own, if the arguments are P's."""
    wanting = several = ""
    for argument in arguments:
        if wanting and (not argument.startswith("-") or is_plain(argument)):
            _check_value(argument)
            several = wanting if wanting in SEVERAL and argument.isdecimal() else ""
            wanting = ""
            continue
        if several and argument.isdecimal():
            continue
        if wanting:
            raise ValueError(f"{wanting}: expected a value, found {argument!r}")
        if not argument.startswith("-"):
            raise ValueError(
                f"expected an argument that begins with --, found {argument!r}, which is not the value of an argument"
            )
        several = ""
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if (setting := setting_of(name)) is not None:
            raise ValueError(
                f"expected no argument that a setting of the profile sets, found {argument!r}; use "
                f"{for_p(setting, on_p) or setting}"
            )
        switch = name.replace("--no-", "--", 1) in SWITCHES
        if name not in VALUES and not switch:
            raise ValueError(
                f"expected an argument that a profile may pass to engines (harness/profiles/engine_args.py), found "
                f"{argument!r}: arguments can run code, open addresses and read files; give your own on the command "
                f"line, --engine-arg={argument}"
            )
        if equals and switch:
            raise ValueError(f"expected {name} without a value, found {argument!r}")
        if equals:
            _check_value(value)
        wanting = "" if equals or switch else name
    if wanting:
        raise ValueError(f"{wanting}: expected a value, found none")


PIPELINE, DATA = "--pipeline-parallel-size", "--data-parallel-size"


def parallel_size(arguments: Sequence[str], names: Collection[str] = (PIPELINE, DATA)) -> int:
    """Return over how many times the devices of tensor parallelism these arguments spread an engine. Raises ValueError
    for a size that is not a whole number above 0."""
    size = 1
    for name, value in values_of(arguments, names):
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{name}: expected a whole number above 0, found {value!r}")
        size *= int(value)
    return size


def values_of(arguments: Sequence[str], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each of the named options among these arguments, as it is written, with its value."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in names:
            yield name, value if equals else arguments[place + 1]


_CACHING = ("--enable-prefix-caching", "--no-enable-prefix-caching")


def caches_prefixes(arguments: Sequence[str]) -> bool:
    """Return whether engines have a prefix cache: unless the last word on it is no."""
    told = [a for a in arguments if a.replace("_", "-") in _CACHING]
    return not told or told[-1].replace("_", "-") == _CACHING[0]


def _check_value(value: str) -> None:
    if not is_plain(value):
        raise ValueError(f"expected a number or a plain word, neither a path nor JSON, found {value!r}")


def check_variables(variables: Mapping[str, str]) -> None:
    """Raise ValueError, with a sentence for the user, for the first variable that a profile may not set for engines."""
    for name, value in variables.items():
        if (setting := SETTINGS_OF_VARIABLES.get(name)) is not None:
            raise ValueError(f"expected no variable that a setting of the profile sets, found {name}; use {setting}")
        if name not in VARIABLES:
            raise ValueError(
                f"expected a variable that a profile may set for engines (harness/profiles/engine_args.py), found "
                f"{name}: variables can run code, open addresses and carry secrets; give your own on the command line, "
                f"--engine-env={name}=…"
            )
        if not is_plain(value):
            raise ValueError(f"{name}: expected a number or a plain word, not a path, found {value!r}")
