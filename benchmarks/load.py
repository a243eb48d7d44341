"""Measure peak memory and time of judging, reporting and merging a large recorded run:

    python -m benchmarks.load [CELLS [PROMPTS [FOLDER]]]

Writes a synthetic run of CELLS cells, each with PROMPTS cold prompts and four prompts in a scenario: variants of four
cells (single and P/D, with and without EAGLE3), with identities, a baseline for each lineup, and every output re-scored
by the plain engine of its variant. In one variant of fifty every tenth answer of P/D is wrong; in another one the plain
engine died, so that the variant has no reference. The run is written whole and in two halves. Judging, reporting and
merging run in separate processes, and their results are checked. The files stay in FOLDER.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.memory import peak_together_mib
from harness.baselines.model import BaselineRow
from harness.baselines.store import load_header, write_baseline
from harness.commands.merge import MergeOptions, merge
from harness.history import layout
from harness.history.folder import load_history, write_run
from harness.history.layout import LINES, SCORES, bytes_recorded
from harness.history.plan import plan_key
from harness.history.records import RESCORE, Observation, PlannedRequest, RunRecord
from harness.history.token_ids import output_key
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.findings import Judgement, how_many
from harness.judging.references import References, lookups_for
from harness.judging.shares import processes_for
from harness.profiles.cells import CellName
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.reports.judge_run import write_reports
from harness.reports.summary import summarise_run
from harness.util.files import write_json
from harness.util.paths import REPOSITORY
from tests.support.builders import (
    change_final,
    counted,
    engine,
    history,
    identity,
    leg,
    observation,
    planned_request,
    provenance,
    rows,
)

CELLS = ("pd-eagle3", "single-eagle3", "pd-none", "single-none")
METHODS = ("none", "eagle3")
LENGTHS = range(40, 139)
"""The answer to a prompt of 139 tokens ends with a step of its own that accepts nothing, as if drafts stopped there."""
SCENARIO = "chunked"
LONG = (210, 222, 223, 224)
BUDGET = 192
"""Tokens of an engine step: fewer than the prompts of the scenario have."""
_MIB = 1 << 20


def is_damaged(variant: int) -> bool:
    """Return whether every tenth P/D answer of the variant is wrong."""
    return variant % 50 == 0


def is_lost(variant: int) -> bool:
    """Return whether the variant's plain engine died."""
    return variant % 50 == 25


def _wrong(o: Observation) -> Observation:
    assert o.final is not None and o.final.output_ids is not None
    return change_final(o, output_ids=(9, *o.final.output_ids[1:]))


def _in_scenario(cell: str, tokens: int) -> Observation:
    """Return the observation of a prompt that was prefilled in chunks."""
    o = observation(cell, tokens, scenario=SCENARIO, part="subject", prompt_id=f"long-{tokens}")
    first = o.legs[0]
    counters = {**first.counters, "prompt_tokens_local_compute": float(tokens)}
    return counted(o.model_copy(update={"legs": (first.model_copy(update={"counters": counters}), *o.legs[1:])}))


def _scored(o: Observation) -> Observation:
    """Return a re-scoring in which the plain engine would not have begun the output with 9."""
    assert o.final is not None and o.final.output_ids is not None
    output = o.final.output_ids
    gaps = (5.0 if output[0] == 9 else 0.0, *(0.0 for _ in output[1:]))
    read = (*o.sent_ids, *output)
    scores = leg("single", read, (1,), rescored=gaps)
    changes = {"cell": "single-none", "scenario": RESCORE, "part": output_key(output), "sent_ids": read}
    return o.model_copy(update={**changes, "engine_roles": ("single",), "legs": (scores,)})


def _text(o: Observation) -> str:
    return json.dumps(o.model_dump(mode="json"))


def _profile(variants: int) -> dict[str, Any]:
    """Return a profile whose matrix is that of the run."""
    raw = load_profile("cpu").model_dump(mode="json")
    raw |= {
        "methods": [m for m in raw["methods"] if m["kind"] in METHODS],
        "routes": ["client"],
        "exclude": [],
        "witness": "off",
        "scenarios": [{"id": SCENARIO, "kind": "chunked-prefill", "prompts": [f"long-{n}" for n in LONG]}],
        "axes": {"setting": {f"v{n:04d}": {"engine": {"env": _env(n)}} for n in range(variants)}},
    }
    # Rows of the history are made by hand, so the prompts are on no machine.
    raw["workload"] |= {"rescore": True, "text_prompts": 0}
    return {**Profile.model_validate(raw).model_dump(mode="json"), "source": "cpu"}


def _env(variant: int) -> dict[str, str]:
    return {"KMP_BLOCKTIME": str(variant)}


