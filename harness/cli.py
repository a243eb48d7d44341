"""Command line: ``python -m harness`` or ``harness``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from harness import __version__
from harness.cli_ci import ci_app, exit_of_part, merge_command
from harness.cli_drills import drill_command
from harness.cli_leftovers import clean_command, ps_command
from harness.cli_resume import ResumeOption, resume_run
from harness.cli_soak import soak_command
from harness.errors import EXIT_REGRESSION, EXIT_UNKNOWN, EXIT_USAGE, HarnessError, StorageError, UsageError
from harness.models_cli import models
from harness.prompts_cli import prompts_app

if TYPE_CHECKING:
    from harness.baseline.build import Recorded
    from harness.export.finding import Exported
    from harness.operations import Outcome, Prepared
    from harness.repro import Target

app = typer.Typer(
    name="harness",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Tells whether speculative decoding and prefill/decode disaggregation still give the right tokens and the "
        "right acceptance, on real vLLM engines and real NIXL transfers.\n\n"
        "Start with [bold]harness doctor[/bold], then [bold]harness plan[/bold], then [bold]harness run[/bold].\n\n"
        "Exit codes: 0 PASS (known defects alone included); 1 REGRESSION or DRIFT (or an improvement that wants a new "
        "baseline); 2 UNKNOWN (infrastructure or missing evidence) or SUSPECT (failed once, not confirmed); 64 wrong "
        "usage or configuration."
    ),
)
baseline_app = typer.Typer(no_args_is_help=True, help="Recorded references that runs are compared with.")
probe_app = typer.Typer(no_args_is_help=True, help="The tiny trained models that the cpu profile runs on.")
app.add_typer(baseline_app, name="baseline")
app.add_typer(probe_app, name="probe")
app.add_typer(prompts_app, name="prompts")
app.add_typer(ci_app, name="ci")
app.command("merge")(merge_command)
app.command("soak")(soak_command)
app.command("ps")(ps_command)
app.command("clean")(clean_command)
app.command("drill")(drill_command)
app.command()(models)

ProfileOption = Annotated[
    str, typer.Option("--profile", "-p", help="A shipped profile ('cpu') or the path of a profile YAML file.")
]
CellOption = Annotated[
    list[str] | None,
    typer.Option("--cell", "-c", help="Run only cells that match this shell pattern, e.g. 'pd-*'. Repeatable."),
]
ScenarioOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        "-s",
        help="Run only scenarios that match this shell pattern, e.g. cold or 'prefix-*'. Repeatable. Default: all.",
    ),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for runs. Default: reports/ of the project.")]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-recorded-code", help="Let engines run the code of models that the recorded profile trusts."),
]
PythonOption = Annotated[
    str | None,
    typer.Option("--engine-python", help="Interpreter that has the vllm to be judged. Default: this one."),
]
BasePortOption = Annotated[
    int | None,
    typer.Option("--base-port", min=1024, max=65000, help="Use consecutive ports from here. Default: any free ports."),
]
BaselinesOption = Annotated[
    Path | None,
    typer.Option("--baselines", help="Compare with this folder instead of the profile's baselines."),
]
KnownOption = Annotated[
    Path | None, typer.Option("--known", help="Known defects from this file instead of the profile's.")
]
AgainstOption = Annotated[
    Path | None,
    typer.Option("--against", metavar="RUN_DIR", help="Compare with the single cells of this run instead."),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A recorded run, e.g. reports/latest.")]


def _out() -> Console:
    # Wide enough for the tables when the output is a file or a pipe, where rich would assume 80 columns.
    return Console(width=None if sys.stdout.isatty() else 160)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"harness {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    context: typer.Context,
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    scenario: ScenarioOption = None,
    out: OutOption = None,
    engine_python: PythonOption = None,
    base_port: BasePortOption = None,
    mutant: Annotated[
        list[str] | None,
        typer.Option(
            "--mutant", "-m", help="Put this known defect in. Such a run says so everywhere and never passes."
        ),
    ] = None,
    together: Annotated[bool, typer.Option("--together", help="Allow several mutants at once.")] = False,
    part: Annotated[
        bool,
        typer.Option(
            "--part",
            help="A part of a night that `harness merge` judges: exit code 0 when everything was recorded, whatever it "
            "says, and 2 when something is missing and trying again may mend it.",
        ),
    ] = False,
    executor: Annotated[
        str, typer.Option("--executor", help="local: engines on this machine. ray: on the nodes of a Ray cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="HOST:PORT",
            help="With --executor ray: the cluster. Default: RAY_ADDRESS, or a cluster of this machine alone.",
        ),
    ] = None,
    pair_nodes: Annotated[
        str | None,
        typer.Option(
            "--pair-nodes",
            metavar="same|different|any",
            help="With --executor ray: whether P and D share a node. Default: any.",
        ),
    ] = None,
    resume: ResumeOption = None,
) -> None:
    """Run the matrix on real engines, judge it, write the reports, print the verdict."""
    from harness.engine.executor import ExecutorChoice, make_executor
    from harness.operations import DEFAULT_OUT, execute, prepare
    from harness.progress import Reporter

    if part and mutant:
        raise UsageError("--part: expected no --mutant with it, found one; a part says something about vLLM")
    choice = ExecutorChoice(executor, ray_address, pair_nodes)
    if resume is not None:
        _end(resume_run(context, resume, engine_python, choice, base_port), part)
    prepared = prepare(profile, cell or [], scenario or [])
    chosen = make_executor(choice, mutant or [], base_port)
    with chosen, Reporter(prepared.expected_s) as reporter:
        reporter.line(
            f"{len(prepared.plan.cells)} cells, {prepared.plan.engines} engine starts, "
            f"{prepared.requests} requests, about {prepared.expected_s / 60:.0f} minutes"
        )
        outcome = execute(prepared, out or DEFAULT_OUT, engine_python, reporter, mutant or [], together, chosen)
    _end(outcome, part)


def _end(outcome: Outcome, part: bool) -> NoReturn:
    """Print what became of a run, and exit accordingly."""
    from harness.report.terminal import print_summary

    print_summary(outcome.summary, _out())
    raise typer.Exit(exit_of_part(outcome.folder) if part else outcome.summary.exit_code)


@app.command()
def plan(
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    scenario: ScenarioOption = None,
    effect: Annotated[
        float,
        typer.Option("--effect", min=0.01, max=100, help="Change, in points, to say the needed prompts for."),
    ] = 1.0,
    full: Annotated[
        bool, typer.Option("--full", help="Print the profile instead, with all that it inherits and every default.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of profiles instead, for editors.")
    ] = False,
) -> None:
    """Show cells, engines, prompts, models, expected time, and what the run could see, without starting anything.

    Models and prompts need not be here: of prompts that are not built, as many are planned as their recipe says."""
    from harness.operations import prepare
    from harness.profile_text import full_text, schema_text
    from harness.report.plan import print_models, print_plan

    if schema or full:
        print(schema_text() if schema else full_text(profile), end="")
        return
    print_plan(prepare(profile, cell or [], scenario or [], planned=True), effect, _out())
    print_models(profile, _out())


@app.command()
def check(
    run_dir: RunDir, baselines: BaselinesOption = None, known: KnownOption = None, against: AgainstOption = None
) -> None:
    """Judge a recorded run again, the same way every time. Starts no engine."""
    from harness.operations import References
    from harness.operations import check as judge_again
    from harness.report.terminal import print_summary

    if baselines is not None and against is not None:
        raise UsageError("expected --baselines or --against, found both")
    outcome = judge_again(run_dir, References(baselines, known, against))
    print_summary(outcome.summary, _out())
    raise typer.Exit(outcome.summary.exit_code)


@app.command()
def report(
    run_dir: RunDir,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="FIRST", help="Put this run beside RUN_DIR: report --compare FIRST SECOND."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="With --compare: the file to write.")] = None,
    baselines: BaselinesOption = None,
    known: KnownOption = None,
) -> None:
    """Write the reports of a recorded run anew, or compare two runs. The exit code is 0 whatever the verdict."""
    from harness.operations import References
    from harness.operations import check as judge_again

    if compare is not None:
        from harness.compare import compare_runs
        from harness.files import write_atomic
        from harness.report.beyond import print_comparison, render_comparison

        if baselines is not None or known is not None:
            raise UsageError("--compare: expected no --baselines or --known, found one; each run keeps its own")
        found = compare_runs(compare, run_dir)
        print_comparison(found, _out())
        target = out or run_dir / "compare.html"
        write_atomic(target, render_comparison(found))
        typer.echo(f"report: {target}")
        return
    outcome = judge_again(run_dir, References(baselines, known))
    if outcome.summary.unwritten:
        raise StorageError(f"verdict: {outcome.summary.verdict}; {outcome.summary.unwritten}")
    for name in ("report.html", "summary.md", "junit.xml", "judgement.json"):
        typer.echo(str(outcome.folder / name))
    typer.echo(f"verdict: {outcome.summary.verdict}")


@app.command()
def trend(
    runs_dir: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="A folder of recorded runs, e.g. reports.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write. Default: RUNS_DIR/trend.html.")] = None,
    nights: Annotated[
        int, typer.Option("--nights", min=2, help="Nights of unchanged engines per false notice of a slow drift.")
    ] = 365,
) -> None:
    """Verdicts and acceptance over many nights, and drifts too small for one night to see.

    Exit code 0; the nights have their own verdicts.
    """
    from harness.files import write_atomic
    from harness.report.beyond import print_trend, render_trend
    from harness.trend import load_trend

    found = load_trend(runs_dir, nights)
    print_trend(found, _out())
    target = out or runs_dir / "trend.html"
    write_atomic(target, render_trend(found, target))
    typer.echo(f"report: {target}")


@app.command()
def up(
    cell: Annotated[str, typer.Argument(metavar="CELL", help="E.g. pd-eagle3.")],
    port: Annotated[
        int | None, typer.Option("--port", min=1024, max=65535, help="Port of the address. Default: a free one.")
    ] = None,
    profile: ProfileOption = "cpu",
    out: OutOption = None,
    engine_python: PythonOption = None,
) -> None:
    """Keep a cell's engines up behind one OpenAI-compatible address, until Ctrl-C.

    The router is vllm-router, without retries. One request is sent through it first, and D's counters say whether KV
    moved. Exit code 2 when that is not proven.
    """
    from harness.operations import DEFAULT_OUT
    from harness.progress import Reporter
    from harness.up import Address, bring_up, prepare_cell

    prepared = prepare_cell(profile, cell)
    proven: list[bool] = []

    def serve(address: Address) -> None:
        proof = address.proof
        proven.append(proof.good)
        for role, url in address.engines.items():
            print(f"{role} engine: {url}")
        print(f"example: {address.example}")
        print(address.key)
        print(proof.sentence)
        print(f"address: {address.url}/v1 (until Ctrl-C)", flush=True)
        if proof.answered:
            signal.pause()

    with Reporter(prepared.expected_s) as reporter:
        try:
            bring_up(prepared, out or DEFAULT_OUT, engine_python or sys.executable, port, reporter, serve)
        except KeyboardInterrupt:
            reporter.line("engines and router are gone")
    raise typer.Exit(0 if proven and all(proven) else EXIT_UNKNOWN)


def _say_written(written: Exported) -> None:
    print(f"{written.case}: python {written.case.name} starts the engines and says whether the defect is there")
    if written.issue is not None:
        print(f"{written.issue}: the text of an issue")


def _shrink(
    prepared: Prepared,
    target: Target,
    mutants: tuple[str, ...],
    out: Path | None,
    engine_python: str | None,
    found: tuple[Path | None, str | None],
    export: Path | None,
    issue: bool,
    starts: int,
) -> int:
    """Shrink, print what it cost and what is left, and export that when asked to; returns the exit code."""
    from harness.export.finding import export_shrunk
    from harness.operations import DEFAULT_OUT
    from harness.progress import Reporter
    from harness.shrink.run import expected_s, shrink

    with Reporter(expected_s(prepared)) as reporter:
        python = engine_python or sys.executable
        result = shrink(prepared, target, mutants, out or DEFAULT_OUT, python, reporter, starts)
    print(result.sentence)
    if result.law:
        print(f"law of lengths: {result.law}")
    if result.symptom is not None:
        print(f"prompt: {list(result.variant.subject.prompt.ids)}")
    print(f"record: {result.folder / 'shrink.json'}")
    if export is not None and result.symptom is not None:
        _say_written(export_shrunk(result, prepared, found, export, issue, engine_python))
    return result.exit_code


def _to_try(
    run_dir: Path | None,
    finding: str | None,
    cell: str | None,
    prompt: str | None,
    scenario: str,
    profile: str,
    trust_code: bool,
) -> tuple[Prepared, Target, tuple[str, ...]]:
    """What repro and bisect try: a finding of a run, or a prompt or scenario of a cell."""
    from harness.repro import from_names, from_run

    if (run_dir is None) == (cell is None) or (run_dir is None) != (finding is None):
        raise UsageError("expected RUN_DIR and FINDING, or --cell and --prompt, found something else; see --help")
    if run_dir is not None and finding is not None:
        return from_run(run_dir, finding, trust_code)
    if prompt is None and scenario == "cold":
        raise UsageError("--cell: expected --prompt ID or --scenario NAME with it, found neither")
    return from_names(profile, cell or "", prompt or "", scenario)


@app.command()
def repro(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="The run that had the finding.", show_default=False)
    ] = None,
    finding: Annotated[
        str | None, typer.Argument(metavar="FINDING", help="Its id, or a beginning that only one has.")
    ] = None,
    cell: Annotated[str | None, typer.Option("--cell", "-c", help="Without a run: the cell, e.g. pd-eagle3.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Without a run: the id of a prompt.")] = None,
    scenario: Annotated[str, typer.Option("--scenario", "-s", help="Without a run: the scenario.")] = "cold",
    profile: ProfileOption = "cpu",
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat", "-n", min=1, max=1000, help="Try at most so often, on the same engines; stops when decided."
        ),
    ] = 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the engines until Ctrl-C; print their URLs and the requests as curl.")
    ] = False,
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Find the smallest case that shows it, and the law of prompt lengths around it."),
    ] = False,
    starts: Annotated[
        int,
        typer.Option("--starts", min=0, help="With --shrink: start engines at most so often again, for fewer drafts."),
    ] = 4,
    mutant: Annotated[
        list[str] | None, typer.Option("--mutant", "-m", help="Without a run: put this known defect in.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write one Python file that shows it without this project."),
    ] = None,
    export_issue: Annotated[
        bool, typer.Option("--export-issue", help="With --export: write the text of an issue beside the file.")
    ] = False,
    trust_code: TrustOption = False,
    out: OutOption = None,
    engine_python: PythonOption = None,
) -> None:
    """Try a finding again: that cell's engines with the same flags, that prompt in its scenario.

    Exit code 1 when it shows again, 0 when it does not, 2 when no try says anything.
    """
    from harness.engine.arming import require_alone, require_known
    from harness.operations import DEFAULT_OUT
    from harness.progress import Reporter
    from harness.report.terminal import print_summary
    from harness.repro import expected_s, reproduce

    prepared, target, mutants = _to_try(run_dir, finding, cell, prompt, scenario, profile, trust_code)
    if mutant:
        if run_dir is not None:
            raise UsageError("--mutant: expected none with RUN_DIR, found one; the mutants of the run are put in again")
        require_known(mutant)
        require_alone(mutant, together=False)
        mutants = tuple(mutant)
    console = _out()
    if export_issue and export is None:
        raise UsageError("--export-issue: expected --export FILE with it, found none")
    if (keep or repeat > 1) and (export is not None or shrink):
        raise UsageError("--export and --shrink: expected no --keep or --repeat with them, found one; run it by itself")
    if shrink:
        raise typer.Exit(
            _shrink(prepared, target, mutants, out, engine_python, (run_dir, finding), export, export_issue, starts)
        )
    if export is not None:
        from harness.export.finding import export_target

        written = export_target(prepared, target, run_dir, finding, export, export_issue, engine_python, mutants)
        _say_written(written)
        return

    def wait(lines: list[str]) -> None:
        console.print("engines stay up until Ctrl-C:", highlight=False)
        for line in lines:
            print(f"  {line}", flush=True)
        signal.pause()

    with Reporter(expected_s(prepared, repeat)) as reporter:
        result = reproduce(
            prepared,
            target,
            mutants,
            out or DEFAULT_OUT,
            engine_python or sys.executable,
            reporter,
            repeat,
            wait if keep else None,
        )
    if result.summary is not None:
        print_summary(result.summary, console)
    console.print(f"{result.sentence}; {result.seconds:.0f} s", highlight=False)
    raise typer.Exit(result.exit_code)


@app.command()
def bisect(
    good: Annotated[
        str,
        typer.Option("--good", metavar="VERSION|PYTHON", help="Older; must not show it: 0.30.0, or an interpreter."),
    ],
    bad: Annotated[str, typer.Option("--bad", metavar="VERSION|PYTHON", help="Newer; must show it.")],
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN_DIR", help="The run that had the finding. Default: reports/latest.", show_default=False
        ),
    ] = None,
    finding: Annotated[
        str | None, typer.Option("--finding", "-f", help="Its id, or a beginning that only one has.")
    ] = None,
    cell: Annotated[str | None, typer.Option("--cell", "-c", help="Without a run: the cell, e.g. pd-eagle3.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Without a run: the id of a prompt.")] = None,
    scenario: Annotated[str, typer.Option("--scenario", "-s", help="Without a run: the scenario.")] = "cold",
    profile: ProfileOption = "cpu",
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            metavar="VERSION|PYTHON",
            help="May be tried between the ends. Repeatable. Default: with two interpreters none, else every release.",
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat", "-n", min=1, max=1000, help="Tries per version; one that shows it is enough, all must not."
        ),
    ] = 1,
    trust_code: TrustOption = False,
    out: OutOption = None,
) -> None:
    """Find the first vLLM version in which a finding shows, by binary search with repro as the test.

    Versions are installed into a cache; the ends are tried first; a version that cannot start or says nothing is
    skipped. Exit code 0 when the first version is found (or a few of which one is it), 2 when nothing can be decided.
    """
    from harness.bisect.environments import (
        DISTRIBUTIONS,
        Cache,
        UvInstaller,
        cache_folder,
        in_order,
        read_candidate,
        released_versions,
    )
    from harness.bisect.run import VersionTrier, expected_total_s, start
    from harness.bisect.run import bisect as search_versions
    from harness.operations import DEFAULT_OUT, new_folder
    from harness.progress import Reporter
    from harness.report.bisect import print_bisection

    if finding is None and run_dir is not None:
        raise UsageError("expected --finding ID with RUN_DIR, found none; `harness check RUN_DIR` says what it found")
    if finding is not None and run_dir is None and cell is None:
        run_dir = DEFAULT_OUT / "latest"
    prepared, target, mutants = _to_try(run_dir, finding, cell, prompt, scenario, profile, trust_code)
    device = prepared.profile.engine.device
    package = DISTRIBUTIONS[device]
    candidates = in_order(
        read_candidate("--good", good),
        read_candidate("--bad", bad),
        [read_candidate("--candidate", c) for c in candidate or []],
        lambda: released_versions(package),
    )
    folder = new_folder(out or DEFAULT_OUT, prepared.profile, "bisect")
    with Reporter(expected_total_s(prepared, repeat, len(candidates))) as reporter:
        reporter.line(f"{len(candidates)} versions from {candidates[0].version} to {candidates[-1].version}")
        cache = Cache(cache_folder(), UvInstaller(device), reporter.line)
        trier = VersionTrier(
            prepared, target, mutants, repeat, lambda version, log: cache.python(package, version, log), reporter
        )
        begun = start(prepared, target, mutants, candidates, repeat)
        found = search_versions(begun, candidates, folder, trier, reporter.line)
    console = _out()
    print_bisection(found, console)
    console.print(f"steps: {folder / 'bisect.json'}", soft_wrap=True, highlight=False)
    raise typer.Exit(found.exit_code)


@app.command()
def selftest(
    mutant: Annotated[
        list[str] | None,
        typer.Option("--mutant", "-m", help="Try only this mutant, e.g. M1. Repeatable; each is tried alone."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the five historic defects and the controls.")] = False,
    profile: ProfileOption = "cpu",
    out: OutOption = None,
    engine_python: PythonOption = None,
) -> None:
    """Put known defects into real engines, one at a time, and see that each is caught for its reason.

    Exit code 0 only if every mutant is killed for its reason and every control passes.
    """
    from harness.operations import DEFAULT_OUT, self_test
    from harness.report.selftest import print_selftest

    result, folder = self_test(profile, mutant or [], quick, out or DEFAULT_OUT, engine_python)
    console = _out()
    print_selftest(result, console)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


@app.command()
def aa(
    repeat: Annotated[int, typer.Option("--repeat", "-n", min=2, help="How often each cell is run.")] = 2,
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    scenario: ScenarioOption = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Cold prompts per stratum. Default: all of them.")
    ] = None,
    out: OutOption = None,
    engine_python: PythonOption = None,
    recorded: Annotated[
        Path | None,
        typer.Option("--from", metavar="AA_DIR", help="Judge a recorded A/A run again instead of starting engines."),
    ] = None,
) -> None:
    """Run the same cells again and again and judge them against each other: every finding is a false alarm.

    Exit code 0 only if no cell in any scenario had a finding in any repetition.
    """
    from harness.operations import DEFAULT_OUT, repeat_cells
    from harness.repeat import judge_again
    from harness.report.repeat import print_repeat, write_repeat

    if recorded is not None:
        result, folder = judge_again(recorded), recorded
        write_repeat(result, folder)
    else:
        result, folder = repeat_cells(
            profile, cell or [], scenario or [], prompts, repeat, out or DEFAULT_OUT, engine_python
        )
    console = _out()
    print_repeat(result, console)
    console.print(f"counts: {folder / 'aa.json'}", soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


@app.command()
def doctor(engine_python: PythonOption = None, profile: ProfileOption = "cpu") -> None:
    """Show what this machine can run, and what is missing."""
    from harness.doctor import examine

    findings = examine(engine_python or sys.executable, profile)
    table = Table(title="doctor", title_justify="left")
    for column in ("what", "found", "", "what to do"):
        table.add_column(column, overflow="fold")
    for item in findings:
        mark = "[green]✔[/green]" if item.ok else "[red]✘[/red]" if item.needed else "[yellow]–[/yellow]"
        table.add_row(item.what, item.found, mark, "" if item.ok else item.advice)
    _out().print(table)
    broken = [i for i in findings if i.needed and not i.ok]
    if broken:
        typer.echo(f"profile {profile} cannot run here: {', '.join(i.what for i in broken)}")
        raise typer.Exit(EXIT_UNKNOWN)
    typer.echo(f"profile {profile} can run here")


@baseline_app.command("record")
def baseline_record(
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    out: OutOption = None,
    engine_python: PythonOption = None,
    repeat: Annotated[
        int,
        typer.Option("--repeat", "-n", min=1, max=2, help="2 asks everything twice: what equal runs differ by (A/A)."),
    ] = 2,
    from_run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN_DIR", help="Take a recorded run instead of starting engines."),
    ] = None,
    again: Annotated[
        Path | None, typer.Option("--again", metavar="RUN_DIR", help="With --from: a repetition of that run.")
    ] = None,
    baselines: Annotated[
        Path | None, typer.Option("--baselines", help="Folder to write to. Default: the profile's.")
    ] = None,
) -> None:
    """Record baselines from single engines (never from P/D) and write them to the profile's folder."""
    from harness.baseline.build import record_from
    from harness.history import load_history
    from harness.operations import DEFAULT_OUT, prepare
    from harness.progress import Reporter
    from harness.references import record_references

    prepared = prepare(profile, cell or ["single-*"], record=True)
    folder = baselines or prepared.profile.baselines
    if again is not None and from_run is None:
        raise UsageError("--again: expected --from RUN_DIR with it, found none")
    if from_run is not None:
        repetition = load_history(again) if again is not None else None
        recorded = record_from(load_history(from_run), repetition, prepared.sets, folder)
    else:
        with Reporter(repeat * prepared.expected_s) as reporter:
            recorded = record_references(prepared, out or DEFAULT_OUT, engine_python, reporter, repeat, folder)
    _tell(recorded)


