"""The folder of a recorded run: written while it runs, and loaded to be judged.

Checks read nothing else. During the run, observations are written as JSON lines, each flushed, so that an interrupted
run keeps everything; at its end they are copied to Parquet, which is easier to query.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, InstanceOf

from harness.errors import DataError
from harness.history import index
from harness.history.checksum import OWN_SHA256, check_observations, opened, sealed
from harness.history.engine_interfaces import RESET_PREFIX_CACHE
from harness.history.index import CellRows, FoundInFile, RecordedCells, RecordedFile, cell_rows
from harness.history.kv_events import EngineEvents, read_events
from harness.history.layout import CELLS, LINES, ROUNDING, RUN, SCORES, bytes_recorded, files_by_cell, require_run
from harness.history.migrations import OLDEST, SCHEMA, migrate
from harness.history.plan import contradictions, counts_of
from harness.history.records import COLD, COUNTED, RESCORE, CellRecord, EngineRecord, Form, Observation, RunRecord
from harness.history.rounding import Rounding, Way, WayName, measured
from harness.history.verdict import Verdict
from harness.history.witness import KVWitness
from harness.profiles.cells import CellName
from harness.util import json_io
from harness.util.files import require_no_links, write_json
from harness.util.invalid_data import refused_as, shown
from harness.util.json_io import MIB, printable
from harness.util.storage import LineFile, writing
from harness.util.strict import Strict

_MOST_BYTES = 256 * MIB
"""Largest run.json that is read; that of a thousand cells has about 4 MiB."""
_MOST_OPEN = 64
"""Most files that a writer keeps open; cells are asked one after the other, or as many at once as there are engines."""


class HistoryWriter:
    """Appends observations to a run folder; the operating system has each line before the next request is sent."""

    def __init__(self, folder: Path) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._open: dict[Path, LineFile] = {}

    def append(self, observation: Observation) -> None:
        """Append an observation. Raises StorageError when it cannot be written; earlier lines are unaffected."""
        beside = SCORES if observation.scores else ROUNDING
        name = beside if observation.scenario == RESCORE else LINES
        path = self.folder / CELLS / observation.cell / name
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            self._open[path] = LineFile(path)
        self._open[path].append(observation.model_dump_json())

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for lines in self._open.values():
                stack.callback(lines.close)

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_run(folder: Path, record: RunRecord) -> str:
    """Write ``run.json`` and return its hash (``record_sha256``). Raises StorageError.

    In a finished run it seals the observations as they are in the folder now, so they must be written first.
    """
    # Keys are not sorted, because the order of a profile's axes and of their values has a meaning.
    whole = sealed(printable(record.model_dump(mode="json")), folder)
    write_json(folder / RUN, whole, sort_keys=False)
    return str(whole[OWN_SHA256])


class Learned(NamedTuple):
    """What was found of a large run while some of its cells were judged, and is kept."""

    seen: dict[Path, FoundInFile]
    """In files."""
    rounding: dict[str, Rounding | None]
    """By variant."""

    def beyond(self, known: Learned) -> Learned:
        """Return what was not known."""
        return Learned(
            {path: found for path, found in self.seen.items() if path not in known.seen},
            {variant: found for variant, found in self.rounding.items() if variant not in known.rounding},
        )


class History(Strict):
    """A recorded run, loaded."""

    folder: Path
    run: RunRecord
    observations: Annotated[InstanceOf[RecordedCells] | tuple[Observation, ...], Field(union_mode="left_to_right")]
    """Observations in memory, or those of a large run, which are parsed on demand (``harness.history.index``)."""
    sha256: str | None = None
    """``record_sha256`` of ``run.json``; None for runs still in progress."""
    own: bool = False
    """Whether this process recorded it from a profile that its user named, so that its paths are the user's."""
    torn: bool = False
    """``torn_line``, if the files were read when the run was loaded."""
    notices: tuple[str, ...] = ()
    """Remarks on its files for reports."""

    def __repr_args__(self) -> list[tuple[str | None, object]]:
        """Keep ``repr`` to one line: the record and its answers have megabytes."""
        return [("run_id", self.run.run_id), ("folder", str(self.folder)), ("cells", len(self.run.cells))]

    def of(self, cell: str, form: Form = "ids", scenario: str = COLD) -> dict[str, Observation]:
        """Return observations of a cell by key (cold ones: by prompt id); of duplicate keys the last one counts. The
        result is shared, and not to be changed."""
        rows = self.of_cell(cell)
        asked = rows.by_place.get((form, scenario), ())
        return rows.once(("by key", form, scenario), lambda: {o.key: o for o in asked})

    @property
    def torn_line(self) -> bool:
        """Whether a last line was cut off (the run was killed while writing it) and left out."""
        found = self.observations
        return self.torn or (isinstance(found, RecordedCells) and found.unread and found.torn)

    def require_valid(self) -> None:
        """Read what nobody has read yet of a run that was loaded ``unread``. Raises DataError as ``load_history``
        does for others."""
        if isinstance(self.observations, RecordedCells) and self.observations.unread:
            _require_each_exchange_once(self.folder, self.observations)

    @cached_property
    def _in_memory(self) -> dict[str, CellRows]:
        by_cell: dict[str, list[Observation]] = defaultdict(list)
        for o in self.observations:
            by_cell[o.cell].append(o)
        return {cell: cell_rows(rows) for cell, rows in by_cell.items()}

    @cached_property
    def answered(self) -> int:
        """Requests that were answered, without those beside the plan; of a large run it takes a pass over its files."""
        return sum(o.scenario != RESCORE and o.error is None for o in self.observations)

    @cached_property
    def tokens_said(self) -> int:
        """Output tokens of all answers, without those that were re-scored."""
        if isinstance(self.observations, RecordedCells):
            return self.observations.said
        return sum(o.tokens_said for o in self.observations)

    def of_cell(self, cell: str) -> CellRows:
        """Return the observations of a cell, which are empty for a cell that was not recorded."""
        if isinstance(self.observations, RecordedCells):
            return self.observations.of_cell(cell)
        return self._in_memory.get(cell, CellRows({}, [], {}))

    def of_scenario(self, scenario: str) -> Iterator[Observation]:
        """Iterate over all observations of a scenario, in the order of the record."""
        if isinstance(self.observations, RecordedCells):
            return self.observations.of_scenario(scenario)
        return (o for o in self.observations if o.scenario == scenario)

    def in_order(self, cell: str) -> list[Observation]:
        """Return all observations of a cell, of every form and scenario, in the order of their requests."""
        return self.of_cell(cell).ordered

    @property
    def limiting_verdicts(self) -> tuple[Verdict, ...]:
        """Upper bounds on the verdict of the run, whatever its cells say."""
        return (*self.run.limiting_verdicts, *([Verdict.UNKNOWN] if self.unplanned() else ()))

    def unplanned(self) -> list[tuple[str, str]]:
        """Return the cells and scenarios of answers that belong to nothing that the run was to send."""
        planned = {(c.cell, s) for c in self.run.cells for s in counts_of(c)}
        scored = RESCORE if self.run.rescore or self.run.rounding else None
        return [place for place in self._places() if place not in planned and place[1] != scored]

    def first_answers(self, cell: str) -> dict[tuple[tuple[int, ...], str], Observation]:
        """Return the answers of a cell by prompt and LoRA adapter: of several the cold one, else the first one that was
        asked alone. A request for several answers at once is none of them."""
        if cell not in self._first_answers:
            found: dict[tuple[tuple[int, ...], str], Observation] = {}
            for o in sorted(self.in_order(cell), key=lambda o: (o.scenario != COLD, o.concurrent > 1)):
                asked = o.route == "cell" and o.mistake is None and o.scenario != RESCORE and o.answers == 1
                if asked and o.error is None and o.final is not None:
                    found.setdefault((o.sent_ids, o.adapter), o)
            self._first_answers[cell] = found
        return self._first_answers[cell]

    @cached_property
    def _first_answers(self) -> dict[str, dict[tuple[tuple[int, ...], str], Observation]]:
        return {}

    def kv_events(self, group: str) -> dict[str, EngineEvents]:
        """Return what the engines of a group told of their prefix caches, by role. Raises DataError for damaged
        files."""
        return read_events(self.folder, group)

    @cached_property
    def kv_witness(self) -> KVWitness:
        """What the engines' KV caches held; without notes where the profile did not ask for them. Raises DataError for
        damaged notes."""
        return KVWitness(self.folder)

    @property
    def rounding(self) -> dict[str, Rounding]:
        """How the plain engine of each variant rounds, as far as this run shows; none for those that show nothing."""
        found = {variant: self.rounding_of(variant) for variant in self._plain}
        return {variant: rounding for variant, rounding in found.items() if rounding is not None}

    def rounding_of(self, variant: str) -> Rounding | None:
        """Return how the plain engine of a variant rounds; None if this run does not show it. It is measured when it is
        needed first, as the cells of the variant are."""
        if variant not in self._rounding:
            plain = self._plain.get(variant)
            ways = self._measured(plain) if plain is not None else {}
            self._rounding[variant] = Rounding(ways=ways) if ways else None
        return self._rounding[variant]

    @cached_property
    def _rounding(self) -> dict[str, Rounding | None]:
        return {}

    @property
    def learned(self) -> Learned:
        """What was found of a large run so far, for another process that has the same run."""
        seen = self.observations.seen if isinstance(self.observations, RecordedCells) else {}
        return Learned(seen, dict(self._rounding))

    def learn(self, learned: Learned) -> None:
        """Take over what another process found."""
        if isinstance(self.observations, RecordedCells):
            self.observations.take(learned.seen)
        for variant, rounding in learned.rounding.items():
            self._rounding.setdefault(variant, rounding)

    @cached_property
    def _plain(self) -> dict[str, str]:
        """The plain engine's cell of each variant that has one."""
        names = [CellName.of(c.cell) for c in self.run.cells]
        return {name.variant: name.id for name in names if name.reference == name.id}

    def _measured(self, cell: str) -> dict[WayName, Way]:
        asked = self.in_order(cell)
        beside = [o for o in asked if o.scenario == RESCORE]
        answers = [o for o in asked if o.scenario != RESCORE]
        return measured(answers, [o for o in beside if o.scores], [o for o in beside if not o.scores])

    def _places(self) -> dict[tuple[str, str], None]:
        """Return the cells and scenarios of all answers, in the order of the record."""
        if isinstance(self.observations, RecordedCells):
            files = ((cell, file) for cell, of in self.observations.files.items() for file in of)
            return {(cell, scenario): None for cell, file in files for scenario in sorted(file.seen.scenarios)}
        return {(o.cell, o.scenario): None for o in self.observations}

    def cell(self, cell_id: str) -> CellRecord | None:
        return self._records.get(cell_id)

    @cached_property
    def _records(self) -> dict[str, CellRecord]:
        return {c.cell: c for c in reversed(self.run.cells)}

    def engines(self, group: str) -> dict[str, EngineRecord]:
        """Return the engines of a group by role; the result is shared, and not to be changed."""
        return self._engines.get(group, {})

    @cached_property
    def _engines(self) -> dict[str, dict[str, EngineRecord]]:
        found: dict[str, dict[str, EngineRecord]] = {}
        for engine in self.run.engines:
            found.setdefault(engine.group, {})[engine.role] = engine
        return found


