"""``harness fuzz``."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.options import (
    CellOption,
    EngineArgOption,
    EngineEnvOption,
    OutOption,
    ProfileOption,
    PythonOption,
    flags_for,
)
from harness.cli.run import carry_out
from harness.util.text import counted


def fuzz_command(
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    minutes: Annotated[float, typer.Option("--minutes", metavar="N", min=0.1, help="About how long it takes.")] = 5,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="The same seed gives the same traces.")] = 0,
    out: OutOption = None,
    engine_python: PythonOption = None,
    engine_arg: EngineArgOption = None,
    engine_env: EngineEnvOption = None,
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
    from harness.util.paths import DEFAULT_OUT

    folder = out or DEFAULT_OUT
    prepared = prepare_fuzz(profile, cell or [], seed, minutes, folder)
    executor = make_executor(ExecutorChoice("local", None, None), [], None)
    options = RunOptions(engine_python, executor, flags=flags_for(prepared, engine_arg, engine_env))
    carry_out(
        executor,
        lambda _: None,
        prepared,
        f"{counted(len(prepared.profile.scenarios), 'trace')} of seed {seed}, "
        f"{counted(len(prepared.plan.cells), 'cell')}",
        lambda reporter: execute(prepared, folder, reporter, options),
        part=False,
    )
