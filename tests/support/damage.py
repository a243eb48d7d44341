"""Damage to recorded runs: every recorded value lost, replaced by another row's, or changed a little.

The kinds follow from the record, not from a list: each path of ``run.json`` and of the observations is one, times what
is done to it, so that what is recorded tomorrow is damaged tomorrow. The changed run is sealed again, as a bug of
the recorder, of a merge or of vLLM would leave it: the question is how much of the evidence judging looks at.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import to_json

from harness.errors import HarnessError
from harness.history.checksum import sealed
from harness.history.folder import load_history
from harness.history.layout import CELLS, RUN, files_by_cell
from harness.judging.references import References
from harness.reports.judge_run import judged
from harness.util.files import write_json
from harness.workload.expected import lacking

Steps = tuple[str, ...]
"""Keys that lead to a value. ``*`` stands for every element of a list, or for every key that is a name and no field."""
_NAMES = ("counters", "shared_counters", "identities", "plans", "scenarios", "lacking", "seconds", "env", "versions")
"""Fields whose keys are names: those of counters matter one by one, those of the others do not."""
_ONE_BY_ONE = ("counters", "shared_counters")
_BOUND = "engine_steps_le_"
"""Beginning of the names of counters that are one histogram."""
_DEPTH = 3
"""Levels of the recorded profile that are damaged one by one; what is deeper changes with them."""


def copied(value: Any) -> Any:
    """Return a copy of plain JSON, which pickle makes several times as fast as ``copy.deepcopy``."""
    return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


class Run(NamedTuple):
    """A recorded run as plain JSON, to be damaged."""

    record: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    """The lines of each file, by its path in the folder."""

    def copy(self) -> Run:
        return copied(self)

    def write(self, folder: Path) -> None:
        for name, rows in self.rows.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # Hundreds of runs are written, and json.dumps takes far longer.
            path.write_bytes(b"".join(to_json(row, inf_nan_mode="constants") + b"\n" for row in rows))
        raw = {k: v for k, v in self.record.items() if k not in ("seal", "record_sha256")}
        write_json(folder / RUN, sealed(raw, folder), sort_keys=False)


def read(folder: Path) -> Run:
    rows = {
        path.relative_to(folder).as_posix(): [json.loads(line) for line in path.read_text().splitlines()]
        for of_cell in files_by_cell(folder).values()
        for path in of_cell
    }
    return Run(json.loads((folder / RUN).read_text()), rows)


class Kind(NamedTuple):
    """One kind of damage: what is done to which value, or to whole rows."""

    where: str
    """``answers``, ``scores``, ``record`` or ``rows``."""
    steps: Steps
    what: str

    @property
    def name(self) -> str:
        return f"{self.where}:{'.'.join(self.steps)}:{self.what}"


class Case(NamedTuple):
    kind: Kind
    seed: int
    share: str
    """How much of what there is of the kind is damaged: ``one``, ``half`` or ``all``."""

    @property
    def name(self) -> str:
        return f"{self.kind.name}:{self.share}"


# --- what can be damaged ---------------------------------------------------------------------------------------------


def _steps(value: Any, before: Steps = ()) -> Iterator[Steps]:
    """Yield the steps to every field in a value, those of lists and named entries once for all."""
    if isinstance(value, Mapping):
        named = bool(before) and before[-1] in _NAMES and not set(before) & set(_ONE_BY_ONE)
        for key, inner in value.items():
            steps = (*before, "*" if named else _BOUND if key.startswith(_BOUND) else key)
            yield steps
            if steps[0] != "profile" or len(steps) < _DEPTH:
                yield from _steps(inner, steps)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, Mapping):
                yield from _steps(inner, (*before, _kind_of(inner, before)))


def _kind_of(element: Mapping[str, Any], before: Steps) -> str:
    """Return the step to an element of a list: legs and engines are told apart by their role."""
    return str(element["role"]) if before and before[-1] in ("legs", "engines") else "*"


def kinds(run: Run) -> list[Kind]:
    found: dict[Kind, None] = {}
    for name, rows in run.rows.items():
        where = "scores" if name.endswith("scores.jsonl") else "answers"
        for row in rows:
            for steps in _steps(row):
                found |= {Kind(where, steps, what): None for what in CHANGES}
    for steps in _steps({k: v for k, v in run.record.items() if k not in ("seal", "record_sha256")}):
        found |= {Kind("record", steps, what): None for what in CHANGES}
    found |= {Kind("rows", (), what): None for what in ROWS}
    return list(found)


def _reached(value: Any, steps: Steps, before: Steps = ()) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the containers and keys to which steps lead."""
    first, *rest = steps
    if isinstance(value, list):
        for inner in value:
            if isinstance(inner, Mapping) and _kind_of(inner, before) == first and rest:
                yield from _reached(inner, tuple(rest), (*before, first))
        return
    if not isinstance(value, dict):
        return
    for key in [k for k in value if first in ("*", k) or (first == _BOUND and k.startswith(_BOUND))]:
        if rest:
            yield from _reached(value[key], tuple(rest), (*before, first))
        else:
            yield value, key


