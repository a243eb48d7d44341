"""Stand-ins for servers that run already: what vLLM 0.32.0 tells of itself, and an answer to any request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.profiles.load import load_profile
from tests.support.fake_server import Quiet, serving

PROFILE = load_profile("cpu")
TARGET, TOKENIZER = str(PROFILE.target_folder), str(PROFILE.tokenizer_folder)
DRAFTER = str(next(m for m in PROFILE.methods if m.kind == "eagle3").drafter_path)
SIDE_CHANNELS = {"prefill": 5600, "decode": 5700}


def told(role: str = "decode", **changes: Any) -> dict[str, Any]:
    """vLLM's configuration of an engine of ``cpu`` with EAGLE3, or of the plain one alone; ``changes`` are of single
    settings by their path, with ``__`` for dots, or of whole sections."""
    speculates = role != "single"
    config: dict[str, Any] = {
        "model_config": {
            **{"model": TARGET, "tokenizer": TOKENIZER, "dtype": "torch.float32", "max_model_len": 416},
            **{"enforce_eager": True, "hf_overrides": {}},
        },
        "cache_config": {
            **{"block_size": 32, "cache_dtype": "auto", "num_gpu_blocks": 28, "num_gpu_blocks_override": 28},
            "enable_prefix_caching": True,
        },
        "parallel_config": {"tensor_parallel_size": 1},
        "scheduler_config": {"max_num_batched_tokens": 192, "max_num_scheduled_tokens": 192, "max_num_seqs": 4},
        "device_config": {"device": "cpu"},
        "observability_config": {"per_request_spec_decode_metrics": "detailed"},
        "speculative_config": {"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": 3}
        if speculates
        else None,
        "kv_transfer_config": {
            **{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": 30, "num_threads": 0},
        }
        if speculates
        else None,
    }
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            config[section] = {**(config[section] or {}), name: value}
        else:
            config[section] = value
    steps = config["scheduler_config"]
    return config | {"scheduler_config": {**steps, "max_num_scheduled_tokens": steps["max_num_batched_tokens"]}}


def metrics(config: Mapping[str, Any]) -> str:
    cache = config["cache_config"]
    labels = ",".join(f'{name}="{value}"' for name, value in {"_block_size_resolved": True, **cache}.items())
    lines = [f"vllm:cache_config_info{{{labels}}} 1.0"]
    for position in range((config["speculative_config"] or {}).get("num_speculative_tokens", 0)):
        counter = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f'{counter}{{engine="0",model_name="mine",position="{position}"}} 0.0')
    return "\n".join(lines) + "\n"


def answer(asked: Mapping[str, Any], per_request: bool, ids: bool) -> dict[str, Any]:
    """An answer of two tokens."""
    top = {"token_id:3": -0.1, "token_id:4": -3.0}
    logprobs = {"tokens": ["token_id:3"] * 2, "token_logprobs": [-0.1] * 2, "top_logprobs": [top] * 2}
    choice: dict[str, Any] = {"index": 0, "text": "aa", "finish_reason": "length", "stop_reason": None}
    choice |= {"logprobs": logprobs}
    if ids:
        choice |= {"token_ids": [3, 3], "prompt_token_ids": list(asked["prompt"])}
    drafted = {
        **{"num_spec_steps": 1, "num_spec_tokens": 3, "num_draft_tokens": 3, "num_accepted_draft_tokens": 0},
        **{"per_step_accepted": [0], "per_step_drafted": [3], "acceptance_histogram": [1, 0, 0, 0]},
    }
    found = {"id": "x", "object": "text_completion", "model": asked["model"], "choices": [choice]}
    usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 2, "total_tokens": len(asked["prompt"]) + 2}
    return {**found, "usage": usage, "metrics": {"speculative_decoding": drafted} if per_request else None}


@contextmanager
def attached_server(
    role: str = "decode",
    dev: bool = True,
    version: str = "0.32.0",
    per_request: bool | None = None,
    ids: bool = True,
    root: str | None = TARGET,
    **changes: Any,
) -> Iterator[str]:
    """Serve what such an engine tells; without ``dev``, its metrics alone. ``changes`` are those of ``told``."""
    config = told(role, **changes)
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_BATCH_INVARIANT": False}
    variables |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": SIDE_CHANNELS.get(role)}
    card = {"id": "mine", "root": root, "parent": None, "max_model_len": config["model_config"]["max_model_len"]}
    paths = {
        "/v1/models": json.dumps({"data": [card]}),
        "/version": json.dumps({"version": version}),
        "/health": "",
        "/metrics": metrics(config),
    }
    if dev:
        paths["/server_info?config_format=json"] = json.dumps({"vllm_config": config, "vllm_env": variables})
    tells = bool(config["speculative_config"]) if per_request is None else per_request

    class Attached(Quiet):
        def do_GET(self) -> None:
            known = 405 if dev and self.path in ("/pause", "/reset_prefix_cache") else 404
            self.say(200 if self.path in paths else known, paths.get(self.path, "").encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.say(200, json.dumps(answer(asked, tells, ids)).encode())

    with serving(Attached) as url:
        yield url
