"""Each prompt is asked once with each of several parameters that must not change its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import SentTo
from harness.profiles.model import Profile
from harness.profiles.scenarios import Feature, Features, Parameter, api_of, temperature_of, tokens_asked
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.possible import answered_briefly

_STOPS = {"stop-token": "token", "stop-at-once": "token", "stop-string": "string"}
"""Features that end an answer, and what ends it."""
_LONG_ENOUGH = 4
"""Known tokens of a prompt that is asked with features: it is stopped after the first and before the last."""


class FeaturesKind(Kind[Features]):
    def stages(self, config: Features, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [
            [Stage((send_with(feature, prompts[p], config.max_tokens),)) for feature in config.features]
            for p in config.prompts
        ]

    def impossible(self, config: Features, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        return answered_briefly(config.prompts, prompts, _LONG_ENOUGH)

    def gaps(self, config: Features, seen: Occurrence) -> Iterator[Gap]:
        """Prove what an answer can show: that it stopped at its token, and that log-probs of the prompt came. A grammar
        and a smallest length that an engine ignores change nothing."""
        for o in seen.parts.values():
            leg = o.final
            what = _STOPS.get(o.feature or "")
            if what is not None and leg is not None and leg.finish_reason != "stop":
                yield Gap(o, f"expected the request to end at its stop {what}, found the reason {leg.finish_reason}")
            elif what == "string" and leg is not None and not leg.ended_by_text:
                yield Gap(o, f"expected the request to end at its stop string, found the end {leg.stop_reason}")
            if o.feature == "prompt-logprobs" and all(leg.prompt_logprobs is None for leg in o.legs):
                yield Gap(o, "expected the log-probs of the prompt that were asked for, found none in any answer")


def send_with(feature: Feature | Parameter, prompt: Prompt, limit: int | None, part: str = "", group: str = "") -> Send:
    """Return a request with a parameter, for ``limit`` tokens unless the parameter needs another number of them;
    ``part`` and ``group`` are named after it if no others are given."""
    asked = tokens_asked(feature, len(prompt.expected or ()))
    # With log-probs of the prompt D computes all of it, whatever P has.
    route: SentTo = "local" if feature in ("prompt-logprobs", "echo") else "cell"
    return Send(
        prompt,
        part or feature,
        group or feature,
        route,
        max_tokens=asked or limit,
        temperature=temperature_of(feature),
        feature=feature,
        api=api_of(feature),
    )
