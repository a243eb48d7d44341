"""The record of a run: one observation per request, append-only, and ``run.json`` for provenance.

Judges read nothing else. While the run goes on, observations are JSON lines (each flushed, so that an interrupted run
keeps all it saw); when it is done they are written as Parquet too, which readers prefer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import pandas as pd
from pydantic import Field, ValidationError

from harness.config import Strict, describe_validation_error
from harness.errors import DataError, NotARunError
from harness.files import write_json

SCHEMA = 1
LINES = "observations.jsonl"
PARQUET = "observations.parquet"
RUN = "run.json"

Form = Literal["ids", "text"]


class Speculation(Strict):
    """Per-request acceptance as vLLM reports it with ``--per-request-spec-decode-metrics detailed``."""

    per_step_accepted: tuple[int, ...]
    per_step_drafted: tuple[int, ...]
    num_steps: int
    num_drafted: int
    num_accepted: int


class Leg(Strict):
    """One HTTP exchange: what an engine answered."""

    role: Literal["single", "prefill", "decode"]
    request_id: str
    status: int | None = None
    echoed_ids: tuple[int, ...] | None = None
    """Prompt ids as the server saw them."""
    output_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    chosen_logprobs: tuple[float, ...] | None = None
    top_gaps: tuple[float | None, ...] | None = None
    """Log-prob distance in nats between the best and the second-best token, per output token."""
    speculation: Speculation | None = None
    kv_transfer_params: dict[str, Any] | None = None
    counters: dict[str, float] = Field(default_factory=dict)
    """Growth of the engine's counters over this request (concurrency 1)."""
    seconds: float = 0.0


class Observation(Strict):
    """All that came back for one prompt in one cell."""

    cell: str
    prompt_id: str
    form: Form
    scenario: str = "cold"
    sequence: int
    sent_ids: tuple[int, ...]
    """The ids that the prompt has; sent as such, or as the text that must tokenise to them."""
    engine_roles: tuple[str, ...]
    legs: tuple[Leg, ...]
    attempts: int = 1
    """1, or more when the hand-off was repeated because the NIXL handshake timed out."""
    error: str | None = None
    started_at: float

    def leg(self, role: str) -> Leg | None:
        return next((leg for leg in self.legs if leg.role == role), None)

    @property
    def final(self) -> Leg | None:
        """The leg whose output the user would see."""
        return self.leg("decode") or self.leg("single")


class EngineRecord(Strict):
    """An engine as it was started."""

    role: str
    group: str
    pid: int
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str
    ready_seconds: float
    model_runner: str | None
    attention_backend: str | None


class CellRecord(Strict):
    """How one cell went."""

    cell: str
    group: str
    block_size: int
    lookahead: int
    draft_tokens: int
    planned: int
    """Observations that the plan asks for."""
    state: Literal["pending", "complete", "failed", "interrupted"] = "pending"
    reason: str | None = None
    request_seconds: float = 0.0
    """Time between sending requests and having their answers."""
    seconds: float = 0.0
    """Time of the whole cell, with counters read and records written."""
    start_seconds: float = 0.0
    """Time to readiness of the engines, charged to the first cell of the group."""


class RunRecord(Strict):
    """Provenance of a run (``run.json``)."""

    schema_version: int
    run_id: str
    harness_version: str
    started: str
    finished: str | None
    command: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    profile: dict[str, Any]
    prompts_sha256: str
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    identities: dict[str, dict[str, Any]]
    """Per method, what a baseline must belong to (hashes of models, tokenizer, template and prompts; settings)."""
    engines: tuple[EngineRecord, ...] = ()
    cells: tuple[CellRecord, ...]
    seconds: dict[str, float] = Field(default_factory=dict)
    interrupted: bool = False


