"""The next turn of a conversation, which repeats a prompt and its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.history.records import Leg, Observation, SentTo
from harness.history.token_ids import common_prefix
from harness.profiles.model import Profile
from harness.profiles.scenarios import Continuation
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Send, Stage, one
from harness.scenarios.proving import hits_of, judge_hit, leg_of


class ContinuationKind(Kind[Continuation]):
    needs = frozenset({"donor", "subject"})

    def stages(
        self, config: Continuation, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]
    ) -> list[list[Stage]]:
        return [_turns(config, prompts, p) for p in config.continued]

    def impossible(self, config: Continuation, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        """Return why the cache would not hold blocks of the first answer, or None."""
        if config.read_back and not profile.engine.read_back_s:
            return (
                "expected engine.kv_connector_extra_config with bidirectional_kv_xfer: true, with which P "
                "reads from D, found a connector that hands KV over one way; set it, or leave out read_back"
            )
        if config.on_p and not config.read_back:
            return "expected on_p beside read_back, since P has nothing of D's otherwise, found it alone; add read_back"
        size = profile.engine.block_size
        donor = prompts[config.donor]
        if donor.expected is None:
            return f"expected a donor whose answer is known, found none for {config.donor}; name a copy or echo prompt"
        turn = (*donor.ids, *donor.expected)
        drops_block = any(method.traits.drops_block for method in profile.methods)
        # With most drafters, the last matched block is computed again.
        needed = (donor.tokens // size + 1 + drops_block) * size + 1
        for name in config.continued:
            repeated = common_prefix(turn, prompts[name].ids)
            if not donor.tokens < repeated < donor.tokens + profile.workload.max_tokens:
                return (
                    f"expected {name} to begin with {config.donor} and the beginning of its answer, of less than "
                    f"workload.max_tokens = {profile.workload.max_tokens} tokens, found something else"
                )
            if repeated < needed:
                return (
                    f"expected {name} to repeat at least {needed} tokens of the turn before, so that a block "
                    f"of the answer is found in the cache, found {repeated}; name a longer one"
                )
        return None

    def gaps(self, config: Continuation, seen: Occurrence) -> Iterator[Gap]:
        cell, parts = seen.cell, seen.parts
        donor, subject = parts["donor"], parts["subject"]
        for role in ("prefill",) if config.on_p else cell.roles:
            wanted = cell.prefix_cache.expected_hit(donor, subject, role)
            why = f"it computed {donor.prompt_id}" + (" and its answer before" if role == cell.answering else " before")
            yield from judge_hit(cell, subject, leg_of(cell, subject, role), wanted, why)
        prefill = subject.leg("prefill")
        if config.read_back and prefill is not None:
            read = prefill.external_tokens
            if hits_of(prefill) + read <= len(donor.sent_ids):
                yield Gap(
                    subject,
                    f"expected P to read tokens of the answer to {donor.prompt_id} from D, found {read:.0f} "
                    f"tokens from outside after a hit of {hits_of(prefill)}: nothing of it was handed back",
                )
            if config.on_p:
                yield from _computed_again(donor, subject, prefill)
        size = cell.record.block_size
        # Where layers are of several kinds, the prefix cache need not have kept it.
        several = cell.record.several_kinds
        found = hits_of(subject.final) if several else cell.prefix_cache.expected_hit(donor, subject).least
        if not config.on_p and found <= len(donor.sent_ids) // size * size:
            yield Gap(
                subject,
                f"expected an answer to {donor.prompt_id} of which {subject.prompt_id} repeats a whole block, found a "
                "shorter or another one: no block of an answer was read",
            )


def _computed_again(donor: Observation, subject: Observation, prefill: Leg) -> Iterator[Gap]:
    """Yield that P computed tokens that it should have read: D has those of the turn before and of its answer but the
    last, and P computes the last one of a prompt in any case."""
    known = min(common_prefix((*donor.sent_ids, *donor.output[:-1]), subject.sent_ids), len(subject.sent_ids) - 1)
    had = hits_of(prefill) + prefill.external_tokens
    if had < known:
        yield Gap(
            subject,
            f"expected P to compute what follows token {known} alone, found {had:.0f} tokens that it had or read: it "
            f"computed a part of the answer to {donor.prompt_id} again",
        )


def _turns(config: Continuation, prompts: Mapping[str, Prompt], name: str) -> list[Stage]:
    """Return a turn and the next one.

    Where the next one is the beginning of the first answer alone, that is one token longer, because the KV of a token
    is computed in the step after it.
    """
    donor, continued = prompts[config.donor], prompts[name]
    repeated = common_prefix((*donor.ids, *(donor.expected or ())), continued.ids)
    answered = max(repeated - donor.tokens + (repeated == continued.tokens), SHORT)
    route: SentTo = "read-back" if config.on_p else "cell"
    subject = Send(continued, "subject", "a", route, max_tokens=config.max_tokens, read_back=config.read_back)
    return [one(donor, "donor", "a", answered), Stage((subject,))]
