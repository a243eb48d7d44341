"""Runs and their pages for the browser, made by hand: green, red in several classes, and with hostile text in every
place that can hold text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from harness.baselines.lookup import Lookup
from harness.baselines.model import Again, Baseline, BaselineRow
from harness.history.folder import History
from harness.history.migrations import SCHEMA
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.findings import Judgement
from harness.judging.known_defects import apply_known
from harness.profiles.known_defects import load_known
from harness.reports.aa_result import AgainstItself, Count
from harness.reports.across_runs import render_comparison, render_trend
from harness.reports.compare import compare_runs
from harness.reports.judge_run import write_reports
from harness.reports.selftest_result import Kill
from harness.reports.summary import RunSummary, summarise_run
from harness.reports.trend import load_trend
from harness.util.files import write_atomic, write_json
from harness.util.paths import REPOSITORY
from tests.support.builders import (
    CELLS,
    LENGTHS,
    change_final,
    engine,
    flawless,
    garbled,
    history,
    known_entry,
    lookup,
    speculation,
    with_run,
    written_run,
)
from tests.support.self_tests import against_itself, self_test

STARTED = "2026-01-02T03:04:05+00:00"
RTL = "\u202eesrever \u05e9\u05dc\u05d5\u05dd"
SCRIPT = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=2>"
QUOTES = "\"'`><svg/onload=window.pwned=3> &lt;b&gt; {{7*7}} ${7*7} javascript:window.pwned=4"
CONTROLS = "\x00\x07\x1b]0;title\x07\x1b[31m\r\x85\u2028\u2029\ufeff"
LONG = "y" * 100_000
HOSTILE = f"{SCRIPT}{QUOTES}{CONTROLS}{RTL}"
PROFILE = {
    "name": "test",
    "baselines": "baselines",
    "scenarios": [],
    "target": "meta-llama/Llama-3.1-8B-Instruct",
    "methods": [
        {"kind": "eagle3", "drafter": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "num_speculative_tokens": 3}
    ],
}


def references() -> dict[str, Lookup]:
    """Baselines of all methods with rates, intervals and an A/A."""
    out = {}
    for method in ("none", "eagle3", "dflash", "mtp"):
        known = lookup(LENGTHS, method).baseline
        assert known is not None
        summary = {
            "rates": [0.5, 0.25, 0.1],
            "rates_interval_99": [[0.45, 0.55], [0.2, 0.3], [0.05, 0.15]],
            "steps": 100,
        }
        header = known.header.model_copy(update={"summary": summary if method != "none" else {}})
        rows = tuple(r.model_copy(update={"again": _again(r)}) for r in known.rows)
        out[method] = Lookup(Baseline(header=header, rows=rows), "")
    return out


def _again(row: BaselineRow) -> Again:
    return Again(divergence=None, gap=None, steps=len(row.accepted), accepted_at=(1, 1, 1))


def green() -> History:
    return _with_run(history(flawless(), CELLS), profile=PROFILE)


def red() -> History:
    """Wrong tokens after a hand-off, a drafter that lost its KV, a doubled first token, nothing moved, an engine that
    broke."""

    def change(o):
        match o.cell, len(o.sent_ids):
            case "pd-eagle3", (32 | 65):
                return garbled(o)
            case "pd-dflash", 40:
                steps = (0, *(0,) * (len(o.final.output_ids) - 1))
                return change_final(o, speculation=speculation(steps))
            case "single-mtp", 31:
                return change_final(o, echoed_ids=(0, *o.sent_ids), usage_prompt_tokens=32)
            case "pd-none", 65:
                return change_final(o, counters={"finished_requests": 1.0, "prompt_tokens_local_compute": 65.0})
            case "pd-mtp", 32:
                return o.model_copy(update={"error": "engine answered 500", "legs": o.legs[:1]})
        return o

    return _with_run(history([change(o) for o in flawless()], CELLS), profile=PROFILE, seconds={"total": 12.0})


def hostile() -> History:
    """The red run with hostile text wherever a record can hold text."""
    base = red()
    cell = f"pd-eagle3{HOSTILE}"

    def change(o):
        if o.cell == "pd-eagle3":
            params = {HOSTILE: HOSTILE, "remote_block_ids": [[1]]}
            legs = (o.legs[0].model_copy(update={"kv_transfer_params": params}), *o.legs[1:])
            return o.model_copy(update={"cell": cell, "prompt_id": f"{o.prompt_id} {HOSTILE}", "legs": legs})
        if o.cell == "pd-mtp":
            return o.model_copy(update={"error": f"{HOSTILE} {LONG}"})
        return o

    records = tuple(
        c.model_copy(update={"cell": cell, "group": HOSTILE[:40]} if c.cell == "pd-eagle3" else {})
        for c in base.run.cells
    )
    usual = engine("pd-none", "decode")
    engines = (usual.model_copy(update={"argv": (*usual.argv, HOSTILE, LONG), "env": {HOSTILE: HOSTILE}}),)
    run = {
        "cells": records,
        "engines": engines,
        "run_id": f"run {HOSTILE}",
        "command": (HOSTILE, LONG),
        "versions": {"vllm": HOSTILE, "vllm_build": RTL},
        "hardware": {"processor": f"{RTL} {HOSTILE}", "cores": RTL, "gpus": [HOSTILE]},
        "profile": {**PROFILE, "name": HOSTILE},
        "seconds": {HOSTILE: 1.0},
    }
    observations = tuple(change(o) for o in base.observations)
    return base.model_copy(update={"observations": observations, "run": base.run.model_copy(update=run)})


def known() -> History:
    """Wrong tokens of all methods after a hand-off, and nothing else."""
    changed = [
        change_final(o, output_ids=(9, *o.final.output_ids[1:])) if o.cell.startswith("pd-") else o for o in flawless()
    ]
    return _with_run(history(changed, CELLS), versions={"vllm": "0.32.0", "vllm_build": "cpu"}, profile=PROFILE)


def summarise_known(folder: Path) -> RunSummary:
    """That run, with an entry that covers it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "known-defects.yaml"
    days = {"added": "2026-01-01", "expires": "2026-05-01"}
    covers = {
        "classes": ["target-kv", "drafter-kv", "sampler"],
        "cells": ["pd-*"],
        "checks": ["tokens-*", "rescored", "text-form", "acceptance-*"],
    }
    listed = known_entry(**covers, **days, at_most=40, vllm=">=0.32")
    path.write_text(yaml.safe_dump({"format": 1, "defects": [listed]}))
    h = known().model_copy(update={"folder": folder})
    baselines = references()
    return summarise_run(h, apply_known(judge(h, baselines), load_known(path), h), baselines)


