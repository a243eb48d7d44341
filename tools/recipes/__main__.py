"""Usage: python -m tools.recipes [scenario] [check] [mutant]

Walks the recipes in copies of the checkout and prints what they cost. The exit code is 1 if nobody names a place, or if
more files change than may.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.util.paths import REPOSITORY
from tools.recipes.check import CHECK
from tools.recipes.mutant import MUTANT
from tools.recipes.places import Renewed
from tools.recipes.scenario import SCENARIO
from tools.recipes.walk import Recipe, Step, Walk, complaints_of_tools, copy_of, walk

RECIPES = {recipe.name: recipe for recipe in (SCENARIO, CHECK, MUTANT)}
HEADER = (
    "| recipe | files to edit | places | named by mypy | by ruff | by tests | by nobody | files renewed by commands |"
)


def walked(recipes: Iterable[Recipe]) -> Iterator[Walk]:
    """Walk the recipes, each in a copy of the checkout. Raises ValueError as ``walk`` does."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        complaints = complaints_of_tools(folder / "mypy")
        for recipe in recipes:
            yield walk(recipe, copy_of(REPOSITORY, folder / recipe.name), complaints)


def table(walks: Iterable[Walk]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [HEADER, "|---" * HEADER.count(" | ") + "|---|"]
    for one in walks:
        by = [s.named_by.tool for s in one.steps if s.named_by is not None]
        counts = (by.count(tool) for tool in ("mypy", "ruff", "tests"))
        cells = [one.recipe.name, len(one.edited), len(one.steps), *counts, len(one.unnamed), len(one.renewed)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def told(one: Walk) -> str:
    """Return the walk step by step."""
    lines = [f"{one.recipe.name}:"]
    for number, step in enumerate(one.steps):
        place = step.place
        where = place.command if isinstance(place, Renewed) else ", ".join(step.files)
        lines.append(f"  {where}: {place.what}\n    {_reason(number, step)}")
    return "\n".join(lines)


def _reason(number: int, step: Step) -> str:
    if step.named_by is not None:
        return f"{step.named_by.tool}: {step.named_by.line}"
    return "NAMED BY NOBODY" if number else "where a person begins"


def main(names: list[str]) -> int:
    """Walk the recipes with these names, or all, and print what they cost. Return the exit code."""
    if unknown := set(names) - RECIPES.keys():
        print(f"expected recipes among {', '.join(RECIPES)}, found {', '.join(sorted(unknown))}", file=sys.stderr)
        return 64
    walks = []
    for one in walked(RECIPES[name] for name in names or RECIPES):
        print(told(one), end="\n\n", flush=True)
        walks.append(one)
    print(table(walks))
    return 0 if all(one.holds for one in walks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
