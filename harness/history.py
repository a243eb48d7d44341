"""The record of a run: one observation per request, append-only, and ``run.json`` for provenance.

Judges read nothing else. While the run goes on, observations are JSON lines (each flushed, so that an interrupted run
keeps all it saw); when it is done they are written as Parquet too, which readers prefer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AfterValidator, Field, InstanceOf, ValidationError

from harness import history_index, strict_json
from harness.config import Route, Strict, describe_validation_error
from harness.errors import DataError, NotARunError, StorageError
from harness.files import write_json
from harness.findings import Verdict
from harness.history_index import CellRows, HeldCells, Lazy, RecordedLines
from harness.migrations import SCHEMA as SCHEMA
from harness.migrations import migrate
from harness.names import GroupName, SafeName
from harness.seal import LINES as LINES
from harness.seal import PARQUET as PARQUET
from harness.seal import SEALED_FROM, check_observations, sealed, unsealed
from harness.storage import LineFile, writing
from harness.strict_json import MIB, finite, printable

SECOND = "second-stage"
"""Folder inside a run: the tests that failed, again, on held-out prompts and fresh engines."""
RUN = "run.json"
_MOST_BYTES = 256 * MIB
"""Of a run.json; that of a thousand cells has 4 MiB."""

Form = Literal["ids", "text"]
Kind = Literal["run", "soak", "drill"]
RESCORE = "rescore"
"""Pseudo-scenario of requests to the plain engine that re-score what cells gave."""
COLD = "cold"
"""The scenario of prompts that no engine has seen before."""


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
    rescored: tuple[float, ...] | None = None
    """Of a re-scoring request, per token of the output that it judges: by how many nats the plain engine, given all
    tokens before, would have preferred another token; 0 when it says the same."""
    kv_transfer_params: Annotated[dict[str, Any], AfterValidator(finite)] | None = None
    counters: dict[str, float] = Field(default_factory=dict)
    """Growth of the engine's counters over this request (concurrency 1)."""
    seconds: float = 0.0


class Observation(Strict):
    """All that came back for one prompt in one cell."""

    cell: SafeName
    prompt_id: str
    form: Form
    scenario: str = COLD
    instance: int = 0
    """Which run through the scenario this belongs to."""
    part: str = "subject"
    """What the request is for in its scenario: subject, donor, fill, holder, late, …"""
    stage: int = 0
    route: Literal["cell", "prefill", "local"] = "cell"
    """Whether the request went the way of the cell, or to P alone, or to the answering engine alone."""
    temperature: float = 0.0
    max_tokens: int | None = None
    """Output tokens that were asked for; None in records of earlier versions: the workload's."""
    asked_at: float | None = None
    """When the answering engine was asked (seconds since 1970 by ``harness.clock``, which never jumps in a run), in
    stages of several requests."""
    held_until: float | None = None
    """When that engine was released, in stages that hold it until all requests are queued."""
    concurrent: int = 1
    """Requests that were under way at the same time. Above 1, counters are known for all of them together only."""
    shared_counters: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Growth of each engine's counters over the requests that were under way together, or on P over a request and
    those that were sent between its legs, or over one that a router handed off."""
    sequence: int
    sent_ids: tuple[int, ...]
    """The ids that the prompt has; sent as such, or as the text that must tokenise to them."""
    engine_roles: tuple[str, ...]
    legs: tuple[Leg, ...]
    attempts: int = 1
    """1, or 2 when D got the request so late that P's lease had ended (``came_late``), and the hand-off was repeated
    with the same outcome: the second one is recorded."""
    error: str | None = None
    started_at: float
    """By ``harness.clock``; in a run that was resumed, each process has its own."""

    @property
    def key(self) -> str:
        """Unique within cell, form and scenario: the prompt, and in scenarios its instance and part."""
        return self.prompt_id if self.scenario == COLD else f"{self.prompt_id}#{self.instance}.{self.part}"

    def leg(self, role: str) -> Leg | None:
        return next((leg for leg in self.legs if leg.role == role), None)

    @property
    def final(self) -> Leg | None:
        """The leg whose output the user would see."""
        return self.leg("decode") or self.leg("single")

    def came_late(self, lease_s: float) -> bool:
        """Whether D's engine was given a hand-off when P's lease had ended or could not be renewed any more, which says
        nothing about the engines.

        D renews a lease every sixth of it, from when its engine has the request on (vLLM 0.32.0). So one comes late
        whose time outside of D's engine, which is all that the engine counted neither as queue nor as inference, is
        above five sixths. On two cores 1 of 7,975 hand-offs took 30.9 s that way. Known for requests that had the
        engines for themselves; False when D does not count both times.
        """
        leg = self.leg("decode")
        if leg is None or self.route != "cell" or self.concurrent > 1:
            return False
        if not {"queue_seconds", "inference_seconds"} <= leg.counters.keys():
            return False
        outside = leg.seconds - leg.counters["queue_seconds"] - leg.counters["inference_seconds"]
        return outside > lease_s * 5 / 6

    def after_late(self, late: Observation) -> Observation:
        """This observation as the one that stands for a late one, too: P counts the late one's lease with either."""
        counted = _summed(("nixl_expired",), *(leg.counters for leg in late.legs), *late.shared_counters.values())
        if not counted:
            return self.model_copy(update={"attempts": 2})
        own = self.shared_counters.get("prefill", {})
        grown = own | _summed(tuple(counted), counted, own)
        return self.model_copy(update={"attempts": 2, "shared_counters": self.shared_counters | {"prefill": grown}})


