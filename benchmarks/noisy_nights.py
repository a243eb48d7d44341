"""Judge nights of a real model whose engines round: python -m benchmarks.noisy_nights [-p PROFILE] [--noise NATS]
[--prompts N] [--tokens N] [--witness] NIGHT …

Real engines: a pair and the single engine, without speculation, with normal noise on every logit of each, so that equal
runs differ as they do on a GPU, and the normal tier is the one that is valid. The pair answers all prompts in each
night; the single engine's answers are those of the first. A NIGHT is ``right``, or ``EVERY:WHAT``: the KV of one
request in EVERY is damaged as it arrives at D, in ``all`` its layers, ``layer`` (one of them) or ``block`` (the middle
block of one layer), always with zeros. Prints a Markdown row for each night: what was found, and in which requests.

A handful of prompts gives registered tests no power, so a night is judged by the gates of single answers alone.
``--witness`` says of how many requests the KV that D received is not P's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.blind_spots import Damage
from benchmarks.kv_damage import NOISE
from harness.engines.environment import EngineEnvironment, engines_for
from harness.engines.session import EngineGroupSession
from harness.history.folder import History
from harness.history.records import COLD, RESCORE
from harness.history.verdict import Verdict
from harness.judging.checks.kv import HANDED_OVER
from harness.judging.checks.registry import GATES, judge
from harness.judging.findings import Finding
from harness.profiles.cells import Cell, EngineGroup, Plan, Role
from harness.profiles.model import Profile
from harness.runner.record_cells import ask_cells
from harness.runner.recorder import Recorder
from harness.util.progress import Reporter
from harness.workload.cells import CellWork, Choice, cell_work
from harness.workload.prepare import Prepared, prepare


class NoisyDamage(Damage):
    """The same, with noise on the logits of every engine."""

    def __init__(self, folder: Path, nats: float) -> None:
        super().__init__(folder)
        self._nats = nats

    def environment(self, role: Role, engine_prefix: str) -> dict[str, str]:
        damaged = super().environment("decode", engine_prefix)
        own = damaged if role == "decode" else {"PYTHONPATH": damaged["PYTHONPATH"]}
        return {**own, NOISE: f"{self._nats:g}"}


class NightKind(NamedTuple):
    """What is done to the requests of a night."""

    every: int = 0
    """One request in so many is damaged; 0 for none."""
    what: str = "nothing"

    @classmethod
    def of(cls, text: str) -> NightKind:
        if text == "right":
            return cls()
        every, _, what = text.partition(":")
        if not every.isdigit() or what not in ("all", "layer", "block"):
            raise argparse.ArgumentTypeError(f"expected right or EVERY:all, EVERY:layer or EVERY:block, found {text}")
        return cls(int(every), what)

    def requests(self, count: int) -> list[int]:
        """Return which of so many requests are damaged: at least one."""
        return [] if not self.every else list(range(self.every // 2, count, self.every)) or [count // 2]

    def damage(self, count: int) -> dict[str, str]:
        """Return what the engines are told."""
        return {"zeroed": self.what, "arrivals": ",".join(map(str, self.requests(count)))} if self.every else {}


class Came(NamedTuple):
    """What a night came to."""

    kind: NightKind
    history: History
    damaged: tuple[str, ...]
    """The prompts whose KV was damaged."""
    findings: tuple[Finding, ...]
    """Of the gates for single answers, in the P/D cell or the plain one."""
    handed_over: frozenset[str]
    """The prompts whose KV at D the witness found to be another than P's."""
    notes: tuple[str, ...]
    done: int

    def row(self) -> str:
        pd, single = (
            {p: o.final for p, o in self.history.of(c).items() if o.final} for c in ("pd-none", "single-none")
        )
        parted = sum(leg.output_ids != single[p].output_ids for p, leg in pd.items() if p in single)
        named = {f.prompt_id for f in self.findings}
        kind = f"1 in {self.kind.every}, {self.kind.what}" if self.kind.every else "nothing"
        by = sorted({f"{f.prompt_id} ({f.check})" for f in self.findings})
        return (
            f"| {kind} | {len(pd)} | {parted} | {', '.join(self.damaged) or '–'} | {len(named & {*self.damaged})} | "
            f"{len(named - {*self.damaged})} | {', '.join(by) or '–'} | {len(self.handed_over & {*self.damaged})} | "
            f"{len(self.handed_over - {*self.damaged})} |"
        )


