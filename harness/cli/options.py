"""Options and arguments that several commands share, and the console that they print to."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from harness.errors import UsageError
from harness.util.text import harmless

ProfileOption = Annotated[
    str, typer.Option("--profile", "-p", help="A shipped profile, e.g. 'cpu', or the path of a profile YAML file.")
]
CellOption = Annotated[
    list[str] | None,
    typer.Option("--cell", "-c", help="Select only cells that match this shell pattern, e.g. 'pd-*'. Repeatable."),
]
ScenarioOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        "-s",
        help="Select only scenarios that match this shell pattern, e.g. cold or 'prefix-*'. Repeatable. Default: all.",
    ),
]
QuickOption = Annotated[
    bool,
    typer.Option("--quick", help="Use the profile's quick form, e.g. cpu-quick for cpu: a first answer in minutes."),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for runs. Default: reports/ of the project.")]
PythonOption = Annotated[
    str | None,
    typer.Option("--engine-python", help="Interpreter whose vLLM is tested. Default: the one that runs harness."),
]
EngineArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="[ROLE:]--NAME[=VALUE]",
        help="Add this argument to the engines, or to those of a role: prefill:, decode: or single:. Repeatable.",
    ),
]
EngineEnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-env",
        metavar="[ROLE:]NAME=VALUE",
        help="Set this environment variable for the engines, or for those of a role. Repeatable.",
    ),
]
BasePortOption = Annotated[
    int | None,
    typer.Option("--base-port", min=1024, max=65000, help="Use consecutive ports from here. Default: any free ports."),
]

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A recorded run, e.g. reports/latest.")]
BaselinesOption = Annotated[
    Path | None,
    typer.Option("--baselines", help="Compare with the baselines in this folder instead of the profile's."),
]
BaselinesFolderOption = Annotated[
    Path | None, typer.Option("--baselines", help="Folder to write to. Default: the profile's.")
]
KnownOption = Annotated[
    Path | None, typer.Option("--known", help="Read the known defects from this file instead of the profile's list.")
]


def quick_form(profile: str) -> str:
    """Return the name or path of the quick form of a profile, which has ``-quick`` behind its name.

    Raises UsageError when there is none.
    """
    from harness.profiles.model import shipped_profile_names

    path = Path(profile)
    quick = str(path.with_stem(f"{path.stem}-quick"))
    if quick not in shipped_profile_names() and not Path(quick).is_file():
        raise UsageError(
            f"--quick: expected a quick form of the profile {profile}, found no {quick}; write one that extends it "
            "(docs/profiles.md), or leave --quick out"
        )
    return quick


class _HarmlessConsole(Console):
    """A console on which recorded text obeys nothing: colours come from styles, never from the text itself."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def make_console(width: int = 160) -> Console:
    """Return a console for results, ``width`` columns wide in a file or a pipe.

    There rich would assume 80 columns, which is too narrow for the tables.
    """
    return _HarmlessConsole(width=None if sys.stdout.isatty() else width)
