"""Redaction of keys and tokens before text is written or shown.

Only free text is redacted: errors, quoted log lines, command lines, environments, logs. Ids, numbers and hashes of a
record never are. Known secrets (the keys of this process's engines, the values of variables whose names suggest a
secret) are replaced wherever they occur; unknown ones are recognised by their form, with the rules of detect-secrets
beside our own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

MARK = "<redacted>"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|KEYS?|SECRETS?|PASSWD|PASS|PASSPHRASE|PAT|CREDENTIALS?|AUTH|NETRC|COOKIES?)(?:_|$)"
    r"|_PWD(?:_|$)|PASSWORD|APIKEY|SECRET",
    re.I,
)
_LONGEST_PATH = 4096
_SHORTEST = 8
"""Values shorter than this are ordinary words that may occur anywhere."""
_WORD = "[A-Za-z0-9_-]"
_ALONE = "(?:(?<![A-Za-z0-9])|(?<=%3D))"
"""Before a token: no letter or digit, but for an equals sign as it is written in addresses."""


class _Rule(NamedTuple):
    """A form of secrets; it is tried only where the lower-cased text contains one of the hints, because trying all of
    them on every log line is slow."""

    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    replacement: str = MARK


_PRIVATE_KEY = _Rule(("private key",), re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*?(?:-----END [A-Z ]+-----|\Z)"))
"""The only rule that spans lines."""
_RULES: tuple[_Rule, ...] = tuple(
    _Rule(hints, re.compile(pattern), replacement)
    for hints, pattern, replacement in (
        (("hf_", "api_org_"), rf"{_ALONE}(hf|api_org)_[A-Za-z0-9]{{16,}}", MARK),
        (("sk-",), rf"{_ALONE}sk-{_WORD}{{16,}}", MARK),
        (("gh",), rf"{_ALONE}(?:gh[pousr]_[A-Za-z0-9]{{20,}}|github_pat_[A-Za-z0-9_]{{20,}})", MARK),
        (("npm_", "pypi-"), rf"{_ALONE}(?:npm_[A-Za-z0-9]{{36}}|pypi-{_WORD}{{50,}})", MARK),
        (("aiza", "ya29."), rf"{_ALONE}(?:AIza{_WORD}{{35}}|ya29\.{_WORD}{{20,}})", MARK),
        # Match whole words only, each once: starting anew at every "eyJ" within a word takes quadratic time.
        (("eyj",), rf"(?<!{_WORD})(?={_WORD}*?{_ALONE}eyJ{_WORD}{{8}}){_WORD}++\.{_WORD}{{8,}}+\.{_WORD}{{8,}}", MARK),
        (("bearer", "basic"), r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{8,}", rf"\1\2{MARK}"),
        (("cookie",), r"(?i)(\bcookie[\"']?\s*:)[^\r\n]+", rf"\1 {MARK}"),
        (("auth",), r"(?i)(\"auth\"\s*:\s*\")[A-Za-z0-9+/=]{12,}", rf"\1{MARK}"),
        (("sig=",), r"([?&]sig=)[A-Za-z0-9%/+=]{20,}", rf"\1{MARK}"),
        # A password may contain "@": the last one is before the host.
        (("://",), r"(://)[^/\s:@'\"]*:[^/\s'\"]+(@)", rf"\1{MARK}\2"),
        (("://",), r"(://)[^/\s:@'\"]{16,}(@)", rf"\1{MARK}\2"),
        (
            ("key", "token", "secret", "passw"),
            r"(?i)((?:(?:api|access|account)[_-]?key|token|secret|password|passwd)[\"']?\s*[=:]\s*[\"']?)"
            r"(?!<)[A-Za-z0-9._~%+/-]{16,}=*",
            rf"\1{MARK}",
        ),
        (
            ("passw", "passphrase"),
            r"(?i)((?:password|passwd|passphrase)[\"']?[=:][\"']?)(?!<)[^\s\"'<]{4,}",
            rf"\1{MARK}",
        ),
    )
)
"""What a secret's place or its first letters show. ``_TOKENS`` come behind these."""
_TOKENS: tuple[_Rule, ...] = tuple(
    _Rule(hints, re.compile(pattern))
    for hints, patterns in (
        (
            ("akia", "asia", "abia", "acca", "a3t", "aws"),
            (
                r"(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}",
                r"""(?i)aws.{0,20}?(?:key|pwd|pw|password|pass|token).{0,20}?[\'\"]([0-9a-zA-Z/+]{40})[\'\"]""",
            ),
        ),
        (("accountkey",), (r"AccountKey=[a-zA-Z0-9+\/=]{88}",)),
        (
            ("gl", "gr1348941"),
            (
                r"(glpat|gldt|glft|glsoat|glrt)-[A-Za-z0-9_\-]{20,50}(?!\w)",
                r"GR1348941[A-Za-z0-9_\-]{20,50}(?!\w)",
                r"glcbt-([0-9a-fA-F]{2}_)?[A-Za-z0-9_\-]{20,50}(?!\w)",
                r"glimt-[A-Za-z0-9_\-]{25}(?!\w)",
                r"glptt-[A-Za-z0-9_\-]{40}(?!\w)",
                r"glagent-[A-Za-z0-9_\-]{50,1024}(?!\w)",
                r"gloas-[A-Za-z0-9_\-]{64}(?!\w)",
            ),
        ),
        (("-us",), (r"[0-9a-z]{32}-us[0-9]{1,2}",)),
        (("sg.",), (r"SG\.[a-zA-Z0-9_-]{22}\.[a-zA-Z0-9_-]{43}",)),
        (
            ("xox", "hooks.slack"),
            (
                r"(?i)xox(?:a|b|p|o|s|r)-(?:\d+-)+[a-z0-9]+",
                r"(?i)https://hooks\.slack\.com/services/T[a-zA-Z0-9_]+/B[a-zA-Z0-9_]+/[a-zA-Z0-9_]+",
            ),
        ),
        (("sq0csp",), (r"sq0csp-[0-9A-Za-z\\\-_]{43}",)),
        (("k_live_",), (r"(?:r|s)k_live_[0-9a-zA-Z]{24}",)),
        ((":aa",), (r"\d{8,10}:[0-9A-Za-z_-]{35}",)),
    )
    for pattern in patterns
)
"""Tokens of known services, as the scanner detect-secrets 1.5 (Apache-2.0) knows them; a test compares them with its
rules."""

