"""Checks that the state a scenario is about really occurred, proven by the engines' counters; otherwise UNKNOWN.

The same counters reveal impossible cache hits: tokens taken from the prefix cache although their blocks were evicted
or belong to another prompt. These are defects, not missing evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from itertools import accumulate
from typing import NamedTuple

from harness.history.records import Leg, Observation
from harness.history.verdict import Verdict
from harness.judging.checks.counters import steps_up_to
from harness.judging.evidence import CellView
from harness.judging.figures import CacheHit
from harness.judging.findings import CheckResult, Finding, conclude
from harness.observed.prefix_cache import Hit
from harness.profiles.scenarios import Concurrent, Continuation, Crowd, PrefixHit, Trace
from harness.prompts.lengths import blocks

NAME = "state-occurred"
MOST_CROWDS = 0.9
"""Share of the crowds of a scenario that must prove its state."""


class Gap(NamedTuple):
    """Evidence that is missing from the proof of a state, or that is impossible."""

    observation: Observation
    message: str
    impossible: bool = False
    hit_blocks: int = 0
    missed_by: str = ""
    """Role of the engine that found none of the blocks which it has cached."""


def state_occurred(cell: CellView) -> CheckResult:
    """Check for each instance of a scenario that its state occurred."""
    observations = [o for o in cell.observations().values() if o.error is None]
    instances: dict[int, dict[str, Observation]] = {}
    for o in observations:
        instances.setdefault(o.instance, {})[o.part] = o
    gaps = [_gaps(cell, parts) for parts in instances.values()]
    proven = sum(not found for found in gaps)
    note = ""
    if _enough(cell, len(gaps)) <= proven < len(gaps):
        note = f"the state is proven for {proven} of {len(gaps)} rounds"
        gaps = [[g for g in found if g.impossible] for found in gaps]
    return conclude(NAME, cell.id, len(instances), [_finding(cell, g) for found in gaps for g in found], note)


def _gaps(cell: CellView, parts: dict[str, Observation]) -> list[Gap]:
    """Return what the proof of one instance lacks; nothing where a request is missing, which another check says."""
    config = cell.config
    if config is None:
        raise ValueError(f"scenario {cell.scenario} is not part of the recorded profile")
    proof = PROOFS[config.kind]
    return list(proof.gaps(cell, parts)) if proof.of <= parts.keys() else []


def _enough(cell: CellView, instances: int) -> int:
    """Return how many instances of a scenario must prove its state."""
    if isinstance(cell.config, Concurrent):
        # All rounds send the same requests; on a busy machine some arrive too late, and one proof is enough.
        return 1
    # Now and then the prompts of a crowd fill a step exactly, and some crowds have short answers.
    return math.ceil(MOST_CROWDS * instances) if isinstance(cell.config, Crowd) else instances


def _finding(cell: CellView, gap: Gap) -> Finding:
    if gap.missed_by and cell.speculative and _plain_finds_them(cell, gap):
        message = f"{gap.message}, while {_plain(cell)} of this run finds its own: speculation loses the prefix cache"
        return cell.finding(NAME, Verdict.REGRESSION, "reuse-lost", message, gap.observation)
    found = cell.wrong_kv if gap.impossible else cell.untested
    return found(NAME, gap.message, gap.observation, CacheHit(hit_blocks=gap.hit_blocks))


def _plain(cell: CellView) -> str:
    return cell.name.beside(cell.topology, "none").id


def _plain_finds_them(cell: CellView, gap: Gap) -> bool:
    """Return whether the same request found cached blocks on the same engine without speculation in this run."""
    plain = cell.history.of(_plain(cell), scenario=cell.scenario).get(gap.observation.key)
    return plain is not None and plain.error is None and _hits(_leg(cell, plain, gap.missed_by)) > 0


def cold_stays_cold(cell: CellView) -> CheckResult:
    """Check that cold prompts, each with its own cache salt, take no token from any prefix cache."""
    name = "cold-stays-cold"
    findings = []
    judged = 0
    for o in cell.all_observations():
        counted: dict[str, dict[str, float]] = {leg.role: leg.counters for leg in o.legs if leg.counters}
        for role, counters in (o.shared_counters | counted).items():
            judged += 1
            hits = int(counters.get("prefix_hits", 0))
            if hits:
                message = (
                    f"expected the {role} engine to find nothing of a prompt with a salt of its own in its prefix "
                    f"cache, found a hit of {hits} tokens: these blocks are another prompt's"
                )
                findings.append(cell.wrong_kv(name, message, o, CacheHit(hit_blocks=hits // cell.record.block_size)))
    return conclude(name, cell.id, judged, findings)


def _hits(leg: Leg | None) -> int:
    return int(leg.counters.get("prefix_hits", 0)) if leg is not None else 0


def _judge_hit(cell: CellView, o: Observation, leg: Leg | None, wanted: Hit, why: str) -> Iterator[Gap]:
    """Judge a cache hit: a smaller one than ``wanted`` tested nothing, a larger one cannot be right."""
    if leg is None or not leg.counters:
        yield Gap(o, f"expected counters of the engine that {why}, found none")
        return
    hits = _hits(leg)
    if hits < wanted.least:
        yield Gap(
            o,
            f"expected the {leg.role} engine to take {wanted.least} tokens from its prefix cache ({why}), found "
            f"{hits}: the state did not occur",
            missed_by="" if hits else leg.role,
        )
    elif hits > wanted.most:
        yield Gap(
            o,
            f"expected the {leg.role} engine to find at most {wanted.most} tokens in its prefix cache ({why}), found "
            f"{hits}: {(hits - wanted.most) // cell.record.block_size} blocks of this hit cannot be this prompt's",
            impossible=True,
            hit_blocks=hits // cell.record.block_size,
        )


def _computed_before(cell: CellView, donor: Observation, o: Observation, role: str) -> Iterator[Gap]:
    """Judge the hit of a request on an engine that computed the donor's prompt."""
    wanted = cell.prefix_cache.expected_hit(donor, o, role)
    return _judge_hit(cell, o, _leg(cell, o, role), wanted, f"it computed {donor.prompt_id} before")


