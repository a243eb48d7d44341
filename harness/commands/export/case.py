"""The contents of an exported case: a program with the servers' commands and the requests, and an archive of models."""

from __future__ import annotations

import io
import json
import os.path
import re
import shlex
import textwrap
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import redact
from harness.commands.export import archive_of
from harness.engines.command import INTERPRETER, MODEL_NAME, build_command
from harness.engines.environment import EngineEnvironment
from harness.engines.typed_command import PROJECTS, WIDTH, serve_arguments, typed, wrapped
from harness.errors import UsageError
from harness.history.engine_interfaces import CACHED_TOKENS_FLAG
from harness.history.records import COLD, unverified_tokens
from harness.profiles.availability import models_of
from harness.profiles.cells import Cell, Role
from harness.profiles.kv_layout import modules_in, recurrent, target_config
from harness.profiles.model import Profile
from harness.profiles.remote_code import require_loadable
from harness.prompts.model import Prompt
from harness.prompts.probe_task import WEIGHTS
from harness.scenarios.base import Script, Send, Stage
from harness.util.files import sha256_bytes, tokenizer_hash, write_atomic

ARCHIVED_BYTES = 25 * 10**6
"""The models of a cell are put into the archive up to this total size, which code hosts take as an attachment."""
_READ = 8
"""Lines of requests that are written into the program and not into the archive."""
_LAST_S = 1.5
"""When a request is sent that a held server shall get last: half-way through the time that it is held."""
_PORT, _SIDE_CHANNEL = 8100, 5600
_PROGRAM = Path(__file__).with_name("standalone.py")


class Right(NamedTuple):
    tokens: tuple[int, ...]
    accepted: tuple[int, ...] | None
    """Accepted drafts per verify step; None if they are not compared."""


class Case(NamedTuple):
    """Everything that goes into an exported file."""

    title: str
    """What a user sees, in a line."""
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
    by_logprobs: bool = True
    """Whether log-probs may be all that shows it."""
    reported: str = ""
    """Where an expected failure is reported; empty for any other."""
    in_place: bool = False
    """Whether the servers read the models where they are, by paths from the program's folder, and not an archive."""

    @property
    def sends(self) -> list[Send]:
        return [send for stage in self.stages for send in stage.sends]

    @property
    def copies(self) -> bool:
        """Whether the models are probe models, which copy their prompt."""
        return tokenizer_hash(self.profile.tokenizer_folder) == tokenizer_hash(WEIGHTS / "tokenizer")


def cold_script(prompt: Prompt) -> Script:
    return Script(COLD, 0, (Stage((Send(prompt, "subject", "a"),)),))


def case_of(title: str, profile: Profile, cell: Cell, script: Script, right: Mapping[str, Right]) -> Case:
    """Return a case that judges only requests with a known right answer.

    Raises UsageError without one, and for requests that a file cannot send.
    """
    if any(
        s.abandon
        or s.appended
        or s.feature
        or s.by_second_p
        or s.ageing
        or s.api != "completion"
        or s.route == "former-p"
        for s in script.sends
    ):
        raise UsageError(
            f"{title}: {script.scenario} gives requests up, changes them, streams them, tells D of another P or "
            "sends thousands before them, which an exported file cannot; use `harness repro` alone"
        )
    known = {s.part for s in script.sends if s.part in right}
    if not known:
        raise UsageError(
            f"{title}: the right answer to this prompt is not known; record a baseline (harness baseline record) or "
            "name a prompt that is in the baseline"
        )
    return Case(title, profile, cell, script.scenario, script.stages, {p: right[p] for p in right if p in known})


def write_case(case: Case, environment: EngineEnvironment, target: Path) -> None:
    """Write the program, and the archive beside it. Raises UsageError for cells that cannot be exported."""
    if case.cell.routed:
        direct = case.cell.name.beside(case.cell.topology).id
        what = f"--prompt {case.stages[0].sends[0].prompt.id}" if case.scenario == COLD else f"-s {case.scenario}"
        raise UsageError(
            f"--export: {case.cell.id} has a router, which a file that needs nothing but vLLM and NIXL cannot start; "
            f"instead of a finding, name the cell without it: --cell {direct} {what}"
        )
    for method in (case.cell.method, case.cell.method.on_prefill):
        require_loadable(models_of(case.profile, method))
    folders, archive = model_folders(case, target), archive_of(target)
    files = {f"{name}/{f.relative_to(folder)}": f for folder, name in folders.items() for f in _files(folder)}
    packed = None
    if not case.in_place and sum(file.stat().st_size for file in files.values()) <= ARCHIVED_BYTES:
        if _interpreted(server_commands(case, environment, target)[0]):
            found = [f for f in INTERPRETER.rglob("*") if f.is_file() and f.suffix != ".pyc"]
            files |= {f"{archive.stem}/triton/{f.relative_to(INTERPRETER)}": f for f in found}
        requests = {f"{archive.stem}/requests.json": json.dumps(_stages(case)).encode()} if _many(case) else {}
        packed = _archive({name: file.read_bytes() for name, file in files.items()} | requests)
        write_atomic(archive, packed)
    write_atomic(target, _source(case, environment, target, packed))


