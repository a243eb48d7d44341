"""Options and arguments that several commands share, and the console that they print to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from harness.cli import completion
from harness.errors import UsageError
from harness.history.layout import require_run
from harness.util.choices import named
from harness.util.paths import DEFAULT_OUT
from harness.util.text import harmless, listed

if TYPE_CHECKING:
    from harness.engines.api_key import ApiKey
    from harness.engines.flags import EngineFlags
    from harness.workload.prepare import Prepared

LATEST = DEFAULT_OUT / "latest"
"""The newest run: what commands read that are given none."""

ENGINES = "Engines"
"""The panel of the options about the engines that are started."""


def _profile(context: typer.Context, value: str) -> str:
    """Return the profile as it is spelt. Raises ProfileError unless there is one, before anything that takes seconds is
    imported."""
    if context.resilient_parsing:
        return value
    from harness.profiles.load import require_profile

    return require_profile(value)


def _faults(context: typer.Context, value: list[str] | None) -> list[str] | None:
    """Return the faults as they are called. Raises UsageError for one that there is not."""
    if not value or context.resilient_parsing:
        return value
    from harness.mutants.catalogue import MUTANTS

    return [named("--mutant", fault, list(MUTANTS), "fault", "harness list faults") for fault in value]


def _run(context: typer.Context, value: Path) -> Path:
    """Raise NotARunError unless a folder has a recorded run."""
    if not context.resilient_parsing:
        require_run(value)
    return value


def folder_alone(context: typer.Context, value: Path | None) -> Path | None:
    """Raise UsageError for what is, or looks like, the file of a report where a folder is meant."""
    if value is not None and not context.resilient_parsing and (value.suffix.lower() == ".html" or value.is_file()):
        raise UsageError(f"--out {value}: this is the name of a file; name the folder to write into")
    return value


def reports_folder(context: typer.Context, value: Path | None) -> Path | None:
    """Raise UsageError as ``folder_alone`` does, and for a folder that lies in none."""
    value = folder_alone(context, value)
    if value is not None and not context.resilient_parsing and not value.absolute().parent.is_dir():
        raise UsageError(f"--out {value}: there is no folder {value.absolute().parent}; make it, or name another one")
    return value


def _fault_option(words: str) -> Any:
    return typer.Option(
        "--mutant", "--fault", "-m", metavar="FAULT", callback=_faults, autocompletion=completion.faults, help=words
    )


def _run_argument(show_default: str | bool = True) -> Any:
    return typer.Argument(
        metavar="RUN_DIR",
        help="A recorded run.",
        show_default=show_default,
        callback=_run,
        autocompletion=completion.runs,
    )


_PROFILE_HELP = "A shipped profile (`harness list profiles`) or the path of a YAML file."
ProfileOption = Annotated[
    str, typer.Option("--profile", "-p", callback=_profile, autocompletion=completion.profiles, help=_PROFILE_HELP)
]
QuickProfileOption = Annotated[
    str, typer.Option("--profile", "-p", autocompletion=completion.profiles, help=_PROFILE_HELP)
]
"""The profile beside ``--quick``, which may be there in its quick form alone; ``chosen_profile`` checks it."""
CellOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cell",
        "-c",
        metavar="PATTERN",
        autocompletion=completion.cells,
        help="Only cells that match, e.g. 'pd-*'. Repeatable.",
    ),
]
ScenarioOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        "-s",
        metavar="PATTERN",
        autocompletion=completion.scenarios,
        help="Only scenarios that match, e.g. cold or 'prefix-*'. Repeatable.",
    ),
]
MutantOption = Annotated[
    list[str] | None,
    _fault_option(
        "Inject this fault (`harness list faults`), e.g. M1. Such a run says so everywhere, and never passes."
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Exit with 1 for expected failures (KNOWN), too.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON (docs/command-line.md) and nothing else on standard output.")
]
QuickOption = Annotated[
    bool,
    typer.Option("--quick", help="Use the profile's quick form, e.g. cpu-quick for cpu: a first answer in minutes."),
]
OutOption = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        show_default=False,
        callback=folder_alone,
        help="Folder for runs. Default: reports/ of the project.",
    ),
]
ReportsOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        callback=reports_folder,
        help="Folder to write into, which is made if it is missing. Default: that of the run or runs.",
    ),
]
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--engine-python",
        metavar="PYTHON",
        rich_help_panel=ENGINES,
        help="Interpreter whose vLLM is tested. Default: the one that runs harness.",
    ),
]
PrefillPythonOption = Annotated[
    str | None,
    typer.Option(
        "--prefill-python",
        metavar="PYTHON",
        rich_help_panel=ENGINES,
        help="Interpreter whose vLLM P is, such as the one before an upgrade. Default: that of the other engines.",
    ),
]
EngineArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="[ROLE:]--NAME[=VALUE]",
        rich_help_panel=ENGINES,
        help="Add this argument to the engines, or to those of a role: prefill:, decode: or single:. Repeatable.",
    ),
]
EngineEnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-env",
        metavar="[ROLE:]NAME=VALUE",
        rich_help_panel=ENGINES,
        help="Set this environment variable for the engines, or for those of a role. Repeatable.",
    ),
]
BasePortOption = Annotated[
    int | None,
    typer.Option(
        "--base-port",
        metavar="PORT",
        rich_help_panel=ENGINES,
        min=1024,
        max=65000,
        help="Use consecutive ports from here. Default: any free ports.",
    ),
]
ATTACH = "Servers already running"
"""The panel of the options about servers that are asked and not started."""
KeyVariableOption = Annotated[
    str | None,
    typer.Option(
        "--key-variable",
        metavar="NAME",
        rich_help_panel=ATTACH,
        help="Environment variable with the key of these servers.",
    ),
]
ServedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        rich_help_panel=ATTACH,
        help="The model to ask for, where a server lists several, such as LoRA adapters.",
    ),
]

RunDir = Annotated[Path, _run_argument("reports/latest")]
GivenRunDir = Annotated[Path, _run_argument()]
"""Where the latest run must not be meant by accident."""
OnlyMutantOption = Annotated[
    list[str] | None,
    _fault_option("Only this fault (`harness list faults`), e.g. M1. Repeatable; each is injected alone."),
]
FaultsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FAULT",
        callback=_faults,
        autocompletion=completion.faults,
        show_default=False,
        help="Only these faults, as with --mutant.",
    ),
]
BaselinesOption = Annotated[
    Path | None,
    typer.Option(
        "--baselines", metavar="DIR", help="Compare with the baselines in this folder instead of the profile's."
    ),
]
BaselinesFolderOption = Annotated[
    Path | None, typer.Option("--baselines", metavar="DIR", help="Folder to write to. Default: the profile's.")
]
KnownOption = Annotated[
    Path | None,
    typer.Option("--known", metavar="FILE", help="Read the expected failures from this file, not the profile's list."),
]


class Selection(NamedTuple):
    """What a command is about: cells and scenarios of a profile."""

    profile: ProfileOption = "cpu"
    cell: CellOption = None
    scenario: ScenarioOption = None

    @property
    def names(self) -> tuple[str, list[str], list[str]]:
        """The profile, and the patterns of cells and of scenarios."""
        return self.profile, self.cell or [], self.scenario or []


class QuickSelection(NamedTuple):
    """The same where the profile's quick form can be asked for."""

    profile: QuickProfileOption = "cpu"
    cell: CellOption = None
    scenario: ScenarioOption = None
    quick: QuickOption = False

    def chosen(self) -> Selection:
        """Return it with the form of the profile that is meant. Raises ProfileError or UsageError without one."""
        return Selection(chosen_profile(self.profile, self.quick), self.cell, self.scenario)


