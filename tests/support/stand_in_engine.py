"""Stands for an engine in tests of limits: a real process that answers like a server, and hangs when told to. No model.

stand_in_engine.py PORT START_S ANSWERS          answers that many completions, then hangs in ``stuck_in_forward``

Its prefix cache can be reset all the same, which is tried when a cell ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEYS = [v for k, v in os.environ.items() if k.endswith("API_KEY")]


def stuck_in_forward() -> None:
    time.sleep(600)


class StandIn(BaseHTTPRequestHandler):
    left = 0
    answered = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        counted = f'vllm:request_success_total{{engine="0",finished_reason="length"}} {self.answered}\n'
        self.reply(counted if self.path == "/metrics" else json.dumps({"data": [{"id": "target"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/reset_prefix_cache":
            self.reply("{}")
            return
        with self.lock:
            StandIn.left -= 1
            hangs = StandIn.left < 0
        if hangs:
            stuck_in_forward()
        StandIn.answered += 1
        prompt = body.get("prompt")
        ids = prompt if isinstance(prompt, list) else [1]
        gaps = {"token_logprobs": [-0.1], "top_logprobs": [{"a": -0.1, "b": -9.0}]}
        choice = {"token_ids": [1], "prompt_token_ids": ids, "finish_reason": "length", "logprobs": gaps}
        self.reply(json.dumps({"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}))

    def reply(self, text: str) -> None:
        allowed = not KEYS or self.headers.get("Authorization", "").removeprefix("Bearer ") in KEYS
        data = text.encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    port, start_s, StandIn.left = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    if start_s:
        time.sleep(start_s)
    ThreadingHTTPServer(("127.0.0.1", port), StandIn).serve_forever()
