"""Entry point of ``python -m harness`` and ``harness``: the commands, and ``main``."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from harness.cli.ab import ab_command
from harness.cli.attach import attach_command
from harness.cli.baseline import baseline_app
from harness.cli.ci import ci_app
from harness.cli.help import HelpfulGroup, finish
from harness.cli.investigate import bisect_command, repro_command
from harness.cli.judge import check_command, merge_command, report_command, trend_command
from harness.cli.leftovers import clean_command, ps_command
from harness.cli.listing import list_app
from harness.cli.models import models_command, probe_app
from harness.cli.plan import doctor_command, init_command, plan_command
from harness.cli.prompts import prompts_app
from harness.cli.run import fuzz_command, run_command, up_command
from harness.cli.trust import aa_command, selftest_command, soak_command
from harness.errors import EXIT_UNKNOWN, EXIT_USAGE, HarnessError
from harness.util.debug_log import log_to_file, log_to_terminal
from harness.util.extras import why_missing
from harness.util.text import harmless
from harness.version import __version__

app = typer.Typer(
    name="harness",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Checks that speculative decoding and prefill/decode disaggregation still produce the right tokens and "
        "acceptance, on real vLLM engines with real NIXL transfers.\n\n"
        "Start with [bold]harness doctor[/bold], then [bold]harness run --quick[/bold].\n\n"
        "Exit codes: 0 PASS or KNOWN (only expected failures); 1 REGRESSION or DRIFT; 2 UNKNOWN (infrastructure failed "
        "or evidence is missing); 3 IMPROVED (needs a new baseline); 4 SUSPECT (failed once, not "
        "confirmed); 64 wrong usage or configuration."
    ),
    cls=HelpfulGroup,
)
_PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Run": {
        "run": run_command,
        "doctor": doctor_command,
        "plan": plan_command,
        "init": init_command,
        "attach": attach_command,
        "ab": ab_command,
        "fuzz": fuzz_command,
        "up": up_command,
    },
    "Judge": {"check": check_command, "report": report_command, "trend": trend_command, "merge": merge_command},
    "Investigate": {"repro": repro_command, "bisect": bisect_command},
    "Trust": {"selftest": selftest_command, "aa": aa_command, "soak": soak_command},
    "Data": {
        "list": list_app,
        "baseline": baseline_app,
        "prompts": prompts_app,
        "models": models_command,
        "probe": probe_app,
    },
    "Operate": {"ps": ps_command, "clean": clean_command, "ci": ci_app},
}
"""What ``harness --help`` shows, in this order. ``harness.cli.examples`` has the examples of each command."""
for _panel, _entries in _PANELS.items():
    for _name, _entry in _entries.items():
        if isinstance(_entry, typer.Typer):
            app.add_typer(_entry, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(_entry)
finish(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"harness {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Before the command: log requests, processes and waits to standard error, to debug the harness.",
        ),
    ] = False,
    log_file: Annotated[
        Path | None,
        typer.Option("--log-file", metavar="FILE", help="Before the command: append the same log to a file."),
    ] = None,
) -> None:
    if verbose:
        log_to_terminal()
    if log_file is not None:
        log_to_file(log_file)


_TYPER_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _interrupted() -> NoReturn:
    # A second signal during the exit must not cause a traceback.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    print("harness: interrupted; verdict UNKNOWN", file=sys.stderr)
    sys.exit(EXIT_UNKNOWN)


def _file_trouble(error: OSError) -> str:
    """Return an OSError in a sentence: of the system, or of a library that raises it for whatever it cannot load."""
    if error.strerror is None:
        return f"what the command needs cannot be read: {' '.join(str(error).split())[:400]}"
    if error.filename is None:
        return f"the output cannot be written: {error.strerror}"
    return (
        f"a file cannot be read or written ({error.strerror}: {error.filename}); choose a writable folder with free "
        "space"
    )


def _unread() -> NoReturn:
    """End as other programs do whose output nobody reads any more."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(EXIT_UNKNOWN)


def main(program: typer.Typer = app) -> None:
    """Run a command line; expected failures end as one sentence and an exit code, never as a traceback.

    ``program`` defaults to ``harness``; the tools beside the package in a checkout pass their own.
    """
    # click exits with 2 on a usage error, which means UNKNOWN here. Recent versions of typer carry a copy of click, so
    # that what they raise is not a click.exceptions.UsageError; BadParameter's base is the public way to their class.
    usage_error: Any = typer.BadParameter.__base__
    usage_error.exit_code = EXIT_USAGE
    # SIGTERM and a closed terminal must stop the engines as Ctrl-C does, and a shell may have started us with SIGINT
    # ignored.
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _run(program)
    except BrokenPipeError:
        _unread()
    except Exception:
        # Python's own exit code for it is that of a REGRESSION.
        with contextlib.suppress(OSError):
            traceback.print_exc()
        sys.exit(EXIT_UNKNOWN)


def _run(program: typer.Typer) -> None:
    try:
        try:
            program()
        finally:
            print(end="", flush=True)
    except HarnessError as error:
        print(harmless(f"harness: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        lacking = why_missing(error.name or "")
        if lacking is None:
            raise
        print(f"harness: {lacking}", file=sys.stderr)
        sys.exit(EXIT_UNKNOWN)
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as end:
        # typer turns an interrupt into this exit code without a message.
        if end.code == _TYPER_INTERRUPTED:
            _interrupted()
        # It also exits with 1, which means REGRESSION here, when nobody reads the output, and after an EOFError.
        if isinstance(end.__context__, BrokenPipeError | typer.Abort):
            raise end.__context__ from None
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        print(harmless(f"harness: {_file_trouble(error)}"), file=sys.stderr)
        if error.strerror is None or error.filename is not None:
            sys.exit(EXIT_USAGE)
        # What could not be written must not be tried again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_UNKNOWN)
