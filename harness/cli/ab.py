"""``harness ab``."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.options import (
    EngineArgOption,
    EngineEnvOption,
    KeyVariableOption,
    OutOption,
    Selection,
    ServedModelOption,
    key_in,
    make_console,
    refuse_without_servers,
)
from harness.errors import UsageError
from harness.util.paths import DEFAULT_OUT
from harness.util.text import counted


def ab_command(
    *,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="VLLM|URL",
            help="vLLM as it was: a version (0.30.0), a wheel, a commit of its main branch, an interpreter, or a "
            "single server without speculation that runs already. Default: the vLLM of this environment.",
        ),
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="VLLM", help="vLLM with the change. Default: that of --base.")
    ] = None,
    of: Selection,
    engine_arg: EngineArgOption = None,
    engine_env: EngineEnvOption = None,
    key_variable: KeyVariableOption = None,
    model: ServedModelOption = None,
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Did the change break it? Run the same cells on two vLLMs and judge the second by the first; needs no baseline.

    Arguments and variables are added to the engines of --head alone. The exit code is that of the worst finding that
    head has and base has not: 1 when it is a regression, 2 when that cannot be told, 0 when there is none.
    """
    from harness.engines.flags import NO_FLAGS, parse_flags

    flags = parse_flags(engine_arg or [], engine_env or [])
    addresses = ("http://", "https://")
    if head is not None and head.startswith(addresses):
        raise UsageError(
            f"--head {head} is the address of a server, which only --base can be; record servers with `harness run "
            "--single`, and compare with `harness check --against`"
        )
    url = base is not None and base.startswith(addresses)
    if not url:
        refuse_without_servers({"--key-variable": key_variable, "--model": model}, "--base URL")
    if not url and (head is None or head == base) and flags == NO_FLAGS:
        raise UsageError(
            f"base and head are the same vLLM{f', {head}' if head else ''}: give another --head, or flags for head "
            "with --engine-arg or --engine-env; `harness aa` compares equal engines"
        )
    from harness.commands.ab import PAGE, attached, conclusion, record_both, started, with_references
    from harness.engines.builds import engine_python
    from harness.reports.across_runs import print_comparison
    from harness.runner.run import require_free
    from harness.util.progress import Reporter

    prepared = with_references(*of.names)
    require_free(prepared, flags)
    with Reporter(2 * prepared.expected_s, starts_s=2 * prepared.starts_s) as reporter:
        reporter.line(f"2 × {counted(len(prepared.plan.cells), 'cell')}, {counted(prepared.requests, 'request')} each")
        device = prepared.profile.engine.device
        if base is not None and url:
            before, base = attached(prepared, base, key_in(key_variable), model), None
        else:
            python = engine_python("--base", base, device, reporter.line) if base is not None else None
            before = started("base", prepared, python, NO_FLAGS)
        after = head or base
        python = engine_python("--head", after, device, reporter.line) if after is not None else None
        comparison, folder = record_both(
            prepared.profile, (before, started("head", prepared, python, flags)), out, reporter
        )
    console = make_console()
    print_comparison(comparison, console)
    verdict, why = conclusion(comparison)
    console.print(f"{verdict.symbol} {verdict}  {why}", highlight=False, markup=False)
    console.print(f"report: {folder / PAGE}", soft_wrap=True, highlight=False)
    raise typer.Exit(verdict.exit_code)