def _prefix_hit(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    donor, subject = parts["donor"], parts["subject"]
    config = cell.config
    assert isinstance(config, PrefixHit)
    role = "prefill" if config.where == "prefill" else cell.answering
    wanted = cell.prefix_cache.expected_hit(donor, subject, role)
    if wanted.least == 0:
        yield Gap(
            subject, "expected a pair of prompts that gives a prefix hit with this method, found none; share more"
        )
        return
    why = f"its first blocks were computed for {donor.prompt_id}"
    yield from _judge_hit(cell, subject, _leg(cell, subject, role), wanted, why)


def _chunked(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    subject, role = parts["subject"], cell.prefilling
    engine, leg = cell.engine(role), subject.leg(role)
    budget = engine.step_tokens if engine else None
    if budget is None or leg is None:
        remedy = "; start the server with VLLM_SERVER_DEV_MODE=1" if engine and engine.attached else ""
        yield Gap(
            subject, f"expected the {role} engine to say how many tokens fit into one step, found no answer{remedy}"
        )
        return
    computed = int(leg.counters.get("prompt_tokens_local_compute", 0))
    if computed <= budget:
        yield Gap(
            subject,
            f"expected the {role} engine to compute more prompt tokens than the {budget} of one step, found "
            f"{computed}: the prompt was not prefilled in chunks",
        )


def _concurrent(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    holder = parts["holder"]
    late = [o for part, o in parts.items() if part.startswith("late")]
    short = [o for part, o in parts.items() if part.startswith("together")]
    if not late or not short:
        return
    role = cell.prefilling
    yield from _one_step(cell, holder, short, holder.shared_counters.get(_shared(cell, role), {}), role)
    yield from _batched(cell, [holder, *short, *late], holder.shared_counters.get(_shared(cell, cell.answering), {}))
    if not any(o.started_at < _end(holder) for o in late):
        yield Gap(late[0], "expected a late request to join while the long one was running, found it began after it")
    if not any(_end(o) < _end(holder) for o in short):
        yield Gap(holder, "expected a short request to end before the long one, so that rows move, found none")
    again = parts.get("again")
    if again is not None:
        yield from _computed_before(cell, holder, again, cell.answering)


def _shared(cell: CellView, role: str) -> str:
    """Return the key of an engine in the shared counters of a stage: the role of its process."""
    engine = cell.engine(role)
    return engine.role if engine else role


def _end(o: Observation) -> float:
    return o.started_at + sum(leg.seconds for leg in o.legs)


def _one_step(
    cell: CellView, holder: Observation, short: list[Observation], counters: dict[str, float], role: str
) -> Iterator[Gap]:
    """Prove that short prompts were prefilled together: one step had more tokens than the long and one short prompt."""
    floor = len(holder.sent_ids) + max(len(o.sent_ids) for o in short)
    bound, found = _larger_steps(cell, role, counters, floor)
    if bound is None:
        yield Gap(holder, f"expected the {role} engine's histogram of tokens per step, found none above {floor}")
    elif not found:
        yield Gap(
            holder,
            f"expected one step of the {role} engine with more than {bound} tokens, found none: the short prompts were "
            "not prefilled together",
        )


def _larger_steps(cell: CellView, role: str, counters: dict[str, float], floor: int) -> tuple[int | None, bool]:
    """Return the smallest bound of the engine's histogram of tokens per step that is at least ``floor``, and whether
    any step had more tokens; the bound is None if there is none, or the steps were not counted.

    A bound whose count did not grow is not among ``counters``, but among those that the engine offers.
    """
    engine = cell.engine(role)
    offered = dict.fromkeys((engine and engine.counters) or (), 0.0)
    bound = min((b for b in steps_up_to({**offered, **counters}) if b >= floor), default=None)
    if bound is None or "engine_steps" not in counters:
        return None, False
    return bound, counters["engine_steps"] > steps_up_to(counters).get(bound, 0)


def _batched(cell: CellView, requests: list[Observation], counters: dict[str, float]) -> Iterator[Gap]:
    """Prove that requests decoded together: the engine took fewer steps than the requests add up to."""
    total = 0
    for o in requests:
        leg = o.final
        if leg is None or leg.output_ids is None:
            return
        spec = leg.speculation
        # Where a step without drafts is not counted, those that were follow from the tokens.
        counted = spec is not None and not spec.up_to
        total += (
            len(spec.per_step_accepted)
            if spec and counted
            else len(leg.output_ids) - 1 - (spec.num_accepted if spec else 0)
        )
    steps = counters.get("engine_steps")
    if steps is None or not steps < total:
        yield Gap(
            requests[0],
            f"expected fewer engine steps than the {total} steps of the requests, found {steps}: they did not "
            "run together",
        )


def _crowd(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    """Prove of a crowd what the scenario says that it proves."""
    config = cell.config
    assert isinstance(config, Crowd)
    requests = list(parts.values())
    first = requests[0]
    if "batched" in config.proves:
        yield from _batched(cell, requests, first.shared_counters.get(_shared(cell, cell.answering), {}))
    if "chunked" in config.proves:
        yield from _step_overflows(cell, requests)
    if "preempted" in config.proves:
        found = first.shared_counters.get(_shared(cell, cell.answering), {}).get("preemptions", 0)
        if found < 1:
            yield Gap(first, "expected at least one preemption while the KV pool was over-committed, found none")


def _step_overflows(cell: CellView, requests: list[Observation]) -> Iterator[Gap]:
    """Prove that a prompt was computed in chunks: all were queued when the engine was released, which fills a step with
    the prompts in their order, and no number of whole prompts fills the first one."""
    first, role = requests[0], cell.prefilling
    engine = cell.engine(role)
    budget = engine.step_tokens if engine else None
    if budget is None:
        yield Gap(first, f"expected the {role} engine to say how many tokens fit into one step, found no answer")
        return
    queued = sorted((o.asked_at, len(o.sent_ids)) for o in requests if o.asked_at and o.asked_at < (o.held_until or 0))
    filled = list(accumulate(tokens for _, tokens in queued))
    if not filled or filled[-1] <= budget or budget in filled:
        yield Gap(
            first,
            f"expected requests queued at the paused {role} engine whose prompts do not fit into a step of {budget} "
            f"tokens, found {len(queued)} of {len(requests)} with {filled[-1] if filled else 0}: no prompt was "
            "computed in chunks",
        )


def _pressure(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    waiting = parts["waiting"]
    load = [o for part, o in parts.items() if part.startswith(("load", "local"))]
    counters = waiting.shared_counters.get(_shared(cell, cell.answering), {})
    if counters.get("preemptions", 0) < 1:
        yield Gap(waiting, "expected at least one preemption while the KV pool was over-committed, found none")
    engine = cell.engine(cell.answering)
    pool = engine.kv_blocks if engine else None
    if pool is None:
        yield Gap(waiting, "expected to know the size of the KV pool, found it not recorded")
        return
    before = [o for o in load if _queued_before(o, waiting)]
    if len(before) < len(load):
        yield Gap(
            waiting,
            f"expected all {len(load)} other requests to be queued before the waiting one and before the engine was "
            f"released, found {len(before)}: it may not have had to wait",
        )
        return
    # One block of the pool is the null block. Unused cached blocks count as free.
    needed, taken = (sum(blocks(len(o.sent_ids), cell.record.block_size) for o in os) for os in ([waiting], before))
    if needed + taken <= pool - 1:
        yield Gap(
            waiting,
            f"expected no room for the {needed} blocks of the waiting request beside the others' {taken}, found a pool "
            f"of {pool - 1}: it did not have to wait",
        )


def _queued_before(o: Observation, waiting: Observation) -> bool:
    """Return whether a request was queued before the waiting one while the engine, which admits in order, was held."""
    asked, last, released = o.asked_at, waiting.asked_at, waiting.held_until
    return asked is not None and last is not None and released is not None and asked < last < released


def _fill(cell: CellView, parts: dict[str, Observation], role: str) -> Iterator[Gap]:
    """Prove that the fill took as many blocks as the pool has, so that every block was reused."""
    fill = [o for part, o in parts.items() if part.startswith("fill")]
    engine = cell.engine(role)
    pool = engine.kv_blocks if engine else None
    taken = sum(blocks(_computed(leg), cell.record.block_size) for o in fill if (leg := _leg(cell, o, role)))
    if shared := parts["subject"].shared_counters.get(role):
        # Counted together with the subject. Rounding up once gives a lower bound of the blocks of all prompts.
        computed = int(shared.get("prompt_tokens_local_compute", 0)) - len(parts["subject"].sent_ids)
        taken = blocks(max(computed, 0), cell.record.block_size)
    if pool is None:
        yield Gap(parts["subject"], f"expected the {role} engine to say how many KV blocks it has, found no answer")
    elif taken < pool - 1:
        # One block of the pool is the null block, which is never allocated.
        yield Gap(
            parts["subject"],
            f"expected the fill to take all {pool - 1} KV blocks of the {role} engine, found {taken}: A was "
            "not evicted",
        )


def _leg(cell: CellView, o: Observation, role: str) -> Leg | None:
    return o.final if role == cell.answering else o.leg(role)


def _computed(leg: Leg) -> int:
    """Return the prompt tokens for which the engine allocated new blocks."""
    return int(leg.counters.get("prompt_tokens_local_compute", 0) + leg.external_tokens)


def _refill(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    subject = parts["subject"]
    for role in cell.roles:
        yield from _fill(cell, parts, role)
        leg = _leg(cell, subject, role)
        yield from _judge_hit(cell, subject, leg, Hit(0, 0), "all of its blocks were given to others since")


def _late_pull(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    return _fill(cell, parts, "prefill")


def _recovery(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    """Prove that D fetched nothing and computed the prompt by itself, and that the next request found those blocks."""
    subject, again = parts["subject"], parts["again"]
    counters = subject.final.counters if subject.final is not None else {}
    computed = int(counters.get("prompt_tokens_local_compute", 0))
    failed = int(counters.get("nixl_failed_transfers", 0))
    if computed < len(subject.sent_ids) or not failed:
        yield Gap(
            subject,
            f"expected D to compute all {len(subject.sent_ids)} prompt tokens after it had failed to fetch them, found "
            f"{computed} computed and {failed} failed transfers: nothing had to be recovered",
        )
    yield from _computed_before(cell, subject, again, cell.answering)
    before = parts.get("before")
    if cell.hand_off.p_of(again) and before is not None and _engine_of_p(before) == _engine_of_p(again):
        yield Gap(again, f"expected another P after its restart, found engine {_engine_of_p(again)} as before")


def _second_prefill(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    """Prove that there were two P, and that D read as much from each of them as if it were the only one."""
    met: dict[object, list[Observation]] = {}
    for o in parts.values():
        met.setdefault(_engine_of_p(o), []).append(o)
    last = max(parts.values(), key=lambda o: o.sequence)
    if len(met) != 2 or any(len({cell.hand_off.p_of(o) for o in asked}) != 1 for asked in met.values()):
        yield Gap(last, f"expected hand-offs of two P, each with its own name, found {len(met)} names in them")
    for o in parts.values():
        fetched, handed = o.final.external_tokens if o.final is not None else 0, cell.hand_off.handed_tokens(o)
        if fetched < handed:
            yield Gap(o, f"expected D to read {handed} prompt tokens from P, found {fetched:.0f} read")


def _engine_of_p(o: Observation) -> object:
    leg = o.leg("prefill")
    return (leg.kv_transfer_params or {}).get("remote_engine_id") if leg is not None else None


def _appended_token(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    """Prove that D had blocks of the earlier prompt cached; what P and D were asked, the echoed prompts prove."""
    return _computed_before(cell, parts["donor"], parts["subject"], cell.answering)


def _shared_block(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    donor, again, bridge, subject = (parts[p] for p in ("donor", "again", "bridge", "subject"))
    for role in cell.roles:
        yield from _computed_before(cell, donor, again, role)
        wanted = cell.prefix_cache.expected_hit(bridge, subject, role)
        yield from _judge_hit(
            cell, subject, _leg(cell, subject, role), wanted, f"it has only the start of {bridge.prompt_id} in common"
        )


def _continuation(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    donor, subject = parts["donor"], parts["subject"]
    for role in cell.roles:
        wanted = cell.prefix_cache.expected_hit(donor, subject, role)
        why = f"it computed {donor.prompt_id}" + (" and its answer before" if role == cell.answering else " before")
        yield from _judge_hit(cell, subject, _leg(cell, subject, role), wanted, why)
    assert isinstance(cell.config, Continuation)
    prefill = subject.leg("prefill")
    if cell.config.read_back and prefill is not None:
        read = prefill.external_tokens
        if _hits(prefill) + read <= len(donor.sent_ids):
            yield Gap(
                subject,
                f"expected P to read tokens of the answer to {donor.prompt_id} from D, found {read:.0f} tokens from "
                f"outside after a hit of {_hits(prefill)}: nothing of it was handed back",
            )
    size = cell.record.block_size
    if cell.prefix_cache.expected_hit(donor, subject).least <= len(donor.sent_ids) // size * size:
        yield Gap(
            subject,
            f"expected an answer to {donor.prompt_id} of which {subject.prompt_id} repeats a whole block, found a "
            "shorter or another one: no block of an answer was read",
        )


def _same_step(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    """Prove that both were prefilled in one step, in which the second found the first one's blocks.

    The step must have more tokens than the longer of the two, and the hits are of the second: nothing else has the
    salt.
    """
    donor, subject, role = parts["donor"], parts["subject"], cell.prefilling
    counters = donor.shared_counters.get(_shared(cell, role), {})
    wanted = cell.prefix_cache.expected_hit(donor, subject, role, answered=False)
    hits = int(counters.get("prefix_hits", 0))
    if wanted.least == 0 or not wanted.least <= hits <= wanted.most:
        yield Gap(
            subject,
            f"expected the {role} engine to take {wanted.least} tokens from its prefix cache (computed for "
            f"{donor.prompt_id} in the same step), found {hits}",
            impossible=hits > wanted.most,
            hit_blocks=hits // cell.record.block_size,
        )
    floor = max(len(donor.sent_ids), len(subject.sent_ids))
    bound, found = _larger_steps(cell, role, counters, floor)
    if not found:
        yield Gap(
            subject,
            f"expected one step of the {role} engine with more than {bound or floor} tokens, found none: the two "
            "prompts were not prefilled together",
        )


_CHANCE = 1e-4
"""Largest accepted probability, over a whole request, that sampling picks a token other than the likeliest."""
_VOCABULARY = 300_000
"""Upper bound of the vocabulary size of any model in use."""


def _features(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    """Prove what an answer can show: that it stopped at its token, and that log-probs of the prompt came. A grammar and
    a smallest length that an engine ignores change nothing."""
    for o in parts.values():
        leg = o.final
        if o.feature in ("stop-token", "stop-at-once") and leg is not None and leg.finish_reason != "stop":
            yield Gap(o, f"expected the request to end at its stop token, found the reason {leg.finish_reason}")
        if o.feature == "prompt-logprobs" and all(leg.prompt_logprobs is None for leg in o.legs):
            yield Gap(o, "expected the log-probs of the prompt that were asked for, found none in any answer")


def _sampled(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    """Prove that the temperature is above zero, and that the recorded margins force every token nevertheless.

    Any other token has at most the probability exp(-gap / T); the union bound is over vocabulary and output length.
    """
    subject = parts["subject"]
    if subject.temperature <= 0:
        yield Gap(subject, "expected a temperature above zero, found greedy decoding: nothing was sampled")
        return
    row = cell.rows(cell.name.plain).get(subject.prompt_id)
    if row is None or row.min_top_gap is None:
        yield Gap(subject, "expected this prompt's margins in the no-speculation baseline, found none: record it anew")
        return
    chance = len(row.output_ids) * _VOCABULARY * math.exp(-row.min_top_gap / subject.temperature)
    if chance > _CHANCE:
        yield Gap(
            subject,
            f"expected margins that force every token at temperature {subject.temperature:g}, found a smallest one of "
            f"{row.min_top_gap:.2f} nats, which leaves a chance of up to {min(chance, 1.0):.2g} for another token: "
            "lower the temperature or choose another prompt",
        )


def _trace(cell: CellView, parts: dict[str, Observation]) -> Iterator[Gap]:
    """Prove what the trace is to prove. A trace that proves nothing is judged by its answers alone."""
    config = cell.config
    assert isinstance(config, Trace)
    observations = list(parts.values())
    first = observations[0]
    if "abandoned" in config.proves and not any(_generated_and_given_up(cell, o) for o in observations):
        yield Gap(first, "expected a request to be given up after tokens were generated for it, found none")
    if "preempted" in config.proves and not _grown(observations, "preemptions"):
        yield Gap(first, "expected at least one preemption, found none: the requests did not outgrow the KV pool")
    if "cached" in config.proves and not _grown(observations, "prefix_hits"):
        yield Gap(first, "expected a hit in a prefix cache, found none")


def _generated_and_given_up(cell: CellView, o: Observation) -> bool:
    """Return whether the engine generated tokens for a request that has the engines to itself and no answer."""
    generated = o.shared_counters.get(_shared(cell, cell.answering), {}).get("generation_tokens", 0)
    return o.abandon is not None and o.final is None and o.concurrent == 1 and generated > 0


def _grown(observations: list[Observation], name: str) -> bool:
    counted = [leg.counters for o in observations for leg in o.legs]
    counted += [counters for o in observations for counters in o.shared_counters.values()]
    return any(counters.get(name, 0) for counters in counted)


class StateProof(NamedTuple):
    """How the state of a scenario is proven."""

    gaps: Callable[[CellView, dict[str, Observation]], Iterator[Gap]]
    of: Set[str] = frozenset()
    """Parts of the scenario's script without which there is nothing to say."""


PROOFS = {
    "prefix-hit": StateProof(_prefix_hit, {"donor", "subject"}),
    "chunked-prefill": StateProof(_chunked, {"subject"}),
    "concurrent": StateProof(_concurrent, {"holder"}),
    "crowd": StateProof(_crowd),
    "pressure": StateProof(_pressure, {"waiting"}),
    "refill": StateProof(_refill, {"subject"}),
    "late-pull": StateProof(_late_pull, {"subject"}),
    "recovery": StateProof(_recovery, {"subject", "again"}),
    "second-prefill": StateProof(_second_prefill),
    "appended-token": StateProof(_appended_token, {"donor", "subject"}),
    "shared-block": StateProof(_shared_block, {"donor", "again", "bridge", "subject"}),
    "continuation": StateProof(_continuation, {"donor", "subject"}),
    "same-step": StateProof(_same_step, {"donor", "subject"}),
    "sampled": StateProof(_sampled, {"subject"}),
    "features": StateProof(_features),
    "trace": StateProof(_trace),
}
"""By the kind of the scenario."""
