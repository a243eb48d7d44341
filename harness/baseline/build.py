"""Baselines from recorded runs: only of single engines, only complete, and only when the answers are right."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from harness.acceptance import request_counts
from harness.baseline.diff import describe_change
from harness.baseline.lookup import Limits, Lookup, describe_difference, differing, free_place, look_up
from harness.baseline.model import CLOSE_NATS, FORMAT, Again, Baseline, Header, Identity, Provenance, Row
from harness.baseline.store import write_baseline
from harness.config import Method, Profile
from harness.errors import UsageError
from harness.files import model_hash, template_hash, tokenizer_hash
from harness.history import History, Leg
from harness.kinds import require_plain
from harness.matrix import CellName
from harness.prompts import PromptSet
from harness.provenance import gpu_name
from harness.sequences import common_prefix


def identity_of(
    profile: Profile, method: Method, prompts_sha256: str, vllm: str | None = None, gpus: tuple[str, ...] = ()
) -> Identity:
    """Identity of a method under a profile, hashed from the files that the engines load. What only a running engine
    knows is filled in by ``identity_in``."""
    drafter = method.drafter_path
    return Identity(
        target_sha256=model_hash(profile.target_folder),
        drafter_sha256=model_hash(drafter) if drafter else None,
        tokenizer_sha256=tokenizer_hash(profile.tokenizer_folder),
        template_sha256=template_hash(profile.tokenizer_folder),
        prompts_sha256=prompts_sha256,
        method=method.kind,
        draft_tokens=method.draft_tokens,
        block_size=profile.engine.block_size,
        dtype=profile.engine.dtype,
        kv_dtype=profile.engine.kv_cache_dtype,
        max_tokens=profile.workload.max_tokens,
        step_tokens=profile.engine.max_num_batched_tokens,
        tensor_parallel=profile.engine.tensor_parallel.decode,
        enforce_eager=profile.engine.enforce_eager,
        batch_invariant=profile.batch_invariant,
        extra_args=profile.engine.extra_args,
        env=profile.engine.env,
        hardware="cpu" if profile.engine.device == "cpu" else gpu_name(gpus),
        vllm=vllm,
    )


def identity_in(history: History, lineup: str) -> Identity:
    """A lineup's identity in a recorded run, with what its answering engine reported. Raises KeyError or
    ValidationError when the run has none or a damaged one."""
    identity = Identity.model_validate(history.run.identities[lineup])
    answering = [e for e in history.run.engines if e.role in ("single", "decode")]
    engine = next((e for e in answering if CellName.of(e.group).lineup == lineup), None)
    if engine is None:
        return identity
    return identity.model_copy(
        update={"attention_backend": engine.attention_backend, "model_runner": engine.model_runner}
    )


def require_unarmed(history: History) -> None:
    """Raise UsageError when a run says nothing about unchanged engines, each asked for one answer at a time."""
    require_plain(history)
    armed = history.run.mutants or tuple(m for e in history.run.engines for m in e.mutants)
    if armed or history.run.doubtful:
        found = f"mutant {', '.join(dict.fromkeys(armed))} armed" if armed else f"one that {_why_not_whole(history)}"
        raise UsageError(f"{history.folder}: expected a whole run of unchanged engines, found {found}; record anew")


def _why_not_whole(history: History) -> str:
    run = history.run
    if run.interrupted or run.finished is None:
        return "was interrupted" if run.interrupted else "has no end"
    return "was resumed after wrong answers" if run.asked_twice else "was merged from parts that contradict each other"


class Recorded(NamedTuple):
    method: str
    path: Path
    rows: int
    change: tuple[str, ...]
    """What is different from the record that was replaced, in words; empty when nothing is."""


def record_from(
    history: History, again: History | None, sets: Mapping[str, PromptSet], folder: Path, keep_unasked: bool = False
) -> list[Recorded]:
    """Write a baseline per single cell of a recorded run; ``again`` is a repetition of it and ``sets`` are the prompts
    by variant. With ``keep_unasked``, prompts that are not sent cold to every cell may be missing and keep the rows of
    the record that is replaced.

    All rows are collected and checked before the first file is written: known right answers where the prompts have
    them, and the plain engine's tokens for every speculative method. Raises UsageError when anything is missing or
    wrong; then nothing was written.
    """
    require_unarmed(history)
    if again is not None:
        _require_repetition(history, again)
    singles = [c.cell for c in history.run.cells if c.cell.startswith("single-") and c.route == "client"]
    if not singles:
        raise UsageError(f"{history.folder}: expected single cells to record baselines from, found none")
    collected = {}
    kept: dict[str, int] = {}
    known: set[str] = set()
    for cell in singles:
        name = CellName.of(cell)
        method = name.lineup
        if method not in history.run.identities:
            record = history.cell(cell)
            raise UsageError(
                f"{history.folder}: expected the models of {cell}, found none here "
                f"({record.reason if record else 'no reason recorded'}); fetch them and record anew"
            )
        prompts = sets.get(name.variant)
        if prompts is None or identity_in(history, method).prompts_sha256 != prompts.sha256:
            raise UsageError(f"{history.folder}: was recorded with other prompts than the profile has now; record anew")
        known |= {p.id for p in prompts.prompts if p.expected is not None}
        asked = history.of(cell)
        old = _replaced(history, method, folder).baseline
        spare = old.by_prompt() if old is not None and keep_unasked else {}
        keep = {p.id: spare[p.id] for p in prompts.prompts if p.use != "cold" and p.id not in asked and p.id in spare}
        kept[method] = len(keep)
        fresh = rows_from(
            history,
            cell,
            {p.id: p.sha256 for p in prompts.prompts if p.id not in keep},
            {p.id: p.expected for p in prompts.prompts},
            again,
        )
        rows = {**keep, **{r.prompt_id: r for r in fresh}}
        collected[method] = [rows[p.id] for p in prompts.prompts]
    near_tie = float((history.run.profile.get("judging") or {}).get("near_tie_nats", 0.02))
    _require_same_tokens(collected, known, near_tie)
    _require_one_record_each(history, collected)
    return [_write(history, method, rows, folder, kept[method]) for method, rows in collected.items()]


def _require_one_record_each(history: History, collected: Mapping[str, list[Row]]) -> None:
    """Variants that answer alike share a baseline; raise UsageError when those of one identity gave different rows."""
    seen: dict[str, str] = {}
    for lineup, rows in collected.items():
        key = identity_in(history, lineup).model_dump_json()
        first = seen.setdefault(key, lineup)
        said = [[(r.prompt_id, r.output_ids, r.accepted) for r in some] for some in (collected[first], rows)]
        if said[0] != said[1] and (history.run.profile.get("judging") or {}).get("tier") == "bitwise":
            raise UsageError(
                f"{history.folder}: expected {first} and {lineup} to answer alike, because nothing that a baseline is "
                "found by tells them apart, found other tokens or accepted drafts; record one of them (--cell)"
            )


def _with_known_noise(row: Row, old: Row | None) -> Row:
    """Without a repetition, the noise that was measured before still belongs to a row that did not change."""
    if row.again is not None or old is None or (old.output_ids, old.accepted) != (row.output_ids, row.accepted):
        return row
    return row.model_copy(update={"again": old.again})


def _replaced(history: History, method: str, folder: Path) -> Lookup:
    """The record that a new one of this run would replace, if there is one."""
    identity = identity_in(history, method)
    limits = Limits(10**6, 10**6)
    return look_up(folder, identity, str(history.run.profile["name"]), limits, history.run.started)


def _require_repetition(history: History, again: History) -> None:
    """Raise UsageError when ``again`` is not another run of the very same thing."""
    require_unarmed(again)
    if again.run.run_id == history.run.run_id:
        raise UsageError(f"{again.folder}: expected a repetition, found the run itself")
    if again.run.prompts_sha256 != history.run.prompts_sha256:
        raise UsageError(f"{again.folder}: expected a repetition of {history.folder}, found one with other prompts")
    for method in history.run.identities:
        if method not in again.run.identities:
            continue
        ours, theirs = identity_in(history, method), identity_in(again, method)
        fields = [*differing(ours, theirs), *(["vllm"] if ours.vllm != theirs.vllm else [])]
        if fields:
            raise UsageError(
                f"{again.folder}: expected a repetition of {history.folder}, found another one "
                f"({describe_difference(ours, theirs, fields)})"
            )


def _require_same_tokens(collected: Mapping[str, list[Row]], known: Collection[str], near_tie_nats: float) -> None:
    """Speculation must not change tokens, but at a near tie of the plain engine. Without the plain engine in the run
    only prompts with a known answer (``known``) can be judged."""
    for method, rows in collected.items():
        plain = {r.prompt_id: r for r in collected.get(CellName.of_lineup(method).plain, [])}
        for row in rows:
            reference = plain.get(row.prompt_id)
            if reference is None and row.prompt_id not in known:
                raise UsageError(
                    f"single-{method}: expected {CellName.of_lineup(method).reference} in the same run, to see that "
                    f"prompt {row.prompt_id} is answered rightly, found none; nothing was recorded"
                )
            if reference is not None and not _agree(reference, row, near_tie_nats):
                raise UsageError(
                    f"single-{method}: prompt {row.prompt_id} has other tokens than the plain engine of the same run; "
                    "a reference must be right, so nothing was recorded"
                )


def _agree(reference: Row, row: Row, near_tie_nats: float) -> bool:
    """Equal tokens, or a first difference where the plain engine's two best tokens were nearly tied."""
    if row.output_ids == reference.output_ids:
        return True
    at = common_prefix(row.output_ids, reference.output_ids)
    return any(token == at and gap <= near_tie_nats for token, gap in reference.close)


