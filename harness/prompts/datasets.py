"""Texts that people wrote, for natural prompts: from a dataset on the hub at a commit, from a local file, or the
questions that the project ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.errors import DataError, EnvironmentFault
from harness.profiles.hub import Hub
from harness.prompts.model import TextSource
from harness.util.files import read_json_lines, sha256_file
from harness.util.paths import REPOSITORY

MT_BENCH = "HuggingFaceH4/mt_bench_prompts"
SHIPPED = REPOSITORY / "prompts" / "questions.jsonl"
"""Questions and conversations of this project's own, which need no hub."""
WITHOUT_HUB = (
    f"or do without the hub: `--file {SHIPPED}` takes the questions that come with this project, `--file FILE` your "
    "own (.jsonl, .parquet, or one a line), and workload.recipe.file names either in a profile"
)
_USERS = ("user", "human")
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_PLAIN = (".txt", ".text", ".md", "")
"""Endings of files with one text a line."""
_CORRECT = "correct --column"
"""What to do about a table without the column."""
Turns = Literal["first", "all"]


class Turn(NamedTuple):
    """What one side of a conversation said."""

    role: str
    content: str


Conversation = tuple[Turn, ...]
"""The turns of a conversation, of which the last is a user's."""
Text = str | Conversation
"""What a user said first, or a conversation."""


class Texts(NamedTuple):
    """First user turns, or conversations, with their row numbers, and their origin."""

    rows: tuple[tuple[int, Text], ...]
    source: TextSource


def conversation(value: Any) -> Text | None:
    """Return the conversation in a table cell, up to the last turn of its user; the turn alone if it is the only one,
    and the first one where no answers are known."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return first_turn(value)
    turns: list[Turn] = []
    for message in value:
        if not isinstance(message, dict):
            return first_turn(value)
        role = _ROLES.get(str(message.get("role") or message.get("from")))
        said = message.get("content") or message.get("value")
        if role is None or not isinstance(said, str) or not said.strip():
            return first_turn(value)
        turns.append(Turn(role, said.strip()))
    while turns and turns[-1].role != "user":
        turns.pop()
    return turns[0].content if len(turns) == 1 else tuple(turns) or None


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


def read_texts(
    path: Path, column: str, turns: Turns = "first", option: str = "--file", advice: str = _CORRECT
) -> Texts:
    """Read the texts of a JSON-lines (.jsonl), Parquet or plain file, which has one text a line. Raises DataError when
    it has none or is unreadable; that names the ``option`` that gave the file, and the ``advice`` for one without the
    column."""
    if not path.is_file():
        raise DataError(f"{option} {path}: there is no such file of texts; correct the path")
    if path.suffix == ".parquet":
        values = _parquet(path, column, option, advice)
    elif path.suffix == ".jsonl":
        lines = [raw for _, raw in read_json_lines(path, option)]
        _require_column(f"{option} {path}", column, list(lines[0]) if lines else [], advice)
        values = [raw.get(column) for raw in lines]
    elif path.suffix in _PLAIN:
        values = _lines(path, option)
    else:
        raise DataError(
            f"{option} {path}: expected the ending .jsonl, .parquet, or .txt for one text a line, found "
            f"{path.suffix!r}; rename or convert the file"
        )
    return _texts(values, TextSource(dataset=path.name, column=column, revision=sha256_file(path)), turns, advice)


def shipped_texts(turns: Turns) -> Texts:
    """Return the questions that the project ships."""
    return read_texts(SHIPPED, "prompt", turns)


def _lines(path: Path, option: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{option} {path}: expected one text a line, in UTF-8, but it cannot be read ({error}); convert it"
        ) from error


def _parquet(path: Path, column: str, option: str, advice: str) -> list[Any]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        _require_column(f"{option} {path}", column, parquet.read_schema(path).names, advice)
        return list(parquet.read_table(path, columns=[column])[column].to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{option} {path}: expected a Parquet file, but it cannot be read ({reason})") from error


def fetch_texts(
    dataset: str, config: str | None, split: str, column: str, revision: str, hub: Hub, turns: Turns = "first"
) -> Texts:
    """Download the texts of a dataset from the hub, at the current commit of ``revision``.

    Raises EnvironmentFault when the package datasets is missing or the hub does not answer, ProfileError when dataset
    or revision do not exist, and DataError when configuration, split or column do not.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise EnvironmentFault(
            f"--dataset needs the package datasets, which is not here; install the extra `natural`, {WITHOUT_HUB}"
        ) from error
    try:
        commit = hub.dataset_commit(dataset, revision)
    except EnvironmentFault as error:
        raise EnvironmentFault(f"{error}; {WITHOUT_HUB}") from error
    name = f"--dataset {dataset}"
    try:
        table = load_dataset(dataset, config, split=split, revision=commit)
    except Exception as error:
        # The package's errors for wrong names, unknown formats and transport have no common base class.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"{name}: expected split {split!r} of configuration {config or 'default'!r}, but it cannot be loaded "
            f"({reason}); correct --config and --split, {WITHOUT_HUB}"
        ) from error
    _require_column(name, column, table.column_names)
    source = TextSource(dataset=dataset, config=config, split=split, column=column, revision=commit)
    return _texts(list(table[column]), source, turns)


def _require_column(name: str, column: str, found: Sequence[str], advice: str = _CORRECT) -> None:
    if column not in found:
        raise DataError(f"{name}: expected a column {column!r}, found {', '.join(found) or 'none'}; {advice}")


def _texts(values: Sequence[Any], source: TextSource, turns: Turns, advice: str = _CORRECT) -> Texts:
    """Return the distinct texts: a duplicate could be in both halves."""
    rows: dict[Text, int] = {}
    for number, value in enumerate(values):
        text = first_turn(value) if turns == "first" else conversation(value)
        if text is not None:
            rows.setdefault(text, number)
    if not values:
        raise DataError(f"{source.dataset}: expected texts, found none: it is empty; name another file or data set")
    if not rows:
        raise DataError(
            f"{source.dataset}: expected texts or lists of turns in column {source.column!r}, found none; {advice}"
        )
    return Texts(tuple((n, t) for t, n in rows.items()), source)