_HEAD = 1 << 16
_BLOCK = 1 << 16
_KEY_LINES = 200
"""Above the number of lines of the longest private key."""
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
    for rule in (_PRIVATE_KEY, *_RULES, *_TOKENS):
        if any(hint in lowered for hint in rule.hints):
            value = rule.pattern.sub(rule.replacement, value)
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
    # The name of a variable with a secret is none.
    return looks_secret(_variable(option)) and not option.endswith("-variable")


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
            while block := _next_block(lines):
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


def _next_block(lines: IO[str]) -> list[str]:
    """Return the next lines of a file, none at its end; a private key is not cut in two."""
    block = lines.readlines(_BLOCK)
    whole = "".join(block)
    if whole.rfind("-----BEGIN ") > whole.rfind("-----END "):
        for line in itertools.islice(lines, _KEY_LINES):
            block.append(line)
            if "-----END " in line:
                break
    return block


def _cleaned(block: list[str], known: Sequence[str]) -> list[str]:
    """Return lines without their secrets.

    Hardly any line holds one, and a look at the whole block takes a fraction of the time of a look at each line. What
    matches within a line also matches within the block.
    """
    whole = "".join(block)
    if _without(whole, known) == whole:
        return block
    without_keys = _PRIVATE_KEY.pattern.sub(_PRIVATE_KEY.replacement, whole)
    return [_without(line, known) for line in without_keys.splitlines(keepends=True)]


def logs(folder: Path) -> int:
    """Redact every log below a run folder and return how many were changed.

    For runs whose harness was killed before it could do so and whose engines have ended. Raises OSError.
    """
    return sum(file(path) for path in sorted(folder.rglob("*.log")))
