"""The command line and environment of one vLLM server, written for vLLM 0.32.0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.engines.api_key import GUARD, ApiKey, guarded_path
from harness.engines.environment import EngineEnvironment
from harness.engines.event_log import subscription
from harness.engines.guard.kv_harness_fork import CPU_VARIABLE, METHOD_VARIABLE
from harness.engines.guard.kv_harness_guard import KEY_VARIABLE
from harness.engines.witness.kv_harness_witness import FOLDER_VARIABLE, NAME_VARIABLE
from harness.errors import EngineStartError
from harness.history.engine_interfaces import CACHED_TOKENS_FLAG, PER_REQUEST, PER_REQUEST_FLAG
from harness.profiles.availability import models_of
from harness.profiles.cells import Role
from harness.profiles.connectors import MULTI, is_nixl
from harness.profiles.engine_config import ADAPTER_CONFIG, EngineConfig
from harness.profiles.kv_layout import recurrent, target_config
from harness.profiles.methods import Method, engine_config
from harness.profiles.model import Profile
from harness.profiles.remote_code import require_loadable, trusts_code
from harness.redact import MARK
from harness.supervision.server import LOOPBACK, joined_path
from harness.util import json_io
from harness.util.json_io import MIB

MODEL_NAME = "target"
INTERPRETER = Path(__file__).resolve().parent / "interpreter"
"""Declares a back end of Triton to engines (``kv_harness_triton``)."""
_WITNESS = Path(__file__).resolve().parent / "witness"
"""Declares a plugin to engines that notes what their KV caches hold (``kv_harness_witness``)."""
START_METHOD = METHOD_VARIABLE
PROGRAM = "vllm.entrypoints.openai.api_server"
PRELOADED = (PROGRAM, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "compressed_tensors", "ray")
"""What CPU engines import, but for what starts threads (NIXL)."""


class NotesOfKV(NamedTuple):
    """Where an engine writes what its KV caches hold."""

    folder: Path
    name: str
    """What its files' names begin with: its group and role."""


class EngineCommand(NamedTuple):
    """The command that starts one engine."""

    role: Role
    port: int
    side_channel_port: int | None
    argv: list[str]
    env: dict[str, str]
    """The variables set on top of the scrubbed environment; recorded in run.json."""
    host: str = LOOPBACK
    """The address that it listens on."""
    preloads: bool = True
    """Whether modules may be imported before its own variables are set, which some read when they are imported."""

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules to import before the engine is forked; none where its processes are not forked either, nor for
        GPUs."""
        forks = self.argv[1:3] == ["-m", PROGRAM] and self.env.get(START_METHOD) == "fork"
        return PRELOADED if forks and CPU_VARIABLE in self.env and self.preloads else ()

    @property
    def name(self) -> str:
        return f"{self.role} engine"


_KV_ROLES: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}


def _transfer_config(engine: EngineConfig, role: Role) -> dict[str, Any]:
    """Return vLLM's ``--kv-transfer-config`` for an engine of a pair."""
    given = engine.kv_connector_extra_config
    name = engine.kv_connector or ("NixlPushConnector" if engine.pushes else "NixlConnector")
    config = _connector(engine, role, {"kv_connector": name, "kv_connector_extra_config": given})
    if name == MULTI:
        children = [_connector(engine, role, child) for child in given["connectors"]]
        config["kv_connector_extra_config"] = {**given, "connectors": children}
    if engine.kv_load_failure_policy != "fail":
        config["kv_load_failure_policy"] = engine.kv_load_failure_policy
    return config


