"""A FAKE Hugging Face hub on loopback: the routes that huggingface_hub and datasets use, with repositories made up in
the test. It proves how the harness deals with answers of the real one, not that the real one gives them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeRepository:
    """Commits with their files, and the branches and tags that name them."""

    commits: dict[str, dict[str, bytes]]
    names: dict[str, str]
    kind: str = "models"
    gated: bool = False
    granted: set[str] = field(default_factory=set)
    """Tokens that open a gated repository."""

    def commit(self, revision: str) -> str | None:
        return self.names.get(revision, revision if revision in self.commits else None)


def blob(name: str, data: bytes) -> str:
    """Large files go by their SHA-256, others by git's hash of their contents."""
    if name.endswith((".safetensors", ".parquet")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def entry(name: str, data: bytes) -> dict[str, object]:
    out: dict[str, object] = {"size": len(data), "oid": blob(name, data)}
    if len(str(out["oid"])) == 64:
        out["lfs"] = {"oid": out["oid"], "size": len(data), "pointerSize": 134}
    return out


def sibling(name: str, data: bytes) -> dict[str, object]:
    out: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": blob(name, data)}
    if len(str(out["blobId"])) == 64:
        out["lfs"] = {"sha256": out["blobId"], "size": len(data), "pointerSize": 134}
    return out


class FakeHub:
    def __init__(self, repositories: dict[str, FakeRepository]) -> None:
        self.repositories = repositories
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.broken = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            server_version = "FakeHub/1"
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def do_POST(self) -> None:
                hub.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token:
            self.tokens.add(token)
        status, headers, data = self._route(path, token, body)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)

    def _route(self, path: str, token: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.broken:
            return 500, {}, b"the fake hub is broken on purpose"
        api = path.startswith("/api/")
        words = path.strip("/").split("/")
        if api:
            words = words[1:]
        kind = words.pop(0) if words[0] in ("models", "datasets") else "models"
        name, rest = "/".join(words[:2]), words[2:]
        repository = self.repositories.get(name)
        if repository is None or repository.kind != kind:
            return 401 if not token else 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        what, *rest = rest or ["revision"]
        locked = repository.gated and token not in repository.granted
        if what in ("auth-check", "resolve") and locked:
            return 403 if token else 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        if what == "auth-check":
            return 200, {}, b"{}"
        commit = repository.commit(rest[0] if rest else "main")
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = repository.commits[commit]
        if what == "revision":
            return self._json(self._info(name, repository, commit, files))
        if what == "tree":
            return self._json([{"type": "file", "path": n, **entry(n, d)} for n, d in files.items()])
        if what == "paths-info":
            wanted = json.loads(body or b"{}").get("paths", [])
            return self._json([{"type": "file", "path": n, **entry(n, files[n])} for n in wanted if n in files])
        if what == "resolve":
            return self._file("/".join(rest[1:]), files, commit)
        return 404, {}, b"{}"

    def _info(self, name: str, repository: FakeRepository, commit: str, files: dict[str, bytes]) -> dict[str, object]:
        return {
            "_id": "fake",
            "id": name,
            "sha": commit,
            "private": False,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [sibling(n, d) for n, d in files.items()],
        }

    @staticmethod
    def _json(value: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    @staticmethod
    def _file(name: str, files: dict[str, bytes], commit: str) -> tuple[int, dict[str, str], bytes]:
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob(name, files[name])}"', "Accept-Ranges": "bytes"}
        return 200, headers, files[name]


@contextmanager
def fake_hub(repositories: dict[str, FakeRepository]) -> Iterator[FakeHub]:
    hub = FakeHub(repositories)
    thread = threading.Thread(target=hub.serve, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stop()
        thread.join()
