"""The columnar copy of the observations of a run, which is easier to query; nothing is judged from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from harness.errors import StorageError
from harness.history.layout import PARQUET
from harness.history.records import Observation
from harness.util.extras import INSTALL_RUN
from harness.util.storage import writing

_GROUP = 512
"""Number of rows that are written together. A row holds its whole record, several KiB: 4096 took 40 MiB."""


def _steps(o: Observation, name: str) -> list[int]:
    return list(getattr(o.final.speculation, name)) if o.final and o.final.speculation else []


_COLUMNS: dict[str, tuple[str, Callable[[Observation], object]]] = {
    "cell": ("text", lambda o: o.cell),
    "prompt_id": ("text", lambda o: o.prompt_id),
    "form": ("text", lambda o: o.form),
    "scenario": ("text", lambda o: o.scenario),
    "part": ("text", lambda o: o.part),
    "sequence": ("number", lambda o: o.sequence),
    "prompt_tokens": ("number", lambda o: len(o.sent_ids)),
    "output_ids": ("numbers", lambda o: list(o.final.output_ids or ()) if o.final else []),
    "per_step_accepted": ("numbers", lambda o: _steps(o, "per_step_accepted")),
    "per_step_drafted": ("numbers", lambda o: _steps(o, "per_step_drafted")),
    "seconds": ("seconds", lambda o: sum(leg.seconds for leg in o.legs)),
    "error": ("text", lambda o: o.error),
    "record": ("text", lambda o: o.model_dump_json()),
}
"""The columns, each with its type and what it has of an observation."""


@contextlib.contextmanager
def _system_memory(pa: Any) -> Iterator[None]:
    """Let pyarrow take memory from the C library: its own allocator keeps tens of MiB of what was freed."""
    usual = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(usual)


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
    types = {"text": pa.string(), "number": pa.int64(), "numbers": pa.list_(pa.int64()), "seconds": pa.float64()}
    columns = pa.schema([(name, types[kind]) for name, (kind, _) in _COLUMNS.items()])
    temporary = folder / f".{PARQUET}"
    rows = iter(observations)
    try:
        with writing(folder / PARQUET):
            with _system_memory(pa), pq.ParquetWriter(temporary, columns) as writer:
                while group := [{n: value(o) for n, (_, value) in _COLUMNS.items()} for o in islice(rows, _GROUP)]:
                    writer.write_table(pa.Table.from_pylist(group, columns))
            temporary.replace(folder / PARQUET)
    except (OverflowError, pa.ArrowException) as error:
        raise StorageError(
            f"{folder / PARQUET}: expected signed 64-bit numbers, found others ({error}); nothing is lost: the "
            "JSON lines have them, and only this copy is missing"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
