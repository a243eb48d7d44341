"""D is told of a P that is not there any more, and computes the prompt by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.profiles.model import Profile
from harness.profiles.scenarios import Recovery
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Gap, Kind, Occurrence, Send, Stage, one
from harness.scenarios.proving import computed_before, engine_of_p


class RecoveryKind(Kind[Recovery]):
    needs = frozenset({"subject", "again"})

    def stages(self, config: Recovery, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        return [_of(config, prompts[p]) for p in config.prompts]

    def impossible(self, config: Recovery, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        if profile.engine.kv_load_failure_policy != "recompute":
            return (
                "expected engine.kv_load_failure_policy: recompute, with which D computes what it cannot fetch, "
                f"found {profile.engine.kv_load_failure_policy}; set it, or leave the scenario out"
            )
        if profile.engine.pushes:
            return (
                "expected engine.kv_transfer: pull, with which D finds that P is gone, found push, with which D "
                "waits for P; leave the scenario out (without_scenarios)"
            )
        return None

    def gaps(self, config: Recovery, seen: Occurrence) -> Iterator[Gap]:
        """Prove that D fetched nothing and computed the prompt by itself, and that the next request found it cached."""
        cell, parts = seen.cell, seen.parts
        subject, again = parts["subject"], parts["again"]
        counters = subject.final.counters if subject.final is not None else {}
        computed = int(counters.get("prompt_tokens_local_compute", 0))
        failed = int(counters.get("nixl_failed_transfers", 0))
        if computed < len(subject.sent_ids) or not failed:
            yield Gap(
                subject,
                f"expected D to compute all {len(subject.sent_ids)} prompt tokens after it had failed to fetch "
                f"them, found {computed} computed and {failed} failed transfers: nothing had to be recovered",
            )
        yield from computed_before(cell, subject, again, cell.answering)
        before = parts.get("before")
        if cell.hand_off.p_of(again) and before is not None and engine_of_p(before) == engine_of_p(again):
            yield Gap(again, f"expected another P after its restart, found engine {engine_of_p(again)} as before")


def _of(config: Recovery, prompt: Prompt) -> list[Stage]:
    limit = config.max_tokens
    return [
        one(prompt, "before", "b", SHORT),
        Stage((Send(prompt, "subject", "a", "former-p", max_tokens=limit, restart=config.restart),)),
        one(prompt, "again", "a", limit),
        *([one(prompt, "after", "c", limit)] if config.restart else ()),
    ]
