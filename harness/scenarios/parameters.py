"""Each prompt is asked once with each of several parameters, most of which change its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import Observation
from harness.profiles.model import Profile
from harness.profiles.scenarios import OF_TEXT, SAMPLED, WITHOUT, Parameter, Parameters, api_of, is_chat
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Stage
from harness.scenarios.features import send_with
from harness.scenarios.possible import answered_briefly, unsaid

LONG_ENOUGH = 12
"""Known tokens of a prompt whose answer is stopped, and changed, in its midst."""
_CUTS = {"stop-at-cap": "stop", "stop-before-cap": "stop", "include-stop": "stop"}
"""Parameters that end an answer, and the reason."""
_CHANGES: frozenset[Parameter] = frozenset(
    {
        "ignore-eos",
        "allowed-first",
        "allowed-half",
        "bad-words",
        "frequency-penalty",
        "presence-penalty",
        "repetition-penalty",
        "regex",
        "logit-bias",
        "min-p",
        "top-p",
        "top-k",
        "seed",
        "siblings",
    }
)
"""Parameters without which the answer would be another one."""


class ParametersKind(Kind[Parameters]):
    def stages(self, config: Parameters, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [
            [Stage((send_with(parameter, prompts[p], config.max_tokens),)) for parameter in config.parameters]
            for p in config.prompts
        ]

    def impossible(self, config: Parameters, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        if "single" not in profile.topologies:
            return (
                "it needs the plain single engine, whose answers say what is right, and the profile has only pairs; "
                "add single to topologies, or leave the scenario out (without_scenarios)"
            )
        known = not OF_TEXT.issuperset(config.parameters)
        if known and (problem := answered_briefly(config.prompts, prompts, LONG_ENOUGH)) is not None:
            return problem
        if any(is_chat(api_of(p)) for p in config.parameters) and (problem := unsaid(config.prompts, profile, prompts)):
            return problem
        for parameter, other in WITHOUT.items():
            if parameter in config.parameters and other not in config.parameters:
                return f"expected {other} among the parameters, which {parameter} comes on top of; add it"
        if "seed-again" in config.parameters and "seed" not in config.parameters:
            return "expected seed among the parameters, whose answer seed-again repeats; add it"
        return None

    def gaps(self, config: Parameters, seen: Occurrence) -> Iterator[Gap]:
        """Prove that the plain engine answered with the same parameter, that the parameter changed its answer if it is
        one that must, and that an answer that is to be stopped was."""
        for o in seen.parts.values():
            yield from gaps_of(seen, o)


def gaps_of(seen: Occurrence, o: Observation, must_change: bool = True) -> Iterator[Gap]:
    """Yield what is missing of the proof that a parameter said what the answer to a request is; ``must_change`` asks
    for one of the plain engine that is another than without it."""
    cell, leg = seen.cell, o.final
    if leg is None or o.feature is None or not o.answered_otherwise:
        return
    wanted = _CUTS.get(o.feature)
    if wanted is not None and leg.finish_reason != wanted:
        yield Gap(o, f"expected the request to end at its {o.feature}, found the reason {leg.finish_reason}")
    plain = cell.history.of(cell.name.reference, scenario=cell.scenario)
    reference = plain.get(o.key)
    if reference is None or reference.final is None:
        if not (o.feature in SAMPLED and cell.speculative):
            yield Gap(
                o,
                f"expected an answer of {cell.name.reference} with the same parameter, which says what is right, found "
                "none: nothing was compared",
            )
        return
    if not must_change or o.feature not in _CHANGES:
        return
    without = _without(o, plain) if o.feature in WITHOUT else o.known_answer
    if without is None:
        yield Gap(o, f"expected the plain engine's answer without {o.feature} to compare with, found none")
    elif reference.final.output_ids == without[: o.max_tokens]:
        yield Gap(o, f"{o.feature} changed nothing in the plain engine's answer")


def _without(o: Observation, plain: Mapping[str, Observation]) -> tuple[int, ...] | None:
    """Return the plain engine's answer to the same prompt with all but the parameter that came on top."""
    same = (p for p in plain.values() if (p.prompt_id, p.feature) == (o.prompt_id, WITHOUT[o.feature or ""]))
    return next((p.final.output_ids for p in same if p.final is not None), None)
