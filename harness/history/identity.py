"""The identity of a recording: models, prompts, method and settings, by hash."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from harness.history.folder import History
from harness.profiles.cells import CellName
from harness.profiles.engine_args import NEUTRAL_VARIABLES
from harness.profiles.methods import Method
from harness.profiles.model import Profile
from harness.scheduling.gpus import gpu_name
from harness.util.files import model_hash, template_hash, tokenizer_hash
from harness.util.strict import Strict


class Identity(Strict):
    """What a baseline belongs to. A comparison requires all fields to be equal, except for the two kinds of field that
    ``harness.baselines.lookup`` tolerates."""

    target_sha256: str
    drafter_sha256: str | None
    tokenizer_sha256: str
    template_sha256: str
    prompts_sha256: str
    method: str
    draft_tokens: int = Field(ge=0, le=64)
    speculative_config: dict[str, Any] = Field(default_factory=dict)
    """What the profile gives vLLM's ``--speculative-config`` beside drafter and k; empty for the short forms."""
    block_size: int
    dtype: str
    kv_dtype: str = "auto"
    max_tokens: int
    tensor_parallel: int = 1
    """Number of devices of the answering engine."""
    enforce_eager: bool = True
    """Part of the identity because compiled kernels and graphs round differently."""
    batch_invariant: bool = False
    """Whether kernels give results that do not depend on the batch (``VLLM_BATCH_INVARIANT``)."""
    step_tokens: int | None
    """Token budget of an engine step: chunked prefill changes what EAGLE3 and MTP drafters see."""
    temperature: float = 0.0
    at_once: int = 1
    """Most prompts under way at once, where the noise of crowds is part of the answers (normal tier)."""
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    """Values that replace those in the target's ``config.json``, or are added to it."""
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables that the profile sets for every engine, without those that cannot change an answer."""
    hardware: str = "cpu"
    """``cpu``, or the name of the GPU."""
    attention_backend: str | None = None
    """As the engine reports it; None if it does not."""
    model_runner: str | None = None
    vllm: str | None = None
    """Version of vLLM."""

    @model_serializer(mode="wrap")
    def _without_empty_config(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty configurations: identities of those who need none stay as they were recorded."""
        usual = {"speculative_config": {}, "hf_overrides": {}, "at_once": 1}
        return {k: v for k, v in handler(self).items() if k not in usual or v != usual[k]}


def identity_of(
    profile: Profile, method: Method, prompts_sha256: str, vllm: str | None = None, gpus: tuple[str, ...] = ()
) -> Identity:
    """Return the identity of a method under a profile, with hashes of the files that the engines load.

    ``identity_in`` adds what only a running engine knows.
    """
    drafter = method.drafter_path
    return Identity(
        target_sha256=model_hash(profile.target_folder),
        drafter_sha256=model_hash(drafter) if drafter else None,
        tokenizer_sha256=tokenizer_hash(profile.tokenizer_folder),
        template_sha256=template_hash(profile.tokenizer_folder),
        prompts_sha256=prompts_sha256,
        method=method.kind,
        draft_tokens=method.draft_tokens,
        speculative_config=method.given_config,
        block_size=profile.engine.block_size,
        dtype=profile.engine.dtype,
        kv_dtype=profile.engine.kv_cache_dtype,
        max_tokens=profile.workload.max_tokens,
        step_tokens=profile.engine.max_num_batched_tokens,
        tensor_parallel=profile.engine.tensor_parallel.decode,
        enforce_eager=profile.engine.enforce_eager,
        batch_invariant=profile.batch_invariant,
        at_once=profile.workload.at_once if profile.judging.tier == "normal" else 1,
        hf_overrides=profile.engine.hf_overrides,
        extra_args=profile.engine.extra_args,
        env={name: value for name, value in profile.engine.env.items() if name not in NEUTRAL_VARIABLES},
        hardware="cpu" if profile.engine.device == "cpu" else gpu_name(gpus),
        vllm=vllm,
    )


def identity_in(history: History, lineup: str) -> Identity:
    """Return a lineup's identity in a recorded run, with what its answering engine reported. Raises KeyError when the
    run has none, and ValidationError when it is damaged."""
    identity = Identity.model_validate(history.run.identities[lineup])
    answering = [e for e in history.run.engines if e.role in ("single", "decode")]
    engine = next((e for e in answering if CellName.of(e.group).lineup == lineup), None)
    if engine is None:
        return identity
    return identity.model_copy(
        update={"attention_backend": engine.attention_backend, "model_runner": engine.model_runner}
    )
