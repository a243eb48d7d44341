"""Fake servers on loopback, and one that says of itself what a vLLM says, and answers nothing else."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",hash_block_size="8",num_gpu_blocks="99"} 1.0
"""
DRAFTS = {"num_speculative_tokens": 3}
SAID = {
    "cache_config": {"block_size": 32, "cache_dtype": "auto"},
    "model_config": {"dtype": "torch.float32", "enforce_eager": True},
    "parallel_config": {"tensor_parallel_size": 1},
    "scheduler_config": {"max_num_batched_tokens": 192, "max_num_scheduled_tokens": 184},
    "speculative_config": {"method": "eagle3"} | DRAFTS,
    "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_connector_extra_config": {}},
}


class Quiet(BaseHTTPRequestHandler):
    """Answers with whole bodies, and logs nothing."""

    def say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        # A client that never shakes hands must not keep the server from ending.
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def fake_server(
    key: str = "", dev: bool = True, said: object = SAID, tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve what a vLLM says of itself; ``said`` is its configuration, offered with ``dev`` alone."""

    class FakeServer(Quiet):
        def do_GET(self) -> None:
            paths = {"/v1/models": {"data": [{"id": "mine"}]}, "/version": {"version": "0.32.0+cpu"}, "/health": {}}
            if dev:
                paths["/server_info?config_format=json"] = {"vllm_config": said, "vllm_env": {}}
            allowed = not key or self.headers.get("Authorization") == f"Bearer {key}" or self.path == "/health"
            known = 405 if dev and self.path in ("/pause", "/reset_prefix_cache") else 404
            status = (200 if self.path in (*paths, "/metrics") else known) if allowed else 401
            body = METRICS.encode() if self.path == "/metrics" else json.dumps(paths.get(self.path, {})).encode()
            self.say(status, body)

    with serving(FakeServer, tls) as url:
        yield url
