"""Redaction of keys and tokens before text is written or shown.

Only free text is redacted: errors, quoted log lines, command lines, environments, logs. Ids, numbers and hashes of a
record never are. Known secrets (the keys of this process's engines, the values of variables whose names suggest a
secret) are replaced wherever they occur; unknown ones are recognised by their form.
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
"""Values shorter than this are ordinary words that may occur anywhere."""
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
        # Match whole words only, each once: starting anew at every "eyJ" within a word takes quadratic time.
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
"""(hints, pattern, replacement): a pattern is tried only where the lower-cased text contains one of its hints, because
trying all of them on every log line is slow."""
_HEAD = 1 << 16
_BLOCK = 1 << 16
"""How many characters of whole lines are looked at together."""
_MARGIN = 1 << 12
_KNOWN: set[str] = set()
_LOCK = threading.Lock()


def remember(secret: str) -> None:
    """Redact this value wherever it occurs from now on."""
    if len(secret) >= _SHORTEST:
        with _LOCK:
            _KNOWN.add(secret)


def looks_secret(name: str) -> bool:
    """Return whether a variable's name suggests that its value is a secret."""
    return bool(_SECRET_NAME.search(name))


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables whose names or values suggest a secret."""
    return {k: v for k, v in env.items() if not looks_secret(k) and text(v) == v}


def _known() -> list[str]:
    """Return the known secrets, longest first, so that no part of a longer one is left over."""
    with _LOCK:
        known = set(_KNOWN)
    known |= {v for k, v in os.environ.items() if looks_secret(k) and len(v) >= _SHORTEST and not _harmless(k, v)}
    return sorted(known, key=len, reverse=True)


_ABOUT = re.compile(r"_(?:FILE|PATH|SOCK|SOCKET|DIR|COUNT|SIZE|ID)$", re.I)
"""Suffixes of variables that say where a secret is, or how many there are."""


def _harmless(name: str, value: str) -> bool:
    """Return whether the value is a path or a small number, as in ``SSH_AUTH_SOCK`` and ``KEY_COUNT``.

    A leading slash is not enough, since a secret may begin with one.
    """
    if value.startswith("/"):
        return bool(_ABOUT.search(name)) or (len(value) < _LONGEST_PATH and os.path.lexists(value))
    return value.isdigit() and (len(value) < _SHORTEST or bool(_ABOUT.search(name)))


def text(value: str) -> str:
    """Return free text without its secrets."""
    return _without(value, _known())


def _without(value: str, known: Sequence[str]) -> str:
    for secret in known:
        value = value.replace(secret, MARK)
    lowered = value.lower()
    for hints, pattern, replacement in _PATTERNS:
        if any(hint in lowered for hint in hints):
            value = pattern.sub(replacement, value)
    return value


def quoted(value: str, limit: int) -> str:
    """Return the first ``limit`` characters of untrusted text of any length, on one line and without secrets.

    Only its beginning is read, with a margin so that no secret is cut in half before it is recognised.
    """
    head = " ".join(value[:_HEAD].split())
    if len(value) > _HEAD:
        head = head[:-_MARGIN]
    return text(head)[:limit]


def optional(value: str | None) -> str | None:
    return None if value is None else text(value)


def words(values: Iterable[str]) -> tuple[str, ...]:
    """Return a command line without secrets; the value of an option whose name suggests a secret counts as one."""
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
    """Return an environment for a record: all names, with secret values redacted."""
    return {k: MARK if looks_secret(k) and v and not _harmless(k, v) else text(v) for k, v in env.items()}


def data(value: Any) -> Any:
    """Return a JSON value with every string in it redacted; keys and numbers stay."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {k: data(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(data(v) for v in value)
    return value


def file(path: Path) -> bool:
    """Redact a text file atomically and return whether anything was replaced.

    Meant for the logs of engines that have ended. Symbolic links and missing files are skipped. Raises OSError when
    the file cannot be written; it is unchanged then.
    """
    if path.is_symlink() or not path.is_file():
        return False
    return _rewritten(path, path)


def copy(source: Path, target: Path) -> None:
    """Copy a text file without its secrets, atomically. Raises OSError."""
    _rewritten(source, target)


def _rewritten(source: Path, target: Path) -> bool:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    changed = False
    known = _known()
    try:
        # Bytes that are not UTF-8 come out as they went in.
        with (
            source.open(encoding="utf-8", errors="surrogateescape", newline="") as lines,
            os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as out,
        ):
            while block := lines.readlines(_BLOCK):
                clean = _cleaned(block, known)
                changed = changed or clean != block
                out.writelines(clean)
        if changed or target != source:
            shutil.copymode(source, name)
            Path(name).replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
    return changed


def _cleaned(block: list[str], known: Sequence[str]) -> list[str]:
    """Return lines without their secrets.

    Hardly any line holds one, and a look at the whole block takes a fraction of the time of a look at each line. What
    matches within a line also matches within the block.
    """
    whole = "".join(block)
    if _without(whole, known) == whole:
        return block
    return [_without(line, known) for line in block]


def logs(folder: Path) -> int:
    """Redact every log below a run folder and return how many were changed.

    For runs whose harness was killed before it could do so and whose engines have ended. Raises OSError.
    """
    return sum(file(path) for path in sorted(folder.rglob("*.log")))
