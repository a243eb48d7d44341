"""Names that a user chooses among: which are meant, and the nearest ones when none is."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence

from harness.errors import UsageError
from harness.util.text import listed

_SHOWN = 12
"""Most names that a message lists."""
_NEAR = 3
_PATTERN = "*?[]"
Matches = Callable[[str, str], bool]
"""Whether a name, the first argument, matches a shell pattern."""


def nearest(given: str, known: Sequence[str]) -> list[str]:
    """Return the names that are most like a misspelt one, the nearest first; empty when none is like it."""
    by_folded = {name.casefold(): name for name in reversed(known)}
    word = given.strip().strip(_PATTERN).casefold()
    found = difflib.get_close_matches(word, by_folded, n=_NEAR, cutoff=0.6)
    starting = [name for name in by_folded if word and name.startswith(word)]
    return [by_folded[name] for name in dict.fromkeys([*found, *sorted(starting)])][:_NEAR]


def same_name(given: str, known: Sequence[str]) -> str | None:
    """Return the name that is given in other letter case or with blanks around it; None when there is none."""
    word = given.strip()
    return word if word in known else next((n for n in known if n.casefold() == word.casefold()), None)


def matching(pattern: str, known: Sequence[str], matches: Matches = fnmatch.fnmatchcase) -> list[str]:
    """Return the names that a shell pattern matches; blanks around it do not count, nor letter case where none matches
    otherwise."""
    word = pattern.strip()
    exact = [name for name in known if matches(name, word)]
    return exact or [name for name in known if matches(name.casefold(), word.casefold())]


def named(option: str, given: str, known: Sequence[str], what: str, listed_by: str) -> str:
    """Return the name that a value of an option is. Raises UsageError as ``no_such`` makes it."""
    found = same_name(given, known)
    if found is None:
        raise no_such(option, given, known, what, listed_by)
    return found


def no_such(option: str, given: str, known: Sequence[str], what: str, listed_by: str) -> UsageError:
    """Return the error for a value of an option that names nothing.

    ``what`` says what there is none of, such as ``cell of profile cpu``; ``listed_by`` is the command that lists all,
    if there is one.
    """
    parts = [part.strip() for part in given.split(",")]
    if len(parts) > 1 and all(matching(part, known) for part in parts):
        again = " ".join(f"{option} {part}" for part in parts)
        return UsageError(
            f"{option} {given!r}: expected one name or pattern, found {len(parts)}; repeat the option: {again}"
        )
    near = nearest(given, known)
    if near:
        hint = f"did you mean {listed(near, 'or')}?"
    else:
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        hint = f"there are {', '.join(known[:_SHOWN])}{more}"
    return UsageError(
        f"{option} {given!r}: there is no such {what}; {hint}" + (f" (`{listed_by}` lists all)" if listed_by else "")
    )
