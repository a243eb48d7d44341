"""The commands that start a plan's engines by hand are those of the launcher."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from harness.commands.serving_commands import PORTS, environment_to_type, lines_of, servers_of
from harness.engines.api_key import GUARD_FOLDER, ApiKey
from harness.engines.command import GUARD, PROGRAM, START_METHOD, EngineCommand
from harness.engines.guard.kv_harness_guard import KEY_VARIABLE
from harness.engines.launcher import Launcher
from harness.engines.mutation import Mutation
from harness.engines.router import router_command
from harness.engines.typed_command import PROJECTS
from harness.errors import EnvironmentFault
from harness.history.engine_interfaces import CACHED_TOKENS_FLAG
from harness.profiles.cells import EngineGroup, Role
from harness.workload.prepare import Prepared, prepare
from tests.support.engines import ENVIRONMENT
from tests.support.program import harness

CASES = [
    ("cpu", ["pd-eagle3*", "single-none"]),
    ("cpu-unlike", ["pd-eagle3"]),
    ("cpu-v2", ["pd-mtp", "single-none"]),
    ("cpu-push", ["pd-none"]),
    ("gpu", ["pd-dflash", "single-none"]),
]


class FixedPlace:
    """A place with the ports and devices of a command that was printed."""

    host = "127.0.0.1"
    node = None

    def __init__(self, ports: list[int], devices: tuple[str, ...]) -> None:
        self.devices = devices
        self._ports = ports

    def ports(self, count: int) -> list[int]:
        return self._ports[:count]


def launched(prepared: Prepared, group: EngineGroup, role: Role, port: int, channel: int, devices: tuple[str, ...]):
    """The command of the launcher itself for an engine of a group."""
    part = prepared.profile.part(group.variant)
    launcher = Launcher(group, part, Path("/run/logs"), Path("/run/witness"), ApiKey("k" * 20), lambda _: None)
    place = FixedPlace([port, channel, channel + 1], devices)
    return launcher._command(role, place, ENVIRONMENT, Mutation())


def parsed(text: str) -> tuple[dict[str, str], list[str]]:
    """Variables and words of a command as a shell reads it."""
    words = shlex.split(text.replace("\\\n", " "))
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


def typed_argv(words: list[str]) -> list[str]:
    """The arguments of vLLM's server, with the guard back where the launcher has it."""
    words = words[3:] if words[0] == "taskset" else words
    assert words[:2] == ["/somewhere/bin/vllm", "serve"]
    at = words.index(CACHED_TOKENS_FLAG) + 1
    return [*words[3:at], "--middleware", GUARD, *words[at:], words[2]]


def launcher_argv(command: EngineCommand) -> list[str]:
    words = command.argv[command.argv.index(PROGRAM) + 1 :]
    at = words.index("--model")
    return [*words[:at], *words[at + 2 :], words[at + 1]]


@pytest.mark.parametrize(("profile", "cells"), CASES)
def test_they_are_those_of_the_launcher(profile, cells):
    prepared = prepare(profile, cells, ["cold"], planned=True).witnessing("off")
    for servers in servers_of(prepared, ENVIRONMENT, None):
        group, engines = servers.group, [s for s in servers.started if "router" not in s.what]
        assert [s.what for s in engines] == (["P", "D"] if group.topology == "pd" else ["an engine alone"])
        for role, server in zip(servers.urls, engines, strict=True):
            variables, words = parsed(server.text)
            channel = int(variables.get("VLLM_NIXL_SIDE_CHANNEL_PORT", 0))
            named = variables.get("VLLM_CPU_OMP_THREADS_BIND", variables.get("CUDA_VISIBLE_DEVICES", ""))
            devices = () if named == "nobind" else tuple(named.split(","))
            command = launched(prepared, group, role, PORTS[role], channel, devices)
            assert typed_argv(words) == launcher_argv(command)
            ours = {n: v for n, v in command.env.items() if n not in (*PROJECTS, START_METHOD, KEY_VARIABLE)}
            assert {n: v for n, v in variables.items() if n != "PYTHONPATH"} == ours
            path = [e for e in command.env["PYTHONPATH"].split(os.pathsep) if e != str(GUARD_FOLDER)]
            assert variables.get("PYTHONPATH", "") == os.pathsep.join(path)
            assert servers.urls[role] == f"http://127.0.0.1:{PORTS[role]}"


