"""Interfaces of engines that the harness relies on and some versions lack, and what it costs to lack them."""

from __future__ import annotations

PER_REQUEST = "per-request acceptance metrics"
PER_REQUEST_FLAG = "--per-request-spec-decode-metrics"
"""Asks an engine for them, which one that lacks them does not know."""
CACHED_TOKENS_FLAG = "--enable-prompt-tokens-details"
"""Asks an engine to say in its usage how many prompt tokens were cached."""
BY_SOURCE = "prompt tokens by source"
STEP_TOKENS = "tokens per step"
PAUSE = "POST /pause"
RESET_PREFIX_CACHE = "POST /reset_prefix_cache"
SERVER_INFO = "GET /server_info"

WITHOUT = {
    PER_REQUEST: "acceptance is judged by counters where a request is alone on the engine, and is UNKNOWN elsewhere",
    PAUSE: "requests cannot be queued together, so that `concurrent` and `pressure` are UNKNOWN; start servers with "
    "VLLM_SERVER_DEV_MODE=1",
    RESET_PREFIX_CACHE: "blocks that are never given back are not seen; start servers with VLLM_SERVER_DEV_MODE=1",
    SERVER_INFO: "that the engines have the profile's settings is taken on trust, all but the block size and the "
    "drafts per step, and chunked prefill cannot be proven; start servers with VLLM_SERVER_DEV_MODE=1",
    BY_SOURCE: "chunked prefill and evictions cannot be proven from counters",
    STEP_TOKENS: "it cannot be proven that prompts were prefilled together",
}
"""What it costs when an interface is missing."""
