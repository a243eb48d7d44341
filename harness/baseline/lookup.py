"""Find the baseline of an identity, or say in which field the nearest one differs.

Every field must be equal, with two exceptions. What an engine does not report (its attention backend or model runner
is None on either side) cannot be compared. And the vLLM version is what is under test: the nearest version stands in,
with a notice, which says so when the distance or the age is larger than the profile allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from harness.baseline.model import Baseline, Identity
from harness.baseline.store import load_baseline, stored
from harness.errors import DataError
from harness.files import sha256_json

_UNREPORTED = {"attention_backend", "model_runner"}


class Limits(NamedTuple):
    """From when on a baseline counts as expired."""

    days: int
    minors: int
    """Distance of vLLM versions in minor releases."""


class Lookup(NamedTuple):
    """A baseline, or the reason why there is none to compare with."""

    baseline: Baseline | None
    reason: str
    notices: tuple[str, ...] = ()
    path: Path | None = None


def differing(ours: Identity, theirs: Identity) -> list[str]:
    """Names of the identity fields that forbid a comparison."""
    out = []
    for field in Identity.model_fields:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a == b or field == "vllm" or (field in _UNREPORTED and None in (a, b)):
            continue
        out.append(field)
    return out


def describe_difference(ours: Identity, theirs: Identity, fields: Iterable[str]) -> str:
    """The differing fields with their values in words."""
    return "; ".join(
        f"{field}: this run has {_short(getattr(ours, field))}, the baseline {_short(getattr(theirs, field))}"
        for field in fields
    )


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


def minor_distance(ours: str | None, theirs: str | None) -> int | None:
    """Distance of two vLLM versions in minor releases; None when either is unknown. A major release counts as 100."""
    try:
        a, b = Version(ours or ""), Version(theirs or "")
    except InvalidVersion:
        return None
    return abs((a.major - b.major) * 100 + a.minor - b.minor)


def look_up(folder: Path, identity: Identity, profile_name: str, limits: Limits, started: str) -> Lookup:
    """The baseline for an identity, or why there is none and which command mends it.

    ``started`` is when the run began (ISO 8601): the age is judged against it, so that judging again later gives the
    same answer.
    """
    mend = f"record it with `harness baseline record --profile {profile_name}`"
    near: list[tuple[int, Path, Baseline]] = []
    refused: list[tuple[int, str]] = []
    for path in stored(folder):
        try:
            baseline = load_baseline(path)
        except DataError as error:
            if path.stem.split("-", 1)[0] == identity.method:
                refused.append((0, str(error)))
            continue
        theirs = baseline.header.identity
        if theirs.method != identity.method:
            continue
        fields = differing(identity, theirs)
        if fields:
            why = f"the baseline {path} belongs to something else ({describe_difference(identity, theirs, fields)})"
            refused.append((len(fields), f"{why}; {mend}"))
            continue
        distance = minor_distance(identity.vllm, theirs.vllm)
        near.append((1_000_000 if distance is None else distance, path, baseline))
    if near:
        _, path, baseline = min(near, key=lambda item: (item[0], item[1]))
        return Lookup(baseline, "", tuple(_notices(baseline, path, identity, limits, started)), path)
    if refused:
        return Lookup(None, min(refused)[1])
    return Lookup(None, f"expected a baseline of {identity.method} in {folder}, found none; {mend}")


def _notices(baseline: Baseline, path: Path, identity: Identity, limits: Limits, started: str) -> Iterable[str]:
    theirs = baseline.header.identity.vllm
    if theirs != identity.vllm:
        distance = minor_distance(identity.vllm, theirs)
        far = distance is None or distance > limits.minors
        yield (
            f"baseline {path.name} was recorded with vLLM {theirs or 'of unknown version'}, this run has "
            f"{identity.vllm or 'an unknown version'}"
            + (f": expired, more than {limits.minors} minor versions apart; record it anew" if far else "")
        )
    recorded = baseline.header.provenance.recorded
    try:
        days = (_instant(started) - _instant(recorded)).days
    except ValueError:
        return
    if days < -1:
        yield (
            f"baseline {path.name} was recorded {-days} days after this run began: it is newer, or a clock was wrong; "
            "its age is not known"
        )
    if days > limits.days:
        yield f"baseline {path.name} is {days} days old: expired, the limit is {limits.days}; record it anew"


def _instant(text: str) -> datetime:
    """Raises ValueError. Times without a zone are UTC."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def unused(folder: Path, identities: Iterable[Identity]) -> list[str]:
    """A sentence for each stored baseline that none of the identities could be compared with."""
    known = list(identities)
    out = []
    for path in stored(folder):
        try:
            theirs = load_baseline(path).header.identity
        except DataError as error:
            out.append(str(error))
            continue
        mine = [i for i in known if i.method == theirs.method]
        if not mine:
            out.append(f"baseline {path.name} is unused: no cell of the profile uses {theirs.method}")
        elif all(differing(i, theirs) for i in mine):
            fields = differing(mine[0], theirs)
            out.append(f"baseline {path.name} is unused: it differs in {', '.join(fields)} from every cell")
    orphans = sorted(p.name for p in folder.glob("*.csv") if not p.with_suffix(".json").is_file())
    return out + [f"baseline rows {name} are orphaned: there is no {Path(name).stem}.json" for name in orphans]


def free_place(folder: Path, identity: Identity) -> Path:
    """Where to write the first record of an identity."""
    plain = folder / f"{identity.method}.json"
    if not plain.exists():
        return plain
    key = identity.model_dump(mode="json", exclude={"vllm"})
    return folder / f"{identity.method}-{sha256_json(key)[:8]}.json"
