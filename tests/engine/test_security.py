"""Real engines answer to the run's key alone, listen on loopback, and leave no key behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from harness.engines.environment import inspect_environment
from harness.engines.router import Router
from harness.engines.session import EngineGroupSession
from harness.profiles.cells import make_plan, select_cells
from harness.profiles.load import load_profile
from harness.supervision.ports import free_ports

pytestmark = pytest.mark.engine

GUARDED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/metrics", "/server_info", "/docs")
ACTING = ("/v1/completions", "/pause", "/resume", "/reset_prefix_cache", "/sleep")


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def refuses(url: str, path: str, headers: dict[str, str]) -> None:
    assert httpx.get(f"{url}{path}", headers=headers, timeout=10).status_code == 401, path
    assert httpx.options(f"{url}{path}", headers=headers, timeout=10).status_code == 401, path
    body = {"model": "target", "prompt": [1, 2, 3], "max_tokens": 1}
    assert httpx.post(f"{url}{path}", headers=headers, json=body, timeout=10).status_code == 401, path


def command_lines() -> list[str]:
    """Of all processes, as every user can read them."""
    return [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]


def holding(folder: Path, secret: str) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


@pytest.mark.exhaustive
def test_engine_and_router_answer_to_the_key_alone(tmp_path):
    profile = load_profile("cpu")
    (group,) = make_plan(profile, select_cells(profile, ["single-none"])).groups
    with EngineGroupSession(group, profile, inspect_environment(sys.executable), tmp_path / "logs") as session:
        key, url = session.key, session.url("single")
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        strangers = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": key.value}]
        for headers in strangers:
            for path in {*GUARDED, *ACTING}:
                refuses(url, path, headers)
        for path in ("/v1/models", "/metrics", "/server_info"):
            assert httpx.get(f"{url}{path}", headers=key.headers, timeout=30).status_code == 200, path

        (engine,) = session._launcher.processes.values()
        pids = tree(engine.pid)
        with Router({"single": url}, *free_ports(2), tmp_path / "logs" / "router.log", key) as router:
            body = {"model": "target", "prompt": [1, 2, 3], "max_tokens": 2}
            for headers in strangers:
                asked = [("GET", "/v1/models"), ("GET", "/health"), ("GET", "/workers")]
                for method, path in [*asked, ("POST", "/v1/completions"), ("POST", "/flush_cache")]:
                    # Without a body that it understands it says so before it looks at the key.
                    said = body if method == "POST" else None
                    given = httpx.request(method, f"{router.url}{path}", headers=headers, json=said, timeout=10)
                    assert given.status_code == 401, (method, path)
            answer = httpx.post(f"{router.url}/v1/completions", headers=key.headers, json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            pids += tree(router.pid)

            assert [words for words in command_lines() if key.value in words] == []
            assert "HF_TOKEN" not in {name for p in pids for name in p.environ()}
            listening = {
                c.laddr.ip for p in pids for c in p.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN
            }
            assert listening == {"127.0.0.1"}
        records = session.records()
    assert records[0].env["VLLM_API_KEY"] == "<redacted>"
    assert holding(tmp_path, key.value) == []
    assert os.environ.get("VLLM_API_KEY") is None