def _tell(recorded: Sequence[Recorded]) -> None:
    for item in recorded:
        typer.echo(f"{item.method}: {item.rows} prompts: {item.path}" + ("" if item.change else ": unchanged"))
        for line in item.change:
            typer.echo(f"  {line}")


@baseline_app.command("accept")
def baseline_accept(
    run_dir: RunDir,
    again: Annotated[
        Path | None, typer.Option("--again", metavar="RUN_DIR", help="A repetition of that run, for A/A.")
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", "-p", help="Default: the run's own.")] = None,
    baselines: Annotated[
        Path | None, typer.Option("--baselines", help="Folder to write to. Default: the profile's.")
    ] = None,
) -> None:
    """Make a recorded run the new reference: DRIFT and IMPROVED end this way.

    Says what changed, and exits with 1 even when all went well: an accepted change must never look like a pass.
    """
    from harness.references import accept

    _tell(accept(run_dir, again, profile, baselines))
    typer.echo("accepted: review and commit the files; the exit code is 1, because an accepted change is no pass")
    raise typer.Exit(EXIT_REGRESSION)


@baseline_app.command("diff")
def baseline_diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A baseline (.json) or a folder of them.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The one to compare with it.")],
) -> None:
    """Say in words what changed between two baselines. Exit code 0 when nothing did, else 1."""
    from harness.references import compare

    changes = compare(old, new)
    for change in changes:
        typer.echo(change.name)
        for line in change.lines:
            typer.echo(f"  {line}")
    if not changes:
        typer.echo("no difference")
    raise typer.Exit(EXIT_REGRESSION if changes else 0)


