"""One prompt is answered by the target and by LoRA adapters of it, none of whose KV is another's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import Observation
from harness.observed.prefix_cache import Hit
from harness.observed.recorded_cell import RecordedCell
from harness.profiles.model import Profile
from harness.profiles.scenarios import Adapters, OfAdapter
from harness.prompts import probe_task
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.parameters import gaps_of
from harness.scenarios.possible import too_many
from harness.scenarios.proving import batched, judge_hit, leg_of, stage_counters

_WHICH: tuple[OfAdapter, OfAdapter] = ("first-adapter", "second-adapter")
_AGAIN = "again-"
_TURNS: tuple[OfAdapter | None, ...] = (None, *_WHICH)
"""None: the target itself."""


class AdaptersKind(Kind[Adapters]):
    needs = frozenset({"target", *_WHICH})

    def needed(self, config: Adapters) -> frozenset[str]:
        return self.needs if config.together else self.needs | {f"{_AGAIN}{part}" for part in self.needs}

    def stages(self, config: Adapters, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [_stages(config, prompts[p]) for p in config.prompts]

    def impossible(self, config: Adapters, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        """Return which adapter the engines do not have, or which prompt is too short for a hit, or None."""
        if lost := [name for name in config.adapters if name not in profile.engine.adapters]:
            return (
                f"expected the adapter {lost[0]} among engine.adapters, found "
                f"{', '.join(profile.engine.adapters) or 'none'}; add its folder, or name another one"
            )
        if config.together:
            return too_many(len(_TURNS), profile)
        size = profile.engine.block_size
        least = (1 + any(m.traits.drops_block for m in profile.methods)) * size + 1
        if short := [p for p in config.prompts if prompts[p].tokens < least]:
            return (
                f"expected prompts of at least {least} tokens, so that the one who computed one finds it again, found "
                f"{prompts[short[0]].tokens} of {short[0]}; name a longer one"
            )
        return None

    def gaps(self, config: Adapters, seen: Occurrence) -> Iterator[Gap]:
        """Prove that each finds what it has computed itself and nothing that another one did, that those of a crowd
        were computed in one batch, and that adapters change the answer, to the known one where there is one."""
        cell, parts = seen.cell, seen.parts
        for part, o in parts.items():
            yield from _wrong(seen, o)
            if config.together:
                continue
            donor = parts.get(part.removeprefix(_AGAIN)) if part.startswith(_AGAIN) else None
            who = o.adapter or "the target"
            for role in [leg.role for leg in o.legs]:
                wanted = cell.prefix_cache.expected_hit(donor, o, role) if donor is not None else Hit(0, 0)
                why = f"{who} computed it before" if donor is not None else f"{who} has computed none of it yet"
                yield from judge_hit(cell, o, leg_of(cell, o, role), wanted, why)
        if config.together:
            yield from _apart(cell, list(parts.values()))


def _apart(cell: RecordedCell, crowd: list[Observation]) -> Iterator[Gap]:
    """Prove that a crowd was computed in one batch, and found nothing of each other."""
    yield from batched(cell, crowd, stage_counters(cell, crowd[0], cell.answering))
    for role in cell.roles:
        if hits := int(stage_counters(cell, crowd[0], role).get("prefix_hits", 0)):
            words = f"expected nobody of a crowd to find another's blocks, found {hits} tokens of them on {role}"
            yield Gap(crowd[0], words, impossible=True, hit_blocks=hits // cell.record.block_size)


def _stages(config: Adapters, prompt: Prompt) -> list[Stage]:
    def ask(part: str, group: str, which: OfAdapter | None = None, loads: bool = False, unsalted: bool = False) -> Send:
        name = config.adapters[_WHICH.index(which)] if which is not None else ""
        asked = prompt.model_copy(update={"expected": _known(prompt, name)})
        return Send(
            asked,
            part,
            group,
            max_tokens=config.max_tokens,
            feature=which,
            adapter=name,
            loads=loads,
            unsalted=unsalted,
        )

    first, second = _WHICH
    if config.together:
        return [Stage(tuple(ask(which or "target", "a", which) for which in _TURNS), hold="first")]
    return [
        *(Stage((ask(which or "target", "a", which),)) for which in _TURNS),
        *(Stage((ask(_AGAIN + (which or "target"), "a", which),)) for which in _TURNS),
        # Under one name, one after the other.
        Stage((ask("loaded", "b", first, loads=True),)),
        Stage((ask("loaded-over", "b", second, loads=True),)),
        # A salt that is the name of an adapter, and that adapter without a salt.
        Stage((ask("salted", "c"),)),
        Stage((ask("named-as-salt", "c", first, loads=True, unsalted=True),)),
    ]


def _known(prompt: Prompt, adapter: str) -> tuple[int, ...] | None:
    """Return the right answer of an adapter, if it is one of the probe's and the prompt one of its task."""
    ids = list(prompt.ids)
    if prompt.expected is None or list(prompt.expected) != probe_task.expected_output(ids):
        return None if adapter else prompt.expected
    if adapter and adapter not in probe_task.ADAPTERS:
        return None
    return tuple(probe_task.expected_output(ids, adapter))


def _wrong(seen: Occurrence, o: Observation) -> Iterator[Gap]:
    """Yield what is missing of the plain engine's answer with the same adapter, and where that is not the known one,
    or the target's, which an adapter has to change."""
    yield from gaps_of(seen, o, must_change=False)
    if not o.adapter or not seen.cell.is_plain or o.final is None:
        return
    said = o.final.output_ids
    if o.known_answer is not None and said != o.known_answer[: o.max_tokens]:
        words = f"expected the known answer of {o.adapter}, found another one, which begins with {(said or ())[:8]}"
        yield Gap(o, words, impossible=True)
    target = next((x for x in seen.parts.values() if not x.adapter), None)
    without = target.known_answer if target is not None else None
    if without is None and target is not None and target.final is not None:
        # In a crowd the target may say what it should not, so that the known answer counts if there is one.
        without = target.final.output_ids
    if without is None or said == without[: o.max_tokens]:
        yield Gap(o, f"{o.adapter} changed nothing in the plain engine's answer")
