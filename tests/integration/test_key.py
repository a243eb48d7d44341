"""The key of a run: who is given it, who is refused without it, and where it never stands."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness.engines.api_key import GUARD, GUARD_FOLDER, ApiKey, HeaderFile, header_file, require_guarded
from harness.engines.client import Client
from harness.engines.guard.kv_harness_guard import KeyGuard
from harness.engines.ray.node import engine_environment
from harness.engines.router import router_command
from harness.errors import EngineStartError
from harness.supervision.server import full_environment, joined_path
from tests.support.engines import command_of
from tests.support.fake_server import Quiet, serving

# --- handing it out --------------------------------------------------------------------------------------------------


def test_keys_are_long_random_and_shy():
    keys = {ApiKey().value for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 40
    key = ApiKey()
    assert key.value not in f"{key} {key!r} {[key]}"


def test_engine_gets_the_key_and_the_guard_and_no_key_on_its_command_line():
    key = ApiKey()
    made = command_of(key=key)
    assert made.env["VLLM_API_KEY"] == key.value
    assert key.value not in " ".join(made.argv)
    assert made.argv[made.argv.index("--middleware") + 1] == GUARD
    assert made.env["PYTHONPATH"].split(os.pathsep)[0] == str(GUARD_FOLDER)
    assert made.env["PYTHONSAFEPATH"] == "1"
    assert made.argv[made.argv.index("--host") + 1] == "127.0.0.1"


def test_transfer_listens_on_loopback_unless_engines_are_elsewhere():
    assert command_of(key=ApiKey()).env["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in command_of(key=ApiKey(), host="10.0.0.1").env


def test_guard_comes_before_what_a_mutant_puts_on_the_path():
    made = command_of(
        key=ApiKey(), extra_env={"PYTHONPATH": "/armed:relative::/repository", "KV_HARNESS_MUTANTS": "M1"}
    )
    assert made.env["PYTHONPATH"] == os.pathsep.join([str(GUARD_FOLDER), "/armed", "/repository"])


def test_current_folder_is_never_on_the_path():
    assert joined_path("/a:/b", ":.:c:/a") == "/a:/b"


def test_engines_inherit_no_secret_and_no_key_of_another(monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY", "VLLM_API_KEY", "MY_AUTH"):
        monkeypatch.setenv(name, "planted-secret")
    monkeypatch.setenv("INDEX", "https://me:planted-secret@example.org/simple")
    monkeypatch.setenv("HF_HOME", "/models")
    env = full_environment({"VLLM_API_KEY": "ours"})
    assert "planted-secret" not in " ".join(env.values())
    assert (env["HF_HOME"], env["VLLM_API_KEY"]) == ("/models", "ours")


def test_node_of_a_cluster_takes_the_guard_from_its_own_package(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    env = engine_environment({"PYTHONPATH": "/driver/harness/engines/guard:/armed"})
    assert env["PYTHONPATH"] == os.pathsep.join([str(GUARD_FOLDER), "/armed"])


def test_router_gets_the_key_in_its_environment():
    key = ApiKey()
    made = router_command({"prefill": "http://127.0.0.1:1", "decode": "http://127.0.0.1:2"}, 3, 4, key)
    assert key.value not in " ".join(made.argv)
    assert key.value in made.env.values() and "http://127.0.0.1:2/v1/models" in made.env.values()


def test_key_for_a_person_is_in_a_file_of_this_user_and_gone_afterwards():
    key = ApiKey()
    with header_file(key) as file:
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        assert file.path.read_text() == f"Authorization: Bearer {key.value}\n"
        assert key.value not in file.curl + file.use
        export = file.use.split("export ")[1]
        script = f'export {export}; printf %s "$OPENAI_API_KEY"'
        said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        assert said.stdout == key.value
    assert not file.path.exists()


# --- the guard -------------------------------------------------------------------------------------------------------


class Asgi:
    """An application behind the guard that notes what reached it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        self.seen.append(scope.get("path", scope["type"]))


