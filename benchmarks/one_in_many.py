"""Judge nights of many requests of which one is damaged: python -m benchmarks.one_in_many [-p PROFILE] [--requests N]
[--victims N] [--starts N] [--at-once N] [--noise NATS] [--tokens N]

Real engines, as in ``benchmarks.noisy_nights``: a pair and the single engine, without speculation, with noise on every
logit of each. The pair answers N prompts once, several at once, over so many starts of the engines. Then some of these
prompts are asked again, with KV that is damaged as it arrives at D, in ``all`` layers, in one ``layer``, or in one
``block`` of one; and once more as they are. Each of these answers makes a night: all other requests are those that were
asked first. Prints a Markdown row for each kind of damage: in how many nights the damaged request was named, and right
ones were.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.noisy_nights import NoisyDamage, of_normal_tier
from harness.engines.environment import EngineEnvironment, engines_for
from harness.engines.session import EngineGroupSession
from harness.history.folder import History, load_history
from harness.history.records import COLD, RESCORE, Form, Observation
from harness.history.token_ids import output_key
from harness.history.verdict import Verdict
from harness.judging.checks.registry import GATES, judge
from harness.profiles.cells import Cell, EngineGroup, Plan
from harness.profiles.model import Profile
from harness.runner.perform import perform
from harness.runner.record_cells import emptied_pools
from harness.runner.recorder import Recorder
from harness.runner.rescore import scores
from harness.util.progress import Reporter
from harness.workload.cells import CellWork, Choice, cell_work
from harness.workload.outputs import Outputs
from harness.workload.prepare import Prepared, prepare

PD, SINGLE = "pd-none", "single-none"
KINDS = ("right", "all", "layer", "block")
WORDS = {
    "right": "nothing, asked again",
    "all": "all layers",
    "layer": "one layer",
    "block": "one block of one layer",
}


class NightsOfKind(NamedTuple):
    """What came of the nights with one kind of damage."""

    kind: str
    nights: int
    named: int
    """In which the damaged request was named."""
    others: int
    """In which another one was."""
    moved: tuple[float, ...]
    """By how many nats the tokens of each damaged answer moved on average."""

    def row(self) -> str:
        shown = f"{statistics.median(self.moved):.3f} ({min(self.moved):.3f} to {max(self.moved):.3f})"
        return f"| {WORDS[self.kind]} | {self.nights} | {self.named} | {self.others} | {shown} |"


_IDS: tuple[Form, ...] = ("ids",)


def for_many(profile: Profile, at_once: int) -> Profile:
    """Return the profile with room for so many requests at once."""
    engine = profile.engine.model_copy(update={"max_num_seqs": at_once, "kv_blocks": 16 * at_once})
    workload = profile.workload.model_copy(update={"at_once": at_once, "order_seed": 1})
    return profile.model_copy(update={"engine": engine, "workload": workload})


def parts_of(work: CellWork, starts: int) -> list[CellWork]:
    """Return the requests of each start of the engines."""
    size = -(-len(work.items) // starts)
    return [replace(work, items=work.items[at : at + size]) for at in range(0, len(work.items), size)]


def asked(session: EngineGroupSession, work: CellWork, first: int) -> Iterator[Observation]:
    """Ask a part of a cell's requests that follows ``first`` others."""
    for o in perform(session, work):
        if o.error is not None:
            raise SystemExit(f"{o.cell}, {o.prompt_id}: {o.error}")
        # A stage is a crowd: no two parts have one in common.
        yield o.model_copy(update={"sequence": o.sequence + first, "stage": o.stage + first})


def scored(session: EngineGroupSession, answers: Sequence[Observation]) -> list[Observation]:
    outputs = Outputs(normal=True)
    for o in answers:
        outputs.add(o)
    return list(scores(outputs, session))


class NoisyEngines(NamedTuple):
    """How engines are started."""

    profile: Profile
    group: EngineGroup
    environment: EngineEnvironment
    folder: Path
    damage: NoisyDamage

    def session(self, reporter: Reporter) -> EngineGroupSession:
        return EngineGroupSession(
            self.group, self.profile, self.environment, self.folder / "logs", reporter.line, mutation=self.damage
        )


def right(
    engines: NoisyEngines, prepared: Prepared, single: CellWork, pd: CellWork, starts: int, reporter: Reporter
) -> History:
    """Ask every request as it is, and return the record."""
    recorder = Recorder(
        engines.profile, prepared.source, (single, pd), {w.cell.id: engines.group.id for w in (single, pd)},
        prepared.sets, engines.environment, engines.folder / "right", "right", rescore=True,
    )  # fmt: skip
    sent = {single.cell.id: 0, pd.cell.id: 0}
    for of_single, of_pd in zip(parts_of(single, starts), parts_of(pd, starts), strict=True):
        with engines.session(reporter) as session:
            if not any(sent.values()):
                # The others are started alike; a record has each engine once.
                recorder.engines(session.records())
            answers = []
            for work in (of_single, of_pd):
                found = list(asked(session, work, sent[work.cell.id]))
                sent[work.cell.id] += len(found)
                answers += found
                reporter.line(f"{work.cell.id}: {sent[work.cell.id]} answers")
            for o in (*answers, *scored(session, answers)):
                recorder.append(o)
            reporter.line("scored")
            for cell in sent:
                recorder.set_cell(cell, state="complete", emptied_s=emptied_pools(session, recorder))
    return recorder.finish()


