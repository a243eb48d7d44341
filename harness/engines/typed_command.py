"""The commands of servers as a person types them, without what only this project adds: the guard of their ports."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence

from harness.engines.api_key import GUARD_FOLDER
from harness.engines.command import PROGRAM, START_METHOD, EngineCommand
from harness.engines.environment import EngineEnvironment
from harness.engines.guard.kv_harness_guard import KEY_VARIABLE

WIDTH = 119
"""Columns of lines."""
PROJECTS = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "DO_NOT_TRACK")
"""Variables of engines that only this project needs."""


def serve_arguments(command: EngineCommand) -> list[str]:
    """Return the arguments of ``vllm serve``: the model, then the others, without the guard of this project."""
    words = command.argv[command.argv.index(PROGRAM) + 1 :]
    for option in ("--middleware", "--model"):
        at = words.index(option)
        taken, words = words[at + 1], [*words[:at], *words[at + 2 :]]
    return [taken, *words]


def serve_words(command: EngineCommand, environment: EngineEnvironment) -> list[str]:
    """Return the program and arguments that start the engine's server in an environment."""
    model, *others = serve_arguments(command)
    if environment.has_vllm_program:
        return [_program("vllm", environment), "serve", model, *others]
    return [_program("python", environment), "-m", PROGRAM, "--model", model, *others]


def _program(name: str, environment: EngineEnvironment) -> str:
    """Return how a program of the environment is called: by its name where the shell finds it."""
    found = not environment.prefix or environment.prefix == os.environ.get("VIRTUAL_ENV")
    return name if found else f"{environment.prefix}/bin/{name}"


def variables(command: EngineCommand) -> dict[str, str]:
    """Return the variables that an engine needs that is started by hand."""
    # Without the plugin beside the guard, vLLM's CPU platform spawns, whatever this says.
    left_out = {*PROJECTS, START_METHOD, KEY_VARIABLE}
    found = {name: value for name, value in command.env.items() if name not in left_out}
    path = [e for e in command.env.get("PYTHONPATH", "").split(os.pathsep) if e and e != str(GUARD_FOLDER)]
    return found | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def typed_command(command: EngineCommand, environment: EngineEnvironment) -> str:
    """Return the command that starts an engine, with its variables, to be pasted into a shell."""
    own = variables(command)
    pinned = own.get("VLLM_CPU_OMP_THREADS_BIND", "")
    # On a core each: NIXL's polling thread stalls the other server otherwise.
    words = ["taskset", "-c", pinned] if pinned.isdecimal() else []
    return typed([*assignments(own), *map(shlex.quote, [*words, *serve_words(command, environment)])])


def assignments(values: Mapping[str, str]) -> list[str]:
    """Return variables as a shell takes them before a command."""
    return [f"{name}={shlex.quote(value)}" for name, value in values.items()]


def typed(words: Sequence[str]) -> str:
    """Return quoted words as a command over several lines, an option beside its value."""
    units: list[str] = []
    for word in words:
        beside = bool(units) and units[-1].startswith("--") and " " not in units[-1] and not word.startswith("--")
        units[-1:] = [f"{units[-1]} {word}"] if beside else [*units[-1:], word]
    return " \\\n".join(wrapped(units))


def wrapped(words: Iterable[str]) -> list[str]:
    """Return words on indented lines; only words that are too long by themselves make longer ones."""
    lines = [""]
    for word in words:
        if lines[-1].strip() and len(lines[-1]) + len(word) >= WIDTH:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
