"""A/A: run the same cells repeatedly on the same engines; judge them against the baselines and each other.

Nothing changes between repetitions, so every finding is a false alarm of the harness or nondeterminism of the engine.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.engines.environment import engines_for, versions
from harness.engines.flags import NO_FLAGS, EngineFlags
from harness.errors import UsageError
from harness.history.acceptance import real_steps
from harness.history.folder import History, load_history
from harness.history.records import COLD, Observation
from harness.history.verdict import Verdict
from harness.judging.findings import Judgement, how_many
from harness.profiles.cells import start_expected_s
from harness.reports.aa_result import AgainstItself, Count
from harness.reports.judge_run import judge_and_report
from harness.reports.markdown import versions_in_words
from harness.reports.terminal import print_conclusion
from harness.runner.repetitions import record_repetitions
from harness.runner.run import new_folder, require_free
from harness.util import json_io, machine
from harness.util.files import write_atomic, write_json
from harness.util.progress import Reporter
from harness.util.text import counted, lasting
from harness.workload.prepare import prepare


def judge_again(folder: Path) -> AgainstItself:
    """Judge the repetitions of a recorded A/A run with the current checks, and count again. Raises UsageError when the
    folder does not hold an A/A run."""
    try:
        raw = json_io.loads(json_io.read_text(folder / "aa.json", 16 * json_io.MIB))
        before = AgainstItself.model_validate({k: v for k, v in raw.items() if k in AgainstItself.model_fields})
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder} is no folder of an A/A run: its aa.json cannot be read ({error})") from error
    histories = [load_history(p) for p in sorted(folder.glob("repetition-*"))]
    if len(histories) != before.repetitions:
        raise UsageError(f"{folder}: expected {before.repetitions} repetitions, found {len(histories)}")
    judged = [judge_and_report(history).judgement for history in histories]
    return before.model_copy(update={"counts": count(histories, judged)})


def count(histories: Sequence[History], judged: Sequence[Judgement]) -> tuple[Count, ...]:
    """Compare each repetition with the first, request by request, and count verdicts and findings."""
    first = {_place(o): o for o in histories[0].observations}
    verdicts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for history, judgement in zip(histories, judged, strict=True):
        for item in judgement.cells:
            place = (item.cell, item.scenario)
            verdicts[place][item.verdict] += 1
            if history.run.interrupted and item.verdict is Verdict.UNKNOWN:
                continue
            counts[place]["findings"] += how_many(f for r in item.results for f in r.findings if f.known is None)
    for number, history in enumerate(histories):
        for o in history.observations:
            row = counts[o.cell, o.scenario]
            row["requests"] += o.error is None
            other = first.get(_place(o))
            if number and other is not None and o.final is not None and other.final is not None:
                row["compared"] += 1
                row["tokens_differ"] += o.final.output_ids != other.final.output_ids
                row["steps_differ"] += _steps(o) != _steps(other)
    names = ("requests", "compared", "tokens_differ", "steps_differ", "findings")
    return tuple(
        Count(cell=place[0], scenario=place[1], verdicts=dict(found), **{name: counts[place][name] for name in names})
        for place, found in verdicts.items()
    )


def _place(o: Observation) -> tuple[str, str, str, str]:
    return (o.cell, o.scenario, o.form, o.prompt_id if o.scenario == COLD else o.key)


def _steps(o: Observation) -> tuple[int, ...] | None:
    steps = real_steps(o.final) if o.final is not None else None
    return steps.accepted if steps is not None else None


def repeat_cells(
    source: str,
    patterns: Sequence[str],
    scenarios: Sequence[str],
    prompts_per_stratum: int | None,
    repetitions: int,
    out: Path,
    engine_python: str | None,
    flags: EngineFlags = NO_FLAGS,
) -> tuple[AgainstItself, Path]:
    """Run A/A on real engines: repeat the cells, judge every repetition and count the differences. Return the counts
    and the run folder."""
    prepared = prepare(source, patterns, scenarios, prompts_per_stratum=prompts_per_stratum)
    require_free(prepared, flags)
    environment = engines_for(prepared.profile, prepared.plan, engine_python, flags)
    folder = new_folder(out, prepared.profile, "aa")
    starts = sum(start_expected_s(g) for g in prepared.plan.groups)
    seconds = starts + repetitions * (prepared.expected_s - starts)
    with Reporter(seconds) as reporter:
        reporter.line(
            f"{repetitions} repetitions of {counted(len(prepared.plan.cells), 'cell')}, "
            f"{counted(repetitions * prepared.requests, 'request')}, about {lasting(seconds)}"
        )
        begun, started = time.monotonic(), machine.now()
        done = record_repetitions(prepared, environment, folder, repetitions, reporter)
        recorded = AgainstItself(
            run_id=folder.name,
            started=started,
            profile=prepared.profile.name,
            versions=versions(environment),
            engine_flags=environment.flags.options,
            repetitions=repetitions,
            counts=(),
            seconds=round(time.monotonic() - begun, 1),
            interrupted=done[0].run.interrupted,
        )
        # So that what is recorded can be judged (--from) if this is interrupted.
        write_repeat(recorded, folder)
        counts = count(done, [judge_and_report(history).judgement for history in done])
        result = recorded.model_copy(update={"counts": counts, "seconds": round(time.monotonic() - begun, 1)})
    write_repeat(result, folder)
    return result, folder


_COLUMNS: dict[str, Callable[[Count], object]] = {
    "cell": lambda c: c.cell,
    "scenario": lambda c: c.scenario,
    "requests": lambda c: c.requests,
    "compared": lambda c: c.compared,
    "different tokens": lambda c: c.tokens_differ,
    "different accepted counts": lambda c: c.steps_differ,
    "findings": lambda c: c.findings,
    "verdicts": lambda c: ", ".join(f"{n} {v}" for v, n in c.verdicts.items()),
}


def write_repeat(result: AgainstItself, folder: Path) -> None:
    write_json(folder / "aa.json", {**result.model_dump(mode="json"), "exit_code": result.exit_code})
    write_atomic(folder / "aa.md", render_markdown(result))


def _rows(result: AgainstItself) -> list[list[str]]:
    return [[str(value(c)) for value in _COLUMNS.values()] for c in result.counts]


def render_markdown(result: AgainstItself) -> str:
    """Render the counts as a Markdown page that fits into ``docs/``."""
    versions = versions_in_words(result.versions)
    lines = ["# A/A", "", f"{result.sentence} Profile {result.profile}, {versions}, {result.seconds:.0f} s.", ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|---|---|" + "---:|" * 5 + "---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(result)]
    return "\n".join(lines) + "\n"


def print_repeat(result: AgainstItself, console: Console) -> None:
    table = Table(title=f"A/A, {result.repetitions} repetitions", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("cell", "scenario", "verdicts") else "right")
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    print_conclusion(result.sentence, result.exit_code, console)
