"""The folder of a recorded run: written while it runs, and loaded to be judged.

Checks read nothing else. During the run, observations are written as JSON lines, each flushed, so that an interrupted
run keeps everything; at its end they are copied to Parquet, which is easier to query.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, InstanceOf, ValidationError

from harness.errors import DataError, NotARunError, StorageError
from harness.history import index
from harness.history.checksum import LINES, PARQUET, SEALED_FROM, check_observations, sealed, unsealed
from harness.history.index import CellRows, HeldCells, Lazy, RecordedLines
from harness.history.migrations import SCHEMA, migrate
from harness.history.records import COLD, CellRecord, Form, Observation, RunRecord
from harness.util import json_io
from harness.util.files import write_json
from harness.util.json_io import MIB, printable
from harness.util.storage import LineFile, writing
from harness.util.strict import Strict, describe_validation_error

SECOND = "second-stage"
"""Folder inside a run with the repetition of its failed tests on held-out prompts and fresh engines."""
RUN = "run.json"
_MOST_BYTES = 256 * MIB
"""Largest run.json that is read; that of a thousand cells has about 4 MiB."""


class HistoryWriter:
    """Appends observations to a run folder; the operating system has each line before the next request is sent."""

    def __init__(self, folder: Path) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lines = LineFile(folder / LINES)

    def append(self, observation: Observation) -> None:
        """Append an observation. Raises StorageError when it cannot be written; earlier lines are unaffected."""
        self._lines.append(observation.model_dump_json())

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_run(folder: Path, record: RunRecord) -> None:
    """Write ``run.json``. Raises StorageError.

    In a finished run it seals the observations as they are in the folder now, so they must be written first.
    """
    # Keys are not sorted, because the order of a profile's axes and of their values has a meaning.
    write_json(folder / RUN, sealed(printable(record.model_dump(mode="json")), folder), sort_keys=False)


def write_parquet(folder: Path, observations: Iterable[Observation]) -> None:
    """Write a columnar copy of the observations: flat columns to query, and the whole record as JSON in ``record``.

    Observations are consumed and written in groups. Raises StorageError, also for numbers that no column can hold.
    """
    temporary = folder / f".{PARQUET}"
    rows = iter(observations)
    try:
        with writing(folder / PARQUET):
            with pq.ParquetWriter(temporary, _COLUMNS) as writer:
                while group := [_row(o) for o in islice(rows, _GROUP)]:
                    writer.write_table(pa.Table.from_pylist(group, _COLUMNS))
            temporary.replace(folder / PARQUET)
    except (OverflowError, pa.ArrowException) as error:
        raise StorageError(
            f"{folder / PARQUET}: expected signed 64-bit numbers, found others ({error}); the JSON lines have them, "
            "and only this copy is missing"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


_GROUP = 4096
"""Number of rows that are written together."""
_COLUMNS = pa.schema(
    [
        ("cell", pa.string()),
        ("prompt_id", pa.string()),
        ("form", pa.string()),
        ("scenario", pa.string()),
        ("part", pa.string()),
        ("sequence", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("output_ids", pa.list_(pa.int64())),
        ("per_step_accepted", pa.list_(pa.int64())),
        ("per_step_drafted", pa.list_(pa.int64())),
        ("seconds", pa.float64()),
        ("error", pa.string()),
        ("record", pa.string()),
    ]
)


def _row(o: Observation) -> dict[str, Any]:
    final = o.final
    spec = final.speculation if final else None
    return {
        "cell": o.cell,
        "prompt_id": o.prompt_id,
        "form": o.form,
        "scenario": o.scenario,
        "part": o.part,
        "sequence": o.sequence,
        "prompt_tokens": len(o.sent_ids),
        "output_ids": list(final.output_ids or ()) if final else [],
        "per_step_accepted": list(spec.per_step_accepted) if spec else [],
        "per_step_drafted": list(spec.per_step_drafted) if spec else [],
        "seconds": sum(leg.seconds for leg in o.legs),
        "error": o.error,
        "record": o.model_dump_json(),
    }


class History(Strict):
    """A recorded run, loaded."""

    folder: Path
    run: RunRecord
    observations: Annotated[InstanceOf[Lazy[Observation]] | tuple[Observation, ...], Field(union_mode="left_to_right")]
    """Observations in memory, or those of a large run, which are parsed on demand (``harness.history.index``)."""
    own: bool = False
    """Whether this process recorded it from a profile that its user named, so that its paths are the user's."""
    torn_line: bool = False
    """Whether the last JSON line was cut off (the run was killed while writing it) and left out."""
    notices: tuple[str, ...] = ()
    """Remarks on its files for reports."""

    def of(self, cell: str, form: Form = "ids", scenario: str = COLD) -> dict[str, Observation]:
        """Return observations of a cell by key (cold ones: by prompt id); of duplicate keys the last one counts."""
        return {o.key: o for o in self.of_cell(cell).by_place.get((form, scenario), ())}

    @cached_property
    def _cells(self) -> Lazy[Observation] | HeldCells[Observation]:
        return self.observations if isinstance(self.observations, Lazy) else HeldCells(self.observations)

    def of_cell(self, cell: str) -> CellRows[Observation]:
        """Return the observations of a cell, which are empty for a cell that was not recorded."""
        return self._cells.of_cell(cell)

    def of_scenario(self, scenario: str) -> Iterator[Observation]:
        """Iterate over all observations of a scenario, in the order of the record."""
        if isinstance(self.observations, Lazy):
            return self.observations.of_scenario(scenario)
        return (o for o in self.observations if o.scenario == scenario)

    def in_order(self, cell: str) -> list[Observation]:
        """Return all observations of a cell, of every form and scenario, in the order of their requests."""
        return self.of_cell(cell).ordered

    def cell(self, cell_id: str) -> CellRecord | None:
        return next((c for c in self.run.cells if c.cell == cell_id), None)


