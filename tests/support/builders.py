"""Hand-made histories for tests of the judges. Nothing here pretends to be an engine."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path

import yaml

from harness.baselines.lookup import Lookup
from harness.baselines.model import FORMAT, Baseline, BaselineRow, Header, Provenance
from harness.history.folder import History, write_run
from harness.history.identity import Identity
from harness.history.migrations import SCHEMA
from harness.history.plan import plan_key, prompt_sha256
from harness.history.records import (
    RESCORE,
    CellRecord,
    EngineRecord,
    Leg,
    Observation,
    PlannedRequest,
    RunRecord,
    Speculation,
)
from harness.history.token_ids import output_key
from harness.judging.checks import counters
from harness.judging.checks.registry import judge
from harness.judging.evidence import CellView, Evidence, FoundOfCells
from harness.judging.figures import ConditionalRates, PositionRates, TokenTestEvidence
from harness.judging.findings import Finding
from harness.profiles.cells import CellName
from harness.profiles.load import SHIPPED_PROFILES
from harness.profiles.model import Judging
from harness.prompts import probe_task
from harness.reports.summary import RunSummary, summarise_run
from harness.util.paths import REPOSITORY
from tests.support.run_files import write_observations

BLOCK = 32
LOOKAHEAD = {"none": 0, "eagle3": 3, "dflash": 4, "mtp": 3}
LAYERS = {"none": 3, "eagle3": 4, "dflash": 5, "mtp": 4}
"""Layers of the probe models with a KV cache, drafter's included; each has 32 KiB of a block."""
LENGTHS = [31, 32, 40, 65]
CELLS = [f"{t}-{m}" for m in ("none", "eagle3", "dflash", "mtp") for t in ("pd", "single")]


def prompt_ids(tokens: int) -> tuple[int, ...]:
    return tuple(probe_task.render(list(range(10, 10 + tokens - probe_task.PROMPT_OVERHEAD))))


def speculation(accepted: tuple[int, ...], k: int = 3) -> Speculation:
    return Speculation(
        per_step_accepted=accepted,
        per_step_drafted=(k,) * len(accepted),
        num_steps=len(accepted),
        num_drafted=k * len(accepted),
        num_accepted=sum(accepted),
    )


def steps_for(outputs: int) -> tuple[int, ...]:
    """Accepted counts, one a step where there is room, that account for ``outputs`` tokens exactly."""
    pairs, rest = divmod(max(0, outputs - 1), 2)
    return (1,) * pairs + (0,) * rest


LOGPROB = -0.7
"""Of every token: whatever the distance to the second-best one, the two are no more probable than all."""
_NUMBERS = itertools.count()
"""Of exchanges: each has an id of its own."""


@functools.lru_cache(maxsize=1024)
def text_of(ids: tuple[int, ...]) -> str:
    """A text of tokens, by no tokenizer."""
    return " ".join(f"w{i}" for i in ids)


def leg(role: str, sent: tuple[int, ...], output: tuple[int, ...], **changes: object) -> Leg:
    base: dict[str, object] = {
        "role": role,
        "request_id": f"r{next(_NUMBERS)}",
        "status": 200,
        "echoed_ids": sent,
        "output_ids": output,
        "finish_reason": "stop",
        "text": text_of(output[:-1]),
        "own_text": text_of(output[:-1]),
        "usage_prompt_tokens": len(sent),
        "usage_completion_tokens": len(output),
        "chosen_logprobs": (LOGPROB,) * len(output),
        "top_gaps": (9.0,) * len(output),
        "counters": {"finished_requests": 1.0},
        "seconds": 0.1,
    }
    return Leg.model_validate(base | changes)