def test_the_router_is_started_as_in_a_run():
    (servers,) = servers_of(prepare("cpu", ["pd-eagle3*"], ["cold"]), ENVIRONMENT, None)
    router = servers.started[-1]
    assert router.what == "a router that hands off between them"
    name, *words = shlex.split(router.text.replace("\\\n", " "))
    ours = router_command(servers.urls, 8000, 8001, ApiKey("k" * 20)).argv
    assert name == "vllm-router" and words == ours[-len(words) :] and servers.router == "http://127.0.0.1:8000"


def test_p_and_d_get_cores_of_their_own(monkeypatch):
    monkeypatch.setattr("harness.util.allowance.cores", lambda: [4, 6])
    (servers,) = servers_of(prepare("cpu", ["pd-none"], ["cold"]), ENVIRONMENT, None)
    assert [parsed(s.text)[1][:3] for s in servers.started] == [["taskset", "-c", "4"], ["taskset", "-c", "6"]]
    monkeypatch.setattr("harness.util.allowance.cores", lambda: [4])
    (servers,) = servers_of(prepare("cpu", ["pd-none"], ["cold"]), ENVIRONMENT, None)
    assert [parsed(s.text)[0]["VLLM_CPU_OMP_THREADS_BIND"] for s in servers.started] == ["4", "nobind"]


def test_engines_that_note_their_kv_have_the_plugin_and_its_variables(tmp_path: Path):
    (servers,) = servers_of(prepare("cpu", ["pd-none"], ["cold"]), ENVIRONMENT, tmp_path)
    names = []
    for server in servers.started:
        variables, _ = parsed(server.text)
        assert variables["KV_HARNESS_WITNESS"] == str(tmp_path)
        assert (Path(variables["PYTHONPATH"]) / "kv_harness_witness.py").is_file()
        names.append(variables["KV_HARNESS_WITNESS_NAME"])
    assert names == ["prefill", "decode"]


def test_a_vllm_of_another_package_is_started_as_a_module():
    """The program ``vllm`` of the package vllm-cpu ends at once, since it does not find its version."""
    environment = ENVIRONMENT.model_copy(update={"has_vllm_program": False})
    (servers,) = servers_of(prepare("cpu", ["single-none"], ["cold"]), environment, None)
    words = parsed(servers.started[0].text)[1]
    assert words[3:7] == ["/somewhere/bin/python", "-m", PROGRAM, "--model"]


def test_programs_are_called_by_their_names_where_the_shell_finds_them(monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere")
    (servers,) = servers_of(prepare("cpu", ["single-none"], ["cold"]), ENVIRONMENT, None)
    assert "vllm serve" in servers.started[0].text and "/somewhere/bin/vllm" not in servers.started[0].text


def test_without_a_vllm_here_the_commands_say_what_is_missing(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    environment = environment_to_type(None, "cpu")
    lines = list(lines_of(prepare("cpu", ["pd-eagle3"], ["cold"]), "cpu", environment, None))
    assert any("--engine-python" in line for line in lines) and any("libiomp5" in line for line in lines)
    with pytest.raises(EnvironmentFault, match="--engine-python /bin/false"):
        environment_to_type("/bin/false", "cpu")


def test_the_lines_end_with_the_commands_that_ask_the_servers():
    done = harness("plan", "--commands", "-c", "pd-none", "--witness-notes", "noted")
    assert done.code == 0, done.output
    attach, run = [line for line in done.output.splitlines() if line.startswith("harness ")]
    servers = "--prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200"
    notes = f"--witness-notes {Path('noted').absolute()}"
    assert attach == f"harness attach {servers} --extends cpu --out pd-none.yaml {notes}"
    assert run == f"harness run -p pd-none.yaml {servers} {notes}"


@pytest.mark.parametrize("words", [["--engine-python", "python"], ["--witness-notes", "x"], ["--commands", "--json"]])
def test_options_that_make_no_sense_alone_are_refused(words):
    done = harness("plan", *words)
    assert done.code == 64 and "--commands" in done.output
