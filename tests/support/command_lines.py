"""Command lines that are read by the program's own parser and not carried out."""

from __future__ import annotations

import typer

from harness.cli.app import app

ROOT = typer.main.get_command(app)


def parsed(words: list[str]):
    """Let the program read a command line without carrying it out."""
    context = ROOT.make_context("harness", words, resilient_parsing=False)
    group, left = ROOT, words
    while hasattr(group, "commands"):
        name, group, left = group.resolve_command(context, left)
        context = group.make_context(name, left, parent=context)
    return context
