"""Simulated nights of a planned run: what every engine would have answered, judged by the project's own ``judge``.

Nothing here pretends to be an engine. A night is right unless a ``Defect`` says otherwise: greedy outputs that part
only where rounding may part them, acceptance that follows the output, hand-offs that move what they must.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.baselines.lookup import Lookup
from harness.baselines.model import Again, BaselineRow
from harness.history.acceptance import counts_of_steps
from harness.history.folder import History
from harness.history.records import COLD, RESCORE, Observation
from harness.history.token_ids import common_prefix, output_key
from harness.judging.checks.settings import OPTIONS
from harness.profiles.cells import Cell, CellName
from harness.prompts.model import Prompt
from harness.scenarios.base import SHORT, Send
from harness.workload.cells import CellWork
from harness.workload.prepare import Prepared
from tests.support.builders import counted, engines_of, history, leg, lookup_of, speculation, with_run

OUTPUTS = 256
TIE_NATS = 0.1
GARBAGE_NATS = 15.0
_ROUNDINGS = 64
_CONDITIONAL = (0.73, 0.71, 0.68, 0.66, 0.64, 0.62, 0.60)

Tokens = tuple[int, ...]


class Noise(NamedTuple):
    """How equal runs of right engines differ."""

    parting: float = 0.05
    """Share of outputs of single engines that take the other token at a near tie."""
    pd_parting: float = 0.05
    """The same for P/D, which may round otherwise."""
    nats: float = 0.03
    """Standard deviation of a token's log-prob; twice that for P/D."""
    redrawn: float = 0.5
    """Share of requests whose acceptance is not that of the baseline, from some token on."""


class Defect(NamedTuple):
    """What is wrong with the answers of P/D, or of any cells in one scenario."""

    share: float = 0.0
    """Chance of each request to be damaged."""
    moved: float = 0.0
    """By how many nats the log-probs of damaged answers are moved (normal), which say the right tokens; 0: garbage."""
    nats: float = 0.0
    """By how much the tokens of every answer are less likely, although they are right."""
    cells: str = "pd-"
    """Cells that have the defect: those whose id starts with this."""
    scenario: str = COLD
    """The state in which they have it."""
    drafts: float = 0.0
    """Share of the verify steps of such answers that lose all their drafts."""


NOISE = Noise()
RIGHT = Defect()


class _Text(NamedTuple):
    """What right engines may answer to one prompt."""

    usual: Tokens
    other: Tokens
    """The output if the other token is taken at the near tie."""
    tie: int


class Simulated(NamedTuple):
    """A night and what it is judged against."""

    night: History
    baselines: Mapping[str, Lookup]


