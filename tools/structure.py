"""Figures of the code's structure, for ``python -m tools.structure`` and the tests that hold some of them.

They count what makes a change expensive: concepts that are known in several places, and code of the core. Logic lines
are lines with code that are not docstrings or imports.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from harness.util.paths import REPOSITORY

SOURCE = REPOSITORY / "harness"
OUTSIDE_THE_CORE = frozenset({"lab", "mutants"})
"""Packages that break engines on purpose, and what tries the harness itself."""
WIDE = 4
"""Packages that a commit touches when it counts as wide."""
_NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
_KIND_OF = re.compile(r"isinstance\([^)]*\b(?:config|scenario)\b")
_BY_KEY = re.compile(r"\bprofile(?:\.get\(|\[)[\"']")


def modules(core: bool = False) -> Iterator[Path]:
    """Yield the package's modules, those of the core alone if asked."""
    for path in sorted(SOURCE.rglob("*.py")):
        if not (core and OUTSIDE_THE_CORE & set(path.relative_to(SOURCE).parts)):
            yield path


def logic_lines(source: str) -> int:
    """Return how many lines of ``source`` have code that is neither a docstring nor an import."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                left_out.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def names_used_twice() -> dict[str, list[str]]:
    """Return the places of the classes that share a name, by that name."""
    places = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def found(pattern: re.Pattern[str], but: str) -> list[str]:
    """Return the lines of the core that match, as ``path:line``, but those in paths with ``but`` in them."""
    out = []
    for path in modules(core=True):
        place = str(path.relative_to(REPOSITORY))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if but not in place and pattern.search(line):
                out.append(f"{place}:{number}")
    return out


def kinds_told_apart() -> list[str]:
    """Return where a scenario's kind is asked for outside the scenarios' home."""
    return found(_KIND_OF, "scenarios")


def reads_by_key() -> list[str]:
    """Return where a profile is read as raw data outside the module that knows its form."""
    return found(_BY_KEY, "recorded_profile")


def wide_commits(since: str) -> tuple[int, int]:
    """Return how many commits since ``since`` touch ``WIDE`` packages or more, of how many that touch any."""
    listing = subprocess.run(
        ["git", "log", "--no-merges", "--format=%x00", "--name-only", f"{since}..HEAD", "--", "harness"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    counts = [
        len({line.split("/")[1] for line in commit.split() if line.count("/") > 1}) for commit in listing.split("\0")
    ]
    touching = [count for count in counts if count]
    return sum(count >= WIDE for count in touching), len(touching)


def main(since: str) -> None:
    """Print the figures."""
    core = sum(logic_lines(path.read_text()) for path in modules(core=True))
    wide, commits = wide_commits(since)
    print(f"logic lines of the core: {core}")
    print(f"kinds of scenarios told apart away from home: {len(kinds_told_apart())}")
    print(f"reads of a recorded profile by key: {len(reads_by_key())}")
    print(f"class names used twice: {len(names_used_twice())}")
    print(f"commits over {WIDE} packages since {since}: {wide} of {commits}")
    print(f"words of the README: {len((REPOSITORY / 'README.md').read_text().split())}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1] if len(sys.argv) > 1 else "7d32ebc")