def _summed(names: tuple[str, ...], *counters: dict[str, float]) -> dict[str, float]:
    return {name: total for name in names if (total := sum(c.get(name, 0.0) for c in counters))}


class EngineRecord(Strict):
    """An engine as it was started."""

    role: SafeName
    group: GroupName
    node: str | None = None
    """The cluster node that it ran on; None for the machine of the harness."""
    pid: int
    argv: tuple[str, ...]
    env: dict[str, str]
    log: SafeName
    ready_seconds: float
    model_runner: str | None
    attention_backend: str | None
    kv_blocks: int | None = None
    """Size of the KV pool in blocks, as the engine reports it."""
    step_tokens: int | None = None
    """Most tokens that the engine schedules in one step, as it reports it."""
    kept_blocks: int = 0
    """Hand-offs before the first recorded request that P answered and D did not finish, as when the first handshake
    times out: their leases end later."""
    mutants: tuple[str, ...] = ()
    """Mutants whose patches are installed in this engine."""


class CellRecord(Strict):
    """How one cell went."""

    cell: SafeName
    group: GroupName
    block_size: int
    lookahead: int
    draft_tokens: int
    route: Route = "client"
    """Who performed the hand-off: the harness, or a router."""
    planned: int
    """Cold observations that the plan asks for."""
    scenarios: dict[str, int] = Field(default_factory=dict)
    """Observations that the plan asks for, by scenario."""
    state: Literal["pending", "complete", "failed", "interrupted"] = "pending"
    reason: str | None = None
    request_seconds: float = 0.0
    """Time between sending requests and having their answers."""
    seconds: float = 0.0
    """Time of the whole cell, with counters read and records written."""
    start_seconds: float = 0.0
    """Time to readiness of the engines, charged to the first cell of the group."""
    left_over: tuple[str, ...] = ()
    """What could not be ended or removed when its engines ended, in words; charged to the first cell of the group."""

    @property
    def left_running(self) -> bool:
        """Whether processes of its engines may still be there: memory and ports are all else that can be left."""
        return any(not words.startswith(("shared memory ", "port ")) for words in self.left_over)


class Part(Strict):
    """A recorded run that went into a merged one: where and with what its cells were recorded."""

    run_id: SafeName
    started: str
    finished: str | None
    command: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    hardware: dict[str, Any]
    seconds: dict[str, float] = Field(default_factory=dict)
    cells: dict[str, str]
    """State of each cell that it recorded."""
    counted: tuple[str, ...]
    """Cells of which this part's recording is the one that is judged."""
    second_stage: bool = False


