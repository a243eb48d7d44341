"""Keys and tokens, taken out of text before it is written or shown.

Only free text goes through here: errors, quoted log lines, command lines, environments, logs. Ids, numbers and hashes
of a record never do. What is known to be secret (the keys of this process's engines, the values of variables with
telling names) is replaced wherever it stands; what looks like a secret is replaced by its form.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "<redacted>"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|KEYS?|SECRETS?|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(?:_|$)|PASSWORD|APIKEY|SECRET", re.I
)
_LONGEST_PATH = 4096
_SHORTEST = 8
"""A value shorter than that is a word that may stand anywhere."""
_WORD = "[A-Za-z0-9_-]"
_PATTERNS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = tuple(
    (hints, re.compile(pattern), replacement)
    for hints, pattern, replacement in (
        (("hf_", "api_org_"), r"\b(hf|api_org)_[A-Za-z0-9]{16,}", MARK),
        (("sk-",), rf"\bsk-{_WORD}{{16,}}", MARK),
        (("gh",), r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})", MARK),
        (("glpat-",), rf"\bglpat-{_WORD}{{16,}}", MARK),
        (("xox",), r"\bxox[abprs]-[A-Za-z0-9-]{10,}", MARK),
        (("akia", "asia"), r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", MARK),
        # Whole words only, each read once: begun anew at every "eyJ" of a word, 200 kB of them took 15 s.
        (
            ("eyj",),
            rf"(?<!{_WORD})(?={_WORD}*?\beyJ{_WORD}{{8}}){_WORD}++\.{_WORD}{{8,}}+\.{_WORD}{{8,}}",
            MARK,
        ),
        (("bearer", "basic"), r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{8,}", rf"\1\2{MARK}"),
        (("://",), r"(://)[^/\s:@'\"]*:[^/\s@'\"]+(@)", rf"\1{MARK}\2"),
        (("://",), r"(://)[^/\s:@'\"]{16,}(@)", rf"\1{MARK}\2"),
        (
            ("api", "token", "secret", "passw"),
            r"(?i)((?:api[_-]?key|token|secret|password|passwd)[\"']?\s*[=:]\s*[\"']?)(?!<)[A-Za-z0-9._~+/-]{16,}",
            rf"\1{MARK}",
        ),
    )
)
"""What text in small letters must hold for a pattern to be worth trying, the pattern, and what stays of it. Patterns
for every line of a log took 80 us of CPU a line."""
_HEAD = 1 << 16
_MARGIN = 1 << 12
_KNOWN: set[str] = set()
_LOCK = threading.Lock()


def remember(secret: str) -> None:
    """From now on, replace this wherever it stands."""
    if len(secret) >= _SHORTEST:
        with _LOCK:
            _KNOWN.add(secret)


def looks_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret."""
    return bool(_SECRET_NAME.search(name))


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables whose names or values say that they hold a secret."""
    return {k: v for k, v in env.items() if not looks_secret(k) and text(v) == v}


def _known() -> list[str]:
    """Longest first, so that no rest of a longer one is left."""
    with _LOCK:
        known = set(_KNOWN)
    known |= {v for k, v in os.environ.items() if looks_secret(k) and len(v) >= _SHORTEST and not _harmless(k, v)}
    return sorted(known, key=len, reverse=True)


_ABOUT = re.compile(r"_(?:FILE|PATH|SOCK|SOCKET|DIR|COUNT|SIZE|ID)$", re.I)
"""Ends of names of variables that say where a secret is, or how many there are."""


def _harmless(name: str, value: str) -> bool:
    """A path or a small number, as ``SSH_AUTH_SOCK`` and ``KEY_COUNT`` hold. A secret may begin with a slash, too."""
    if value.startswith("/"):
        return bool(_ABOUT.search(name)) or (len(value) < _LONGEST_PATH and os.path.lexists(value))
    return value.isdigit() and (len(value) < _SHORTEST or bool(_ABOUT.search(name)))


def text(value: str) -> str:
    """Free text without secrets."""
    return _without(value, _known())


def _without(value: str, known: Sequence[str]) -> str:
    for secret in known:
        value = value.replace(secret, MARK)
    small = value.lower()
    for hints, pattern, replacement in _PATTERNS:
        if any(hint in small for hint in hints):
            value = pattern.sub(replacement, value)
    return value


def quoted(value: str, limit: int) -> str:
    """The first ``limit`` characters of foreign text of any length, on one line and without secrets. Only its beginning
    is read, with a margin, so that no secret is cut in half before it is known for one."""
    head = " ".join(value[:_HEAD].split())
    if len(value) > _HEAD:
        head = head[:-_MARGIN]
    return text(head)[:limit]


def optional(value: str | None) -> str | None:
    return None if value is None else text(value)


def words(values: Iterable[str]) -> tuple[str, ...]:
    """A command line without secrets. What follows an option with a telling name is one, too."""
    out: list[str] = []
    for value in values:
        previous = out[-1] if out else ""
        option = previous.startswith("--") and "=" not in previous
        if (
            option
            and _named_secret(previous)
            and not value.startswith("-")
            and not _harmless(_variable(previous), value)
        ):
            out.append(MARK)
            continue
        name, equals, given = value.partition("=")
        if equals and name.startswith("--") and _named_secret(name) and not _harmless(_variable(name), given):
            value = f"{name}={MARK}"
        out.append(text(value))
    return tuple(out)


def _named_secret(option: str) -> bool:
    return looks_secret(_variable(option))


def _variable(option: str) -> str:
    return option.strip("-").replace("-", "_")


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """An environment for a record: names stay, values that are secret go."""
    return {k: MARK if looks_secret(k) and v and not _harmless(k, v) else text(v) for k, v in env.items()}


def data(value: Any) -> Any:
    """A JSON value with every text in it redacted; names and numbers stay."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {k: data(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(data(v) for v in value)
    return value


def file(path: Path) -> bool:
    """Rewrite a text file without secrets, line by line, in one step; returns whether anything was replaced. For logs
    of engines that have ended. Does nothing for links and for files that are not there; raises OSError when the disk
    does not take it, and the file is as it was then."""
    if path.is_symlink() or not path.is_file():
        return False
    return _rewritten(path, path)


def copy(source: Path, target: Path) -> None:
    """Copy a text file without its secrets, in one step. Raises OSError."""
    _rewritten(source, target)


def _rewritten(source: Path, target: Path) -> bool:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    changed = False
    known = _known()
    try:
        # Bytes that are no UTF-8 come out as they went in.
        with (
            source.open(encoding="utf-8", errors="surrogateescape", newline="") as lines,
            os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as out,
        ):
            for line in lines:
                clean = _without(line, known)
                changed = changed or clean != line
                out.write(clean)
        if changed or target != source:
            shutil.copymode(source, name)
            Path(name).replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
    return changed


def logs(folder: Path) -> int:
    """Every log of a run folder, those of its parts and tries included; returns how many were changed. For runs whose
    harness was killed before it could do so, and whose engines have ended. Raises OSError."""
    return sum(file(path) for path in sorted(folder.rglob("*.log")))
