"""Checks of the engines' counters: those that other checks read are there, and they agree with the answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from harness.history.acceptance import counts_of_steps
from harness.history.engine_interfaces import BY_SOURCE, STEP_TOKENS
from harness.history.records import COLD, Leg, Observation
from harness.judging.evidence import CellView
from harness.judging.figures import Counted
from harness.judging.findings import CheckResult, Finding, conclude
from harness.scenarios.proving import steps_up_to

NAME = "counters-offered"
_EVERY = ("finished_requests", "preemptions", "prefix_hits", "prompt_tokens_local_compute")
READ = {
    "single": _EVERY,
    "prefill": ("finished_requests", "nixl_expired", "prefix_hits"),
    "decode": (
        *_EVERY,
        "inference_seconds",
        "nixl_bytes",
        "nixl_descriptors",
        "nixl_failed_notifications",
        "nixl_failed_transfers",
        "nixl_transfers",
        "prompt_tokens_external_kv_transfer",
        "queue_seconds",
    ),
}
"""Counters of which a check takes the absence for 0, by the role of the engine in the cell."""
_STEPS_BEHIND_TEXT = 8
"""Most steps that an engine takes behind a stop string before it is told; three were seen on two busy cores."""


def counters_offered(cell: CellView) -> CheckResult:
    """Check that every counter that another check reads was there when the engine was ready."""
    findings = [finding for role in cell.roles for finding in _lacking(cell, role)]
    return conclude(NAME, cell.id, len(cell.roles), findings)


def _lacking(cell: CellView, role: str) -> Iterator[Finding]:
    engine = cell.engine(role)
    offered = engine.counters if engine is not None else None
    read = [name for name in READ[role] if _by_source(cell) or not name.startswith("prompt_tokens_")]
    if not cell.by_nixl:
        # That nothing counts what moved is said by the check of transfers.
        read = [name for name in read if not name.startswith("nixl_")]
    lacking = [name for name in read if name not in (offered or ())]
    if not lacking:
        return
    found = "the record does not say what it counts" if offered is None else "no such metric"
    yield cell.untested(
        NAME,
        f"expected the {role} engine to count {', '.join(lacking)}, which checks read, found {found}: what nobody "
        "counts looks like 0; this vLLM may have renamed it, see harness.engines.counters",
    )


# --- counters and answers --------------------------------------------------------------------------------------------

AGREE = "counters-agree"


class _Counted(NamedTuple):
    """Growth of an engine's counters, and the answers that it gave meanwhile."""

    observation: Observation
    role: str
    grown: Mapping[str, float]
    answers: tuple[tuple[Observation, Leg], ...]
    """With D's leg for P's answer to a request that a router handed off, which only the router saw."""
    behind_text: bool = False
    """Whether the request before was ended by a stop string."""

    @property
    def looked_up_again(self) -> int:
        """Prompt tokens of requests whose transfer failed: D asks its caches for them once more."""
        return sum([len(o.sent_ids) for o, _ in self.answers if o.route == "former-p"])

    @property
    def not_looked_up(self) -> int:
        """Prompt tokens for which an engine asks no cache."""
        return sum([len(o.sent_ids) for o, _ in self.answers if not o.looked_up])


def counters_agree(cell: CellView) -> CheckResult:
    """Check that each engine counted what it answered: requests, tokens by source, drafts, transfers.

    It shows requests of somebody else on the engines, answers that are not those of this request, and counters that
    were lost on the way into the record. Engines count what they pulled for a broken request with the next one, which
    is therefore left out.
    """
    settled = list(_settled(cell))
    stages = _stages(settled)
    findings = [
        cell.untested(AGREE, f"expected the {c.role} engine to count {words}", c.observation, Counted(counters=c.grown))
        for c in _counted(cell, settled, stages)
        for words in _disagreements(cell, c)
    ]
    findings += [
        cell.untested(AGREE, f"expected counters of the {role} engine for this request, found none", o)
        for o in settled
        for role in _uncounted(o)
    ]
    findings += [
        cell.untested(AGREE, "expected one growth of counters for requests sent together, found several", members[0])
        for members in stages
        if any(o.shared_counters != members[0].shared_counters for o in members)
    ]
    return conclude(AGREE, cell.id, len(settled), findings)


def requests_of_others(cell: CellView, roles: Collection[str]) -> int:
    """Return how many requests engines of these roles finished during the cell's that are not the cell's."""
    settled = list(_settled(cell))
    more = (
        c.grown.get("finished_requests", 0) - len(c.answers)
        for c in _counted(cell, settled, _stages(settled))
        if c.role in roles
    )
    return round(sum(n for n in more if n > 0))


def agree_applies(cell: CellView) -> bool:
    """Return whether counters can be told apart by request: a soak counts whole rounds, and a trace may have
    only requests that were given up, and the next ones."""
    config = cell.config
    if config is not None and config.may_answer_nothing:
        return any(True for _ in _settled(cell))
    return cell.history.run.kind != "soak"


