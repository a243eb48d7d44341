"""A fake engine for tests of the exported file: it answers like a server, and no model is behind it.

fake_engine.py ROLE --port PORT ANSWERS MODEL...

ANSWERS: JSON: output by prompt length (and third token), or {"die": true};
"temperature": what an answer is asked at, 0 unless it says so; at another one it is wrong;
"salted": a prompt that is sent twice with one cache_salt gets a 500; "blocks": size of the KV pool
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FakeEngine(BaseHTTPRequestHandler):
    role = ""
    answers: dict = {}  # noqa: RUF012
    moved = 0
    asked: list[tuple[str, int, int]] = []  # noqa: RUF012
    running = threading.Event()
    running.set()

    def do_GET(self) -> None:
        if self.path != "/health" and not self.headers.get("Authorization") and not self.answers.get("open"):
            return self.reply(401, "{}")
        metrics = f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {type(self).moved}\n'
        if "blocks" in self.answers:
            metrics += f'vllm:cache_config_info{{num_gpu_blocks="{self.answers["blocks"]}"}} 1.0\n'
        return self.reply(200, metrics if self.path == "/metrics" else "{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/pause"):
            self.running.clear()
            return self.reply(200, "{}")
        if self.path.startswith("/resume"):
            self.running.set()
            return self.reply(200, "{}")
        request = json.loads(body)
        self.running.wait(30)
        size, third = len(request["prompt"]), request["prompt"][2]
        answer = self.answers.get(f"{size}:{third}") or self.answers.get(str(size), {"tokens": [1]})
        cached = (request["cache_salt"], size, third)
        again = self.answers.get("salted") and cached in self.asked
        self.asked.append(cached)
        tokens = answer["tokens"][: request["max_tokens"]]
        if sum(a[1:] == cached[1:] for a in self.asked) == answer.get("wrong_at"):
            tokens = [9, *tokens[1:]]
        # As vLLM, which samples unless it is told not to.
        if request.get("temperature", 1.0) != answer.get("temperature", 0.0):
            tokens = [8, *tokens[1:]]
        parameters = request.get("kv_transfer_params")
        if self.role == "decode" and parameters and not answer.get("unmoved"):
            type(self).moved += 4096
        choice = {
            "prompt_token_ids": answer.get("echo", request["prompt"]),
            "token_ids": tokens,
            "logprobs": {"top_logprobs": [{"a": -0.1, "b": -0.1 - answer.get("gap", 9.0)}] * len(tokens)},
        }
        if "raw" in answer:
            return self.reply(200, answer["raw"])
        reply = {"choices": [choice]}
        if "accepted" in answer:
            reply["metrics"] = {"speculative_decoding": {"per_step_accepted": answer["accepted"]}}
        if self.role == "prefill" and not answer.get("no_parameters"):
            reply["kv_transfer_params"] = {"remote_block_ids": [[1]]}
        return self.reply(500 if answer.get("broken") or again else 200, json.dumps(reply))

    def reply(self, status: int, text: str) -> None:
        data = text.encode()
        if text.startswith("no HTTP"):
            self.wfile.write(data)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    FakeEngine.role, port, said = sys.argv[1], int(sys.argv[3]), json.loads(sys.argv[4])
    for folder in sys.argv[5:]:
        if not (Path(folder) / "tokenizer_config.json").is_file() and not (Path(folder) / "config.json").is_file():
            sys.exit(f"expected a model at {folder}")
    if said.get("die"):
        sys.exit("RuntimeError: no such device")
    FakeEngine.answers = said
    ThreadingHTTPServer(("127.0.0.1", port), FakeEngine).serve_forever()
