"""Two P for one D, which has to read each prompt from the one that computed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import Observation
from harness.profiles.model import Profile
from harness.profiles.scenarios import SECOND, SecondPrefill
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.proving import engine_of_p


class SecondPrefillKind(Kind[SecondPrefill]):
    def stages(
        self, config: SecondPrefill, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]
    ) -> list[list[Stage]]:
        return [_by_turns(config, [prompts[p] for p in config.prompts])]

    def impossible(self, config: SecondPrefill, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        if profile.engine.by_nixl:
            return None
        return (
            "expected NIXL's connector, whose hand-offs name the P that D reads from, found "
            f"engine.kv_connector: {profile.engine.kv_connector}; leave the scenario out"
        )

    def gaps(self, config: SecondPrefill, seen: Occurrence) -> Iterator[Gap]:
        """Prove that there were two P, and that D read as much from each of them as if it were the only one."""
        cell, parts = seen.cell, seen.parts
        met: dict[object, list[Observation]] = {}
        for o in parts.values():
            met.setdefault(engine_of_p(o), []).append(o)
        last = max(parts.values(), key=lambda o: o.sequence)
        if len(met) != 2 or any(len({cell.hand_off.p_of(o) for o in asked}) != 1 for asked in met.values()):
            yield Gap(last, f"expected hand-offs of two P, each with its own name, found {len(met)} names in them")
        for o in parts.values():
            fetched, handed = o.final.external_tokens if o.final is not None else 0, cell.hand_off.handed_tokens(o)
            if fetched < handed:
                yield Gap(o, f"expected D to read {handed} prompt tokens from P, found {fetched:.0f} read")


def _by_turns(config: SecondPrefill, prompts: Sequence[Prompt]) -> list[Stage]:
    """Return hand-offs of all prompts by each P, of which one is always a prompt ahead of the other."""
    ahead = [*prompts[1:], prompts[0]]
    return [
        Stage((Send(prompt, f"{by}{n}", f"{by}{n}", max_tokens=config.max_tokens, by_second_p=by == SECOND),))
        for n, pair in enumerate(zip(prompts, ahead, strict=True))
        for by, prompt in zip(("first", SECOND), pair, strict=True)
    ]