def _settled(cell: CellView) -> Iterator[Observation]:
    """Yield the answers whose counters are not mixed with those of a request that broke or was given up, before them or
    at the same time."""
    ordered, scenario = cell.history.in_order(cell.id), cell.scenario
    cut_short = [o for o in ordered if o.cut_short]
    if not cut_short:
        yield from (o for o in ordered if o.attempts == 1 and o.scenario == scenario)
        return
    broken = {_stage(o) for o in cut_short}
    # Where it is known how far a request came that was given up, nothing of it is counted later.
    unclear = {_stage(o) for o in cut_short if o.error is not None or (o.abandon is not None and o.abandon.after_s)}
    last, after = None, False
    for o in ordered:
        if (stage := _stage(o)) != last:
            last, after = stage, last in unclear
        if not after and last not in broken and o.attempts == 1 and o.scenario == scenario:
            yield o


def _stage(o: Observation) -> tuple[str, int, int, int]:
    """Return what the requests have in common that share their counters."""
    return (o.scenario, o.instance, o.stage, o.sequence if o.scenario == COLD and o.concurrent == 1 else -1)


def _stages(settled: Collection[Observation]) -> list[list[Observation]]:
    """Return the requests that share counters, together; nothing where none does."""
    stages: dict[tuple[str, int, int, int], list[Observation]] = {}
    for o in settled if any(o.shared_counters for o in settled) else ():
        stages.setdefault(_stage(o), []).append(o)
    return list(stages.values())


def _counted(
    cell: CellView, settled: Iterable[Observation], stages: Iterable[Sequence[Observation]]
) -> Iterator[_Counted]:
    behind = _behind_text(cell)
    for o in settled:
        for leg in o.legs:
            if leg.counters:
                behind_text = bool(behind) and _stage(o) in behind
                yield _Counted(o, o.process_of(leg), leg.counters, ((o, leg),), behind_text)
    for members in stages:
        first = members[0]
        for role, grown in first.shared_counters.items():
            answers = tuple(_answered(members, role, cell.routed))
            yield _Counted(first, role, grown, answers, _stage(first) in behind)


def _behind_text(cell: CellView) -> set[tuple[str, int, int, int]]:
    """Return the stages that follow an answer which a stop string ended. The API server finds it, and the engine is
    told some steps later; it counts the drafts of these with the next request's."""
    rows = cell.history.of_cell(cell.id)
    return rows.once(("behind text",), lambda: _stages_behind_text(rows.ordered))


def _stages_behind_text(ordered: Sequence[Observation]) -> set[tuple[str, int, int, int]]:
    if not any(leg.ended_by_text for o in ordered for leg in o.legs):
        return set()
    stages: dict[tuple[str, int, int, int], bool] = {}
    for o in ordered:
        by_text = any(leg.ended_by_text for leg in o.legs)
        stages[_stage(o)] = stages.get(_stage(o), False) or by_text
    return {stage for (_, by_text), (stage, _) in pairwise(stages.items()) if by_text}


def _answered(members: Iterable[Observation], role: str, routed: bool) -> Iterator[tuple[Observation, Leg]]:
    """Yield the answers of an engine to requests that share its counters; P's of a routed one stand in D's leg."""
    for o in members:
        for leg in o.legs:
            hidden = routed and role == "prefill" and o.route == "cell"
            if (o.process_of(leg) == role and not leg.counters) or (hidden and leg.role == "decode"):
                yield o, leg


def _uncounted(o: Observation) -> list[str]:
    lacking = [o.process_of(leg) for leg in o.legs if not leg.counters]
    return sorted({*lacking} - o.shared_counters.keys()) if lacking else []


def _disagreements(cell: CellView, counted: _Counted) -> Iterator[str]:
    """Yield what the counters should be and are."""
    found = counted.grown
    looked_up_again = counted.looked_up_again
    for name, value in _expected(cell, counted, looked_up_again).items():
        if found.get(name, 0) != value:
            yield f"{value:.0f} {name} for {_of(counted)}, found {found.get(name, 0):.0f}"
    whole = found.get("prompt_tokens", 0)
    if _by_source(cell):
        yield from _sources(cell, counted, whole)
    queried = whole - found.get("prefix_hits", 0) + looked_up_again
    if "external_queries" in found and found["external_queries"] != queried:
        yield f"{queried:.0f} external_queries for {_of(counted)}, found {found['external_queries']:.0f}"
    if not counted.answers:
        return
    if STEP_TOKENS not in cell.history.run.lacking and not _possible_steps(found):
        yield f"its steps for {_of(counted)}, found numbers that cannot be"
    if "queue_seconds" not in found or "inference_seconds" not in found:
        yield f"the time of {_of(counted)} in its queue and in inference, found none"
    if not cell.speculative and (drafts := found.get("drafts")):
        yield (
            f"no drafts in a cell without speculation, found {drafts:.0f}: the engine speculates; start it without, or "
            "name the cell of its method (--cell)"
        )


def _possible_steps(found: Mapping[str, float]) -> bool:
    """Return whether there were steps, and no fewer of them up to a larger bound of tokens."""
    all_steps, up_to = found.get("engine_steps", 0), steps_up_to(found)
    if not up_to:
        return all_steps > 0
    steps = [value for _, value in sorted(up_to.items())]
    return 0 < all_steps >= steps[-1] and steps == sorted(steps)


