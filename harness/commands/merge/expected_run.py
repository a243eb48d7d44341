"""The plan of a merged run: what it should consist of, and what is tolerated in its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.commands.merge.signature import Signature, commits_in, comparable_profile, describe_differences
from harness.errors import DataError, UsageError
from harness.history.folder import History
from harness.history.records import COLD, RunRecord
from harness.judging.evidence import ONE_STAGE, Stages
from harness.profiles.cells import Cell, select_cells
from harness.profiles.load import read_profile
from harness.profiles.model import Profile
from harness.profiles.scenarios import AT_ONCE
from harness.prompts.model import load_prompts
from harness.util.invalid_data import refused_as
from harness.workload.cells import CellWork, Choice, cell_work, choose_scenarios, proves


class MergeOptions(NamedTuple):
    """What the merged run should consist of, and what is tolerated in its parts."""

    expect: str | None = None
    """Profile whose matrix the parts should cover, and whose baselines judge it; None takes the recorded one."""
    cells: Sequence[str] = ()
    """Shell patterns of the planned cells; an empty sequence means all."""
    scenarios: Sequence[str] = ()
    armed: bool = False
    """Accept parts with mutants enabled."""
    keep_going: bool = False
    """Leave out parts that do not match or cannot be read, use interrupted ones as far as they got, and do without
    cells that no part completed."""


class Loaded(NamedTuple):
    history: History
    stages: Stages = ONE_STAGE

    @property
    def run(self) -> RunRecord:
        return self.history.run


class ExpectedRun(NamedTuple):
    """The matrix that the parts should cover."""

    profile: Profile
    source: str
    signature: Signature
    cells: tuple[Cell, ...]
    works: Mapping[str, CellWork]
    """Requests of each cell; empty if the prompts are not on this machine."""
    choice: Choice

    def asks(self, cell: Cell) -> dict[str, int]:
        """Return the planned requests of a cell by scenario, the cold ones first; 1 for each scenario where its prompts
        are not on this machine."""
        work = self.works.get(cell.id)
        if work is not None:
            return {COLD: len(work.items), **work.planned}
        part = self.profile.part(cell.variant)
        scenarios = [AT_ONCE] if proves(part) and self.choice.wants(COLD) else []
        scenarios += [s.id for s in part.scenarios if (s.routed or not cell.routed) and cell.topology in s.topologies]
        return {s: 1 for s in (COLD, *scenarios) if self.choice.wants(s)}

    @property
    def identities(self) -> dict[str, dict[str, Any]]:
        """Identities of all parts."""
        return {k: v for k, v in self.signature.identities.items() if v is not None}

    @property
    def prompts_sha256(self) -> str:
        """Hash of the prompts of the first variant with requests, as a single run records it."""
        prompts = self.signature.prompts
        return next((prompts[p.variant] for p in self.profile.parts if p.variant in prompts), "")


def expected_run(run: RunRecord, signature: Signature, wanted: MergeOptions) -> ExpectedRun:
    """Return the matrix to expect. Raises UsageError when the profile given differs from the recorded one, or a pattern
    matches nothing."""
    if wanted.expect is None:
        profile, source = _recorded_profile(run), run.asked_for.source
    else:
        profile, source = read_profile(wanted.expect), wanted.expect
        _require_same_profile(signature, profile, wanted.expect)
    choice = choose_scenarios(profile, wanted.scenarios, wanted.expect)
    cells = select_cells(profile, wanted.cells, wanted.expect)
    works: dict[str, CellWork] = {}
    for part in profile.parts:
        try:
            prompts = load_prompts(part.workload.prompts)
        except DataError:
            continue
        if prompts.sha256 == signature.prompts.get(part.variant):
            works |= {c.id: cell_work(part, prompts, c, choice) for c in cells if c.variant == part.variant}
    everything = ExpectedRun(profile, source, signature, (), works, choice)
    # A cell to which no chosen scenario applies is not run.
    return everything._replace(cells=tuple(c for c in cells if any(everything.asks(c).values())))


def _recorded_profile(run: RunRecord) -> Profile:
    what = f"this version cannot read the profile in run.json of {run.run_id}; name it with --expect PROFILE"
    with refused_as(UsageError, what):
        profile = run.asked_for.as_profile()
        # Validates every part, as reading a profile does.
        len(profile.written_parts)
        return profile


def _require_same_profile(recorded: Signature, profile: Profile, source: str) -> None:
    raw = profile.model_dump(mode="json")
    named = recorded._replace(profile=comparable_profile(raw), models=commits_in(raw))
    differences = describe_differences(named, recorded)
    if differences:
        raise UsageError(
            f"--expect {source}: the parts are of another profile ({differences}); name the profile with which they "
            "were recorded"
        )