def observation(cell: str, tokens: int = 40, accepted: tuple[int, ...] | None = None, **changes: object) -> Observation:
    """A flawless observation of ``cell`` for the prompt of ``tokens`` tokens; ``changes`` replace fields."""
    topology, method = cell.split("-")
    sent = prompt_ids(tokens)
    output = tuple(probe_task.expected_output(list(sent)))
    steps = steps_for(len(output)) if accepted is None else accepted
    metrics = speculation(steps) if method != "none" else None
    if topology == "single":
        legs = (leg("single", sent, output, speculation=metrics),)
    else:
        count = -(-tokens // BLOCK)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, count + 1))],
            "remote_num_tokens": tokens,
        }
        padded = speculation((0, *steps)) if metrics else None
        counters = {
            "finished_requests": 1.0,
            "nixl_bytes": LAYERS.get(CellName.of(cell).method, LAYERS["none"]) * 32768.0 * count,
            "nixl_descriptors": 3.0,
            "prompt_tokens_external_kv_transfer": float(tokens),
        }
        first = leg("prefill", sent, output[:1], finish_reason="length", kv_transfer_params=params)
        legs = (
            first,
            leg("decode", sent, output, speculation=padded, counters=counters, request_id=first.request_id),
        )
    base = Observation(
        cell=cell,
        prompt_id=f"p{tokens}",
        form="ids",
        sequence=0,
        sent_ids=sent,
        engine_roles=("single",) if topology == "single" else ("prefill", "decode"),
        legs=legs,
        started_at=0.0,
    )
    return base.model_copy(update=changes)


Ids = tuple[int, ...]


def rescoring(
    prompt_id: str, sent: Ids, output: Ids, gaps: Sequence[float] | None = None, **changes: object
) -> Observation:
    """What the plain engine says of an answer: by how many nats it dislikes each token; by default by none."""
    read = (*sent, *output)
    nothing = (0.0,) * len(output)
    scored = {
        "rescored": nothing if gaps is None else tuple(gaps),
        "rescored_logprobs": (LOGPROB,) * len(output),
    }
    made = Observation(
        cell="single-none",
        prompt_id=prompt_id,
        form="ids",
        scenario=RESCORE,
        part=output_key(output),
        sequence=0,
        sent_ids=read,
        engine_roles=("single",),
        legs=(leg("single", read, (1,), **scored),),
        started_at=0.0,
    )
    return made.model_copy(update=changes)


def change_final(o: Observation, **changes: object) -> Observation:
    """The observation with fields of its final leg replaced."""
    assert o.final is not None
    return o.model_copy(update={"legs": (*o.legs[:-1], o.final.model_copy(update=changes))})


def with_prefill(o: Observation, **changes: object) -> Observation:
    """The observation of a pair with fields of P's leg replaced."""
    return o.model_copy(update={"legs": (o.legs[0].model_copy(update=changes), *o.legs[1:])})


def counted(o: Observation) -> Observation:
    """The observation with every counter that follows from its answers, unless it says otherwise."""
    return o.model_copy(update={"legs": tuple(_counted_leg(o, leg) if leg.counters else leg for leg in o.legs)})


def _counted_leg(o: Observation, leg: Leg) -> Leg:
    told, spec = leg.counters, leg.speculation
    hits = told.get("prefix_hits", told.get("prompt_tokens_local_cache_hit", 0.0))
    external = told.get("prompt_tokens_external_kv_transfer", told.get("external_hits", 0.0))
    usual = {
        "finished_requests": 1.0,
        "prompt_tokens": float(len(o.sent_ids)),
        "prefix_queries": float(len(o.sent_ids)),
        "prefix_hits": hits,
        "external_hits": external,
        "prompt_tokens_local_cache_hit": hits,
        "prompt_tokens_external_kv_transfer": external,
        "prompt_tokens_local_compute": len(o.sent_ids) - hits - external,
        "generation_tokens": float(len(leg.output_ids or ())),
        "nixl_transfers": float(leg.role == "decode"),
        "engine_steps": 5.0,
        "queue_seconds": 0.01,
        "inference_seconds": leg.seconds,
    }
    if spec is not None and leg.role != "prefill":
        steps = Counter(spec.per_step_accepted)
        usual |= {
            "drafts": float(spec.num_steps),
            "draft_tokens": float(spec.num_drafted),
            "accepted_tokens": float(spec.num_accepted),
            **{f"accepted_at_{i}": float(sum(n for a, n in steps.items() if a > i)) for i in range(8)},
        }
    return leg.model_copy(update={"counters": {name: value for name, value in (usual | told).items() if value}})


