"""The contents of an exported file: engines, requests, right answers and, if they are small, the models."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import pprint
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import redact
from harness.commands.export import standalone
from harness.engines.client import REMOTE_DECODE
from harness.engines.command import MODEL_NAME, build_command
from harness.engines.environment import EngineEnvironment
from harness.engines.guard import kv_harness_guard
from harness.errors import UsageError
from harness.history.records import COLD
from harness.profiles.availability import models_of
from harness.profiles.cells import Cell, Role
from harness.profiles.model import Profile
from harness.profiles.remote_code import require_loadable, trusts_code
from harness.prompts.model import Prompt
from harness.scenarios.base import Script, Send, Stage
from harness.supervision.server import INHERITED, INHERITED_PREFIXES, LOOPBACK
from harness.util.files import write_atomic

EMBEDDED_BYTES = 8 * 2**20
"""The models of a cell are embedded in the file up to this total size."""
_PORT, _SIDE_CHANNEL = 1, 2
_WIDTH = 116


class Right(NamedTuple):
    tokens: tuple[int, ...]
    accepted: tuple[int, ...] | None
    """Accepted drafts per verify step; None if they are not compared."""


class Case(NamedTuple):
    """Everything that goes into an exported file."""

    title: str
    profile: Profile
    cell: Cell
    scenario: str
    stages: tuple[Stage, ...]
    right: Mapping[str, Right]
    """The right answers of the judged requests, by part."""
    slack: float = 0.0
    """Tolerated relative difference of the mean of accepted drafts."""
    mutants: tuple[str, ...] = ()
    """Mutants that were enabled when the case was found; the file does not enable them."""
    tries: int = 1
    """Quiet tries that exclude the rate at which the defect was seen."""
    seen: str = "a rate of 100 % (every try showed it)"
    """That rate, and where it comes from."""


def cold_script(prompt: Prompt) -> Script:
    return Script(COLD, 0, (Stage((Send(prompt, "subject", "a"),)),))


def case_of(title: str, profile: Profile, cell: Cell, script: Script, right: Mapping[str, Right]) -> Case:
    """Return a case that judges only requests with a known right answer.

    Raises UsageError without one, and for requests that a file cannot send.
    """
    if any(s.abandon or s.appended or s.feature or s.by_second_p or s.route == "former-p" for s in script.sends):
        raise UsageError(
            f"{title}: expected requests that are sent whole and answered, found {script.scenario}, which gives them "
            "up, changes them or tells D of another P; an exported file cannot: use `harness repro` alone"
        )
    known = {s.part for s in script.sends if s.part in right}
    if not known:
        raise UsageError(
            f"{title}: expected a right answer to compare with, found none; record a baseline "
            "(harness baseline record) or name a prompt that is in the baseline"
        )
    return Case(title, profile, cell, script.scenario, script.stages, {p: right[p] for p in right if p in known})


def write_case(case: Case, environment: EngineEnvironment, target: Path) -> None:
    """Write the file. Raises UsageError for cells that cannot be exported."""
    if case.cell.routed:
        direct = case.cell.name.beside(case.cell.topology).id
        what = f"--prompt {case.stages[0].sends[0].prompt.id}" if case.scenario == COLD else f"-s {case.scenario}"
        raise UsageError(
            f"--export: expected a cell without a router, found {case.cell.id}; a file that needs nothing but vLLM "
            f"and NIXL cannot start one: instead of a finding, name the cell without it, --cell {direct} {what}"
        )
    require_loadable(models_of(case.profile, case.cell.method))
    folders = model_folders(case.profile, case.cell)
    files: dict[str, bytes] = {}
    models: dict[str, dict[str, Any]] = {}
    embedded = sum(f.stat().st_size for folder in folders.values() for f in _files(folder)) <= EMBEDDED_BYTES
    for name, folder in folders.items():
        models[name] = {"name": folder.name}
        if embedded:
            digests = {}
            for file in _files(folder):
                data = file.read_bytes()
                digest = hashlib.sha256(data).hexdigest()
                files[digest] = data
                digests[str(file.relative_to(folder))] = digest
            models[name]["files"] = digests
    write_atomic(target, _source(case, _described(case, environment, models), files))


def injected(mutants: Sequence[str]) -> str:
    """Return that a case was found with injected faults, in words; empty without any."""
    named = ", ".join(mutants)
    return f"the defect is {named}, which the harness injected, and the file does not have" if named else ""


def model_folders(profile: Profile, cell: Cell) -> dict[str, Path]:
    """Return the model folders of a cell by the names that the engines' commands use for them."""
    folders = {"target": profile.target_folder, "tokenizer": profile.tokenizer_folder}
    if cell.method.drafter_path is not None:
        folders["drafter"] = cell.method.drafter_path
    return folders


