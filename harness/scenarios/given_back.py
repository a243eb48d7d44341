"""Others take the blocks that a request gives back while it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.kv_layout import FULL, recurrent, target_config, windows_of
from harness.profiles.model import Profile
from harness.profiles.scenarios import GivenBack
from harness.prompts.lengths import held_blocks
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Send, Stage, one
from harness.scenarios.possible import fewest_held, pool_of
from harness.scenarios.proving import hits_of, leg_of


class GivenBackKind(Kind[GivenBack]):
    needs = frozenset({"holder", "again"})

    def stages(self, config: GivenBack, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [_taken(config, prompts) for _ in range(config.rounds)]

    def impossible(self, config: GivenBack, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        target, size, pool = target_config(profile), profile.engine.block_size, profile.engine.kv_blocks
        windows, state = windows_of(target), recurrent(target)
        if windows == FULL and not state:
            return (
                "expected a target with sliding windows or recurrent state, whose requests give blocks back while they "
                "go on, found full attention alone; leave the scenario out"
            )
        tokens = prompts[config.holder].tokens
        window = max((w for w in windows if w), default=0)
        if tokens < window + size:
            return (
                f"expected a prompt of at least {window + size} tokens, of which a window of {window} has left a "
                f"block, found {tokens} of {config.holder}; name a longer one"
            )
        kinds = len(windows) + state
        taken = sum(_whole(prompts[p].tokens, size, kinds) for p in config.fill)
        free = None if pool is None else pool - 1 - fewest_held(profile, tokens)
        if free is not None and taken < free:
            return pool_of(
                f"at most {taken + (pool or 0) - free} blocks, of which its fill takes all that are free", pool or 0
            )
        return None

    def gaps(self, config: GivenBack, seen: Occurrence) -> Iterator[Gap]:
        """Prove that every block that was free while the long request went on was taken, those that it gave back among
        them: the fill has as many whole blocks, was answered before the long request, and when that is repeated, the
        prefix cache has none of the blocks before the last window, or no state, left for it."""
        cell, parts = seen.cell, seen.parts
        holder, again, record = parts["holder"], parts["again"], seen.cell.record
        fill = [o for part, o in parts.items() if part.startswith("fill")]
        late = [o for o in fill if not o.ended_at < holder.ended_at]
        if late:
            yield Gap(late[0], f"expected it to be answered before {holder.prompt_id}, found it to have ended later")
        engine = cell.engine(cell.answering)
        pool = engine.kv_blocks if engine else None
        if pool is None:
            yield Gap(holder, f"expected the {cell.answering} engine to say how many KV blocks it has, found no answer")
            return
        size, kinds = cell.block_size(cell.answering), len(record.windows) + record.recurrent
        free = pool - 1 - held_blocks(len(holder.sent_ids), size, record.windows, record.recurrent)
        taken = sum(_whole(len(o.sent_ids), size, kinds) for o in fill)
        if taken < free:
            yield Gap(
                holder,
                f"expected the others to take the {free} KV blocks that may have been free beside {holder.prompt_id}, "
                f"found {taken}: one that it gave back may not have been taken",
            )
        # D has of a hand-off states that it keeps until the request ends.
        found = hits_of(leg_of(cell, again, cell.answering))
        if found and not (record.recurrent and cell.handed_off):
            yield Gap(
                again,
                f"expected nothing of {holder.prompt_id} in the prefix cache, whose blocks others took when it had "
                f"given them back, found {found} tokens: one was not taken",
            )

    def enough(self, rounds: int) -> int:
        """On a busy machine some of the others end too late, and one proof is enough."""
        return 1


def _taken(config: GivenBack, prompts: Mapping[str, Prompt]) -> list[Stage]:
    """Return the stages of one round. When the short request that was sent with the long one has been answered, the
    long one is decoding; then the others come, to the answering engine alone."""
    limit = config.max_tokens
    holder = Send(prompts[config.holder], "holder", "h", max_tokens=limit)
    first = Send(prompts[config.beside], "beside", "b", max_tokens=limit)
    fill = [
        Send(prompts[p], f"fill{i}", f"f{i}", "local", max_tokens=SHORT, after=(first.part,))
        for i, p in enumerate(config.fill)
    ]
    return [Stage((holder, first, *fill)), one(holder.prompt, "again", holder.group, limit)]


def _whole(tokens: int, block_size: int, kinds: int) -> int:
    """Return the whole blocks of a prompt, which alone stay in the prefix cache: the others are taken again first."""
    return kinds * (tokens // block_size)
