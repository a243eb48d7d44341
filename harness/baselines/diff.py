"""Describe what changed between two baselines, for code review."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.baselines.lookup import shortened
from harness.baselines.model import Baseline, BaselineRow
from harness.history.acceptance import pool_counts
from harness.history.identity import Identity
from harness.history.token_ids import common_prefix
from harness.stats.paired import count_arms, differences

_NAMED = 5


def diff(old: Baseline, new: Baseline) -> list[str]:
    """Return one line per difference; empty if the baselines are equal."""
    ours, theirs = old.header.identity, new.header.identity
    values = {field: (getattr(ours, field), getattr(theirs, field)) for field in Identity.model_fields}
    fields = [f"{field}: {shortened(a)} → {shortened(b)}" for field, (a, b) in values.items() if a != b]
    return [*fields, *describe_change(old, new.rows, theirs)]


def describe_change(old: Baseline | None, rows: Sequence[BaselineRow], identity: Identity) -> list[str]:
    """Return one line per difference between ``rows`` and the old baseline."""
    if old is None:
        return [f"new: {len(rows)} prompts"]
    before = old.by_prompt()
    after = {r.prompt_id: r for r in rows}
    out = []
    gone = [p for p in before if p not in after]
    new = [p for p in after if p not in before]
    out += [f"{len(gone)} prompts left out: {_names(gone)}"] if gone else []
    out += [f"{len(new)} prompts added: {_names(new)}"] if new else []
    both = [p for p in after if p in before]
    tokens = [p for p in both if before[p].output_ids != after[p].output_ids]
    if tokens:
        at = [common_prefix(before[p].output_ids, after[p].output_ids) for p in tokens]
        out.append(
            f"tokens of {len(tokens)} of {len(both)} prompts, first at output tokens {min(at)} to {max(at)}: "
            f"{_names(tokens)}"
        )
    steps = [p for p in both if before[p].accepted != after[p].accepted]
    if steps:
        out.append(f"accepted drafts of {len(steps)} of {len(both)} prompts: {_names(steps)}")
        k = min(old.header.identity.draft_tokens, identity.draft_tokens)
        out += list(_acceptance([before[p] for p in both], [after[p] for p in both], k))
    out += _logprobs([(before[p], after[p]) for p in both])
    again = sum(before[p].again != after[p].again for p in both)
    out += [f"A/A differences were measured again for {again} of {len(both)} prompts"] if again else []
    return out


def _logprobs(rows: Sequence[tuple[BaselineRow, BaselineRow]]) -> Iterator[str]:
    moved = [(a, b) for a, b in rows if (a.logprobs, a.gaps) != (b.logprobs, b.gaps)]
    added = [b for a, b in moved if b.logprobs and not a.logprobs and a.gaps == b.gaps]
    if added:
        yield f"log-probs of {len(added)} of {len(rows)} prompts, which had none"
    if others := len(moved) - len(added):
        yield f"log-probs of {others} of {len(rows)} prompts"


def _acceptance(old: Sequence[BaselineRow], new: Sequence[BaselineRow], k: int) -> Iterator[str]:
    """Yield what changed at the ``k`` positions that both engines draft; nothing where one of them does not draft."""
    if not k:
        return
    arms = count_arms(
        [[(c.accepted_at, c.trials) for r in rows if (c := r.counts(k))] for rows in (old, new)], k, "position "
    )
    for d in differences(arms):
        if not d.units:
            yield f"{d.column}: no prompt has drafts there in both"
            continue
        # A single prompt has no interval.
        interval = f", 99 % interval {100 * d.low:+.2f} to {100 * d.high:+.2f}" if d.units > 1 else ""
        yield f"{d.column}: {d.rates[0]:.4f} → {d.rates[1]:.4f} ({100 * d.effect:+.2f} points{interval})"
    lengths = [pool_counts([r.counts(k) for r in rows], k).length_pooled or 0.0 for rows in (old, new)]
    yield f"acceptance length (pooled): {lengths[0]:.4f} → {lengths[1]:.4f}"


def _names(prompts: Sequence[str]) -> str:
    return ", ".join(prompts[:_NAMED]) + (" …" if len(prompts) > _NAMED else "")
