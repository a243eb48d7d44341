"""Damage each part of what D is handed, and each input of its drafter, and see whether a check fails:
python -m benchmarks.blind_spots [-p PROFILE] [--places N] [--inputs [--first]] [METHOD …]

Real engines of the profile ``cpu``, or of another one with CPU engines, a pair for each method; about two minutes each.
The table is Markdown; its figures are of the way of damaging that was seen in the fewest prompts. Exit code 1 if some
damage is seen in none.

With ``--places``, so many random places are damaged instead: keys or values of one token in one head of one layer, or
of its recurrent state one head, or the convolution. The table says how many the KV witness sees and names, and how many
every other check together. Exit code 1 if the witness misses one. With ``--inputs``, only what a drafter is given is
damaged, with ``--first`` in the first step after a hand-off alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.kv_damage import FILE
from harness.baselines.lookup import Lookup
from harness.engines.environment import EngineEnvironment, engines_for
from harness.engines.mutation import Mutation
from harness.engines.session import EngineGroupSession
from harness.history.folder import History
from harness.history.layout import witness_files
from harness.history.records import COLD, Form
from harness.history.verdict import Verdict
from harness.judging.checks import drafts
from harness.judging.checks.kv import COMPUTED, HANDED_OVER, KEPT
from harness.judging.checks.registry import judge
from harness.judging.figures import KVDifference
from harness.judging.findings import Finding
from harness.judging.known_defects import apply_known
from harness.judging.references import baselines_for
from harness.profiles.cells import Cell, EngineGroup, Plan, Role
from harness.profiles.known_defects import load_known
from harness.profiles.kv_layout import modules_in
from harness.profiles.methods import Method
from harness.runner.record_cells import record_cells
from harness.runner.recorder import Recorder
from harness.util.paths import REPOSITORY
from harness.util.progress import Reporter
from harness.workload.cells import CellWork, Choice, cell_work, cold_prompts
from harness.workload.prepare import Prepared, prepare

_PLUGIN = "[vllm.general_plugins]\nkv_harness_damage = benchmarks.kv_damage:register\n"
_PROMPTS = 4
"""Prompts that are handed over with damaged KV. What the drafter is given is damaged for every cold prompt."""
_BLOCKS = 3
"""Fewest blocks of a prompt, so that first, middle and last are three."""
_INPUTS = {
    # Of vLLM's ``SpecDecodeBaseProposer.propose``, by name. Damaged on the single engine, which prefills by itself.
    "target_hidden_states": ("zero", "row before"),
    "target_token_ids": ("another",),
    "next_token_ids": ("another",),
    # One more for all: rotary embeddings see no difference, but drafts after the first are written a slot too late.
    "target_positions": ("zero", "one more"),
    "own KV": ("zero",),
}
_MODULE_INPUTS = {
    # Of a step of each of several modules of multi-token prediction.
    "hidden states": ("zero", "row before"),
    "token ids": ("another",),
    "positions": ("zero", "one more"),
    "own KV": ("zero",),
}
_WAYS = ("zero", "bit", "token before")
"""What is done to a token's KV in one head: zeros, the lowest bit of one number, or the token before's."""
_STATES = ("convolution", "state")
_EVERY, _FIRST = "every step", "the first step after a hand-off"
_BY_WITNESS = {HANDED_OVER, COMPUTED, KEPT, drafts.NAME}
"""Checks that see no word of an answer."""
_NOT_READ = {("dflash", "target_token_ids")}
"""Inputs that a proposer is given and does not use: DFlash knows the text from the target's hidden states alone."""
_NOT_READ_FIRST = {"target_token_ids"}
"""The same in the first step after a hand-off: the next token stands in place of the only one that D computes."""


class Damage(Mutation):
    """Loads the plugin into D and tells it what to damage."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "damage.json"
        plugin = folder / "plugin" / "kv_harness_damage-0.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-harness-damage\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text(_PLUGIN)
        self._plugin = plugin.parent
        self.set({})

    def environment(self, role: Role, engine_prefix: str) -> dict[str, str]:
        if role != "decode":
            return {}
        paths = (str(self._plugin), str(REPOSITORY), os.environ.get("PYTHONPATH", ""))
        return {FILE: str(self._file), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def set(self, wanted: dict[str, str]) -> None:
        """Choose the damage, none if empty."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(wanted))
        new.replace(self._file)
        Path(f"{self._file}.done").write_text("")

    @property
    def done(self) -> int:
        """How often something was damaged since the last choice."""
        return len(Path(f"{self._file}.done").read_text().splitlines())

    @property
    def layers(self) -> list[tuple[str, str]]:
        """Layers with a KV cache, and whose they are."""
        lines = Path(f"{self._file}.layers").read_text().splitlines()
        return [(name, owner) for name, owner in map(str.split, lines)]