def summarise(h: History, folder: Path) -> RunSummary:
    placed = h.model_copy(update={"folder": folder})
    if h.run.profile["name"] == HOSTILE:
        # Half of a surrogate pair cannot be recorded, but a file name that is not UTF-8 becomes one.
        placed = with_run(placed, hardware={**h.run.hardware, "gpus": [os.fsdecode(b"gpu-\xff")]})
    baselines = references()
    judgement = judge(placed, baselines)
    if h.run.profile["name"] == HOSTILE:
        judgement = _annotated(judgement)
    return summarise_run(placed, judgement, baselines)


def _annotated(judgement: Judgement) -> Judgement:
    """Hostile notices, and notes of checks."""
    cells = tuple(
        c.model_copy(update={"results": tuple(r.model_copy(update={"note": HOSTILE}) for r in c.results)})
        for c in judgement.cells
    )
    return judgement.model_copy(update={"cells": cells, "notices": (HOSTILE, LONG)})


def _with_run(h: History, **changes: object) -> History:
    """The run with these changes, its engines started with the models of ``PROFILE``."""
    names = {"models/probe/target": PROFILE["target"], "models/probe/eagle3": PROFILE["methods"][0]["drafter"]}
    engines = []
    for e in h.run.engines:
        text = json.dumps(e.argv)
        for probe, name in names.items():
            text = text.replace(str(REPOSITORY / probe), str(name))
        engines.append(e.model_copy(update={"argv": tuple(json.loads(text))}))
    return with_run(h, **{"started": STARTED, "engines": tuple(engines), **changes})