def planned_request(o: Observation) -> PlannedRequest:
    """The row of the plan that this observation answers as it was to be."""
    return PlannedRequest(
        sequence=o.sequence,
        prompt_id=o.prompt_id,
        form=o.form,
        scenario=o.scenario,
        instance=o.instance,
        part=o.part,
        stage=o.stage,
        prompt_sha256=prompt_sha256(o.sent_ids, o.source, o.known_answer),
        route=o.route,
        max_tokens=o.max_tokens,
        temperature=o.temperature,
        concurrent=o.concurrent,
        abandon=o.abandon,
        feature=o.feature,
        mistake=o.mistake,
        legs=tuple(leg.role for leg in o.legs),
    )


def plan_of(observations: list[Observation]) -> tuple[PlannedRequest, ...]:
    """A plan of which these observations are the answers."""
    return tuple({(row := planned_request(o)).place: row for o in observations if o.scenario != RESCORE}.values())


def history(
    observations: list[Observation],
    cells: list[str] | None = None,
    folder: Path = Path("run"),
    scenarios: list[dict] | None = None,
    engines: tuple[EngineRecord, ...] = (),
    mutants: tuple[str, ...] = (),
) -> History:
    observations = [counted(o) for o in observations]
    names = cells if cells is not None else list(dict.fromkeys(o.cell for o in observations))
    by_cell = defaultdict(list)
    for o in observations:
        by_cell[o.cell].append(o)
    planned = {name: plan_of(by_cell[name]) for name in names}
    records = tuple(
        CellRecord(
            cell=name,
            group=name,
            block_size=BLOCK,
            lookahead=LOOKAHEAD.get(CellName.of(name).method, 0),
            draft_tokens=0 if CellName.of(name).method == "none" else 3,
            texts=True,
            planned=sum(o.scenario == "cold" for o in by_cell[name]),
            scenarios=dict(Counter(o.scenario for o in by_cell[name] if o.scenario not in ("cold", RESCORE))),
            plan=plan_key(planned[name]),
            state="complete",
            emptied_s=dict.fromkeys(("single", "prefill", "decode"), 0.0),
        )
        for name in names
    )
    run = RunRecord(
        schema_version=SCHEMA,
        run_id="test",
        harness_version="0",
        started="2026-01-01T00:00:00+00:00",
        finished="2026-01-01T00:01:00+00:00",
        command=("test",),
        git_commit=None,
        git_dirty=None,
        profile={"name": "test", "baselines": "baselines", "scenarios": scenarios or []},
        prompts_sha256="0",
        hardware={"processor": "x", "cores": 2, "gpus": []},
        versions={"vllm": "0", "vllm_build": "cpu"},
        identities={},
        cells=records,
        plans={plan_key(rows): rows for rows in planned.values()},
        engines=engines or tuple(e for name in names for e in engines_of(name)),
        mutants=mutants,
    )
    return History(folder=folder, run=run, observations=tuple(observations), own=True)


def with_run(the_history: History, **changes: object) -> History:
    """The history with fields of its record replaced."""
    return the_history.model_copy(update={"run": the_history.run.model_copy(update=changes)})


def with_cells(the_history: History, *names: str, **changes: object) -> History:
    """The history with fields of the records of these cells replaced, or of all."""
    cells = the_history.run.cells
    changed = (c.model_copy(update=changes) if c.cell in names or not names else c for c in cells)
    return with_run(the_history, cells=tuple(changed))


def with_profile(the_history: History, **changes: object) -> History:
    """The history with keys of its recorded profile replaced."""
    return with_run(the_history, profile={**the_history.run.profile, **changes})


def with_answers(the_history: History, observations: Iterable[Observation]) -> History:
    """The history with these observations; a copy of it would keep what it has looked up in its own."""
    fields = {name: getattr(the_history, name) for name in History.model_fields}
    return History(**{**fields, "observations": tuple(observations)})