class Seen(NamedTuple):
    """What one damage led to."""

    what: str
    how: str
    where: str
    applied: int
    prompts: int
    """Prompts with a finding."""
    asked: int
    checks: tuple[str, ...]
    by_words: int = 0
    """Prompts with a finding of a check that sees answers alone."""
    named: bool = False
    """Whether the KV witness names exactly what was damaged."""

    @property
    def witnessed(self) -> bool:
        return HANDED_OVER in self.checks


def _random_places(
    layers: Sequence[tuple[str, str]], heads: Mapping[str, Sequence[int]], tokens: int, number: int, seed: int
) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """Yield damage to one token in one head of one layer, each way as often, or to one head of its recurrent state.
    ``heads`` are those of each layer: of a recurrent one, of its convolution (one) and of its state."""
    chosen = random.Random(seed)
    for at in range(number):
        (name, owner), part, how = chosen.choice(layers), chosen.choice("KV"), _WAYS[at % len(_WAYS)]
        if owner.endswith("-state"):
            # No other token has a state that could stand there.
            part, how = chosen.choice(_STATES), how if how in ("zero", "bit") else "zero"
            head = chosen.randrange(heads[name][_STATES.index(part)])
            wanted = {"layer": name, "part": part, "state": "", "head": str(head), "how": how}
            yield f"{owner}, {part}", how, f"{name}, head {head}", wanted
            continue
        # Before the first token of a prompt there is none to take the KV from.
        token, head = chosen.randrange(how == "token before", tokens), chosen.randrange(heads[name][0])
        wanted = {"layer": name, "part": part, "token": str(token), "head": str(head), "how": how}
        yield f"{owner}, {part}", how, f"{name}, token {token}, head {head}", wanted