class EngineOptions(NamedTuple):
    """Which engines are started, and where what they say is recorded."""

    out: OutOption = DEFAULT_OUT
    engine_python: PythonOption = None
    engine_arg: EngineArgOption = None
    engine_env: EngineEnvOption = None
    prefill_python: PrefillPythonOption = None

    def flags(self) -> EngineFlags:
        """Return what is added to engines. Raises UsageError for an argument or a variable that is neither."""
        from harness.engines.flags import parse_flags

        return parse_flags(self.engine_arg or [], self.engine_env or [], self.prefill_python)

    def flags_for(self, prepared: Prepared) -> EngineFlags:
        """Return them for a run. Raises UsageError also for what the harness itself sets."""
        from harness.runner.run import require_free

        flags = self.flags()
        require_free(prepared, flags)
        return flags


def chosen_profile(profile: str, quick: bool) -> str:
    """Return the profile or its quick form. Raises ProfileError or UsageError when there is no such profile."""
    from harness.profiles.load import require_profile

    if quick:
        return quick_form(profile)
    return require_profile(profile)


def options_given(context: typer.Context) -> dict[str, str]:
    """Return the options that are on the command line, by the name of their parameter, each as its help calls it."""
    # By name: typer carries a copy of click, whose enumeration of sources is not click's own.
    sources = {p.name: context.get_parameter_source(p.name) for p in context.command.params if p.name is not None}
    typed = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return {p.name: max(p.opts, key=len) for p in context.command.params if p.name in typed}