class Merged(Strict):
    """What a merged run was made of (``harness merge``)."""

    parts: tuple[Part, ...]
    notices: tuple[str, ...] = ()
    unsettled: bool = False
    """Something about the parts keeps the run from passing, whatever its cells say."""


class Resumption(Strict):
    """How an interrupted run was gone on with (``harness run --resume``)."""

    at: str
    command: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    hardware: dict[str, Any]
    cells: tuple[str, ...]
    """Cells that were asked again, from their beginning."""
    set_aside: int
    """Earlier observations that do not count any more; they are kept in ``files``."""
    files: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    """What was wrong with the answers that were set aside. Asking again is no second chance: such a run cannot pass."""

    @property
    def sentence(self) -> str:
        kept = f"; {self.set_aside} earlier answers were set aside ({', '.join(self.files)})" if self.set_aside else ""
        wrong = f", which had findings, so the run cannot pass: {'; '.join(self.found)}" if self.found else ""
        return f"resumed at {self.at}: {', '.join(self.cells) or 'no cell'} asked again{kept}{wrong}"


class RunRecord(Strict):
    """Provenance of a run (``run.json``)."""

    schema_version: int
    run_id: SafeName
    harness_version: str
    started: str
    finished: str | None
    command: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    profile: dict[str, Any]
    """The profile as it was used; ``name`` at least."""
    prompts_sha256: str
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    identities: dict[str, dict[str, Any]]
    """Per method, what a baseline must belong to (hashes of models, tokenizer, template and prompts; settings)."""
    engines: tuple[EngineRecord, ...] = ()
    cells: tuple[CellRecord, ...]
    seconds: dict[str, float] = Field(default_factory=dict)
    interrupted: bool = False
    mutants: tuple[str, ...] = ()
    """Defects that were put in on purpose: such a run says nothing about the engine."""
    rescore: bool = False
    """Outputs were to be re-scored by the plain single engine."""
    lacking: dict[str, str] = Field(default_factory=dict)
    """Surfaces that this vLLM version lacks, and what that costs."""
    merged: Merged | None = None
    """The parts of a merged run; None in one that was recorded in one go."""
    resumed: tuple[Resumption, ...] = ()
    """How often, and from where, the run was gone on with."""
    kind: Kind = "run"
    """What it was recorded for (``harness.kinds``)."""
    came_to: Verdict | None = None
    """What a soak came to as a whole, which its answers alone do not show; None in all others, and until it ended."""

    @property
    def at_best(self) -> tuple[Verdict, ...]:
        """Verdicts that the run's is no better than, whatever its cells say."""
        doubt = (Verdict.UNKNOWN,) if self.doubtful else ()
        return (*doubt, self.came_to) if self.came_to is not None else doubt

    @property
    def doubtful(self) -> bool:
        """Whether the run cannot pass, whatever its cells say: it was interrupted or has no end, a defect was put in on
        purpose, its parts contradict each other, answers with findings were asked for again, it is a soak without a
        verdict, or its engines may still be there."""
        unsettled = self.merged is not None and self.merged.unsettled
        unended = self.finished is None or (self.kind == "soak" and self.came_to is None)
        unended = unended or any(c.left_running for c in self.cells)
        return self.interrupted or unended or bool(self.mutants) or unsettled or self.asked_twice

    @property
    def asked_twice(self) -> bool:
        """Whether answers that had findings were set aside when the run was resumed."""
        return any(r.found for r in self.resumed)


class HistoryWriter:
    """Appends observations to a run folder; each line is with the operating system before the next request."""

    def __init__(self, folder: Path) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lines = LineFile(folder / LINES)

    def append(self, observation: Observation) -> None:
        """Raises StorageError when it cannot be written; what was written before stays as it is."""
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
    """Write ``run.json``. That of a run with an end seals the observations as they are in the folder now, so it is
    written after them. Raises StorageError."""
    # The order of a profile's axes and of their values has a meaning.
    write_json(folder / RUN, sealed(printable(record.model_dump(mode="json")), folder), sort_keys=False)


