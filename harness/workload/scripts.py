"""Scripts: the requests that bring engines into the state of a scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.errors import UsageError
from harness.profiles.model import Profile, TopologyName
from harness.profiles.scenarios import Scenario
from harness.prompts.model import Prompt
from harness.scenarios.base import Script
from harness.scenarios.kinds import kind_of


def scripts(
    scenario: Scenario, prompts: Mapping[str, Prompt], topology: TopologyName, chosen: Sequence[Prompt] = ()
) -> list[Script]:
    """Return the scripts of a scenario for a topology; the list is empty when it cannot run there.

    ``chosen`` are the prompts of a scenario that does not name any (``drawn``).
    """
    if topology not in scenario.topologies:
        return []
    runs = enumerate(kind_of(scenario).stages(scenario, prompts, chosen))
    return [Script(scenario.id, i, tuple(stages)) for i, stages in runs]


def drawn(scenario: Scenario, profile: Profile, cold: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts, of those that are sent cold, that a scenario is sent which names none: of as many texts as
    there are before a second one of any, and with a whole block that a prefix hit can find."""
    kind = kind_of(scenario)
    least = (1 + any(m.traits.drops_block for m in profile.methods)) * profile.engine.block_size
    copies: Counter[str] = Counter()
    turns: list[tuple[int, Prompt]] = []
    for prompt in cold:
        if kind.draws(prompt, least):
            text = prompt.source or prompt.id
            turns.append((copies[text], prompt))
            copies[text] += 1
    return [p for _, p in sorted(turns, key=lambda turn: turn[0])][: scenario.drawn]


def require_possible(profile: Profile, prompts: Mapping[str, Prompt], *sent: Sequence[Prompt]) -> None:
    """Raise UsageError when a scenario names an unknown prompt, cannot occur with the profile's engine settings, or
    cannot be judged in its tier. ``sent`` are the prompts that are sent cold, in each stage."""
    for scenario in profile.scenarios:
        kind = kind_of(scenario)
        if profile.judging.tier == "normal" and not (scenario.drawn and scenario.max_tokens is None):
            raise UsageError(
                f"scenario {scenario.id}: expected prompts by number, answered in full, which registered tests compare "
                "with the same prompts cold (normal tier), found prompts by name or max_tokens; use the kinds "
                "prefix-hit and crowd, or a profile of the bitwise tier"
            )
        for cold in sent if scenario.drawn else ():
            problem = _not_drawn(scenario, profile, drawn(scenario, profile, cold))
            if problem:
                raise UsageError(f"scenario {scenario.id} cannot occur: {problem}")
        try:
            kind.stages(scenario, prompts, ())
        except KeyError as missing:
            raise UsageError(
                f"scenario {scenario.id}: expected prompts of {profile.workload.prompts.name}, found "
                f"{missing.args[0]!r}, which is not in it; correct the id or rebuild the prompt set"
            ) from None
        most, asked = profile.workload.max_tokens, scenario.most_asked
        if asked > most:
            raise UsageError(
                f"scenario {scenario.id}: expected max_tokens of at most workload.max_tokens = {most}, the length that "
                f"baselines record, found {asked}; lower it or raise workload.max_tokens"
            )
        problem = kind.impossible(scenario, profile, prompts)
        if problem:
            raise UsageError(f"scenario {scenario.id} cannot occur: {problem}")


def _not_drawn(scenario: Scenario, profile: Profile, chosen: Sequence[Prompt]) -> str | None:
    """Return why the prompts that a scenario is sent cannot bring about its state, or None."""
    if len(chosen) < scenario.drawn:
        return (
            f"expected {scenario.drawn} suitable prompts that are sent cold, found {len(chosen)}; ask for fewer, or "
            "build more"
        )
    return kind_of(scenario).not_drawn(scenario, profile, chosen)
