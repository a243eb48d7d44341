"""The command line and environment of one vLLM server. Facts: vLLM 0.32.0, measured on its CPU build."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from harness import redact
from harness.config import EngineConfig, Method, NoSpeculation, Profile
from harness.engine.environment import PER_REQUEST, EngineEnvironment
from harness.engine.key import GUARD, ApiKey, guarded_path, joined_path
from harness.errors import EngineStartError
from harness.remote_code import require_loadable, trusts_code

Role = Literal["single", "prefill", "decode"]
LOOPBACK = "127.0.0.1"
MODEL_NAME = "target"

# Inherited variables that would change what is tested, and the one that forbids bytecode files: without them each of an
# engine's three processes compiles vLLM and torch anew, and a pair took 65 to 68 s to be ready instead of 30 to 55.
SCRUBBED_PREFIXES = ("VLLM_", "OMP_", "KMP_", "UCX_", "NIXL_", "LD_PRELOAD", "PYTHONDONTWRITEBYTECODE", "KV_HARNESS_")


def full_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What a started process gets: the inherited variables that cannot change what is tested, and its own."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(SCRUBBED_PREFIXES)}
    # Engines fetch nothing: no token is for them.
    base = redact.without_secrets(base)
    if "PYTHONPATH" in env:
        env = {**env, "PYTHONPATH": joined_path(env["PYTHONPATH"], base.get("PYTHONPATH", ""))}
    return {**base, **env}


def url_of(host: str, port: int) -> str:
    """The address of a server; IPv6 addresses are put in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ServerCommand(Protocol):
    """How to start a server: an engine or a router."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def argv(self) -> list[str]: ...
    @property
    def env(self) -> dict[str, str]: ...


class EngineCommand(NamedTuple):
    """How to start one engine."""

    role: Role
    port: int
    side_channel_port: int | None
    argv: list[str]
    env: dict[str, str]
    """The variables set on top of the scrubbed environment; recorded in run.json."""
    host: str = LOOPBACK
    """Where it listens."""

    @property
    def name(self) -> str:
        return f"{self.role} engine"


def speculative_config(method: Method) -> dict[str, object] | None:
    """vLLM's ``--speculative-config`` for a method."""
    if isinstance(method, NoSpeculation):
        return None
    drafter = {"model": str(method.drafter_path)} if method.drafter is not None else {}
    return {"method": method.kind, **drafter, "num_speculative_tokens": method.num_speculative_tokens}


def build_command(
    profile: Profile,
    method: Method,
    role: Role,
    environment: EngineEnvironment,
    port: int,
    side_channel_port: int | None,
    devices: Sequence[str] = (),
    host: str = LOOPBACK,
    arming: Mapping[str, str] | None = None,
    key: ApiKey | None = None,
) -> EngineCommand:
    """Assemble the server command. ``devices`` are the numbers of the cores, or the ids of the GPUs, that the engine
    gets, one for each tensor-parallel rank; none leaves the choice to vLLM. ``host`` is the address that it listens on;
    ``arming`` is the environment of a mutant, when one is put in. Without a ``key`` whoever starts the engine has to
    add one, because its guard does not let it start without. Raises EnvironmentFault when the models must not be loaded
    as the profile says, and EngineStartError when there are other devices than ranks."""
    require_loadable(profile, method)
    engine = profile.engine
    argv = [environment.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--host", host, "--port", str(port)]
    argv += ["--model", str(profile.target_folder), "--served-model-name", MODEL_NAME]
    argv += ["--tokenizer", str(profile.tokenizer_folder)]
    # Numbers alone: a pickled checkpoint, which vLLM takes where there are no safetensors, runs code.
    argv += ["--load-format", "safetensors"]
    if trusts_code(profile, method):
        argv += ["--trust-remote-code"]
    argv += ["--dtype", engine.dtype, "--block-size", str(engine.block_size)]
    argv += ["--max-model-len", str(engine.max_model_len), "--max-num-seqs", str(engine.max_num_seqs)]
    argv += ["--seed", "0", "--no-enable-log-requests", "--middleware", GUARD]
    if engine.enforce_eager:
        argv += ["--enforce-eager"]
    if engine.kv_cache_dtype != "auto":
        argv += ["--kv-cache-dtype", engine.kv_cache_dtype]
    if engine.attention_backend is not None:
        argv += ["--attention-backend", engine.attention_backend]
    if engine.kv_blocks is not None:
        argv += ["--num-gpu-blocks-override", str(engine.kv_blocks)]
    if engine.max_num_batched_tokens is not None:
        argv += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    speculation = speculative_config(method)
    if speculation is not None:
        argv += ["--speculative-config", json.dumps(speculation, sort_keys=True)]
        if environment.has(PER_REQUEST):
            argv += ["--per-request-spec-decode-metrics", "detailed"]
    if role != "single":
        transfer: dict[str, object] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": engine.kv_buffer_device,
        }
        extra = {"kv_lease_duration": engine.kv_lease_s}
        if engine.nixl_threads is not None:
            extra["num_threads"] = engine.nixl_threads
        transfer["kv_connector_extra_config"] = extra
        argv += ["--kv-transfer-config", json.dumps(transfer, sort_keys=True)]
    if engine.device == "gpu":
        argv += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
        argv += ["--kv-cache-memory-bytes", str(engine.kv_cache_gib * 2**30)]
    ranks = engine.tensor_parallel.of(role)
    if devices and len(devices) != ranks:
        raise EngineStartError(
            f"expected {ranks} devices for the {role} engine (engine.tensor_parallel), found {', '.join(devices)}; "
            "lower it, or use a machine with more devices"
        )
    if ranks > 1:
        argv += ["--tensor-parallel-size", str(ranks)]
    argv += list(engine.extra_args)
    variables = {**_variables(profile, environment, side_channel_port, devices, host), **(arming or {})}
    variables = {**guarded_path(variables), **(key.environment if key is not None else {})}
    return EngineCommand(role, port, side_channel_port, argv, variables, host)


def _variables(
    profile: Profile,
    environment: EngineEnvironment,
    side_channel_port: int | None,
    devices: Sequence[str],
    host: str,
) -> dict[str, str]:
    engine = profile.engine
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    # Adds /pause, /resume, /reset_prefix_cache and /server_info, which the scenarios need; like every other path they
    # ask for the key.
    env["VLLM_SERVER_DEV_MODE"] = "1"
    if engine.device == "cpu":
        env |= _cpu_variables(engine, environment, devices)
    elif engine.device == "gpu":
        if profile.batch_invariant:
            env["VLLM_BATCH_INVARIANT"] = "1"
        if devices:
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if engine.model_runner is not None:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1" if engine.model_runner == "V2" else "0"
    if side_channel_port is not None:
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        }
        if engine.device == "cpu":
            env["UCX_TLS"] = "tcp,sm,self"
            if host == LOOPBACK:
                # UCX listens on every interface that it may use: without this one port of each worker was open on the
                # machine's own address.
                env["UCX_NET_DEVICES"] = "lo"
    return {**env, **engine.env}


def _cpu_variables(engine: EngineConfig, environment: EngineEnvironment, devices: Sequence[str]) -> dict[str, str]:
    """One core and one thread per rank: two engines that both bind all cores starve each other, and one thread
    everywhere keeps the order of float additions, hence the tokens, the same in every topology."""
    env = {"VLLM_CPU_KVCACHE_SPACE": str(engine.kv_cache_gib), "OMP_NUM_THREADS": "1"}
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(devices) or "nobind"
    if environment.openmp is not None:
        env["LD_PRELOAD"] = str(environment.openmp)
    return env