@baseline_app.command("list")
def baseline_list(
    profile: ProfileOption = "cpu",
    baselines: Annotated[Path | None, typer.Option("--baselines", help="Default: the profile's folder.")] = None,
) -> None:
    """Show the stored baselines. Exit code 1 when one is damaged, orphaned, or used by no cell."""
    from harness.references import overview

    rows, problems = overview(profile, baselines)
    table = Table(title="baselines", title_justify="left")
    for column in ("file", "prompts", "rates", "length", "equal runs", "vLLM", "recorded"):
        table.add_column(column, overflow="fold")
    for row in rows:
        header = row["header"]
        s = header.summary
        again = s.get("again")
        table.add_row(
            row["name"],
            str(s.get("prompts")),
            " ".join(f"{r:.3f}" for r in s.get("rates", [])) or "–",
            f"{s['acceptance_length_pooled']:.3f}" if "acceptance_length_pooled" in s else "–",
            f"{again['diverged']} of {again['prompts']} part" if again else "not measured",
            header.identity.vllm or "?",
            header.provenance.recorded[:10],
        )
    _out().print(table)
    for problem in problems:
        typer.echo(problem)
    raise typer.Exit(EXIT_REGRESSION if problems else 0)


@probe_app.command("build")
def probe_build(
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to. Default: the shipped weights.")] = None,
) -> None:
    """Train the probe models from scratch (about 25 minutes on two cores)."""
    from harness.probe.build import WEIGHTS, build

    description = build(out or WEIGHTS, lambda line: typer.echo(line))
    typer.echo(
        f"wrote {out or WEIGHTS}: {description['weights_bytes'] / 1e6:.1f} MB in {description['training_seconds']} s"
    )
    typer.echo("next: harness prompts build, harness baseline record, harness probe measure reports/latest")