class Nights:
    """Nights of one plan. What does not change from night to night is made once."""

    def __init__(self, prepared: Prepared, noise: Noise = NOISE, **judging: object) -> None:
        self._noise = noise
        self._works = [w for w in prepared.works if w.items]
        self._prepared = prepared
        self._judging = prepared.profile.judging.model_copy(update=judging)
        self._texts: dict[str, _Text] = {}
        rng = np.random.default_rng(0)
        for prompts in prepared.sets.values():
            for p in prompts.prompts:
                self._texts.setdefault(p.id, _text(rng))
        self._templates = {
            w.cell.id: [*(_template(w, i.prompt, i.form, prepared) for i in w.items), *_played(w, prepared)]
            for w in self._works
        }

    def night(self, seed: int, *defects: Defect) -> Simulated:
        """Return one night with its baselines, which are recorded anew: their luck belongs to the error rates."""
        rng = np.random.default_rng(seed)
        baselines, recorded = {}, {}
        for work in self._works:
            if work.cell.topology == "single":
                lineup = work.cell.name.lineup
                baselines[lineup], recorded[lineup] = self._baseline(work, rng)
        observations: list[Observation] = []
        wrong: set[Tokens] = set()
        for work in self._works:
            steps = recorded.get(work.cell.name.lineup, {})
            observations += _with_shared(self._answers(work, rng, defects or (RIGHT,), steps, wrong))
        observations += _scores(observations, wrong, self._noise.nats)
        cells = [w.cell.id for w in self._works]
        engines = tuple(
            e.model_copy(update={"step_tokens": _step(self._prepared), "argv": self._argv(w.cell, e.role)})
            for w in self._works
            for e in engines_of(w.cell.id)
        )
        made = history(observations, cells, engines=engines)
        return Simulated(self._as_planned(made), baselines)

    def _argv(self, cell: Cell, role: str) -> tuple[str, ...]:
        """Return the command line of an engine as far as judging reads it."""
        part = self._prepared.profile.part(cell.variant).model_dump(mode="json")
        method = next(m for m in part["methods"] if m["kind"] == cell.method.kind)
        speculation = {"num_speculative_tokens": cell.method.draft_tokens, "model": method.get("drafter")}
        asked = {option: part["engine"][name] for option, name in OPTIONS.items()}
        return (
            *(word for option, value in asked.items() if value is not None for word in (option, str(value))),
            *(["--speculative-config", json.dumps(speculation)] if cell.method.draft_tokens else []),
            *(["--kv-transfer-config", "{}"] if role in ("prefill", "decode") else []),
        )

    def _as_planned(self, made: History) -> History:
        records = []
        for work, record in zip(self._works, made.run.cells, strict=True):
            method, part = work.cell.method, self._prepared.profile.part(work.cell.variant)
            records.append(
                record.model_copy(
                    update={
                        "block_size": part.engine.block_size,
                        "lookahead": method.lookahead,
                        "draft_tokens": method.draft_tokens,
                        "planned": len(work.items),
                        "scenarios": work.planned,
                    }
                )
            )
        scenarios = {s.id: s.model_dump(mode="json") for part in self._prepared.parts for s in part.scenarios}
        profile = {**made.run.profile, "judging": self._judging.model_dump(mode="json")}
        profile["scenarios"] = list(scenarios.values())
        update = {"cells": tuple(records), "profile": profile, "rescore": self._prepared.rescores}
        return with_run(made, **update)

    def _tokens(self, prompt_ids: Sequence[str], parting: float, rng: np.random.Generator) -> list[Tokens]:
        other = rng.random(len(prompt_ids)) < parting
        texts = [self._texts[p] for p in prompt_ids]
        return [t.other if o else t.usual for t, o in zip(texts, other, strict=True)]

    def _baseline(self, work: CellWork, rng: np.random.Generator) -> tuple[Lookup, dict[str, Tokens]]:
        k = work.cell.method.draft_tokens
        ids = [i.prompt.id for i in work.items if i.form == "ids"]
        one, two = (self._tokens(ids, self._noise.parting, rng) for _ in range(2))
        steps = _steps(len(ids), k, rng)
        repeated = _redrawn(steps, self._noise.redrawn, k, rng)
        rows = []
        for prompt_id, ours, again, first, second in zip(ids, one, two, steps, repeated, strict=True):
            counted = counts_of_steps(second, None, k)
            text = self._texts[prompt_id]
            parted = common_prefix(ours, again) if ours != again else None
            rows.append(
                BaselineRow(
                    prompt_id=prompt_id,
                    prompt_sha256="s",
                    output_ids=ours,
                    min_top_gap=TIE_NATS,
                    accepted=first,
                    close=((text.tie, TIE_NATS),),
                    again=Again(
                        divergence=parted,
                        gap=None if parted is None else TIE_NATS,
                        steps=counted.steps,
                        accepted_at=counted.accepted_at,
                    ),
                )
            )
        return lookup_of(work.cell.method.kind, rows), dict(zip(ids, steps, strict=True))

    def _answers(
        self,
        work: CellWork,
        rng: np.random.Generator,
        defects: Sequence[Defect],
        recorded: Mapping[str, Tokens],
        wrong: set[Tokens],
    ) -> list[Observation]:
        k, pd = work.cell.method.draft_tokens, work.cell.topology == "pd"
        templates = self._templates[work.cell.id]
        ids = [t.prompt_id for t in templates]
        said = self._tokens(ids, self._noise.pd_parting if pd else self._noise.parting, rng)
        mine = [d for d in defects if work.cell.id.startswith(d.cells)]
        likely = _logprobs(self._noise.nats * (1 + pd), sum(d.nats for d in mine))
        # From a stream of its own: everything else stays as it was drawn before log-probs were judged.
        drawn = rng.spawn(1)[0].integers(0, len(likely), len(ids))
        rounded, possible = [likely[i] for i in drawn], [_possible(values) for values in likely]
        subtle = max((d.moved for d in mine), default=0.0)
        wrong_by = rng.spawn(1)[0].normal(0, subtle, (len(ids), OUTPUTS)) if subtle else None
        known = [recorded.get(p, ()) for p in ids]
        steps = _redrawn(known, self._noise.redrawn, k, rng)
        struck = {d: np.array([t.scenario == d.scenario for t in templates]) for d in mine}
        chances = rng.random(len(ids))
        damaged = np.any([chances < d.share * hit for d, hit in struck.items()] or [chances < 0], axis=0)
        fate = rng.spawn(1)[0].random((len(ids), OUTPUTS))
        lost = np.any([fate < d.drafts * hit[:, None] for d, hit in struck.items()] or [fate < 0], axis=0)
        out = []
        for number, template in enumerate(templates):
            tokens = said[number]
            if template.max_tokens == SHORT:
                out.append(_short(template, tokens, rounded[number], k))
                continue
            if damaged[number] and wrong_by is None:
                tokens = tuple(int(t) for t in rng.integers(50_000, 90_000, OUTPUTS))
                wrong.add(tokens)
            likely_now = possible[drawn[number]]
            if damaged[number] and wrong_by is not None:
                likely_now = _possible(np.add(rounded[number], wrong_by[number]))
            final = template.legs[-1].model_copy(update={"output_ids": tokens, "chosen_logprobs": likely_now})
            if k:
                taken = steps[number]
                if lost[number].any():
                    taken = _ended((*(0 if gone else a for a, gone in zip(taken, lost[number], strict=False)), *taken))
                padded = (0, *taken) if pd else taken
                final = final.model_copy(update={"speculation": speculation(padded, k)})
            # P's own token comes from its own KV, so that it is right whatever became of D's.
            before = [leg.model_copy(update={"output_ids": said[number][:1]}) for leg in template.legs[:-1]]
            out.append(template.model_copy(update={"legs": (*before, final)}))
        return out


