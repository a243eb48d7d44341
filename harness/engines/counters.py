"""Prometheus counters of an engine, summed over engine labels.

Each text is parsed once and summed whole, so that the numerator and denominator of a ratio cannot come from different
engines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

# Sample names (vLLM 0.32.0) → our names. Histograms contribute their _sum and _count.
_SAMPLES = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:request_success_total": "finished_requests",
    "vllm:request_queue_time_seconds_sum": "queue_seconds",
    "vllm:request_inference_time_seconds_sum": "inference_seconds",
    "vllm:iteration_tokens_total_count": "engine_steps",
    "vllm:nixl_xfer_time_seconds_count": "nixl_transfers",
    "vllm:nixl_bytes_transferred_sum": "nixl_bytes",
    "vllm:nixl_num_descriptors_sum": "nixl_descriptors",
    "vllm:nixl_num_failed_transfers_total": "nixl_failed_transfers",
    "vllm:nixl_num_failed_notifications_total": "nixl_failed_notifications",
    "vllm:nixl_num_kv_expired_reqs_total": "nixl_expired",
}
LATE_COUNTERS = ("nixl_expired", "nixl_failed_transfers", "nixl_failed_notifications")
"""Counters that grow when the engine notices an event, possibly long after the request that caused it: P counts an
expired lease while it serves a later request."""
_OF_A_TRANSFER = (
    "nixl_transfers",
    "nixl_bytes",
    "nixl_descriptors",
    "nixl_failed_transfers",
    "nixl_failed_notifications",
)
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_STEP_TOKENS = "vllm:iteration_tokens_total_bucket"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


_READ = (*_SAMPLES, _BY_SOURCE, _STEP_TOKENS, _BY_POSITION)
ALL = "/metrics"
READ_ONLY = f"{ALL}/?{urlencode([('name[]', name) for name in _READ])}"
"""Path of the counters that are read, a tenth of what an engine publishes: the server of ``prometheus_client``, which
vLLM mounts below ``/metrics/``, leaves out the others."""


def _without_unused(text: str) -> str:
    """Return the text without comments and without the well-known samples that are never read, nine of ten.

    Each request needs a scrape of each engine, and parsing all of them would be most of the harness's own time. What is
    neither stays, so that a text in another format is still refused.
    """
    unused = ("#", "vllm:", "http_", "process_", "python_")
    return "".join(
        line for line in text.splitlines(keepends=True) if line.startswith(_READ) or not line.startswith(unused)
    )


def parse_counters(text: str) -> dict[str, float]:
    """Return totals by our names, summed over engine labels. Absent metrics are absent keys, never zero. Raises
    ValueError when the text is not in Prometheus format, or a total is not finite."""
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(_without_unused(text)):
        for sample in family.samples:
            if sample.name in _SAMPLES:
                totals[_SAMPLES[sample.name]] += sample.value
            elif sample.name == _BY_SOURCE:
                totals[f"prompt_tokens_{sample.labels.get('source', 'unknown')}"] += sample.value
            elif sample.name == _STEP_TOKENS and not sample.labels.get("le", "+Inf").endswith("Inf"):
                totals[f"engine_steps_le_{float(sample.labels['le']):.0f}"] += sample.value
            elif sample.name == _BY_POSITION:
                totals[f"accepted_at_{sample.labels.get('position', '?')}"] += sample.value
    for name, total in totals.items():
        if not math.isfinite(total):
            raise ValueError(f"{name} is {total}")
    return dict(totals)


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the counters that changed and their growth; a counter that is new in ``after`` started at zero."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}


def credited(written: dict[str, float], read: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the growth of P's counters and of D's, with what NIXL moved among D's, whoever counted it.

    The engine that moves KV counts it: D where it reads, P where it writes (``engine.kv_transfer: push``).
    """
    moved = {name: written[name] + read.get(name, 0.0) for name in _OF_A_TRANSFER if name in written}
    return {name: value for name, value in written.items() if name not in moved}, {**read, **moved}


class KvPool(NamedTuple):
    """The KV pool as an engine reports it; None where it does not."""

    blocks: int | None = None
    block_size: int | None = None
    """Tokens of a block of attention KV."""


def parse_kv_pool(text: str) -> KvPool:
    """Return the size of the KV pool and of its blocks."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                told = [sample.labels.get(f, "") for f in ("num_gpu_blocks", "effective_attention_block_size")]
                return KvPool(*(int(value) or None if value.isdigit() else None for value in told))
    return KvPool()
