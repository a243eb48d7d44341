"""Build baselines from recorded runs: only from complete single cells whose outputs are correct."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, get_args

from pydantic import ValidationError

from harness.baselines.diff import describe_change
from harness.baselines.lookup import Limits, Lookup, describe_difference, differing, free_place, look_up
from harness.baselines.model import CLOSE_NATS, FORMAT, Again, Baseline, BaselineRow, Header, Provenance
from harness.baselines.store import write_baseline
from harness.errors import UsageError
from harness.history.acceptance import request_counts
from harness.history.folder import History
from harness.history.identity import Identity, identity_in
from harness.history.records import COLD, RESCORE, CellRecord, Leg, Observation, Speculation
from harness.history.rounding import MULTIPLE, Rounding, Way, WayName, compared
from harness.history.run_kind import require_plain
from harness.history.token_ids import common_prefix
from harness.profiles.cells import CellName
from harness.prompts.model import PromptSet
from harness.util.text import counted


def require_reference_run(history: History) -> None:
    """Raise UsageError unless a run is plain, made with unmodified engines, and has the answers that were given first.
    Of a run that was interrupted, complete cells can be references: see ``incomplete``."""
    require_plain(history)
    run = history.run
    mutants = run.mutants or tuple(m for e in run.engines for m in e.mutants)
    if mutants:
        found = f"its engines had injected faults ({', '.join(dict.fromkeys(mutants))})"
    elif run.reasked_after_findings:
        found = "it was resumed after wrong answers"
    elif run.merged is not None and run.merged.unsettled:
        found = "it was merged from parts that contradict each other"
    else:
        return
    raise UsageError(f"{history.folder}: {found}, so it gives no baselines; record it again")


def incomplete(history: History) -> dict[str, str]:
    """Return the single cells of a run that cannot be references, with the reason, and how far they came."""
    return {c.cell: _why_incomplete(history, c) for c in singles(history) if c.state != "complete" or c.left_running}


def _why_incomplete(history: History, cell: CellRecord) -> str:
    if cell.state == "complete":
        return "its engines may still be running"
    reason = cell.reason or f"the run left it {cell.state}"
    answered = sum(o.error is None for o in history.of(cell.cell).values())
    return f"{reason}; {answered} of {counted(cell.planned, 'prompt')} answered" if cell.planned else reason


def singles(history: History) -> list[CellRecord]:
    """Return the cells of single engines that were asked without a router."""
    return [c for c in history.run.cells if c.cell.startswith("single-") and c.route == "client"]


class Recorded(NamedTuple):
    method: str
    path: Path
    rows: int
    change: tuple[str, ...]
    """Differences from the baseline it replaced; empty if there are none."""


class NewBaselines(NamedTuple):
    """What was made of a recorded run."""

    recorded: tuple[Recorded, ...]
    left_out: Mapping[str, str]
    """Single cells without a new baseline, with the reason: they are not complete, or nothing verifies their tokens."""
    once: Mapping[str, str]
    """Single cells whose baseline has no noise (A/A), since their repetition is not complete, with the reason."""


def new_baselines(
    history: History, again: History | None, sets: Mapping[str, PromptSet], folder: Path, keep_unasked: bool = False
) -> NewBaselines:
    """Write one baseline per complete single cell of a recorded run.

    ``again`` is a repetition of the run (A/A) and ``sets`` holds the prompts by variant. With ``keep_unasked``, prompts
    that are not sent cold may be missing from the run; they keep their rows from the baseline that is replaced, if that
    is of the same vLLM: a baseline names one version.

    All rows are collected and checked before the first file is written: against the known answers of the prompts, and
    for speculative methods against the plain engine's tokens. Raises UsageError, with nothing written, if an answer of
    a complete cell is missing or wrong.
    """
    require_reference_run(history)
    if again is not None:
        _require_repetition(history, again)
    if not singles(history):
        raise UsageError(f"{history.folder}: expected single cells to record baselines from, found none")
    left_out = incomplete(history)
    once = incomplete(again) if again is not None else {}
    source = history.run.asked_for.source
    collected = {}
    kept: dict[str, int] = {}
    known: set[str] = set()
    for cell in (c.cell for c in singles(history) if c.cell not in left_out):
        name = CellName.of(cell)
        method = name.lineup
        prompts = sets.get(name.variant)
        if prompts is None or identity_in(history, method).prompts_sha256 != prompts.sha256:
            raise UsageError(
                f"{history.folder}: expected the current prompts of the profile, found a run with different ones; "
                "record it again"
            )
        known |= {p.id for p in prompts.prompts if p.expected is not None}
        asked = history.of(cell)
        old = _replaced(history, method, folder).baseline
        same = old is not None and old.header.identity.vllm == identity_in(history, method).vllm
        before = old.by_prompt() if old is not None and same and keep_unasked else {}
        unasked = [p.id for p in prompts.prompts if p.use != "cold" and p.id not in asked]
        keep = {p: before[p] for p in unasked if p in before}
        if len(keep) < len(unasked):
            stored = (
                "none" if old is None else f"vLLM {old.header.identity.vllm or '?'}, {counted(len(old.rows), 'row')}"
            )
            need = f"; their rows can be kept from a baseline of the same vLLM, and {folder} has {stored}"
            raise UsageError(
                f"{cell}: {len(unasked)} of {len(prompts.prompts)} prompts were not sent cold, since a run of the "
                f"matrix sends some in scenarios only{need if keep_unasked else ''}; nothing was recorded: record "
                f"the baselines anew (harness baseline record -p {source})"
            )
        kept[method] = len(keep)
        fresh = rows_from(
            history,
            cell,
            {p.id: p.sha256 for p in prompts.prompts if p.id not in keep},
            {p.id: p.expected for p in prompts.prompts},
            None if cell in once else again,
        )
        rows = {**keep, **{r.prompt_id: r for r in fresh}}
        collected[method] = [rows[p.id] for p in prompts.prompts]
    plain = _stored_plain(history, collected, folder)
    unverified = _unverified(collected, {**plain, **collected}, known)
    left_out |= {f"single-{method}": reason for method, reason in unverified.items()}
    collected = {method: rows for method, rows in collected.items() if method not in unverified}
    _require_same_tokens(collected, {**plain, **collected}, _near_tie_nats(history, collected))
    _require_one_baseline_per_identity(history, collected)
    written = tuple(
        _write(history, method, rows, folder, kept[method], _rounding(history, method, again))
        for method, rows in collected.items()
    )
    return NewBaselines(written, left_out, {cell: why for cell, why in once.items() if cell not in left_out})


def _bitwise(history: History) -> bool:
    """Return whether equal runs of the engines of a recording are equal, by its profile or by what it measured."""
    tier = history.run.asked_for.tier
    if tier != "auto":
        return bool(tier == "bitwise")
    measured = [found.repeats for found in history.rounding.values()]
    return bool(measured) and all(measured)


def _near_tie_nats(history: History, collected: Mapping[str, list[BaselineRow]]) -> float:
    """Return the gap of a near tie between the engines of a recording, in nats: as set, or what the recording shows."""
    given = history.run.asked_for.near_tie_nats
    if given is not None or not collected:
        return float(given or 0.0)
    found = [r.largest(*get_args(WayName)) for lineup in collected for r in (_rounding(history, lineup, None),)]
    return MULTIPLE * max((seen for seen in found if seen is not None), default=0.0)


def _rounding(history: History, lineup: str, again: History | None) -> Rounding:
    """Return how the engine of a lineup rounds, as far as a recording and its repetition show it."""
    name = CellName.of_lineup(lineup)
    plain = name.reference == name.id
    found: dict[WayName, Way] = dict((history.rounding_of(name.variant) or Rounding()).ways) if plain else {}
    if not plain and (way := compared(history.of(name.reference), history.of(name.id))) is not None:
        found["verify"] = way
    if again is not None and (way := compared(history.of(name.id), again.of(name.id))) is not None:
        found["again"] = way
    return Rounding(ways=found)


def _require_one_baseline_per_identity(history: History, collected: Mapping[str, list[BaselineRow]]) -> None:
    """Raise UsageError if variants that share an identity, and hence a baseline, gave different rows."""
    seen: dict[str, str] = {}
    for lineup, rows in collected.items():
        first = seen.setdefault(identity_in(history, lineup).model_dump_json(), lineup)
        said = [[(r.prompt_id, r.answer) for r in some] for some in (collected[first], rows)]
        if said[0] != said[1] and _bitwise(history):
            raise UsageError(
                f"{history.folder}: expected {first} and {lineup} to give the same output, because they have the same "
                "identity and so share a baseline, found different tokens or accepted drafts; record only one of them "
                "(--cell)"
            )


def _with_known_noise(row: BaselineRow, old: BaselineRow | None) -> BaselineRow:
    """Return an unchanged row with the A/A result of the old baseline, if the run has no repetition of its own."""
    if row.again is not None or old is None or old.answer != row.answer:
        return row
    return row.model_copy(update={"again": old.again})


def _replaced(history: History, method: str, folder: Path) -> Lookup:
    """Look up the baseline that a new one from this run would replace."""
    identity = identity_in(history, method)
    limits = Limits(10**6, 10**6)
    return look_up(folder, identity, history.run.asked_for.name, limits, history.run.started)


def _require_repetition(history: History, again: History) -> None:
    """Raise UsageError unless ``again`` is another run with the same identities and prompts."""
    require_reference_run(again)
    if again.run.run_id == history.run.run_id:
        raise UsageError(f"--again {again.folder}: this is the run itself; name a repetition of it")
    if again.run.prompts_sha256 != history.run.prompts_sha256:
        raise UsageError(
            f"{again.folder}: expected a repetition of {history.folder}, found a run with different prompts"
        )
    for method in history.run.identities:
        if method not in again.run.identities:
            continue
        ours, theirs = identity_in(history, method), identity_in(again, method)
        fields = [*differing(ours, theirs), *(["vllm"] if ours.vllm != theirs.vllm else [])]
        if fields:
            raise UsageError(
                f"{again.folder}: expected a repetition of {history.folder}, found a run of something else "
                f"({describe_difference(ours, theirs, fields)})"
            )


_Rows = Mapping[str, list[BaselineRow]]
"""Rows by lineup."""


def _stored_plain(history: History, collected: _Rows, folder: Path) -> dict[str, list[BaselineRow]]:
    """Return the stored baselines, of the same vLLM, of plain engines that the run did not ask: servers that run
    already are recorded one by one."""
    out: dict[str, list[BaselineRow]] = {}
    for method in collected:
        plain = CellName.of_lineup(method).plain
        if plain in collected:
            continue
        identity = identity_in(history, method)
        without = {"method": "none", "draft_tokens": 0, "drafter_sha256": None, "speculative_config": {}}
        wanted = identity.model_copy(update=without)
        run = history.run
        found = look_up(folder, wanted, run.asked_for.name, Limits(10**6, 10**6), run.started).baseline
        if found is not None and found.header.identity.vllm == identity.vllm:
            out[plain] = list(found.rows)
    return out


def _unverified(collected: _Rows, plain: _Rows, known: Collection[str]) -> dict[str, str]:
    """Return the lineups whose tokens nothing verifies, with the reason: neither the same run nor a stored baseline has
    the plain engine's (``plain``), and a prompt has no known answer (``known``)."""
    out = {}
    for method, rows in collected.items():
        name = CellName.of_lineup(method)
        right = {*known, *(r.prompt_id for r in plain.get(name.plain, ()))}
        if any(r.prompt_id not in right for r in rows):
            out[method] = (
                f"expected {name.reference} in the same run, or its baseline of the same vLLM, to verify its tokens, "
                "found none that is complete; record that first"
            )
    return out


