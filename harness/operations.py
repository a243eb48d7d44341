"""What the command line and the pytest front end do, without their arguments and printing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.baseline import (
    Identity,
    Provenance,
    Row,
    look_up,
    rows_from,
    write_baseline,
)
from harness.checks.registry import baselines_for, judge
from harness.config import REPOSITORY, Profile, load_profile
from harness.engine.environment import inspect_environment, need_nixl
from harness.errors import UsageError
from harness.files import write_json
from harness.history import History, load_history
from harness.matrix import Plan, make_plan, select_cells
from harness.progress import Reporter
from harness.prompts import PromptSet, load_prompts
from harness.report import write_reports
from harness.runner import Runner, new_run_id, point_latest, workload
from harness.summary import RunSummary, summarise_run

DEFAULT_OUT = REPOSITORY / "reports"


class Prepared(NamedTuple):
    """A validated request: profile, prompts and plan. Nothing has been started."""

    profile: Profile
    source: str
    prompts: PromptSet
    plan: Plan


def prepare(source: str, patterns: Sequence[str]) -> Prepared:
    """Load and check everything that can be wrong before an engine is started."""
    profile = load_profile(source)
    cells = select_cells(profile, patterns)
    prompts = load_prompts(profile.workload.prompts)
    prompts.check_tokenizer(profile.tokenizer_folder, profile.workload.prompts)
    longest = max(p.tokens for p in prompts.prompts) + profile.workload.max_tokens
    if longest > profile.engine.max_model_len:
        raise UsageError(
            f"profile {source}: expected prompts and outputs to fit engine.max_model_len = "
            f"{profile.engine.max_model_len}, found up to {longest} tokens; raise it or lower workload.max_tokens"
        )
    requests = len(workload(prompts, profile.workload.text_prompts))
    return Prepared(profile, source, prompts, make_plan(profile, cells, requests))


class Outcome(NamedTuple):
    folder: Path
    summary: RunSummary


def execute(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    base_port: int | None = None,
) -> Outcome:
    """Run, judge and report. The run folder is complete even when cells are UNKNOWN."""
    history = record(prepared, out, engine_python, reporter, base_port)
    folder = history.folder
    summary = assess(history, None)
    write_reports(summary, folder)
    return Outcome(folder, summary)


def record(
    prepared: Prepared,
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    base_port: int | None = None,
) -> History:
    """Run the plan on real engines and return what was recorded."""
    environment = inspect_environment(engine_python or sys.executable)
    if any(g.topology == "pd" for g in prepared.plan.groups):
        need_nixl(environment)
    run_id = new_run_id(prepared.profile)
    folder = out / run_id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"--out {out}: expected a folder to write runs into, but {folder} cannot be made ({error.strerror})"
        ) from error
    runner = Runner(
        prepared.profile,
        prepared.source,
        prepared.plan,
        prepared.prompts,
        environment,
        folder,
        run_id,
        reporter,
        base_port,
    )
    history = runner.run()
    point_latest(folder)
    return history


def assess(history: History, baselines: Path | None) -> RunSummary:
    """Judge a history against the baselines of its profile, or of another folder."""
    return summarise_run(history, judge(history, baselines_for(history, baselines)))


def check(run_dir: Path, baselines: Path | None) -> Outcome:
    """Judge a recorded run again; no engine is needed."""
    history = load_history(run_dir)
    summary = assess(history, baselines)
    write_reports(summary, run_dir)
    return Outcome(run_dir, summary)


class Recorded(NamedTuple):
    method: str
    path: Path
    rows: int
    replaced: str


def record_baselines(history: History, prepared: Prepared, folder: Path) -> list[Recorded]:
    """Write a baseline per single cell of a recorded run.

    All rows are collected and checked before the first file is written: known right answers where the prompts have
    them, and the plain engine's tokens for every speculative method.
    """
    if history.run.prompts_sha256 != prepared.prompts.sha256:
        raise UsageError(
            f"{history.folder}: was recorded with other prompts than profile {prepared.source} has now; record anew"
        )
    digests = {p.id: p.sha256 for p in prepared.prompts.prompts}
    expected = {p.id: p.expected for p in prepared.prompts.prompts}
    singles = [c for c in history.run.cells if c.cell.startswith("single-")]
    if not singles:
        raise UsageError(f"{history.folder}: expected single cells to record baselines from, found none")
    collected: dict[str, list[Row]] = {}
    for record in singles:
        collected[record.cell.removeprefix("single-")] = rows_from(history, record.cell, digests, expected)
    plain = {r.prompt_id: r.output_ids for r in collected.get("none", [])}
    for method, rows in collected.items():
        for row in rows:
            if plain and row.output_ids != plain[row.prompt_id]:
                raise UsageError(
                    f"single-{method}: prompt {row.prompt_id} has other tokens than single-none of the same run; a "
                    "reference must be right, so nothing was recorded"
                )
    return [_write(history, method, rows, folder) for method, rows in collected.items()]


def _write(history: History, method: str, rows: list[Row], folder: Path) -> Recorded:
    identity = Identity.model_validate(history.run.identities[method])
    old = look_up(folder, identity, history.run.profile["name"])
    if old.baseline is None:
        replaced = "new"
    else:
        changed = sum(a != b for a, b in zip(old.baseline.rows, rows, strict=True))
        replaced = f"{changed} of {len(rows)} rows changed" if changed else "unchanged"
    engine = next(e for e in history.run.engines if e.group.endswith(f"-{method}") and e.role != "prefill")
    run = history.run
    provenance = Provenance(
        recorded=run.started,
        run_id=run.run_id,
        # Paths of the machine stay out of committed data.
        command=tuple(Path(run.command[0]).name if i == 0 else a for i, a in enumerate(run.command)),
        git_commit=run.git_commit,
        versions=run.versions,
        hardware=run.hardware,
        model_runner=engine.model_runner,
        attention_backend=engine.attention_backend,
    )
    path = write_baseline(folder, identity, provenance, rows)
    return Recorded(method, path, len(rows), replaced)


def write_quality(history: History, target: Path) -> dict[str, object]:
    """Measure the probe models from a recorded run and write the figures beside the weights."""
    from harness.probe.quality import measure

    quality = measure(history)
    write_json(target, quality)
    return quality