HEAD = (
    "| damaged | P/D requests | said other tokens than the single engine | damaged requests | of these "
    "named | right ones named | named | of these by the KV witness | right ones by it |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def of_normal_tier(profile: Profile, tokens: int) -> Profile:
    """Return the profile, judged in the normal tier with one stage, with answers of so many tokens."""
    judging = profile.judging.model_copy(update={"tier": "normal", "stages": 1})
    workload = profile.workload.model_copy(update={"per_stratum": None, "max_tokens": tokens, "rescore": True})
    return profile.model_copy(update={"judging": judging, "workload": workload})


def _works(prepared: Prepared, profile: Profile, cells: Sequence[Cell], prompts: int) -> list[CellWork]:
    """Return the plain engine's requests and P/D's, to prompts of all lengths."""
    by_length = sorted(prepared.prompts.cold, key=lambda p: (p.tokens, p.id))
    step = max(1, len(by_length) // prompts)
    chosen = frozenset(p.id for p in by_length[::step][:prompts])
    choice = Choice(scenarios=frozenset({COLD}), prompts=chosen, forms=("ids",))
    return [cell_work(profile, prepared.prompts, cell, choice) for cell in cells]


def nights(
    prepared: Prepared, profile: Profile, environment: EngineEnvironment, folder: Path, kinds: Iterable[NightKind],
    nats: float, prompts: int,
) -> Iterable[Came]:  # fmt: skip
    """Start the engines, and yield one night after the other."""
    plain = next(m for m in profile.methods if m.kind == "none")
    pd, single = Cell("pd", plain, "client"), Cell("single", plain, "client")
    group = EngineGroup("pd", plain, (pd, single))
    damage = NoisyDamage(folder, nats)
    works = _works(prepared, profile, (single, pd), prompts)
    first: History | None = None
    logs = folder / "logs"
    with Reporter(60.0) as reporter:
        session = EngineGroupSession(group, profile, environment, logs, progress=reporter.line, mutation=damage)
        with session:
            for number, kind in enumerate(kinds):
                name = f"night-{number}"
                recorder = Recorder(
                    profile, prepared.source, works, {w.cell.id: group.id for w in works}, prepared.sets, environment,
                    folder / name, name, rescore=True,
                )  # fmt: skip
                asked = works if first is None else works[1:]
                if first is not None:
                    for o in first.observations:
                        if o.cell == single.id and o.scenario != RESCORE:
                            recorder.append(o)
                    recorder.set_cell(single.id, **_finished(first, single.id))
                arrivals = len(works[1].items)
                damage.set(kind.damage(arrivals))
                ask_cells(session, asked, recorder, reporter)
                done = damage.done
                damage.set({})
                history = recorder.finish()
                first = first or history
                order = [o.prompt_id for o in sorted(history.of(pd.id).values(), key=lambda o: o.sequence)]
                judged = judge(history, {})
                found = [f for f in judged.findings if f.check in GATES and f.verdict is not Verdict.UNKNOWN]
                handed = frozenset(f.prompt_id for f in judged.findings if f.check == HANDED_OVER and f.prompt_id)
                notes = [r.note for c in judged.cells for r in c.results if r.check in GATES and r.note]
                damaged = tuple(order[i] for i in kind.requests(arrivals) if i < len(order))
                yield Came(kind, history, damaged, tuple(found), handed, tuple(notes), done)


def _finished(history: History, cell: str) -> dict[str, object]:
    record = history.cell(cell)
    assert record is not None
    return {"state": record.state, "emptied_s": record.emptied_s}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--profile", default="smollm2-quick")
    parser.add_argument("--noise", type=float, default=0.06)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=26)
    parser.add_argument("--witness", action="store_true", help="compare what engines' KV caches hold, too")
    parser.add_argument("--keep", type=Path, help="keep what was recorded in this folder")
    parser.add_argument("nights", nargs="+", type=NightKind.of)
    given = parser.parse_args(argv)
    prepared = prepare(given.profile, ["*-none"], [COLD])
    profile = of_normal_tier(prepared.profile, given.tokens)
    profile = profile.model_copy(update={"witness": "kv" if given.witness else "off"})
    plain = next(m for m in profile.methods if m.kind == "none")
    environment = engines_for(profile, Plan((), (EngineGroup("pd", plain, ()),)), None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        print(HEAD, flush=True)
        for came in nights(prepared, profile, environment, folder, given.nights, given.noise, given.prompts):
            print(came.row(), flush=True)
            print(f"damaged {came.done} times; {'; '.join(came.notes)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