def identity(method: str = "none", **changes: object) -> Identity:
    base: dict[str, object] = {
        "target_sha256": "t",
        "drafter_sha256": None,
        "tokenizer_sha256": "k",
        "template_sha256": "c",
        "prompts_sha256": "p",
        "method": method,
        "draft_tokens": 0 if method == "none" else 3,
        "block_size": BLOCK,
        "dtype": "float32",
        "max_tokens": 192,
        "step_tokens": None,
    }
    return Identity.model_validate(base | changes)


def provenance() -> Provenance:
    return Provenance(
        recorded="2026-01-01", run_id="r", command=("harness",), git_commit=None, versions={}, hardware={}
    )


def baseline_row(
    prompt_id: str, output_ids: tuple[int, ...], accepted: Sequence[int] = (), **changes: object
) -> BaselineRow:
    base = {"prompt_sha256": "s", "min_top_gap": 9.0, "accepted": accepted}
    return BaselineRow.model_validate({"prompt_id": prompt_id, "output_ids": output_ids, **base, **changes})


def rows(lengths: list[int], method: str = "none") -> list[BaselineRow]:
    out = []
    for tokens in lengths:
        output = tuple(probe_task.expected_output(list(prompt_ids(tokens))))
        out.append(baseline_row(f"p{tokens}", output, () if method == "none" else steps_for(len(output))))
    return out


def lookup_of(method: str, rows: Iterable[BaselineRow]) -> Lookup:
    header = Header(format=FORMAT, identity=identity(method), provenance=provenance(), summary={}, rows_sha256="")
    return Lookup(Baseline(header=header, rows=tuple(rows)), "")


def lookup(lengths: list[int], method: str = "none") -> Lookup:
    return lookup_of(method, rows(lengths, method))


def lookups(lengths: list[int]) -> dict[str, Lookup]:
    return {m: lookup(lengths, m) for m in LOOKAHEAD}


def changed_rows(the_lookup: Lookup, change: Callable[[BaselineRow], dict[str, object]]) -> Lookup:
    """The baseline with fields of its rows replaced."""
    rows = tuple(r.model_copy(update=change(r)) for r in the_lookup.baseline.rows)
    return Lookup(the_lookup.baseline.model_copy(update={"rows": rows}), "")


COUNTERS = tuple(sorted({name for names in counters.READ.values() for name in names}))


def argv_of(group: str, role: str) -> tuple[str, ...]:
    """What the profile ``cpu`` makes of a command line; that of ``history`` sets no engine's settings."""
    method = CellName.of(group.split("~")[0]).method if "-" in group else "none"
    drafter = {"model": str(REPOSITORY / "models/probe" / method), "num_speculative_tokens": 3}
    return (
        *("vllm", "--model", str(REPOSITORY / "models/probe/target"), "--dtype", "float32", "--block-size", "32"),
        *("--max-model-len", "416", "--max-num-seqs", "4", "--num-gpu-blocks-override", "28"),
        *("--max-num-batched-tokens", "192"),
        *(["--speculative-config", json.dumps(drafter)] if method != "none" else []),
        *(["--kv-transfer-config", "{}"] if role in ("prefill", "decode") else []),
    )


def engine(
    group: str, role: str, kv_blocks: int | None = 28, step_tokens: int | None = 192, names: tuple[str, ...] = COUNTERS
) -> EngineRecord:
    return EngineRecord(
        role=role,
        group=group,
        pid=sum(role.encode()),
        argv=argv_of(group, role),
        env={},
        log="x.log",
        ready_seconds=1.0,
        model_runner="V1",
        attention_backend=None,
        kv_blocks=kv_blocks,
        step_tokens=step_tokens,
        counters=names,
    )


def engines_of(cell: str) -> tuple[EngineRecord, ...]:
    """Engines of a cell that say nothing of themselves but what they count, and that their pool is the profile's."""
    roles = ("prefill", "decode") if CellName.of(cell).topology == "pd" else ("single",)
    return tuple(engine(cell, role, step_tokens=None) for role in roles)