def injected(mutants: Sequence[str]) -> str:
    """Return that a case was found with injected faults; empty without any."""
    named = ", ".join(mutants)
    return f"the defect is {named}, which the harness injected, and the file does not have" if named else ""


def model_folders(case: Case, target: Path) -> dict[Path, str]:
    """Return the folders that servers read, with their names below the folder of the program."""
    profile, method = case.profile, case.cell.method
    folders = {profile.tokenizer_folder: "tokenizer", profile.target_folder: "target"}
    for drafter, name in ((method.on_prefill.drafter_path, "drafter-of-p"), (method.drafter_path, "drafter")):
        folders |= {drafter: name} if drafter is not None else {}
    return {folder: _place(case, target, folder, name) for folder, name in folders.items()}


def _place(case: Case, target: Path, folder: Path, name: str) -> str:
    """Return where a program in ``target`` finds a folder, which has this name in its archive."""
    if case.in_place:
        return os.path.relpath(folder, target.resolve().parent)
    return f"{archive_of(target).stem}/{name}"


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Return a zip file, the same for the same contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o644 << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


_MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "preprocessor_config.json", "processor_config.json"),
    *("chat_template*.json", "chat_template*.jinja", "*.safetensors", "model.safetensors.index.json"),
    *("*.model", "*.tiktoken"),
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
                raise UsageError(f"--export: {file} has what looks like a secret, so nothing was written; remove it")
    return found


def server_commands(case: Case, environment: EngineEnvironment, target: Path) -> tuple[str, dict[Role, str]]:
    """Return the variables of all servers, and each one's command by role, as one types them beside the program."""
    pair, on_cpu = case.cell.topology == "pd", case.profile.engine.device == "cpu"
    shared, commands = dict[str, str](), dict[Role, str]()
    # The longest first: a folder may be in another.
    folders = sorted(((str(f), name) for f, name in model_folders(case, target).items()), key=lambda f: -len(f[0]))
    roles: tuple[Role, ...] = ("prefill", "decode") if pair else ("single",)
    for number, role in enumerate(roles):
        channel = _SIDE_CHANNEL + number if pair else None
        command = build_command(case.profile, case.cell.method, role, environment, _PORT + number, channel)
        # What answers need not say here.
        arguments = [word for word in serve_arguments(command) if word != CACHED_TOKENS_FLAG]
        own, words = {}, ["vllm", "serve", *arguments]
        if pair:
            own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(channel)
        if on_cpu and case.profile.engine.devices_of(role) == 1:
            # On a core each: NIXL's polling thread stalls the other server otherwise.
            own["VLLM_CPU_OMP_THREADS_BIND"] = str(number)
            words = ["taskset", "-c", str(number), *words]
        shared |= {name: value for name, value in command.env.items() if name not in own}
        for folder, name in folders:
            words = [word.replace(folder, name) for word in words]
        commands[role] = typed([*(f"{name}={value}" for name, value in own.items()), *map(shlex.quote, words)])
    known = {name: shlex.quote(value) for name, value in shared.items() if name not in PROJECTS}
    if "LD_PRELOAD" in known:
        known["LD_PRELOAD"] = "$VIRTUAL_ENV/lib/libiomp5.so"
    if "TRITON_INTERPRET" in known:
        known["PYTHONPATH"] = shlex.quote(_place(case, target, INTERPRETER, "triton"))
    return typed(["export", *(f"{name}={value}" for name, value in known.items())]), commands


def _interpreted(variables: str) -> bool:
    """Return whether servers need Triton's interpreter, to which this project adds a back end."""
    return "TRITON_INTERPRET=" in variables


