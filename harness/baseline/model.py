"""What a baseline is. One record is two files: ``<stem>.json`` to read, ``<stem>.csv`` with one line per prompt.

Topology is not in the identity: P/D and single engine share one reference, or P/D could never be wrong.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from harness.strict import Strict

FORMAT = "kv-acceptance-harness/baseline/2"


class Identity(Strict):
    """What a baseline belongs to. Comparing is refused unless every field is equal; see ``harness.baseline.lookup``
    for the two kinds of field that are let off."""

    target_sha256: str
    drafter_sha256: str | None
    tokenizer_sha256: str
    template_sha256: str
    prompts_sha256: str
    method: str
    draft_tokens: int = Field(ge=0, le=64)
    block_size: int
    dtype: str
    kv_dtype: str = "auto"
    max_tokens: int
    tensor_parallel: int = 1
    """Devices of the answering engine."""
    enforce_eager: bool = True
    """Compiled kernels and graphs round otherwise."""
    batch_invariant: bool = False
    """Kernels whose results do not depend on the batch (``VLLM_BATCH_INVARIANT``)."""
    step_tokens: int | None
    """Token budget of an engine step: prefill in chunks changes what EAGLE3 and MTP drafters see."""
    temperature: float = 0.0
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Settings beyond the named ones that every engine gets."""
    hardware: str = "cpu"
    """``cpu``, or the name of the GPU."""
    attention_backend: str | None = None
    """As the engine reports it; None when it does not."""
    model_runner: str | None = None
    vllm: str | None = None
    """Version of vLLM."""


class Provenance(Strict):
    """Where a baseline comes from. Differences are notices: comparing versions is what baselines are for."""

    recorded: str
    run_id: str
    command: tuple[str, ...]
    git_commit: str | None
    versions: dict[str, str | None]
    hardware: dict[str, Any]


CLOSE_NATS = 1.0
"""Distances above this are no near ties in any arithmetic in use (0.25 to 0.36 nats were seen with bf16)."""


class Again(Strict):
    """The same prompt asked once more of the same engine: what two equal runs differ by."""

    divergence: int | None
    """First output token that differs; None when all are equal."""
    gap: float | None
    """Top-2 log-prob distance of the reference there, in nats."""
    steps: int
    accepted_at: tuple[int, ...]
    """Steps that accepted the draft at position p."""


class Row(Strict):
    """Reference of one prompt."""

    prompt_id: str
    prompt_sha256: str
    output_ids: tuple[int, ...]
    min_top_gap: float | None
    """Smallest top-2 log-prob distance over the output, in nats."""
    accepted: tuple[int, ...]
    """Accepted drafts per verify step; empty without speculation."""
    close: tuple[tuple[int, float], ...] = ()
    """Output tokens at which the two best were at most ``CLOSE_NATS`` apart, with their distance in nats."""
    again: Again | None = None


class Header(Strict):
    format: str
    identity: Identity
    provenance: Provenance
    summary: dict[str, Any]
    rows_sha256: str


class Baseline(Strict):
    header: Header
    rows: tuple[Row, ...]

    def by_prompt(self) -> dict[str, Row]:
        return {r.prompt_id: r for r in self.rows}

    @property
    def noise_floor_nats(self) -> float | None:
        """Largest top-2 gap, of those up to ``CLOSE_NATS``, at which two equal runs parted; None when the engine was
        not asked twice, 0 when they never parted at a close call."""
        again = [r.again for r in self.rows if r.again is not None]
        if not again:
            return None
        gaps = (a.gap for a in again if a.divergence is not None and a.gap is not None)
        return max((g for g in gaps if g <= CLOSE_NATS), default=0.0)