def _possible(likely: npt.ArrayLike) -> tuple[float, ...]:
    """Return log-probs beside which the second-best token, 9 nats away, has room."""
    return tuple(np.minimum(np.asarray(likely), -2e-4).tolist())


def _short(template: Observation, tokens: Tokens, likely: Sequence[float], k: int) -> Observation:
    """Return the answer to a request that only fills a cache."""
    said = {"output_ids": tokens[:SHORT], "chosen_logprobs": _possible(likely[:SHORT])}
    final = template.legs[-1].model_copy(update=said)
    if k and final.role != "prefill":
        final = final.model_copy(update={"speculation": speculation((0,), k)})
    return template.model_copy(update={"legs": (*template.legs[:-1], final)})


def _step(prepared: Prepared) -> int | None:
    """Return the tokens of a step of the engines that are put into states."""
    budgets = [p.engine.max_num_batched_tokens for p in prepared.parts if p.scenarios]
    return budgets[0] if budgets else None


def _played(work: CellWork, prepared: Prepared) -> list[Observation]:
    """Return the answers in scenarios but for their tokens and steps, with the counters that prove each state."""
    out: list[Observation] = []
    for script in work.scripts:
        for number, stage in enumerate(script.stages):
            members = [_sent(work, send, prepared) for send in stage.sends]
            places = {"scenario": script.scenario, "instance": script.instance, "stage": number}
            for n, (send, o) in enumerate(zip(stage.sends, members, strict=True)):
                if send.part == "subject":
                    o = _from_cache(work, o, prepared, script.scenario.endswith("on-p"))
                timing = {"asked_at": 1.0 + n / 1000, "held_until": 2.0} if len(members) > 1 else {}
                rest = {"part": send.part, "route": send.route, "concurrent": len(members)}
                out.append(o.model_copy(update={**places, **rest, **timing, "sequence": len(work.items) + len(out)}))
    return out


