"""Parts of proofs that states occurred, from the counters of engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate

from harness.history.records import Leg, Observation
from harness.observed.prefix_cache import Hit
from harness.observed.recorded_cell import RecordedCell
from harness.prompts.lengths import blocks
from harness.scenarios.base import Gap


def hits_of(leg: Leg | None) -> int:
    return int(leg.counters.get("prefix_hits", 0)) if leg is not None else 0


def judge_hit(cell: RecordedCell, o: Observation, leg: Leg | None, wanted: Hit, why: str) -> Iterator[Gap]:
    """Judge a cache hit: a smaller one than ``wanted`` tested nothing, a larger one cannot be right."""
    if leg is None or not leg.counters:
        yield Gap(o, f"expected counters of the engine that {why}, found none")
        return
    hits = hits_of(leg)
    if hits < wanted.least:
        yield Gap(
            o,
            f"expected the {leg.role} engine to take {wanted.least} tokens from its prefix cache ({why}), found "
            f"{hits}: the state did not occur",
            missed_by="" if hits else leg.role,
        )
    elif hits > wanted.most:
        yield Gap(
            o,
            f"expected the {leg.role} engine to find at most {wanted.most} tokens in its prefix cache ({why}), found "
            f"{hits}: {(hits - wanted.most) // cell.record.block_size} blocks of this hit cannot be this prompt's",
            impossible=True,
            hit_blocks=hits // cell.record.block_size,
        )


def computed_before(cell: RecordedCell, donor: Observation, o: Observation, role: str) -> Iterator[Gap]:
    """Judge the hit of a request on an engine that computed the donor's prompt."""
    wanted = cell.prefix_cache.expected_hit(donor, o, role)
    return judge_hit(cell, o, leg_of(cell, o, role), wanted, f"it computed {donor.prompt_id} before")


def stage_counters(cell: RecordedCell, o: Observation, role: str) -> dict[str, float]:
    """Return what an engine counted in the stage of a request, for all of its requests; empty if that is not known."""
    engine = cell.engine(role)
    # Counted by process, which may have another role.
    return o.shared_counters.get(engine.role if engine else role, {})


def larger_steps(cell: RecordedCell, role: str, counters: dict[str, float], floor: int) -> tuple[int | None, bool]:
    """Return the smallest bound of the engine's histogram of tokens per step that is at least ``floor``, and whether
    any step had more tokens; the bound is None if there is none, or the steps were not counted.

    A bound whose count did not grow is not among ``counters``, but among those that the engine offers.
    """
    engine = cell.engine(role)
    offered = dict.fromkeys((engine and engine.counters) or (), 0.0)
    bound = min((b for b in steps_up_to({**offered, **counters}) if b >= floor), default=None)
    if bound is None or "engine_steps" not in counters:
        return None, False
    return bound, counters["engine_steps"] > steps_up_to(counters).get(bound, 0)


def batched(cell: RecordedCell, requests: list[Observation], counters: dict[str, float]) -> Iterator[Gap]:
    """Prove that requests decoded together: the engine took fewer steps than the requests add up to."""
    total = 0
    for o in requests:
        leg = o.final
        if leg is None or leg.output_ids is None:
            return
        spec = leg.speculation
        # Where a step without drafts is not counted, those that were follow from the tokens.
        counted = spec is not None and not spec.up_to
        total += (
            len(spec.per_step_accepted)
            if spec and counted
            else len(leg.output_ids) - 1 - (spec.num_accepted if spec else 0)
        )
    steps = counters.get("engine_steps")
    if steps is None or not steps < total:
        yield Gap(
            requests[0],
            f"expected fewer engine steps than the {total} steps of the requests, found {steps}: they did not "
            "run together",
        )


def step_overflows(cell: RecordedCell, requests: list[Observation]) -> Iterator[Gap]:
    """Prove that a prompt was computed in chunks: all were queued when the engine was released, which fills a step with
    the prompts in their order, and no number of whole prompts fills the first one."""
    first, role = requests[0], cell.prefilling
    engine = cell.engine(role)
    budget = engine.step_tokens if engine else None
    if budget is None:
        yield Gap(first, f"expected the {role} engine to say how many tokens fit into one step, found no answer")
        return
    queued = sorted((o.asked_at, len(o.sent_ids)) for o in requests if o.asked_at and o.asked_at < (o.held_until or 0))
    filled = list(accumulate(tokens for _, tokens in queued))
    if not filled or filled[-1] <= budget or budget in filled:
        yield Gap(
            first,
            f"expected requests queued at the paused {role} engine whose prompts do not fit into a step of {budget} "
            f"tokens, found {len(queued)} of {len(requests)} with {filled[-1] if filled else 0}: no prompt was "
            "computed in chunks",
        )


def filled(cell: RecordedCell, parts: dict[str, Observation], role: str) -> Iterator[Gap]:
    """Prove that the fill took as many blocks as the pool has, so that every block was reused."""
    fill = [o for part, o in parts.items() if part.startswith("fill")]
    engine = cell.engine(role)
    pool = engine.kv_blocks if engine else None
    taken = sum(blocks(computed_tokens(leg), cell.block_size(role)) for o in fill if (leg := leg_of(cell, o, role)))
    if shared := parts["subject"].shared_counters.get(role):
        # Counted together with the subject. Rounding up once gives a lower bound of the blocks of all prompts.
        computed = int(shared.get("prompt_tokens_local_compute", 0)) - len(parts["subject"].sent_ids)
        taken = blocks(max(computed, 0), cell.block_size(role))
    if pool is None:
        yield Gap(parts["subject"], f"expected the {role} engine to say how many KV blocks it has, found no answer")
    elif taken < pool - 1:
        # One block of the pool is the null block, which is never allocated.
        yield Gap(
            parts["subject"],
            f"expected the fill to take all {pool - 1} KV blocks of the {role} engine, found {taken}: A was "
            "not evicted",
        )


def leg_of(cell: RecordedCell, o: Observation, role: str) -> Leg | None:
    return o.final if role == cell.answering else o.leg(role)


def computed_tokens(leg: Leg) -> int:
    """Return the prompt tokens for which the engine allocated new blocks."""
    return int(leg.counters.get("prompt_tokens_local_compute", 0) + leg.external_tokens)


def engine_of_p(o: Observation) -> object:
    leg = o.leg("prefill")
    return (leg.kv_transfer_params or {}).get("remote_engine_id") if leg is not None else None


def steps_up_to(found: Mapping[str, float]) -> dict[int, float]:
    """Return an engine's steps of at most so many tokens, by that number."""
    return {tokens: found[name] for name, tokens in _names_of_steps(tuple(found))}


@lru_cache(maxsize=256)
def _names_of_steps(counters: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return those of an engine's counters that count steps of at most so many tokens, with that number. Its answers
    have the same ones."""
    head = "engine_steps_le_"
    return tuple((name, int(name.removeprefix(head))) for name in counters if name.startswith(head))
