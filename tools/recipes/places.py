"""The places of a recipe: what a person writes, and what a command renews."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Protocol


class Place(Protocol):
    """Something that an addition changes."""

    @property
    def what(self) -> str:
        """What it is, in words."""

    @property
    def words(self) -> tuple[str, ...]:
        """What a complaint says that names the place; all of it."""

    def put(self, root: Path) -> tuple[str, ...]:
        """Change it in a copy of the checkout, and return the paths of the files that are other than before.

        Raises LookupError if there is no such place.
        """


class Written(NamedTuple):
    """Text that a person adds to a file, or a new file."""

    path: str
    what: str
    named: tuple[str, ...]
    """Words, beside the path, that a complaint needs to name the place."""
    text: str
    before: str | None = None
    """The text that it is put in front of; None for the end of the file."""

    @property
    def words(self) -> tuple[str, ...]:
        return (self.path, *self.named)

    def put(self, root: Path) -> tuple[str, ...]:
        path = root / self.path
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        if self.before is None:
            changed = source + self.text
        elif source.count(self.before) == 1:
            changed = source.replace(self.before, self.text + self.before)
        else:
            raise LookupError(f"{self.path}: expected {self.before!r} once, found it {source.count(self.before)} times")
        path.write_text(changed, encoding="utf-8")
        return (self.path,)


class Raised(NamedTuple):
    """A number that a person raises by one."""

    path: str
    what: str
    named: tuple[str, ...]
    number: str
    """A regular expression with the number as its group."""

    @property
    def words(self) -> tuple[str, ...]:
        return (self.path, *self.named)

    def put(self, root: Path) -> tuple[str, ...]:
        path = root / self.path
        source = path.read_text(encoding="utf-8")
        found = re.search(self.number, source)
        if found is None:
            raise LookupError(f"{self.path}: expected {self.number!r}, found nothing like it")
        changed = source[: found.start(1)] + str(int(found[1]) + 1) + source[found.end(1) :]
        path.write_text(changed, encoding="utf-8")
        return (self.path,)


class Renewed(NamedTuple):
    """Files that a command writes, which nobody edits."""

    what: str
    command: str
    """What a complaint says, and what is run: a program of this environment, and where its output goes."""
    under: str
    """The folder of the files, or the file."""

    @property
    def words(self) -> tuple[str, ...]:
        return (self.command,)

    def put(self, root: Path) -> tuple[str, ...]:
        before = _hashes(root / self.under)
        line, _, target = self.command.partition(" > ")
        program, *arguments = shlex.split(line)
        module = [*arguments] if program == "python" else ["-m", program, *arguments]
        done = subprocess.run(
            [sys.executable, *module], cwd=root, env=surroundings(root), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LookupError(f"{self.command}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
        if target:
            (root / target).write_text(done.stdout, encoding="utf-8")
        after = _hashes(root / self.under)
        return tuple(sorted(str(p.relative_to(root)) for p in {*before, *after} if before.get(p) != after.get(p)))


def surroundings(root: Path) -> dict[str, str]:
    """Return the variables for a program that uses the code of ``root``."""
    # With CI set, pytest does not cut its summary to the width of a terminal.
    return {**os.environ, "PYTHONPATH": str(root), "CI": "1"}


def _hashes(under: Path) -> dict[Path, str]:
    files = [under] if under.is_file() else [p for p in under.rglob("*") if p.is_file()]
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
