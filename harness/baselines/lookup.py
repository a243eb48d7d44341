"""Find the baseline of an identity, or say in which fields the nearest one differs.

All identity fields must be equal, with three exceptions. Fields that an engine did not report (the attention backend or
model runner is None on either side) are not compared. The vLLM version is what is under test, so the baseline of the
nearest version is used, with a notice that says whether it exceeds the version distance or age that the profile allows.
A profile may name fields to compare across (``judging.baseline_across``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from harness.baselines.index import BaselineIndex, StoredBaseline
from harness.baselines.model import Baseline, Header
from harness.baselines.store import load_header, read_table, stored
from harness.errors import DataError
from harness.history.identity import Identity
from harness.util.files import sha256_json

_UNREPORTED = {"attention_backend", "model_runner"}


class Limits(NamedTuple):
    """The age and version distance beyond which a baseline counts as expired, and what else it may differ in."""

    days: int
    minors: int
    """Distance between vLLM versions, in minor releases."""
    across: Collection[str] = ()
    """Fields of the identity."""


class Lookup(NamedTuple):
    """A baseline, or the reason why none can be used."""

    source: Baseline | StoredBaseline | None
    """In memory, or on disk with rows read on demand."""
    reason: str
    notices: tuple[str, ...] = ()
    path: Path | None = None
    across: tuple[str, ...] = ()
    """Fields of the identity in which it differs from the run's on purpose (``judging.baseline_across``)."""

    @property
    def found(self) -> bool:
        return self.source is not None

    @property
    def sha256(self) -> str | None:
        """A hash of the baseline, rows included, which its header covers; None if none was found."""
        return sha256_json(self.source.header.model_dump(mode="json")) if self.source is not None else None

    @property
    def baseline(self) -> Baseline | None:
        """The baseline with its rows. Do not keep a reference: the rows of a large run do not all fit into memory.
        Raises DataError if the stored baseline has changed since it was found."""
        return self.source.load() if isinstance(self.source, StoredBaseline) else self.source


def differing(ours: Identity, theirs: Identity, across: Collection[str] = ()) -> list[str]:
    """Return the names of the identity fields whose difference rules out a comparison."""
    out = []
    for field in Identity.model_fields:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a == b or field == "vllm" or field in across or (field in _UNREPORTED and None in (a, b)):
            continue
        out.append(field)
    return out


def describe_difference(
    ours: Identity, theirs: Identity, fields: Iterable[str], reference: str = "the baseline"
) -> str:
    """Return the differing fields with both values."""
    return "; ".join(
        f"{field}: this run has {shortened(getattr(ours, field))}, {reference} {shortened(getattr(theirs, field))}"
        for field in fields
    )


def shortened(value: object) -> str:
    """Return a value as text, with SHA-256 digests cut to 12 digits."""
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


def minor_distance(ours: str | None, theirs: str | None) -> int | None:
    """Return the distance of two versions in minor releases; None if either is unknown. A major one counts as 100."""
    try:
        a, b = Version(ours or ""), Version(theirs or "")
    except InvalidVersion:
        return None
    return abs((a.major - b.major) * 100 + a.minor - b.minor)


def look_up(
    folder: Path,
    identity: Identity,
    profile_name: str,
    limits: Limits,
    started: str,
    index: BaselineIndex | None = None,
    advice: Callable[[], str] | None = None,
) -> Lookup:
    """Return the baseline for an identity, or the reason why there is none and what to do: the command that creates it,
    or what ``advice`` says, which is asked only then.

    ``started`` is when the run began (ISO 8601). The age is relative to it, so that judging again later gives the same
    result. Pass ``index`` to look up several identities in one folder.
    """
    index = index or BaselineIndex(folder)
    candidates = [
        (item, differing(identity, item.header.identity, limits.across)) for item in index.by_method[identity.method]
    ]
    damaged = list(index.damaged[identity.method])
    for item in _nearest(identity, (item for item, fields in candidates if not fields)):
        try:
            # Bypass the cache: the file may have been damaged since.
            item.read()
        except DataError as error:
            damaged.append(str(error))
            continue
        notices = tuple(_notices(item.header, item.path, identity, limits, started))
        return Lookup(item, "", notices, item.path, tuple(differing(identity, item.header.identity)))
    if damaged:
        return Lookup(None, min(damaged))
    remedy = advice() if advice is not None else record_with(profile_name)
    others = [(len(fields), item, fields) for item, fields in candidates if fields]
    if others:
        fewest = min(count for count, _, _ in others)
        reasons = (
            f"the baseline {item.path} was recorded with other settings or prompts "
            f"({describe_difference(identity, item.header.identity, fields)})"
            for count, item, fields in others
            if count == fewest
        )
        return Lookup(None, f"{min(reasons)}; {remedy}")
    return Lookup(None, f"expected a baseline of {identity.method} in {folder}, found none; {remedy}")


def record_with(profile: str) -> str:
    """Return the advice to record a baseline with a profile."""
    return f"record it with `harness baseline record --profile {profile}`"


def _nearest(identity: Identity, items: Iterable[StoredBaseline]) -> list[StoredBaseline]:
    """Sort by the number of differing fields, by distance of the vLLM version, then by path."""

    def distance(item: StoredBaseline) -> tuple[int, int, Path]:
        theirs = item.header.identity
        found = minor_distance(identity.vllm, theirs.vllm)
        return (len(differing(identity, theirs)), 1_000_000 if found is None else found, item.path)

    return sorted(items, key=distance)


def _notices(header: Header, path: Path, identity: Identity, limits: Limits, started: str) -> Iterable[str]:
    if fields := differing(identity, header.identity):
        yield (
            f"baseline {path.name} is compared across {' and '.join(fields)} (judging.baseline_across): "
            f"{describe_difference(identity, header.identity, fields)}"
        )
    theirs = header.identity.vllm
    if theirs != identity.vllm:
        distance = minor_distance(identity.vllm, theirs)
        far = ""
        if distance is None:
            far = ": how far apart they are is not known"
        elif distance > limits.minors:
            far = f": expired, more than {limits.minors} minor versions apart; record it again"
        yield (
            f"baseline {path.name} was recorded with vLLM {theirs or 'of unknown version'}, this run has "
            f"{identity.vllm or 'an unknown version'}{far}"
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
        yield f"baseline {path.name} is {days} days old: expired, the limit is {limits.days}; record it again"


def _instant(text: str) -> datetime:
    """Parse an ISO 8601 time, in UTC if it has no zone. Raises ValueError."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def unused(folder: Path, identities: Iterable[Identity], across: Collection[str] = ()) -> list[str]:
    """Return a sentence for each stored baseline of one of the methods that cannot be compared with any of the
    identities. Those of other hardware are for other machines, and not named."""
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
        if mine and all(differing(i, theirs, across) for i in mine):
            fields = differing(mine[0], theirs, across)
            if "hardware" not in fields:
                out.append(f"baseline {path.name} is unused: it differs in {', '.join(fields)} from every cell")
    orphans = sorted(p.name for p in folder.glob("*.csv") if not p.with_suffix(".json").is_file())
    return out + [f"baseline rows {name} are orphaned: there is no {Path(name).stem}.json" for name in orphans]


def free_place(folder: Path, identity: Identity) -> Path:
    """Return the path for the first baseline of an identity."""
    plain = folder / f"{identity.method}.json"
    if not plain.exists():
        return plain
    key = identity.model_dump(mode="json", exclude={"vllm"})
    return folder / f"{identity.method}-{sha256_json(key)[:8]}.json"