def damaged(engines: NoisyEngines, work: CellWork, reporter: Reporter) -> dict[str, list[Observation]]:
    """Return, for each kind, the answers to the requests with that damage and what the single engine says of them."""
    found: dict[str, list[Observation]] = {}
    with engines.session(reporter) as session:
        for kind in KINDS:
            everyone = ",".join(map(str, range(len(work.items))))
            engines.damage.set({} if kind == "right" else {"zeroed": kind, "arrivals": everyone})
            answers = list(asked(session, work, 0))
            done = engines.damage.done
            if done != (0 if kind == "right" else len(work.items)):
                raise SystemExit(f"{kind}: expected {len(work.items)} requests to be damaged, found {done}")
            engines.damage.set({})
            found[kind] = [*answers, *scored(session, answers)]
            reporter.line(f"{kind}: {len(answers)} answers")
    return found


def judged(night: History, kind: str, found: Sequence[Observation]) -> NightsOfKind:
    """Judge a night for each of the answers: the night's, with this answer in place of its own to the prompt."""
    read = {(o.prompt_id, o.part): o for o in found if o.scenario == RESCORE}
    usual = {o.prompt_id: o for o in night.observations if o.cell == PD}
    named = others = 0
    moved = []
    answers = [o for o in found if o.scenario != RESCORE]
    for o in answers:
        mine = o.model_copy(update={name: getattr(usual[o.prompt_id], name) for name in ("sequence", "stage")})
        score = read[o.prompt_id, output_key(o.output)]
        kept = tuple(x for x in night.observations if x is not usual[o.prompt_id])
        judgement = judge(night.model_copy(update={"observations": (*kept, mine, score)}), {})
        wrong = {f.prompt_id for f in judgement.findings if f.check in GATES and f.verdict is not Verdict.UNKNOWN}
        named += o.prompt_id in wrong
        others += bool(wrong - {o.prompt_id})
        said, theirs = o.final, score.final
        assert said is not None and theirs is not None
        pairs = zip(said.chosen_logprobs or (), theirs.rescored_logprobs or (), strict=True)
        moved.append(statistics.fmean(abs(a - b) for a, b in pairs))
    return NightsOfKind(kind, len(answers), named, others, tuple(moved))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--profile", default="smollm2-quick")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--controls", type=int, default=100, help="requests of the single engine")
    parser.add_argument("--victims", type=int, default=20)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.06)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--keep", type=Path, help="keep what was recorded in this folder, and use what is there")
    given = parser.parse_args(argv)
    prepared = prepare(given.profile, ["*-none"], [COLD])
    profile = for_many(of_normal_tier(prepared.profile, given.tokens), given.at_once)
    profile = profile.model_copy(update={"witness": "off"})
    plain = next(m for m in profile.methods if m.kind == "none")
    cells = (Cell("single", plain, "client"), Cell("pd", plain, "client"))
    group = EngineGroup("pd", plain, cells)
    by_length = sorted(prepared.prompts.cold, key=lambda p: (p.tokens, p.id))
    if len(by_length) < given.requests:
        raise SystemExit(f"expected {given.requests} cold prompts, found {len(by_length)}: build a larger set")

    def work(cell: Cell, count: int) -> CellWork:
        spread = frozenset(by_length[i * len(by_length) // count].id for i in range(count))
        choice = Choice(scenarios=frozenset({COLD}), prompts=spread, forms=_IDS)
        return cell_work(profile, prepared.prompts, cell, choice)

    single, pd = (work(c, n) for c, n in zip(cells, (given.controls, given.requests), strict=True))
    victims = replace(pd, items=pd.items[:: len(pd.items) // given.victims][: given.victims])
    with tempfile.TemporaryDirectory() as temporary, Reporter(60.0) as reporter:
        folder = given.keep or Path(temporary)
        environment = engines_for(profile, Plan((), (EngineGroup("pd", plain, ()),)), None)
        engines = NoisyEngines(profile, group, environment, folder, NoisyDamage(folder, given.noise))
        there = (folder / "right" / "run.json").exists()
        night = (
            load_history(folder / "right") if there else right(engines, prepared, single, pd, given.starts, reporter)
        )
        whole = judge(night, {})
        for r in (r for c in whole.cells for r in c.results if r.check in GATES):
            print(f"{r.cell}, {r.check}: {r.verdict}, {r.judged} judged; {r.note}", file=sys.stderr, flush=True)
        print(f"| damaged: 1 of {given.requests} | nights | named | right ones named | moved, nats |")
        print("|---|---|---|---|---|", flush=True)
        for kind, found in damaged(engines, victims, reporter).items():
            if given.keep:
                lines = (o.model_dump_json() for o in found)
                (folder / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(judged(night, kind, found).row(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
