"""``harness up``."""

from __future__ import annotations

import shlex
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import completion
from harness.cli.options import EngineArgOption, EngineEnvOption, OutOption, ProfileOption, PythonOption, flags_for
from harness.errors import EXIT_UNKNOWN

if TYPE_CHECKING:
    from harness.commands.serve import Address


def up_command(
    cell: Annotated[
        str, typer.Argument(metavar="CELL", help="The cell, e.g. pd-eagle3.", autocompletion=completion.cells)
    ],
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="PORT", min=1024, max=65535, help="Port to listen on. Default: a free one."),
    ] = None,
    profile: ProfileOption = "cpu",
    out: OutOption = None,
    engine_python: PythonOption = None,
    engine_arg: EngineArgOption = None,
    engine_env: EngineEnvOption = None,
) -> None:
    """Serve a cell's engines behind one OpenAI-compatible address until Ctrl-C.

    The router is vllm-router, without retries. One request is sent through it first, and D's counters tell whether KV
    moved. The exit code is 2 when they do not prove it.
    """
    from harness.commands.serve import asking, bring_up, prepare_cell
    from harness.util.paths import DEFAULT_OUT
    from harness.util.progress import Reporter

    prepared = prepare_cell(profile, cell)
    flags = flags_for(prepared, engine_arg, engine_env)
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
            bring_up(prepared, out or DEFAULT_OUT, engine_python or sys.executable, port, reporter, serve, flags)
        except KeyboardInterrupt:
            reporter.line("engines and router have stopped")
    raise typer.Exit(0 if proven and all(proven) else EXIT_UNKNOWN)
