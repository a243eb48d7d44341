"""The columnar copy of the observations of a run, which is easier to query; nothing is judged from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import StorageError
from harness.history.layout import PARQUET
from harness.history.records import Observation
from harness.util.extras import INSTALL_RUN
from harness.util.storage import writing

if TYPE_CHECKING:
    import pyarrow


_GROUP = 4096
"""Number of rows that are written together."""


def write_parquet(folder: Path, observations: Iterable[Observation]) -> None:
    """Write a columnar copy of the observations: flat columns to query, and the whole record as JSON in ``record``.

    Observations are consumed and written in groups. Raises StorageError, also for numbers that no column can hold and
    where pyarrow, which judging does not need, is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise StorageError(
            f"{folder / PARQUET}: expected pyarrow to write it, found none; the JSON lines have the same, and only "
            f"this copy is missing; {INSTALL_RUN}"
        ) from error
    columns = _columns()
    temporary = folder / f".{PARQUET}"
    rows = iter(observations)
    try:
        with writing(folder / PARQUET):
            with pq.ParquetWriter(temporary, columns) as writer:
                while group := [_row(o) for o in islice(rows, _GROUP)]:
                    writer.write_table(pa.Table.from_pylist(group, columns))
            temporary.replace(folder / PARQUET)
    except (OverflowError, pa.ArrowException) as error:
        raise StorageError(
            f"{folder / PARQUET}: expected signed 64-bit numbers, found others ({error}); the JSON lines have them, "
            "and only this copy is missing"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _columns() -> pyarrow.Schema:
    import pyarrow as pa

    return pa.schema(
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