def view(
    the_history: History, cell: str, baselines: dict[str, Lookup] | None = None, scenario: str = "cold"
) -> CellView:
    record = the_history.cell(cell)
    assert record is not None
    return Evidence(the_history, baselines or {}, Judging(), FoundOfCells()).view(record, scenario)


def finding(cell: str = "pd-eagle3", prompt_id: str | None = "p32", **changes: object) -> Finding:
    """A wrong token after a hand-off."""
    base = {"check": "tokens-baseline", "verdict": "REGRESSION", "damage": "target-kv", "message": "expected x"}
    return Finding.model_validate({"cell": cell, "prompt_id": prompt_id, **base, **changes})


def known_entry(**changes: object) -> dict[str, object]:
    """An entry of a list of known defects, as it is read."""
    base: dict[str, object] = {
        "id": "wrong-tokens",
        "classes": ["target-kv"],
        "cells": ["pd-none"],
        "checks": ["tokens-*"],
        "at_most": 4,
        "vllm": ">=0.32,<0.33",
        "link": "https://example.org/issues/1",
        "reason": "P/D gives other tokens than the single engine",
        "added": date(2026, 3, 1),
        "expires": date(2026, 6, 1),
    }
    return base | changes


def evidence_of_test(changed: list[str]) -> TokenTestEvidence:
    """The evidence of a registered test that found a change in some columns."""
    return TokenTestEvidence(
        reference=PositionRates(rates=()),
        conditional=ConditionalRates(reference=(), found=()),
        p=None,
        p_adjusted=None,
        alpha=0.01,
        prompts=1,
        detectable_points=None,
        detectable_stratum_points=None,
        columns=(),
        changed=tuple(changed),
    )


def changed_profile(tmp_path: Path, change: Callable[[dict], object]) -> str:
    """Path of a copy of the cpu profile, absolute paths and all, after ``change`` was applied to it."""
    raw = yaml.safe_load((SHIPPED_PROFILES / "cpu.yaml").read_text())
    for key in ("target", "tokenizer", "baselines", "known_defects"):
        raw[key] = str(REPOSITORY / raw[key])
    raw["workload"]["prompts"] = str(REPOSITORY / raw["workload"]["prompts"])
    for method in raw["methods"]:
        if "drafter" in method:
            method["drafter"] = str(REPOSITORY / method["drafter"])
    change(raw)
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def extending(folder: Path, base: str = "cpu", name: str = "mine", **changes: object) -> str:
    """Path of a profile that says something else than the one that it extends."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"extends": base, "name": name, **changes}, sort_keys=False))
    return str(path)


def flawless() -> list:
    """Observations in which no check finds anything."""
    return [observation(c, n) for c in CELLS for n in LENGTHS]


def garbled(o, at=2):
    """The observation with one wrong token."""
    output = o.final.output_ids
    wrong = (*output[:at], output[at] + 1, *output[at + 1 :])
    return change_final(o, output_ids=wrong)


def summarised(the_history: History, baselines: dict[str, Lookup] | None = None) -> RunSummary:
    """The summary of a history that is judged by these baselines, or else by those of LENGTHS."""
    baselines = lookups(LENGTHS) if baselines is None else baselines
    return summarise_run(the_history, judge(the_history, baselines), baselines)


def judged(*observations):
    """The summary of a run that holds these."""
    h = history(list(observations))
    return summarise_run(h, judge(h, lookups([32, 64, 96])))


def written_run(folder: Path, made: History, **changes: object) -> Path:
    """Write a run, with fields of its record replaced, as the harness would have recorded it; return its folder."""
    write_observations(folder, made.observations)
    write_run(folder, made.run.model_copy(update=changes))
    return folder


def recorded(folder: Path) -> History:
    """A short run, written to a folder."""
    h = history([observation("pd-eagle3", n) for n in (31, 32, 33)], folder=folder)
    written_run(folder, h)
    return h