def load_history(folder: Path, in_memory: int | None = None) -> History:
    """Load a run folder. Raises NotARunError for other folders and DataError for damaged files.

    Up to ``in_memory`` bytes of lines are parsed at once (None: ``harness.history.index.IN_MEMORY``), more on demand.
    """
    run_file = folder / RUN
    if not run_file.is_file():
        raise NotARunError(
            f"{folder}: expected the folder of a recorded run (with {RUN}), found "
            f"{'a folder without it' if folder.is_dir() else 'no such folder'}; runs are kept below reports/"
        )
    try:
        raw = json_io.loads(json_io.read_text(run_file, _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{run_file}: expected JSON, but it cannot be read ({error})") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    seal = None
    if version == SEALED_FROM:
        raw, seal = unsealed(raw, run_file)
    try:
        raw = migrate(raw) if isinstance(raw, dict) else raw
    except (TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{run_file} is damaged: it does not have the shape of schema {version!r} ({error})") from error
    if not isinstance(raw, dict) or raw.get("schema_version") != SCHEMA:
        raise DataError(
            f"{run_file}: expected history schema 1 to {SCHEMA}, found {version!r}; use the harness version that "
            "recorded it"
        )
    try:
        run = RunRecord.model_validate(raw)
    except ValidationError as error:
        raise DataError(f"{run_file} is damaged:\n{describe_validation_error(error)}") from error
    if not isinstance(run.profile.get("name"), str):
        raise DataError(f"{run_file} is damaged:\n  profile.name: expected the profile's name, found none")
    counting, notices = check_observations(folder, seal)
    most = index.IN_MEMORY if in_memory is None else in_memory
    observations, torn = _read_observations(folder, counting, most)
    return History(folder=folder, run=run, observations=observations, torn_line=torn, notices=tuple(notices))


def _read_observations(
    folder: Path, counting: str | None, in_memory: int
) -> tuple[tuple[Observation, ...] | Lazy[Observation], bool]:
    if counting is None:
        return (), False
    if counting == PARQUET:
        parquet = folder / PARQUET
        try:
            records = [str(r) for r in pd.read_parquet(parquet, columns=["record"])["record"]]
        except Exception as error:
            raise DataError(
                f"{parquet}: expected a Parquet file of observations, but it cannot be read ({error}); restore it or "
                f"{LINES} from a copy"
            ) from error
        return tuple(_parse(r, f"{parquet}, row {i}") for i, r in enumerate(records, 1)), False
    lines = folder / LINES
    try:
        if lines.stat().st_size > in_memory:
            large = RecordedLines(lines, _parse)
            return large, large.torn
        data = lines.read_bytes()
    except OSError as error:
        raise DataError(f"{lines}: expected JSON lines, but it cannot be read ({error})") from error
    complete, _, rest = data.rpartition(b"\n")
    rows = complete.split(b"\n") if complete else []
    # Split bytes, not text: a torn line may end within a character.
    return tuple(_parse(r, f"{lines}, line {i}") for i, r in enumerate(rows, 1)), bool(rest.strip())


def _parse(text: str | bytes, where: str) -> Observation:
    try:
        return Observation.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{where}: expected an observation, found damaged data:\n{describe_validation_error(error)}"
        ) from error
