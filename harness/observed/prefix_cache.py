"""What an engine of a cell must, and may, find of a prompt in its prefix cache, by what it was asked before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from harness.history.records import Leg, Observation
from harness.history.token_ids import common_prefix
from harness.observed.cell import ObservedCell
from harness.observed.hand_off import HandOff

OF_P_ALONE = ("prefill", "read-back")
"""Where requests go that P alone answers."""


class Hit(NamedTuple):
    """Tokens of a prompt that an engine takes from its prefix cache, by what it was asked before."""

    least: int
    most: int


@dataclass(frozen=True)
class PrefixCache:
    """The prefix caches of the engines of one cell in one scenario."""

    _cell: ObservedCell
    _hand_off: HandOff

    def expected_hit(
        self, donor: Observation, subject: Observation, role: str | None = None, answered: bool = True
    ) -> Hit:
        """Return how many tokens of the subject an engine must have cached after the donor: the whole common blocks,
        never the whole prompt. ``role`` defaults to the answering engine, which also holds the donor's answer once it
        has ``answered``.

        With drafters that make vLLM recompute the last matched block (``use_eagle_block_drop``) it is one block less.
        Versions after 0.32.0 may reuse that one: vllm-project/vllm#50438 hashes blocks with their lookahead. Where
        layers are of several kinds the block to recompute may end with the prompt: vLLM looks for it beyond the last
        token but one (``eagle_proof_margin``). Tokens of which later modules saw drafts are not cached.
        """
        role = role or self._cell.answering
        size = self._cell.block_size(role)
        caches = self._cell.caches_prefixes(role)
        if not caches or donor.adapter != subject.adapter:
            return Hit(0, 0)
        held, asked = self._computed_prompt(donor, role), self._computed_prompt(subject, role)
        if answered and (role == self._cell.answering or donor.route in OF_P_ALONE):
            held = (*held, *_computed_output(donor))
        held = held[: max(len(held) - self._cell.record.unverified, 0)]
        matched = common_prefix(held, asked) // size * size
        limit = (len(asked) - 1) // size * size
        drops = self._cell.speculative and self._cell.traits.drops_block
        most = self._after_drop(matched, limit, size if drops else 0)
        kept = self._kept_by_all_kinds(donor, role, matched, size if drops else 0)
        if kept > len(self._computed_prompt(donor, role)):
            # Of an answer, the last block may not be kept when the next turn ends with it.
            kept = min(kept, limit)
        least = self._after_drop(kept, limit, size if drops else 0)
        if self._cell.record.recurrent and not self._keeps_each_block(role):
            # The one state that is kept of it serves no shorter hit.
            least = least if least == kept - (size if drops else 0) else 0
        reused = drops and _after(self._cell.history.run.versions.get("vllm"), "0.32.0")
        return Hit(least, min(matched, limit) if reused else most)

    def _after_drop(self, matched: int, limit: int, dropped: int) -> int:
        """Return what is taken of the matched tokens, where so many of them are computed again."""
        if not dropped:
            return min(matched, limit)
        last = matched if self._cell.record.several_kinds else min(matched, limit)
        return min(max(last - dropped, 0), limit)

    def _kept_by_all_kinds(self, donor: Observation, role: str, matched: int, dropped: int) -> int:
        """Return how many of the matched tokens layers of every kind must have kept of the donor.

        Of windows and states vLLM 0.32.0 keeps, by default, what its prompt would find when it is asked again
        (``prefix_cache_retention_interval``), and D has of a hand-off the end of a window alone.
        """
        if not self._cell.record.several_kinds:
            return matched
        if any(self._cell.record.windows) and role == "decode" and donor.route == "cell" and self._cell.handed_off:
            return 0
        size = self._cell.block_size(role)
        again = (len(self._computed_prompt(donor, role)) - 1) // size * size + dropped
        return matched if self._keeps_each_block(role) else min(matched, again)

    def _keeps_each_block(self, role: str) -> bool:
        """Return whether the prefix cache keeps windows and states at the end of each block."""
        settings = self._cell.settings.of("prefill" if role == "prefill" else "decode")
        return settings.prefix_cache_retention == self._cell.block_size(role)

    def _computed_prompt(self, o: Observation, role: str) -> tuple[int, ...]:
        """Return the prompt tokens of a request that an engine computes: P all but those that it leaves to D."""
        return o.sent_ids[: self._hand_off.handed_tokens(o)] if role == "prefill" else o.sent_ids

    def allowed_hit(self, o: Observation, role: str) -> int | None:
        """Return the most prompt tokens of a request that may be in an engine's prefix cache: its longest common prefix
        with an earlier request of the same script. Zero for cold prompts; None if the counters are shared with other
        requests.
        """
        if o.concurrent > 1:
            return None
        config = self._cell.config
        if self._cell.cold or (config is not None and config.evicts):
            return 0
        return self.hit_of_any((x for x in self._cell.observations().values() if x.sequence < o.sequence), o, role)

    def hit_of_any(self, donors: Iterable[Observation], subject: Observation, role: str | None = None) -> int:
        """Return the most tokens of the subject that an engine may have cached after the donors of its instance."""
        others = (x for x in donors if x.instance == subject.instance and x is not subject)
        return max((self.expected_hit(x, subject, role).most for x in others), default=0)

    def has_all_cached(self, o: Observation, decode: Leg) -> bool:
        """Return whether D, asked alone, had all tokens cached that P hands over, so that nothing moves. Where P leaves
        none to D, something always does: D fetches the last token, too, which it computes in any case."""
        hits = decode.counters.get("prefix_hits", 0)
        return self._hand_off.left_to_d(o) > 0 and hits >= self._hand_off.fetched_tokens(o)

    def most_all_cached(self, members: Iterable[Observation], counters: Mapping[str, float]) -> int:
        """Return of how many requests beside each other, whose counters are known for all of them together, D may have
        had all tokens cached that P hands over: each of them takes that many from the cache."""
        hits, most = counters.get("prefix_hits", 0), 0
        if not hits:
            return 0
        for tokens in sorted(self._hand_off.fetched_tokens(o) for o in members if self._may_have_all_cached(o)):
            hits -= tokens
            most += hits >= 0
        return most

    def _may_have_all_cached(self, o: Observation) -> bool:
        if o.concurrent == 1 or not self._hand_off.left_to_d(o):
            return False
        return self.hit_of_any(self._cell.all_observations(), o) >= self._hand_off.fetched_tokens(o)


def _after(version: str | None, other: str) -> bool:
    """Return whether a version is later than a release, of which builds such as ``+cu129`` are no later ones."""
    try:
        return Version(Version(version or "").public) > Version(other)
    except InvalidVersion:
        return False


def _computed_output(o: Observation) -> tuple[int, ...]:
    """Return the output tokens whose KV was computed: all but the last one, and at most those of a request that was
    given up."""
    leg = o.final
    if leg is None and o.abandon is not None:
        return o.known_answer or ()
    return (leg.output_ids or ())[:-1] if leg is not None else ()
