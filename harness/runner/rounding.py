"""Ask the plain single engine some prompts in other ways, to show how it rounds (``harness.history.rounding``).

Each prompt is asked by itself, behind a prefix hit that leaves one token to compute, and beside the others. What the
answers are compared with, the engine said in its cell, or by itself first. How it reads an answer afresh, re-scoring
shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import wait

from harness.engines.request import Ask, new_id
from harness.engines.session import EngineGroupSession
from harness.history.records import RESCORE, Leg, Observation
from harness.history.rounding import ASIDE, HELD_AGAINST, WayName
from harness.history.token_ids import output_key
from harness.prompts.model import Prompt
from harness.runner.rescore import score_of
from harness.util import clock
from harness.workload.cells import CellWork

PROMPTS = 4
"""Prompts that are asked: as many as share a step of the smallest engines in use."""
_HIT_TOKENS = 4
"""Most output tokens behind a prefix hit: the first is computed otherwise, and the others read what it left."""


def plain_work(works: Sequence[CellWork]) -> CellWork | None:
    """Return the work of the plain single engine, if it is asked cold prompts."""
    return next((w for w in works if w.cell.id == w.cell.name.reference and w.items), None)


def chosen(plain: CellWork) -> list[Prompt]:
    """Return prompts of the plain single engine, from the shortest to the longest: long ones round more."""
    asked = {p.id: p for p in (*(i.prompt for i in plain.items), *(s.prompt for k in plain.scripts for s in k.sends))}
    by_length = sorted(asked.values(), key=lambda p: (p.tokens, p.id))
    count = min(PROMPTS, len(by_length))
    return [by_length[n * (len(by_length) - 1) // max(1, count - 1)] for n in range(count)]


def largest_crowd(plain: CellWork, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts and as many other cold ones as make the largest crowd that the plain engine is asked: kernels
    that add alike beside three requests may not do so beside thirty."""
    most = max(
        len(prompts),
        *(len(together.items) for together in plain.rounds),
        *(len(stage.sends) for script in plain.played for stage in script.stages),
    )
    cold = {i.prompt.id: i.prompt for i in plain.items if i.form == "ids"}
    others = [p for p in cold.values() if p not in prompts]
    return [*prompts, *others[: most - len(prompts)]]


def rounding(
    prompts: Sequence[Prompt],
    session: EngineGroupSession,
    scored: bool,
    answered: Collection[str] = (),
    crowd: Sequence[Prompt] = (),
) -> Iterator[Observation]:
    """Ask the prompts and yield the answers, with their scores unless the run re-scores outputs anyway (``scored``).

    ``answered`` are the ids of prompts that the engine answered by themselves in its cell, which need no other answer
    to hold the next ones against. ``crowd`` are asked together, instead of the prompts. Raises EngineDiedError when the
    engine died.
    """
    size = session.profile.engine.block_size
    for prompt in prompts:
        if prompt.id not in answered:
            yield _alone(session, prompt, "again", list(prompt.ids), new_id(), part=HELD_AGAINST)
        again = _alone(session, prompt, "again", list(prompt.ids), new_id())
        yield again
        output = again.final.output_ids if again.final is not None else None
        if output and not scored:
            yield score_of(session, prompt.id, output_key(output), prompt.ids, output)
    for prompt in prompts:
        # All but one token of it fill whole blocks, which is what a prefix cache keeps.
        cut, salt = list(prompt.ids[: (prompt.tokens - 1) // size * size + 1]), new_id()
        if len(cut) > 1:
            yield _alone(session, prompt, "hit", cut, salt, part=HELD_AGAINST, max_tokens=_HIT_TOKENS)
            yield _alone(session, prompt, "hit", cut, salt, max_tokens=_HIT_TOKENS)
    if len(prompts) > 1:
        yield from _together(session, crowd or prompts)


def _alone(
    session: EngineGroupSession,
    prompt: Prompt,
    way: WayName,
    ids: list[int],
    salt: str,
    part: str = "subject",
    max_tokens: int | None = None,
) -> Observation:
    legs: list[Leg] = []
    started = clock.now()
    most = min(max_tokens or session.profile.workload.max_tokens, session.profile.workload.max_tokens)
    error = session.ask(Ask(False, ids, salt, max_tokens=most), legs)
    return _observed(session, prompt, way, ids, legs, error, started, part, most)


def _together(session: EngineGroupSession, prompts: Sequence[Prompt]) -> Iterator[Observation]:
    most = session.profile.workload.max_tokens
    started = clock.now()
    answers: list[list[Leg]] = [[] for _ in prompts]
    sent = [
        session.senders.submit(session.ask, Ask(False, list(p.ids), new_id(), max_tokens=most, counted=False), legs)
        for p, legs in zip(prompts, answers, strict=True)
    ]
    wait(sent)
    for prompt, legs, future in zip(prompts, answers, sent, strict=True):
        yield _observed(
            session, prompt, "crowd", list(prompt.ids), legs, future.result(), started, "subject", most, len(prompts)
        )


def _observed(
    session: EngineGroupSession,
    prompt: Prompt,
    way: WayName,
    ids: Sequence[int],
    legs: Sequence[Leg],
    error: str | None,
    started: float,
    part: str,
    max_tokens: int,
    concurrent: int = 1,
) -> Observation:
    return Observation(
        cell=session.group.name.reference,
        prompt_id=prompt.id,
        form="ids",
        scenario=RESCORE,
        instance=ASIDE[way],
        part=part,
        sequence=0,
        sent_ids=tuple(ids),
        engine_roles=session.roles,
        legs=tuple(legs),
        max_tokens=max_tokens,
        concurrent=concurrent,
        error=error,
        started_at=started,
    )
