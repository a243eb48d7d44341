"""Whether asking cold prompts together changes an answer: the first ones of a cell are asked one by one and once more
together, and compared bit for bit.

The runner asks the others together or one by one by it, and the judge tells from the same answers which way was right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from harness.history.records import Leg, Observation
from harness.history.rounding import RESOLUTION_NATS
from harness.history.token_ids import common_prefix


class CrowdProof(NamedTuple):
    """What the first prompts of a cell show."""

    asked: int
    """How many were asked both ways."""
    differing: tuple[str, ...]
    """What is not as it was alone, a sentence for each prompt."""

    @property
    def holds(self) -> bool:
        """Whether the others may be asked together."""
        return self.asked > 1 and not self.differing


def tells_drafts(o: Observation) -> bool:
    """Return whether an answer says itself how many drafts were accepted: what engines count tells that only of a
    request that has them to itself."""
    return o.final is None or o.final.speculation is not None


def proof_of(
    alone: Mapping[str, Observation], together: Iterable[Observation], nats: float | None, speculative: bool
) -> CrowdProof:
    """Compare answers by prompt. ``nats`` is by how much log-probs may differ; None: not at all."""
    bound = RESOLUTION_NATS if nats is None else nats
    asked = 0
    differing = []
    for o in together:
        usual = alone.get(o.prompt_id)
        if usual is None:
            continue
        asked += 1
        words = next(_differences(usual, o, bound), None)
        if words is None and speculative and not tells_drafts(o):
            words = "no accepted drafts in the answer"
        if words is not None:
            differing.append(f"{o.prompt_id}: {words}")
    return CrowdProof(asked, tuple(differing))


def in_words(found: CrowdProof) -> str:
    """Say which way the others are asked, and why."""
    if found.holds:
        return f"cold prompts are asked together, since {found.asked} had the same answers alone and together"
    why = found.differing[0] if found.differing else "none were asked both ways"
    return f"cold prompts are asked one by one, since together {len(found.differing)} of {found.asked} differ; {why}"


def _differences(usual: Observation, beside: Observation, nats: float) -> Iterator[str]:
    if usual.error is not None or beside.error is not None or beside.final is None:
        yield "no answer"
        return
    if [leg.role for leg in usual.legs] != [leg.role for leg in beside.legs]:
        yield "answers of other engines"
        return
    for ours, theirs in zip(usual.legs, beside.legs, strict=True):
        yield from _of_leg(ours, theirs, nats)


def _of_leg(usual: Leg, beside: Leg, nats: float) -> Iterator[str]:
    ids, others = usual.output_ids or (), beside.output_ids or ()
    if ids != others:
        yield f"other tokens from output {common_prefix(ids, others)} on"
    if usual.finish_reason != beside.finish_reason:
        yield f"ended by {beside.finish_reason} instead of {usual.finish_reason}"
    if usual.speculation != beside.speculation:
        yield "other accepted drafts"
    pairs = [(usual.chosen_logprobs, beside.chosen_logprobs), (usual.top_gaps, beside.top_gaps)]
    if any((a is None) != (b is None) or len(a or ()) != len(b or ()) for a, b in pairs):
        yield "log-probs of one of the two only"
        return
    apart = [_apart(a, b) for ours, theirs in pairs for a, b in zip(ours or (), theirs or (), strict=True)]
    if (most := max(apart, default=0.0)) > nats:
        yield f"log-probs that are up to {most:.1e} nats apart"


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b)