def _variants(
    method: Method, modules: int, layers: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    for number, (name, owner) in enumerate(layers):
        if owner.endswith("-state"):
            # Of a prompt P hands over one block of state.
            for part in ("convolution", "state"):
                what = f"layer {number} ({owner.removesuffix('-state')}), {part}"
                yield what, "zero", "the block", {"layer": name, "part": part, "block": "last", "how": "zero"}
            continue
        for part in "KV":
            for how in ("zero", "flip", "block before"):
                for block in ("first", "middle", "last"):
                    what = f"layer {number} ({owner}), {part}"
                    yield what, how, block, {"layer": name, "part": part, "block": block, "how": how}
    if modules > 1:
        for module in range(modules):
            for name, ways in _MODULE_INPUTS.items():
                for how in ways:
                    what = f"module {module + 1}, {name}"
                    yield what, how, _EVERY, {"input": name, "how": how, "module": str(module)}
    elif any(owner == "drafter" for _, owner in layers):
        for name, ways in _INPUTS.items():
            for how in () if (method.kind, name) in _NOT_READ else ways:
                yield name, how, _EVERY, {"input": name, "how": how}
                if name not in _NOT_READ_FIRST:
                    yield name, how, _FIRST, {"input": name, "how": how, "first": ""}


def _works(prepared: Prepared, cells: Sequence[Cell], most: int | None) -> list[CellWork]:
    size, profile = prepared.profile.engine.block_size, prepared.profile
    # Those whose right answer is known, and of the others those that baselines have.
    sent = {p.id for p in cold_prompts(prepared.prompts.cold, profile.workload)}
    cold = [p for p in prepared.prompts.cold if p.expected is not None or p.id in sent]
    long = sorted((p for p in cold if p.tokens > (_BLOCKS - 1) * size), key=lambda p: p.tokens)
    count = max(2, min(_PROMPTS, most or _PROMPTS))
    few = [long[i * (len(long) - 1) // (count - 1)].id for i in range(count)]
    forms: tuple[Form, ...] = ("ids",)
    chosen = {"pd": frozenset(few), "single": frozenset((*few, *[p.id for p in cold][:most]))}
    # The profile itself may thin them out.
    profile = profile.model_copy(update={"workload": profile.workload.model_copy(update={"per_stratum": None})})
    return [
        cell_work(
            profile,
            prepared.prompts,
            cell,
            Choice(scenarios=frozenset({COLD}), prompts=chosen[cell.topology], forms=forms),
        )
        for cell in cells
    ]


class AskedFor(NamedTuple):
    """What to damage, as the command line says it."""

    prompts: int | None
    """Most prompts for each damage."""
    places: int | None
    """So many random places, at one prompt, instead of each kind of damage."""
    seed: int
    inputs: bool
    """Whether KV is left as it is, and only what a drafter is given is damaged."""
    first: bool
    """Whether all steps but the first after a hand-off are left as they are."""


def try_method(
    prepared: Prepared, method: Method, environment: EngineEnvironment, folder: Path, asked: AskedFor
) -> list[Seen]:
    """Start a pair, ask the prompts without damage, then with each damage."""
    cells = (Cell("pd", method, "client"), Cell("single", method, "client"))
    group = EngineGroup("pd", method, cells)
    damage = Damage(folder)
    works = _works(prepared, cells, asked.prompts)
    with Reporter(60.0) as reporter:
        recorder = Recorder(
            prepared.profile,
            prepared.source,
            works,
            {c.id: group.id for c in cells},
            prepared.sets,
            environment,
            folder / "control",
            "control",
        )
        session = EngineGroupSession(
            group, prepared.profile, environment, folder / "control" / "logs", progress=reporter.line, mutation=damage
        )
        with session:
            record_cells(session, works, recorder, reporter)
            control = recorder.finish()
            baselines = baselines_for(control)
            judged = apply_known(judge(control, baselines), load_known(prepared.profile.known_defects), control)
            if judged.verdict not in (Verdict.PASS, Verdict.KNOWN):
                raise SystemExit(f"expected the pair to pass without damage, found {judged.verdict}: {judged.cells}")
            # What is known is found without damage, too.
            before = frozenset((f.id, f.message) for f in judged.findings)
            if asked.places is None:
                variants = _variants(method, modules_in(prepared.profile, method), damage.layers)
                # A single engine prefills by itself, so that nothing arrives there.
                return [
                    _try(session, works[v[-2] == _EVERY], control, baselines, before, damage, *v)
                    for v in variants
                    if ("input" in v[-1] or not asked.inputs) and (v[-2] == _FIRST or not asked.first)
                ]
            one = replace(works[0], items=works[0].items[-1:])
            tokens = one.items[0].prompt.tokens
            heads = _heads(folder / "control")
            random_places = _random_places(damage.layers, heads, tokens, asked.places, asked.seed)
            return [_try(session, one, control, baselines, before, damage, *v) for v in random_places]


def _heads(run: Path) -> dict[str, list[int]]:
    """Return the numbers of heads of each layer that the engines have noted, by kind of recurrent state."""
    found: dict[str, list[int]] = {}
    for path in witness_files(run):
        header = json.loads(path.open(encoding="utf-8").readline())
        found |= {name: [heads] for group in header["groups"] for name, _, heads in group["layers"]}
        found |= {name: parts for group in header["states"] for name, _, parts in group["layers"]}
    return found


def _names(found: Sequence[Finding], wanted: dict[str, str]) -> bool:
    """Return whether the witness names the layer, keys or values, head and token that were damaged, and no others; of a
    recurrent state, the layer, kind and head."""
    told = [f.evidence for f in found if isinstance(f.evidence, KVDifference) and f.check == HANDED_OVER]
    if "state" in wanted:
        heads = (int(wanted["head"]),) if wanted["part"] == "state" else ()
        expected = [(wanted["layer"], wanted["part"], heads)]
        return bool(told) and all(
            [(s.layer, s.kind, s.heads) for s in e.states] == expected and not e.places for e in told
        )
    kind = {"K": "keys", "V": "values"}.get(wanted.get("part", ""))
    return (
        "token" in wanted
        and bool(told)
        and all(
            e.tokens == (int(wanted["token"]),)
            and [(p.layer, p.kind, p.heads) for p in e.places] == [(wanted["layer"], kind, (int(wanted["head"]),))]
            for e in told
        )
    )


def _try(
    session: EngineGroupSession,
    work: CellWork,
    control: History,
    baselines: Mapping[str, Lookup],
    before: frozenset[tuple[str, str]],
    damage: Damage,
    what: str,
    how: str,
    where: str,
    wanted: dict[str, str],
) -> Seen:
    damage.set(wanted)
    fresh = [session.observe(work.cell, item.prompt, "ids", i) for i, item in enumerate(work.items)]
    applied = damage.done
    damage.set({})
    # An engine notes how a request has ended in its next step.
    session.observe(work.cell, work.items[0].prompt, "ids", len(work.items))
    others = tuple(o for o in control.observations if o.cell != work.cell.id)
    history = History(folder=control.folder, run=control.run, observations=(*fresh, *others), own=True)
    findings = [
        f for f in judge(history, baselines).findings if f.cell == work.cell.id and (f.id, f.message) not in before
    ]
    asked_for = {o.prompt_id for o in fresh}
    # What was not asked here is missing, which says nothing of the damage.
    findings = [f for f in findings if f.prompt_id in asked_for and f.verdict is not Verdict.UNKNOWN]
    checks = tuple(dict.fromkeys(f.check for f in findings))
    seen = len({f.prompt_id for f in findings})
    by_words = len({f.prompt_id for f in findings if f.check not in _BY_WITNESS})
    return Seen(what, how, where, applied, seen, len(fresh), checks, by_words, _names(findings, wanted))


def _table_of_places(found: Mapping[str, Sequence[Seen]]) -> Iterator[str]:
    yield "| drafter | damaged | places | seen by `kv-handed-over` | named exactly | seen by any check of words |"
    yield "|---|---|---|---|---|---|"
    for method, seens in found.items():
        for how in _WAYS:
            here = [s for s in seens if s.how == how]
            by_words = sum(bool(s.by_words) for s in here)
            counts = (len(here), sum(s.witnessed for s in here), sum(s.named for s in here), by_words)
            yield f"| {method} | {how} | {' | '.join(map(str, counts))} |"


def _table(found: Mapping[str, Sequence[Seen]]) -> Iterator[str]:
    """A row for each thing damaged and a column for each method: the fewest prompts, over all ways, with a finding, and
    with one of a check that sees answers alone."""
    yield f"| damaged | where | {' | '.join(found)} |"
    yield f"|---|---|{'---|' * len(found)}"
    for what, where in dict.fromkeys((s.what, s.where) for seens in found.values() for s in seens):
        cells = []
        for seens in found.values():
            here = [s for s in seens if (s.what, s.where) == (what, where)]
            least = min(here, key=lambda s: s.prompts, default=None)
            by_words = min((s.by_words for s in here), default=0)
            cells.append(f"{least.prompts} of {least.asked}, by words {by_words}" if least else "")
        yield f"| {what} | {where} | {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--profile", default="cpu")
    parser.add_argument("-n", "--prompts", type=int, help="most prompts for each damage")
    parser.add_argument("--places", type=int, help="damage so many random places instead")
    parser.add_argument("--inputs", action="store_true", help="damage only what a drafter is given")
    parser.add_argument("--first", action="store_true", help="and that in the first step after a hand-off alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("methods", nargs="*")
    given = parser.parse_args(argv)
    asked = AskedFor(given.prompts, given.places, given.seed, given.inputs, given.first)
    methods = given.methods
    prepared = prepare(given.profile, [], [COLD]).witnessing("kv")
    found: dict[str, list[Seen]] = {}
    for method in prepared.profile.methods:
        if methods and method.kind not in methods:
            continue
        environment = engines_for(prepared.profile, Plan((), (EngineGroup("pd", method, ()),)), None)
        with tempfile.TemporaryDirectory() as folder:
            found[method.kind] = try_method(prepared, method, environment, Path(folder), asked)
    if given.places is not None:
        print(*_table_of_places(found), sep="\n")
        missed = [(kind, s) for kind, seens in found.items() for s in seens if not s.witnessed]
        for kind, s in missed:
            print(f"not seen: {kind}, {s.where}, {s.what}: {s.how}, done {s.applied} times")
        return 1 if missed else 0
    print(*_table(found), sep="\n")
    tried = [(kind, seen) for kind, seens in found.items() for seen in seens]
    holes = [(kind, seen) for kind, seen in tried if not seen.prompts]
    for kind, seen in holes:
        print(f"not seen: {kind}, {seen.what}, {seen.where}: {seen.how}, done {seen.applied} times")
    print(f"{len(tried)} kinds of damage, {len(holes)} not seen")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
