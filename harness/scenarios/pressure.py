"""More requests than the KV pool can hold, while one with a cached prefix waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import Observation
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.model import Profile
from harness.profiles.scenarios import Pressure
from harness.prompts.lengths import held_blocks
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Send, Stage, one
from harness.scenarios.possible import fewest_held, no_sharing, pool_of, too_many
from harness.scenarios.proving import stage_counters


class PressureKind(Kind[Pressure]):
    needs = frozenset({"waiting"})

    def stages(self, config: Pressure, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        limit = config.max_tokens
        load = [Send(prompts[p], f"load{i}", f"p{i}", max_tokens=limit) for i, p in enumerate(config.load)]
        local = [Send(prompts[p], f"local{i}", f"q{i}", "local", max_tokens=limit) for i, p in enumerate(config.local)]
        waiting = Send(prompts[config.waiting.subject], "waiting", "a", max_tokens=limit, last=True)
        return [
            [
                one(prompts[config.waiting.donor], "donor", "a", SHORT),
                # Paused until all are queued: otherwise one could end before the next begins. Waiting for a given usage
                # of the pool is no alternative, since a busy engine may leave /metrics unanswered for seconds.
                Stage((*load, *local, waiting), hold="answering"),
            ]
        ]

    def impossible(self, config: Pressure, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        """Return why there would be no pressure, or None.

        The prompts must leave no room for the waiting one, and P must be able to keep all handed-off blocks while D is
        paused.
        """
        size, pool = profile.engine.block_size, profile.engine.kv_blocks
        waiting = fewest_held(profile, prompts[config.waiting.subject].tokens)
        kept = sum(fewest_held(profile, prompts[p].tokens) for p in config.load)
        before = kept + sum(fewest_held(profile, prompts[p].tokens) for p in config.local)
        if pool is not None and before + waiting <= pool - 1:
            return pool_of(f"fewer than the {before + waiting + 1} blocks that its prompts need together", pool)
        if pool is not None and kept + waiting > pool - 1 and "pd" in config.topologies:
            return pool_of(
                f"at least {kept + waiting + 1} blocks, so that P can keep `load` and `waiting` for D, or load "
                "moved to `local`",
                pool,
            )
        return too_many(len(config.load) + len(config.local) + 1, profile) or no_sharing(
            (config.waiting,), prompts, size
        )

    def gaps(self, config: Pressure, seen: Occurrence) -> Iterator[Gap]:
        cell, parts = seen.cell, seen.parts
        waiting = parts["waiting"]
        load = [o for part, o in parts.items() if part.startswith(("load", "local"))]
        counters = stage_counters(cell, waiting, cell.answering)
        if counters.get("preemptions", 0) < 1:
            yield Gap(waiting, "expected at least one preemption while the KV pool was over-committed, found none")
        engine = cell.engine(cell.answering)
        pool = engine.kv_blocks if engine else None
        if pool is None:
            yield Gap(waiting, "the size of the KV pool is not recorded")
            return
        before = [o for o in load if _queued_before(o, waiting)]
        if len(before) < len(load):
            yield Gap(
                waiting,
                f"expected all {len(load)} other requests to be queued before the waiting one and before the "
                f"engine was released, found {len(before)}: it may not have had to wait",
            )
            return
        # One block of the pool is the null block. Unused cached blocks count as free.
        needed, taken = (sum(_held(cell, o) for o in os) for os in ([waiting], before))
        if needed + taken <= pool - 1:
            yield Gap(
                waiting,
                f"expected no room for the {needed} blocks of the waiting request beside the others' {taken}, "
                f"found a pool of {pool - 1}: it did not have to wait",
            )


def _held(cell: RecordedCell, o: Observation) -> int:
    record = cell.record
    return held_blocks(len(o.sent_ids), record.block_size, record.windows, record.recurrent)


def _queued_before(o: Observation, waiting: Observation) -> bool:
    """Return whether a request was queued before the waiting one while the engine, which admits in order, was held."""
    asked, last, released = o.asked_at, waiting.asked_at, waiting.held_until
    return asked is not None and last is not None and released is not None and asked < last < released