def asked(guard: KeyGuard, **scope: object) -> list[dict]:
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard({"type": "http", "headers": [], **scope}, None, send))
    return sent


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "right-key")
    app = Asgi()
    return KeyGuard(app), app


RIGHT = [(b"authorization", b"Bearer right-key")]
WRONG = [
    [],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", b"right-key")],
    [(b"authorization", b"Basic right-key")],
    [(b"authorization", b"Bearer right-key ")],
    [(b"authorization", b"Bearer right-kex")],
    [(b"authorization", b"Bearer \xff\xfe")],
    [(b"x-api-key", b"right-key")],
    [(b"authorization", b"Bearer wrong"), *RIGHT],
]


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize("path", ["/metrics", "/v1/completions", "/pause", "/health/../pause", "/health/", "//health"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_guard_refuses_every_path_without_the_key(guarded, path, headers, method):
    guard, app = guarded
    assert asked(guard, path=path, headers=headers, method=method)[0]["status"] == 401
    assert app.seen == []


def test_guard_lets_through_whoever_has_the_key_and_questions_for_health(guarded):
    guard, app = guarded
    asked(guard, path="/pause", headers=RIGHT)
    asked(guard, path="/pause", headers=[(b"Authorization", b"bearer right-key")])
    asked(guard, path="/health")
    asked(guard, type="lifespan")
    assert app.seen == ["/pause", "/pause", "/health", "lifespan"]


def test_guard_closes_web_sockets_without_the_key(guarded):
    guard, app = guarded
    assert asked(guard, type="websocket", path="/health")[0]["type"] == "websocket.close"
    assert app.seen == []


def test_guard_without_a_key_does_not_start(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="expected a key"):
        KeyGuard(Asgi())


def test_guard_needs_nothing_but_the_standard_library():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import kv_harness_guard; print('harness' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(GUARD_FOLDER)], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "False"


# --- the drill: an engine that does not refuse -----------------------------------------------------------------------


class FakeOpenServer(Quiet):
    """Answers everybody, or whoever has the key where its own folder says so; no model is behind it."""

    refused: tuple[str, ...] = ()
    seen: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization") or "")
        self.say(401 if self.path in self.refused else 200, b"{}")


@pytest.fixture
def server():
    FakeOpenServer.refused, FakeOpenServer.seen = (), []
    with serving(FakeOpenServer) as url:
        yield url


@pytest.mark.parametrize("refused", [(), ("/v1/models",), ("/v1/models", "/metrics")])
def test_engine_that_answers_without_the_key_is_a_failed_start(server, refused):
    FakeOpenServer.refused = refused
    with pytest.raises(EngineStartError, match="without the run's key"):
        require_guarded(server, "the decode engine of pd-none")


def test_engine_that_refuses_is_taken_and_the_probe_shows_no_key(server):
    FakeOpenServer.refused = ("/v1/models", "/metrics", "/pause")
    require_guarded(server, "the decode engine of pd-none")
    assert FakeOpenServer.seen == ["", "", ""]


def test_client_shows_its_key(server):
    key = ApiKey()
    client = Client("single", server, 5.0, key)
    client.get("/metrics")
    client.close()
    assert FakeOpenServer.seen == [f"Bearer {key.value}"]


def test_engine_that_is_gone_is_a_failed_start():
    with pytest.raises(EngineStartError, match="found no answer"):
        require_guarded("http://127.0.0.1:1", "the single engine", timeout_s=1)


def test_python_of_engines_does_not_import_from_the_current_folder(tmp_path):
    (tmp_path / "torch.py").write_text("print('planted')")
    env = full_environment(command_of(key=ApiKey()).env)
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert Path(said.stdout.strip()) != tmp_path / "torch.py"


def test_commands_for_a_person_hold_in_folders_with_spaces():
    file = HeaderFile(Path("/a folder/x"))
    assert file.curl == "-H @'/a folder/x'" and "'/a folder/x')" in file.use
