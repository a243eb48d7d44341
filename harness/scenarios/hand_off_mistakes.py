"""What a router or a proxy may do to a hand-off and should not: D answers as ever, or refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import Abandon, HandOffMistakes
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Send, Stage, one
from harness.scenarios.possible import too_many, unfilled
from harness.scenarios.proving import filled

P_TOKENS = 3
"""What a router asks P for that does not limit its answer to one token."""
_BEFORE_RETRY = 2
"""Steps of D's answer after which the client loses patience."""
_ASKED = "asked"
"""Begins the part of requests of which P is asked alone, with the parameters of a hand-off."""


class HandOffMistakesKind(Kind[HandOffMistakes]):
    def stages(
        self, config: HandOffMistakes, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]
    ) -> list[list[Stage]]:
        fill = [prompts[p] for p in config.fill]
        scripts = []
        for prompt in (prompts[p] for p in config.prompts):
            make = _OfPrompt(config, prompt)
            made = [make.mistake(mistake, fill) for mistake in config.mistakes]
            if config.lost:
                made.append([stage for name in config.lost for stage in make.lost(name)])
            # The pair is as it was before.
            scripts += [[*stages, one(prompt, "after", "after", config.max_tokens)] for stages in made]
        return scripts

    def impossible(self, config: HandOffMistakes, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        if not profile.engine.pulls_by_nixl:
            return (
                "it needs NIXL's connector and engine.kv_transfer: pull, whose hand-offs D reads with P's "
                "parameters; leave the scenario out (without_scenarios)"
            )
        if "shared" in config.mistakes and (problem := too_many(config.siblings, profile)) is not None:
            return problem
        return unfilled(config.fill, profile, prompts) if config.fill else None

    def gaps(self, config: HandOffMistakes, seen: Occurrence) -> Iterator[Gap]:
        """Prove that there was a hand-off to make the mistake with, that a parameter was there to be lost, and that P
        used its pool before its blocks were asked for again."""
        for part, o in seen.parts.items():
            given = _reference_of(o.mistake, part, seen)
            if o.mistake is None or not isinstance(given, dict):
                continue
            lost = o.mistake.removeprefix(LOST) if o.mistake.startswith(LOST) else None
            if lost is not None and lost not in given:
                yield Gap(o, f"P's parameters have no {lost} that could get lost")
        if "used-late" in seen.parts:
            late = {**seen.parts, "subject": seen.parts["used-late"]}
            yield from filled(seen.cell, late, "prefill")


LOST = "lost "
"""Begins the mistake of a request whose hand-off lacks a parameter, before its name."""


def _reference_of(mistake: str | None, part: str, seen: Occurrence) -> object:
    """Return P's parameters of the hand-off that a parameter was lost of."""
    asked = seen.parts.get(f"{_ASKED}-{part}")
    leg = asked.leg("prefill") if asked is not None else None
    return leg.kv_transfer_params if leg is not None else None


class _OfPrompt:
    """The requests that are made of one prompt."""

    def __init__(self, config: HandOffMistakes, prompt: Prompt) -> None:
        self._config, self._prompt = config, prompt
        self._until = Abandon(leg="decode", after_s=config.patience_s)

    def mistake(self, mistake: str, fill: Sequence[Prompt]) -> list[Stage]:
        first = one(self._prompt, "first", "first", self._config.max_tokens)
        match mistake:
            case "used-twice":
                return [first, Stage((self._again(mistake, "first"),))]
            case "used-late":
                filling = [
                    Stage((Send(p, f"fill{i}", "fill", "prefill", max_tokens=SHORT),)) for i, p in enumerate(fill)
                ]
                return [first, *filling, Stage((self._again(mistake, "first"),))]
            case "retried":
                given_up = self._send("first")._replace(abandon=Abandon(leg="decode", after_steps=_BEFORE_RETRY))
                return [Stage((given_up,)), Stage((self._again(mistake, "first"),))]
            case "asked-twice":
                twice = [Stage((self._of_p(part, "same"),)) for part in (_ASKED, f"{_ASKED}-again")]
                return [*twice, Stage((self._again(mistake, _ASKED),))]
            case "shared":
                siblings = [self._again(mistake, _ASKED, f"{mistake}{i}") for i in range(self._config.siblings)]
                return [Stage((self._of_p(_ASKED),)), Stage(tuple(siblings))]
            case _:
                more = self._send(mistake)._replace(mistake=mistake, p_tokens=P_TOKENS, abandon=self._until)
                return [Stage((more,))]

    def lost(self, name: str) -> list[Stage]:
        part = f"lost-{name.replace('_', '-')}"
        asked = f"{_ASKED}-{part}"
        return [Stage((self._of_p(asked),)), Stage((self._again(f"{LOST}{name}", asked, part, lost=name),))]

    def _of_p(self, part: str, group: str = "") -> Send:
        """Return a request that P is asked for D, which never comes by it."""
        return self._send(part, group)._replace(abandon=Abandon(after_s=0))

    def _again(self, mistake: str, reference: str, part: str = "", lost: str = "") -> Send:
        """Return a request to D with the parameters of an earlier hand-off."""
        return self._send(part or mistake)._replace(
            route="reference", mistake=mistake, reference=reference, lost=lost, abandon=self._until
        )

    def _send(self, part: str, group: str = "") -> Send:
        return Send(self._prompt, part, group or part, max_tokens=self._config.max_tokens)
