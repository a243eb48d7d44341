"""Walks a recipe in a copy of the checkout: which of its places tools name, and which nobody does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.recipes.places import Place, Renewed, surroundings

_FAILED = re.compile(r"^(?:FAILED|ERROR) .*", re.MULTILINE)
_MYPY = re.compile(r"^.*: error: .*", re.MULTILINE)
_RUFF = re.compile(r"^\S+:\d+:\d+: .*", re.MULTILINE)


class Recipe(NamedTuple):
    """An addition: its places, the one that a person begins with first, and the tests that are run after each."""

    name: str
    places: tuple[Place, ...]
    tests: tuple[str, ...]
    most_files: int
    """How many files a person may have to edit."""
    most_renewed: int
    """How many files commands may renew."""


class Complaint(NamedTuple):
    """A line in which a tool says that something is wrong."""

    tool: str
    line: str


class Step(NamedTuple):
    """A place that was changed."""

    place: Place
    files: tuple[str, ...]
    named_by: Complaint | None
    """None for the place that a person begins with, and for one that no tool named."""


class Walk(NamedTuple):
    """A recipe that was walked."""

    recipe: Recipe
    steps: tuple[Step, ...]

    @property
    def edited(self) -> tuple[str, ...]:
        """The files that a person edits."""
        return tuple(sorted({f for s in self.steps if not isinstance(s.place, Renewed) for f in s.files}))

    @property
    def renewed(self) -> tuple[str, ...]:
        """The files that commands renew."""
        return tuple(sorted({f for s in self.steps if isinstance(s.place, Renewed) for f in s.files}))

    @property
    def unnamed(self) -> tuple[Step, ...]:
        """The places that nobody names, but for the first one."""
        return tuple(s for s in self.steps[1:] if s.named_by is None)

    @property
    def holds(self) -> bool:
        """Whether every place is named, and no more files change than should."""
        few = len(self.edited) <= self.recipe.most_files and len(self.renewed) <= self.recipe.most_renewed
        return few and not self.unnamed


Complaints = Callable[[Path, Recipe], Sequence[Complaint]]
"""Runs the tools in a copy of the checkout."""


def walk(recipe: Recipe, root: Path, complaints: Complaints) -> Walk:
    """Put the places of a recipe into the checkout ``root`` in the order in which tools name them.

    Complaints from before the first place do not count. Raises ValueError if there are others when all places are
    there: then the addition has places that the recipe does not list.
    """
    before = set(complaints(root, recipe))
    steps = [Step(recipe.places[0], recipe.places[0].put(root), None)]
    left = list(recipe.places[1:])
    while left:
        named = _named(left, [c for c in complaints(root, recipe) if c not in before])
        # When nobody names anything more, the rest is put there at once.
        for place, complaint in named or [(place, None) for place in left]:
            steps.append(Step(place, place.put(root), complaint))
            left.remove(place)
    if unheard := [f"  {c.tool}: {c.line}" for c in complaints(root, recipe) if c not in before]:
        raise ValueError("\n".join([f"{recipe.name}: expected no complaint with all places there, found", *unheard]))
    return Walk(recipe, tuple(steps))


def _named(left: Iterable[Place], said: Sequence[Complaint]) -> list[tuple[Place, Complaint | None]]:
    """Return the places that a complaint names, each with the first one that does."""
    found: list[tuple[Place, Complaint | None]] = []
    for place in left:
        by = next((c for c in said if all(word in c.line for word in place.words)), None)
        if by is not None:
            found.append((place, by))
    return found


def copy_of(repository: Path, folder: Path) -> Path:
    """Copy what git would commit of a checkout, as it is now, into a repository of its own, and return that."""
    listed = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        source, target = repository / name, folder / name
        # A file that was deleted and not yet committed is listed.
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    # Reports say from which commit they are.
    _git(folder, "init", "--quiet")
    _git(folder, "add", "--all")
    _git(folder, "-c", "user.name=recipes", "-c", "user.email=", "commit", "--quiet", "--message", "copy")
    return folder


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def complaints_of_tools(cache: Path) -> Complaints:
    """Return what runs mypy, ruff and the recipe's tests. ``cache`` is a folder for mypy, which all copies share."""

    def complaints(root: Path, recipe: Recipe) -> list[Complaint]:
        mypy = _run(root, "mypy", "--cache-dir", str(cache), "--no-error-summary")
        ruff = _run(root, "ruff", "check", "--no-cache", "--quiet", "--output-format", "concise", ".")
        tests = _run(root, "pytest", "-n0", "-q", "--tb=no", "-p", "no:cacheprovider", *recipe.tests)
        return [
            *(Complaint("mypy", line) for line in _lines("mypy", _MYPY, mypy)),
            *(Complaint("ruff", line) for line in _lines("ruff", _RUFF, ruff)),
            *(Complaint("tests", line) for line in _lines("pytest", _FAILED, tests)),
        ]

    return complaints


def _run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=root, env=surroundings(root), capture_output=True, text=True, check=False
    )


def _lines(tool: str, pattern: re.Pattern[str], done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the complaints of a tool; its last lines as one where it failed without any."""
    found = pattern.findall(done.stdout)
    if done.returncode and not found:
        found = [f"{tool} ended with exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}"]
    return found