def _source(case: Case, environment: EngineEnvironment, target: Path, packed: bytes | None) -> str:
    """Return the program: those parts of the standalone one that the case needs, with its data filled in."""
    variables, commands = server_commands(case, environment, target)
    place, listed = archive_of(target), packed is not None and _many(case)
    sends = [send for stage in _stages(case) for send in stage["sends"]]
    pair, gaps = case.cell.topology == "pd", case.by_logprobs or not case.copies
    routes = any(send.keys() & {"route", "between", "read_back"} for send in sends)
    parts = {"together" if any(len(stage.sends) > 1 for stage in case.stages) else "alone"}
    parts |= {"pair", "routes" if routes else "direct"} if pair else {"single"}
    parts |= set() if _cut_on_p(case) else {"whole"}
    parts |= {"archive" if packed is not None else "folders", "gaps" if gaps else "plain"}
    parts |= {"listed" if listed else "inline"}
    parts |= {"tries"} if case.tries > 1 else set()
    if any((send.get("right") or {}).get("accepted") is not None for send in sends):
        parts |= {"drafts", "slack" if case.slack else "exact"}
    judging = case.profile.judging
    data = {
        "model": MODEL_NAME,
        "block_size": case.profile.engine.block_size,
        "context": case.profile.engine.max_model_len if case.tries > 1 else None,
        "tries": case.tries,
        "seen": f"{case.seen}; that says nothing: {injected(case.mutants)}" if case.mutants else case.seen,
        "archive": place.name if packed is not None else None,
        "sha256": sha256_bytes(packed) if packed is not None else None,
        "requests": f"{place.stem}/requests.json" if listed else None,
        "models": None if packed is not None else {n: f.name for f, n in model_folders(case, target).items()},
        "slack": case.slack or None,
        "near_tie_nats": judging.near_tie_assumed(case.profile.engine.dtype) if gaps else None,
        # Between P and D: requests of one stage share a batch.
        "logprob_nats": (max(judging.logprob_nats or 0.0, 1e-3) if judging.tier != "normal" else 1e9) if gaps else None,
    }
    text = _kept(parts)
    filled = {"title": _one_line(case.title), "file": target.name, "vllm": environment.vllm}
    filled["reported"] = f"{_one_line(case.reported, 500)}\n" if case.reported else ""
    for word, meant in filled.items():
        text = text.replace(f"${word}", meant)
    literals = {
        "VARIABLES": _text(variables),
        "SERVERS": "{\n" + "".join(f'    "{role}": {_text(command)},\n' for role, command in commands.items()) + "}",
        "CASE": _literal({name: value for name, value in data.items() if value is not None}),
        "STAGES": _literal(_stages(case)),
    }
    marker = re.compile(rf"^({'|'.join(literals)})(?:: .+)? = .+$", re.MULTILINE)
    return marker.sub(lambda found: f"{found[1]} = {literals[found[1]]}", text)


def _cut_on_p(case: Case) -> bool:
    """Return whether P leaves the last tokens of a prompt to D, so that its own token is not the answer's first one."""
    method = case.cell.method
    unverified = unverified_tokens(method.draft_tokens, modules_in(case.profile, method))
    return unverified > 0 or recurrent(target_config(case.profile))


_IMPORT = re.compile(r"^(?:import (\S+)|from \S+ import (\w+))\n", re.MULTILINE)


def _kept(parts: set[str]) -> str:
    """Return the standalone program with these of the parts that comments in brackets begin, in as few lines as it can
    be read in."""
    lines, needed = [], set[str]()
    for line in _PROGRAM.read_text(encoding="utf-8").splitlines():
        if found := re.match(r" *# \[([\w ]+)\]$", line):
            needed = set(found[1].split()) - {"end"}
        elif needed <= parts:
            lines.append(line)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines) + "\n")
    text = _IMPORT.sub(lambda m: m[0] if len(re.findall(rf"\b{re.escape(m[1] or m[2])}\b", text)) > 1 else "", text)
    modules = re.findall(r"^import (.+)\n", text, re.MULTILINE)
    imports = [f"import {line.rstrip(',')}\n" for line in textwrap.wrap(", ".join(modules), WIDTH - 8)]
    return re.sub(r"(^import .+\n)+", "".join(imports), text, count=1, flags=re.MULTILINE)


def _text(text: str) -> str:
    assert '"""' not in text
    return f'r"""\n{text}"""'


def _one_line(text: str, most: int = 115) -> str:
    """Return a line that is safe in a docstring."""
    return " ".join(text.split()).replace("\\", "/").replace('"', "'")[:most]


_ATOM = re.compile(r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s'"])+""")
"""What a literal may not be broken in."""


def _literal(value: object) -> str:
    """Return a literal of plain values over several lines."""
    return "\n".join(wrapped(_ATOM.findall(repr(json.loads(json.dumps(value))))))


def _stages(case: Case) -> list[dict[str, Any]]:
    return [_stage(stage, case) for stage in case.stages]


def _many(case: Case) -> bool:
    """Return whether the requests are too many to be read in the program."""
    return _literal(_stages(case)).count("\n") > _READ


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
        "after_s": _LAST_S if send.last else send.after_s,
        "after": list(send.after),
        "prompt": list(send.prompt.ids),
        "right": None if right is None else {"tokens": list(right.tokens), "accepted": accepted},
        "between": [_send(s, case) for s in send.between],
        "read_back": send.read_back,
    }
    return {name: value for name, value in whole.items() if value}


def right_answers(
    sends: Sequence[Send], expected: Mapping[str, tuple[int, ...]], accepted: Mapping[str, tuple[int, ...]], most: int
) -> dict[str, Right]:
    """Return the right answers by part, cut to the length of each request, from the answers recorded by prompt id."""
    out = {}
    for send in sends:
        tokens = expected.get(send.prompt.id)
        if tokens is None:
            continue
        tokens = tokens[: send.max_tokens or most]
        steps = accepted.get(send.prompt.id)
        out[send.part] = Right(tokens, tuple(_steps(steps, len(tokens))) if steps else None)
    return out


def _steps(accepted: Sequence[int], tokens: int) -> Iterator[int]:
    """Yield the accepted drafts of the steps that an answer of so many tokens takes."""
    produced = 1
    for step in accepted:
        if produced < tokens:
            yield step
        produced += step + 1