def refuse_ignored(context: typer.Context, of: Collection[str], why: str) -> None:
    """Raise UsageError, beginning with ``why``, for options on the command line that are not among ``of``, the
    parameters that count."""
    ignored = [option for name, option in options_given(context).items() if name not in of]
    if ignored:
        raise UsageError(
            f"{why}, so {listed(ignored, 'and')} would be ignored; leave {'it' if len(ignored) == 1 else 'them'} out"
        )


def refuse_without_servers(given: Mapping[str, object], how: str) -> None:
    """Raise UsageError for options about servers that run already, where none is named; ``how`` names one."""
    for option in (option for option, value in given.items() if value is not None):
        raise UsageError(f"{option} is for servers that run already; name them ({how}), or leave it out")


def key_in(variable: str | None) -> ApiKey | None:
    """Return the key in an environment variable; None without one. Raises UsageError when it is not set."""
    from harness.engines.api_key import ApiKey

    if variable is not None and not os.environ.get(variable):
        raise UsageError(f"--key-variable {variable}: this variable is not set; put the key of the servers into it")
    return ApiKey(os.environ[variable]) if variable is not None else None


def quick_form(profile: str) -> str:
    """Return the name or path of the quick form of a profile, which has ``-quick`` behind its name.

    Raises UsageError when there is none.
    """
    from harness.profiles.load import shipped_profile_names

    path = Path(profile)
    quick = str(path.with_stem(f"{path.stem}-quick"))
    if quick not in shipped_profile_names() and not Path(quick).is_file():
        raise UsageError(
            f"--quick: profile {profile} has no quick form ({quick}); write one that extends it (docs/profiles.md), "
            "or leave --quick out"
        )
    return quick


class _HarmlessConsole(Console):
    """A console on which recorded text obeys nothing: colours come from styles, never from the text itself."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def print_json(value: Any) -> None:
    """Print a value as JSON, in ASCII, so that no text of a recorded run reaches a terminal as it is."""
    print(json.dumps(value, indent=2, allow_nan=False))


_NARROWEST = 20
"""Fewest columns that a table is made for."""


def make_console(width: int = 160, file: IO[str] | None = None) -> Console:
    """Return a console for results, on standard output unless ``file`` is given: in a file or a pipe as wide as COLUMNS
    says, or else ``width`` columns.

    There rich would assume 80 columns, which is too narrow for the tables.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) >= _NARROWEST:
        width = int(columns)
    return _HarmlessConsole(file=file, width=None if (file or sys.stdout).isatty() else width)