_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template*.json",
    "chat_template*.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
    "*.model",
    "*.tiktoken",
)
"""An allow-list, since any other ``*.json`` or ``*.txt`` may hold notes or credentials, which would go unnoticed."""
_WITH_TEXT = ("config.json", "*_config.json", "chat_template*")
"""Files that people edit by hand."""


def _files(folder: Path) -> list[Path]:
    """Return the files of a model that engines read; nothing else is exported, least of all code. Raises UsageError for
    a file that seems to contain a secret."""
    named = {f for pattern in _MODEL_FILES for f in folder.glob(pattern)}
    found = sorted(f for f in named if f.is_file() and not f.name.startswith("."))
    for file in found:
        if any(file.match(pattern) for pattern in _WITH_TEXT):
            text = file.read_text(encoding="utf-8", errors="replace")
            if redact.text(text) != text:
                raise UsageError(
                    f"--export: expected model files without secrets, found what looks like one in {file}; remove it"
                )
    return found


def engine_commands(case: Case, environment: EngineEnvironment) -> dict[str, list[str]]:
    """Return the command of each engine by role, with placeholders for models and ports."""
    return {e["role"]: e["argv"] for e in _engines(case, environment)}


def _described(case: Case, environment: EngineEnvironment, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    profile = case.profile
    return {
        "title": case.title,
        "cell": case.cell.id,
        "scenario": case.scenario,
        "versions": {"vllm": environment.vllm, "torch": environment.torch, "nixl": environment.nixl},
        "engines": _engines(case, environment),
        "model_name": MODEL_NAME,
        "keep_blocks": REMOTE_DECODE,
        "block_size": profile.engine.block_size,
        "near_tie_nats": profile.judging.near_tie_assumed(profile.engine.dtype),
        # Between P and D: requests of one stage share a batch.
        "logprob_nats": max(profile.judging.logprob_nats or 0.0, 1e-3) if profile.judging.tier != "normal" else 1e9,
        "context": profile.engine.max_model_len,
        "acceptance_slack": case.slack,
        "tries": case.tries,
        "seen": case.seen,
        "injected": injected(case.mutants),
        "inherited": {"names": INHERITED, "prefixes": INHERITED_PREFIXES},
        "guard": kv_harness_guard.__name__.rpartition(".")[2],
        "models": models,
    }


def _engines(case: Case, environment: EngineEnvironment) -> list[dict[str, Any]]:
    roles: list[Role] = ["decode", "prefill"] if case.cell.topology == "pd" else ["single"]
    return [_engine(case, environment, role, slot) for slot, role in enumerate(roles)]


def _stage(stage: Stage, case: Case) -> dict[str, Any]:
    """Describe a stage without its default values; a single request waits for no other."""
    if len(stage.sends) == 1:
        return {"sends": [_send(stage.sends[0]._replace(after_s=0.0, after=(), last=False), case)]}
    parts = {s.part for s in stage.sends}
    sends = [s._replace(after=tuple(p for p in s.after if p in parts)) for s in stage.sends]
    return {**({"hold": stage.hold} if stage.hold else {}), "sends": [_send(s, case) for s in sends]}


def _send(send: Send, case: Case) -> dict[str, Any]:
    """Describe a request without empty or default values."""
    right = case.right.get(send.part)
    accepted = None if right is None or right.accepted is None else list(right.accepted)
    whole = {
        "part": send.part,
        "group": send.group,
        "route": "" if send.route == "cell" else send.route,
        "max_tokens": send.max_tokens or case.profile.workload.max_tokens,
        "temperature": send.temperature,
        "after_s": send.after_s,
        "after": list(send.after),
        "last": send.last,
        "prompt": list(send.prompt.ids),
        "right": None if right is None else {"tokens": list(right.tokens), "accepted": accepted},
        "between": [_send(s, case) for s in send.between],
        "read_back": send.read_back,
    }
    return {name: value for name, value in whole.items() if value}


def _engine(case: Case, environment: EngineEnvironment, role: Role, slot: int) -> dict[str, Any]:
    """Describe an engine by its command, with placeholders for whatever depends on the machine."""
    changes = {"target": Path("$target"), "tokenizer": Path("$tokenizer")}
    method = case.cell.method
    trusted = trusts_code(models_of(case.profile, method))
    if method.drafter_path is not None:
        method = method.model_copy(update={"drafter": Path("$drafter")})
    pair = case.cell.topology == "pd"
    command = build_command(
        case.profile.model_copy(update=changes), method, role, environment, _PORT, _SIDE_CHANNEL if pair else None
    )
    argv = ["$python", *command.argv[1:], *(["--trust-remote-code"] if trusted else [])]
    argv[argv.index("--port") + 1] = "$port"
    # The file creates its own key and contains the guard.
    env = {**command.env, "PYTHONPATH": "$guard"}
    if "VLLM_NIXL_SIDE_CHANNEL_PORT" in env:
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "$side_channel"
    if "VLLM_CPU_OMP_THREADS_BIND" in env:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "$core"
        env["LD_PRELOAD"] = "$openmp"
    on_cpu = case.profile.engine.device == "cpu"
    assert LOOPBACK == standalone.HOST
    return {"role": role, "slot": slot if on_cpu else None, "argv": argv, "env": env}


def _source(case: Case, described: dict[str, Any], files: Mapping[str, bytes]) -> str:
    """Return the source of the standalone program with the case and the files filled in."""
    guard = inspect.getsource(kv_harness_guard)
    assert "'''" not in guard
    literals = {
        "CASE": _literal(described),
        "STAGES": _literal([_stage(stage, case) for stage in case.stages]),
        "GUARD": f"r'''{guard}'''",
        "FILES": f"{{\n{''.join(_embedded(files.items()))}}}",
    }
    # In one pass, so that the text filled in is not searched for markers.
    marker = re.compile(rf"^({'|'.join(literals)})(: .+ = )(?:{{}}|\[\]|\"\")", re.MULTILINE)
    source, count = marker.subn(
        lambda found: f"{found[1]}{found[2]}{literals[found[1]]}", Path(standalone.__file__).read_text(encoding="utf-8")
    )
    assert count == len(literals), count
    return source


def _literal(value: object) -> str:
    # By way of JSON, so that only plain values are written.
    return pprint.pformat(json.loads(json.dumps(value)), width=_WIDTH, compact=True, sort_dicts=False)


def _embedded(files: Iterable[tuple[str, bytes]]) -> Iterable[str]:
    """Yield the files as literals in Base85, which has neither quotes nor backslashes that could end one."""
    for digest, data in files:
        text = base64.b85encode(zlib.compress(data)).decode()
        lines = [text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH)]
        yield f'    "{digest}": """\n' + "\n".join(lines) + '\n""",\n'


def right_answers(
    sends: Sequence[Send], expected: Mapping[str, tuple[int, ...]], accepted: Mapping[str, tuple[int, ...]], most: int
) -> dict[str, Right]:
    """Return the right answers by part, cut to the length of each request, from the answers recorded by prompt id."""
    out = {}
    for send in sends:
        tokens = expected.get(send.prompt.id)
        if tokens is None:
            continue
        out[send.part] = Right(tokens[: send.max_tokens or most], accepted.get(send.prompt.id) or None)
    return out
