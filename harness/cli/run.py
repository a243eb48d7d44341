"""``harness run``, with ``--resume`` and ``--part``, ``harness fuzz`` and ``harness up``: what starts engines."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

from harness.cli import completion
from harness.cli.options import (
    ATTACH,
    BasePortOption,
    CellOption,
    EngineOptions,
    KeyVariableOption,
    MutantOption,
    ProfileOption,
    QuickSelection,
    ServedModelOption,
    StrictOption,
    key_in,
    make_console,
    options_given,
    refuse_without_servers,
)
from harness.errors import EXIT_PASS, EXIT_UNKNOWN, UsageError
from harness.history.layout import require_run
from harness.util.text import counted, lasting

if TYPE_CHECKING:
    from harness.commands.serve import Address
    from harness.engines.attached import AttachedExecutor
    from harness.engines.executor import Executor, ExecutorChoice
    from harness.profiles.cells import Role
    from harness.reports.judge_run import Outcome
    from harness.supervision.run_in_child import Tell
    from harness.util.progress import Reporter
    from harness.workload.prepare import Prepared


_RAY = "Ray cluster"


class ServerOptions(NamedTuple):
    """Servers that are asked and not started."""

    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="URL", rich_help_panel=ATTACH, help="Attach to this server as P instead of starting engines."
        ),
    ] = None
    decode: Annotated[
        str | None, typer.Option(metavar="URL", rich_help_panel=ATTACH, help="Attach to this server as D.")
    ] = None
    single: Annotated[
        str | None,
        typer.Option(metavar="URL", rich_help_panel=ATTACH, help="Attach to this server as an engine alone."),
    ] = None
    router: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=ATTACH,
            help="Ask the pair through this router, too, which hands off between --prefill and --decode.",
        ),
    ] = None
    key_variable: KeyVariableOption = None
    witness_notes: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=ATTACH,
            help="Judge the servers' KV, too, by what their plugin notes in this folder (docs/kv-witness.md).",
        ),
    ] = None
    model: ServedModelOption = None

    @property
    def urls(self) -> dict[Role, str]:
        """The servers' addresses by role, without the router's."""
        given: dict[Role, str | None] = {"prefill": self.prefill, "decode": self.decode, "single": self.single}
        return {role: url for role, url in given.items() if url is not None}

    def require_whole(self) -> None:
        """Raise UsageError for a router whose servers are not told, and for what is said of servers without one."""
        if not self.urls:
            given = {"--witness-notes": self.witness_notes, "--key-variable": self.key_variable, "--model": self.model}
            refuse_without_servers(given, "--prefill and --decode, or --single")
        if self.witness_notes is not None and not self.witness_notes.is_dir():
            raise UsageError(
                f"--witness-notes {self.witness_notes}: there is no such folder; give the one that the servers were "
                "started with (KV_HARNESS_WITNESS)"
            )
        if self.router is not None and not (self.prefill and self.decode):
            raise UsageError(
                "--router needs --prefill and --decode, whose counters prove what the router did; add them"
            )


class RayOptions(NamedTuple):
    """Where engines run."""

    executor: Annotated[
        str,
        typer.Option(
            metavar="local|ray",
            rich_help_panel=_RAY,
            help="local: engines on this machine. ray: on the nodes of a Ray cluster.",
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_RAY,
            help="With --executor ray: the cluster. Default: RAY_ADDRESS, or a cluster of this machine alone.",
        ),
    ] = None
    pair_nodes: Annotated[
        str | None,
        typer.Option(
            metavar="same|different|any",
            rich_help_panel=_RAY,
            help="With --executor ray: whether P and D share a node. Default: any.",
        ),
    ] = None


_RECORDED = ("profile", "cell", "scenario", "quick", "out", "prepare_first", "mutant", "together", "witness")
"""Options that ``--resume`` takes from the recorded run."""


def run_command(
    context: typer.Context,
    *,
    of: QuickSelection,
    engines: EngineOptions,
    base_port: BasePortOption = None,
    servers: ServerOptions,
    prepare_first: Annotated[
        bool,
        typer.Option(
            "--prepare",
            help="First make what the profile lacks: download its models, build its prompts, record its baselines.",
        ),
    ] = False,
    mutant: MutantOption = None,
    together: Annotated[bool, typer.Option("--together", help="Allow several injected faults at once.")] = False,
    witness: Annotated[
        bool | None,
        typer.Option(
            "--witness/--no-witness",
            help="Note what the engines' KV caches hold, by layer and head, and judge it (docs/kv-witness.md), "
            "whatever the profile says.",
        ),
    ] = None,
    fail_fast: Annotated[
        bool,
        typer.Option("--fail-fast", help="Start no further engines after those of the first cell with a regression."),
    ] = False,
    strict: StrictOption = False,
    part: Annotated[
        bool,
        typer.Option(
            "--part",
            help="Record a part of a run that `harness merge` will judge: exit with 0 when everything was recorded, "
            "whatever the verdict, and with 2 when something is missing and a retry may help.",
        ),
    ] = False,
    ray: RayOptions,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            autocompletion=completion.runs,
            help="Resume a killed or interrupted run in its folder; incomplete cells start over. Refused when the "
            "profile, prompts, models, versions or hardware differ from the recorded ones.",
        ),
    ] = None,
) -> None:
    """Run the matrix on real engines, judge it, write the reports, print the verdict."""
    if part and mutant:
        raise UsageError(
            "--part and --mutant exclude each other, since the parts of a run test vLLM as it is; leave one out"
        )
    if part and fail_fast:
        raise UsageError(
            "--part and --fail-fast exclude each other, since a part is complete or repeated; leave one out"
        )
    if resume is not None and fail_fast:
        raise UsageError(
            "--resume and --fail-fast exclude each other, since what is left is run to its end; leave one out"
        )
    if resume is not None:
        _require_recorded(context)
        require_run(resume)
    chosen = of.chosen()
    from harness.commands.run import execute
    from harness.engines.environment import engines_for
    from harness.engines.executor import ExecutorChoice, make_executor
    from harness.mutants.install import require_alone
    from harness.runner.options import RunOptions
    from harness.runner.run import require_free
    from harness.workload.prepare import prepare

    require_alone(mutant or [], together)
    choice = ExecutorChoice(*ray)
    flags = engines.flags()
    if resume is not None:
        _resume(resume, engines, choice, base_port, part, strict)
    servers.require_whole()
    if prepare_first:
        from harness.commands.prepare_profile import make_missing

        make_missing(chosen.profile, _say, engines.engine_python, attached=bool(servers.urls))
    prepared = prepare(*chosen.names, running=bool(servers.urls))
    prepared = _witnessed(prepared, witness, servers, choice)
    require_free(prepared, flags)
    executor: Executor = make_executor(choice, mutant or [], base_port)
    if servers.urls:
        given = {
            "--engine-python": engines.engine_python,
            "--engine-arg": engines.engine_arg,
            "--engine-env": engines.engine_env,
            "--prefill-python": engines.prefill_python,
            "--mutant": mutant,
            "--witness": witness,
            "--base-port": base_port,
            "--executor": None if ray.executor == "local" else ray.executor,
        }
        executor = _attached(prepared, servers, [option for option, value in given.items() if value])
        environment = executor.environment(prepared.profile)
        started = "servers that run already"
    else:
        environment = engines_for(prepared.profile, prepared.plan, engines.engine_python, flags)
        started = counted(prepared.plan.engines, "engine start")
    options = RunOptions(
        engines.engine_python, executor, tuple(mutant or ()), together, flags=flags, environment=environment
    )
    what = f"{counted(len(prepared.plan.cells), 'cell')}, {started}"

    def record(reporter: Reporter) -> Outcome:
        return execute(prepared, engines.out, reporter, options, fail_fast)

    carry_out(executor, _apart(choice), prepared, what, record, part, strict)


def _say(words: str) -> None:
    typer.echo(f"harness: {words}", err=True)


def _witnessed(prepared: Prepared, asked: bool | None, servers: ServerOptions, choice: ExecutorChoice) -> Prepared:
    """Return it with the engines' KV caches watched, or not. Servers that run already write their notes where they were
    told to, and engines on other machines write them there."""
    if servers.urls:
        return prepared.witnessing("kv" if servers.witness_notes else "off")
    if asked is None and choice.name != "local":
        return prepared.witnessing("off")
    return prepared if asked is None else prepared.witnessing("kv" if asked else "off")


def _attached(prepared: Prepared, servers: ServerOptions, given: Sequence[str]) -> AttachedExecutor:
    """Return an executor with servers already running.

    Raises UsageError for options about engines that are started, a key that is not set, servers that do not answer, and
    cells that they cannot answer.
    """
    from harness.engines.attached import AttachedExecutor, look_at, look_at_router

    if given:
        raise UsageError(
            f"{', '.join(given)}: a server whose address is given runs as it was started; leave "
            f"{'it' if len(given) == 1 else 'them'} out"
        )
    key = key_in(servers.key_variable)
    found = {
        role: look_at(role, url, key, servers.model)._replace(notes=servers.witness_notes)
        for role, url in servers.urls.items()
    }
    pair = [server for role, server in found.items() if role != "single"]
    router = look_at_router(servers.router, key, pair, servers.model) if servers.router is not None else None
    executor = AttachedExecutor(found, router)
    executor.require_fit(prepared.plan, prepared.profile, prepared.works)
    return executor


def carry_out(
    executor: Executor,
    tell: Tell,
    work: Prepared,
    what: str,
    record: Callable[[Reporter], Outcome],
    part: bool,
    strict: bool = False,
) -> NoReturn:
    """Record and judge with an executor, print the summary, and exit accordingly."""
    from harness.util.progress import Reporter

    with executor:
        with Reporter(work.expected_s, starts_s=work.starts_s) as reporter:
            reporter.line(f"{what}, {counted(work.requests, 'request')}, about {lasting(work.expected_s)}")
            for sentence in on_trust(executor, work):
                reporter.line(sentence)
            warn_of_disturbance(reporter, executor)
            outcome = record(reporter)
        _end(outcome._replace(summary=outcome.summary._replace(strict=strict)), part, tell)


def on_trust(executor: Executor | None, work: Prepared) -> list[str]:
    """Return what is taken on trust of servers that run already."""
    from harness.engines.attached import AttachedExecutor

    return executor.on_trust(work.plan, work.profile) if isinstance(executor, AttachedExecutor) else []


def warn_of_disturbance(reporter: Reporter, executor: Executor) -> None:
    """Say what on this machine will disturb the engines that are started on it."""
    from harness.engines.attached import AttachedExecutor
    from harness.supervision.orphans import left_over
    from harness.util.machine import others_at_work

    if isinstance(executor, AttachedExecutor):
        return
    for warning in filter(None, (left_over(), others_at_work())):
        reporter.line(warning)


def _apart(choice: ExecutorChoice) -> Tell:
    """Go on in a process of its own where Ray could end this one."""
    from harness.supervision.run_in_child import continue_in_child

    return continue_in_child("the run on Ray") if choice.name == "ray" else lambda _: None


def _require_recorded(context: typer.Context) -> None:
    """Raise UsageError when an option is given that a run to resume determines."""
    given = [option for name, option in options_given(context).items() if name in _RECORDED]
    if given:
        raise UsageError(
            f"--resume takes {', '.join(given)} from the recorded run; leave {'it' if len(given) == 1 else 'them'} out"
        )


def _resume(
    run_dir: Path, engines: EngineOptions, choice: ExecutorChoice, base_port: int | None, part: bool, strict: bool
) -> NoReturn:
    from harness.commands.resume import prepare_resume, resume
    from harness.engines.executor import make_executor
    from harness.engines.flags import require_same_flags
    from harness.runner.options import RunOptions

    flags = engines.flags()
    left = prepare_resume(run_dir)
    require_same_flags(left.history.run.engine_flags, flags, left.history.run.run_id)
    if left.history.run.attached:
        raise UsageError("--resume: a run of servers that ran already cannot be resumed; ask them anew")
    chosen = make_executor(choice, list(left.history.run.mutants), base_port)
    what = f"resuming {left.history.run.run_id}: {len(left.again)} of {counted(len(left.history.run.cells), 'cell')}"
    how = RunOptions(engines.engine_python, chosen, flags=flags)
    carry_out(chosen, _apart(choice), left.rest, what, lambda reporter: resume(left, reporter, how), part, strict)


def _end(outcome: Outcome, part: bool, tell: Tell) -> NoReturn:
    from harness.reports.terminal import print_summary

    print_summary(outcome.summary, make_console())
    code = _exit_of_part(outcome.folder) if part else outcome.summary.exit_code
    tell(code)
    raise typer.Exit(code)


def _exit_of_part(folder: Path) -> int:
    """Print what is missing in a run and return the exit code of ``--part``: 0 when nothing is, 2 otherwise."""
    from harness.commands.missing_evidence import missing_evidence
    from harness.history.folder import load_history

    missing = missing_evidence(load_history(folder))
    for why in missing:
        print(f"not recorded: {why}")
    if not missing:
        print("part: everything was recorded; `harness merge` judges it together with the other parts")
    return EXIT_UNKNOWN if missing else EXIT_PASS


def fuzz_command(
    *,
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    minutes: Annotated[
        float, typer.Option(metavar="N", min=0.1, max=1440, help="About how long it takes; a day at most.")
    ] = 5,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same seed gives the same traces.")] = 0,
    engines: EngineOptions,
) -> None:
    """Send random traces: requests that share prefixes, overlap, outgrow the KV pool and are given up.

    Judged like any run: every answer by its tokens, acceptance and log-probs, and the engines by whether they give all
    KV blocks back. The traces are written as a profile beside the run: `harness run --profile` repeats them, and
    `harness repro --shrink` makes a finding smaller.
    """
    from harness.commands.fuzz import prepare_fuzz
    from harness.commands.run import execute
    from harness.engines.executor import ExecutorChoice, make_executor
    from harness.runner.options import RunOptions

    prepared = prepare_fuzz(profile, cell or [], seed, minutes, engines.out)
    executor = make_executor(ExecutorChoice("local", None, None), [], None)
    options = RunOptions(engines.engine_python, executor, flags=engines.flags_for(prepared))
    traces = f"{counted(len(prepared.profile.scenarios), 'trace')} of seed {seed}"
    what = f"{traces}, {counted(len(prepared.plan.cells), 'cell')}"
    carry_out(
        executor, lambda _: None, prepared, what, lambda r: execute(prepared, engines.out, r, options), part=False
    )


def up_command(
    *,
    cell: Annotated[
        str, typer.Argument(metavar="CELL", help="The cell, e.g. pd-eagle3.", autocompletion=completion.cells)
    ],
    port: Annotated[
        int | None, typer.Option(metavar="PORT", min=1024, max=65535, help="Port to listen on. Default: a free one.")
    ] = None,
    profile: ProfileOption = "cpu",
    engines: EngineOptions,
) -> None:
    """Serve a cell's engines behind one OpenAI-compatible address until Ctrl-C.

    The router is vllm-router, without retries. One request is sent through it first, and D's counters tell whether KV
    moved. The exit code is 2 when they do not prove it.
    """
    from harness.commands.serve import asking, bring_up, prepare_cell
    from harness.util.progress import Reporter

    prepared = prepare_cell(profile, cell)
    flags = engines.flags_for(prepared)
    proven: list[bool] = []

    def serve(address: Address) -> None:
        proof = address.proof
        proven.append(proof.good)
        for role, url in address.engines.items():
            print(f"{role} engine: {url}")
        print(f"example: {address.example}")
        print(address.key)
        print(f"matrix: {shlex.join(asking(prepared, profile, address))}")
        print(proof.sentence)
        print(f"address: {address.url}/v1 (until Ctrl-C)", flush=True)
        if proof.answered:
            reporter.rest()
            signal.pause()

    with Reporter(prepared.expected_s) as reporter:
        try:
            bring_up(prepared, engines.out, engines.engine_python, port, reporter, serve, flags)
        except KeyboardInterrupt:
            reporter.line("engines and router have stopped")
    raise typer.Exit(0 if proven and all(proven) else EXIT_UNKNOWN)
