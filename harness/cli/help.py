"""How help texts look: panels, examples, one paragraph per thought, no type where a name says more."""

from __future__ import annotations

import inspect
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from harness.cli.examples import EXAMPLES
from harness.cli.groups import with_groups


def paragraphs(text: str) -> str:
    """Return a docstring with one line per paragraph, so that a terminal of any width wraps it."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def epilog(name: str) -> str:
    """Return the examples of a command, by its full name, e.g. ``baseline record``."""
    parts = [line.partition("  # ") for line in EXAMPLES[name]]
    width = max(len(command) for command, remark, _ in parts if remark) if any(r for _, r, _ in parts) else 0
    lines = [f"{command:<{width}}{remark}{what}" if remark else command for command, remark, what in parts]
    return "\n".join(["[bold]Examples[/bold]", *(f"harness {escape(line)}" for line in lines)])


def _named(parameters: list[Any]) -> list[Any]:
    """Show what an option takes by its name, as ``--seed SEED``, and nothing behind one that takes nothing."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            # Its name says what it is; recent versions of typer write its Python type beside it.
            setattr(parameter, "display_type_rich", lambda ctx: None)  # noqa: B010
        elif getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.metavar is None:
            parameter.metavar = parameter.opts[0].lstrip("-").upper()
    return parameters


def _plain(message: str) -> str:
    """Return an error in a value in the words of this program: recent versions of typer read values by pydantic."""
    message = message.removeprefix("Value error, ").partition(", unable to parse ")[0]
    return message.replace("Input should be a ", "expected a ").replace("Input should be ", "expected a value ")


class HelpfulCommand(TyperCommand):
    """A command whose help names what its options take, and which says in plain words what they do not take."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _plain(error.message)
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        return _named(super().get_params(ctx))


_ALIASES = {"mutants": "faults", "mutant": "faults"}
"""Other names of commands, which their groups do not list."""


class HelpfulGroup(TyperGroup):
    """The same for a group of commands. ``harness help run`` is ``harness run --help``."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"] and "help" not in self.commands:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return _named(super().get_params(ctx))


def finish(app: typer.Typer, prefix: str = "") -> None:
    """Give each command of an application, and of the groups in it, the options of its groups of options, its examples
    and its docstring in paragraphs."""
    for group in app.registered_groups:
        if group.typer_instance is not None:
            finish(group.typer_instance, f"{prefix}{group.name} ")
    for command in app.registered_commands:
        assert command.name is not None and command.callback is not None
        command.callback = with_groups(command.callback)
        command.cls = HelpfulCommand
        command.help = paragraphs(command.callback.__doc__ or "")
        command.epilog = epilog(prefix + command.name)
