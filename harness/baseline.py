"""Baselines: recorded references of single engines, per prompt, with identity and provenance.

One file per method (``<folder>/<method>.jsonl``): a header line, then one line per prompt in the order of the prompt
set. Topology is not in the identity: P/D and single engine share one reference, or P/D could never be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from harness.acceptance import pool, real_steps
from harness.config import Method, Profile, Strict, describe_validation_error
from harness.errors import DataError, UsageError
from harness.files import (
    model_hash,
    read_json_lines,
    sha256_json,
    template_hash,
    tokenizer_hash,
    write_atomic,
)
from harness.history import History

FORMAT = "kv-acceptance-harness/baseline/1"


class Identity(Strict):
    """What a baseline belongs to. Comparing is refused unless every field is equal."""

    target_sha256: str
    drafter_sha256: str | None
    tokenizer_sha256: str
    template_sha256: str
    prompts_sha256: str
    method: str
    draft_tokens: int
    block_size: int
    dtype: str
    max_tokens: int
    step_tokens: int | None
    """Token budget of an engine step: prefill in chunks changes what EAGLE3 and MTP drafters see."""
    temperature: float = 0.0


class Provenance(Strict):
    """Where a baseline comes from. Differences are notices: comparing versions is what baselines are for."""

    recorded: str
    run_id: str
    command: tuple[str, ...]
    git_commit: str | None
    versions: dict[str, str | None]
    hardware: dict[str, Any]
    model_runner: str | None
    attention_backend: str | None


class Row(Strict):
    """Reference of one prompt."""

    prompt_id: str
    prompt_sha256: str
    output_ids: tuple[int, ...]
    min_top_gap: float | None
    """Smallest top-2 log-prob distance over the output, in nats."""
    accepted: tuple[int, ...]
    """Accepted drafts per verify step; empty without speculation."""


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


class Lookup(NamedTuple):
    """A baseline, or the reason why there is none to compare with."""

    baseline: Baseline | None
    reason: str


def identity_of(profile: Profile, method: Method, prompts_sha256: str) -> Identity:
    """Identity of a method under a profile, hashed from the files that the engines load."""
    drafter = method.drafter_path
    return Identity(
        target_sha256=model_hash(profile.target),
        drafter_sha256=model_hash(drafter) if drafter else None,
        tokenizer_sha256=tokenizer_hash(profile.tokenizer_folder),
        template_sha256=template_hash(profile.tokenizer_folder),
        prompts_sha256=prompts_sha256,
        method=method.kind,
        draft_tokens=method.draft_tokens,
        block_size=profile.engine.block_size,
        dtype=profile.engine.dtype,
        max_tokens=profile.workload.max_tokens,
        step_tokens=profile.engine.max_num_batched_tokens,
    )


def baseline_path(folder: Path, method: str) -> Path:
    return folder / f"{method}.jsonl"


def load_baseline(path: Path) -> Baseline:
    """Load and verify a baseline. Raises DataError naming the damage."""
    lines = list(read_json_lines(path, "baseline"))
    if not lines:
        raise DataError(f"baseline {path}: expected a header line and rows, found an empty file")
    try:
        header = Header.model_validate(lines[0][1])
        rows = tuple(Row.model_validate(raw) for _, raw in lines[1:])
    except ValidationError as error:
        raise DataError(f"baseline {path} is damaged:\n{describe_validation_error(error)}") from error
    if header.format != FORMAT:
        raise DataError(f"baseline {path}: expected format {FORMAT}, found {header.format!r}")
    if sha256_json([raw for _, raw in lines[1:]]) != header.rows_sha256:
        raise DataError(
            f"baseline {path}: its rows do not match the hash in its header, so lines were changed or lost; restore "
            "the file from version control, or record it anew with `harness baseline record`"
        )
    return Baseline(header=header, rows=rows)


def mismatch(ours: Identity, theirs: Identity) -> str | None:
    """The first identity field that differs, in words; None when all are equal."""
    for field in Identity.model_fields:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a != b:
            short = [str(v)[:12] for v in (a, b)]
            return f"{field}: this run has {short[0]}, the baseline {short[1]}"
    return None


def look_up(folder: Path, identity: Identity, profile_name: str) -> Lookup:
    """The baseline for an identity, or why there is none and which command mends it."""
    path = baseline_path(folder, identity.method)
    mend = f"record it with `harness baseline record --profile {profile_name}`"
    if not path.is_file():
        return Lookup(None, f"expected a baseline at {path}, found none; {mend}")
    try:
        baseline = load_baseline(path)
    except DataError as error:
        return Lookup(None, str(error))
    difference = mismatch(identity, baseline.header.identity)
    if difference is not None:
        return Lookup(None, f"the baseline {path} belongs to something else ({difference}); {mend}")
    return Lookup(baseline, "")


def summarise(rows: Sequence[Row], k: int) -> dict[str, Any]:
    """Headline figures of a baseline, for people and for a diff in review."""
    gaps = [r.min_top_gap for r in rows if r.min_top_gap is not None]
    out: dict[str, Any] = {
        "prompts": len(rows),
        "output_tokens": sum(len(r.output_ids) for r in rows),
        "min_top_gap_nats": round(min(gaps), 3) if gaps else None,
    }
    if k:
        rates = pool([r.accepted for r in rows], k)
        out |= {
            "steps": rates.steps,
            "rates": [round(v, 4) for v in rates.rates],
            "acceptance_length_pooled": round(rates.length_pooled or 0.0, 4),
            "acceptance_length_per_prompt": round(rates.length_per_prompt or 0.0, 4),
        }
    return out


def rows_from(
    history: History, cell_id: str, prompt_hashes: Mapping[str, str], expected: Mapping[str, tuple[int, ...] | None]
) -> list[Row]:
    """Baseline rows from a recorded single cell.

    Raises UsageError when the recording is incomplete or its outputs are not the known right answers: a reference
    must not be recorded from an engine that is already wrong.
    """
    observed = history.of(cell_id)
    rows = []
    for prompt_id, digest in prompt_hashes.items():
        observation = observed.get(prompt_id)
        leg = observation.final if observation else None
        if leg is None or leg.output_ids is None or (observation and observation.error):
            reason = observation.error if observation else "it was not asked"
            raise UsageError(
                f"{cell_id}: expected an answer to prompt {prompt_id}, found none ({reason}); nothing was recorded"
            )
        right = expected.get(prompt_id)
        if right is not None and tuple(right)[: observation.max_tokens if observation else None] != leg.output_ids:
            raise UsageError(
                f"{cell_id}: prompt {prompt_id} was answered wrongly by the single engine (expected the "
                f"known answer {list(right)[:6]}…, found {list(leg.output_ids)[:6]}…); nothing was "
                "recorded"
            )
        steps = real_steps(leg)
        gaps = [g for g in leg.top_gaps or () if g is not None]
        rows.append(
            Row(
                prompt_id=prompt_id,
                prompt_sha256=digest,
                output_ids=leg.output_ids,
                min_top_gap=round(min(gaps), 3) if gaps else None,
                accepted=steps.accepted if steps else (),
            )
        )
    return rows


def write_baseline(folder: Path, identity: Identity, provenance: Provenance, rows: Sequence[Row]) -> Path:
    raw_rows = [r.model_dump(mode="json") for r in rows]
    header = Header(
        format=FORMAT,
        identity=identity,
        provenance=provenance,
        summary=summarise(rows, identity.draft_tokens),
        rows_sha256=sha256_json(raw_rows),
    )
    path = baseline_path(folder, identity.method)
    lines = [header.model_dump(mode="json"), *raw_rows]
    write_atomic(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path