def _connector(engine: EngineConfig, role: Role, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of one connector with what the profile's other settings say of it."""
    kv_role = _KV_ROLES[role] if engine.kv_roles == "split" else "kv_both"
    extra = dict(given.get("kv_connector_extra_config") or {})
    if is_nixl(given["kv_connector"]):
        extra["kv_lease_duration"] = engine.kv_lease_s
        if engine.nixl_threads is not None:
            extra["num_threads"] = engine.nixl_threads
    own = {"kv_role": kv_role, "kv_buffer_device": engine.kv_buffer_device, "kv_connector_extra_config": extra}
    return {**given, **own}


def build_command(
    profile: Profile,
    method: Method,
    role: Role,
    environment: EngineEnvironment,
    port: int,
    side_channel_port: int | None,
    devices: Sequence[str] = (),
    host: str = LOOPBACK,
    extra_env: Mapping[str, str] | None = None,
    key: ApiKey | None = None,
    witness: NotesOfKV | None = None,
    events: str | None = None,
) -> EngineCommand:
    """Assemble the server command.

    ``devices`` are the core numbers or GPU ids that the engine gets, one per tensor-parallel rank; an empty sequence
    leaves the choice to vLLM. ``extra_env`` overrides other variables. Without a ``key``, the caller has to add one
    before starting the engine, because its guard does not let it start without. ``witness`` says where the engine
    writes what its KV caches hold; None lets it write nothing. ``events`` is where it publishes its KV events.

    Raises EnvironmentFault when the profile does not permit the models to be loaded, and EngineStartError when the
    number of devices differs from that of the ranks.
    """
    require_loadable(models_of(profile, method))
    engine = profile.engine.of(role)
    argv = [environment.executable, "-m", PROGRAM]
    argv += ["--host", host, "--port", str(port)]
    argv += ["--model", str(profile.target_folder), "--served-model-name", MODEL_NAME]
    argv += ["--tokenizer", str(profile.tokenizer_folder)]
    # Without this, vLLM falls back to pickled checkpoints, which can run code.
    argv += ["--load-format", "safetensors"]
    if trusts_code(models_of(profile, method)):
        argv += ["--trust-remote-code"]
    argv += ["--dtype", engine.dtype, "--block-size", str(engine.block_size)]
    argv += ["--max-model-len", str(engine.max_model_len), "--max-num-seqs", str(engine.max_num_seqs)]
    argv += ["--seed", "0", "--no-enable-log-requests", CACHED_TOKENS_FLAG, "--middleware", GUARD]
    if engine.enforce_eager:
        argv += ["--enforce-eager"]
    if engine.hf_overrides:
        argv += ["--hf-overrides", json.dumps(engine.hf_overrides, sort_keys=True)]
    if engine.kv_cache_dtype != "auto":
        argv += ["--kv-cache-dtype", engine.kv_cache_dtype]
    if engine.attention_backend is not None:
        argv += ["--attention-backend", engine.attention_backend]
    if engine.kv_blocks is not None:
        argv += ["--num-gpu-blocks-override", str(engine.kv_blocks)]
    if engine.max_num_batched_tokens is not None:
        argv += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if engine.prefix_cache_retention is not None:
        argv += ["--prefix-cache-retention-interval", str(engine.prefix_cache_retention)]
    argv += _of_adapters(engine)
    if events is not None:
        argv += ["--kv-events-config", json.dumps(subscription(events), sort_keys=True)]
    speculation = engine_config(method)
    if speculation is not None:
        argv += ["--speculative-config", json.dumps(speculation, sort_keys=True)]
        if environment.has(PER_REQUEST):
            argv += [PER_REQUEST_FLAG, "detailed"]
    if role != "single":
        argv += ["--kv-transfer-config", json.dumps(_transfer_config(engine, role), sort_keys=True)]
    if engine.device == "gpu":
        argv += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
        argv += ["--kv-cache-memory-bytes", str(engine.kv_cache_gib * 2**30)]
    ranks, wanted = engine.tensor_parallel.of(role), engine.devices_of(role)
    if devices and len(devices) != wanted:
        raise EngineStartError(
            f"expected {wanted} devices for the {role} engine (engine.tensor_parallel, and the parallel sizes of "
            f"engine.extra_args), found {len(devices)}: {', '.join(devices)}; lower them, or use a machine with "
            "more devices"
        )
    if ranks > 1:
        argv += ["--tensor-parallel-size", str(ranks)]
    argv += list(engine.extra_args)
    flags = environment.flags
    variables = variables_of(profile, environment, role, side_channel_port, devices, host)
    if engine.device == "cpu" and _needs_triton(profile, method, role):
        # Of Triton's kernels CPUs have an interpreter alone.
        variables |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_BACKEND": "cpu", "PYTHONPATH": str(INTERPRETER)}
    openmp = {"LD_PRELOAD": "an OpenMP library"} if engine.device == "cpu" else {}
    flags.require_free(role, argv, {KEY_VARIABLE: MARK, **openmp, **variables})
    argv += flags.argv(role)
    if witness is not None:
        path = joined_path(str(_WITNESS), variables.get("PYTHONPATH", ""))
        variables |= {FOLDER_VARIABLE: str(witness.folder), NAME_VARIABLE: witness.name, "PYTHONPATH": path}
    more = {**flags.env(role), **(extra_env or {})}
    if "PYTHONPATH" in more:
        # Of a fault that is injected, beside Triton's interpreter and the witness.
        more["PYTHONPATH"] = joined_path(more["PYTHONPATH"], variables.get("PYTHONPATH", ""))
    variables = {**variables, **more}
    variables = {**guarded_path(variables), **(key.environment if key is not None else {})}
    return EngineCommand(role, port, side_channel_port, argv, variables, host, preloads=not flags.env(role))


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM 0.32.0 can be told (``MaxLoRARanks``)."""


def _of_adapters(engine: EngineConfig) -> list[str]:
    """Return the arguments for an engine that serves LoRA adapters, and has room for those of one step beside."""
    if not engine.adapters:
        return []
    configs = (json_io.loads(json_io.read_text(f / ADAPTER_CONFIG, MIB)) for f in engine.adapters.values())
    largest = max(int(config["r"]) for config in configs)
    rank = next((r for r in _RANKS if r >= largest), largest)
    named = [f"{name}={folder}" for name, folder in engine.adapters.items()]
    return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(len(named)), "--lora-modules", *named]


def _needs_triton(profile: Profile, method: Method, role: Role) -> bool:
    """Return whether vLLM launches kernels for which its CPU platform has no others: those of runner V2, and with
    speculation those that copy recurrent states. Where they can run, vLLM chooses V2 if the profile names no runner."""
    speculates = engine_config(method) is not None
    return profile.engine.of(role).model_runner == "V2" or (speculates and recurrent(target_config(profile)))


def variables_of(
    profile: Profile,
    environment: EngineEnvironment,
    role: Role,
    side_channel_port: int | None,
    devices: Sequence[str],
    host: str = LOOPBACK,
) -> dict[str, str]:
    """Return the environment variables of an engine, without those of its method, flags, key and witness."""
    engine = profile.engine.of(role)
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    # Adds /pause, /resume, /reset_prefix_cache and /server_info, which the scenarios need; like every other path, they
    # require the key.
    env["VLLM_SERVER_DEV_MODE"] = "1"
    if engine.adapters:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if engine.device == "cpu":
        env |= _cpu_variables(engine, environment, role, devices)
    elif engine.device == "gpu":
        # vLLM's server spawns its engine, which imports everything anew, unless this says otherwise; it does so all the
        # same where CUDA was initialised.
        env[START_METHOD] = "fork"
        if profile.batch_invariant:
            env["VLLM_BATCH_INVARIANT"] = "1"
        if devices:
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if engine.model_runner is not None:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1" if engine.model_runner == "V2" else "0"
    if side_channel_port is not None:
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port)}
        if engine.device == "cpu":
            env["UCX_TLS"] = "tcp,sm,self"
            if host == LOOPBACK:
                # UCX listens on every interface that it may use: without this, a port of each worker would be open on
                # the machine's own address.
                env["UCX_NET_DEVICES"] = "lo"
    return {**env, **engine.env}


def _cpu_variables(
    engine: EngineConfig, environment: EngineEnvironment, role: Role, devices: Sequence[str]
) -> dict[str, str]:
    """Return the variables for one core and one thread per rank, and for as few processes and imports as vLLM permits.

    Two engines that both bind all cores starve each other, and a single thread keeps the order of floating-point
    additions, hence the tokens, the same in every topology.
    """
    env = {"VLLM_CPU_KVCACHE_SPACE": str(engine.kv_cache_gib), "OMP_NUM_THREADS": "1"}
    env[CPU_VARIABLE] = "|".join(devices) or "nobind"
    # Obeyed thanks to ``kv_harness_fork``.
    env[START_METHOD] = "fork"
    if engine.devices_of(role) == 1:
        # The model runs in the engine core's process, as on one GPU. A worker of its own spins on the same core.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if engine.enforce_eager:
        # vLLM still compiles a few helpers, such as the one that ranks log-probs, at the first request.
        env["TORCH_COMPILE_DISABLE"] = "1"
    if environment.openmp is not None:
        env["LD_PRELOAD"] = str(environment.openmp)
    return env
