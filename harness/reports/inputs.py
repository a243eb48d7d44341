"""What a verdict was made of, by hash: the record, the baselines, the known defects and the harness that judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from harness.baselines.lookup import Lookup
from harness.history.folder import History
from harness.judging.references import References
from harness.profiles.known_defects import KnownDefects
from harness.util.files import sha256_json
from harness.util.machine import git_state
from harness.util.strict import part_of
from harness.util.text import counted, listed
from harness.version import __version__

JUDGEMENT = "judgement.json"
_SHORT = 12
"""Digits of a hash in a sentence."""


class ReferenceRun(NamedTuple):
    """The run whose single engines stood for baselines (``--against``)."""

    run: str
    """Its id."""
    record: str | None
    """Its ``record_sha256``."""


class Inputs(NamedTuple):
    """Hashes of everything that a verdict follows from: with the same ones, judging again gives the same."""

    record: str | None
    """``record_sha256`` of ``run.json``, which covers the answers of a finished run; None without a seal."""
    baselines: Mapping[str, str]
    """By lineup; with ``against``, those made of that run."""
    known_defects: str | None
    harness: str
    commit: str | None
    dirty: bool | None
    against: ReferenceRun | None = None

    def as_json(self) -> dict[str, Any]:
        against = self.against._asdict() if self.against is not None else None
        return {**self._asdict(), "baselines": dict(self.baselines), "against": against}

    @property
    def sentence(self) -> str:
        """All of them as text, the baselines as one hash."""
        together = sha256_json(dict(self.baselines))[:_SHORT]
        baselines = f"{counted(len(self.baselines), 'baseline')} {together}" if self.baselines else "no baseline"
        if self.against is not None:
            sealed = f" (record {self.against.record[:_SHORT]})" if self.against.record else ""
            baselines = f"{baselines if self.baselines else 'nothing'} of run {self.against.run}{sealed}"
        known = f"expected failures {self.known_defects[:_SHORT]}" if self.known_defects else "no expected failures"
        at = f" at {self.commit[:_SHORT]}{' with changes' if self.dirty else ''}" if self.commit else ""
        record = f"record {self.record[:_SHORT]}" if self.record else "a record without a seal"
        return f"{record}, {baselines}, {known}, harness {self.harness}{at}"


class _Judged(BaseModel):
    """What ``judgement.json`` says of its inputs, as far as it is needed here."""

    class Made(BaseModel):
        baselines: dict[str, str] = {}
        known_defects: str | None = None

    inputs: Made


def judged_otherwise(
    history: History, references: References, baselines: Mapping[str, Lookup], known: KnownDefects | None
) -> list[str]:
    """Return a notice when nobody named other references, and yet they are not those of the run's own judgement."""
    judged = part_of(history.folder / JUDGEMENT, _Judged)
    if judged is None:
        return []
    made = judged.inputs
    moved = [f"baseline of {m}" for m, k in baselines.items() if k.sha256 != made.baselines.get(m)]
    differ = moved if references.baselines is None and references.against is None else []
    if references.known is None and (known.sha256 if known is not None else None) != made.known_defects:
        differ.append("list of expected failures")
    if not differ or history.own:
        return []
    return [f"changed since the run was first judged ({JUDGEMENT}): {listed(differ, 'and')}"]


def inputs_of(
    history: History, baselines: Mapping[str, Lookup], known: KnownDefects | None, other: History | None = None
) -> Inputs:
    """Return the hashes of what a run is judged by. ``other`` is the run that it is compared with instead of
    baselines."""
    commit, dirty = git_state()
    return Inputs(
        record=history.sha256,
        baselines={name: digest for name, lookup in baselines.items() if (digest := lookup.sha256) is not None},
        known_defects=known.sha256 if known is not None else None,
        harness=__version__,
        commit=commit,
        dirty=dirty,
        against=ReferenceRun(other.run.run_id, other.sha256) if other is not None else None,
    )
