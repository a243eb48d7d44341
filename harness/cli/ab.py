"""``harness ab``."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.options import (
    CellOption,
    EngineArgOption,
    EngineEnvOption,
    OutOption,
    ProfileOption,
    ScenarioOption,
    make_console,
)
from harness.errors import UsageError
from harness.util.text import counted


def ab_command(
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="VLLM",
            help="vLLM as it was: a version (0.30.0), a wheel, a commit of its main branch, or an interpreter. "
            "Default: the own one.",
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="VLLM", help="vLLM with the change. Default: that of --base."),
    ] = None,
    profile: ProfileOption = "cpu",
    cell: CellOption = None,
    scenario: ScenarioOption = None,
    engine_arg: EngineArgOption = None,
    engine_env: EngineEnvOption = None,
    out: OutOption = None,
) -> None:
    """Did the change break it? Run the same cells on two vLLMs and judge the second by the first; needs no baseline.

    Arguments and variables are added to the engines of --head alone. The exit code is that of the worst finding that
    head has and base has not: 1 when it is a regression, 2 when that cannot be told, 0 when there is none.
    """
    from harness.engines.flags import NO_FLAGS, parse_flags

    flags = parse_flags(engine_arg or [], engine_env or [])
    if (head is None or head == base) and flags == NO_FLAGS:
        raise UsageError(
            "expected --head, or --engine-arg or --engine-env, found nothing that tells head from base; "
            "`harness aa` compares equal engines"
        )
    from harness.commands.ab import PAGE, Side, conclusion, record_both, with_references
    from harness.commands.bisect.environments import engine_python
    from harness.reports.beyond import print_comparison
    from harness.runner.run import require_free
    from harness.util.paths import DEFAULT_OUT
    from harness.util.progress import Reporter

    prepared = with_references(profile, cell or [], scenario or [])
    require_free(prepared, flags)
    seconds = 2 * prepared.expected_s
    with Reporter(seconds) as reporter:
        reporter.line(f"2 × {counted(len(prepared.plan.cells), 'cell')}, {counted(prepared.requests, 'request')} each")
        device = prepared.profile.engine.device
        before, after = (
            None if text is None else engine_python(option, text, device, reporter.line)
            for option, text in (("--base", base), ("--head", head or base))
        )
        sides = (Side("base", before, NO_FLAGS), Side("head", after, flags))
        comparison, folder = record_both(prepared, sides, out or DEFAULT_OUT, reporter)
    console = make_console()
    print_comparison(comparison, console)
    verdict, why = conclusion(comparison)
    console.print(f"{verdict.symbol} {verdict}  {why}", highlight=False, markup=False)
    console.print(f"report: {folder / PAGE}", soft_wrap=True, highlight=False)
    raise typer.Exit(verdict.exit_code)