@probe_app.command("measure")
def probe_measure(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option("--out", help="File to write. Default: beside the weights.")] = None,
) -> None:
    """Measure exactness, acceptance and top-2 gaps of the probes from a recorded run with single cells."""
    import json

    from harness.history import load_history
    from harness.operations import write_quality
    from harness.probe.build import WEIGHTS

    typer.echo(json.dumps(write_quality(load_history(run_dir), out or WEIGHTS / "quality.json"), indent=2))


_TYPER_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _interrupted() -> NoReturn:
    # Another signal must not turn the end into a traceback.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    print("harness: interrupted; verdict UNKNOWN", file=sys.stderr)
    sys.exit(EXIT_UNKNOWN)


def main() -> None:
    """Entry point: expected failures are one sentence and their exit code, never a traceback."""
    # click's own usage errors exit with 2, which means UNKNOWN here.
    typer.BadParameter.__bases__[0].exit_code = EXIT_USAGE  # type: ignore[attr-defined]
    # TERM ends a run as Ctrl-C does; a shell may have started us with INT ignored.
    # A closed terminal must not leave engines behind either.
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        app()
    except HarnessError as error:
        print(f"harness: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as end:
        # typer turns an interrupt into this code without a word.
        if end.code == _TYPER_INTERRUPTED:
            _interrupted()
        raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_UNKNOWN)
    except OSError as error:
        print(
            f"harness: expected to read and write its files, found {error.strerror}: {error.filename}; give a folder "
            "with room that you may write to",
            file=sys.stderr,
        )
        sys.exit(EXIT_USAGE)