def rows_from(
    history: History,
    cell_id: str,
    prompt_hashes: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...] | None],
    again: History | None = None,
) -> list[Row]:
    """Baseline rows from a recorded single cell.

    Raises UsageError when the recording is incomplete or its outputs are not the known right answers: a reference
    must not be recorded from an engine that is already wrong.
    """
    observed = history.of(cell_id)
    repeated = again.of(cell_id) if again is not None else {}
    record = history.cell(cell_id)
    k = record.draft_tokens if record is not None else 0
    rows = []
    for prompt_id, digest in prompt_hashes.items():
        observation = observed.get(prompt_id)
        leg = observation.final if observation else None
        if observation is None or leg is None or leg.output_ids is None or observation.error:
            reason = observation.error if observation else "it was not asked"
            raise UsageError(
                f"{cell_id}: expected an answer to prompt {prompt_id}, found none ({reason}); nothing was recorded"
            )
        right = expected.get(prompt_id)
        if right is not None and tuple(right)[: observation.max_tokens] != leg.output_ids:
            raise UsageError(
                f"{cell_id}: prompt {prompt_id} was answered wrongly by the single engine (expected the "
                f"known answer {list(right)[:6]}…, found {list(leg.output_ids)[:6]}…); nothing was "
                "recorded"
            )
        if k and (leg.speculation is None or not leg.speculation.per_step_accepted) and len(leg.output_ids) > 1:
            raise UsageError(
                f"{cell_id}: expected accepted drafts per step for prompt {prompt_id}, found none: record baselines "
                "with a vLLM that has --per-request-spec-decode-metrics; nothing was recorded"
            )
        other = repeated.get(prompt_id)
        gaps = [g for g in leg.top_gaps or () if g is not None]
        rows.append(
            Row(
                prompt_id=prompt_id,
                prompt_sha256=digest,
                output_ids=leg.output_ids,
                min_top_gap=round(min(gaps), 3) if gaps else None,
                accepted=leg.speculation.per_step_accepted if leg.speculation else (),
                close=tuple(
                    (i, round(g, 4)) for i, g in enumerate(leg.top_gaps or ()) if g is not None and g <= CLOSE_NATS
                ),
                again=_again(leg, other.final if other is not None and other.error is None else None, k),
            )
        )
    return rows