def _sent(work: CellWork, send: Send, prepared: Prepared) -> Observation:
    o = _template(work, send.prompt, "ids", prepared)
    if send.max_tokens != SHORT:
        return o
    nothing = (0,) * SHORT
    role = "prefill" if send.route == "prefill" else "single"
    alone = leg(role, o.sent_ids, nothing, finish_reason="length")
    return o.model_copy(update={"legs": (alone,), "max_tokens": SHORT})


def _from_cache(work: CellWork, o: Observation, prepared: Prepared, on_p: bool) -> Observation:
    """Return the answer to a request whose prompt the engine, P if ``on_p``, has computed before."""
    size = prepared.profile.part(work.cell.variant).engine.block_size
    drops = work.cell.method.draft_tokens > 0 and work.cell.method.traits.drops_block
    hit = ((len(o.sent_ids) - 1) // size - drops) * size
    at = 0 if on_p else -1
    counters = {**o.legs[at].counters, "prefix_hits": float(hit)}
    if "nixl_bytes" in counters:
        whole = -(-len(o.sent_ids) // size)
        counters["nixl_bytes"] *= (whole - hit / size) / whole
        counters["prompt_tokens_external_kv_transfer"] = float(len(o.sent_ids) - hit)
    legs = list(o.legs)
    legs[at] = legs[at].model_copy(update={"counters": counters})
    return o.model_copy(update={"legs": tuple(legs)})


def _with_shared(observations: Sequence[Observation]) -> list[Observation]:
    """Return them with what the engines count of requests that are under way together, which take few steps and preempt
    one of them."""
    stages: defaultdict[tuple[str, int, int], list[Observation]] = defaultdict(list)
    for o in observations:
        if o.concurrent > 1:
            stages[o.scenario, o.instance, o.stage].append(counted(o))
    shared: dict[tuple[str, int, int], dict[str, dict[str, float]]] = {}
    for place, members in stages.items():
        shared[place] = {}
        for role in members[0].engine_roles:
            added = Counter[str]()
            for o in members:
                added.update(own.counters if (own := o.leg(role)) is not None else {})
            shared[place][role] = {**added, "engine_steps": 20.0, "preemptions": float(role != "prefill")}
    out = []
    for o in observations:
        if o.concurrent > 1:
            legs = tuple(one.model_copy(update={"counters": {}}) for one in o.legs)
            o = o.model_copy(update={"legs": legs, "shared_counters": shared[o.scenario, o.instance, o.stage]})
        out.append(o)
    return out


def _text(rng: np.random.Generator) -> _Text:
    usual, other = (tuple(rng.integers(1_000, 50_000, OUTPUTS).tolist()) for _ in range(2))
    tie = int(rng.integers(1, OUTPUTS))
    return _Text(usual, (*usual[:tie], usual[tie] + 1, *other[tie + 1 :]), tie)


@lru_cache
def _logprobs(sd: float, less: float, seed: int = 1) -> list[tuple[float, ...]]:
    """Return ways in which rounding moves the log-probs of an output; most of its tokens are nearly certain."""
    usual = -np.random.default_rng(1).exponential(0.3, OUTPUTS)
    rng = np.random.default_rng((seed, 1))
    moved = np.minimum(usual - less + rng.normal(0, sd, (_ROUNDINGS, OUTPUTS)), 0.0)
    return [tuple(row.tolist()) for row in moved]


def _steps(requests: int, k: int, rng: np.random.Generator) -> list[Tokens]:
    """Draw the accepted drafts of each step until every request has its tokens."""
    if not k:
        return [()] * requests
    drawn = (rng.random((requests, OUTPUTS, 1)) < np.cumprod(_CONDITIONAL[:k])).sum(axis=2)
    return [_ended(tuple(row.tolist())) for row in drawn]


def _ended(accepted: Tokens) -> Tokens:
    """Return as many steps as make the tokens after the first, which the prefill gives."""
    left, out = OUTPUTS - 1, []
    for a in accepted:
        if left <= 0:
            break
        out.append(min(a, left - 1))
        left -= out[-1] + 1
    return tuple(out)


def _redrawn(steps: Sequence[Tokens], share: float, k: int, rng: np.random.Generator) -> list[Tokens]:
    """Return the steps of another run, equal to these up to where a request parts, if it does."""
    if not k:
        return list(steps)
    fresh = _steps(len(steps), k, rng)
    at = np.where(rng.random(len(steps)) < share, rng.random(len(steps)), 1.0)
    return [
        _ended((*old[: int(a * len(old))], *new)) if a < 1 else old
        for old, new, a in zip(steps, fresh, at, strict=True)
    ]


def _template(work: CellWork, prompt: Prompt, form: str, prepared: Prepared) -> Observation:
    """Return the answer to one request but for its tokens and steps."""
    part = prepared.profile.part(work.cell.variant)
    sent, nothing = prompt.ids, (0,) * OUTPUTS
    final = {"finish_reason": "length"}
    if work.cell.topology == "single":
        legs = (leg("single", sent, nothing, **final),)
    else:
        size = part.engine.block_size
        blocks = -(-len(sent) // size)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_num_tokens": len(sent),
        }
        counters = {
            "finished_requests": 1.0,
            "nixl_bytes": (6144.0 + 192.0 * (work.cell.method.kind in ("eagle3", "dflash"))) * size * blocks,
            "nixl_descriptors": 3.0 * blocks,
            "prompt_tokens_external_kv_transfer": float(len(sent)),
        }
        legs = (
            (first := leg("prefill", sent, (0,), kv_transfer_params=params, **final)),
            leg("decode", sent, nothing, counters=counters, request_id=first.request_id, **final),
        )
    return Observation(
        cell=work.cell.id,
        prompt_id=prompt.id,
        form="text" if form == "text" else "ids",
        max_tokens=OUTPUTS,
        sequence=0,
        sent_ids=sent,
        source=prompt.source,
        engine_roles=("single",) if work.cell.topology == "single" else ("prefill", "decode"),
        legs=legs,
        started_at=0.0,
    )


_KEYS: dict[Tokens, str] = {}


def _scores(observations: Sequence[Observation], wrong: set[Tokens], sd: float) -> list[Observation]:
    """Return how the plain engine of each variant scores every distinct output, rounded by ``sd`` nats."""
    seen: defaultdict[str, dict[tuple[str, Tokens], Observation]] = defaultdict(dict)
    for o in observations:
        if o.final is None:
            continue
        assert o.final.output_ids is not None
        seen[CellName.of(o.cell).reference].setdefault((o.prompt_id, o.final.output_ids), o)
    out: list[Observation] = []
    likely = [_logprobs(sd, less, seed=2) for less in (0.0, GARBAGE_NATS)]
    answered = leg("single", (0,), (0,))
    for cell, outputs in seen.items():
        for (prompt_id, tokens), o in outputs.items():
            if tokens not in _KEYS and tokens not in wrong:
                _KEYS[tokens] = output_key(tokens)
            read = (*o.sent_ids, *tokens)
            gaps = (GARBAGE_NATS if tokens in wrong else 0.0,) * len(tokens)
            update = {
                "rescored": gaps,
                "rescored_logprobs": likely[tokens in wrong][len(out) % _ROUNDINGS][: len(tokens)],
                "echoed_ids": read,
                "usage_prompt_tokens": len(read),
            }
            answer = answered.model_copy(update=update)
            scored = o.model_copy(
                update={
                    "sent_ids": read,
                    "cell": cell,
                    "prompt_id": prompt_id,
                    "form": "ids",
                    "scenario": RESCORE,
                    "instance": 0,
                    "part": _KEYS.get(tokens) or output_key(tokens),
                    "legs": (answer,),
                    "engine_roles": ("single",),
                }
            )
            out.append(scored)
    return out