def _by_source(cell: CellView) -> bool:
    """Return whether this version of vLLM counts prompt tokens by source."""
    return BY_SOURCE not in cell.history.run.lacking


def _sources(cell: CellView, counted: _Counted, whole: float) -> Iterator[str]:
    found = counted.grown
    expected = sum([cell.hand_off.handed_tokens(o) for o, _ in counted.answers if o.route == "former-p"])
    computed, hits, external = _TOKENS_BY_SOURCE
    by_source = found.get(computed, 0) + found.get(hits, 0) + found.get(external, 0)
    if by_source != whole:
        yield f"the {whole:.0f} prompt tokens of {_of(counted)} once, by source, found {by_source:.0f}"
    # What D expects of a transfer counts as a hit before it fails.
    for name, source, lost in (("prefix_hits", hits, 0), ("external_hits", external, expected)):
        if found.get(name, 0) != found.get(source, 0) + lost:
            by = source.removeprefix("prompt_tokens_")
            yield f"as many {name} as prompt tokens by {by} for {_of(counted)}, found other numbers"


_TOKENS_BY_SOURCE = (
    "prompt_tokens_local_compute",
    "prompt_tokens_local_cache_hit",
    "prompt_tokens_external_kv_transfer",
)


def _of(counted: _Counted) -> str:
    n = len(counted.answers)
    return "this request" if n == 1 else f"{n} requests"


def _is_transferred(cell: CellView, o: Observation, leg: Leg) -> bool:
    """Return whether NIXL moves something for an answer, as far as is known of it alone."""
    return leg.role == "decode" and o.route == "cell" and not cell.prefix_cache.has_all_cached(o, leg)


def _expected(cell: CellView, counted: _Counted, looked_up_again: int) -> dict[str, float]:
    """Return the counters that follow from the answers."""
    handed = counted.role == "prefill"
    hand_off = cell.hand_off
    asked: list[int] = []
    made = 0
    for o, leg in counted.answers:
        own = handed and o.route == "cell"
        asked.append(hand_off.handed_tokens(o) if own else len(hand_off.prompt_of(o, counted.role)))
        # Of what P answered to a router, only D's answer is on record.
        made += 1 if handed and leg.role == "decode" else len(leg.output_ids or ())
        for sibling in leg.siblings:
            # Each answer of a request that asks for several is one of its own to the engine.
            asked.append(len(o.sent_ids))
            made += len(sibling.output_ids or ())
    prompts = sum(asked)
    caches = cell.caches_prefixes(counted.role)
    expected: dict[str, float] = {
        "finished_requests": len(asked),
        "prompt_tokens": prompts,
        "prefix_queries": prompts + looked_up_again - counted.not_looked_up if caches else 0,
        "generation_tokens": made,
    }
    texts = sum([leg.ended_by_text for _, leg in counted.answers])
    if texts:
        # Tokens behind the string that came with it, of this step and of one that was under way.
        steps = 2 if len(counted.answers) == 1 else texts * _STEPS_BEHIND_TEXT
        least, more = made, steps * (cell.record.draft_tokens + 1)
        expected["generation_tokens"] = min(max(counted.grown.get("generation_tokens", 0), least), least + more)
    if handed:
        return expected
    if cell.by_nixl:
        most = [o for o, leg in counted.answers if _is_transferred(cell, o, leg) for _ in range(o.answers)]
        least, each = len(most) - cell.prefix_cache.most_all_cached(most, counted.grown), cell.hand_off.transfers_each
        expected["nixl_transfers"] = min(max(counted.grown.get("nixl_transfers", 0), least * each), len(most) * each)
    known = [leg.speculation for _, leg in counted.answers if leg.speculation is not None]
    if cell.speculative and len(known) == len(counted.answers):
        expected["drafts"] = sum([s.num_steps for s in known])
        expected["draft_tokens"] = sum([s.num_drafted for s in known])
        expected["accepted_tokens"] = sum([s.num_accepted for s in known])
        every = known[0].per_step_accepted if len(known) == 1 else [a for s in known for a in s.per_step_accepted]
        at = counts_of_steps(every, None, cell.record.draft_tokens).accepted_at
        expected |= zip(_accepted_at(len(at)), at, strict=True)
        if counted.behind_text:
            _add_steps(expected, counted.grown, cell.record.draft_tokens)
    return expected


@cache
def _accepted_at(drafts: int) -> tuple[str, ...]:
    return tuple(f"accepted_at_{at}" for at in range(drafts))


def _add_steps(expected: dict[str, float], grown: Mapping[str, float], drafts: int) -> None:
    """Add the steps that another request took behind its stop string, as far as they can be in these counters."""
    steps = min(max(grown.get("drafts", 0) - expected["drafts"], 0), _STEPS_BEHIND_TEXT)
    most = {"draft_tokens": steps * drafts, "accepted_tokens": steps * drafts}
    most |= dict.fromkeys(_accepted_at(drafts), steps)
    expected["drafts"] += steps
    for name, more in most.items():
        expected[name] = min(max(grown.get(name, 0), expected[name]), expected[name] + more)