def records(cells: int) -> RunRecord:
    """Return the record of a run with ``cells`` cells, as variants of ``CELLS``."""
    base = history([observation(c) for c in CELLS]).run
    variants = -(-cells // len(CELLS))
    made = []
    engines = []
    for v in range(variants):
        for record in base.cells:
            name = f"{record.cell}+v{v:04d}"
            lost = is_lost(v) and record.cell == "single-none"
            ended = {"state": "failed", "reason": "the engine died"} if lost else {}
            made.append(record.model_copy(update={"cell": name, "group": name, **ended}))
            roles = ("single",) if name.startswith("single") else ("prefill", "decode")
            engines += [engine(name, role, step_tokens=BUDGET) for role in roles]
    kept = tuple(made[:cells])
    groups = {c.group for c in kept}
    return base.model_copy(
        update={
            "cells": kept,
            "engines": tuple(e for e in engines if e.group in groups),
            "profile": _profile(variants),
            "rescore": True,
            "hardware": {**base.hardware, "platform": "Linux x86_64"},
            "identities": {
                f"{m}+v{v:04d}": identity(m, env=_env(v)).model_dump(mode="json")
                for v in range(variants)
                for m in METHODS
            },
        }
    )


_EXCHANGES = count()
"""Each exchange has an id of its own, over all runs that are written."""
_REQUEST = re.compile(r'"request_id": "[^"]*"')


def lines(run: RunRecord, prompts: int) -> Iterator[tuple[Path, str]]:
    """Yield observations as JSON lines, with their files below the cells' folder, file by file."""
    pairs = {cell: [(o, _wrong(o)) for o in (counted(observation(cell, n)) for n in LENGTHS)] for cell in CELLS}
    answers = {cell: [tuple(map(_text, pair)) for pair in made] for cell, made in pairs.items()}
    scores = [tuple(_text(_scored(o)) for o in pair) for pair in pairs["pd-none"]]
    long = {cell: [_text(_in_scenario(cell, n)) for n in LONG] for cell in CELLS}

    def put(text: str, name: str, record: str, i: int, renamed: bool = True) -> str:
        text = (
            _REQUEST.sub(f'"request_id": "x{next(_EXCHANGES)}"', text)
            .replace(f'"cell": "{name}"', f'"cell": "{record}"', 1)
            .replace('"sequence": 0', f'"sequence": {i}', 1)
        )
        return (
            text.replace(f'"prompt_id": "{_prompt(i)[0]}"', f'"prompt_id": "{_prompt(i)[1]}"', 1) if renamed else text
        )

    for record in run.cells:
        if record.state != "complete":
            continue
        name, _, variant = record.cell.partition("+")
        v = int(variant[1:])
        for i in range(prompts):
            wrong = is_damaged(v) and name.startswith("pd") and i % 10 == 0
            text = answers[name][i % len(LENGTHS)][wrong]
            yield Path(record.cell, LINES), put(text, name, record.cell, i)
        for i, text in enumerate(long[name]):
            yield Path(record.cell, LINES), put(text, name, record.cell, prompts + i, renamed=False)
        if name == "single-none":
            for i in range(prompts):
                for wrong in (False, True)[: 2 if is_damaged(v) and i % 10 == 0 else 1]:
                    yield Path(record.cell, SCORES), put(scores[i % len(LENGTHS)][wrong], name, record.cell, i)


def _prompt(i: int) -> tuple[str, str]:
    """Return the name of a prompt in the templates and in the run."""
    plain = f"p{LENGTHS[i % len(LENGTHS)]}"
    return plain, f"{plain}-{i:05d}"


def _plan(cell: str, prompts: int) -> tuple[PlannedRequest, ...]:
    """Return the requests that ``lines`` has for a cell."""
    cold = [planned_request(observation(cell, n)) for n in LENGTHS]
    rows = [
        cold[i % len(LENGTHS)].model_copy(update={"prompt_id": _prompt(i)[1], "sequence": i}) for i in range(prompts)
    ]
    long = [planned_request(_in_scenario(cell, n)) for n in LONG]
    return (*rows, *(row.model_copy(update={"sequence": prompts + i}) for i, row in enumerate(long)))


def write(folder: Path, run: RunRecord, prompts: int) -> None:
    """Write a run folder, line by line as it is generated."""
    folder.mkdir(parents=True)
    plans = {cell: _plan(cell, prompts) for cell in CELLS}
    asked = {"planned": prompts, "scenarios": {SCENARIO: len(LONG)}}
    lineups = {CellName.of(c.cell).lineup for c in run.cells}
    run = run.model_copy(
        update={
            "run_id": folder.name,
            "cells": tuple(
                c.model_copy(update={**asked, "plan": plan_key(plans[c.cell.partition("+")[0]])}) for c in run.cells
            ),
            "plans": {plan_key(rows): rows for rows in plans.values()},
            "identities": {k: v for k, v in run.identities.items() if k in lineups},
        }
    )
    for path, found in groupby(lines(run, prompts), key=itemgetter(0)):
        (folder / layout.CELLS / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / layout.CELLS / path).open("w", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for _, line in found)
    write_run(folder, run)


def write_baselines(folder: Path, run: RunRecord, prompts: int) -> None:
    """Write a baseline for each lineup, with a row for each prompt."""
    for method in METHODS:
        by_length = {n: rows([n], method)[0] for n in (*LENGTHS, *LONG)}
        made = [_row(by_length[LENGTHS[i % len(LENGTHS)]], _prompt(i)[1]) for i in range(prompts)]
        made += [_row(by_length[n], f"long-{n}") for n in LONG]
        first = folder / f"{method}-0000.json"
        write_baseline(first, identity(method, env=_env(0)), provenance(), made)
        header = load_header(first)
        for v in range(1, len(run.profile["axes"]["setting"])):
            path = folder / f"{method}-{v:04d}.json"
            shutil.copyfile(first.with_suffix(".csv"), path.with_suffix(".csv"))
            own = header.model_copy(update={"identity": identity(method, env=_env(v))})
            write_json(path, own.model_dump(mode="json"))


def _row(row: BaselineRow, prompt: str) -> BaselineRow:
    return row.model_copy(update={"prompt_id": prompt})


# --- stages ----------------------------------------------------------------------------------------------------------


def expected(cell: str) -> Verdict:
    """Return the verdict that a cell must get."""
    name, _, variant = cell.partition("+")
    v = int(variant[1:])
    if is_damaged(v) and name.startswith("pd"):
        return Verdict.REGRESSION
    return Verdict.UNKNOWN if is_lost(v) else Verdict.PASS


def require(judgement: Judgement, cells: Iterable[str]) -> None:
    wrong = {c: str(v) for c, v in judgement.by_cell().items() if v is not expected(c)}
    if wrong or set(judgement.by_cell()) != set(cells):
        raise SystemExit(f"expected other verdicts of {len(wrong)} cells: {dict(list(wrong.items())[:6])}")


def stage_judge(folder: Path) -> str:
    whole = load_history(folder / "whole", unread=True)
    known = lookups_for(whole, References(baselines=folder / "baselines"))
    judgement = judge(whole, known, processes=processes_for(whole))
    write_json(folder / "judged.json", judgement.model_dump(mode="json"))
    require(judgement, (c.cell for c in whole.run.cells))
    listed = len(judgement.findings)
    return f"{len(whole.observations)} observations; {how_many(judgement.findings)} findings, {listed} listed"


def stage_report(folder: Path) -> str:
    whole = load_history(folder / "whole")
    judgement = Judgement.model_validate_json((folder / "judged.json").read_bytes())
    known = lookups_for(whole, References(baselines=folder / "baselines"))
    write_reports(summarise_run(whole, judgement, known), whole.folder)
    names = ("judgement.json", "report.html", "junit.xml", "summary.md")
    return ", ".join(f"{n} {(whole.folder / n).stat().st_size / _MIB:.1f} MiB" for n in names)


def stage_merge(folder: Path) -> str:
    halves = [folder / "first", folder / "second"]
    merged = merge(halves, folder / "merged", MergeOptions(keep_going=True))
    whole = json.loads((folder / "whole" / "run.json").read_text(encoding="utf-8"))
    if {c.cell for c in merged.run.cells} != {c["cell"] for c in whole["cells"]}:
        raise SystemExit("expected the cells of the whole run in the merged one")
    return f"{len(merged.observations)} observations"


STAGES: dict[str, Callable[[Path], str]] = {"judge": stage_judge, "report": stage_report, "merge": stage_merge}


def run_stage(name: str, folder: Path) -> None:
    """Run one stage in this process, and say what it took, that of processes that it started included."""
    begun = time.monotonic()
    said = STAGES[name](folder)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(u.ru_utime + u.ru_stime for u in used)
    print(f"{cpu:.0f} s | {time.monotonic() - begun:.0f} s | {said}")


def measure_stage(name: str, folder: Path) -> None:
    """Run one stage in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load", "--within", name, str(folder.resolve())]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        peak = peak_together_mib(process)
        assert process.stdout is not None
        said = process.stdout.read().decode().strip()
    if process.returncode:
        raise SystemExit(f"{name}: expected its figures, found exit code {process.returncode}")
    print(f"| {name} | {peak:.0f} MiB | {said} |", flush=True)


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] in (["--stage"], ["--within"]):
        (measure_stage if arguments[0] == "--stage" else run_stage)(arguments[1], Path(arguments[2]))
        return
    cells, prompts = (int(a) for a in (*arguments[:2], *("1000", "1000")[len(arguments[:2]) :]))
    folder = Path(arguments[2] if len(arguments) > 2 else tempfile.mkdtemp(prefix="harness-load-"))
    run = records(cells)
    half = len(run.cells) // 2 // len(CELLS) * len(CELLS)
    write(folder / "whole", run, prompts)
    for name, part in (("first", run.cells[:half]), ("second", run.cells[half:])):
        groups = {c.group for c in part}
        engines = tuple(e for e in run.engines if e.group in groups)
        write(folder / name, run.model_copy(update={"cells": part, "engines": engines}), prompts)
    write_baselines(folder / "baselines", run, prompts)
    size = bytes_recorded(folder / "whole")
    print(f"{len(run.cells)} cells × {prompts} prompts, {size / _MIB:.0f} MiB of lines, in {folder}\n")
    print("| stage | peak | CPU | time | |\n|---|---:|---:|---:|---|", flush=True)
    for name in STAGES:
        measure_stage(name, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