def load_history(folder: Path, in_memory: int | None = None, unread: bool = False) -> History:
    """Load a run folder. Raises NotARunError for other folders and DataError for damaged files.

    Less than ``in_memory`` bytes of lines are parsed at once (None: ``harness.history.index.IN_MEMORY``), more on
    demand; with 0, all are. With ``unread``, those are validated by whoever reads them first, which saves a reading:
    ``History.require_valid`` has to follow.
    """
    require_run(folder)
    run_file = folder / RUN
    require_no_links(folder)
    try:
        raw = json_io.loads(json_io.read_text(run_file, _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{run_file}: expected JSON, but it cannot be read ({error})") from error
    if not isinstance(raw, dict):
        raise DataError(f"{run_file}: expected an object, found {shown(raw)}; copy the run again")
    version = raw.get("schema_version")
    if version is None:
        raise DataError(f"{run_file}: it has no schema_version, so it is no record of a run; correct the path")
    if type(version) is not int or version not in range(OLDEST, SCHEMA + 1):
        raise DataError(
            f"{run_file}: expected history schema {OLDEST} to {SCHEMA}, found {version!r}; use the harness version "
            "that recorded it"
        )
    sha256 = raw.get(OWN_SHA256)
    raw, seal = opened(raw, run_file)
    try:
        raw = migrate(raw)
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise DataError(f"{run_file} is damaged: it does not have the shape of schema {version} ({error})") from error
    with refused_as(DataError, f"{run_file} is damaged"):
        run = RunRecord.model_validate(raw)
    if not isinstance(run.asked_for.setting("name"), str):
        raise DataError(f"{run_file} is damaged:\n  profile.name: expected the profile's name, found none")
    wrong = list(contradictions(run))
    # A merged run has the cells of its parts as they are, those of earlier versions among them.
    if version == SCHEMA and run.merged is None:
        wrong += _lost(run)
    if wrong:
        raise DataError("\n  ".join([f"{run_file} contradicts itself, so it is not judged:", *wrong]))
    order = [c.cell for c in run.cells]
    most = index.IN_MEMORY if in_memory is None else in_memory
    try:
        check_observations(folder, seal)
        kept: list[Observation] | None = [] if bytes_recorded(folder) < most else None
        recorded = read_cells(folder, order, kept, unread and kept is None)
    except OSError as error:
        raise DataError(f"{folder}: expected its observations, but they cannot be read ({error})") from error
    if recorded.unread:
        return History(folder=folder, run=run, observations=recorded, sha256=sha256)
    _require_each_exchange_once(folder, recorded)
    observations = tuple(kept) if kept is not None else recorded
    return History(folder=folder, run=run, observations=observations, sha256=sha256, torn=recorded.torn)


def _lost(run: RunRecord) -> Iterator[str]:
    """Yield what a record of this version has and this one lacks."""
    if RESET_PREFIX_CACHE not in run.lacking and run.kind == "run":
        untold = (c.cell for c in run.cells if c.emptied_s == {} and c.state == "complete")
        yield from (f"{cell}: it is not recorded when the KV pools were empty" for cell in untold)
    yield from (f"{c.cell}: expected its plan, found only counts" for c in run.cells if c.plan == COUNTED)


def _require_each_exchange_once(folder: Path, recorded: RecordedCells) -> None:
    if again := recorded.repeated_exchanges:
        raise DataError(
            f"{folder}: expected each exchange with an engine (request id and role) once, found {again} that stand for "
            "several answers: the record was written twice or put together by hand; record the run again"
        )


def read_so_far(folder: Path, run: RunRecord) -> History:
    """Load the cells that ``run`` names from the folder of a run that is still being recorded. Raises OSError, and
    DataError for damaged lines."""
    wanted = {c.cell for c in run.cells}
    found = {cell: files for cell, files in files_by_cell(folder).items() if cell in wanted}
    return History(folder=folder, run=run, observations=recorded_cells(found), own=True)


def read_cells(
    folder: Path, order: Iterable[str] = (), kept: list[Observation] | None = None, unread: bool = False
) -> RecordedCells:
    """Read the observations of a run in this order of the cells, and append them to ``kept`` if there is one; with
    ``unread``, leave reading them to others. Raises OSError, and DataError for damaged lines."""
    found = files_by_cell(folder)
    ordered = dict.fromkeys((*order, *found))
    return recorded_cells({cell: found[cell] for cell in ordered if cell in found}, kept, unread)


def recorded_cells(
    files: Mapping[str, Iterable[Path]], kept: list[Observation] | None = None, unread: bool = False
) -> RecordedCells:
    """Return the observations of these files of each cell, and append them to ``kept`` if there is one; with
    ``unread``, leave reading them to others. Raises OSError, and DataError for damaged lines."""
    recorded = {cell: [_opened(path, cell, kept, unread) for path in of] for cell, of in files.items()}
    return RecordedCells(recorded, unread)


def _opened(path: Path, cell: str, kept: list[Observation] | None, unread: bool) -> RecordedFile:
    file = RecordedFile(path, cell)
    if not unread:
        file.read(kept)
    return file
