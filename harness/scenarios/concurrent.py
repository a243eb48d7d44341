"""Batch rows change owners while requests are under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import Observation
from harness.observed.prefix_cache import Hit
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.model import Profile
from harness.profiles.scenarios import Concurrent
from harness.prompts.model import Prompt
from harness.scenarios.base import ORDER_S, Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.possible import demand, pool_of, too_many
from harness.scenarios.proving import batched, computed_before, judge_hit, larger_steps, leg_of, stage_counters


class ConcurrentKind(Kind[Concurrent]):
    needs = frozenset({"holder"})

    def stages(self, config: Concurrent, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [_rows(config, prompts) for _ in range(config.rounds)]

    def impossible(self, config: Concurrent, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        names, pool = [config.holder, *config.together, *config.late], profile.engine.kv_blocks
        wanted = demand(names, profile, prompts, config.max_tokens)
        if pool is not None and wanted > pool - 1:
            return pool_of(f"at least {wanted + 1} blocks, so that no request is preempted", pool)
        return too_many(len(config.together) + 1, profile)

    def gaps(self, config: Concurrent, seen: Occurrence) -> Iterator[Gap]:
        cell, parts = seen.cell, seen.parts
        holder = parts["holder"]
        late = [o for part, o in parts.items() if part.startswith("late")]
        short = [o for part, o in parts.items() if part.startswith("together")]
        if not late or not short:
            return
        role = cell.prefilling
        yield from _one_step(cell, holder, short, stage_counters(cell, holder, role), role)
        yield from batched(cell, [holder, *short, *late], stage_counters(cell, holder, cell.answering))
        if not any(o.started_at < holder.ended_at for o in late):
            yield Gap(late[0], "the late request began after the long one had ended")
        if not any(o.ended_at < holder.ended_at for o in short):
            yield Gap(holder, "expected a short request to end before the long one, so that rows move, found none")
        again = parts.get("again")
        if again is not None and cell.record.several_kinds:
            # Others may have taken what windows left; the kind `given-back` is about that.
            most = cell.prefix_cache.expected_hit(holder, again, cell.answering).most
            leg = leg_of(cell, again, cell.answering)
            yield from judge_hit(cell, again, leg, Hit(0, most), f"it computed {holder.prompt_id} before")
        elif again is not None:
            yield from computed_before(cell, holder, again, cell.answering)

    def enough(self, rounds: int) -> int:
        """All rounds send the same requests; on a busy machine some arrive too late, and one proof is enough."""
        return 1


def _rows(config: Concurrent, prompts: Mapping[str, Prompt]) -> list[Stage]:
    """Return the stages of one round.

    The short requests start together with the long one, which has the second batch row. When all short ones have ended,
    it has moved to the first row, whichever ended first; then the late ones are sent, and the first of them takes the
    row that it left, through which its blocks may still be overwritten. Finally the long one is repeated from the
    cache, which shows whether its blocks were overwritten.

    Late requests wait for the answers of the short ones instead of a fixed time: a request that is admitted in the step
    in which another ends takes that one's row, so that nothing moves and a drafter that writes through a stale row (M3)
    goes unnoticed.
    """
    limit = config.max_tokens
    short = [Send(prompts[p], f"together{i}", f"t{i}", max_tokens=limit) for i, p in enumerate(config.together)]
    holder = Send(prompts[config.holder], "holder", "h", max_tokens=limit)
    queue = [short[0], holder, *short[1:]]
    queue = [send._replace(after_s=i * ORDER_S) for i, send in enumerate(queue)]
    ended = tuple(send.part for send in short)
    late = [
        Send(prompts[p], f"late{i}", f"l{i}", max_tokens=limit, after_s=i * ORDER_S, after=ended)
        for i, p in enumerate(config.late)
    ]
    again = Send(holder.prompt, "again", holder.group, max_tokens=limit)
    return [Stage((*queue, *late), hold="first"), Stage((again,))]


def _one_step(
    cell: RecordedCell, holder: Observation, short: list[Observation], counters: dict[str, float], role: str
) -> Iterator[Gap]:
    """Prove that short prompts were prefilled together: one step had more tokens than the long and one short prompt."""
    floor = len(holder.sent_ids) + max(len(o.sent_ids) for o in short)
    bound, found = larger_steps(cell, role, counters, floor)
    if bound is None:
        yield Gap(holder, f"expected the {role} engine's histogram of tokens per step, found none above {floor}")
    elif not found:
        yield Gap(
            holder,
            f"expected one step of the {role} engine with more than {bound} tokens, found none: the short prompts were "
            "not prefilled together",
        )
