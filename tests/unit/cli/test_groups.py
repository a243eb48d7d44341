"""A parameter that stands for several options."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer
from typer.testing import CliRunner

from harness.cli.groups import with_groups


class Size(NamedTuple):
    width: Annotated[int, typer.Option(help="How wide.")]
    height: Annotated[int, typer.Option("--height", "-y", help="How high.")] = 2


def area(name: str, *, of: Size, loud: bool = False) -> None:
    """Say an area."""
    typer.echo(f"{name}: {of.width * of.height}{'!' if loud else ''}")


def said(*words: str) -> str:
    app = typer.Typer()
    app.command()(with_groups(area))
    return CliRunner().invoke(app, list(words)).output


def test_a_group_is_its_options_in_its_place():
    assert said("a", "--width", "3") == "a: 6\n"
    assert said("a", "--width", "3", "-y", "5", "--loud") == "a: 15!\n"
    text = said("--help")
    assert text.index("--width") < text.index("--height") < text.index("--loud")


def test_an_option_of_a_group_without_a_default_is_required():
    assert "Missing option '--width'" in said("a")


def test_a_command_without_groups_stays_as_it_is():
    assert with_groups(said) is said