def write_parquet(folder: Path, observations: Iterable[Observation]) -> None:
    """Columnar copy of the observations: flat columns to query, the whole record as JSON in ``record``. Written as it
    is read, so many rows at a time. Raises StorageError, also for numbers that no column takes."""
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
            f"{folder / PARQUET}: expected numbers of 64 bits with a sign, found others ({error}); they are in the "
            "lines, and only this copy of them is missing"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


_GROUP = 4096
"""Rows that are written together."""
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
    observations: Annotated[InstanceOf[Lazy] | tuple[Observation, ...], Field(union_mode="left_to_right")]
    """In memory, or those of a large run, which are parsed whenever they are asked for (``history_index``)."""
    own: bool = False
    """Recorded by this process, from a profile that its user named: the paths in it are the user's."""
    torn_line: bool = False
    """The last JSON line was cut off (the run was killed while writing); it was left out."""
    notices: tuple[str, ...] = ()
    """What has to be said of its files."""

    def of(self, cell: str, form: Form = "ids", scenario: str = COLD) -> dict[str, Observation]:
        """Observations of a cell by key (cold ones: by prompt id); of two with the same key the last one counts."""
        return {o.key: o for o in self.of_cell(cell).by_place.get((form, scenario), ())}

    @cached_property
    def _cells(self) -> Lazy | HeldCells:
        return self.observations if isinstance(self.observations, Lazy) else HeldCells(self.observations)

    def of_cell(self, cell: str) -> CellRows:
        """The observations of a cell; none for a cell that was not recorded."""
        return self._cells.of_cell(cell)

    def of_scenario(self, scenario: str) -> Iterator[Observation]:
        """All observations of a scenario, in the order of the record."""
        if isinstance(self.observations, Lazy):
            return self.observations.of_scenario(scenario)
        return (o for o in self.observations if o.scenario == scenario)

    def in_order(self, cell: str) -> list[Observation]:
        """All observations of a cell, of every form and scenario, as they were made."""
        return self.of_cell(cell).ordered

    def cell(self, cell_id: str) -> CellRecord | None:
        return next((c for c in self.run.cells if c.cell == cell_id), None)


def load_history(folder: Path, in_memory: int | None = None) -> History:
    """Load a run folder; observations of up to ``in_memory`` bytes of lines are parsed at once (None takes
    ``history_index.IN_MEMORY``). Raises NotARunError for other folders and DataError for damaged files."""
    run_file = folder / RUN
    if not run_file.is_file():
        raise NotARunError(
            f"{folder}: expected the folder of a recorded run (with {RUN}), found "
            f"{'a folder without it' if folder.is_dir() else 'no such folder'}; runs are kept below reports/"
        )
    try:
        raw = strict_json.loads(strict_json.read_text(run_file, _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{run_file}: expected JSON, but it cannot be read ({error})") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    seal = None
    if version == SEALED_FROM:
        raw, seal = unsealed(raw, run_file)
    try:
        raw = migrate(raw) if isinstance(raw, dict) else raw
    except (TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{run_file} is damaged: it says schema {version!r} and has another shape ({error})") from error
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
    most = history_index.IN_MEMORY if in_memory is None else in_memory
    observations, torn = _read_observations(folder, counting, most)
    return History(folder=folder, run=run, observations=observations, torn_line=torn, notices=tuple(notices))


def _read_observations(
    folder: Path, counting: str | None, in_memory: int
) -> tuple[tuple[Observation, ...] | Lazy, bool]:
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
    # What was cut off may end within a character.
    return tuple(_parse(r, f"{lines}, line {i}") for i, r in enumerate(rows, 1)), bool(rest.strip())


def _parse(text: str | bytes, where: str) -> Observation:
    try:
        return Observation.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{where}: expected an observation, found damaged data:\n{describe_validation_error(error)}"
        ) from error