def _close(leg: Leg) -> tuple[tuple[int, float], ...]:
    gaps = enumerate(leg.top_gaps or ())
    return tuple((i, round(g, 4)) for i, g in gaps if g is not None and g <= CLOSE_NATS)


def _again(leg: Leg, other: Leg | None, k: int) -> Again | None:
    if other is None or other.output_ids is None or leg.output_ids is None:
        return None
    at = None if leg.output_ids == other.output_ids else common_prefix(leg.output_ids, other.output_ids)
    gap = leg.top_gaps[at] if at is not None and leg.top_gaps is not None and at < len(leg.top_gaps) else None
    counted = request_counts(other, k)
    return Again(
        divergence=at,
        gap=gap,
        steps=counted.steps if counted else 0,
        accepted_at=counted.accepted_at if counted else (0,) * k,
    )


def references_in(history: History, wanted: Mapping[str, Identity]) -> dict[str, Lookup]:
    """The single cells of another run as references, per method, without writing them.

    A method that the run has no complete single cell of, or whose identity differs, has a reason instead.
    """
    out: dict[str, Lookup] = {}
    for method, identity in wanted.items():
        cell = f"single-{method}"
        if history.cell(cell) is None:
            out[method] = Lookup(None, f"expected a cell {cell} in {history.folder} to compare with, found none")
            continue
        try:
            theirs = identity_in(history, method)
        except (KeyError, ValidationError) as error:
            out[method] = Lookup(None, f"{history.folder} has no usable identity of {method}: {error}")
            continue
        fields = differing(identity, theirs)
        if fields:
            words = describe_difference(identity, theirs, fields)
            out[method] = Lookup(None, f"{history.folder} belongs to something else ({words})")
            continue
        prompts = {o.prompt_id: "" for o in history.of(cell).values()}
        try:
            require_unarmed(history)
            rows = rows_from(history, cell, prompts, {})
        except UsageError as error:
            out[method] = Lookup(None, str(error))
            continue
        header = Header(format=FORMAT, identity=theirs, provenance=_provenance(history), summary={}, rows_sha256="")
        reason = "" if rows else f"expected answers in {cell} of {history.folder}, found none"
        out[method] = Lookup(Baseline(header=header, rows=tuple(rows)) if rows else None, reason)
    return out


def _provenance(history: History) -> Provenance:
    run = history.run
    return Provenance(
        recorded=run.started,
        run_id=run.run_id,
        # Paths of the machine stay out of committed data.
        command=("harness", *(Path(a).name if Path(a).is_absolute() else a for a in run.command[1:])),
        git_commit=run.git_commit,
        versions=run.versions,
        hardware=run.hardware,
    )


def _write(history: History, method: str, rows: list[Row], folder: Path, kept: int) -> Recorded:
    identity = identity_in(history, method)
    found = _replaced(history, method, folder)
    old = found.baseline
    before = old.by_prompt() if old is not None else {}
    rows = [_with_known_noise(r, before.get(r.prompt_id)) for r in rows]
    path = found.path or free_place(folder, identity)
    change = describe_change(old, rows, identity)
    if kept:
        change.append(f"{kept} prompts that the run did not send cold keep their rows; record anew if these moved too")
    write_baseline(path, identity, _provenance(history), rows)
    return Recorded(method, path, len(rows), tuple(change))