def _require_same_tokens(collected: _Rows, plain_rows: _Rows, near_tie_nats: float) -> None:
    """Raise UsageError if speculation changed tokens other than at a near tie of the plain engine."""
    for method, rows in collected.items():
        plain = {r.prompt_id: r for r in plain_rows.get(CellName.of_lineup(method).plain, [])}
        for row in rows:
            reference = plain.get(row.prompt_id)
            if reference is not None and not _same_tokens(reference, row, near_tie_nats):
                raise UsageError(
                    f"single-{method}: prompt {row.prompt_id} has other tokens than on the plain engine; a reference "
                    "must be correct, so nothing was recorded"
                )


def _same_tokens(reference: BaselineRow, row: BaselineRow, near_tie_nats: float) -> bool:
    """Return whether tokens are equal, or first differ where the plain engine's top two tokens nearly tied."""
    if row.output_ids == reference.output_ids:
        return True
    at = common_prefix(row.output_ids, reference.output_ids)
    return reference.near_tie(at, row.output_ids[at] if at < len(row.output_ids) else None, near_tie_nats)


def rows_from(
    history: History,
    cell_id: str,
    prompt_hashes: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...] | None],
    again: History | None = None,
    in_scenarios: Mapping[str, Observation] = MappingProxyType({}),
) -> list[BaselineRow]:
    """Return baseline rows from a recorded single cell, of prompts that it was not sent cold from ``in_scenarios``.
    Raises UsageError if the recording is incomplete or an output is not the known answer: a reference must not come
    from an engine that is already wrong."""
    observed = {**in_scenarios, **history.of(cell_id)}
    repeated = again.of(cell_id) if again is not None else {}
    record = history.cell(cell_id)
    k = record.draft_tokens if record is not None else 0
    # Only the bitwise tier compares single log-probs; for a thousand long answers they would fill the repository.
    bitwise = _bitwise(history)
    rows = []
    for prompt_id, digest in prompt_hashes.items():
        observation = observed.get(prompt_id)
        leg = observation.final if observation else None
        if observation is None or leg is None or leg.output_ids is None or observation.error:
            reason = observation.error if observation else "it was not sent"
            raise UsageError(
                f"{cell_id}: expected an answer to prompt {prompt_id}, found none ({reason}); nothing was recorded"
            )
        right = expected.get(prompt_id)
        if right is not None and tuple(right)[: observation.max_tokens] != leg.output_ids:
            raise UsageError(
                f"{cell_id}: expected the known answer {list(right)[:6]}… to prompt {prompt_id} from the single "
                f"engine, found {list(leg.output_ids)[:6]}…; nothing was recorded"
            )
        if k and len(leg.output_ids) > 1 and not _tells_steps(leg.speculation):
            raise UsageError(
                f"{cell_id}: expected accepted drafts per step for prompt {prompt_id}, found none: record baselines "
                "with a vLLM that has --per-request-spec-decode-metrics; nothing was recorded"
            )
        other = repeated.get(prompt_id)
        gaps = [g for g in leg.top_gaps or () if g is not None]
        rows.append(
            BaselineRow(
                prompt_id=prompt_id,
                prompt_sha256=digest,
                output_ids=leg.output_ids,
                min_top_gap=round(min(gaps), 3) if gaps else None,
                accepted=leg.speculation.per_step_accepted if leg.speculation else (),
                drafted=leg.speculation.per_step_drafted if leg.speculation and leg.speculation.up_to else (),
                close=_close(leg),
                runner_ups=_runner_ups(leg),
                gaps=_rounded(leg.top_gaps) if bitwise else (),
                logprobs=_rounded(leg.chosen_logprobs) if bitwise else (),
                again=_again(leg, other.final if other is not None and other.error is None else None, k),
            )
        )
    return rows


