"""A server that answers as an engine does, and the real client that asks it through the proxy."""

from __future__ import annotations

import json

from faults.proxy import Proxy
from harness.engines.answers import Sampling
from harness.engines.client import Client
from tests.support.fake_server import Quiet


class FakeServer(Quiet):
    """Answers every completion alike; no model is behind it."""

    protocol_version = "HTTP/1.1"
    seen: list[dict] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.say(200, b"vllm:num_preemptions_total 1.0\nvllm:generation_tokens_total 1.0\n")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({"body": body, "authorization": self.headers.get("Authorization")})
        ids = list(range(10, 20))
        spec = {"per_step_accepted": [3, 3, 1], "per_step_drafted": [3, 3, 3]}
        totals = {"num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 7}
        choice = {
            "prompt_token_ids": body["prompt"],
            "token_ids": ids,
            "finish_reason": "length",
            "logprobs": {
                "token_logprobs": [-0.1] * len(ids),
                "top_logprobs": [{"a": -0.1, "b": -9.0} for _ in ids],
            },
        }
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        answer = {
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
            "metrics": {"speculative_decoding": {**spec, **totals}},
            "kv_transfer_params": {"remote_block_ids": [[1, 2]], "remote_port": 1, "remote_engine_id": "x"},
        }
        self.say(200, json.dumps(answer).encode())

    def end_headers(self) -> None:
        self.send_header("Content-Type", "application/json")
        super().end_headers()


def ask(proxy: Proxy, timeout: float = 3.0):
    client = Client("single", proxy.url, timeout)
    try:
        return client.complete([5, 6, 7], Sampling(10, 2), "id", "salt", count=False)
    finally:
        client.close()
