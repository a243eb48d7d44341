"""Texts that people wrote, for natural prompts: from a dataset on the hub at a commit, or from a local file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import DataError, EnvironmentFault
from harness.profiles.hub import Hub
from harness.prompts.model import TextSource
from harness.util.files import read_json_lines, sha256_file

MT_BENCH = "HuggingFaceH4/mt_bench_prompts"
_USERS = ("user", "human")


class Texts(NamedTuple):
    """First user turns with their row numbers, and their origin."""

    rows: tuple[tuple[int, str], ...]
    source: TextSource


def first_turn(value: Any) -> str | None:
    """Return the first user turn in a table cell that holds a text, a list of turns, or a list of messages."""
    if isinstance(value, str):
        return value.strip() or None
    if not isinstance(value, Sequence) or not value:
        return None
    if isinstance(value[0], str):
        return value[0].strip() or None
    for message in value:
        if isinstance(message, dict) and (message.get("role") or message.get("from")) in _USERS:
            said = message.get("content") or message.get("value")
            return said.strip() or None if isinstance(said, str) else None
    return None


def read_texts(path: Path, column: str) -> Texts:
    """Read the texts of a JSON-lines (.jsonl) or Parquet file. Raises DataError when it has none or is unreadable."""
    if not path.is_file():
        raise DataError(f"--file {path}: expected a .jsonl or .parquet file, found no such file; correct the path")
    if path.suffix == ".parquet":
        values = _parquet(path, column)
    elif path.suffix == ".jsonl":
        lines = [raw for _, raw in read_json_lines(path, "--file")]
        _require_column(str(path), column, list(lines[0]) if lines else [])
        values = [raw.get(column) for raw in lines]
    else:
        raise DataError(f"--file {path}: expected the ending .jsonl or .parquet, found {path.suffix or 'none'!r}")
    return _texts(values, TextSource(dataset=path.name, column=column, revision=sha256_file(path)))


def _parquet(path: Path, column: str) -> list[Any]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        _require_column(str(path), column, parquet.read_schema(path).names)
        return list(parquet.read_table(path, columns=[column])[column].to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"--file {path}: expected a Parquet file, but it cannot be read ({reason})") from error


def fetch_texts(dataset: str, config: str | None, split: str, column: str, revision: str, hub: Hub) -> Texts:
    """Download the texts of a dataset from the hub, at the current commit of ``revision``.

    Raises EnvironmentFault when the package datasets is missing or the hub does not answer, ProfileError when dataset
    or revision do not exist, and DataError when configuration, split or column do not.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise EnvironmentFault(
            "--dataset: expected the package datasets, found none; install the extra `natural`, or give --file"
        ) from error
    commit = hub.dataset_commit(dataset, revision)
    name = f"--dataset {dataset}"
    try:
        table = load_dataset(dataset, config, split=split, revision=commit)
    except Exception as error:
        # The package's errors for wrong names, unknown formats and transport have no common base class.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"{name}: expected split {split!r} of configuration {config or 'default'!r}, but it cannot be loaded "
            f"({reason}); correct --config and --split, or give --file"
        ) from error
    _require_column(name, column, table.column_names)
    source = TextSource(dataset=dataset, config=config, split=split, column=column, revision=commit)
    return _texts(list(table[column]), source)


def _require_column(name: str, column: str, found: Sequence[str]) -> None:
    if column not in found:
        raise DataError(f"{name}: expected a column {column!r}, found {', '.join(found) or 'none'}; correct --column")


def _texts(values: Sequence[Any], source: TextSource) -> Texts:
    """Return the distinct texts: a duplicate could be in both halves."""
    rows: dict[str, int] = {}
    for number, value in enumerate(values):
        text = first_turn(value)
        if text is not None:
            rows.setdefault(text, number)
    if not rows:
        raise DataError(
            f"{source.dataset}: expected texts or lists of turns in column {source.column!r}, found none; "
            "correct --column"
        )
    return Texts(tuple((n, t) for t, n in rows.items()), source)