class HistoryWriter:
    """Appends observations to a run folder; each line is on its way to disk before the next request."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._stream: IO[str] = (folder / LINES).open("a", encoding="utf-8")

    def append(self, observation: Observation) -> None:
        self._stream.write(observation.model_dump_json() + "\n")
        self._stream.flush()

    def close(self) -> None:
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_run(folder: Path, record: RunRecord) -> None:
    write_json(folder / RUN, record.model_dump(mode="json"))


def write_parquet(folder: Path, observations: Sequence[Observation]) -> None:
    """Columnar copy of the observations: flat columns to query, the whole record as JSON in ``record``."""
    rows = []
    for o in observations:
        final = o.final
        spec = final.speculation if final else None
        rows.append(
            {
                "cell": o.cell,
                "prompt_id": o.prompt_id,
                "form": o.form,
                "scenario": o.scenario,
                "sequence": o.sequence,
                "prompt_tokens": len(o.sent_ids),
                "output_ids": list(final.output_ids or ()) if final else [],
                "per_step_accepted": list(spec.per_step_accepted) if spec else [],
                "per_step_drafted": list(spec.per_step_drafted) if spec else [],
                "seconds": sum(leg.seconds for leg in o.legs),
                "error": o.error,
                "record": o.model_dump_json(),
            }
        )
    temporary = folder / f".{PARQUET}"
    pd.DataFrame(rows).to_parquet(temporary, index=False)
    temporary.replace(folder / PARQUET)


class History(Strict):
    """A recorded run, loaded."""

    folder: Path
    run: RunRecord
    observations: tuple[Observation, ...]
    torn_line: bool = False
    """The last JSON line was cut off (the run was killed while writing); it was left out."""

    def of(self, cell: str, form: Form = "ids") -> dict[str, Observation]:
        """Observations of a cell by prompt id; the last one counts when a prompt was observed twice."""
        return {o.prompt_id: o for o in self.observations if o.cell == cell and o.form == form}

    def cell(self, cell_id: str) -> CellRecord | None:
        return next((c for c in self.run.cells if c.cell == cell_id), None)


def load_history(folder: Path) -> History:
    """Load a run folder. Raises NotARunError for other folders and DataError for damaged files."""
    run_file = folder / RUN
    if not run_file.is_file():
        raise NotARunError(
            f"{folder}: expected the folder of a recorded run (with {RUN}), found "
            f"{'a folder without it' if folder.is_dir() else 'no such folder'}; runs are kept below reports/"
        )
    try:
        raw = json.loads(run_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{run_file}: expected JSON, but it cannot be read ({error})") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA:
        raise DataError(
            f"{run_file}: expected history schema {SCHEMA}, found {version!r}; use the harness version that recorded it"
        )
    try:
        run = RunRecord.model_validate(raw)
    except ValidationError as error:
        raise DataError(f"{run_file} is damaged:\n{describe_validation_error(error)}") from error
    observations, torn = _read_observations(folder)
    return History(folder=folder, run=run, observations=tuple(observations), torn_line=torn)


def _read_observations(folder: Path) -> tuple[list[Observation], bool]:
    lines = folder / LINES
    parquet = folder / PARQUET
    if parquet.is_file():
        try:
            records = [str(r) for r in pd.read_parquet(parquet, columns=["record"])["record"]]
        except Exception as error:
            raise DataError(
                f"{parquet}: expected a Parquet file of observations, but it cannot be read ({error}); "
                f"remove it to judge from {LINES} instead"
            ) from error
        return [_parse(r, f"{parquet}, row {i}") for i, r in enumerate(records, 1)], False
    if not lines.is_file():
        return [], False
    try:
        text = lines.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{lines}: expected UTF-8 JSON lines, but it cannot be read ({error})") from error
    complete, _, rest = text.rpartition("\n")
    rows = [r for r in complete.split("\n") if r]
    return [_parse(r, f"{lines}, line {i}") for i, r in enumerate(rows, 1)], bool(rest.strip())


def _parse(text: str, where: str) -> Observation:
    try:
        return Observation.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{where}: expected an observation, found damaged data:\n{describe_validation_error(error)}"
        ) from error
