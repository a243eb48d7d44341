"""Settings of the engines of a profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from harness.profiles import connectors
from harness.profiles.engine_args import check_arguments, check_variables, keys_in, not_plain, parallel_size
from harness.util.names import ShortName
from harness.util.strict import Strict

ADAPTER_CONFIG = "adapter_config.json"
"""File of a LoRA adapter that says its rank."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NAMES_CODE = re.compile(r"auto_map|.*module_path|.*_file")
"""Keys of a model's config whose values name code or files."""
DeviceKind = Literal["cpu", "gpu"]
BLOCK_MULTIPLES: Mapping[DeviceKind, int] = {"cpu": 32, "gpu": 16}
"""Tokens of a KV block, of which vLLM's attention takes multiples."""


def misfit_block(size: int, device: DeviceKind) -> str:
    """Return, as a sentence, that vLLM has no attention with blocks of so many tokens; "" if it does. On CPUs, that of
    MLA wants 16."""
    multiple = BLOCK_MULTIPLES[device]
    if size % multiple == 0 or (device == "cpu" and size == 16):
        return ""
    near = (size // multiple * multiple, (size // multiple + 1) * multiple)
    return (
        f"expected a multiple of {multiple}, as vLLM's attention on {device} wants, found {size}; give "
        f"{' or '.join(str(n) for n in near if n)}"
    )


class TensorParallel(Strict):
    """Number of devices that each engine is spread over."""

    prefill: int = Field(default=1, ge=1, le=64)
    decode: int = Field(default=1, ge=1, le=64)
    """Also applies to single engines, so that both have the same arithmetic."""

    def of(self, role: str) -> int:
        return self.prefill if role == "prefill" else self.decode


class OnPrefill(Strict):
    """Settings in which P differs from D and from single engines; None: as theirs."""

    block_size: int | None = Field(default=None, ge=8, le=1024)
    max_num_seqs: int | None = Field(default=None, ge=1)
    kv_blocks: int | None = Field(default=None, ge=8)
    max_num_batched_tokens: int | None = Field(default=None, ge=32)
    attention_backend: str | None = Field(default=None, pattern=r"^[A-Z0-9_]+$")
    model_runner: Literal["V1", "V2"] | None = None
    kv_cache_dtype: str | None = None
    extra_args: tuple[str, ...] | None = None
    """Instead of the others' ``extra_args``."""

    @field_validator("extra_args")
    @classmethod
    def _allowed_arguments(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        check_arguments(value or (), cls.model_fields)
        if parallel_size(value or ()) != 1:
            raise ValueError(
                "expected P spread over as many devices as engine.extra_args says, found a size of its own"
            )
        return value


class EngineConfig(Strict):
    """Settings of every engine of the profile."""

    device: DeviceKind
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    block_size: int = Field(default=32, ge=8, le=1024)
    max_model_len: int = Field(default=512, ge=64)
    max_num_seqs: int = Field(default=4, ge=1)
    kv_cache_gib: int = Field(default=1, ge=1)
    """Memory of the KV pool. On a GPU it is set, not measured: engines that start on one GPU at the same time would
    mistake each other's allocations for their own."""
    kv_blocks: int | None = Field(default=None, ge=8)
    """Blocks of the KV pool (``--num-gpu-blocks-override``); None lets vLLM use all memory that it is given. A small
    pool reuses blocks that hold other prompts' KV, where those of a fresh one are all zeros."""
    max_num_batched_tokens: int | None = Field(default=None, ge=32)
    """Most tokens of one engine step; a longer prompt is prefilled in chunks. None keeps vLLM's default."""
    prefix_cache_retention: int | None = Field(default=None, ge=0)
    """``--prefix-cache-retention-interval``: of layers with windows or recurrent state, the prefix cache keeps what a
    hit needs at each multiple of so many tokens; 0, vLLM's default (None), only where a prompt would be asked again."""
    kv_buffer_device: Literal["cpu", "cuda"] = "cpu"
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=0.95)
    """Fraction of a GPU's memory for one engine, weights and KV included; two of 0.45 fit on one GPU."""
    tensor_parallel: TensorParallel = TensorParallel()
    placement: Literal["together", "apart", "any"] = "any"
    """GPUs of a pair: P and D on the same ones, on different ones, or as it packs best. With fewer GPUs than different
    ones need, P and D share them, which is said."""
    enforce_eager: bool = True
    """Disable compilation and CUDA graphs: starts are several times faster, and arithmetic is the same in every
    topology. Most users run with False."""
    attention_backend: str | None = Field(default=None, pattern=r"^[A-Z0-9_]+$")
    """``--attention-backend``; None lets vLLM choose."""
    model_runner: Literal["V1", "V2"] | None = None
    """``VLLM_USE_V2_MODEL_RUNNER``; None lets vLLM choose."""
    nixl_threads: int | None = Field(default=None, ge=0)
    """Threads of the NIXL agent (``num_threads`` of the connector's extra config); None keeps vLLM's default of 4."""
    kv_roles: Literal["both", "split"] = "both"
    """``kv_role`` of a pair's engines: ``kv_both`` for each, or ``kv_producer`` for P and ``kv_consumer`` for D."""
    kv_transfer: Literal["pull", "push"] = "pull"
    """Who moves KV: D reads from P (``NixlConnector``), or P writes into D's blocks (``NixlPushConnector``)."""
    kv_connector: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_]+$")
    """vLLM's connector of a pair; None: the one of NIXL that ``kv_transfer`` says. Without NIXL, alone or among those
    of a ``MultiConnector``, nothing proves what was moved, and pairs cannot pass."""
    kv_connector_extra_config: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the connector, such as the ``connectors`` of a ``MultiConnector``."""
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """What D does with a request whose KV it cannot fetch: answer with an error, or compute the prompt by itself."""
    kv_lease_s: int = Field(default=30, ge=6)
    """Seconds that P keeps the blocks of an answered request for D (``kv_lease_duration``; vLLM's default is 30)."""
    kv_cache_dtype: str = "auto"
    """``--kv-cache-dtype``; ``auto`` keeps the model's."""
    adapters: dict[ShortName, Path] = Field(default_factory=dict)
    """LoRA adapters of the target that the engines serve beside it, by their names. Others may be loaded while they
    run (``VLLM_ALLOW_RUNTIME_LORA_UPDATING``)."""
    kv_events: bool = False
    """Whether engines tell a subscriber of the harness what their prefix caches have (``--kv-events-config``)."""
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    """``--hf-overrides``: values that replace those in the target's ``config.json``, or are added to it."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for vLLM, of those that ``harness.profiles.engine_args`` allows."""
    env: dict[str, str] = Field(default_factory=dict)
    prefill: OnPrefill | None = None
    """Where P is set up unlike D."""

    @property
    def largest_block(self) -> int:
        """Tokens of the larger block, where P's are of another size than D's."""
        return max(self.block_size, self.of("prefill").block_size)

    def of(self, role: str) -> EngineConfig:
        """Return the settings of the engine with a role."""
        if self.prefill is None or role != "prefill":
            return self
        return self.model_copy(update=self.prefill.model_dump(exclude_none=True))

    @field_validator("block_size", "prefill")
    @classmethod
    def _fits_attention(cls, value: int | OnPrefill | None, info: ValidationInfo) -> int | OnPrefill | None:
        size = value.block_size if isinstance(value, OnPrefill) else value
        # Without a device that is valid, there is another problem.
        if size is not None and "device" in info.data and (problem := misfit_block(size, info.data["device"])):
            raise ValueError(f"block_size: {problem}" if isinstance(value, OnPrefill) else problem)
        return value

    @field_validator("env")
    @classmethod
    def _allowed_variables(cls, value: dict[str, str]) -> dict[str, str]:
        hidden = sorted(k for k in value if k.startswith("KV_HARNESS_"))
        if hidden:
            raise ValueError(f"{', '.join(hidden)} would silently inject a fault; use `harness run --mutant FAULT`")
        check_variables(value)
        return value

    @field_validator("hf_overrides")
    @classmethod
    def _plain_overrides(cls, value: dict[str, Any]) -> dict[str, Any]:
        if code := next((key for key in keys_in(value) if _NAMES_CODE.fullmatch(key)), None):
            raise ValueError(
                f"{code} is not allowed, since it names code or a file and a profile is only data; remove it"
            )
        if problem := not_plain(value):
            raise ValueError(problem)
        return value

    @field_validator("extra_args")
    @classmethod
    def _allowed_arguments(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        check_arguments(value)
        parallel_size(value)
        return value

    def devices_of(self, role: str) -> int:
        """Return how many devices an engine is spread over: tensor × pipeline × data parallel size."""
        return self.tensor_parallel.of(role) * parallel_size(self.extra_args)

    @property
    def pulls_by_nixl(self) -> bool:
        """Whether D reads hand-offs by NIXL, with P's parameters."""
        return self.by_nixl and not self.pushes

    @property
    def pushes(self) -> bool:
        """Whether P writes KV into D's blocks, and counts it."""
        return self.kv_transfer == "push" or connectors.pushes(self.kv_connector, self.kv_connector_extra_config)

    @property
    def read_back_s(self) -> float:
        """Seconds for which D keeps the blocks of an answer, from where P may read them for the next turn; 0: it does
        not keep them."""
        extra = self.kv_connector_extra_config
        return float(extra.get("decoder_kv_blocks_ttl", 480)) if extra.get("bidirectional_kv_xfer") else 0.0

    @property
    def by_nixl(self) -> bool:
        """Whether NIXL moves the KV of a pair, and counts it."""
        return connectors.by_nixl(self.kv_connector, self.kv_connector_extra_config)

    @model_validator(mode="after")
    def _connects(self) -> Self:
        if self.kv_connector is not None and self.kv_transfer == "push":
            raise ValueError(
                "kv_connector and kv_transfer: push exclude each other; name NixlPushConnector, or one with it, as "
                f"kv_connector, instead of {self.kv_connector}"
            )
        for problem in connectors.problems(self.kv_connector, self.kv_connector_extra_config):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _offered_on_cpu(self) -> Self:
        if self.device == "cpu" and "--async-scheduling" in self.extra_args:
            raise ValueError(
                "--async-scheduling has no effect with device cpu, where vLLM schedules synchronously without saying "
                "so; leave it out"
            )
        return self