# --- pages -----------------------------------------------------------------------------------------------------------


def report(name: str, h: History, root: Path) -> Path:
    """report.html of a run, with a self-test and an A/A beside it, and a log for those cells that broke."""
    folder = root / name
    text = HOSTILE if name == "hostile" else "quiet"
    (folder / "logs").mkdir(parents=True)
    # A file may be called anything but a slash and a zero.
    log = "pd-mtp." + (RTL + "<img src=x onerror=window.pwned=5>.log" if name == "hostile" else "decode.log")
    (folder / "logs" / log).write_text(f"one\n{text.replace(chr(0), '')}\n{LONG}\n", encoding="utf-8")
    tested = self_test([Kill.KILLED, Kill.SURVIVED], [Verdict.PASS], started=f"2026 {text}", run_id=f"selftest {text}")
    write_json(root / "selftest" / "selftest.json", tested.model_dump(mode="json"))
    write_json(root / "aa" / "aa.json", _aa(text).model_dump(mode="json"))
    for page in ("selftest/report.html", "aa/aa.md"):
        (root / page).write_text("page")
    write_reports(summarise(h, folder), folder)
    return folder / "report.html"


def known_report(root: Path) -> Path:
    write_reports(summarise_known(root / "known"), root / "known")
    return root / "known" / "report.html"


def _aa(text: str) -> AgainstItself:
    verdicts = {"PASS": 1, "REGRESSION": 1}
    counted = Count(cell=f"pd-none {text}", scenario=text, requests=8, compared=4, tokens_differ=1, steps_differ=0,
                    findings=2, verdicts=verdicts)  # fmt: skip
    return against_itself(counted, run_id=f"aa {text}", started=f"2026 {text}")


def record(h: History, folder: Path, **run: object) -> Path:
    """Write the run as the harness would have recorded it. Names of runs and cells are plain in a record: others are
    refused when it is read."""
    names = {c.cell: c.cell.removesuffix(HOSTILE) for c in h.run.cells}
    cells = tuple(c.model_copy(update={"cell": names[c.cell], "group": names[c.cell]}) for c in h.run.cells)
    plain = tuple(o.model_copy(update={"cell": names[o.cell]}) for o in h.observations)
    named = {"schema_version": SCHEMA, "cells": cells, "run_id": h.run.run_id.removesuffix(f" {HOSTILE}")}
    return written_run(folder, h.model_copy(update={"observations": plain}), **{**named, **run})


def comparison(name: str, first: History, second: History, root: Path) -> Path:
    a, b = record(first, root / f"{name}-first"), record(second, root / f"{name}-second", versions={"vllm": "0.33.0"})
    page = root / f"{name}-compare.html"
    write_atomic(page, render_comparison(compare_runs(a, b)))
    return page


def trend(name: str, h: History, root: Path, folders: tuple[str, ...]) -> Path:
    """A page over nights in folders of these names; the first night has no report."""
    nights = root / f"{name}-nights"
    for number, folder in enumerate(folders):
        record(h, nights / folder, started=f"2026-01-0{number + 1}T00:00:00+00:00")
        if number:
            (nights / folder / "report.html").write_text(f"<title>night {number}</title>")
    (nights / "broken").mkdir()
    (nights / "broken" / "run.json").write_text("{")
    page = nights / "trend.html"
    write_atomic(page, render_trend(load_trend(nights), page))
    return page


HOSTILE_FOLDERS = (
    "plain",
    "javascript:window.pwned=6",
    f"<img src=x onerror=window.pwned=7> '\"#?&%2e {RTL}",
    os.fsdecode(b"not-utf8-\xff"),
)
