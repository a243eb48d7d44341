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

from harness.baseline.model import Baseline, Header, Identity
from harness.baseline.shelf import Shelf, StoredBaseline
from harness.baseline.store import load_header, read_table, stored
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

    held: Baseline | StoredBaseline | None
    """In memory, or on disk: rows of stored ones are read when they are asked for."""
    reason: str
    notices: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def found(self) -> bool:
        return self.held is not None

    @property
    def baseline(self) -> Baseline | None:
        """With its rows. Not to be kept: those of all lineups of a large run do not fit into memory. Raises DataError
        when the stored one is no longer what was found."""
        return self.held.load() if isinstance(self.held, StoredBaseline) else self.held


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


def look_up(
    folder: Path, identity: Identity, profile_name: str, limits: Limits, started: str, shelf: Shelf | None = None
) -> Lookup:
    """The baseline for an identity, or why there is none and which command mends it.

    ``started`` is when the run began (ISO 8601): the age is judged against it, so that judging again later gives the
    same answer. ``shelf`` holds the folder's headers where several identities are looked up.
    """
    shelf = shelf or Shelf(folder)
    mend = f"record it with `harness baseline record --profile {profile_name}`"
    candidates = [(item, differing(identity, item.header.identity)) for item in shelf.of_method(identity.method)]
    damaged = list(shelf.damaged(identity.method))
    for item in _nearest(identity, (item for item, fields in candidates if not fields)):
        try:
            # Not from memory: it may have been damaged since.
            item.read()
        except DataError as error:
            damaged.append(str(error))
            continue
        return Lookup(item, "", tuple(_notices(item.header, item.path, identity, limits, started)), item.path)
    if damaged:
        return Lookup(None, min(damaged))
    others = [(len(fields), item, fields) for item, fields in candidates if fields]
    if others:
        fewest = min(count for count, _, _ in others)
        reasons = (
            f"the baseline {item.path} belongs to something else "
            f"({describe_difference(identity, item.header.identity, fields)})"
            for count, item, fields in others
            if count == fewest
        )
        return Lookup(None, f"{min(reasons)}; {mend}")
    return Lookup(None, f"expected a baseline of {identity.method} in {folder}, found none; {mend}")


def _nearest(identity: Identity, items: Iterable[StoredBaseline]) -> list[StoredBaseline]:
    """By distance of vLLM's version, then by path."""

    def distance(item: StoredBaseline) -> tuple[int, Path]:
        found = minor_distance(identity.vllm, item.header.identity.vllm)
        return (1_000_000 if found is None else found, item.path)

    return sorted(items, key=distance)


def _notices(header: Header, path: Path, identity: Identity, limits: Limits, started: str) -> Iterable[str]:
    theirs = header.identity.vllm
    if theirs != identity.vllm:
        distance = minor_distance(identity.vllm, theirs)
        far = distance is None or distance > limits.minors
        yield (
            f"baseline {path.name} was recorded with vLLM {theirs or 'of unknown version'}, this run has "
            f"{identity.vllm or 'an unknown version'}"
            + (f": expired, more than {limits.minors} minor versions apart; record it anew" if far else "")
        )
    recorded = header.provenance.recorded
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
            header = load_header(path)
            read_table(path, header)
        except DataError as error:
            out.append(str(error))
            continue
        theirs = header.identity
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