# --- what is done ----------------------------------------------------------------------------------------------------

_GONE = object()


def _lost(value: Any, others: Sequence[Any], rng: random.Random) -> Any:
    return _GONE


def _another(value: Any, others: Sequence[Any], rng: random.Random) -> Any:
    different = [o for o in others if o != value]
    return rng.choice(different) if different else value


def _nudged(value: Any, others: Sequence[Any], rng: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value[:-1] + ("0" if value[-1:] != "0" else "1")
        case [*_, int(last)] if not isinstance(last, bool):
            at = rng.randrange(len(value))
            return [*value[:at], value[at] + 1 if isinstance(value[at], int) else last, *value[at + 1 :]]
        case [*_, float()]:
            return [*value[:-1], value[-1] + 1.0]
        case _:
            return value


def _cut(value: Any, others: Sequence[Any], rng: random.Random) -> Any:
    match value:
        case [_, *_]:
            return value[:-1]
        case dict() if value:
            dropped = rng.choice(list(value))
            return {k: v for k, v in value.items() if k != dropped}
        case _:
            return value


CHANGES: dict[str, Callable[[Any, Sequence[Any], random.Random], Any]] = {
    "lost": _lost,
    "another's": _another,
    "nudged": _nudged,
    "cut": _cut,
}


def _doubled(rows: list[dict[str, Any]], rng: random.Random) -> None:
    rows.append(rng.choice(rows))


def _wrong_before_right(rows: list[dict[str, Any]], rng: random.Random) -> None:
    at = rng.randrange(len(rows))
    wrong = copy.deepcopy(rows[at])
    for leg in wrong["legs"]:
        leg["output_ids"] = [7] * len(leg["output_ids"] or ())
    rows.insert(at, wrong)


def _missing(rows: list[dict[str, Any]], rng: random.Random) -> None:
    rows.pop(rng.randrange(len(rows)))


def _answers_swapped(rows: list[dict[str, Any]], rng: random.Random) -> None:
    one, other = rng.sample(rows, 2) if len(rows) > 1 else (rows[0], rows[0])
    one["legs"], other["legs"] = other["legs"], one["legs"]


def _renamed_copy(rows: list[dict[str, Any]], rng: random.Random) -> None:
    one, other = rng.sample(rows, 2) if len(rows) > 1 else (rows[0], rows[0])
    place = {key: one[key] for key in ("prompt_id", "form", "scenario", "instance", "part", "sequence") if key in one}
    one |= copy.deepcopy({**other, **place})


def _moved_to_a_scenario(rows: list[dict[str, Any]], rng: random.Random) -> None:
    rng.choice(rows)["scenario"] = "prefix-hit" if rows[0].get("scenario") == "cold" else "cold"


def _reversed(rows: list[dict[str, Any]], rng: random.Random) -> None:
    rows.reverse()


def _cut_to_one_token(rows: list[dict[str, Any]], rng: random.Random) -> None:
    for row in rows[:-1]:
        row["max_tokens"] = 1
        leg = row["legs"][-1]
        leg |= {"output_ids": (leg["output_ids"] or [])[:1], "usage_completion_tokens": 1, "finish_reason": "length"}
        leg |= {key: leg[key][:1] for key in ("chosen_logprobs", "top_gaps", "runner_ups") if leg.get(key)}


def _all_prompts_sevens(rows: list[dict[str, Any]], rng: random.Random) -> None:
    for row in rows:
        row["sent_ids"] = [7] * len(row["sent_ids"])
        for leg in row["legs"]:
            leg["echoed_ids"] = list(row["sent_ids"])


def _without_a_leg(rows: list[dict[str, Any]], rng: random.Random) -> None:
    rng.choice([r for r in rows if len(r["legs"]) > 1] or rows)["legs"].pop(0)


def _a_leg_twice(rows: list[dict[str, Any]], rng: random.Random) -> None:
    row = rng.choice(rows)
    row["legs"].append(row["legs"][-1])


def _failed(rows: list[dict[str, Any]], rng: random.Random) -> None:
    rng.choice(rows)["error"] = "the engine hung up"


ROWS: dict[str, Callable[[list[dict[str, Any]], random.Random], None]] = {
    change.__name__.strip("_").replace("_", " "): change
    for change in (
        *(_doubled, _wrong_before_right, _missing, _answers_swapped, _renamed_copy, _moved_to_a_scenario, _reversed),
        *(_cut_to_one_token, _all_prompts_sevens, _without_a_leg, _a_leg_twice, _failed),
    )
}


def damaged(run: Run, case: Case) -> Run | None:
    """Return the damaged run, or None if the kind changes nothing in it."""
    rng = random.Random(f"{case.seed} {case.name}")
    out = run.copy()
    if case.kind.where == "rows":
        files = [rows for name, rows in sorted(out.rows.items()) if rows and name.startswith(f"{CELLS}/")]
        for rows in _part(files, case.share, rng):
            ROWS[case.kind.what](rows, rng)
    elif case.kind.where == "record":
        _change([out.record], case, rng)
    else:
        suffix = "scores.jsonl" if case.kind.where == "scores" else "observations.jsonl"
        _change([row for name, rows in sorted(out.rows.items()) if name.endswith(suffix) for row in rows], case, rng)
    return None if out == run else out


def _change(values: Sequence[dict[str, Any]], case: Case, rng: random.Random) -> None:
    places = [place for value in values for place in _reached(value, case.kind.steps)]
    pool = [container[key] for container, key in places]
    change = CHANGES[case.kind.what]
    changed = [place for place in places if change(place[0][place[1]], pool, rng) != place[0][place[1]]]
    for container, key in _part(changed, case.share, rng):
        found = change(container[key], pool, rng)
        if found is _GONE:
            del container[key]
        else:
            container[key] = copy.deepcopy(found)


def _part(values: list[Any], share: str, rng: random.Random) -> list[Any]:
    if not values or share == "all":
        return values
    return [rng.choice(values)] if share == "one" else rng.sample(values, -(-len(values) // 2))


def cases(run: Run, every: bool = True) -> list[Case]:
    """Return all cases in a fixed order, or a sample: one case of every sixth kind."""
    shares = ("one", "half", "all")
    found = kinds(run)
    if every:
        return [Case(kind, 1, share) for kind in found for share in shares]
    return [Case(kind, 1, shares[n // 6 % len(shares)]) for n, kind in enumerate(found) if n % 6 == 0]


# --- what comes of it ------------------------------------------------------------------------------------------------

BASE = Path(__file__).parents[1] / "golden" / "runs" / "plan-rows"
"""Three cells of real engines that pass: cold prompts, prefix hits, concurrent requests, re-scored outputs."""
PROFILE = "cpu-quick"
REFERENCES = References(baselines=BASE.parents[1] / "baselines")


@functools.cache
def _base() -> tuple[Any, Any]:
    history = load_history(BASE)
    return history.run, history.observations


GREEN = ("PASS", "KNOWN", "IMPROVED")


def outcome(run: Run | None, folder: Path) -> str:
    """Judge a damaged run, and return the verdict, ``refused``, ``nothing changed``, or ``--expect`` for one that only
    a comparison with its profile shows."""
    if run is None:
        return "nothing changed"
    shutil.rmtree(folder, ignore_errors=True)
    run.write(folder)
    try:
        history = load_history(folder)
        if (history.run, history.observations) == _base():
            return "nothing changed"
        verdict = judged(history, REFERENCES).verdict.value
    except HarnessError:
        return "refused"
    if verdict in GREEN and lacking(history.run, PROFILE) != _lacking():
        return "--expect"
    return verdict


@functools.cache
def _lacking() -> list[str]:
    """What the undamaged run itself lacks of the whole profile."""
    return lacking(load_history(BASE).run, PROFILE)


# --- what may change -------------------------------------------------------------------------------------------------

_TIMES = "a time: requests are never judged by how long they took, and lateness needs D's own clock"
_LABEL = "a label that reports quote; nothing follows from it"
_NEAR_TIE = "a runner-up is read only where tokens part, which they do nowhere here"
_DONOR = "P's answer to a request that only fills its cache, or to one of several at once, which may round"
_OWN_TOKEN = "the one token that a re-scoring request generates is read by nobody"
_ENGINE = "names P; that KV came from it is shown by the counters, and it is the same in all hand-offs"
_STEPS = "how a request was cut into steps is read for requests sent together, and proves more than it must there"
_UNUSED = "of a method or a field that no cell of this run is compared by"
_PROOF = "read only by scenarios that this run does not have (pressure, refill, chunked prefill)"

BENIGN: dict[str, str] = {
    r"answers:(asked_at|held_until|started_at|legs\.\w+\.seconds):.*": _TIMES,
    r"answers:.*\.(queue_seconds|inference_seconds):(another's|nudged)": _TIMES,
    r"answers:.*\.engine_steps(_le_)?:.*": _STEPS,
    r"answers:legs\.(decode|single)\.request_id:.*": _LABEL,
    r"answers:legs\.\w+\.runner_ups:.*": _NEAR_TIE,
    r"answers:legs\.prefill\.(chosen_logprobs|top_gaps):.*": _DONOR,
    r"answers:legs\.prefill\.speculation:lost": "P drafts for nobody; its own figures are read only if it has any",
    r"answers:legs\.prefill\.kv_transfer_params\.(remote_engine_id|remote_host|remote_port|tp_size|dcp_size|pp_size"
    r"|transfer_mode):.*": _ENGINE,
    r"answers:legs\.prefill\.kv_transfer_params\.(remote_request_id|remote_blocks_expiry_time):.*": _LABEL,
    r"answers:legs\.prefill\.kv_transfer_params\.remote_prefill_cached_tokens:.*": _LABEL,
    r"answers:.*\.nixl_descriptors:.*": "how many pieces the same bytes are moved in varies between equal runs",
    r"answers:.*\.external_queries:lost": "read only to agree with the other counters",
    r"answers:attempts:nudged": "a repeated hand-off is left out of the counters' checks; its tokens are judged",
    r"scores:(stage|temperature|concurrent|sequence|engine_roles|attempts|started_at):.*": _OWN_TOKEN,
    r"scores:legs\.single\.(request_id|status|output_ids|finish_reason|usage_completion_tokens|chosen_logprobs|top_gaps"
    r"|runner_ups|seconds):.*": _OWN_TOKEN,
    r"record:(run_id|harness_version|started|finished|command|git_commit|git_dirty|prompts_sha256):.*": _LABEL,
    r"record:(hardware|versions)(\..*)?:.*": _LABEL,
    r"record:identities(\..*)?:.*": _UNUSED,
    r"record:engines\.\w+\.(pid|argv|env|log|ready_seconds|model_runner|attention_backend)(\.\*)?:.*": _LABEL,
    r"record:engines\.\w+\.(kv_blocks|step_tokens):.*": _PROOF,
    r"record:engines\.\w+\.kept_blocks:.*": "excuses as many leases that ended as it says; none did",
    r"record:engines\.\w+\.counters:cut": "a counter that no check reads",
    r"record:cells\.\*\.lookahead:.*": "names the stratum of a length",
    r"record:(cells\.\*\.|)(request_seconds|seconds|start_seconds)(\.\*)?:.*": _TIMES,
    r"record:profile(\..*)?:.*": "what the user asked for, not what came back; `check --expect` compares what counts",
    r"rows::reversed": "the order of lines in a file is no evidence: requests are numbered",
    r"rows::renamed copy": "the same prompt in another round, with the same right answer",
}
"""Damage that leaves a run green, as patterns of names, with the reason why it may."""


def reason(kind: Kind) -> str | None:
    """Return why this damage may leave a run green; None if it may not."""
    return reason_in(BENIGN, kind.name)


def reason_in(benign: Mapping[str, str], name: str) -> str | None:
    """Return the reason for the first pattern that a name matches; None if it matches none."""
    return next((why for pattern, why in benign.items() if re.fullmatch(pattern, name)), None)
