"""Read and write baseline files: damage is reported precisely, writes are atomic, and row order keeps diffs short."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from harness.baselines.model import FORMAT, Again, Baseline, BaselineRow, Header, Provenance
from harness.baselines.summary import summarise
from harness.errors import DataError
from harness.history.identity import Identity
from harness.history.rounding import Rounding
from harness.util import json_io
from harness.util.files import sha256_bytes, write_atomic, write_json
from harness.util.invalid_data import describe_validation_error

_MOST_BYTES = 256 * json_io.MIB
_REMEDY = "restore the file from version control, or record it again with `harness baseline record`"


def load_header(path: Path) -> Header:
    """Load the header of a baseline from its ``.json`` file, without its rows. Raises DataError."""
    try:
        header = Header.model_validate(json_io.loads(json_io.read_text(path, _MOST_BYTES)))
    except ValidationError as error:
        raise DataError(f"baseline {path} is damaged:\n{describe_validation_error(error)}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"baseline {path}: expected JSON, but it cannot be read ({error}); {_REMEDY}") from error
    if header.format != FORMAT:
        raise DataError(f"baseline {path}: expected format {FORMAT}, found {header.format!r}; {_REMEDY}")
    return header


def read_table(path: Path, header: Header) -> str:
    """Return the text of a baseline's rows, verified against the header's hash. Raises DataError."""
    table = path.with_suffix(".csv")
    try:
        text = json_io.read_text(table, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(
            f"baseline {table}: expected the rows of {path.name}, but they cannot be read ({error}); {_REMEDY}"
        ) from error
    if sha256_bytes(text.encode()) != header.rows_sha256:
        raise DataError(
            f"baseline {table}: its rows do not match the hash in {path.name}, so lines were changed or lost; {_REMEDY}"
        )
    return text


def load_baseline(path: Path) -> Baseline:
    """Load and verify a baseline from its ``.json`` file. Raises DataError describing the damage."""
    header = load_header(path)
    baseline = with_rows(path, header, read_table(path, header))
    # The hash covers only the rows, so the summary is recomputed from them rather than trusted.
    figures = summarise(baseline.rows, header.identity.draft_tokens)
    return baseline.model_copy(update={"header": header.model_copy(update={"summary": figures})})


def with_rows(path: Path, header: Header, text: str) -> Baseline:
    """Build a baseline from a header, whose summary is taken as it is, and the text of its rows. Raises DataError if
    rows are damaged."""
    return Baseline(header=header, rows=_parse(text, path.with_suffix(".csv")))


def _parse(text: str, table: Path) -> tuple[BaselineRow, ...]:
    reader = csv.DictReader(io.StringIO(text))
    found = tuple(reader.fieldnames or ())
    more = (c for group in (UP_TO_COLUMNS, LOGPROB_COLUMNS) if not group.keys().isdisjoint(found) for c in group)
    if found != (*COLUMNS, *more):
        raise DataError(
            f"baseline {table}: expected the columns {', '.join(COLUMNS)}, found {reader.fieldnames}; record it again "
            "with `harness baseline record`"
        )
    rows = []
    for number, raw in enumerate(reader, start=2):
        try:
            rows.append(_row(raw))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"baseline {table}, line {number}: expected a row, found damaged data ({error})") from error
    return tuple(rows)


@lru_cache(maxsize=2048)
def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


@lru_cache(maxsize=2048)
def _floats(text: str) -> tuple[float | None, ...]:
    words = text.split()
    return tuple([None if v == "-" else float(v) for v in words] if "-" in words else map(float, words))


def _words(values: Iterable[object]) -> str:
    """Return values as a list in one column."""
    return " ".join("-" if v is None else str(v) for v in values)


def _row(raw: dict[str, str]) -> BaselineRow:
    again = None
    if raw["again_steps"]:
        again = Again(
            divergence=int(raw["again_divergence"]) if raw["again_divergence"] else None,
            gap=float(raw["again_gap"]) if raw["again_gap"] else None,
            steps=int(raw["again_steps"]),
            accepted_at=_numbers(raw["again_accepted_at"]),
            token=int(raw["again_token"]) if raw["again_token"] else None,
            drafted_at=_numbers(raw.get("again_drafted_at", "")),
        )
    close = [pair.split(":") for pair in raw["close"].split()]
    return BaselineRow(
        prompt_id=raw["prompt_id"],
        prompt_sha256=raw["prompt_sha256"],
        output_ids=_numbers(raw["output_ids"]),
        min_top_gap=float(raw["min_top_gap"]) if raw["min_top_gap"] else None,
        accepted=_numbers(raw["accepted"]),
        drafted=_numbers(raw.get("drafted", "")),
        close=tuple((int(at), float(gap)) for at, gap, *_ in close),
        runner_ups=tuple((int(at), int(token)) for at, _, *rest in close for token in rest),
        gaps=_floats(raw["gaps"]),
        logprobs=_floats(raw.get("logprobs", "")),
        again=again,
    )


def _of_again(read: Callable[[Again], object]) -> Callable[[BaselineRow], object]:
    return lambda row: None if row.again is None else read(row.again)


def _close(row: BaselineRow) -> str:
    second = dict(row.runner_ups)
    return _words(f"{at}:{gap}" + (f":{second[at]}" if at in second else "") for at, gap in row.close)


COLUMNS: dict[str, Callable[[BaselineRow], object]] = {
    "prompt_id": lambda r: r.prompt_id,
    "prompt_sha256": lambda r: r.prompt_sha256,
    "output_tokens": lambda r: len(r.output_ids),
    "steps": lambda r: len(r.accepted),
    "accepted": lambda r: _words(r.accepted),
    "min_top_gap": lambda r: r.min_top_gap,
    "close": _close,
    "again_divergence": _of_again(lambda a: a.divergence),
    "again_gap": _of_again(lambda a: a.gap),
    "again_steps": _of_again(lambda a: a.steps),
    "again_accepted_at": _of_again(lambda a: _words(a.accepted_at)),
    "output_ids": lambda r: _words(r.output_ids),
    "again_token": _of_again(lambda a: a.token),
    "gaps": lambda r: _words(r.gaps),
}
"""What each column has of a row, None for nothing: ``accepted`` the accepted drafts of every verify step; lists are
numbers separated by spaces, in ``gaps`` and ``logprobs`` with ``-`` for one that is not known, and ``close`` is a
list of ``index:gap:runner-up``, the last if it is known."""
UP_TO_COLUMNS: dict[str, Callable[[BaselineRow], object]] = {
    "drafted": lambda r: _words(r.drafted),
    "again_drafted_at": lambda r: _words(r.again.drafted_at if r.again else ()),
}
"""Columns that only files of methods that draft up to k tokens a step have."""
LOGPROB_COLUMNS: dict[str, Callable[[BaselineRow], object]] = {"logprobs": lambda r: _words(r.logprobs)}
"""A column that files of earlier versions, and of the normal tier, lack."""


def _text(rows: Sequence[BaselineRow]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = COLUMNS | (UP_TO_COLUMNS if any(r.drafted for r in rows) else {})
    columns |= LOGPROB_COLUMNS if any(r.logprobs for r in rows) else {}
    writer.writerow(columns)
    writer.writerows([value(r) for value in columns.values()] for r in rows)
    return out.getvalue()


def write_baseline(
    path: Path,
    identity: Identity,
    provenance: Provenance,
    rows: Sequence[BaselineRow],
    rounding: Rounding | None = None,
) -> None:
    """Write both files of a baseline; ``path`` is the ``.json`` one. Rows keep the order of the prompt set."""
    text = _text(rows)
    header = Header(
        format=FORMAT,
        identity=identity,
        provenance=provenance,
        summary=summarise(rows, identity.draft_tokens),
        rows_sha256=sha256_bytes(text.encode()),
        rounding=rounding,
    )
    # Rows first: a reader between the two writes sees a hash mismatch and refuses.
    write_atomic(path.with_suffix(".csv"), text)
    write_json(path, header.model_dump(mode="json"))


def stored(folder: Path) -> list[Path]:
    """Return the ``.json`` files of all baselines in a folder, sorted."""
    return sorted(folder.glob("*.json")) if folder.is_dir() else []
