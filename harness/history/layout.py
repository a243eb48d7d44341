"""Names of the files in the folder of a run.

``run.json``                         the record of the run
``cells/<cell>/observations.jsonl``  the answers of one cell
``cells/<cell>/scores.jsonl``        the outputs that this cell, a plain single one, re-scored for all cells
``cells/<cell>/rounding.jsonl``      what this cell, a plain single one, was asked beside its plan to show how it rounds
``witness/<group>.<role>.<pid>.jsonl`` what the KV caches of an engine held, if the profile asked for it
``witness/<group>.<role>-events.<pid>.jsonl`` what an engine told of its prefix cache, if the profile asked for it
``observations.parquet``             a copy of all observations to query; nothing is judged from it
``references/``                      copies of the baselines and known defects that it was judged by at its end
``superseded-<n>/<cell>/…``          answers that the n-th resumption of the run set aside, to ask their cells again
``second-stage/``                    the repetition of failed tests, a run of its own
``asked-again/repetition-<n>/``      answers that were wrong by themselves, asked again, each time a run of its own
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import NotARunError

RUN = "run.json"
SHRUNK = "shrink.json"
"""What `harness repro --shrink` found, in a folder that is no run's."""
SECOND = "second-stage"
"""Folder inside a run with the repetition of its failed tests on held-out prompts and fresh engines."""
AGAIN = "asked-again"
"""Folder inside a run with the repetitions of its answers that were wrong by themselves."""
CELLS = "cells"
LINES = "observations.jsonl"
SCORES = "scores.jsonl"
ROUNDING = "rounding.jsonl"
WITNESS = "witness"
"""Folder of what the engines' KV caches held, a file for each process of an engine."""
PARQUET = "observations.parquet"
REFERENCES = "references"
CARRIED_BASELINES = f"{REFERENCES}/baselines"
CARRIED_KNOWN = f"{REFERENCES}/known-defects.yaml"


def require_run(folder: Path) -> None:
    """Raise NotARunError unless a folder is that of a recorded run."""
    if not (folder / RUN).is_file():
        found = "a folder without it" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
        raise NotARunError(
            f"{folder}: expected the folder of a recorded run (with {RUN}), found {found}; runs are kept below reports/"
        )


def round_folder(number: int) -> str:
    """Return the folder, inside of a run, in which its answers were asked again for the n-th time."""
    return f"{AGAIN}/{repetition(number)}"


def repetition(number: int) -> str:
    return f"repetition-{number:02d}"


def rounds_below(folder: Path) -> list[Path]:
    """Return the folders of the rounds in which answers of a run were asked again, in order."""
    return sorted((folder / AGAIN).glob("repetition-*"))


def files_by_cell(folder: Path, below: str = CELLS) -> dict[str, list[Path]]:
    """Return the files of observations that a folder of a run's folder has, by cell."""
    found = {p.name: [p / name for name in (LINES, SCORES, ROUNDING)] for p in sorted((folder / below).glob("*"))}
    return {cell: existing for cell, files in found.items() if (existing := [f for f in files if f.is_file()])}


def witness_files(folder: Path) -> list[Path]:
    """Return the files in which the engines of a run noted what their KV caches held."""
    return sorted((folder / WITNESS).glob("*.jsonl"))


def bytes_recorded(folder: Path) -> int:
    """Return the size of all files of observations in a run's folder, in bytes."""
    return sum(f.stat().st_size for files in files_by_cell(folder).values() for f in files)
