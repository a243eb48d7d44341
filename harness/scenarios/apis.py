"""Each prompt is asked as a whole completion, and then in other ways that must give the same answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import Observation
from harness.profiles.model import Profile
from harness.profiles.scenarios import Api, Apis, is_chat, is_streamed
from harness.prompts.messages import messages_of
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Send, Stage
from harness.scenarios.proving import computed_before

WHOLE: Api = "completion"
"""Part of the request that the others are compared with."""


class ApisKind(Kind[Apis]):
    needs = frozenset({WHOLE})

    def stages(self, config: Apis, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [_of(config, prompts[p]) for p in config.prompts]

    def impossible(self, config: Apis, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        step = profile.engine.max_num_batched_tokens
        chunked = [p for p in config.prompts if step is not None and prompts[p].tokens > step]
        if chunked:
            return (
                f"expected prompts of at most a step (engine.max_num_batched_tokens = {step}), since one of more is "
                f"prefilled in other chunks when some of it is cached, found {prompts[chunked[0]].tokens} tokens of "
                f"{chunked[0]}; name a shorter one"
            )
        if not any(map(is_chat, config.asked)) or not profile.tokenizer_folder.is_dir():
            return None
        lost = [p for p in config.prompts if not prompts[p].planned and messages_of(profile, prompts[p]) is None]
        if not lost:
            return None
        return (
            f"expected messages that the chat template of {profile.tokenizer_folder} renders to {lost[0]} on any day, "
            "found none; name a prompt of a few turns, or leave chat out of `asked`"
        )

    def gaps(self, config: Apis, seen: Occurrence) -> Iterator[Gap]:
        """Prove that streams had several pieces, one of them with several tokens where drafts were accepted, and that
        the second request of an endpoint found what the first one left in the cache."""
        streams = [o for o in seen.parts.values() if is_streamed(o.api)]
        for o in streams:
            if o.final is not None and o.final.streamed is None:
                yield Gap(o, "the answer came whole, not in pieces")
        # Pieces of a short answer may be sent together, if the server is kept from sending them.
        if streams and not any(_pieces(o) > 1 for o in streams):
            yield Gap(streams[0], "expected several pieces with tokens of an answer, found fewer than two of each")
        if any(map(_accepted, streams)) and not any(_several(o) for o in streams):
            yield Gap(
                streams[0],
                "expected a piece with several tokens, since drafts were accepted, found none: the server sends "
                "tokens one by one",
            )
        if seen.cell.handed_off and seen.cell.record.several_kinds:
            # D was handed the end of a window or a state alone, from which no prefix can be read.
            return
        for before, after in ((WHOLE, "completion-stream"), ("chat", "chat-stream")):
            if before in seen.parts and after in seen.parts:
                donor, o = seen.parts[before], seen.parts[after]
                if seen.cell.prefix_cache.expected_hit(donor, o).most:
                    yield from computed_before(seen.cell, donor, o, seen.cell.answering)


def _of(config: Apis, prompt: Prompt) -> list[Stage]:
    # One cache for each endpoint: the second request finds the first one's blocks there.
    return [
        Stage((Send(prompt, api, "chat" if is_chat(api) else "ids", max_tokens=config.max_tokens, api=api),))
        for api in (WHOLE, *config.asked)
    ]


def _accepted(o: Observation) -> int:
    leg = o.final
    return leg.speculation.num_accepted if leg is not None and leg.speculation is not None else 0


def _pieces(o: Observation) -> int:
    """Return how many pieces with tokens an answer came in."""
    leg = o.final
    return sum(n > 0 for n in leg.streamed.tokens) if leg is not None and leg.streamed is not None else 0


def _several(o: Observation) -> bool:
    leg = o.final
    return leg is not None and leg.streamed is not None and any(n > 1 for n in leg.streamed.tokens)
