"""What an exported file holds: engines, requests, right answers and, where they are small, the models."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import pprint
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import redact
from harness.config import Profile
from harness.engine.client import REMOTE_DECODE
from harness.engine.command import LOOPBACK, MODEL_NAME, SCRUBBED_PREFIXES, Role, build_command
from harness.engine.environment import EngineEnvironment
from harness.engine.guard import kv_harness_guard
from harness.errors import UsageError
from harness.export import standalone
from harness.files import write_atomic
from harness.matrix import Cell
from harness.prompts import Prompt
from harness.remote_code import require_loadable, trusts_code
from harness.scenarios.script import Script, Send, Stage

EMBEDDED_BYTES = 8 * 2**20
"""Models up to this size, all of a cell together, travel inside the file."""
_PORT, _SIDE_CHANNEL = 1, 2
_WIDTH = 116


class Right(NamedTuple):
    """The right answer to a request."""

    tokens: tuple[int, ...]
    accepted: tuple[int, ...] | None
    """Accepted drafts per verify step; None where they are not compared."""


class Case(NamedTuple):
    """Everything that an exported file is made of."""

    title: str
    profile: Profile
    cell: Cell
    scenario: str
    stages: tuple[Stage, ...]
    right: Mapping[str, Right]
    """By part, of the requests that are judged."""
    slack: float = 0.0
    """Share by which the mean of accepted drafts may differ."""
    mutants: tuple[str, ...] = ()
    """Defects that were put in where the case was found; the file does not put them in."""


def cold_stage(prompt: Prompt, max_tokens: int | None = None) -> Stage:
    """One prompt that nobody has seen, as a stage."""
    return Stage((Send(prompt, "subject", "a", max_tokens=max_tokens),))


def case_of(
    title: str, profile: Profile, cell: Cell, scenario: str, script: Script | Stage, right: Mapping[str, Right]
) -> Case:
    """A case in which only requests with a known right answer are judged."""
    stages = script.stages if isinstance(script, Script) else (script,)
    known = {s.part for stage in stages for s in stage.sends if s.judged and s.part in right}
    if not known:
        raise UsageError(
            f"{title}: expected a right answer to compare with, found none; record a baseline "
            "(harness baseline record) or name a prompt that the baseline has"
        )
    return Case(title, profile, cell, scenario, stages, {p: right[p] for p in right if p in known})


def write_case(case: Case, environment: EngineEnvironment, target: Path) -> None:
    """Write the file. Raises UsageError for cells that it cannot stand for."""
    if case.cell.routed:
        raise UsageError(
            f"--export: expected a cell whose engines are asked directly, found {case.cell.id}; a file that needs "
            "nothing but vLLM and NIXL cannot start a router: name the cell without it"
        )
    require_loadable(case.profile, case.cell.method)
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
    write_atomic(target, _source(_described(case, environment, models), files))


def model_folders(profile: Profile, cell: Cell) -> dict[str, Path]:
    """The models of a cell by the names that commands use for them."""
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
"""By name: any other ``*.json`` or ``*.txt`` of a folder may be somebody's notes or credentials, and in the file nobody
would see them."""
_WITH_TEXT = ("config.json", "*_config.json", "chat_template*")
"""Files that people write into."""


def _files(folder: Path) -> list[Path]:
    """What engines read of a model. Nothing else that lies in the folder travels, least of all code. Raises UsageError
    for a file that holds what looks like a secret."""
    named = {f for pattern in _MODEL_FILES for f in folder.glob(pattern)}
    found = sorted(f for f in named if f.is_file() and not f.name.startswith("."))
    for file in found:
        if any(file.match(pattern) for pattern in _WITH_TEXT):
            text = file.read_text(encoding="utf-8", errors="replace")
            if redact.text(text) != text:
                raise UsageError(
                    f"--export: expected model files without secrets, found what looks like one in {file}; take it out"
                )
    return found


def engine_commands(case: Case, environment: EngineEnvironment) -> dict[str, list[str]]:
    """How the file starts each engine, by role, with names for models and ports."""
    engines = _described(case, environment, {})["engines"]
    return {e["role"]: [a.replace("<<", "$").replace(">>", "") for a in e["argv"]] for e in engines}


def _described(case: Case, environment: EngineEnvironment, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    roles: list[Role] = ["decode", "prefill"] if case.cell.topology == "pd" else ["single"]
    profile = case.profile
    return {
        "title": case.title,
        "cell": case.cell.id,
        "scenario": case.scenario,
        "versions": {"vllm": environment.vllm, "torch": environment.torch, "nixl": environment.nixl},
        "model_name": MODEL_NAME,
        "keep_blocks": REMOTE_DECODE,
        "scrubbed": SCRUBBED_PREFIXES,
        "guard": {kv_harness_guard.__name__.rpartition(".")[2]: inspect.getsource(kv_harness_guard)},
        "block_size": profile.engine.block_size,
        "near_tie_nats": profile.judging.near_tie_nats,
        "acceptance_slack": case.slack,
        "engines": [_engine(case, environment, role, slot) for slot, role in enumerate(roles)],
        "models": models,
        "stages": [{"hold": stage.hold, "sends": [_send(s, profile) for s in stage.sends]} for stage in case.stages],
        "expected": {
            s.part: {
                "prompt": list(s.prompt.ids),
                "tokens": list(case.right[s.part].tokens),
                "accepted": _listed(case.right[s.part].accepted),
            }
            for stage in case.stages
            for s in stage.sends
            if s.part in case.right
        },
    }


def _listed(accepted: tuple[int, ...] | None) -> list[int] | None:
    return None if accepted is None else list(accepted)


def _send(send: Send, profile: Profile) -> dict[str, Any]:
    return {
        "part": send.part,
        "group": send.group,
        "route": send.route,
        "prompt": list(send.prompt.ids),
        "max_tokens": send.max_tokens or profile.workload.max_tokens,
        "temperature": send.temperature,
        "after_s": send.after_s,
        "after": list(send.after),
        "last": send.last,
        "between": [_send(s, profile) for s in send.between],
    }


def _engine(case: Case, environment: EngineEnvironment, role: Role, slot: int) -> dict[str, Any]:
    """The command with names in the place of what another machine has elsewhere."""
    changes = {"target": Path("<<target>>"), "tokenizer": Path("<<tokenizer>>")}
    method = case.cell.method
    trusted = trusts_code(case.profile, method)
    if method.drafter_path is not None:
        method = method.model_copy(update={"drafter": Path("<<drafter>>")})
    pair = case.cell.topology == "pd"
    command = build_command(
        case.profile.model_copy(update=changes), method, role, environment, _PORT, _SIDE_CHANNEL if pair else None
    )
    argv = ["<<python>>", *command.argv[1:], *(["--trust-remote-code"] if trusted else [])]
    argv[argv.index("--port") + 1] = "<<port>>"
    # It makes a key of its own, and brings the guard along.
    env = {**command.env, "PYTHONPATH": "<<guard>>"}
    if "VLLM_NIXL_SIDE_CHANNEL_PORT" in env:
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "<<side_channel>>"
    if "VLLM_CPU_OMP_THREADS_BIND" in env:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "<<core>>"
        env["LD_PRELOAD"] = "<<openmp>>"
    on_cpu = case.profile.engine.device == "cpu"
    assert LOOPBACK == standalone.HOST
    return {"role": role, "slot": slot if on_cpu else None, "argv": argv, "env": env}


def _source(described: dict[str, Any], files: Mapping[str, bytes]) -> str:
    """The standalone program with the case and the files in it."""
    source = Path(standalone.__file__).read_text(encoding="utf-8")
    # Through JSON, so that only plain values are written.
    plain = json.loads(json.dumps(described))
    case = pprint.pformat(plain, width=_WIDTH, compact=True, sort_dicts=False)
    return _replaced(
        _replaced(source, "CASE: dict[str, Any] = {}", f"CASE: dict[str, Any] = {case}"),
        "FILES: dict[str, str] = {}",
        f"FILES: dict[str, str] = {{\n{''.join(_embedded(files.items()))}}}",
    )


def _replaced(source: str, marker: str, text: str) -> str:
    assert source.count(marker) == 1, marker
    return source.replace(marker, text)


def _embedded(files: Iterable[tuple[str, bytes]]) -> Iterable[str]:
    """Base85 has no quote and no backslash, so that no text of a file can end its literal."""
    for digest, data in files:
        text = base64.b85encode(zlib.compress(data)).decode()
        lines = [text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH)]
        yield f'    "{digest}": """\n' + "\n".join(lines) + '\n""",\n'


def right_answers(
    sends: Sequence[Send], expected: Mapping[str, tuple[int, ...]], accepted: Mapping[str, tuple[int, ...]], most: int
) -> dict[str, Right]:
    """By part, from the recorded answers by prompt id, as far as each request asks."""
    out = {}
    for send in sends:
        tokens = expected.get(send.prompt.id)
        if tokens is None:
            continue
        steps = accepted.get(send.prompt.id)
        out[send.part] = Right(tokens[: send.max_tokens or most], steps or None)
    return out