def _rounded(values: Sequence[float | None] | None) -> tuple[float | None, ...]:
    """Return values with three decimals, as baselines keep them, without a zero below zero."""
    return tuple(None if v is None else round(v, 3) + 0.0 for v in values or ())


def _tells_steps(speculation: Speculation | None) -> bool:
    """Return whether an answer has its verify steps, of which there may be none if a method found nothing to draft."""
    return speculation is not None and (bool(speculation.per_step_accepted) or speculation.up_to)


def _close(leg: Leg) -> tuple[tuple[int, float], ...]:
    """Return the output positions where the top two tokens were close, with their distance in nats."""
    gaps = enumerate(leg.top_gaps or ())
    return tuple((i, round(g, 4)) for i, g in gaps if g is not None and g <= CLOSE_NATS)


def _runner_ups(leg: Leg) -> tuple[tuple[int, int], ...]:
    """Return the second-best tokens, as far as known, at the positions of ``_close``."""
    known = dict(enumerate(leg.runner_ups or ()))
    return tuple((at, second) for at, _ in _close(leg) if (second := known.get(at)) is not None)


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
        drafted_at=(counted.drafted_at or ()) if counted else (),
        token=other.output_ids[at] if at is not None and at < len(other.output_ids) else None,
    )


def references_in(history: History, wanted: Mapping[str, Identity]) -> dict[str, Lookup]:
    """Return the single cells of another run as references, by method, without writing them.

    A method without a complete single cell in that run, or with a different identity, has a reason instead.
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
            words = describe_difference(identity, theirs, fields, "the other")
            out[method] = Lookup(None, f"{history.folder} was recorded with other settings or prompts ({words})")
            continue
        warm = _longest_in_scenarios(history, cell)
        prompts = dict.fromkeys([*(o.prompt_id for o in history.of(cell).values()), *warm], "")
        try:
            require_reference_run(history)
            if reason := incomplete(history).get(cell):
                raise UsageError(f"{history.folder}: expected {cell} to be complete, found {reason}; record it again")
            rows = rows_from(history, cell, prompts, {}, in_scenarios=warm)
        except UsageError as error:
            out[method] = Lookup(None, str(error))
            continue
        header = Header(format=FORMAT, identity=theirs, provenance=_provenance(history), summary={}, rows_sha256="")
        reason = "" if rows else f"expected answers in {cell} of {history.folder}, found none"
        out[method] = Lookup(Baseline(header=header, rows=tuple(rows)) if rows else None, reason)
    return out


def _longest_in_scenarios(history: History, cell: str) -> dict[str, Observation]:
    """Return the longest plain answer to each prompt in a scenario; only a bitwise run's equal those to cold ones."""
    if not _bitwise(history):
        return {}
    plain = [
        o
        for o in history.in_order(cell)
        if o.scenario not in (COLD, RESCORE) and o.form == "ids" and not (o.error or o.feature or o.temperature)
        if o.final is not None and o.final.output_ids and o.abandon is None
    ]
    return {o.prompt_id: o for o in sorted(plain, key=lambda o: o.max_tokens or 0)}


def _provenance(history: History) -> Provenance:
    run = history.run
    return Provenance(
        recorded=run.started,
        run_id=run.run_id,
        # Keep local paths out of committed data.
        command=("harness", *(Path(a).name if Path(a).is_absolute() else a for a in run.command[1:])),
        git_commit=run.git_commit,
        versions=run.versions,
        hardware=run.hardware,
    )


def _write(
    history: History, method: str, rows: list[BaselineRow], folder: Path, kept: int, rounding: Rounding
) -> Recorded:
    identity = identity_in(history, method)
    found = _replaced(history, method, folder)
    old = found.baseline
    before = old.by_prompt() if old is not None else {}
    rows = [_with_known_noise(r, before.get(r.prompt_id)) for r in rows]
    path = found.path or free_place(folder, identity)
    change = describe_change(old, rows, identity)
    if kept:
        change.append(f"{kept} prompts that the run did not send cold keep their rows; record again if these moved too")
    write_baseline(path, identity, _provenance(history), rows, rounding if rounding.ways else None)
    return Recorded(method, path, len(rows), tuple(change))
